"""Layers of a DiT: the noise level as a vector, and normalisation that it modulates."""

from __future__ import annotations

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mercury_jax.models.dit.config import DiTConfig
from mercury_jax.models.layers import Linear
from mercury_jax.models.ops import Ops
from mercury_jax.types import wide


def level(config: DiTConfig, time: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """The number that stands for noise of time t in 0..1; see `DiTConfig`."""
    e = config.level_eps
    if config.level == "time":
        return e + (1.0 - 2.0 * e) * time
    if config.level == "log_linear":
        return -jnp.log1p(-(1.0 - e) * time)
    # log1p(-1) is -inf at t = 1; the clip is inside, where it also keeps the derivative finite.
    return jnp.minimum(-jnp.log1p(-jnp.minimum(time, 1.0 - e)), -math.log(e))


class Condition(nn.Module):
    """The noise level as a vector: SiLU of a two-layer MLP over cosines and sines of it.

    Frequencies are 10000**(-i / half), as positions once had (arXiv 1706.03762).
    """

    config: DiTConfig
    ops: Ops = Ops()

    @nn.compact
    def __call__(self, sigma: Float[Array, "B S"]) -> Float[Array, "B S C"]:
        c = self.config
        half = c.frequencies // 2
        angle = sigma[..., None] * jnp.exp(-math.log(10_000.0) * jnp.arange(half, dtype=sigma.dtype) / half)
        waves = jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=-1)
        hidden = jax.nn.silu(
            Linear((c.frequencies,), (c.cond,), bias=True, ops=self.ops, name="first")(waves)
        )
        return jax.nn.silu(
            Linear((c.cond,), (c.cond,), bias=True, ops=self.ops, name="second")(hidden)
        ).astype(c.dtype)


class Modulation(nn.Module):
    """`count` vectors of the model's width from the condition: shifts, scales, gates (adaLN)."""

    config: DiTConfig
    count: int
    ops: Ops = Ops()

    @nn.compact
    def __call__(self, condition: Float[Array, "B S C"]) -> list[Float[Array, "B S D"]]:
        c = self.config
        # A new model ignores the noise level and every branch (adaLN-zero): the weight starts at 0.
        made = Linear((c.cond,), (self.count, c.width), 0.0, bias=True, ops=self.ops, name="proj")(condition)
        return [made[..., i, :] for i in range(self.count)]


class Norm(nn.Module):
    """(x - mean) / deviation * scale, without a bias, in fp32 at least; then * (1 + by) + shift."""

    eps: float

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], shift: Array, by: Array) -> Float[Array, "B T D"]:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        y = x.astype(wide(x.dtype))
        y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y**2, axis=-1, keepdims=True) + self.eps) * scale
        return (y * (1.0 + by) + shift).astype(x.dtype)
