"""Shapers that scale: the temperature of what is read."""

from __future__ import annotations

from typing import Annotated

import jax.numpy as jnp
from jaxtyping import Array, Float

from mercury_jax.decode.parts import Knob, shaper
from mercury_jax.decode.ranges import AtLeast
from mercury_jax.decode.read import NEVER
from mercury_jax.types import View

Logits = Float[Array, "L V"]


@shaper(whole=False)
def temperature(logits: Logits, view: View, *, t: Annotated[Knob, AtLeast(0)] = 1.0) -> Logits:
    """Divide by `t` for everything that is read (confidence, entropy); drawing has its own knob."""
    del view
    return hold(logits, logits / jnp.maximum(t, 1e-6))


@shaper(whole=False)
def cooling(
    logits: Logits,
    view: View,
    *,
    last: Annotated[Knob, AtLeast(0)] = 0.4,
    first: Annotated[Knob, AtLeast(0)] = 0.8,
) -> Logits:
    """Temperature from `first` at noise to `last` at text, linear in time (DiffusionGemma)."""
    return hold(logits, logits / jnp.maximum(last + (first - last) * view.t, 1e-6))


def hold(old: Logits, new: Logits) -> Logits:
    """`new`, finite, and NEVER wherever `old` is: scaling alone would revive an id, or overflow."""
    return jnp.where(old > NEVER, jnp.clip(new, NEVER, -NEVER), NEVER)
