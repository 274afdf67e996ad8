"""Rotary positions: which angle each pair of a head's numbers is turned by."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from mercury_jax.config import RopeScaling
from mercury_jax.types import wide


def rope(
    x: Float[Array, "B T H K"],
    positions: Int[Array, "B T"],
    theta: float,
    fraction: float = 1.0,
    scaling: RopeScaling | None = None,
) -> Float[Array, "B T H K"]:
    """Rotate the pairs (x[i], x[i + R/2]) of the first R = fraction * K numbers (RoFormer, arXiv 2104.09864).

    The angle is position * theta**(-2i/R), stretched as `scaling` says.
    """
    rotated = int(x.shape[-1] * fraction)
    half = rotated // 2
    kind = wide(x.dtype)
    angle = positions[..., None, None].astype(kind) * jnp.asarray(frequencies(theta, half, scaling), kind)
    amplitude = 1.0 if scaling is None else scaling.attention
    cos, sin = jnp.cos(angle) * amplitude, jnp.sin(angle) * amplitude
    a, b = x[..., :half].astype(kind), x[..., half:rotated].astype(kind)
    turned = [a * cos - b * sin, b * cos + a * sin, x[..., rotated:].astype(kind)]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def frequencies(theta: float, half: int, scaling: RopeScaling | None = None) -> Float[np.ndarray, "half"]:
    """theta**(-i/half), stretched; float64, so that every caller rounds once."""
    plain = float(theta) ** (-np.arange(half) / half)
    if scaling is None or scaling.kind == "dynamic":  # plain within the context that `RopeScaling` allows
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "longrope":
        return plain / np.asarray(scaling.short)
    if scaling.kind == "llama3":
        return _llama3(plain, scaling)
    return _yarn(plain, theta, half, scaling)


def _llama3(plain: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    wavelength = 2 * math.pi / plain
    share = (scaling.original / wavelength - scaling.low) / (scaling.high - scaling.low)
    share = np.clip(share, 0.0, 1.0)  # 1 for the fast ones, which stay
    return (1 - share) * plain / scaling.factor + share * plain


def _yarn(plain: np.ndarray, theta: float, half: int, scaling: RopeScaling) -> np.ndarray:
    # The pair that makes `turns` rotations over the original context (YaRN, equations 17 to 22).
    at = lambda turns: half * math.log(scaling.original / (turns * 2 * math.pi)) / math.log(theta)
    low, high = at(scaling.fast), at(scaling.slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    # An empty range is a step. One that runs backwards (fewer than `fast` rotations fit into the original context)
    # divides by a negative number, as the reference does.
    ramp = np.clip((np.arange(half) - low) / (high - low or 1e-3), 0.0, 1.0)
    return plain / scaling.factor * ramp + plain * (1 - ramp)
