"""Attention of Gemma 4: two kinds of layers, keys that may be values too, keys that layers share."""

from __future__ import annotations

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.models import cache as kv_cache
from mercury_jax.models.gemma.config import GemmaConfig
from mercury_jax.models.gemma.layers import Norm, Rotation, rms
from mercury_jax.models.layers import Linear, Matrix
from mercury_jax.models.ops import Ops


class Attention(nn.Module):
    """Normed queries, keys and values at scale 1; the keys come out for the layers that share them."""

    config: GemmaConfig
    layer: int
    ops: Ops = Ops()

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        rotate: Rotation,
        ranges: Int[Array, "B T R 2"],
        kv: kv_cache.KV | None,
        slots: Int[Array, "B T"] | None,
        shared: kv_cache.KV | None,
    ) -> tuple[Float[Array, "B T D"], kv_cache.KV]:
        c = self.config
        _, width = c.kv_shape(self.layer)
        q = Linear((c.width,), (c.heads, width), ops=self.ops, name="q")(x)
        q = rotate(Norm(c.norm_eps, name="q_norm")(q))
        if shared is None:
            shared = self._keys(x, rotate, kv, slots)
        out = self.ops.attend(q, *shared, ranges, scale=1.0, cached=slots is not None)
        out = Matrix((c.heads, width), (c.width,), 1.0 / (2 * c.layers), ops=self.ops, name="o").part(out)
        return self.ops.total([out])[0], shared

    def _keys(self, x: Array, rotate: Rotation, kv: kv_cache.KV | None, slots: Array | None) -> kv_cache.KV:
        """This pass's keys and values, or with a cache all of the row's."""
        c = self.config
        shape = c.kv_shape(self.layer)
        k = Linear((c.width,), shape, ops=self.ops, name="k")(x)
        same = c.keys_as_values and c.is_global(self.layer)
        v = k if same else Linear((c.width,), shape, ops=self.ops, name="v")(x)
        k = rotate(Norm(c.norm_eps, name="k_norm")(k))
        v = rms(v, c.norm_eps).astype(v.dtype)
        return kv_cache.KV(k, v) if kv is None or slots is None else self.ops.write(kv, k, v, slots)


def row_window(
    config: GemmaConfig, ranges: Int[Array, "B T 2 2"]
) -> tuple[Bool[Array, "B T"], Int[Array, "B T"]]:
    """(which tokens of a packed row are clean, the lowest slot that each sees in a sliding layer).

    By what `masks.layout` makes: a clean token's first range ends with the token itself and its second is
    empty; a canvas token's first ends where its context does, its second is the canvas. Documents stand
    one behind the other in a row, so slots are not positions; differences of slots are, within a range.
    """
    clean = ranges[:, :, 1, 1] <= ranges[:, :, 1, 0]
    return clean, ranges[:, :, 0, 1] - jnp.where(clean, config.window, config.tail)


def pass_window(
    config: GemmaConfig, positions: Int[Array, "B T"], start: Int[Array, "B"], encoding: Bool[Array, "B"]
) -> Int[Array, "B T"]:
    """The lowest slot that each token of a pass over a cache sees in a sliding layer."""
    return jnp.where(encoding[:, None], positions + 1 - config.window, start[:, None] - config.tail)
