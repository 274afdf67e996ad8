"""Stops: when a block is settled before its steps are used up."""

from __future__ import annotations

from typing import Annotated

import jax
import jax.numpy as jnp

from mercury_jax.decode.parts import Knob, Memory, stop
from mercury_jax.decode.ranges import AtLeast
from mercury_jax.types import Proposal, View


@stop(whole=False)
def filled(view: View, proposal: Proposal, memory: Memory) -> tuple[jax.Array, Memory]:
    """Masked decoding: no mask is left, so another pass would change nothing."""
    used = jnp.arange(proposal.canvas.shape[0]) < proposal.n
    return ~jnp.any(used & (proposal.canvas == view.noise)), memory


@stop(whole=False)
def never(view: View, proposal: Proposal, memory: Memory) -> tuple[jax.Array, Memory]:
    """Use every step."""
    del view, proposal
    return jnp.asarray(False), memory


@stop(init=lambda canvas, vocab: (jnp.full_like(canvas, -1), jnp.asarray(0, jnp.int32)), whole=False)
def steady(
    view: View,
    proposal: Proposal,
    memory: Memory,
    *,
    entropy: Annotated[Knob, AtLeast(0)] = 0.005,
    patience: Annotated[Knob, AtLeast(0, whole=True)] = 1,
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


def _counts(canvas: jax.Array, vocab: int) -> tuple[jax.Array, jax.Array]:
    del canvas, vocab
    return jnp.asarray(0, jnp.int32), jnp.asarray(0, jnp.int32)


@stop(init=_counts, whole=False)
def fixed_point(
    view: View,
    proposal: Proposal,
    memory: Memory,
    *,
    patience: Annotated[Knob, AtLeast(0, whole=True)] = 1,
    limit: Annotated[Knob, AtLeast(0, whole=True, infinite=True)] = jnp.inf,
) -> tuple[jax.Array, Memory]:
    """No mask is left, and `patience` steps have changed nothing; or `limit` steps began without a mask.

    For rules that edit what is settled. LLaDA2.1 (arXiv 2602.08676) has patience 1 and limit 16.
    """
    still, full = memory
    same = jnp.all(proposal.canvas == view.canvas) & (proposal.n == view.n)
    still = jnp.where(same, still + 1, 0)
    full = full + ~jnp.any(view.masked)
    done, _ = filled()(view, proposal, ())
    return done & ((still >= patience) | (full >= limit)), (still, full)


@stop(init=_counts, whole=False)
def stalled(
    view: View, proposal: Proposal, memory: Memory, *, patience: Annotated[Knob, AtLeast(0, whole=True)] = 32
) -> tuple[jax.Array, Memory]:
    """No mask is left, and nothing changed or the canvas no longer comes closer to the argmax.

    Closeness is how many tokens are the argmax of the pass that proposed them; the block ends after
    more than `patience` steps in a row without a new best (GIDD's self-correction, arXiv 2503.04482).
    """
    best, count = memory
    agreeing = (view.editable & (proposal.canvas == view.reading.argmax)).sum().astype(jnp.int32)
    full = ~jnp.any(view.masked)
    count = jnp.where(full & (agreeing <= best), count + 1, 0)
    best = jnp.where(full, jnp.maximum(best, agreeing), 0)
    done, _ = filled()(view, proposal, ())
    same = jnp.all(proposal.canvas == view.canvas)
    return done & (same | (count > patience)), (best, count)


ALL = {make.__name__: make for make in (filled, never, steady, fixed_point, stalled)}
