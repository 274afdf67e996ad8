"""The default architecture: a transformer denoiser with RoPE, grouped queries, and SwiGLU or a mixture of experts.

LLaDA, Dream, SDAR, LLaDA2, Qwen and Llama checkpoints are instances of it. `build` turns a config into a `Model` of
pure functions; the attention pattern enters through the key ranges of `masks`.
"""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from mercury_jax.config import Experts, ModelConfig
from mercury_jax.models import cache as kv_cache, lm_head, masks, shifted_logits
from mercury_jax.models.layers import Linear, RMSNorm, RowParallelLinear, SwiGLU, fan_in, rope, weight
from mercury_jax.models.moe import route
from mercury_jax.models.ops import INIT_OPS, Ops, PartialSum, training_ops
from mercury_jax.models.tensor_parallel import cache_ops
from mercury_jax.types import Cache, Device, Key, Model, PackedPass, Params, Pass, accumulation_dtype

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
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        ranges: Int[Array, "B T R 2"],
        kv: kv_cache.KV | None,
        slots: Int[Array, "B T"] | None,
    ) -> tuple[Float[Array, "B T D"], kv_cache.KV | None]:
        """The output, and the cache with this pass's keys and values (None: a pass without a cache)."""
        c = self.config
        project = lambda heads, name: Linear(
            (c.width,), (heads, c.head_dim), bias=c.qkv_bias, ops=self.ops, name=name
        )(x)
        q, k, v = project(c.heads, "q"), project(c.kv_heads, "k"), project(c.kv_heads, "v")
        if c.qk_norm:
            q = RMSNorm(c.norm_eps, c.zero_centred, name="q_norm")(q)
            k = RMSNorm(c.norm_eps, c.zero_centred, name="k_norm")(k)
        rotate = lambda y: rope(y, positions, c.rope_theta, c.rope_fraction, c.rope_scaling)
        q, k = rotate(q), rotate(k)
        if kv is not None and slots is not None:
            kv = self.ops.write(kv, k, v, slots)
            k, v = kv
        out = self.ops.attend(q, k, v, ranges, cached=kv is not None)  # [B, T, H, K]
        scale = 1.0 / (2 * c.layers)
        project_out = RowParallelLinear(
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
        ids, weights = self.ops.map_rows(functools.partial(_route_rows, c), scores, *correction)
        each = lambda init: (
            lambda key, shape: jax.vmap(lambda k: init(k, shape[1:]))(jax.random.split(key, shape[0]))
        )
        gate_up = weight(self, "gate_up", each(fan_in()), (c.count, self.width, 2 * c.width))
        down = weight(self, "down", each(fan_in(1, self.scale)), (c.count, c.width, self.width))
        terms: list[PartialSum] = [
            self.ops.experts(x, ids, weights.astype(x.dtype), (gate_up, down), jax.nn.silu)
        ]
        if c.shared:
            terms.append(SwiGLU(self.width, c.shared, self.scale, ops=self.ops, name="shared").partial(x))
        return self.ops.reduce_sums(terms)[0]


def _route_rows(config: Experts, scores: Float[Array, "B T E"], *correction: Array) -> tuple[Array, Array]:
    """`moe.route` of a batch: ids and weights [B, T, k]."""
    found = route(scores.reshape(-1, config.count), correction[0] if correction else None, config)
    return found[0].reshape(*scores.shape[:2], -1), found[1].reshape(*scores.shape[:2], -1)


class TransformerBlock(nn.Module):
    """Pre-norm attention and feed-forward (SwiGLU or experts) with residuals."""

    config: ModelConfig
    layer: int
    ops: Ops = Ops()

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        ranges: Int[Array, "B T R 2"],
        kv: kv_cache.KV | None,
        slots: Int[Array, "B T"] | None,
    ) -> tuple[Float[Array, "B T D"], kv_cache.KV | None]:
        c = self.config
        norm = lambda name: RMSNorm(c.norm_eps, c.zero_centred, name=name)
        y, kv = Attention(c, self.ops, name="attention")(
            norm("attention_norm")(x), positions, ranges, kv, slots
        )
        x = x + y
        scale = 1.0 / (2 * c.layers)
        if c.experts is None or self.layer in c.experts.dense:
            mlp: nn.Module = SwiGLU(c.width, c.ffn, scale, c.mlp_bias, self.ops, name="mlp")
        else:
            mlp = MoELayer(c.experts, c.width, scale, self.ops, name="moe")
        return x + mlp(norm("mlp_norm")(x)), kv


class Transformer(nn.Module):
    """Embedding, blocks and final norm. The head is applied separately (`lm_head.logits`)."""

    config: ModelConfig
    ops: Ops = Ops()

    def setup(self) -> None:
        c = self.config
        self.embed = self.param("embed", nn.initializers.normal(c.width**-0.5), (c.vocab, c.width))
        self.blocks = [TransformerBlock(c, i, self.ops, name=f"block_{i}") for i in range(c.layers)]
        self.norm = RMSNorm(c.norm_eps, c.zero_centred, name="norm")
        if not c.tied:
            self.param("head", nn.initializers.normal(c.width**-0.5), (c.width, c.vocab))

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        ranges: Int[Array, "B T R 2"],
        cache: tuple[kv_cache.KV, ...] | None = None,
        slots: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], tuple[kv_cache.KV | None, ...]]:
        """Hidden states, and the cache with this pass's keys and values.

        Args:
            tokens: Ids.
            positions: Absolute positions, for RoPE.
            ranges: Key ranges of layers without a sliding window.
            cache: One `KV` per layer; None: a pass without a cache.
            slots: Where keys are written.

        Returns:
            Hidden states after the final norm, and one `KV` (or None) per layer.
        """
        c = self.config
        scale_embedding = lambda x: (x * c.width**0.5 if c.scale_embed else x).astype(c.dtype)
        x = self.ops.reduce_sums([self.ops.embed(self.embed, tokens, scale_embedding)])[0]
        local = ranges if c.window is None else masks.sliding_window_ranges(ranges, c.window)
        new_cache = []
        for i, block in enumerate(self.blocks):
            layer_ranges = ranges if c.is_global(i) else local
            x, kv = block(x, positions, layer_ranges, None if cache is None else cache[i], slots)
            new_cache.append(kv)
        return self.norm(x), tuple(new_cache)


def build(config: ModelConfig) -> Model:
    """The transformer of a config as pure functions.

    Args:
        config: Sizes, attention pattern and alignment.

    Returns:
        The model. Equal configs give models that compute the same.
    """
    net = Transformer(config)
    shifted = config.alignment == "shifted"
    return Model(
        config=config,
        init=functools.partial(_init, net),
        apply=functools.partial(shifted_logits.apply if shifted else _apply, net),
        forward=functools.partial(shifted_logits.forward if shifted else _forward, net),
        head=lm_head.logits,
        condition=lambda params, logits: (),
        empty_cache=functools.partial(shifted_logits.empty_cache if shifted else _empty_cache, config),
        encodable=functools.partial(masks.encodable, config),
        layout=functools.partial(masks.layout, config),
        shardings=SHARDINGS,
        head_chunk=_head_chunk,
    )


def _init(net: Transformer, key: Key) -> Params:
    tokens = jnp.zeros((1, 1), jnp.int32)
    ranges = jnp.zeros((1, 1, 2, 2), jnp.int32)
    return net.clone(ops=INIT_OPS).init(key, tokens, tokens, ranges)["params"]


def _apply(
    net: Transformer,
    params: Params,
    given: PackedPass,
    *,
    mesh: Mesh | None = None,
    device: Device | None = None,
) -> Array:
    net = net.clone(ops=training_ops(mesh, device))
    return net.apply({"params": params}, given.tokens, given.positions, given.ranges)[0]


def _forward(
    net: Transformer, params: Params, given: Pass, *, mesh: Mesh | None = None, device: Device | None = None
) -> tuple[Array, Cache]:
    run = masks.cache_pass_inputs(net.config, given, kv_cache.slot_count(given.cache))
    net = net.clone(ops=cache_ops(mesh, device))
    return net.apply({"params": params}, run.tokens, run.positions, run.ranges, given.cache, run.slots)


def _head_chunk(params: Params, hidden: Array, first: int | Int[Array, ""], size: int) -> Array:
    return lm_head.logits(params, hidden, first=first, size=size)


def _empty_cache(config: ModelConfig, batch: int, slots: int) -> Cache:
    dtype = jnp.dtype(config.dtype)
    return kv_cache.empty_cache(config.layers, batch, slots, config.kv_heads, config.head_dim, dtype)
