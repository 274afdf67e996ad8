"""LLaDA models with experts: LLaDA-MoE (bidirectional), and LLaDA2.0, 2.1 and DMax (causal blocks).

LLaDA-MoE is OLMoE-like (arXiv 2509.24389); its config.json says `llada`, so `architectures` decides. LLaDA2 is Ling's
mixture of experts with a sigmoid router (arXiv 2512.15745; 2.1: 2602.08676).
"""

from __future__ import annotations

from typing import Any

from mercury_jax.config import Experts, ModelConfig, NoiseConfig
from mercury_jax.hub import family
from mercury_jax.hub.families.qwen_llama import export_config
from mercury_jax.hub.family import Family, Json, need, register
from mercury_jax.hub.params import TensorSource

MASK, BLOCK = 156895, 32  # not in config.json

MOE_KEYS = family.KEYS.plus(
    family.NO_WINDOW,
    used={
        "num_experts num_experts_per_tok expert_intermediate_size": "int",
        "dense_intermediate_size": "int null", "moe_layer_freq": "list null", "qk_layernorm": "bool",
        "partial_rotary_factor": "number null",
    },
    only={
        "moe_router_score_function": ("softmax",), "moe_router_enable_expert_bias attention_bias": (False,),
        "norm_topk_prob": (False, None),
        "router_num_group router_topk_group shared_expert_intermediate_size clip_qkv": (None,),
        "routed_scaling_factor": (1, 1.0),
    }
)  # fmt: skip


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


LLADA2_KEYS = family.KEYS.plus(
    family.NO_WINDOW,
    used={
        "num_experts num_experts_per_tok moe_intermediate_size n_group topk_group": "int",
        "first_k_dense_replace block_size": "int", "num_shared_experts": "int null",
        "routed_scaling_factor partial_rotary_factor": "number", "use_qk_norm": "bool",
    },
    only={
        "score_function": ("sigmoid",),
        "use_bias use_qkv_bias norm_head norm_softmax using_split_qkv_in_self_attention": (False,),
        "attention_bias": (False,), "use_rmsnorm moe_router_enable_expert_bias": (True,),
        "expert_capacity": (None, 0), "num_nextn_predict_layers": (0, None),
    },
    unused={
        "norm_topk_prob": "the class divides by the sum wherever it chooses more than one expert",
        "router_dtype": "the router always computes in fp32 here",
        "rotary_dim": "partial_rotary_factor says it",
    }
)  # fmt: skip


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
    # Queries, keys and values are rows of one tensor, in this order.
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
        fits=lambda config: not config.get("expert_capacity"),  # LLaDA2.2 routes whole blocks and is refused
        licence="Apache-2.0",
    ),
)
