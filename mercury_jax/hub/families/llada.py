"""LLaDA: an OLMo-style bidirectional transformer trained from scratch (arXiv 2502.09992; LLaDA 1.5: 2505.19223)."""

from __future__ import annotations

from typing import Any

from mercury_jax.config import ModelConfig, NoiseConfig
from mercury_jax.hub import family
from mercury_jax.hub.family import Family, Json, need, register
from mercury_jax.hub.params import TensorSource

# Options of the reference that no published model uses; each would change the arithmetic.
PLAIN = dict(
    block_type=("llama",), activation_type=("silu",), layer_norm_type=("rms",), rope=(True,), alibi=(False,),
    include_bias=(False,), include_qkv_bias=(False,), bias_for_layer_norm=(False,), attention_layer_norm=(False,),
    scale_logits=(False,), input_emb_norm=(False,), block_group_size=(1,), layer_norm_with_affine=(True,),
)  # fmt: skip
KEYS = family.COMMON.plus(
    used={
        "vocab_size d_model n_layers n_heads max_sequence_length": "int",
        "embedding_size n_kv_heads mlp_hidden_size": "int null", "multi_query_attention": "bool null",
        "mlp_ratio rope_theta rms_norm_eps": "number", "weight_tying": "bool",
    },
    only=PLAIN,
    unused={
        "alibi_bias_max": "alibi is false",
        "attention_layer_norm_with_affine": "attention_layer_norm is false",
        "rope_full_precision": "angles are always computed in fp32 here", "precision": "of its training",
        "init_device init_fn init_std init_cutoff_factor": "training only",
    }
)  # fmt: skip
# Ours and theirs; `ff_proj` is the gate. `ff_out` is the last projection of a block, and also the name of the head.
PROJECTIONS = {
    "attention/q": "q_proj", "attention/k": "k_proj", "attention/v": "v_proj", "attention/o": "attn_out",
    "mlp/gate": "ff_proj", "mlp/up": "up_proj", "mlp/down": "ff_out",
}  # fmt: skip


def _config(config: Json) -> ModelConfig:
    heads, width = need(config, "n_heads"), need(config, "d_model")
    return ModelConfig(
        # The embedding may have more rows than the vocabulary.
        vocab=need(config, "embedding_size", "vocab_size"), width=width, layers=need(config, "n_layers"),
        heads=heads, kv_heads=config.get("n_kv_heads") or (1 if config.get("multi_query_attention") else heads),
        head_dim=width // heads, ffn=config.get("mlp_hidden_size") or int(need(config, "mlp_ratio") * width),
        pattern="bidirectional", block=32, rope_theta=float(config.get("rope_theta", 10_000.0)), qk_norm=False,
        tied=bool(config.get("weight_tying", False)), zero_centred=False, scale_embed=False,
        norm_eps=config.get("rms_norm_eps", 1e-5), context=need(config, "max_sequence_length"),
        **family.common_fields({"mask_token_id": 126336, **config}),
    )  # type: ignore[arg-type]  # fmt: skip


def _names(c: ModelConfig) -> dict[str, TensorSource]:
    stem = "model.transformer."
    sources = {"embed": TensorSource(f"{stem}wte.weight"), "norm/scale": TensorSource(f"{stem}ln_f.weight")}
    if not c.tied:
        sources["head"] = TensorSource(f"{stem}ff_out.weight", 1)
    for i in range(c.layers):
        ours, theirs = f"block_{i}/", f"{stem}blocks.{i}."
        sources[f"{ours}attention_norm/scale"] = TensorSource(f"{theirs}attn_norm.weight")
        sources[f"{ours}mlp_norm/scale"] = TensorSource(f"{theirs}ff_norm.weight")
        for mine, name in PROJECTIONS.items():
            # The output projection contracts two of our axes, heads and head_dim.
            inputs = 2 if mine == "attention/o" else 1
            sources[f"{ours}{mine}/w"] = TensorSource(f"{theirs}{name}.weight", inputs)
    return sources


def _export(c: ModelConfig) -> dict[str, Any]:
    return dict(
        architectures=["LLaDAModelLM"], model_type="llada", d_model=c.width, n_layers=c.layers, n_heads=c.heads,
        n_kv_heads=c.kv_heads, mlp_hidden_size=c.ffn, mlp_ratio=4, vocab_size=c.vocab, embedding_size=c.vocab,
        rope_theta=c.rope_theta, rope_full_precision=True, rms_norm_eps=c.norm_eps, max_sequence_length=c.context,
        weight_tying=c.tied, mask_token_id=c.mask, eos_token_id=c.eos, pad_token_id=c.pad, torch_dtype=c.dtype,
        **{key: allowed[0] for key, allowed in PLAIN.items()},
    )  # fmt: skip


register(
    Family(
        name="LLaDA",
        architectures=("LLaDAModelLM",),
        checkpoints=("GSAI-ML/LLaDA-8B-Instruct", "GSAI-ML/LLaDA-8B-Base", "GSAI-ML/LLaDA-1.5"),
        keys=KEYS,
        config=_config,
        names=_names,
        noise=NoiseConfig(kind="absorbing"),
        about="masked, trained from scratch",
        ignored=(),
        export=_export,
        fits=lambda config: "d_model" in config,
        licence="MIT",
    )
)
