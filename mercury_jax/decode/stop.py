"""Stops: when a block is settled before its steps are used up."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mercury_jax.decode.parts import Knob, Memory, stop
from mercury_jax.types import Proposal, View


@stop
def filled(view: View, proposal: Proposal, memory: Memory) -> tuple[jax.Array, Memory]:
    """Masked decoding: no mask is left, so another pass would change nothing."""
    return ~jnp.any(view.masked & (proposal.canvas == view.noise)), memory


@stop
def never(view: View, proposal: Proposal, memory: Memory) -> tuple[jax.Array, Memory]:
    """Use every step."""
    del view, proposal
    return jnp.asarray(False), memory


@stop(init=lambda canvas: (jnp.full_like(canvas, -1), jnp.asarray(0, jnp.int32)))
def steady(
    view: View, proposal: Proposal, memory: Memory, *, entropy: Knob = 0.005, patience: Knob = 1
) -> tuple[jax.Array, Memory]:
    """The answer stood still for `patience` steps and its mean entropy is under `entropy` nats.

    DiffusionGemma's stable-and-confident stop, as its Hugging Face and vLLM versions have it.
    """
    before, count = memory
    same = jnp.all((proposal.answer == before) | ~view.editable)
    count = jnp.where(same, count + 1, 0)
    used = jnp.maximum(view.editable.sum(), 1)
    mean = jnp.sum(view.reading.entropy * view.editable) / used
    return (count >= patience) & (mean < entropy), (proposal.answer, count)
