"""The expert branch of Gemma 4: its router, and the experts that it chooses."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mercury_jax.models import moe
from mercury_jax.models.gemma.config import GemmaConfig
from mercury_jax.models.gemma.layers import ACTIVATIONS, rms
from mercury_jax.models.layers import dot, fan_in, weight
from mercury_jax.types import wide


class Router(nn.Module):
    """The `active` most probable experts of each token, their probabilities divided by their sum and scaled."""

    config: GemmaConfig

    @nn.compact
    def __call__(self, x: Float[Array, "N D"]) -> tuple[Int[Array, "N k"], Float[Array, "N k"]]:
        c = self.config
        assert c.experts is not None
        scale = self.param("scale", nn.initializers.ones, (c.width,))
        w = weight(self, "w", fan_in(), (c.width, c.experts.count))
        each = self.param("expert_scale", nn.initializers.ones, (c.experts.count,))
        seen = rms(x, c.norm_eps).astype(x.dtype) * scale.astype(x.dtype) * c.width**-0.5
        chance = jax.nn.softmax(dot(seen, w, 1).astype(wide(x.dtype)), axis=-1)
        weights, ids = jax.lax.top_k(chance, c.experts.active)
        weights = weights / weights.sum(axis=-1, keepdims=True)
        return ids, weights * each[ids].astype(weights.dtype)


class Mixture(nn.Module):
    """Experts over the flattened tokens. `routed`: what the router reads; `x`: what the experts read."""

    config: GemmaConfig

    @nn.compact
    def __call__(self, routed: Float[Array, "B T D"], x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        c = self.config
        assert c.experts is not None
        e = c.experts
        ids, weights = Router(c, name="router")(routed.reshape(-1, c.width))
        gate_up = weight(self, "gate_up", _stacked(), (e.count, c.width, 2 * e.width))
        down = weight(self, "down", _stacked(1.0 / (2 * c.layers)), (e.count, e.width, c.width))
        out = moe.experts(x.reshape(-1, c.width), ids, weights, gate_up, down, ACTIVATIONS[c.activation])
        return out.reshape(x.shape)


def _stacked(scale: float = 1.0) -> nn.initializers.Initializer:
    """Normal init of [E, in, out] with variance scale / in."""
    return lambda key, shape, dtype=jnp.float32: (
        jax.random.normal(key, shape, dtype) * (scale / shape[1]) ** 0.5
    )
