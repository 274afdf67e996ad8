"""The LLaDA families: LLaDA and LLaDA 1.5 (dense), LLaDA-MoE, and LLaDA2.0, 2.1 and DMax (mixture of experts).

- LLaDA (arXiv 2502.09992; 1.5: 2505.19223) is a bidirectional transformer with the tensor names of OLMo.
- LLaDA-MoE (2509.24389) is bidirectional and similar to OLMoE. Its config.json has the `model_type` of LLaDA, so the
  family is found by `architectures`.
- LLaDA2 (2512.15745; 2.1: 2602.08676) is Ling's mixture of experts with a sigmoid router and block-causal attention.
"""

from __future__ import annotations

from typing import Any

from mercury_jax.config import Experts, ModelConfig, NoiseConfig
from mercury_jax.hub import family
from mercury_jax.hub.families.qwen_llama import export_config
from mercury_jax.hub.family import UNUSED, Family, Json, allow, need, register
from mercury_jax.hub.params import TensorSource

# Options of the reference implementation that no published model uses. Other values would change the arithmetic.
PLAIN = dict(
    block_type=("llama",), activation_type=("silu",), layer_norm_type=("rms",), rope=(True,), alibi=(False,),
    include_bias=(False,), include_qkv_bias=(False,), bias_for_layer_norm=(False,), attention_layer_norm=(False,),
    scale_logits=(False,), input_emb_norm=(False,), block_group_size=(1,), layer_norm_with_affine=(True,),
)  # fmt: skip
DENSE_KEYS = family.COMMON | PLAIN | allow({
    "vocab_size d_model n_layers n_heads max_sequence_length": int,
    "embedding_size n_kv_heads mlp_hidden_size": int | None, "multi_query_attention": bool | None,
    "mlp_ratio rope_theta rms_norm_eps": float, "weight_tying": bool,
    "alibi_bias_max attention_layer_norm_with_affine": UNUSED,  # of what must be false
    "rope_full_precision": UNUSED,  # angles are always computed in fp32 here
    "precision init_device init_fn init_std init_cutoff_factor": UNUSED,  # of its training
})  # fmt: skip
# Our names -> names in the checkpoint. `ff_proj` is the gate of the MLP. `ff_out` names both the down projection of a
# layer and, outside of the layers, the output head.
PROJECTIONS = {
    "attention/q": "q_proj", "attention/k": "k_proj", "attention/v": "v_proj", "attention/o": "attn_out",
    "mlp/gate": "ff_proj", "mlp/up": "up_proj", "mlp/down": "ff_out",
}  # fmt: skip


def _dense_config(config: Json) -> ModelConfig:
    heads, width = need(config, "n_heads"), need(config, "d_model")
    return ModelConfig(
        # The embedding, and with it the logits, may have more rows than the tokenizer has tokens.
        vocab=need(config, "embedding_size", "vocab_size"), width=width, layers=need(config, "n_layers"),
        heads=heads, kv_heads=config.get("n_kv_heads") or (1 if config.get("multi_query_attention") else heads),
        head_dim=width // heads, ffn=config.get("mlp_hidden_size") or int(need(config, "mlp_ratio") * width),
        pattern="bidirectional", block=32, rope_theta=float(config.get("rope_theta", 10_000.0)), qk_norm=False,
        tied=bool(config.get("weight_tying", False)), zero_centred=False, scale_embed=False,
        norm_eps=config.get("rms_norm_eps", 1e-5), context=need(config, "max_sequence_length"),
        **family.common_fields({"mask_token_id": 126336, **config}),
    )  # type: ignore[arg-type]  # fmt: skip


def _dense_names(c: ModelConfig) -> dict[str, TensorSource]:
    stem = "model.transformer."
    sources = {"embed": TensorSource(f"{stem}wte.weight"), "norm/scale": TensorSource(f"{stem}ln_f.weight")}
    if not c.tied:
        sources["head"] = TensorSource(f"{stem}ff_out.weight", 1)
    for i in range(c.layers):
        ours, theirs = f"block_{i}/", f"{stem}blocks.{i}."
        sources[f"{ours}attention_norm/scale"] = TensorSource(f"{theirs}attn_norm.weight")
        sources[f"{ours}mlp_norm/scale"] = TensorSource(f"{theirs}ff_norm.weight")
        for mine, name in PROJECTIONS.items():
            # The input axis of the output projection is heads and head_dim, two axes in our parameter.
            inputs = 2 if mine == "attention/o" else 1
            sources[f"{ours}{mine}/w"] = TensorSource(f"{theirs}{name}.weight", inputs)
    return sources


def _dense_export(c: ModelConfig) -> dict[str, Any]:
    return dict(
        architectures=["LLaDAModelLM"], model_type="llada", d_model=c.width, n_layers=c.layers, n_heads=c.heads,
        n_kv_heads=c.kv_heads, mlp_hidden_size=c.ffn, mlp_ratio=4, vocab_size=c.vocab, embedding_size=c.vocab,
        rope_theta=c.rope_theta, rope_full_precision=True, rms_norm_eps=c.norm_eps, max_sequence_length=c.context,
        weight_tying=c.tied, mask_token_id=c.mask, eos_token_id=c.eos, pad_token_id=c.pad, torch_dtype=c.dtype,
        **{key: allowed[0] for key, allowed in PLAIN.items()},
    )  # fmt: skip


# `generate.py` with the arguments of its `main`: each step accepts the most confident token, block by block.
LLADA_DECODING = {
    "rule": "confidence", "temperature": 0.0, "block": 32,
    "source": "ML-GSAI/LLaDA generate.py: low_confidence, steps = gen_length, block_length 32, temperature 0",
}  # fmt: skip

register(
    Family(
        name="LLaDA",
        architectures=("LLaDAModelLM",),
        checkpoints=("GSAI-ML/LLaDA-8B-Instruct", "GSAI-ML/LLaDA-8B-Base", "GSAI-ML/LLaDA-1.5"),
        keys=DENSE_KEYS,
        config=_dense_config,
        names=_dense_names,
        noise=NoiseConfig(kind="absorbing"),
        about="masked, trained from scratch",
        ignored=(),
        export=_dense_export,
        fits=lambda config: "d_model" in config,
        licence="MIT",
        decoding=LLADA_DECODING,
    )
)


# --- with experts

MASK, BLOCK = 156895, 32  # constants of the reference implementation, if config.json does not have them

MOE_KEYS = family.KEYS | family.NO_WINDOW | allow({
    "num_experts num_experts_per_tok expert_intermediate_size": int, "dense_intermediate_size": int | None,
    "moe_layer_freq": list | None, "qk_layernorm": bool, "partial_rotary_factor": float | None,
    "moe_router_score_function": ("softmax",), "moe_router_enable_expert_bias attention_bias": (False,),
    "norm_topk_prob": (False, None),
    "router_num_group router_topk_group shared_expert_intermediate_size clip_qkv": (None,),
    "routed_scaling_factor": (1, 1.0),
})  # fmt: skip


def _moe_config(config: Json) -> ModelConfig:
    layers = need(config, "num_hidden_layers")
    # Which layers have experts, as a list of 0 and 1.
    frequency = config.get("moe_layer_freq") or [1] * layers
    experts = Experts(
        count=need(config, "num_experts"), active=need(config, "num_experts_per_tok"),
        width=need(config, "expert_intermediate_size"), renormalise=False,
        dense=tuple(i for i in range(layers) if not frequency[i]),
    )  # fmt: skip
    ffn = config.get("dense_intermediate_size") or experts.width
    return family.decoder_config(
        {**config, "intermediate_size": ffn}, default_mask=MASK, experts=experts,
        qk_norm=bool(config.get("qk_layernorm")), pattern="bidirectional", block=32,
        rope_fraction=float(config.get("partial_rotary_factor") or 1.0),
    )  # fmt: skip


def _moe_export(c: ModelConfig) -> dict[str, Any]:
    e = c.experts
    assert e is not None
    return export_config(
        c, "LLaDAMoEModelLM", "llada",
        mlp_only_layers=..., decoder_sparse_step=..., moe_intermediate_size=..., intermediate_size=...,
        dense_intermediate_size=c.ffn, expert_intermediate_size=e.width, qk_layernorm=c.qk_norm,
        moe_layer_freq=[0 if i in e.dense else 1 for i in range(c.layers)], moe_router_score_function="softmax",
        moe_router_enable_expert_bias=False, norm_topk_prob=None, partial_rotary_factor=c.rope_fraction,
        routed_scaling_factor=1,
    )  # fmt: skip


LLADA2_KEYS = family.KEYS | family.NO_WINDOW | allow({
    "num_experts num_experts_per_tok moe_intermediate_size n_group topk_group first_k_dense_replace": int,
    "block_size": int, "num_shared_experts": int | None,
    "routed_scaling_factor partial_rotary_factor": float, "use_qk_norm": bool, "score_function": ("sigmoid",),
    "use_bias use_qkv_bias norm_head norm_softmax using_split_qkv_in_self_attention attention_bias": (False,),
    "use_rmsnorm moe_router_enable_expert_bias": (True,),
    "expert_capacity": (None, 0), "num_nextn_predict_layers": (0, None),
    "norm_topk_prob": UNUSED,  # the class divides by the sum wherever it chooses more than one expert
    "router_dtype": UNUSED,  # the router always computes in fp32 here
    "rotary_dim": UNUSED,  # partial_rotary_factor says it
})  # fmt: skip


def _llada2_config(config: Json) -> ModelConfig:
    dense = tuple(range(config.get("first_k_dense_replace", 0)))
    width = need(config, "moe_intermediate_size")
    experts = Experts(
        count=need(config, "num_experts"), active=need(config, "num_experts_per_tok"), width=width, score="sigmoid",
        renormalise=need(config, "num_experts_per_tok") > 1, scale=config.get("routed_scaling_factor", 1.0),
        groups=config.get("n_group", 1), active_groups=config.get("topk_group", 1), correction=True,
        shared=width * (config.get("num_shared_experts") or 0), dense=dense,
    )  # fmt: skip
    return family.decoder_config(
        config, default_mask=MASK, experts=experts,
        qk_norm=config.get("use_qk_norm", True), rope_fraction=config.get("partial_rotary_factor", 1.0),
        qkv_bias=False, pattern="block_causal", block=config.get("block_size", BLOCK),
    )  # fmt: skip


def _llada2_names(c: ModelConfig) -> dict[str, TensorSource]:
    assert c.experts is not None
    sources = {
        "embed": TensorSource("model.word_embeddings.weight"),
        "norm/scale": TensorSource("model.norm.weight"),
    }
    if not c.tied:
        sources["head"] = TensorSource("lm_head.weight", 1)
    # One fused tensor [q + 2 kv, width] has the rows of queries, then keys, then values.
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    rows = dict(q=(0, q), k=(q, q + kv), v=(q + kv, q + 2 * kv))
    for i in range(c.layers):
        ours, theirs = f"block_{i}/", f"model.layers.{i}."
        sources[f"{ours}attention_norm/scale"] = TensorSource(f"{theirs}input_layernorm.weight")
        sources[f"{ours}mlp_norm/scale"] = TensorSource(f"{theirs}post_attention_layernorm.weight")
        mine, attention = f"{ours}attention/", f"{theirs}attention."
        for p, (first, last) in rows.items():
            fused = f"{attention}query_key_value.weight"
            sources[f"{mine}{p}/w"] = TensorSource(fused, 1, rows=(first, last, q + 2 * kv))
        sources[f"{mine}o/w"] = TensorSource(f"{attention}dense.weight", 2)
        if c.qk_norm:
            sources[f"{mine}q_norm/scale"] = TensorSource(f"{attention}query_layernorm.weight")
            sources[f"{mine}k_norm/scale"] = TensorSource(f"{attention}key_layernorm.weight")
        if i in c.experts.dense:
            sources |= family.mlp_names(f"{ours}mlp/", f"{theirs}mlp.")
            continue
        sources |= family.expert_names(c.experts, f"{ours}moe/", f"{theirs}mlp.")
        sources[f"{ours}moe/correction"] = TensorSource(f"{theirs}mlp.gate.expert_bias")
        if c.experts.shared:
            sources |= family.mlp_names(f"{ours}moe/shared/", f"{theirs}mlp.shared_experts.")
    return sources


def _llada2_export(c: ModelConfig) -> dict[str, Any]:
    e = c.experts
    assert e is not None
    return export_config(
        c, "LLaDA2MoeModelLM", "llada2_moe", mlp_only_layers=..., decoder_sparse_step=..., attention_bias=...,
        n_group=e.groups, topk_group=e.active_groups, routed_scaling_factor=e.scale, score_function="sigmoid",
        num_shared_experts=e.shared // e.width, first_k_dense_replace=len(e.dense), use_qk_norm=c.qk_norm,
        partial_rotary_factor=c.rope_fraction, use_bias=False, use_qkv_bias=False, block_size=c.block,
        moe_router_enable_expert_bias=True,
    )  # fmt: skip


register(
    Family(
        name="LLaDA-MoE",
        architectures=("LLaDAMoEModelLM", "LLaDAMoEModel"),
        checkpoints=("inclusionAI/LLaDA-MoE-7B-A1B-Instruct", "inclusionAI/LLaDA-MoE-7B-A1B-Base"),
        keys=MOE_KEYS,
        config=_moe_config,
        noise=NoiseConfig(kind="absorbing"),
        about="masked, with experts, trained from scratch",
        export=_moe_export,
        licence="Apache-2.0",
        decoding=LLADA_DECODING,
    ),
    Family(
        name="LLaDA2.0, 2.1",
        architectures=("LLaDA2MoeModelLM",),
        checkpoints=("inclusionAI/LLaDA2.0-mini", "inclusionAI/LLaDA2.1-mini", "inclusionAI/LLaDA2.1-flash"),
        keys=LLADA2_KEYS,
        config=_llada2_config,
        names=_llada2_names,
        noise=NoiseConfig(kind="absorbing"),
        block="32",
        about="masked blocks, experts with a sigmoid router; DMax too",
        export=_llada2_export,
        # Version 2.1 can also edit accepted tokens, but its files do not say so; use `mj.presets.llada21` for it.
        decoding={
            "rule": "scheduled",
            "params": {"p": 0.95},
            "processors": {"temperature": {"t": 1.0}},
            "temperature": 0.0,
            "source": "ZHZisZZ/dllm dllm/pipelines/llada2/sampler.py",
        },
        fits=lambda config: not config.get("expert_capacity"),  # LLaDA2.2 routes whole blocks and is refused
        licence="Apache-2.0",
    ),
)
