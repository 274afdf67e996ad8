"""The default architecture: a transformer denoiser with RoPE, grouped queries, and SwiGLU or a mixture of experts.

LLaDA, Dream, SDAR, LLaDA2, Qwen and Llama checkpoints are instances of it. `build` turns a config into a `Model` of
pure functions; the attention pattern enters through the key ranges of `masks`.
"""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
from jaxtyping import Array, Float

from mercury_jax.config import Experts, ModelConfig
from mercury_jax.models import cache as kv_cache, masks, shifted_logits
from mercury_jax.models.layers import (
    GatedMLP,
    Linear,
    OutputProjection,
    RMSNorm,
    fan_in,
    rope,
    rope_frequencies,
    weight,
)
from mercury_jax.models.masks import NetworkInputs
from mercury_jax.models.moe import route
from mercury_jax.models.network import lm_head, model_of
from mercury_jax.models.ops import Ops
from mercury_jax.types import Cache, Model, PackedPass, Params, Pass, accumulation_dtype

# Mesh axes of each parameter, by path; see `mercury_jax.sharding`. Heads and hidden units are sharded over `tensor`,
# the model width over `fsdp`, experts over `expert` and `tensor`.
SHARDINGS = (
    (r"embed$", ("tensor", "fsdp")),
    (r"(q|k|v)/w$", ("fsdp", "tensor", None)),
    (r"o/w$", ("tensor", None, "fsdp")),
    (r"(gate|up)/w$", ("fsdp", "tensor")),
    (r"down/w$", ("tensor", "fsdp")),
    (r"(q|k|v)/b$", ("tensor", None)),
    (r"(gate|up)/b$", ("tensor",)),
    (r"moe/gate_up$", (("expert", "tensor"), "fsdp", None)),
    (r"moe/down$", (("expert", "tensor"), None, "fsdp")),
    (r"head$", ("fsdp", "tensor")),
)


class Attention(nn.Module):
    """Grouped-query attention over key ranges: projections, RoPE, `attend`, output projection."""

    config: ModelConfig
    ops: Ops = Ops()

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], inputs: NetworkInputs, kv: kv_cache.KV | None
    ) -> tuple[Float[Array, "B T D"], kv_cache.KV | None]:
        """The output, and the cache with this pass's keys and values (None: a pass without a cache)."""
        c = self.config
        project = lambda heads, name: Linear(
            (c.width,), (heads, c.head_dim), bias=c.qkv_bias, ops=self.ops, name=name
        )(x)
        q, k, v = (
            project(c.heads, "q"),
            project(c.kv_heads, "k"),
            project(c.kv_heads, "v"),
        )  # [B, T, H or G, K]
        if c.qk_norm:
            q = RMSNorm(c.norm_eps, c.zero_centred, name="q_norm")(q)
            k = RMSNorm(c.norm_eps, c.zero_centred, name="k_norm")(k)
        frequencies = rope_frequencies(c.rope_theta, int(c.head_dim * c.rope_fraction) // 2, c.rope_scaling)
        amplitude = 1.0 if c.rope_scaling is None else c.rope_scaling.attention
        q, k = (rope(y, inputs.positions, frequencies, amplitude) for y in (q, k))
        if kv is not None and inputs.slots is not None:
            kv = self.ops.write(kv, k, v, inputs.slots)
            k, v = kv  # [B, S, G, K]: all keys of the row so far
        out = self.ops.attend(q, k, v, inputs.ranges, cached=kv is not None)  # [B, T, H, K]
        scale = 1.0 / (2 * c.layers)
        project_out = OutputProjection(
            (c.heads, c.head_dim), (c.width,), scale, c.out_bias, self.ops, name="o"
        )
        return project_out(out), kv


class MoELayer(nn.Module):
    """Routed experts, each a SwiGLU, and a shared one where there is one.

    Attributes:
        config: Number, width and routing of the experts.
        width: D.
        scale: Factor of the initial variance of the last projection.
        ops: Where it is computed.
    """

    config: Experts
    width: int
    scale: float
    ops: Ops = Ops()

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        c, dtype = self.config, accumulation_dtype(x.dtype)
        router = self.param("router", fan_in(), (self.width, c.count))
        logits = x.astype(dtype) @ router.astype(dtype)  # [B, T, E]
        scores = jax.nn.softmax(logits, axis=-1) if c.score == "softmax" else jax.nn.sigmoid(logits)
        correction = [self.param("correction", nn.initializers.zeros, (c.count,))] if c.correction else []
        ids, weights = self.ops.map_rows(functools.partial(route, c), scores, *correction)
        each = lambda init: (
            lambda key, shape: jax.vmap(lambda k: init(k, shape[1:]))(jax.random.split(key, shape[0]))
        )
        gate_up = weight(self, "gate_up", each(fan_in()), (c.count, self.width, 2 * c.width))
        down = weight(self, "down", each(fan_in(1, self.scale)), (c.count, c.width, self.width))
        terms = [self.ops.experts(x, ids, weights.astype(x.dtype), (gate_up, down), jax.nn.silu)]
        if c.shared:
            terms.append(GatedMLP(self.width, c.shared, self.scale, ops=self.ops, name="shared").term(x))
        return self.ops.sum_terms(terms)[0]


class TransformerBlock(nn.Module):
    """Pre-norm attention and feed-forward (SwiGLU or experts) with residuals."""

    config: ModelConfig
    layer: int
    ops: Ops = Ops()

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], inputs: NetworkInputs, kv: kv_cache.KV | None
    ) -> tuple[Float[Array, "B T D"], kv_cache.KV | None]:
        c = self.config
        norm = lambda name: RMSNorm(c.norm_eps, c.zero_centred, name=name)
        y, kv = Attention(c, self.ops, name="attention")(norm("attention_norm")(x), inputs, kv)
        x = x + y
        scale = 1.0 / (2 * c.layers)
        if c.experts is None or self.layer in c.experts.dense:
            mlp: nn.Module = GatedMLP(c.width, c.ffn, scale, c.mlp_bias, self.ops, name="mlp")
        else:
            mlp = MoELayer(c.experts, c.width, scale, self.ops, name="moe")
        return x + mlp(norm("mlp_norm")(x)), kv


class Transformer(nn.Module):
    """Embedding, blocks and final norm. The head is applied separately (`network.lm_head`)."""

    config: ModelConfig
    ops: Ops = Ops()

    def setup(self) -> None:
        """Creates the parameters and blocks."""
        c = self.config
        self.embed = self.param("embed", nn.initializers.normal(c.width**-0.5), (c.vocab, c.width))
        self.blocks = [TransformerBlock(c, i, self.ops, name=f"block_{i}") for i in range(c.layers)]
        self.norm = RMSNorm(c.norm_eps, c.zero_centred, name="norm")
        if not c.tied:
            self.param("head", nn.initializers.normal(c.width**-0.5), (c.width, c.vocab))

    def __call__(
        self, inputs: NetworkInputs, cache: tuple[kv_cache.KV, ...] | None = None
    ) -> tuple[Float[Array, "B T D"], tuple[kv_cache.KV | None, ...]]:
        """Hidden states, and the cache with this pass's keys and values.

        Args:
            inputs: Tokens, positions, and the key ranges of layers without a sliding window.
            cache: One `KV` per layer; None: a pass without a cache.

        Returns:
            Hidden states after the final norm, and one `KV` (or None) per layer.
        """
        c, ranges = self.config, inputs.ranges
        scale_embedding = lambda x: (x * c.width**0.5 if c.scale_embed else x).astype(c.dtype)
        x = self.ops.sum_terms([self.ops.embed(self.embed, inputs.tokens, scale_embedding)])[0]
        local = ranges if c.window is None else masks.sliding_window_ranges(ranges, c.window)
        new_cache = []
        for i, block in enumerate(self.blocks):
            layer_inputs = inputs._replace(ranges=ranges if c.is_global(i) else local)
            x, kv = block(x, layer_inputs, None if cache is None else cache[i])
            new_cache.append(kv)
        return self.norm(x), tuple(new_cache)


def build(config: ModelConfig) -> Model:
    """The transformer of a config as pure functions.

    Args:
        config: Sizes, attention pattern and alignment.

    Returns:
        The model. Equal configs give models that compute the same.
    """
    shifted = config.alignment == "shifted"
    return model_of(
        config,
        Transformer(config),
        init=lambda net, key, inputs: net.init(key, inputs),
        apply=shifted_logits.apply if shifted else _apply,
        forward=shifted_logits.forward if shifted else _forward,
        empty_cache=functools.partial(
            shifted_logits.empty_cache if shifted else kv_cache.empty_cache, config
        ),
        shardings=SHARDINGS,
        head=lm_head,
        head_chunk=lm_head,
    )


def _apply(net: Transformer, params: Params, given: PackedPass) -> Array:
    inputs = NetworkInputs(given.tokens, given.positions, given.ranges)
    return net.apply({"params": params}, inputs)[0]


def _forward(net: Transformer, params: Params, given: Pass) -> tuple[Array, Cache]:
    inputs = masks.cache_pass_inputs(net.config, given, kv_cache.slot_count(given.cache))
    return net.apply({"params": params}, inputs, given.cache)
