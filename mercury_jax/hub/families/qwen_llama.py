"""Qwen2.5, Qwen3 (dense and mixture of experts) and Llama 3: autoregressive models.

Many diffusion models are initialised from them. Those families (Dream, SDAR, Fast-dLLM v2, A2D) and LLaDA2 use
`export_config` of this file to write config.json; to read it, all of them use `family.decoder_config`.
"""

from __future__ import annotations

import functools
from typing import Any

from mercury_jax.config import Experts, ModelConfig, refuse
from mercury_jax.hub import family, generation
from mercury_jax.hub.family import UNUSED, Family, Json, Keys, allow, need, register

# Next-token prediction is block diffusion with blocks of one token, and without a mask.
AUTOREGRESSIVE: dict[str, Any] = dict(pattern="block_causal", block=1, predicts_next=True, mask=None)
EXPERTS = allow({
    "num_experts num_local_experts num_experts_per_tok moe_intermediate_size decoder_sparse_step": int,
    "norm_topk_prob": bool, "mlp_only_layers": list | None,
})  # fmt: skip


def experts_of(config: Json, **ours: Any) -> Experts | None:
    """Converts the keys of Qwen3's mixture of experts.

    Args:
        **ours: Fields of `Experts` that the family adds or overrides.
    """
    counts = {config[key] for key in ("num_experts", "num_local_experts") if key in config}
    if not any(counts):
        return None
    if len(counts) > 1:
        raise refuse("config.json: num_local_experts", sorted(counts), "the same number as num_experts")
    layers, step = need(config, "num_hidden_layers"), config.get("decoder_sparse_step", 1)
    if step < 1:
        raise refuse("config.json: decoder_sparse_step", step, "1 or more")
    plain = set(config.get("mlp_only_layers") or [])
    fields: dict[str, Any] = dict(
        count=need(config, "num_experts", "num_local_experts"), active=need(config, "num_experts_per_tok"),
        width=need(config, "moe_intermediate_size"), renormalise=bool(config.get("norm_topk_prob", False)),
        dense=tuple(i for i in range(layers) if i in plain or (i + 1) % step),
    )  # fmt: skip
    return Experts(**(fields | ours))


def export_config(c: ModelConfig, architecture: str, model_type: str, **theirs: Any) -> dict[str, Any]:
    """Converts our config to a config.json that transformers reads.

    Args:
        **theirs: Keys that the family adds or overrides; the value `...` removes a key.
    """
    s, e = c.rope_scaling, c.experts
    found: dict[str, Any] = dict(
        architectures=[architecture], model_type=model_type, vocab_size=c.vocab, hidden_size=c.width,
        num_hidden_layers=c.layers, num_attention_heads=c.heads, num_key_value_heads=c.kv_heads, head_dim=c.head_dim,
        intermediate_size=c.ffn, hidden_act="silu", rope_theta=c.rope_theta, rope_scaling=None,
        rms_norm_eps=c.norm_eps, max_position_embeddings=c.context, tie_word_embeddings=c.tied,
        attention_bias=c.qkv_bias, pad_token_id=c.pad, eos_token_id=[c.eos, *c.ends] if c.ends else c.eos,
        torch_dtype=c.dtype,
    )  # fmt: skip
    if c.mask is not None:
        found["mask_token_id"] = c.mask
    if c.mlp_bias:
        found["mlp_bias"] = True
    if c.window is not None:
        kinds = [family.FULL if c.is_global(i) else family.SLIDING for i in range(c.layers)]
        found |= dict(use_sliding_window=True, sliding_window=c.window, layer_types=kinds)
    if e is not None:
        found |= dict(
            num_experts=e.count, num_experts_per_tok=e.active, moe_intermediate_size=e.width,
            norm_topk_prob=e.renormalise, mlp_only_layers=list(e.dense), decoder_sparse_step=1,
        )  # fmt: skip
    if s is not None:
        length = {"original_max_position_embeddings": s.original}
        extra: dict[str, dict[str, Any]] = {
            "linear": {"factor": s.factor},
            "dynamic": {"factor": s.factor},
            "llama3": length | dict(factor=s.factor, low_freq_factor=s.low, high_freq_factor=s.high),
            "yarn": length | dict(
                factor=s.factor, beta_fast=s.fast, beta_slow=s.slow, attention_factor=s.attention, truncate=s.truncate
            ),
            "longrope": length | dict(
                short_factor=list(s.short), long_factor=list(s.long), attention_factor=s.attention
            ),
        }  # fmt: skip
        found["rope_scaling"] = {"rope_type": s.kind, **extra[s.kind]}
        if s.bounded:
            found["max_position_embeddings"] = round(s.original * (s.factor if s.kind == "longrope" else 1))
    return {key: value for key, value in (found | theirs).items() if value is not ...}


def _qwen3_keys(config: Json) -> Keys:
    known = family.KEYS | family.WINDOW | family.BIAS
    if "Qwen3ForCausalLM" in config["architectures"]:
        return known | {"model_type": ("qwen3",)}
    # Of the class with experts, every layer has the window, if there is one.
    return known | EXPERTS | allow({"model_type": ("qwen3_moe",), "max_window_layers layer_types": UNUSED})


def _qwen3_config(config: Json) -> ModelConfig:
    if "Qwen3ForCausalLM" in config["architectures"]:  # the default of the class, not width / heads
        return family.decoder_config({"head_dim": 128, **config}, qk_norm=True, **AUTOREGRESSIVE)
    plain = {**config, "max_window_layers": 0, "layer_types": None}
    return family.decoder_config(plain, qk_norm=True, experts=experts_of(config), **AUTOREGRESSIVE)


def _qwen3_export(c: ModelConfig) -> dict[str, Any]:
    if c.experts is None:
        return export_config(c, "Qwen3ForCausalLM", "qwen3")
    return export_config(c, "Qwen3MoeForCausalLM", "qwen3_moe")


register(
    Family(
        name="Qwen2.5",
        architectures=("Qwen2ForCausalLM",),
        checkpoints=("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-Coder-7B-Instruct"),
        keys=family.QWEN2_KEYS | family.WINDOW | {"model_type": ("qwen2",), "use_mrope": (False,)},
        # The class always has biases on queries, keys and values, and never on the output projection.
        config=functools.partial(family.decoder_config, qkv_bias=True, out_bias=False, **AUTOREGRESSIVE),
        noise=None,
        about="autoregressive, grouped queries with biases",
        export=functools.partial(export_config, architecture="Qwen2ForCausalLM", model_type="qwen2"),
        licence="Apache-2.0 (3B and 72B: Qwen's own)",
        decoding=generation.GREEDY,
        rank=2,
    ),
    Family(
        name="Qwen3",
        architectures=("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
        checkpoints=("Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B"),
        keys=_qwen3_keys,
        config=_qwen3_config,
        noise=None,
        about="autoregressive, normed queries and keys, dense or with experts",
        export=_qwen3_export,
        licence="Apache-2.0",
        decoding=generation.GREEDY,
        rank=2,
    ),
    Family(
        name="Llama 3",
        architectures=("LlamaForCausalLM",),
        checkpoints=("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.1-8B-Instruct"),
        keys=family.KEYS | family.BIAS | {
            "mlp_bias": bool, "model_type": ("llama",), "pretraining_tp": (1,), "sliding_window": (None,),
            "use_sliding_window": (False,), "max_sequence_length": UNUSED,  # max_position_embeddings says it
        },
        config=functools.partial(family.decoder_config, **AUTOREGRESSIVE),
        noise=None,
        about="autoregressive; TinyLlama and other models of the same build too",
        export=functools.partial(export_config, architecture="LlamaForCausalLM", model_type="llama"),
        licence="Llama community licence",
        decoding=generation.GREEDY,
        rank=2,
    ),
)  # fmt: skip
