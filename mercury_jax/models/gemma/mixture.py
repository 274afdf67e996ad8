"""The expert branch of Gemma 4: its router, and the experts that it chooses."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mercury_jax.models.gemma.config import GemmaConfig
from mercury_jax.models.gemma.layers import ACTIVATIONS, rms
from mercury_jax.models.layers import fan_in, weight
from mercury_jax.models.ops import Ops, Term
from mercury_jax.types import wide


class Router(nn.Module):
    """The `active` most probable experts of each token, their probabilities divided by their sum and scaled."""

    config: GemmaConfig
    ops: Ops = Ops()

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> tuple[Int[Array, "B T k"], Float[Array, "B T k"]]:
        c = self.config
        assert c.experts is not None
        scale = self.param("scale", nn.initializers.ones, (c.width,))
        w = weight(self, "w", fan_in(), (c.width, c.experts.count))
        each = self.param("expert_scale", nn.initializers.ones, (c.experts.count,))
        seen = rms(x, c.norm_eps).astype(x.dtype) * scale.astype(x.dtype) * c.width**-0.5
        chance = jax.nn.softmax(self.ops.dot(seen, w, 1).astype(wide(x.dtype)), axis=-1)
        best = functools.partial(jax.lax.top_k, k=c.experts.active)
        weights, ids = self.ops.map_rows(best, chance)
        weights = weights / weights.sum(axis=-1, keepdims=True)
        return ids, weights * each[ids].astype(weights.dtype)


class Mixture(nn.Module):
    """Experts over the flattened tokens. `routed`: what the router reads; `x`: what the experts read."""

    config: GemmaConfig
    ops: Ops = Ops()

    @nn.compact
    def part(self, routed: Float[Array, "B T D"], x: Float[Array, "B T D"]) -> Term:
        c = self.config
        assert c.experts is not None
        e = c.experts
        ids, weights = Router(c, self.ops, name="router")(routed)
        gate_up = weight(self, "gate_up", _stacked(), (e.count, c.width, 2 * e.width))
        down = weight(self, "down", _stacked(1.0 / (2 * c.layers)), (e.count, e.width, c.width))
        return self.ops.mixture(x, ids, weights, (gate_up, down), ACTIVATIONS[c.activation])


def _stacked(scale: float = 1.0) -> nn.initializers.Initializer:
    """Normal init of [E, in, out] with variance scale / in."""
    return lambda key, shape, dtype=jnp.float32: (
        jax.random.normal(key, shape, dtype) * (scale / shape[1]) ** 0.5
    )
