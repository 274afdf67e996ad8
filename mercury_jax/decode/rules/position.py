"""Rules for masked diffusion that look at where a mask stands, not only at how sure the model is of it.

pc_sampler   left before right, and frequent tokens last (PC-Sampler)
adablock     blocks that end where the model predicts a delimiter (AdaBlock)
wavefront    masks near decided tokens, the most confident of which are kept as candidates (WavefrontDiffusion)
dilated      evenly spaced masks, in rounds of half the spacing (Dilated Unmasking Scheduler)

All of them choose among the masks of one block. Their papers decode one block as long as the answer, which is
`Plan(block=max_tokens)`; only `dilated` is made for short ones. Positions are counted from the first position of the
block that is not given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.config import refuse
from mercury_jax.decode.registration import (
    Above,
    AtLeast,
    Count,
    NonNegative,
    Probability,
    check_number,
    rule,
    sampler_preset,
)
from mercury_jax.decode.rules.masked import fixed_share, top
from mercury_jax.decode.sampler import Memory, Param, Rule, Static, accept
from mercury_jax.types import Key, Proposal, View

ABSORBING = ("absorbing",)


def block_positions(view: View) -> tuple[Int[Array, "L"], Int[Array, ""]]:
    """Counts the window's positions from its first editable one.

    Args:
        view: Of one row. Reads `editable`.

    Returns:
        The positions [L], negative before the block, and the length of the block.
    """
    at, length = jnp.arange(view.canvas.shape[0]), view.canvas.shape[0]
    first = jnp.min(jnp.where(view.editable, at, length))
    last = jnp.max(jnp.where(view.editable, at, -1))
    return at - first, jnp.maximum(last - first + 1, 1)


# --- PC-Sampler


@sampler_preset("PC-Sampler, arXiv 2508.13021, algorithm 1; `pc_sampler_function` in its `generate.py`")
def pc_sampler(
    counts: Sequence[float] | np.ndarray | jax.Array | None = None,
    position: NonNegative = 0.25,
    clip: Annotated[Param, Above(0)] = 10.0,
) -> Rule:
    """Accepts the masks of the highest exp(-position i) min(-p log f, clip), the fixed schedule's number of them.

    i is the position in the block, p the probability of the drawn token and f its frequency in a reference corpus. The
    weight prefers the left; the second factor puts off tokens that are probable anywhere, such as commas.

    Args:
        counts: How often each id occurs in the corpus [V]; one that does not occur counts as once. None: all ids are
            equally frequent, which leaves the weight and the probability.
        position: Decay of the weight per position. The authors use 0 for Sudoku, 0.5 for Countdown, 0.25 elsewhere.
        clip: Upper bound of the second factor, in nats.

    Returns:
        The rule.

    Raises:
        ValueError: `counts` is no list of numbers of which one is positive, or a number is out of range.

    Example:
        >>> counts = np.bincount(corpus_ids, minlength=lm.model.config.vocab)
        >>> mj.sample(lm, prompts, sampler=mj.rules.pc_sampler(counts), plan=mj.Plan(block=64))

    Departs from the reference: scores are compared as logarithms, because exp(-position i) is 0 in fp32 from
    position 400 on.
    """
    allowed = "a list of numbers, 0 or more, one for each id of the vocabulary, or None"
    table = np.ones(1) if counts is None else np.asarray(counts)
    if table.ndim != 1 or table.dtype.kind not in "iuf" or not (np.isfinite(table) & (table >= 0)).all():
        raise refuse("pc_sampler(counts=)", counts, allowed)
    if not table.any():
        raise refuse("pc_sampler(counts=)", "zeros", allowed)
    table = table.astype(np.float64)
    frequency = np.where(table > 0, table, 1.0) / table.sum()
    ranges = pc_sampler.ranges
    params: dict[str, Any] = {
        "position": check_number("pc_sampler(position=)", position, ranges["position"]),
        "clip": check_number("pc_sampler(clip=)", clip, ranges["clip"]),
        "log_frequency": Static(jnp.asarray(np.log(frequency + 1e-9), jnp.float32)),
    }
    return Rule(_accept_calibrated, params, "pc_sampler", noise=ABSORBING, needs_logits=False)


def _accept_calibrated(
    key: Key, view: View, memory: Memory, position: Param, clip: Param, log_frequency: Float[Array, "n"]
) -> tuple[Proposal, Memory]:
    """`pc_sampler` on one row; a table of one entry stands for equal frequencies."""
    if log_frequency.shape[0] == 1:
        log_f = -jnp.log(jnp.asarray(view.output_counts.shape[0], jnp.float32))
    else:
        log_f = jnp.asarray(log_frequency)[view.stats.sample]
    at, _ = block_positions(view)
    calibrated = jnp.minimum(-view.stats.p_sample * log_f, clip)
    score = jnp.log(jnp.maximum(calibrated, 1e-30)) - position * at
    return accept(view, top(score, view.masked, fixed_share(view))), memory


# --- AdaBlock


@sampler_preset("AdaBlock, arXiv 2509.26432, `compute_block_length` in its `generate_adablock.py`")
def adablock(
    p: Probability = 0.9,
    delimiters: Annotated[int | Sequence[int], AtLeast(-1, integer=True)] = -1,
    delimiter_p: Probability = 0.3,
    length: Count = 32,
    window: Probability = 0.25,
) -> Rule:
    """Applies `threshold` to blocks that end where the model predicts a delimiter, such as a line break.

    Where a block begins, the pass over its masks also says how long it is. Among the next masks, `window` times the
    plan's block of them, those whose drawn token is a delimiter are candidates. The block ends with the most probable
    one if its probability is at least `delimiter_p`, else after `length` positions.

    Args:
        p: Probability from which a token is accepted; in every pass at least the most confident one is.
        delimiters: Ids that may end a block; one, or several for all rows. -1: none.
        delimiter_p: Least probability of the delimiter. The authors use 0.3 for LLaDA and 0.5 for Dream.
        length: Positions of a block that no delimiter ends.
        window: Share of the plan's block in which a delimiter is looked for.

    Returns:
        The rule. `Plan(block=max_tokens)` lets a block end anywhere in the answer.

    Raises:
        ValueError: A parameter is out of range.

    Example:
        >>> newline = lm.tokenizer.encode("\\n")
        >>> mj.sample(lm, prompts, sampler=mj.rules.adablock(delimiters=newline), plan=mj.Plan(block=64))

    Departs from the reference: with `Plan(refresh=)` keys are refreshed where the plan's blocks begin, not its own.
    """
    ranges, given = adablock.ranges, dict(p=p, delimiter_p=delimiter_p, length=length, window=window)
    ids = np.atleast_1d(check_number("adablock(delimiters=)", delimiters, ranges["delimiters"]))
    if ids.ndim != 1 or not ids.size:
        raise refuse("adablock(delimiters=)", delimiters, "an id, or a list of at least one id")
    params: dict[str, Any] = {k: check_number(f"adablock({k}=)", x, ranges[k]) for k, x in given.items()}
    params["delimiters"] = Static(jnp.asarray(ids, jnp.int32))
    no_block = lambda canvas, vocab: jnp.asarray(0, jnp.int32)
    return Rule(_accept_in_block, params, "adablock", init=no_block, noise=ABSORBING, needs_logits=False)


def _accept_in_block(
    key: Key,
    view: View,
    memory: Int[Array, ""],
    p: Param,
    delimiter_p: Param,
    length: Param,
    window: Param,
    delimiters: Int[Array, "n"],
) -> tuple[Proposal, Int[Array, ""]]:
    """`adablock` on one row; the memory is the end of its current block within the window, 0 before the first."""
    c, masked, at = view.stats.p_sample, view.masked, jnp.arange(view.canvas.shape[0])
    # 1. Where no mask is left in the block, the next one begins at the first mask.
    begin = jnp.argmax(masked)
    nearby = masked & (at < begin + jnp.floor(window * view.editable.sum()))
    delimits = nearby & jnp.isin(view.stats.sample, jnp.asarray(delimiters))
    best = jnp.argmax(jnp.where(delimits, c, -1.0))
    found = delimits[best] & (c[best] >= delimiter_p)
    fresh = jnp.where(found, best + 1, begin + length)
    end = jnp.where(jnp.any(masked & (at < memory)), memory, fresh).astype(jnp.int32)
    # 2. Its masks are accepted by their confidence.
    inside = masked & (at < end)
    return accept(view, inside & ((c >= p) | top(c, inside, 1))), end


def check_tables(chosen: Rule, vocab: int) -> None:
    """Checks that the tables of a rule of this module fit the vocabulary.

    Args:
        chosen: Any rule; those without a table pass.
        vocab: V.

    Raises:
        ValueError: Names the table, or the id, that does not fit.
    """
    if chosen.function is _accept_calibrated:
        found = chosen.params["log_frequency"].value.shape[0]
        if found not in (1, vocab):
            raise refuse("length of pc_sampler(counts=)", found, f"{vocab}, one number for each id")
    elif chosen.function is _accept_in_block:
        ids = np.asarray(chosen.params["delimiters"].value)
        if ids.max() >= vocab:
            raise refuse("adablock(delimiters=)", int(ids.max()), f"ids in 0..{vocab - 1}")


# --- WavefrontDiffusion


class Wavefront(NamedTuple):
    """What `wavefront` remembers."""

    front: Bool[Array, "L"]  # the candidates of the next pass


@rule(
    noise="absorbing",
    init=lambda canvas, vocab: Wavefront(jnp.zeros(canvas.shape, bool)),
    needs_logits=False,
    source="WavefrontDiffusion, arXiv 2511.19473, section 3",
)
def wavefront(
    key: Key, view: View, memory: Wavefront, capacity: Count = 8, radius: Count = 2
) -> tuple[Proposal, Wavefront]:
    """Accepts the most confident masks of a front that grows from the decided tokens.

    The front begins as the first `capacity` masks. In each pass the fixed schedule's number of its most confident masks
    is accepted. The new front holds the masks within `radius` of a decided token; where these are more than `capacity`,
    those that this pass was most confident of.

    Args:
        key: Unused.
        view: Reads `stats.p_sample`, `masked`, `canvas`, `noise`, `editable`, `step` and `steps`.
        memory: The front.
        capacity: Most masks of the front (F in the paper).
        radius: Distance from a decided token, in positions (R in the paper).

    Returns:
        The proposal, and the new front.

    The authors have published no code; this follows the definitions of the paper. What stands before the window is
    decided. Where a front is smaller than the schedule's number, all of it is accepted and the pass falls behind.
    """
    c, at, length = view.stats.p_sample, jnp.arange(view.canvas.shape[0]), view.canvas.shape[0]
    first = view.masked & (jnp.cumsum(view.masked) <= capacity)
    front = jnp.where(view.step == 0, first, memory.front & view.masked)
    which = top(c, front, fixed_share(view))
    # The distance of each position to the nearest decided one on either side.
    masked = view.masked & ~which
    decided = which | (view.canvas != view.noise)
    before = jax.lax.cummax(jnp.where(decided, at, -1))
    behind = jax.lax.cummin(jnp.where(decided, at, 2 * length), reverse=True)
    near = masked & (jnp.minimum(at - before, behind - at) <= radius)
    return accept(view, which), Wavefront(top(c, near, jnp.asarray(capacity)))


# --- Dilated Unmasking Scheduler


@rule(
    noise="absorbing",
    needs_logits=False,
    source="Dilated Unmasking Scheduler (DUS), arXiv 2506.19037, equations 8 and 9",
)
def dilated(
    key: Key,
    view: View,
    memory: Memory,
    base: Annotated[Param, AtLeast(2, integer=True)] = 2,
    low: Probability = 0.0,
) -> tuple[Proposal, Memory]:
    """Accepts evenly spaced masks, whatever their confidence: a block of B positions takes log_base(B) passes.

    Pass t accepts the masks whose position is a multiple of floor(B / base^t): tokens that are decided together stand
    far apart and depend little on each other. For B = 8: positions 0, 4; then 2, 6; then all others.

    Args:
        key: Unused.
        view: Reads `stats.p_sample`, `masked`, `editable` and `step`.
        memory: Unused.
        base: Ratio of the spacings of two passes. The authors found 2 the best.
        low: Masks of a lower confidence wait for a later pass. 0 is the paper's schedule; the authors' evaluations of
            LLaDA also use 0.3.

    Returns:
        The proposal, and the unchanged memory.

    The authors' code could not be had; this follows the equations. `low` is their option to skip uncertain tokens as
    the paper describes it: from the last round on each pass accepts at least the most confident mask. A round all of
    whose positions are decided is left out.
    """
    at, size = block_positions(view)
    most = max(view.canvas.shape[0].bit_length(), 1)  # rounds of the longest block at base 2
    rounds = jnp.arange(1, most + 1)
    spacing = jnp.floor(size / jnp.asarray(base, jnp.float32) ** rounds)
    spacing = jnp.maximum(spacing, 1).astype(jnp.int32)  # [R]
    chosen = view.masked & (at % spacing[:, None] == 0)  # [R, L]; the last row holds all masks
    due = (rounds > view.step) & jnp.any(chosen, axis=1)
    turn = jnp.where(jnp.any(due), jnp.argmax(due), most - 1)
    confident = chosen[turn] & (view.stats.p_sample >= low)
    best = top(view.stats.p_sample, chosen[turn], 1)
    return accept(view, confident | (best & (spacing[turn] == 1))), memory
