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
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.models import cache as kv_cache, masks, unembed
from mercury_jax.models.gemma.attention import pass_window, row_window
from mercury_jax.models.gemma.block import Block
from mercury_jax.models.gemma.config import GemmaConfig
from mercury_jax.models.gemma.layers import Norm, PerLayer, Rotation, SelfConditioning, rotation, told
from mercury_jax.models.ops import Ops, sharded_rows
from mercury_jax.models.parallel import ops_over
from mercury_jax.types import Cache, Carry, Device, Key, Model, PackedPass, Params, Pass, wide

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
    (r"gate_up$", (("expert", "tensor"), "fsdp", None)),
    (r"moe/down$", (("expert", "tensor"), None, "fsdp")),
    (r"router/w$", ("fsdp", None)),
    (r"head$", ("fsdp", "tensor")),
)


class Gemma(nn.Module):
    """Embedding, blocks, final norm. Submodules share one parameter tree."""

    config: GemmaConfig
    ops: Ops = Ops()

    def setup(self) -> None:
        c = self.config
        self.embed = self.param("embed", nn.initializers.normal(c.width**-0.5), (c.vocab, c.width))
        self.blocks = [Block(c, i, self.ops, name=f"block_{i}") for i in range(c.layers)]
        self.norm = Norm(c.norm_eps, name="norm")
        if c.per_layer_width:
            self.per_layer = PerLayer(c, self.ops, name="per_layer")
        if c.self_conditioning:
            self.conditioned = SelfConditioning(c, self.ops, name="self_conditioning")
        if not c.tied:
            self.param("head", nn.initializers.normal(c.width**-0.5), (c.width, c.vocab))

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
        plain, x = self._enter(tokens, clean, carry)
        own = self.per_layer(tokens, plain) if c.per_layer_width else None
        rotate, sight = rotations(c, positions), (masks.near(ranges, lowest), ranges)
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

    def _enter(
        self, tokens: Int[Array, "B T"], clean: Bool[Array, "B T"], carry: Carry
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"]]:
        """Embeddings as they are, and with what the pass before thought of the canvas."""
        c, kind = self.config, jnp.dtype(self.config.dtype)
        enter = lambda x: (x * c.width**0.5).astype(kind)
        parts = [[self.ops.lookup(self.embed, tokens, enter)]]
        if c.self_conditioning:
            parts.append([self.conditioned.part(carry, (tokens.shape[0], tokens.shape[1]), kind)])
        x, *signal = self.ops.total(*parts)
        return x, told(x, signal[0], clean, c.norm_eps) if signal else x


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
        head=functools.partial(unembed.logits, softcap=config.softcap),
        condition=functools.partial(_condition, config),
        empty_cache=functools.partial(_empty_cache, config),
        encodable=functools.partial(masks.encodable, config),
        layout=masks.layout_of(config),
        shardings=SHARDINGS,
        part=functools.partial(_part, config),
        mix=functools.partial(_mix, config) if config.self_conditioning else None,
    )


def _init(net: Gemma, key: Key) -> Params:
    tokens = jnp.zeros((1, 1), jnp.int32)
    ranges = jnp.zeros((1, 1, 2, 2), jnp.int32)
    clean = jnp.zeros((1, 1), bool)
    return net.init(key, tokens, tokens, ranges, clean, tokens)["params"]


def _part(config: GemmaConfig, params: Params, hidden: Array, first: Any, size: int) -> Array:
    return unembed.logits(params, hidden, softcap=config.softcap, first=first, size=size)


def _mix(config: GemmaConfig, params: Params, weights: Float[Array, "B L v"], first: Any) -> Array:
    """The part of some ids in a mean embedding, as a token's own would enter: times sqrt(width)."""
    return unembed.mixed(params, weights, first, jnp.dtype(config.dtype)) * config.width**0.5


def _condition(config: GemmaConfig, params: Params | None, logits: Float[Array, "B L V"]) -> Carry:
    """Soft embeddings [B, L, D] of shaped logits, fp32 at least; without params their zeros."""
    exact = wide(jnp.dtype(config.dtype))
    if not config.self_conditioning:
        return ()
    if params is None:
        return jnp.zeros((*logits.shape[:-1], config.width), exact)
    return _mix(config, params, jax.nn.softmax(logits.astype(exact), axis=-1), 0)


def _empty_cache(config: GemmaConfig, batch: int, slots: int) -> Cache:
    """Slots for every position in every layer that has keys; sliding layers look at the last of them."""
    dtype = jnp.dtype(config.dtype)
    shapes = (config.kv_shape(i) for i in range(config.layers - config.shared_kv))
    return tuple(kv_cache.empty(1, batch, slots, *shape, dtype)[0] for shape in shapes)


def _apply(
    net: Gemma, params: Params, given: PackedPass, *, mesh: Mesh | None = None, device: Device | None = None
) -> Array:
    clean, lowest = row_window(net.config, given.ranges)
    net = net.clone(ops=sharded_rows(mesh, device))
    args = (given.tokens, given.positions, given.ranges, clean, lowest, given.self_cond)
    return net.apply({"params": params}, *args)[0]


def _forward(
    net: Gemma, params: Params, given: Pass, *, mesh: Mesh | None = None, device: Device | None = None
) -> tuple[Array, Cache]:
    run = masks.cached_pass(net.config, given, kv_cache.slots_of(given.cache))
    clean = jnp.broadcast_to(given.encoding[:, None], run.tokens.shape)
    lowest = pass_window(net.config, run.positions, given.start, given.encoding)
    carry = given.self_cond
    if (
        given.leave_one_out is not None
    ):  # a leave-one-out mask must not know what the pass before thought of its token
        carry = jax.tree.map(lambda x: jnp.concatenate([x, jnp.zeros_like(x)], axis=1), carry)
    net = net.clone(ops=ops_over(mesh, device))
    args = (run.tokens, run.positions, run.ranges, clean, lowest, carry, given.cache, run.slots)
    return net.apply({"params": params}, *args)
