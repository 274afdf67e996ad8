"""What the families of Qwen's and Llama's build share: how config.json reads, what the tensors are called."""

from __future__ import annotations

import math
from typing import Any

from mercury_jax.config import Experts, ModelConfig, RopeScaling, refuse
from mercury_jax.hub.family import Json, Leaf, need, only

# Made from the config; written though it is the embedding once more.
IGNORED = (r"rotary_emb\.inv_freq$", r"^lm_head\.weight$")


def sizes(config: Json, **ours: Any) -> dict[str, Any]:
    """ModelConfig's fields from a config.json of this kind; `ours` says what the family adds or overrides."""
    only(config, "hidden_act", "silu", "swish")
    for key in ("mlp_bias", "use_sliding_window", "quantization_config"):
        only(config, key, False)
    heads, width = need(config, "num_attention_heads"), need(config, "hidden_size")
    theta, scaling = rope_of(config)
    found = dict(
        vocab=need(config, "vocab_size"), width=width, layers=need(config, "num_hidden_layers"), heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads, head_dim=config.get("head_dim") or width // heads,
        ffn=need(config, "intermediate_size"), rope_theta=theta, rope_scaling=scaling, qk_norm=False,
        qkv_bias=bool(config.get("attention_bias", False)), tied=bool(config.get("tie_word_embeddings", False)),
        zero_centred=False, scale_embed=False, norm_eps=config.get("rms_norm_eps", 1e-6),
        context=config.get("max_position_embeddings", 2048), dtype=dtype_of(config), **special_ids(config),
    )  # fmt: skip
    return found | ours


def autoregressive(config: Json, **ours: Any) -> ModelConfig:
    """The same for a model that predicts the next token and does nothing else."""
    causal: dict[str, Any] = dict(pattern="block_causal", block=1, predicts_next=True, mask=None)
    return ModelConfig(**(sizes(config) | causal | ours))


def special_ids(config: Json) -> dict[str, Any]:
    """mask, pad, eos and further ends; config.json may give a list of ends, and None for padding."""
    ends = config.get("eos_token_id")
    ends = [0 if ends is None else ends] if not isinstance(ends, list | tuple) else list(ends)
    pad = config.get("pad_token_id")
    pad = ends[0] if pad is None or pad < 0 else pad
    return dict(mask=config.get("mask_token_id"), pad=pad, eos=ends[0], ends=tuple(ends[1:]))


def dtype_of(config: Json) -> Any:
    """The dtype that the checkpoint names, whatever the release of transformers called the key."""
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    return name if name in ("float32", "bfloat16", "float16", "float64") else "float32"


def rope_of(config: Json) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) from `rope_parameters`, or from `rope_theta` and `rope_scaling` before transformers 5."""
    found = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(found.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    kind = found.get("rope_type") or found.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind not in ("linear", "llama3", "yarn"):
        raise refuse("config.json: rope_scaling", kind, "default, linear, llama3 or yarn")
    factor = float(need(found, "factor"))
    original = found.get("original_max_position_embeddings") or config.get("max_position_embeddings", 8192)
    more: dict[str, Any] = {}
    if kind == "llama3":
        more = dict(low=float(need(found, "low_freq_factor")), high=float(need(found, "high_freq_factor")))
    if kind == "yarn":
        more = dict(
            fast=float(found.get("beta_fast") or 32), slow=float(found.get("beta_slow") or 1),
            attention=float(found.get("attention_factor") or 0.1 * math.log(max(factor, 1.0)) + 1.0),
        )  # fmt: skip
    return theta, RopeScaling(kind=kind, factor=factor, original=int(original), **more)


def experts_of(config: Json, **ours: Any) -> Experts | None:
    """Qwen3's mixture: which layers have one, how many experts, how they are weighed; None where there is none."""
    if not (config.get("num_experts") or config.get("num_local_experts")):
        return None
    layers, step = need(config, "num_hidden_layers"), config.get("decoder_sparse_step") or 1
    plain = set(config.get("mlp_only_layers") or [])
    dense = tuple(i for i in range(layers) if i in plain or (i + 1) % step)
    found: dict[str, Any] = dict(
        count=need(config, "num_experts", "num_local_experts"), active=need(config, "num_experts_per_tok"),
        width=need(config, "moe_intermediate_size"), renormalise=bool(config.get("norm_topk_prob", False)),
        dense=dense,
    )  # fmt: skip
    return Experts(**(found | ours))


def names(c: ModelConfig, stem: str = "model.") -> dict[str, Leaf]:
    """Qwen's and Llama's names."""
    found = {
        "embed": Leaf(f"{stem}embed_tokens.weight"),
        "norm/scale": Leaf(f"{stem}norm.weight"),
    }
    if not c.tied:
        found["head"] = Leaf("lm_head.weight", 1)
    for i in range(c.layers):
        ours, theirs = f"block_{i}/", f"{stem}layers.{i}."
        found |= {
            f"{ours}attention_norm/scale": Leaf(f"{theirs}input_layernorm.weight"),
            f"{ours}mlp_norm/scale": Leaf(f"{theirs}post_attention_layernorm.weight"),
            **attention(c, f"{ours}attention/", f"{theirs}self_attn."),
        }
        if c.experts is None or i in c.experts.dense:
            found |= feed_forward(f"{ours}mlp/", f"{theirs}mlp.")
        else:
            found |= mixture(c.experts, f"{ours}moe/", f"{theirs}mlp.")
    return found


def attention(c: ModelConfig, ours: str, theirs: str) -> dict[str, Leaf]:
    """Projections, their biases, the norms of queries and keys."""
    found = {f"{ours}{p}/w": Leaf(f"{theirs}{p}_proj.weight", 1) for p in "qkv"}
    found[f"{ours}o/w"] = Leaf(f"{theirs}o_proj.weight", 2)
    if c.qkv_bias:
        found |= {f"{ours}{p}/b": Leaf(f"{theirs}{p}_proj.bias", fold=2) for p in "qkv"}
    if c.qk_norm:
        found |= {f"{ours}{p}_norm/scale": Leaf(f"{theirs}{p}_norm.weight") for p in "qk"}
    return found


def feed_forward(ours: str, theirs: str) -> dict[str, Leaf]:
    """gate, up and down."""
    return {f"{ours}{p}/w": Leaf(f"{theirs}{p}_proj.weight", 1) for p in ("gate", "up", "down")}


def mixture(e: Experts, ours: str, theirs: str) -> dict[str, Leaf]:
    """The router and one gate, up and down for each expert."""
    each = f"{theirs}experts.{{e}}."
    return {
        f"{ours}router": Leaf(f"{theirs}gate.weight", 1),
        f"{ours}gate_up": Leaf((f"{each}gate_proj.weight", f"{each}up_proj.weight"), 1, e.count),
        f"{ours}down": Leaf(f"{each}down_proj.weight", 1, e.count),
    }


def export(c: ModelConfig, **theirs: Any) -> dict[str, Any]:
    """Our config as a config.json that transformers reads."""
    found: dict[str, Any] = dict(
        vocab_size=c.vocab, hidden_size=c.width, num_hidden_layers=c.layers, num_attention_heads=c.heads,
        num_key_value_heads=c.kv_heads, head_dim=c.head_dim, intermediate_size=c.ffn, hidden_act="silu",
        rope_theta=c.rope_theta, rope_scaling=_scaling(c.rope_scaling), rms_norm_eps=c.norm_eps,
        max_position_embeddings=c.context, tie_word_embeddings=c.tied, attention_bias=c.qkv_bias,
        pad_token_id=c.pad, eos_token_id=[c.eos, *c.ends] if c.ends else c.eos, torch_dtype=c.dtype,
    )  # fmt: skip
    if c.mask is not None:
        found["mask_token_id"] = c.mask
    if c.experts is not None:
        e = c.experts
        found |= dict(
            num_experts=e.count, num_experts_per_tok=e.active, moe_intermediate_size=e.width,
            norm_topk_prob=e.renormalise, mlp_only_layers=list(e.dense), decoder_sparse_step=1,
        )  # fmt: skip
    return found | theirs


def _scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    found: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind != "linear":
        found["original_max_position_embeddings"] = scaling.original
    if scaling.kind == "llama3":
        found |= {"low_freq_factor": scaling.low, "high_freq_factor": scaling.high}
    if scaling.kind == "yarn":
        found |= {"beta_fast": scaling.fast, "beta_slow": scaling.slow, "attention_factor": scaling.attention}
    return found
