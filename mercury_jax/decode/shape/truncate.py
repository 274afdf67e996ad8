"""Shapers that truncate: the improbable ids of each position are dropped."""

from __future__ import annotations

from typing import Annotated

import jax
import jax.numpy as jnp

from mercury_jax.decode.parts import Knob, shaper
from mercury_jax.decode.ranges import AtLeast, Between
from mercury_jax.decode.read import NEVER
from mercury_jax.decode.shape.scale import Logits
from mercury_jax.types import View


@shaper
def top_k(logits: Logits, view: View, *, k: Annotated[Knob, AtLeast(1, whole=True)] = 50) -> Logits:
    """Keep the `k` most probable ids of each position (ties with the k-th stay)."""
    del view
    ordered = jnp.sort(logits, axis=-1)[:, ::-1]
    at = jnp.clip(k, 1, logits.shape[-1]) - 1
    return jnp.where(logits >= jax.lax.dynamic_slice_in_dim(ordered, at, 1, axis=1), logits, NEVER)


@shaper
def top_p(logits: Logits, view: View, *, p: Annotated[Knob, Between(0, 1)] = 0.95) -> Logits:
    """Keep the smallest set of ids whose probability reaches `p` (arXiv 1904.09751)."""
    del view
    ordered = jnp.sort(logits, axis=-1)[:, ::-1]
    mass = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(mass, axis=-1) - mass
    # The least logit among those still needed; the first one always is. At 1 all are, though sums may round up to it.
    needed = ((before < p) | (p >= 1)).at[:, 0].set(True)
    least = jnp.min(jnp.where(needed, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits >= least, logits, NEVER)


@shaper
def min_p(logits: Logits, view: View, *, p: Annotated[Knob, Between(0, 1)] = 0.05) -> Logits:
    """Keep ids at least `p` times as probable as the best one, which always stays (arXiv 2407.01082)."""
    del view
    least = logits.max(axis=-1, keepdims=True) + jnp.log(jnp.clip(p, 1e-30, 1.0))
    return jnp.where(logits >= least, logits, NEVER)
