"""What the families of Qwen's and Llama's build share: how config.json reads, what the tensors are called."""

from __future__ import annotations

import math
from typing import Any, get_args

from mercury_jax.config import ComputeType, Experts, ModelConfig, RopeScaling, refuse
from mercury_jax.hub.family import Leaf, need
from mercury_jax.hub.keys import BOOL, COMMON, INT, LIST, NULL, NUMBER, TEXT, Json, Keys

# Made from the config; written though it is the embedding once more.
IGNORED = (r"rotary_emb\.inv_freq$", r"^lm_head\.weight$")
FULL, SLIDING = "full_attention", "sliding_attention"

# rope_parameters, or rope_scaling as it was called before transformers 5, by its type
_ROPE = Keys(
    used={"rope_type": TEXT, "type": TEXT, "rope_theta": NUMBER}, only={"partial_rotary_factor": (1, 1.0)}
)
_LENGTH = {"factor": NUMBER, "original_max_position_embeddings": INT}
ROPES: dict[str, Keys] = {
    "default": _ROPE,
    "linear": _ROPE.plus(Keys(used={"factor": NUMBER})),
    "dynamic": _ROPE.plus(Keys(used={"factor": NUMBER})),
    "llama3": _ROPE.plus(Keys(used={**_LENGTH, "low_freq_factor": NUMBER, "high_freq_factor": NUMBER})),
    "yarn": _ROPE.plus(
        Keys(
            used={
                **_LENGTH, "attention_factor": NUMBER + NULL, "beta_fast": NUMBER + NULL, "beta_slow": NUMBER + NULL,
                "mscale": NUMBER + NULL, "mscale_all_dim": NUMBER + NULL, "truncate": BOOL,
            }
        )
    ),
    "longrope": _ROPE.plus(
        Keys(
            used={
                **_LENGTH, "factor": NUMBER + NULL, "attention_factor": NUMBER + NULL,
                "short_factor": LIST, "long_factor": LIST,
            }
        )
    ),
}  # fmt: skip


def rope_keys(found: Json) -> Keys:
    """What may stand beside a type of rotary scaling."""
    kind = found.get("rope_type") or found.get("type") or "default"
    if kind not in ROPES:
        raise refuse("config.json: rope_scaling", kind, ", ".join(ROPES))
    return ROPES[kind]


KEYS = COMMON.plus(
    Keys(
        used={
            "vocab_size": INT, "hidden_size": INT, "intermediate_size": INT, "num_hidden_layers": INT,
            "num_attention_heads": INT, "num_key_value_heads": INT + NULL, "head_dim": INT + NULL,
            "rms_norm_eps": NUMBER, "max_position_embeddings": INT, "original_max_position_embeddings": INT + NULL,
            "rope_theta": NUMBER, "tie_word_embeddings": BOOL,
        },
        only={"hidden_act": ("silu", "swish"), "partial_rotary_factor": (1, 1.0, None), "mlp_bias": (False,)},
        nested={"rope_parameters": rope_keys, "rope_scaling": rope_keys},
    )
)  # fmt: skip
# Of a model that knows no sliding window: one that is named and not used.
NO_WINDOW = Keys(
    used={"layer_types": LIST + NULL},
    only={"use_sliding_window": (False, None)},
    unused={
        "sliding_window": "use_sliding_window is false",
        "max_window_layers": "use_sliding_window is false",
    },
)
WINDOW = Keys(
    used={
        "use_sliding_window": BOOL, "sliding_window": INT + NULL, "max_window_layers": INT, "layer_types": LIST + NULL,
    }
)  # fmt: skip
FIXED_BIAS = Keys(
    unused={"attention_bias": "the class has biases on queries, keys and values, and no others"}
)
NO_BIAS = Keys(only={"attention_bias": (False,)})
BIAS = Keys(used={"attention_bias": BOOL})
EXPERTS = Keys(
    used={
        "num_experts": INT, "num_local_experts": INT, "num_experts_per_tok": INT, "moe_intermediate_size": INT,
        "norm_topk_prob": BOOL, "decoder_sparse_step": INT, "mlp_only_layers": LIST + NULL,
    }
)  # fmt: skip


def sizes(config: Json, **ours: Any) -> dict[str, Any]:
    """ModelConfig's fields from a config.json of this kind; `ours` says what the family adds or overrides."""
    heads, width = need(config, "num_attention_heads"), need(config, "hidden_size")
    if heads < 1:
        raise refuse("config.json: num_attention_heads", heads, "1 or more")
    theta, scaling = rope_of(config)
    kv_heads, head_dim = config.get("num_key_value_heads"), config.get("head_dim")
    bias = bool(config.get("attention_bias", False))
    found = dict(
        vocab=need(config, "vocab_size"), width=width, layers=need(config, "num_hidden_layers"), heads=heads,
        kv_heads=heads if kv_heads is None else kv_heads, head_dim=width // heads if head_dim is None else head_dim,
        ffn=need(config, "intermediate_size"), rope_theta=theta, rope_scaling=scaling, qk_norm=False,
        qkv_bias=bias, out_bias=bias, mlp_bias=config.get("mlp_bias", False),
        tied=config.get("tie_word_embeddings", False),
        zero_centred=False, scale_embed=False, norm_eps=config.get("rms_norm_eps", 1e-6),
        context=context_of(config, scaling), dtype=dtype_of(config), **special_ids(config), **windows(config),
    )  # fmt: skip
    return found | ours


def windows(config: Json) -> dict[str, Any]:
    """Which layers see how far: `layer_types`, or without it every layer from `max_window_layers` on has the window."""
    layers, kinds = need(config, "num_hidden_layers"), config.get("layer_types")
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window", False) else None
    if kinds is None:
        first = config.get("max_window_layers", 28)
        seen = range(layers if window is None else min(max(first, 0), layers))
    else:
        check_layer_types(kinds, layers)
        seen = [i for i in range(layers) if kinds[i] == FULL]
        if window is None and len(seen) < layers:
            raise refuse("config.json: layer_types", SLIDING, f"{FULL}: no sliding window is used")
    if window is None or len(seen) == layers:
        return {}
    return dict(window=window, global_layers=tuple(seen))


def check_layer_types(kinds: list[Any], layers: int) -> None:
    """Refuse a list of another length, and kinds of attention that we do not build."""
    if len(kinds) != layers:
        raise refuse("config.json: layer_types", f"{len(kinds)} entries", f"{layers}, one a layer")
    for kind in kinds:
        if kind not in (FULL, SLIDING):
            raise refuse("config.json: layer_types", kind, f"{FULL}, {SLIDING}")


def autoregressive(config: Json, **ours: Any) -> ModelConfig:
    """The same for a model that predicts the next token and does nothing else."""
    causal: dict[str, Any] = dict(pattern="block_causal", block=1, predicts_next=True, mask=None)
    return ModelConfig(**(sizes(config) | causal | ours))


def special_ids(config: Json) -> dict[str, Any]:
    """mask, pad, eos and further ends; config.json may give a list of ends, and None for padding."""
    ends = listed_ids(config.get("eos_token_id")) or [0]
    pad = config.get("pad_token_id")
    pad = ends[0] if pad is None or pad < 0 else pad
    return dict(mask=config.get("mask_token_id"), pad=pad, eos=ends[0], ends=tuple(ends[1:]))


def listed_ids(value: Any) -> list[int]:
    """`eos_token_id`: one id, several, or none."""
    found = list(value) if isinstance(value, list | tuple) else [] if value is None else [value]
    if not all(isinstance(x, int) for x in found):
        raise refuse("config.json: eos_token_id", value, "an id, or a list of ids")
    return found


def dtype_of(config: Json) -> Any:
    """The dtype that the checkpoint names, whatever the release of transformers called the key."""
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    if name not in get_args(ComputeType):
        raise refuse("config.json: dtype", name, ", ".join(get_args(ComputeType)))
    return name


def context_of(config: Json, scaling: RopeScaling | None) -> int:
    """Most positions of a sequence; as many as the frequencies hold for, where these change with the length."""
    most = config.get("max_position_embeddings", 2048)
    return min(most, scaling.original) if scaling is not None and scaling.bounded else most


def rope_of(config: Json) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) from `rope_parameters`, or from `rope_theta` and `rope_scaling` before transformers 5."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if config.get("rope_parameters") and config.get("rope_scaling"):
        raise refuse("config.json: rope_scaling", config["rope_scaling"], "null beside rope_parameters")
    theta = float(found.get("rope_theta", config.get("rope_theta", 10_000.0)))
    if not theta > 1:
        raise refuse("config.json: rope_theta", theta, "more than 1")
    kind = found.get("rope_type") or found.get("type") or "default"
    if kind == "default":
        return theta, None
    most = config.get("max_position_embeddings", 2048)
    if kind == "linear":
        return theta, RopeScaling(kind=kind, factor=float(need(found, "factor")))
    if kind == "dynamic":
        most = need(config, "max_position_embeddings")
        return theta, RopeScaling(kind=kind, factor=float(need(found, "factor")), original=most)
    # A length beside rope_parameters, as Phi 3 has it, goes before the one within.
    original = config.get("original_max_position_embeddings")
    original = found.get("original_max_position_embeddings", most) if original is None else original
    if original < 2:
        raise refuse("config.json: original_max_position_embeddings", original, "2 or more")
    return theta, _stretched(kind, found, original, most)


def _stretched(kind: Any, found: Json, original: int, most: int) -> RopeScaling:
    """Of the kinds that know an original context of `original` positions, in a model of `most`."""
    if kind == "llama3":
        low, high = need(found, "low_freq_factor"), need(found, "high_freq_factor")
        factor = float(need(found, "factor"))
        return RopeScaling(kind=kind, factor=factor, original=original, low=float(low), high=float(high))
    if kind == "yarn":
        factor = float(need(found, "factor"))
        return RopeScaling(
            kind=kind, factor=factor, original=original, fast=float(found.get("beta_fast") or 32),
            slow=float(found.get("beta_slow") or 1), attention=_yarn_attention(found, factor),
            truncate=found.get("truncate", True),
        )  # fmt: skip
    short, long = (tuple(map(float, need(found, f"{name}_factor"))) for name in ("short", "long"))
    factor = found.get("factor")
    attention = found.get("attention_factor")
    if attention is None:
        factor = most / original if factor is None else factor
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return RopeScaling(
        kind=kind,
        factor=most / original,
        original=original,
        attention=float(attention),
        short=short,
        long=long,
    )


def _yarn_attention(found: Json, factor: float) -> float:
    """What multiplies cos and sin: as given, or DeepSeek's ratio of two scales, or YaRN's 0.1 ln(factor) + 1."""
    given, top, bottom = (found.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim"))
    scale = lambda m: 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0
    if given is not None:
        return float(given)
    return scale(top) / scale(bottom) if top and bottom else scale(1.0)


def experts_of(config: Json, **ours: Any) -> Experts | None:
    """Qwen3's mixture: which layers have one, how many experts, how they are weighed; None where there is none."""
    counts = {config[key] for key in ("num_experts", "num_local_experts") if key in config}
    if not any(counts):
        return None
    if len(counts) > 1:
        raise refuse("config.json: num_local_experts", sorted(counts), "the same number as num_experts")
    layers, step = need(config, "num_hidden_layers"), config.get("decoder_sparse_step", 1)
    if step < 1:
        raise refuse("config.json: decoder_sparse_step", step, "1 or more")
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
            found |= feed_forward(f"{ours}mlp/", f"{theirs}mlp.", c.mlp_bias)
        else:
            found |= mixture(c.experts, f"{ours}moe/", f"{theirs}mlp.")
    return found


def attention(c: ModelConfig, ours: str, theirs: str) -> dict[str, Leaf]:
    """Projections, their biases, the norms of queries and keys."""
    found = {f"{ours}{p}/w": Leaf(f"{theirs}{p}_proj.weight", 1) for p in "qkv"}
    found[f"{ours}o/w"] = Leaf(f"{theirs}o_proj.weight", 2)
    if c.qkv_bias:
        found |= {f"{ours}{p}/b": Leaf(f"{theirs}{p}_proj.bias", fold=2) for p in "qkv"}
    if c.out_bias:
        found[f"{ours}o/b"] = Leaf(f"{theirs}o_proj.bias")
    if c.qk_norm:
        found |= {f"{ours}{p}_norm/scale": Leaf(f"{theirs}{p}_norm.weight") for p in "qk"}
    return found


def feed_forward(ours: str, theirs: str, bias: bool = False) -> dict[str, Leaf]:
    """gate, up and down."""
    parts = ("gate", "up", "down")
    found = {f"{ours}{p}/w": Leaf(f"{theirs}{p}_proj.weight", 1) for p in parts}
    return found | ({f"{ours}{p}/b": Leaf(f"{theirs}{p}_proj.bias") for p in parts} if bias else {})


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
        max_position_embeddings=_longest(c), tie_word_embeddings=c.tied, attention_bias=c.qkv_bias,
        pad_token_id=c.pad, eos_token_id=[c.eos, *c.ends] if c.ends else c.eos, torch_dtype=c.dtype,
    )  # fmt: skip
    if c.mask is not None:
        found["mask_token_id"] = c.mask
    if c.mlp_bias:
        found["mlp_bias"] = True
    if c.window is not None:
        kinds = [FULL if c.is_global(i) else SLIDING for i in range(c.layers)]
        found |= dict(use_sliding_window=True, sliding_window=c.window, layer_types=kinds)
    if c.experts is not None:
        e = c.experts
        found |= dict(
            num_experts=e.count, num_experts_per_tok=e.active, moe_intermediate_size=e.width,
            norm_topk_prob=e.renormalise, mlp_only_layers=list(e.dense), decoder_sparse_step=1,
        )  # fmt: skip
    return found | theirs


def _longest(c: ModelConfig) -> int:
    """`max_position_embeddings`: the context, or under longrope what the file said before `context_of` cut it."""
    s = c.rope_scaling
    return round(s.original * s.factor) if s is not None and s.kind == "longrope" else c.context


def _scaling(s: RopeScaling | None) -> dict[str, Any] | None:
    if s is None:
        return None
    found: dict[str, Any] = {"rope_type": s.kind}
    if s.kind != "longrope":
        found["factor"] = s.factor
    if s.kind not in ("linear", "dynamic"):
        found["original_max_position_embeddings"] = s.original
    if s.kind == "llama3":
        found |= {"low_freq_factor": s.low, "high_freq_factor": s.high}
    if s.kind == "yarn":
        found |= {
            "beta_fast": s.fast,
            "beta_slow": s.slow,
            "attention_factor": s.attention,
            "truncate": s.truncate,
        }
    if s.kind == "longrope":
        found |= {"short_factor": list(s.short), "long_factor": list(s.long), "attention_factor": s.attention}
    return found
