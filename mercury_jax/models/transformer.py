"""Our own transformer denoiser, and `build`: a config in, a `Model` of pure functions out."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.config import ModelConfig
from mercury_jax.models import cache as kv_cache, masks
from mercury_jax.models.attention import Attention
from mercury_jax.models.layers import RMSNorm, SwiGLU
from mercury_jax.types import Cache, Carry, Key, Model, Params, wide

# Axis names of each parameter, by path; see mercury_jax.sharding. The widest dimension of a
# projection goes to `tensor` (heads, hidden), the model width to `fsdp`.
SHARDINGS = (
    (r"embed$", ("tensor", "fsdp")),
    (r"(q|k|v)/w$", ("fsdp", "tensor", None)),
    (r"o/w$", ("tensor", None, "fsdp")),
    (r"(gate|up)/w$", ("fsdp", "tensor")),
    (r"down/w$", ("tensor", "fsdp")),
    (r"head$", ("fsdp", "tensor")),
)


class Block(nn.Module):
    """Pre-norm attention and SwiGLU with residuals."""

    config: ModelConfig

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
        y, kv = Attention(c, name="attention")(
            RMSNorm(c.norm_eps, name="attention_norm")(x), positions, ranges, kv, slots
        )
        x = x + y
        mlp = SwiGLU(c.width, c.ffn, 1.0 / (2 * c.layers), name="mlp")
        return x + mlp(RMSNorm(c.norm_eps, name="mlp_norm")(x)), kv


class Transformer(nn.Module):
    """Embedding, blocks, final norm; `head` gives logits. Submodules share one parameter tree."""

    config: ModelConfig

    def setup(self) -> None:
        c = self.config
        self.embed = self.param("embed", nn.initializers.normal(c.width**-0.5), (c.vocab, c.width))
        self.blocks = [Block(c, name=f"block_{i}") for i in range(c.layers)]
        self.norm = RMSNorm(c.norm_eps, name="norm")
        if not c.tied:
            self.untied = self.param("head", nn.initializers.normal(c.width**-0.5), (c.width, c.vocab))

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        ranges: Int[Array, "B T R 2"],
        cache: tuple[kv_cache.KV, ...] | None = None,
        slots: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], tuple[kv_cache.KV | None, ...]]:
        c = self.config
        x = (self.embed[tokens] * c.width**0.5).astype(c.dtype)
        filled = []
        for i, block in enumerate(self.blocks):
            x, kv = block(x, positions, ranges, None if cache is None else cache[i], slots)
            filled.append(kv)
        return self.norm(x), tuple(filled)

    def head(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        w = self.embed.T if self.config.tied else self.untied
        return jnp.einsum(
            "btd,dv->btv", hidden, w.astype(hidden.dtype), preferred_element_type=wide(hidden.dtype)
        )

    def everything(self, tokens: Array, positions: Array, ranges: Array) -> Array:
        """A pass through every parameter, for init."""
        return self.head(self(tokens, positions, ranges)[0])


def build(config: ModelConfig) -> Model:
    """The transformer of `config` as pure functions; equal configs give equal functions' results."""
    net = Transformer(config)
    return Model(
        config=config,
        init=functools.partial(_init, net),
        apply=functools.partial(_apply, net),
        forward=functools.partial(_forward, net),
        head=functools.partial(_head, net),
        condition=lambda params, logits: (),
        empty_cache=lambda batch, slots: kv_cache.empty(
            config.layers, batch, slots, config.kv_heads, config.head_dim, jnp.dtype(config.dtype)
        ),
        encodable=functools.partial(masks.encodable, config),
        layout=masks.layout_of(config),
        shardings=SHARDINGS,
    )


def _init(net: Transformer, key: Key) -> Params:
    tokens = jnp.zeros((1, 1), jnp.int32)
    ranges = jnp.zeros((1, 1, 2, 2), jnp.int32)
    return net.init(key, tokens, tokens, ranges, method="everything")["params"]


def _apply(
    net: Transformer, params: Params, tokens: Array, positions: Array, ranges: Array, carry: Carry = ()
) -> Array:
    return net.apply({"params": params}, tokens, positions, ranges)[0]


def _head(net: Transformer, params: Params, hidden: Array) -> Any:
    return net.apply({"params": params}, hidden, method="head")


def _forward(
    net: Transformer,
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
    offsets = jnp.arange(tokens.shape[1])[None]
    live = offsets < n[:, None]
    positions = start[:, None] + offsets
    capacity = jax.tree.leaves(cache)[0].shape[1]
    slots = jnp.where(live, positions, capacity)  # dead tokens are dropped
    ranges = masks.pass_ranges(net.config, positions, live, end, encoding)
    if blind is not None:
        # A mask for each token, behind the canvas: it sees all but the token, and its own key.
        live = live & ~encoding[:, None]
        shadows = jnp.where(live, end[:, None] + offsets, capacity)
        ranges = jnp.concatenate(
            [masks.padded(ranges), masks.blind_ranges(positions, live, end, shadows)], axis=1
        )
        tokens = jnp.concatenate([tokens, jnp.full_like(tokens, blind)], axis=1)
        positions = jnp.concatenate([positions, positions], axis=1)
        slots = jnp.concatenate([slots, shadows], axis=1)
    return net.apply({"params": params}, tokens, positions, ranges, cache, slots)
