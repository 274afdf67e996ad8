"""The small parts of Gemma 4: norms, rotations, the gated branch, self-conditioning, per-layer embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.models.gemma.config import GemmaConfig
from mercury_jax.models.layers import Linear, Matrix
from mercury_jax.models.ops import Ops, Term
from mercury_jax.types import wide

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "silu": jax.nn.silu,
}


def rms(x: Float[Array, "*s D"], eps: float) -> Float[Array, "*s D"]:
    """x / rms(x), at least in fp32, which is also what it returns."""
    y = x.astype(wide(x.dtype))
    return y * jax.lax.rsqrt(jnp.mean(y**2, axis=-1, keepdims=True) + eps)


class Norm(nn.Module):
    """x / rms(x) * scale: the scale itself, not 1 + scale as in earlier Gemmas."""

    eps: float

    @nn.compact
    def __call__(self, x: Float[Array, "*s D"]) -> Float[Array, "*s D"]:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        y = rms(x, self.eps)
        return (y * scale.astype(y.dtype)).astype(x.dtype)


class Rotation(NamedTuple):
    """cos and sin of every position's angles, C = K / 2 of them; the same for all layers of a kind."""

    cos: Float[Array, "B T 1 C"]
    sin: Float[Array, "B T 1 C"]

    def __call__(self, x: Float[Array, "B T H K"]) -> Float[Array, "B T H K"]:
        """Rotate the pairs (x[i], x[i + C])."""
        a, b = jnp.split(x.astype(self.cos.dtype), 2, axis=-1)
        turned = [a * self.cos - b * self.sin, b * self.cos + a * self.sin]
        return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def rotation(
    positions: Int[Array, "B T"], width: int, theta: float, fraction: float, factor: float, dtype: jnp.dtype
) -> Rotation:
    """RoPE over heads of `width`, proportional: pair i turns by theta**(-2i/width), the last pairs not at all.

    The exponent counts in the whole width whatever the fraction, so that a pair turns as fast as it would
    without one.
    """
    pairs = int(fraction * width // 2)
    frequency = np.zeros(width // 2)
    frequency[:pairs] = theta ** (-2.0 * np.arange(pairs) / width) / factor
    angle = positions[..., None, None].astype(dtype) * jnp.asarray(frequency, dtype)
    return Rotation(jnp.cos(angle), jnp.sin(angle))


class Gated(nn.Module):
    """down(act(gate(x)) * up(x))."""

    config: GemmaConfig
    hidden: int
    ops: Ops = Ops()

    @nn.compact
    def part(self, x: Float[Array, "B T D"]) -> Term:
        c = self.config
        gate = Linear((c.width,), (self.hidden,), ops=self.ops, name="gate")(x)
        up = Linear((c.width,), (self.hidden,), ops=self.ops, name="up")(x)
        out = ACTIVATIONS[c.activation](gate) * up
        return Matrix((self.hidden,), (c.width,), 1.0 / (2 * c.layers), ops=self.ops, name="down").part(out)


class SelfConditioning(nn.Module):
    """What the pass before thought of each canvas position, to be added to its embedding.

    carry: soft embeddings [B, T, D] of the pass before, or () for none, which counts as zeros: the canvas's
    embeddings are normalised all the same.
    """

    config: GemmaConfig
    ops: Ops = Ops()

    @nn.compact
    def part(self, carry: Array | tuple[()], shape: tuple[int, int], dtype: jnp.dtype) -> Term:
        """In `dtype`, for `shape` = (B, T) positions."""
        c = self.config
        signal = jnp.zeros((*shape, c.width), dtype) if isinstance(carry, tuple) else carry.astype(dtype)
        return Gated(c, c.ffn, self.ops, name="mlp").part(Norm(c.norm_eps, name="norm")(signal))


def told(
    x: Float[Array, "B T D"], signal: Float[Array, "B T D"], clean: Bool[Array, "B T"], eps: float
) -> Float[Array, "B T D"]:
    """Embeddings with what `SelfConditioning` adds to them; those of clean tokens are left alone."""
    return jnp.where(clean[..., None], x, rms(x + signal, eps).astype(x.dtype))


class PerLayer(nn.Module):
    """Each token's embeddings for every layer [B, T, N, P]: a table's and a projection's of its embedding."""

    config: GemmaConfig
    ops: Ops = Ops()

    @nn.compact
    def __call__(self, tokens: Int[Array, "B T"], x: Float[Array, "B T D"]) -> Float[Array, "B T N P"]:
        c = self.config
        sizes = (c.layers, c.per_layer_width)
        table = self.param(
            "embed", nn.initializers.normal(c.per_layer_width**-0.5), (c.per_layer_vocab, *sizes)
        )
        scaled = lambda rows: (rows * c.per_layer_width**0.5).astype(x.dtype)
        own = self.ops.total([self.ops.lookup(table, tokens, scaled)])[0]
        seen = Linear((c.width,), sizes, ops=self.ops, name="projection")(x) * c.width**-0.5
        return self.ops.replicate((Norm(c.norm_eps, name="norm")(seen) + own) * 2.0**-0.5)


class PerLayerInput(nn.Module):
    """A layer's own embedding, gated by the hidden state, normalised and added to it."""

    config: GemmaConfig
    ops: Ops = Ops()

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], own: Float[Array, "B T P"]) -> Float[Array, "B T D"]:
        c = self.config
        gate = ACTIVATIONS[c.activation](
            Linear((c.width,), (c.per_layer_width,), ops=self.ops, name="gate")(x)
        )
        out = Linear((c.per_layer_width,), (c.width,), ops=self.ops, name="projection")(gate * own)
        return x + Norm(c.norm_eps, name="norm")(out)
