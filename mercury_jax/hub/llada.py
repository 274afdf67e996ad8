"""LLaDA: an OLMo-style transformer, bidirectional, masked from the first day (arXiv 2502.09992; 1.5: 2505.19223)."""

from __future__ import annotations

from typing import Any

from mercury_jax.config import ModelConfig, NoiseConfig
from mercury_jax.hub import decoder
from mercury_jax.hub.family import Family, Leaf, need
from mercury_jax.hub.keys import BOOL, COMMON, INT, NULL, NUMBER, Json, Keys

# What the code could do and no published model does; each would change the arithmetic.
PLAIN = dict(
    block_type=("llama",), activation_type=("silu",), layer_norm_type=("rms",), rope=(True,), alibi=(False,),
    include_bias=(False,), include_qkv_bias=(False,), bias_for_layer_norm=(False,), attention_layer_norm=(False,),
    scale_logits=(False,), input_emb_norm=(False,), block_group_size=(1,), layer_norm_with_affine=(True,),
)  # fmt: skip
KEYS = COMMON.plus(
    Keys(
        used={
            "vocab_size": INT, "embedding_size": INT + NULL, "d_model": INT, "n_layers": INT, "n_heads": INT,
            "n_kv_heads": INT + NULL, "multi_query_attention": BOOL + NULL, "mlp_hidden_size": INT + NULL,
            "mlp_ratio": NUMBER, "rope_theta": NUMBER, "rms_norm_eps": NUMBER, "max_sequence_length": INT,
            "weight_tying": BOOL,
        },
        only=PLAIN,
        unused={
            "alibi_bias_max": "alibi is false",
            "attention_layer_norm_with_affine": "attention_layer_norm is false",
            "rope_full_precision": "angles are computed in fp32 here, whatever it says",
            "precision": "of its training",
            **dict.fromkeys(("init_device", "init_fn", "init_std", "init_cutoff_factor"), "training only"),
        },
    )
)  # fmt: skip
_OURS = dict(q="q_proj", k="k_proj", v="v_proj", o="attn_out")
_MLP = dict(gate="ff_proj", up="up_proj", down="ff_out")


def config(config: Json) -> ModelConfig:
    """LLaDA's config.json; the rows of the embedding may outnumber the vocabulary."""
    heads, width = need(config, "n_heads"), need(config, "d_model")
    ids = decoder.special_ids({"mask_token_id": 126336, **config})
    return ModelConfig(
        vocab=need(config, "embedding_size", "vocab_size"), width=width, layers=need(config, "n_layers"),
        heads=heads, kv_heads=config.get("n_kv_heads") or (1 if config.get("multi_query_attention") else heads),
        head_dim=width // heads, ffn=config.get("mlp_hidden_size") or int(need(config, "mlp_ratio") * width),
        pattern="bidirectional", block=32, rope_theta=float(config.get("rope_theta", 10_000.0)), qk_norm=False,
        tied=bool(config.get("weight_tying", False)), zero_centred=False, scale_embed=False,
        norm_eps=config.get("rms_norm_eps", 1e-5), context=need(config, "max_sequence_length"),
        dtype=decoder.dtype_of(config), **ids,
    )  # type: ignore[arg-type]  # fmt: skip


def names(c: ModelConfig) -> dict[str, Leaf]:
    """`ff_proj` is the gate, `ff_out` the last projection of a block, and once more the head."""
    stem = "model.transformer."
    found = {"embed": Leaf(f"{stem}wte.weight"), "norm/scale": Leaf(f"{stem}ln_f.weight")}
    if not c.tied:
        found["head"] = Leaf(f"{stem}ff_out.weight", 1)
    for i in range(c.layers):
        ours, theirs = f"block_{i}/", f"{stem}blocks.{i}."
        found[f"{ours}attention_norm/scale"] = Leaf(f"{theirs}attn_norm.weight")
        found[f"{ours}mlp_norm/scale"] = Leaf(f"{theirs}ff_norm.weight")
        for mine, name in _OURS.items():
            found[f"{ours}attention/{mine}/w"] = Leaf(f"{theirs}{name}.weight", 2 if mine == "o" else 1)
        for mine, name in _MLP.items():
            found[f"{ours}mlp/{mine}/w"] = Leaf(f"{theirs}{name}.weight", 1)
    return found


def export(c: ModelConfig) -> dict[str, Any]:
    """Our config as LLaDA's."""
    return dict(
        architectures=["LLaDAModelLM"], model_type="llada", d_model=c.width, n_layers=c.layers, n_heads=c.heads,
        n_kv_heads=c.kv_heads, mlp_hidden_size=c.ffn, mlp_ratio=4, vocab_size=c.vocab, embedding_size=c.vocab,
        rope_theta=c.rope_theta, rope_full_precision=True, rms_norm_eps=c.norm_eps, max_sequence_length=c.context,
        weight_tying=c.tied, mask_token_id=c.mask, eos_token_id=c.eos, pad_token_id=c.pad, torch_dtype=c.dtype,
        **{key: allowed[0] for key, allowed in PLAIN.items()},
    )  # fmt: skip


LLADA = Family(
    name="LLaDA",
    architectures=("LLaDAModelLM",),
    checkpoints=("GSAI-ML/LLaDA-8B-Instruct", "GSAI-ML/LLaDA-8B-Base", "GSAI-ML/LLaDA-1.5"),
    keys=KEYS,
    config=config,
    names=names,
    noise=NoiseConfig(kind="absorbing"),
    about="masked, trained from scratch",
    export=export,
    fits=lambda config: "d_model" in config,
    licence="MIT",
)
