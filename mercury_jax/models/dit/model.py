"""The diffusion transformer, and `build`: a config in, a `Model` of pure functions out.

Every block is told the noise level. Where the model is timed, a time of each row [B] or of each position
[B, T] comes with the tokens (packed rows hold canvases of several times); where it is not, the level is 0.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from mercury_jax.config import refuse
from mercury_jax.models import cache as kv_cache, masks
from mercury_jax.models.dit.config import DiTConfig
from mercury_jax.models.dit.layers import Condition, Modulation, Norm, level
from mercury_jax.models.layers import Linear
from mercury_jax.models.ops import Ops, on_device, sharded_rows
from mercury_jax.models.rotary import rope
from mercury_jax.types import Cache, Device, Key, Model, PackedPass, Params, Pass, wide

SHARDINGS = (
    (r"embed$", ("tensor", "fsdp")),
    (r"qkv/w$", ("fsdp", None, "tensor", None)),
    (r"/o/w$", ("tensor", None, "fsdp")),
    (r"up/w$", ("fsdp", "tensor")),
    (r"up/b$", ("tensor",)),
    (r"down/w$", ("tensor", "fsdp")),
    (r"proj/w$", (None, None, "fsdp")),
    (r"head/w$", ("fsdp", "tensor")),
    (r"head/b$", ("tensor",)),
)


class Block(nn.Module):
    """Attention and MLP, each behind a modulated norm and in front of a gate."""

    config: DiTConfig
    ops: Ops = Ops()

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        condition: Float[Array, "#B #T C"],
        positions: Int[Array, "B T"],
        ranges: Int[Array, "B T R 2"],
        kv: kv_cache.KV | None,
        slots: Int[Array, "B T"] | None,
    ) -> tuple[Float[Array, "B T D"], kv_cache.KV | None]:
        c = self.config
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = Modulation(c, 6, self.ops, name="modulation")(
            condition
        )
        y = Norm(c.norm_eps, name="attention_norm")(x, shift, scale)
        q, k, v = jnp.moveaxis(
            Linear((c.width,), (3, c.heads, c.head_dim), ops=self.ops, name="qkv")(y), 2, 0
        )
        q, k = rope(q, positions, c.rope_theta), rope(k, positions, c.rope_theta)
        if kv is not None and slots is not None:
            kv = self.ops.write(kv, k, v, slots)
            k, v = kv
        out = self.ops.attend(q, k, v, ranges, cached=kv is not None)
        x = x + gate * Linear((c.heads, c.head_dim), (c.width,), ops=self.ops, name="o")(out)
        y = Norm(c.norm_eps, name="mlp_norm")(x, mlp_shift, mlp_scale)
        y = jax.nn.gelu(Linear((c.width,), (c.ffn,), bias=True, ops=self.ops, name="up")(y), approximate=True)
        return x + mlp_gate * Linear((c.ffn,), (c.width,), bias=True, ops=self.ops, name="down")(y), kv


class DiT(nn.Module):
    """Embedding, blocks, modulated final norm; `head` gives logits, and needs no time any more."""

    config: DiTConfig
    ops: Ops = Ops()

    def setup(self) -> None:
        c = self.config
        self.embed = self.param("embed", nn.initializers.normal(c.width**-0.5), (c.vocab, c.width))
        self.condition = Condition(c, self.ops, name="condition")
        self.blocks = [Block(c, self.ops, name=f"block_{i}") for i in range(c.layers)]
        self.modulation = Modulation(c, 2, self.ops, name="modulation")
        self.norm = Norm(c.norm_eps, name="norm")
        self.last = Linear((c.width,), (c.vocab,), bias=True, ops=self.ops, name="head")

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        time: Float[Array, "#B #T"],
        positions: Int[Array, "B T"],
        ranges: Int[Array, "B T R 2"],
        cache: tuple[kv_cache.KV, ...] | None = None,
        slots: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], tuple[kv_cache.KV | None, ...]]:
        c = self.config
        condition = self.condition(level(c, time) if c.timed else time)
        x = self.embed[tokens].astype(c.dtype)
        filled = []
        for i, block in enumerate(self.blocks):
            x, kv = block(x, condition, positions, ranges, None if cache is None else cache[i], slots)
            filled.append(kv)
        return self.norm(x, *self.modulation(condition)), tuple(filled)

    def head(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        return self.last(hidden).astype(wide(hidden.dtype))

    def everything(self, tokens: Array, time: Array, ranges: Array) -> Array:
        """A pass through every parameter, for init."""
        return self.head(self(tokens, time, tokens, ranges)[0])


def build(config: DiTConfig) -> Model:
    """The DiT of `config` as pure functions.

    Its `forward` and `apply` take time [B] or [B, T] where config.timed, and refuse to run without; where
    it is not, they refuse a time.
    """
    net = DiT(config)
    dtype = jnp.dtype(config.dtype)
    return Model(
        config=config,
        init=functools.partial(_init, net),
        apply=functools.partial(_apply, net),
        forward=functools.partial(_forward, net),
        head=functools.partial(_head, net),
        condition=lambda params, logits: (),
        empty_cache=lambda batch, slots: kv_cache.empty(
            config.layers, batch, slots, config.heads, config.head_dim, dtype
        ),
        encodable=functools.partial(masks.encodable, config),
        layout=masks.layout_of(config),
        shardings=SHARDINGS,
    )


def _times(config: DiTConfig, time: Array | None, blind: bool = False) -> Float[Array, "#B #T"]:
    """Times as [B, 1] or [B, T], or zeros [1, 1] for a model without; doubled for shadow masks."""
    if config.timed != (time is not None):
        raise refuse("time", time, "a time of each row" if config.timed else "None: this model is not timed")
    if time is None:
        return jnp.zeros((1, 1), wide(config.dtype))
    time = jnp.asarray(time, wide(config.dtype))
    time = time[:, None] if time.ndim == 1 else time
    return jnp.concatenate([time, time], axis=1) if blind and time.shape[1] > 1 else time


def _init(net: DiT, key: Key) -> Params:
    tokens = jnp.zeros((1, 1), jnp.int32)
    ranges = jnp.zeros((1, 1, 2, 2), jnp.int32)
    return net.init(key, tokens, jnp.zeros((1, 1)), ranges, method="everything")["params"]


def _apply(
    net: DiT, params: Params, given: PackedPass, *, mesh: Mesh | None = None, device: Device | None = None
) -> Array:
    net, times = net.clone(ops=sharded_rows(mesh, device)), _times(net.config, given.time)
    return net.apply({"params": params}, given.tokens, times, given.positions, given.ranges)[0]


def _head(net: DiT, params: Params, hidden: Array) -> Any:
    return net.apply({"params": params}, hidden, method="head")


def _forward(
    net: DiT, params: Params, given: Pass, *, mesh: Mesh | None = None, device: Device | None = None
) -> tuple[Array, Cache]:
    del mesh  # XLA divides a DiT by itself
    run = masks.cached_pass(net.config, given, kv_cache.slots_of(given.cache))
    when = _times(net.config, given.time, given.leave_one_out is not None)
    net = net.clone(ops=on_device(device))
    return net.apply({"params": params}, run.tokens, when, run.positions, run.ranges, given.cache, run.slots)
