"""Rules for masked diffusion that use the position of a mask in addition to the confidence of its prediction.

pc_sampler   prefers positions on the left, and postpones frequent tokens (PC-Sampler)
adablock     ends blocks where the model predicts a delimiter (AdaBlock)
wavefront    accepts confident masks near decided tokens (WavefrontDiffusion)
dilated      accepts evenly spaced masks, and divides the spacing from pass to pass (Dilated Unmasking Scheduler)

All of them choose among the masks of one block. Except for `dilated`, their papers decode the whole answer as one
block: use `Plan(block=max_tokens)`. Positions are counted from the first editable position of the block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.config import Above, AtLeast, refuse
from mercury_jax.decode.registration import (
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
    """Numbers the positions of the window from its first editable one.

    Args:
        view: View of one row. Reads `editable`.

    Returns:
        The position in the block [L], negative before the block; and the length of the block, a scalar, from the first
        to the last editable position.
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
    first factor prefers positions on the left; the second one postpones tokens that are probable anywhere, such as
    commas.

    Args:
        counts: How often each id occurs in the corpus [V]; 0 counts as 1. None: all ids are equally frequent, so that
            the second factor depends on the probability only.
        position: Decay of the first factor per position. The authors use 0 for Sudoku, 0.5 for Countdown and 0.25
            elsewhere.
        clip: Upper bound of the second factor, in nats.

    Returns:
        The rule.

    Raises:
        ValueError: `counts` is not a list of numbers of which at least one is positive, or a parameter is out of range.

    Example:
        >>> counts = np.bincount(corpus_ids, minlength=lm.model.config.vocab)
        >>> mj.sample(lm, prompts, sampler=mj.rules.pc_sampler(counts), plan=mj.Plan(block=64))

    Departs from the reference: scores are compared as logarithms, because exp(-position i) underflows to 0 in fp32
    beyond position 400 or so.
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
    """Applies `pc_sampler` to one row.

    `log_frequency` is a table [V], or has a single entry if all ids are equally frequent (`counts=None`).
    """
    # log f of the drawn token of each position [L]. The vocabulary size is known from the view only.
    if log_frequency.shape[0] == 1:
        log_f = -jnp.log(jnp.asarray(view.output_counts.shape[0], jnp.float32))
    else:
        log_f = jnp.asarray(log_frequency)[view.stats.sample]
    at, _ = block_positions(view)
    # log of exp(-position i) min(-p log f, clip)  [L]
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

    The rule divides the block of the plan into blocks of its own. The first pass of each such block also decides its
    length: it searches the next positions, `window` times the length of the plan's block, for masks whose drawn token
    is a delimiter. The block ends with the most probable delimiter if its probability is at least `delimiter_p`, and
    otherwise after `length` positions.

    Args:
        p: Probability from which a token is accepted. Each pass accepts at least the most confident one of its block.
        delimiters: Ids that may end a block; one, or several for all rows. -1: none.
        delimiter_p: Minimum probability of the delimiter. The authors use 0.3 for LLaDA and 0.5 for Dream.
        length: Number of positions of a block without a delimiter.
        window: Share of the plan's block that is searched for a delimiter.

    Returns:
        The rule. With `Plan(block=max_tokens)` a block may end anywhere in the answer.

    Raises:
        ValueError: A parameter is out of range.

    Example:
        >>> newline = lm.tokenizer.encode("\\n")
        >>> mj.sample(lm, prompts, sampler=mj.rules.adablock(delimiters=newline), plan=mj.Plan(block=64))

    Departs from the reference: `Plan(refresh=)` refreshes the KV cache where the blocks of the plan begin, not the
    blocks of this rule.
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
    """Applies `adablock` to one row.

    The memory is the end of the rule's current block, an index into the window; 0 before the first block.
    """
    c, masked, at = view.stats.p_sample, view.masked, jnp.arange(view.canvas.shape[0])
    # 1. If no mask is left in the current block, the next one begins at the first mask. `fresh` is its end: one past
    #    the most probable delimiter among the nearby masks, or `length` positions on.
    begin = jnp.argmax(masked)
    nearby = masked & (at < begin + jnp.floor(window * view.editable.sum()))
    delimits = nearby & jnp.isin(view.stats.sample, jnp.asarray(delimiters))
    best = jnp.argmax(jnp.where(delimits, c, -1.0))
    found = delimits[best] & (c[best] >= delimiter_p)
    fresh = jnp.where(found, best + 1, begin + length)
    end = jnp.where(jnp.any(masked & (at < memory)), memory, fresh).astype(jnp.int32)
    # 2. Accept masks of the block by confidence, at least one.
    inside = masked & (at < end)
    return accept(view, inside & ((c >= p) | top(c, inside, 1))), end


def check_tables(chosen: Rule, vocab: int) -> None:
    """Checks that the tables of a rule of this module fit the vocabulary of the model.

    A rule is made before it is known for which model, so this cannot be checked at construction.

    Args:
        chosen: Any rule; rules of other modules pass.
        vocab: V, the size of the vocabulary.

    Raises:
        ValueError: The frequency table has another length than V, or a delimiter is not below V.
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
    """Memory of `wavefront`."""

    front: Bool[Array, "L"]  # the masks that the next pass may accept


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

    The front starts as the first `capacity` masks. Each pass accepts the most confident masks of the front, in the
    number of the fixed schedule. The new front holds the masks within `radius` positions of a decided token; if they
    are more than `capacity`, the most confident ones of this pass.

    Args:
        key: Unused.
        view: Reads `stats.p_sample`, `masked`, `canvas`, `noise`, `editable`, `step` and `steps`.
        memory: The front.
        capacity: Maximum number of masks in the front (F in the paper).
        radius: Distance from a decided token, in positions (R in the paper).

    Returns:
        The proposal, and the new front.

    The authors have published no code; this follows the definitions of the paper. Tokens before the window count as
    decided. If the front has fewer masks than the schedule accepts, all of them are accepted and the block falls behind
    its schedule.
    """
    c, at, length = view.stats.p_sample, jnp.arange(view.canvas.shape[0]), view.canvas.shape[0]
    first = view.masked & (jnp.cumsum(view.masked) <= capacity)
    front = jnp.where(view.step == 0, first, memory.front & view.masked)
    which = top(c, front, fixed_share(view))
    # After this pass: the nearest decided position to the left and to the right of each mask [L]. The placeholder -1 on
    # the left is the token before the window, which is decided; on the right nothing is.
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

    Pass t accepts the masks whose position is a multiple of floor(B / base^t). Tokens that are decided in the same pass
    are then far apart and depend little on each other. For B = 8: positions 0, 4; then 2, 6; then all others.

    Args:
        key: Unused.
        view: Reads `stats.p_sample`, `masked`, `editable` and `step`.
        memory: Unused.
        base: Ratio of the spacings of two successive passes. The authors found 2 to be the best.
        low: Masks below this confidence wait for a later pass. 0 is the paper's schedule; the authors' evaluations of
            LLaDA also use 0.3.

    Returns:
        The proposal, and the unchanged memory.

    This follows the equations of the paper, not the authors' code. `low` is their option to skip uncertain tokens, as
    the paper describes it. So that the block ends, each pass with spacing 1 accepts at least the most confident mask. A
    round whose positions are all decided is skipped.
    """
    at, size = block_positions(view)
    most = max(view.canvas.shape[0].bit_length(), 1)  # rounds of the longest block at base 2
    rounds = jnp.arange(1, most + 1)
    # R rounds with spacings floor(B / base^r), at least 1. chosen[r] holds the masks of round r; the last round, of
    # spacing 1, holds all masks.
    spacing = jnp.floor(size / jnp.asarray(base, jnp.float32) ** rounds)
    spacing = jnp.maximum(spacing, 1).astype(jnp.int32)  # [R]
    chosen = view.masked & (at % spacing[:, None] == 0)  # [R, L]
    # This pass takes the first round that is not behind its schedule and has masks left.
    due = (rounds > view.step) & jnp.any(chosen, axis=1)
    turn = jnp.where(jnp.any(due), jnp.argmax(due), most - 1)
    confident = chosen[turn] & (view.stats.p_sample >= low)
    best = top(view.stats.p_sample, chosen[turn], 1)
    return accept(view, confident | (best & (spacing[turn] == 1))), memory
