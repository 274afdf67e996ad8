"""Stopping criteria: they decide whether a block is finished before its steps are used up.

Each is a pure function of the view, the proposal and the criterion's own memory of one row, see
`sampler.StoppingFunction`. `denoise.py` also finishes a block when its steps are used up, or when the end of text is
decided and no position before it is open.
"""

from __future__ import annotations

from typing import Annotated, Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from mercury_jax.config import AtLeast
from mercury_jax.decode.registration import STOPPING, NonNegative, no_such_part, stopping_criterion
from mercury_jax.decode.sampler import Memory, Param, StoppingCriterion
from mercury_jax.types import Proposal, View

ALL = STOPPING


@stopping_criterion(needs_logits=False, keeps_decided=True)
def filled(view: View, proposal: Proposal, memory: Memory) -> tuple[Bool[Array, ""], Memory]:
    """Stops when no mask is left: the default of masked decoding, where another pass would change nothing.

    Args:
        view: Reads `noise`, which is the mask id everywhere.
        proposal: Reads `canvas` and `used`.
        memory: Unused.

    Returns:
        Whether the block is finished, and the unchanged memory.
    """
    used = jnp.arange(proposal.canvas.shape[0]) < proposal.used
    return ~jnp.any(used & (proposal.canvas == view.noise)), memory


@stopping_criterion(needs_logits=False)
def never(view: View, proposal: Proposal, memory: Memory) -> tuple[Bool[Array, ""], Memory]:
    """Uses every step.

    Args:
        view: Unused.
        proposal: Unused.
        memory: Unused.

    Returns:
        False, and the unchanged memory.
    """
    return jnp.asarray(False), memory


@stopping_criterion(
    init=lambda canvas, vocab: (jnp.full_like(canvas, -1), jnp.asarray(0, jnp.int32)),
    needs_logits=False,
    source="DiffusionGemma, the stable-and-confident criterion of its transformers and vLLM implementations",
)
def steady(
    view: View,
    proposal: Proposal,
    memory: tuple[Int[Array, "L"], Int[Array, ""]],
    entropy: NonNegative = 0.005,
    patience: Annotated[Param, AtLeast(0, integer=True)] = 1,
) -> tuple[Bool[Array, ""], tuple[Int[Array, "L"], Int[Array, ""]]]:
    """Stops when the answer has not changed for `patience` steps and its mean entropy is below `entropy`.

    Args:
        view: Reads `editable` and `stats.entropy`.
        proposal: Reads `answer`.
        memory: The previous answer [L], and the number of steps for which it has not changed.
        entropy: Bound on the entropy in nats, averaged over the editable positions.
        patience: Number of consecutive steps without a change of the answer.

    Returns:
        Whether the block is finished, and the new memory.
    """
    before, count = memory
    same = jnp.all((proposal.answer == before) | ~view.editable)
    count = jnp.where(same, count + 1, 0)
    mean = jnp.sum(view.stats.entropy * view.editable) / jnp.maximum(view.editable.sum(), 1)
    return (count >= patience) & (mean < entropy), (proposal.answer, count)


def _two_counts(canvas: Int[Array, "L"], vocab: int) -> tuple[Int[Array, ""], Int[Array, ""]]:
    return jnp.asarray(0, jnp.int32), jnp.asarray(0, jnp.int32)


Counts = tuple[Int[Array, ""], Int[Array, ""]]


@stopping_criterion(
    init=_two_counts,
    needs_logits=False,
    source="LLaDA2.1, arXiv 2602.08676, which has patience 1 and limit 16",
)
def fixed_point(
    view: View,
    proposal: Proposal,
    memory: Counts,
    patience: Annotated[Param, AtLeast(0, integer=True)] = 1,
    limit: Annotated[Param, AtLeast(0, integer=True, infinite=True)] = jnp.inf,
) -> tuple[Bool[Array, ""], Counts]:
    """Stops when no mask is left and nothing has changed for `patience` steps, or after `limit` steps without a mask.

    This is for rules that edit decided tokens: a full block is not necessarily final.

    Args:
        view: Reads `canvas`, `used`, `masked` and `noise`.
        proposal: Reads `canvas` and `used`.
        memory: Number of consecutive steps without a change, and number of steps that began without a mask.
        patience: Number of consecutive steps without a change of the canvas.
        limit: Maximum number of steps that begin without a mask.

    Returns:
        Whether the block is finished, and the new memory.
    """
    unchanged, full = memory
    same = jnp.all(proposal.canvas == view.canvas) & (proposal.used == view.used)
    unchanged = jnp.where(same, unchanged + 1, 0)
    full = full + ~jnp.any(view.masked)
    done, _ = filled()(view, proposal, ())
    return done & ((unchanged >= patience) | (full >= limit)), (unchanged, full)


@stopping_criterion(init=_two_counts, needs_logits=False, source="GIDD's self-correction, arXiv 2503.04482")
def stalled(
    view: View, proposal: Proposal, memory: Counts, patience: Annotated[Param, AtLeast(0, integer=True)] = 32
) -> tuple[Bool[Array, ""], Counts]:
    """Stops when no mask is left and nothing changed, or agreement with the argmax has stopped rising.

    Agreement is the number of editable positions whose proposed token is the argmax of the current pass.

    Args:
        view: Reads `canvas`, `editable`, `masked`, `noise` and `stats.argmax`.
        proposal: Reads `canvas`.
        memory: The highest agreement so far, and the number of steps since it was reached.
        patience: The block ends after more than this many steps without a new best.

    Returns:
        Whether the block is finished, and the new memory.
    """
    # Both counters run only once the block is full: while it is being filled, agreement rises anyway.
    best, count = memory
    agreeing = (view.editable & (proposal.canvas == view.stats.argmax)).sum().astype(jnp.int32)
    full = ~jnp.any(view.masked)
    count = jnp.where(full & (agreeing <= best), count + 1, 0)
    best = jnp.where(full, jnp.maximum(best, agreeing), 0)
    done, _ = filled()(view, proposal, ())
    same = jnp.all(proposal.canvas == view.canvas)
    return done & (same | (count > patience)), (best, count)


def after_sixteen_edits() -> StoppingCriterion:
    """Returns `fixed_point(patience=1, limit=16)`, the criterion of LLaDA2.1's and LLaDA2.2's editing."""
    return fixed_point(patience=1, limit=16)


def __getattr__(name: str) -> Any:
    if name in STOPPING:
        return STOPPING[name]
    raise no_such_part("stopping criterion", name, __dir__())


def __dir__() -> list[str]:
    return sorted(["ALL", "after_sixteen_edits", *STOPPING])
