"""LLaDA2.0, 2.1 and DMax: Ling's mixture of experts in causal blocks (arXiv 2512.15745; 2.1: 2602.08676)."""

from __future__ import annotations

from typing import Any

from mercury_jax.config import Experts, ModelConfig, NoiseConfig
from mercury_jax.hub import decoder
from mercury_jax.hub.family import Family, Leaf, need
from mercury_jax.hub.keys import BOOL, INT, NULL, NUMBER, Json, Keys

MASK, BLOCK = 156895, 32  # not in config.json
KEYS = decoder.KEYS.plus(decoder.NO_WINDOW).plus(
    Keys(
        used={
            "num_experts": INT, "num_experts_per_tok": INT, "moe_intermediate_size": INT, "n_group": INT,
            "topk_group": INT, "num_shared_experts": INT + NULL, "routed_scaling_factor": NUMBER,
            "first_k_dense_replace": INT, "use_qk_norm": BOOL, "partial_rotary_factor": NUMBER, "block_size": INT,
        },
        only={
            "score_function": ("sigmoid",), "use_bias": (False,), "use_qkv_bias": (False,), "use_rmsnorm": (True,),
            "norm_head": (False,), "norm_softmax": (False,), "using_split_qkv_in_self_attention": (False,),
            "moe_router_enable_expert_bias": (True,), "expert_capacity": (None, 0), "attention_bias": (False,),
            "num_nextn_predict_layers": (0, None),
        },
        unused={
            "norm_topk_prob": "the class divides by the sum wherever it chooses more than one expert",
            "router_dtype": "the router computes in fp32 here, whatever it says",
            "rotary_dim": "partial_rotary_factor says it",
        },
    )
)  # fmt: skip


def config(config: Json) -> ModelConfig:
    """LLaDA2's config.json."""
    dense = tuple(range(config.get("first_k_dense_replace", 0)))
    width = need(config, "moe_intermediate_size")
    experts = Experts(
        count=need(config, "num_experts"), active=need(config, "num_experts_per_tok"), width=width, score="sigmoid",
        renormalise=need(config, "num_experts_per_tok") > 1, scale=config.get("routed_scaling_factor", 1.0),
        groups=config.get("n_group", 1), active_groups=config.get("topk_group", 1), correction=True,
        shared=width * (config.get("num_shared_experts") or 0), dense=dense,
    )  # fmt: skip
    return ModelConfig(
        **decoder.sizes(
            {"mask_token_id": MASK, **config}, experts=experts,
            qk_norm=config.get("use_qk_norm", True), rope_fraction=config.get("partial_rotary_factor", 1.0),
            qkv_bias=False, pattern="block_causal", block=config.get("block_size", BLOCK),
        )
    )  # fmt: skip


def names(c: ModelConfig) -> dict[str, Leaf]:
    """Queries, keys and values are one tensor, in this order."""
    assert c.experts is not None
    found = {"embed": Leaf("model.word_embeddings.weight"), "norm/scale": Leaf("model.norm.weight")}
    if not c.tied:
        found["head"] = Leaf("lm_head.weight", 1)
    for i in range(c.layers):
        ours, theirs = f"block_{i}/", f"model.layers.{i}."
        found[f"{ours}attention_norm/scale"] = Leaf(f"{theirs}input_layernorm.weight")
        found[f"{ours}mlp_norm/scale"] = Leaf(f"{theirs}post_attention_layernorm.weight")
        found |= _attention(c, f"{ours}attention/", f"{theirs}attention.")
        if i in c.experts.dense:
            found |= decoder.feed_forward(f"{ours}mlp/", f"{theirs}mlp.")
            continue
        found |= decoder.mixture(c.experts, f"{ours}moe/", f"{theirs}mlp.")
        found[f"{ours}moe/correction"] = Leaf(f"{theirs}mlp.gate.expert_bias")
        if c.experts.shared:
            found |= decoder.feed_forward(f"{ours}moe/shared/", f"{theirs}mlp.shared_experts.")
    return found


def _attention(c: ModelConfig, ours: str, theirs: str) -> dict[str, Leaf]:
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    rows = dict(q=(0, q), k=(q, q + kv), v=(q + kv, q + 2 * kv))
    fused = f"{theirs}query_key_value.weight"
    found = {f"{ours}{p}/w": Leaf(fused, 1, rows=(a, b, q + 2 * kv)) for p, (a, b) in rows.items()}
    found[f"{ours}o/w"] = Leaf(f"{theirs}dense.weight", 2)
    if c.qk_norm:
        found[f"{ours}q_norm/scale"] = Leaf(f"{theirs}query_layernorm.weight")
        found[f"{ours}k_norm/scale"] = Leaf(f"{theirs}key_layernorm.weight")
    return found


def export(c: ModelConfig) -> dict[str, Any]:
    """Our config as LLaDA2's."""
    e = c.experts
    assert e is not None
    found = decoder.export(c, architectures=["LLaDA2MoeModelLM"], model_type="llada2_moe")
    for key in ("mlp_only_layers", "decoder_sparse_step", "attention_bias"):
        del found[key]
    return found | dict(
        n_group=e.groups, topk_group=e.active_groups, routed_scaling_factor=e.scale, score_function="sigmoid",
        num_shared_experts=e.shared // e.width, first_k_dense_replace=len(e.dense), use_qk_norm=c.qk_norm,
        partial_rotary_factor=c.rope_fraction, use_bias=False, use_qkv_bias=False, block_size=c.block,
        moe_router_enable_expert_bias=True,
    )  # fmt: skip


LLADA2 = Family(
    name="LLaDA2.0, 2.1",
    architectures=("LLaDA2MoeModelLM",),
    checkpoints=("inclusionAI/LLaDA2.0-mini", "inclusionAI/LLaDA2.1-mini", "inclusionAI/LLaDA2.1-flash"),
    keys=KEYS,
    config=config,
    names=names,
    noise=NoiseConfig(kind="absorbing"),
    block="32",
    about="masked blocks, experts with a sigmoid router; DMax too",
    ignored=decoder.IGNORED,
    export=export,
    fits=lambda config: not config.get("expert_capacity"),  # LLaDA2.2 routes whole blocks
    licence="Apache-2.0",
)
