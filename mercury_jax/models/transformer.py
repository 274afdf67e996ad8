"""Our own transformer denoiser, and `build`: a config in, a `Model` of pure functions out."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from mercury_jax.config import ModelConfig
from mercury_jax.models import cache as kv_cache, masks, shift, unembed
from mercury_jax.models.attention import Attention
from mercury_jax.models.layers import RMSNorm, SwiGLU
from mercury_jax.models.ops import Ops, sharded_rows
from mercury_jax.models.parallel import ops_over
from mercury_jax.models.router import Mixture
from mercury_jax.types import Cache, Device, Key, Model, PackedPass, Params, Pass

# Axis names of each parameter, by path; see mercury_jax.sharding. The widest dimension of a
# projection goes to `tensor` (heads, hidden), the model width to `fsdp`.
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


class Block(nn.Module):
    """Pre-norm attention and SwiGLU, or experts, with residuals."""

    config: ModelConfig
    layer: int
    ops: Ops = Ops()

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        positions: Array,
        ranges: Array,
        kv: kv_cache.KV | None,
        slots: Array | None,
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
            mlp = Mixture(c.experts, c.width, scale, self.ops, name="moe")
        return x + mlp(norm("mlp_norm")(x)), kv


class Transformer(nn.Module):
    """Embedding, blocks, final norm. Submodules share one parameter tree."""

    config: ModelConfig
    ops: Ops = Ops()

    def setup(self) -> None:
        c = self.config
        self.embed = self.param("embed", nn.initializers.normal(c.width**-0.5), (c.vocab, c.width))
        self.blocks = [Block(c, i, self.ops, name=f"block_{i}") for i in range(c.layers)]
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
        c = self.config
        enter = lambda x: (x * c.width**0.5 if c.scale_embed else x).astype(c.dtype)
        x = self.ops.total([self.ops.lookup(self.embed, tokens, enter)])[0]
        near = ranges if c.window is None else masks.windowed(ranges, c.window)
        filled = []
        for i, block in enumerate(self.blocks):
            seen = ranges if c.is_global(i) else near
            x, kv = block(x, positions, seen, None if cache is None else cache[i], slots)
            filled.append(kv)
        return self.norm(x), tuple(filled)


def build(config: ModelConfig) -> Model:
    """The transformer of `config` as pure functions; equal configs give equal functions' results."""
    net = Transformer(config)
    shifted = config.alignment == "shifted"
    return Model(
        config=config,
        init=functools.partial(_init, net),
        apply=functools.partial(shift.apply if shifted else _apply, net),
        forward=functools.partial(shift.forward if shifted else _forward, net),
        head=unembed.logits,
        condition=lambda params, logits: (),
        empty_cache=functools.partial(shift.empty if shifted else _empty, config),
        encodable=functools.partial(masks.encodable, config),
        layout=masks.layout_of(config),
        shardings=SHARDINGS,
        part=_part,
    )


def _init(net: Transformer, key: Key) -> Params:
    tokens = jnp.zeros((1, 1), jnp.int32)
    ranges = jnp.zeros((1, 1, 2, 2), jnp.int32)
    return net.init(key, tokens, tokens, ranges)["params"]


def _apply(
    net: Transformer,
    params: Params,
    given: PackedPass,
    *,
    mesh: Mesh | None = None,
    device: Device | None = None,
) -> Array:
    net = net.clone(ops=sharded_rows(mesh, device))
    return net.apply({"params": params}, given.tokens, given.positions, given.ranges)[0]


def _part(params: Params, hidden: Array, first: Any, size: int) -> Array:
    return unembed.logits(params, hidden, first=first, size=size)


def _empty(config: ModelConfig, batch: int, slots: int) -> Cache:
    dtype = jnp.dtype(config.dtype)
    return kv_cache.empty(config.layers, batch, slots, config.kv_heads, config.head_dim, dtype)


def _forward(
    net: Transformer, params: Params, given: Pass, *, mesh: Mesh | None = None, device: Device | None = None
) -> tuple[Array, Cache]:
    run = masks.cached_pass(net.config, given, kv_cache.slots_of(given.cache))
    net = net.clone(ops=ops_over(mesh, device))
    return net.apply({"params": params}, run.tokens, run.positions, run.ranges, given.cache, run.slots)
