"""RMS norms in plain JAX: of vectors, of several arrays of heads, and of a residual sum."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from mercury_jax.ops.experts.op import ExpertOutputs, combine
from mercury_jax.ops.norms import op as fused_norms
from mercury_jax.ops.norms.op import Residual
from mercury_jax.ops.operation import Op
from mercury_jax.ops.quantised_rows import Rows, quantise_rows
from mercury_jax.types import accumulation_dtype


def rms_normalise(
    x: Float[Array, "*s D"], eps: float, inverse: Float[Array, "*s 1"] | None = None
) -> Float[Array, "*s D"]:
    """Computes x / rms(x) in at least fp32, and returns it in that dtype (arXiv 1910.07467)."""
    y = x.astype(accumulation_dtype(x.dtype))
    return y * (jax.lax.rsqrt(jnp.mean(y**2, axis=-1, keepdims=True) + eps) if inverse is None else inverse)


def inverse_rms(xs: Sequence[Float[Array, "B T _ K"]], eps: float) -> list[Float[Array, "B T _ 1"]]:
    """Computes 1 / rms of each head of several arrays of the same head size, in at least fp32.

    The mean squares of all arrays are one reduction. XLA makes one GPU kernel of it, and fuses the normalisation of
    each array into what reads it: RoPE and the write into the cache. With a reduction for each array it would make a
    kernel for each, and would not fuse those.
    """
    heads = jnp.concatenate(xs, axis=2)
    squares = jnp.mean(heads.astype(accumulation_dtype(heads.dtype)) ** 2, axis=-1, keepdims=True)
    parts = jnp.split(squares, np.cumsum([x.shape[2] for x in xs])[:-1], axis=2)
    return [jax.lax.rsqrt(part + eps) for part in parts]


def residual_norms(
    x: Float[Array, "*s D"],
    residual: Residual,
    factors: Sequence[Float[Array, "D"]],
    eps: float,
    rounded: Sequence[Any] = (),
) -> tuple[Float[Array, "*s D"], list[Rows]]:
    """Adds what a layer computed to x, and normalises the sum.

    Returns:
        The new hidden states, and their norms, one for each of `factors`; those that are rounded as `QuantisedRows`.
    """
    norm = lambda y, factor: y if factor is None else (rms_normalise(y, eps) * factor).astype(x.dtype)
    branches = [combine(y) if isinstance(y, ExpertOutputs) else y for y in residual.branches]
    added = functools.reduce(operator.add, map(norm, branches, residual.factors))
    total = x + norm(added, residual.post)
    if residual.scales:
        scale = residual.scales[0]
        if residual.choice is not None:
            scale = jnp.where(residual.choice[..., None], residual.scales[1], scale)
        total = total * scale.astype(x.dtype)
    found = [norm(total, factor) for factor in factors]
    pairs = itertools.zip_longest(found, rounded)
    return total, [y if dtype is None else quantise_rows(y, dtype) for y, dtype in pairs]


RESIDUAL_NORMS = Op(
    "norm", residual_norms, fused_norms.RESIDUAL_NORMS,
    fallback="a kernel of each norm, by XLA", cases="mercury_jax.ops.norms.cases",
)  # fmt: skip
