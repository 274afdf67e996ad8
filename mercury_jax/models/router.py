"""Which experts a token goes to, and the feed-forward that they make together."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mercury_jax.config import Experts
from mercury_jax.models.layers import SwiGLU, fan_in, weight
from mercury_jax.models.ops import Ops, Term
from mercury_jax.types import wide


def route(
    scores: Float[Array, "N E"], correction: Float[Array, "E"] | None, c: Experts
) -> tuple[Int[Array, "N k"], Float[Array, "N k"]]:
    """(ids, weights) of each token's experts; scores are those of the softmax or the sigmoid, in fp32 at least."""
    choice = scores if correction is None else scores + correction
    if c.groups > 1:
        choice = jnp.where(_in_best_groups(choice, c), choice, -jnp.inf)
    _, ids = jax.lax.top_k(choice, c.active)
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if c.renormalise:
        # The sigmoid's sum may vanish, the softmax's cannot.
        floor = 1e-20 if c.score == "sigmoid" else 0.0
        weights = weights / (weights.sum(-1, keepdims=True) + floor)
    return ids.astype(jnp.int32), weights * c.scale


def _route(c: Experts, scores: Float[Array, "B T E"], *correction: Array) -> tuple[Array, Array]:
    """`route` of rows, [B, T, k] both."""
    found = route(scores.reshape(-1, c.count), correction[0] if correction else None, c)
    return found[0].reshape(*scores.shape[:2], -1), found[1].reshape(*scores.shape[:2], -1)


def _in_best_groups(choice: Float[Array, "N E"], c: Experts) -> Array:
    """Whether each expert is in one of the groups whose two best scores have the largest sums."""
    by_group = choice.reshape(-1, c.groups, c.count // c.groups)
    strength = jax.lax.top_k(by_group, min(2, c.count // c.groups))[0].sum(-1)
    _, best = jax.lax.top_k(strength, c.active_groups)
    chosen = jnp.zeros(strength.shape, bool).at[jnp.arange(strength.shape[0])[:, None], best].set(True)
    return jnp.repeat(chosen, c.count // c.groups, axis=1)


class Mixture(nn.Module):
    """Routed experts, each a SwiGLU, and a shared one where there is one."""

    config: Experts
    width: int
    scale: float  # of the last projection's init
    ops: Ops = Ops()

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.ops.total(self.parts(x))[0]

    @nn.compact
    def parts(self, x: Float[Array, "B T D"]) -> list[Term]:
        """What each kind of experts adds."""
        c, kind = self.config, wide(x.dtype)
        router = self.param("router", fan_in(), (self.width, c.count))
        logits = x.astype(kind) @ router.astype(kind)
        scores = jax.nn.softmax(logits, axis=-1) if c.score == "softmax" else jax.nn.sigmoid(logits)
        bias = self.param("correction", nn.initializers.zeros, (c.count,)) if c.correction else None
        ids, weights = self.ops.map_rows(
            functools.partial(_route, c), scores, *([] if bias is None else [bias])
        )
        each = lambda init: (
            lambda key, shape: jax.vmap(lambda k: init(k, shape[1:]))(jax.random.split(key, shape[0]))
        )
        gate_up = weight(self, "gate_up", each(fan_in()), (c.count, self.width, 2 * c.width))
        down = weight(self, "down", each(fan_in(1, self.scale)), (c.count, c.width, self.width))
        routed = self.ops.mixture(x, ids, weights.astype(x.dtype), (gate_up, down), jax.nn.silu)
        if not c.shared:
            return [routed]
        return [routed, SwiGLU(self.width, c.shared, self.scale, ops=self.ops, name="shared").part(x)]
