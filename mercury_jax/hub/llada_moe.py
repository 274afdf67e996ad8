"""LLaDA-MoE: OLMoE-like, bidirectional; config.json says `llada`, so `architectures` decides (arXiv 2509.24389)."""

from __future__ import annotations

from typing import Any

from mercury_jax.config import Experts, ModelConfig, NoiseConfig
from mercury_jax.hub import decoder
from mercury_jax.hub.family import Family, need
from mercury_jax.hub.keys import BOOL, INT, LIST, NULL, NUMBER, Json, Keys

MASK = 156895  # not in config.json
KEYS = decoder.KEYS.plus(decoder.NO_WINDOW).plus(
    Keys(
        used={
            "num_experts": INT, "num_experts_per_tok": INT, "expert_intermediate_size": INT,
            "dense_intermediate_size": INT + NULL, "moe_layer_freq": LIST + NULL, "qk_layernorm": BOOL,
            "partial_rotary_factor": NUMBER + NULL,
        },
        only={
            "moe_router_score_function": ("softmax",), "moe_router_enable_expert_bias": (False,),
            "attention_bias": (False,), "norm_topk_prob": (False, None), "router_num_group": (None,),
            "router_topk_group": (None,), "shared_expert_intermediate_size": (None,), "clip_qkv": (None,),
            "routed_scaling_factor": (1, 1.0),
        },
    )
)  # fmt: skip


def config(config: Json) -> ModelConfig:
    """LLaDA-MoE's config.json: one frequency list says which layers have experts."""
    layers = need(config, "num_hidden_layers")
    frequency = config.get("moe_layer_freq") or [1] * layers
    experts = Experts(
        count=need(config, "num_experts"), active=need(config, "num_experts_per_tok"),
        width=need(config, "expert_intermediate_size"), renormalise=False,
        dense=tuple(i for i in range(layers) if not frequency[i]),
    )  # fmt: skip
    ffn = config.get("dense_intermediate_size") or experts.width
    plain = {"mask_token_id": MASK, **config, "intermediate_size": ffn}
    return ModelConfig(
        **decoder.sizes(
            plain, experts=experts, qk_norm=bool(config.get("qk_layernorm")), pattern="bidirectional", block=32,
            rope_fraction=float(config.get("partial_rotary_factor") or 1.0),
        )
    )  # fmt: skip


def export(c: ModelConfig) -> dict[str, Any]:
    """Our config as LLaDA-MoE's."""
    e = c.experts
    assert e is not None
    found = decoder.export(c, architectures=["LLaDAMoEModelLM"], model_type="llada")
    for key in ("mlp_only_layers", "decoder_sparse_step", "moe_intermediate_size", "intermediate_size"):
        del found[key]
    return found | dict(
        dense_intermediate_size=c.ffn, expert_intermediate_size=e.width, qk_layernorm=c.qk_norm,
        moe_layer_freq=[0 if i in e.dense else 1 for i in range(c.layers)], moe_router_score_function="softmax",
        moe_router_enable_expert_bias=False, norm_topk_prob=None, partial_rotary_factor=c.rope_fraction,
        routed_scaling_factor=1,
    )  # fmt: skip


LLADA_MOE = Family(
    name="LLaDA-MoE",
    architectures=("LLaDAMoEModelLM", "LLaDAMoEModel"),
    checkpoints=("inclusionAI/LLaDA-MoE-7B-A1B-Instruct", "inclusionAI/LLaDA-MoE-7B-A1B-Base"),
    keys=KEYS,
    config=config,
    names=decoder.names,
    noise=NoiseConfig(kind="absorbing"),
    about="masked, with experts, trained from scratch",
    ignored=decoder.IGNORED,
    export=export,
    licence="Apache-2.0",
)
