"""Gemma 4 as a denoiser and as an autoregressive model: `build(config)`, the record of pure functions.

Facts from the configurations and checkpoints of transformers 5.23 (`gemma4`, `diffusion_gemma`): one set of
weights encodes causally and denoises; what is encoded never sees the self-conditioning.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.models import cache as kv_cache, masks
from mercury_jax.models.gemma.attention import near, pass_window, row_window
from mercury_jax.models.gemma.block import Block
from mercury_jax.models.gemma.config import GemmaConfig
from mercury_jax.models.gemma.layers import Norm, PerLayer, Rotation, SelfConditioning, rotation
from mercury_jax.types import Cache, Carry, Key, Model, Params, wide

# Axis names of each parameter, by path; see mercury_jax.sharding. Experts lie on `expert`.
SHARDINGS = (
    (r"per_layer/embed$", ("tensor", None, "fsdp")),
    (r"embed$", ("tensor", "fsdp")),
    (r"(q|k|v)/w$", ("fsdp", "tensor", None)),
    (r"o/w$", ("tensor", None, "fsdp")),
    (r"block_\d+/per_layer/gate/w$", ("fsdp", None)),
    (r"block_\d+/per_layer/projection/w$", (None, "fsdp")),
    (r"per_layer/projection/w$", ("fsdp", "tensor", None)),
    (r"(gate|up)/w$", ("fsdp", "tensor")),
    (r"down/w$", ("tensor", "fsdp")),
    (r"gate_up$", ("expert", "fsdp", "tensor")),
    (r"moe/down$", ("expert", "tensor", "fsdp")),
    (r"router/w$", ("fsdp", None)),
    (r"head$", ("fsdp", "tensor")),
)


class Gemma(nn.Module):
    """Embedding, blocks, final norm; `head` gives logits. Submodules share one parameter tree."""

    config: GemmaConfig

    def setup(self) -> None:
        c = self.config
        self.embed = self.param("embed", nn.initializers.normal(c.width**-0.5), (c.vocab, c.width))
        self.blocks = [Block(c, i, name=f"block_{i}") for i in range(c.layers)]
        self.norm = Norm(c.norm_eps, name="norm")
        if c.per_layer_width:
            self.per_layer = PerLayer(c, name="per_layer")
        if c.self_conditioning:
            self.conditioned = SelfConditioning(c, name="self_conditioning")
        if not c.tied:
            self.untied = self.param("head", nn.initializers.normal(c.width**-0.5), (c.width, c.vocab))

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        ranges: Int[Array, "B T R 2"],
        clean: Bool[Array, "B T"],
        lowest: Int[Array, "B T"],
        carry: Carry = (),
        cache: tuple[kv_cache.KV, ...] | None = None,
        slots: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], tuple[kv_cache.KV, ...]]:
        """clean: the token is encoded, not denoised; lowest: the first slot that it sees in a sliding layer."""
        c = self.config
        x = (self.embed[tokens] * c.width**0.5).astype(c.dtype)
        own = self.per_layer(tokens, x) if c.per_layer_width else None
        if c.self_conditioning:
            x = self.conditioned(x, carry, clean)
        rotate, sight = rotations(c, positions), (near(ranges, lowest), ranges)
        kvs: list[kv_cache.KV] = []
        for i, block in enumerate(self.blocks):
            kind = c.is_global(i)
            shared = kvs[c.source(i)] if c.source(i) != i else None
            kv = cache[i] if cache is not None and shared is None else None
            x, kv = block(
                x, rotate[kind], sight[kind], kv, slots, shared, clean, None if own is None else own[:, :, i]
            )
            kvs.append(kv)
        return self.norm(x), tuple(kvs[: c.layers - c.shared_kv])

    def head(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        c, exact = self.config, wide(hidden.dtype)
        if c.tied:
            logits = jnp.einsum(
                "btd,vd->btv", hidden, self.embed.astype(hidden.dtype), preferred_element_type=exact
            )
        else:
            w = self.untied.astype(hidden.dtype)
            logits = jnp.einsum("btd,dv->btv", hidden, w, preferred_element_type=exact)
        return logits if c.softcap is None else c.softcap * jnp.tanh(logits / c.softcap)

    def soft_embed(self, logits: Float[Array, "B T V"]) -> Float[Array, "B T D"]:
        """The mean embedding under softmax(logits), as a token's own would enter: times sqrt(width)."""
        c = self.config
        exact = wide(jnp.dtype(c.dtype))
        p = jax.nn.softmax(logits.astype(exact), axis=-1).astype(c.dtype)
        mean = jnp.einsum("btv,vd->btd", p, self.embed.astype(c.dtype), preferred_element_type=exact)
        return mean * c.width**0.5

    def everything(self, tokens: Array, positions: Array, ranges: Array) -> Array:
        """A pass through every parameter, for init."""
        clean = jnp.zeros(tokens.shape, bool)
        return self.head(self(tokens, positions, ranges, clean, positions)[0])


def rotations(config: GemmaConfig, positions: Int[Array, "B T"]) -> tuple[Rotation, Rotation]:
    """Of sliding layers, of global layers."""
    c, exact = config, wide(jnp.dtype(config.dtype))
    return (
        rotation(positions, c.head_dim, c.rope_theta, 1.0, 1.0, exact),
        rotation(
            positions, c.global_head_dim, c.global_rope_theta, c.global_rope_fraction, c.global_rope_factor, exact
        ),
    )  # fmt: skip


def build(config: GemmaConfig) -> Model:
    """The model of `config` as pure functions; equal configs give equal functions' results."""
    net = Gemma(config)
    return Model(
        config=config,
        init=functools.partial(_init, net),
        apply=functools.partial(_apply, net),
        forward=functools.partial(_forward, net),
        head=functools.partial(_head, net),
        condition=functools.partial(_condition, net),
        empty_cache=functools.partial(_empty_cache, config),
        encodable=functools.partial(masks.encodable, config),
        layout=masks.layout_of(config),
        shardings=SHARDINGS,
    )


def _init(net: Gemma, key: Key) -> Params:
    tokens = jnp.zeros((1, 1), jnp.int32)
    ranges = jnp.zeros((1, 1, 2, 2), jnp.int32)
    return net.init(key, tokens, tokens, ranges, method="everything")["params"]


def _head(net: Gemma, params: Params, hidden: Array) -> Any:
    return net.apply({"params": params}, hidden, method="head")


def _condition(net: Gemma, params: Params | None, logits: Float[Array, "B L V"]) -> Carry:
    """Soft embeddings [B, L, D] of shaped logits, fp32 at least; without params their zeros."""
    c = net.config
    if not c.self_conditioning:
        return ()
    if params is None:
        return jnp.zeros((*logits.shape[:-1], c.width), wide(jnp.dtype(c.dtype)))
    return net.apply({"params": params}, logits, method="soft_embed")


def _empty_cache(config: GemmaConfig, batch: int, slots: int) -> Cache:
    """Slots for every position in every layer that has keys; sliding layers look at the last of them."""
    dtype = jnp.dtype(config.dtype)
    shapes = (config.kv_shape(i) for i in range(config.layers - config.shared_kv))
    return tuple(kv_cache.empty(1, batch, slots, *shape, dtype)[0] for shape in shapes)


def _apply(
    net: Gemma, params: Params, tokens: Array, positions: Array, ranges: Array, carry: Carry = ()
) -> Array:
    clean, lowest = row_window(net.config, ranges)
    return net.apply({"params": params}, tokens, positions, ranges, clean, lowest, carry)[0]


def _forward(
    net: Gemma,
    params: Params,
    tokens: Int[Array, "B T"],
    cache: Cache,
    start: Int[Array, "B"],
    n: Int[Array, "B"],
    end: Int[Array, "B"],
    encoding: Bool[Array, "B"],
    carry: Carry = (),
    *,
    blind: int | None = None,
) -> tuple[Array, Cache]:
    c = net.config
    run = masks.cached_pass(c, tokens, kv_cache.slots_of(cache), start, n, end, encoding, blind)
    clean = jnp.broadcast_to(encoding[:, None], run.tokens.shape)
    lowest = pass_window(c, run.positions, start, encoding)
    if blind is not None:  # what the pass before thought of a token, its shadow must not know
        carry = jax.tree.map(lambda x: jnp.concatenate([x, jnp.zeros_like(x)], axis=1), carry)
    return net.apply(
        {"params": params}, run.tokens, run.positions, run.ranges, clean, lowest, carry, cache, run.slots
    )
