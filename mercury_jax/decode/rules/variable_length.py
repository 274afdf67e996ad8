"""Rules that insert and delete positions: DreamOn's expansion, LLaDA2.2's Levenshtein edits, DAEDAL's growth.

Their proposals give the origin of every position: `Proposal.source` is the index of the old position that it continues,
or -1 for a new one. Tokens that the user gave are neither changed nor reordered.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.decode import stopping
from mercury_jax.decode.registration import Count, Probability, TokenId, rule
from mercury_jax.decode.rules.masked import top
from mercury_jax.decode.rules.remask import replace_tokens
from mercury_jax.decode.sampler import Param
from mercury_jax.decode.token_stats import NEVER
from mercury_jax.types import Key, Proposal, View

HISTORY = 16  # canvases that `levenshtein` remembers, the number of passes that may edit a full block


def log_p_without(view: View, *ids: Param) -> Float[Array, "L V"]:
    """Computes the log-probabilities of a view with the given ids excluded; -1 excludes nothing."""
    vocab = jnp.arange(view.logits.shape[-1])
    banned = jnp.any(jnp.stack([vocab == i for i in ids]), axis=0)
    return jax.nn.log_softmax(jnp.where(banned, NEVER, view.logits), axis=-1)


def argmax_without(view: View, *ids: Param) -> tuple[Int[Array, "L"], Float[Array, "L"]]:
    """Finds the most probable token of each position, and its probability, with the given ids excluded."""
    log_p = log_p_without(view, *ids)
    return log_p.argmax(-1).astype(jnp.int32), jnp.exp(log_p.max(-1))


def rearrange(
    keep: Bool[Array, "L"], extra: Array, start: Int[Array, "L"], end: Int[Array, "L"]
) -> Int[Array, "L"]:
    """Computes the new order of positions when some are deleted and new ones are inserted.

    Positions move only within their segment, which is filled from its left end.

    Args:
        keep: Whether each old position is kept [L].
        extra: Number of new positions to insert before each old one [L].
        start: First position of the segment of each old position [L].
        end: One past the last position of the segment [L]. Positions that would move beyond it are dropped.

    Returns:
        The old position that each new position continues [L]; -1 for a new or unused position.
    """
    size = keep.shape[0]
    # An old position contributes `count` new ones: the insertions before it, and itself if it is kept. It moves to the
    # start of its segment, plus the counts of the earlier positions of the segment, plus its own insertions.
    count = keep + extra.astype(jnp.int32)
    before = jnp.cumsum(count) - count
    to = start + before - before[start] + extra.astype(jnp.int32)
    # Invert old -> new into new -> old. Deleted and cut positions go to index `size`, which the scatter drops.
    to = jnp.where(keep & (to < end), to, size)
    at = jnp.arange(size, dtype=jnp.int32)
    return jnp.full((size,), -1, jnp.int32).at[to].set(at, mode="drop")


def moved(old: Array, new: Array, source: Int[Array, "L"], used: Int[Array, ""]) -> Array:
    """Reorders values by the result of `rearrange`.

    Args:
        old: Value of each old position [L].
        new: Values for inserted positions [L], indexed by the new position; beyond the last old position, the value of
            that one is repeated.
        source: Result of `rearrange` [L].
        used: Number of positions that were used before, a scalar.

    Returns:
        The value of each new position [L].
    """
    place = jnp.clip(jnp.arange(source.shape[0]), 0, jnp.maximum(used - 1, 0))
    return jnp.where(source >= 0, old[jnp.maximum(source, 0)], new[place])


def resized(
    view: View, canvas: Array, answer: Array, word: Array, keep: Bool[Array, "L"], extra: Array
) -> Proposal:
    """Makes a proposal that deletes positions and inserts masks.

    Positions that do not fit into the window are cut off; the caller prevents that with `view.growth`.

    Args:
        view: View of one row.
        canvas: The new tokens in the old order [L].
        answer: The tokens that would be emitted now, in the old order [L].
        word: Predictions in the old order [L]. No pass has predicted an inserted mask yet; the answer holds there the
            prediction at the same index.
        keep: Whether each old position is kept [L].
        extra: Number of masks to insert before each old position [L].

    Returns:
        The proposal.
    """
    size = canvas.shape[0]
    at = jnp.arange(size)
    keep = keep & (at < view.used)
    source = rearrange(keep, extra, jnp.zeros_like(at), jnp.full_like(at, size))
    used = jnp.minimum((keep + extra.astype(jnp.int32)).sum(), size).astype(view.used.dtype)
    # Unused positions behind the last one hold noise.
    inside = lambda x: jnp.where(at < used, x, view.noise)
    canvas = inside(moved(canvas, view.noise, source, view.used))
    return Proposal(canvas, inside(moved(answer, word, source, view.used)), used, source)


@rule(
    noise="absorbing",
    init=lambda canvas, vocab: jnp.asarray(canvas.shape[0], jnp.int32),
    variable_length=True,
    source="DreamOn, arXiv 2602.01326; eval/generator.py of DreamLM/DreamOn",
)
def expand(
    key: Key,
    view: View,
    memory: Int[Array, ""],
    expand: TokenId = -1,
    delete: TokenId = -1,
    p: Probability = 0.9,
) -> tuple[Proposal, Int[Array, ""]]:
    """Decodes as `threshold`, where the prediction for a mask may also be to split it in two, or to delete it.

    Predictions above probability `p` are accepted, at least one. An accepted prediction of the id `expand` becomes two
    masks while the window can grow; a prediction of `delete` (in DreamOn the end of text) deletes the position. If the
    window is full, `expand` is excluded from the probabilities. Logits processors must not ban the two ids; the answer
    never contains them. The number of expansions in a block is bounded by the length of the window, so that expansions
    and deletions cannot alternate forever.

    Args:
        key: Unused.
        view: Reads `logits`, `stats`, `canvas`, `masked`, `used`, `growth`, `step` and `steps`.
        memory: Number of expansions that this block may still make, a scalar.
        expand: The id that splits a mask; -1: none.
        delete: The id that deletes a position; -1: none.
        p: Probability above which a mask is accepted; 1 accepts one per step, as the reference does.

    Returns:
        The proposal, and the remaining number of expansions.

    Departs from the reference: its option to delete everything after a predicted end of text is not supported, because
    it would delete the later spans of an infilling request with several spans.
    """
    # The answer shows predicted text at remaining masks, never one of the two ids.
    word, _ = argmax_without(view, expand, delete)
    room = jnp.where(view.step + 1 >= view.steps, 0, jnp.minimum(view.growth, memory))
    # In a full window: the drawn token and its probability with `expand` excluded.
    log_p, drawn = log_p_without(view, expand), view.stats.sample
    other = jnp.where(drawn == expand, log_p.argmax(-1).astype(jnp.int32), drawn)
    p_other = jnp.exp(jnp.take_along_axis(log_p, other[:, None], axis=-1)[:, 0])
    token, c = jnp.where(room == 0, other, drawn), jnp.where(room == 0, p_other, view.stats.p_sample)
    which = view.masked & (c > p) | top(c, view.masked, 1)
    # An accepted prediction splits its mask, deletes it, or is written as a token.
    split = which & (token == expand)
    grow = split & (jnp.cumsum(split) <= room)  # where there is no room, a split mask stays one mask
    gone = which & (token == delete)
    written = which & ~split & ~gone
    canvas = jnp.where(written, token, view.canvas)
    answer = jnp.where(view.masked & ~written, word, canvas)
    return resized(view, canvas, answer, word, ~gone, grow), memory - grow.sum().astype(memory.dtype)


Loops = tuple[Bool[Array, "L"], Int[Array, "H L"]]


@rule(
    noise="absorbing",
    init=lambda canvas, vocab: (
        jnp.ones(canvas.shape, bool),
        jnp.full((HISTORY, *canvas.shape), -1, jnp.int32),
    ),
    variable_length=True,
    stopping=stopping.after_sixteen_edits,
    source="LLaDA2.2, its technical report; sglang/srt/dllm/algorithm/joint_threshold_indel.py",
)
def levenshtein(
    key: Key,
    view: View,
    memory: Loops,
    delete: TokenId = -1,
    insert: TokenId = -1,
    p: Probability = 0.5,
    p_edit: Probability = 0.0,
) -> tuple[Proposal, Loops]:
    """Edits by joint thresholds; an edit may also delete a position, or insert a mask before it.

    A mask becomes the argmax if its probability is above `p`. A decided token is edited if the argmax differs from it
    and has a probability above `p_edit`. An argmax of `delete` deletes the position; an argmax of `insert` inserts a
    mask before it. The length of the block stays the same: each run of editable positions is padded with masks, or cut,
    at its end, so that given tokens do not move.

    While original masks of the block remain, a step fills at least one mask more than edits have inserted; afterwards
    it fills all masks. Once a pass finds the block full, up to 16 passes edit it.

    To prevent endless loops, a step that would lead back to one of the last 16 canvases only fills masks, with both ids
    excluded. So does the last step of the block.

    Args:
        key: Unused.
        view: Reads `logits`, `stats`, `canvas`, `noise`, `masked`, `editable`, `used`, `step` and `steps`.
        memory: Which positions may still hold an original mask [L], and the last 16 canvases [16, L].
        delete: The id that deletes a position; -1: none.
        insert: The id that inserts a mask; -1: none.
        p: Probability above which a mask is filled.
        p_edit: Probability above which a decided token is edited.

    Returns:
        The proposal, and the new memory.

    Departs from the reference in two ways. The reference counts the 16 passes from the step in which no original mask
    is left, and so stops sooner if edits keep inserting masks. To leave a loop, it writes the second best token at the
    least certain position; this rule only fills masks with predicted tokens.
    """
    first, seen = memory
    word, p_word = argmax_without(view, delete, insert)
    token, c = view.stats.argmax, view.stats.p_argmax
    # Fill at least one mask more than edits have inserted, so that each step makes progress; in the end, all of them.
    original = first & view.masked
    inserted = (view.masked & ~original).sum()
    quota = jnp.where(jnp.any(original), 1 + inserted, view.masked.sum())
    fills = lambda score: view.masked & (score > p) | top(score, view.masked, quota)
    wrong = view.editable & ~view.masked & (token != view.canvas) & (c > p_edit)
    # 1. Edit: write tokens, then delete and insert within each run of editable positions. `moves` is the source [L].
    write = fills(c) | wrong
    gone, split = write & (token == delete), write & (token == insert)
    written = jnp.where(write & ~gone & ~split, token, view.canvas)
    moves = rearrange(~gone, split, *editable_runs(view.editable))
    edited = jnp.where(moves >= 0, written[jnp.maximum(moves, 0)], view.noise)
    # 2. If the edited canvas has occurred before, or this is the last step, only fill masks. Given tokens never change,
    #    so they are left out of the comparison. `seen` [16, L] is a ring buffer indexed by the step.
    seen = seen.at[view.step % HISTORY].set(view.canvas)
    looping = jnp.any(jnp.all((seen == edited) | ~view.editable, axis=-1)) | (view.step + 1 >= view.steps)
    source = jnp.where(looping, jnp.arange(token.shape[0], dtype=jnp.int32), moves)
    canvas = jnp.where(looping, jnp.where(fills(p_word), word, view.canvas), edited)
    answer = jnp.where(view.editable & (canvas == view.noise), moved(word, word, source, view.used), canvas)
    proposal = Proposal(canvas, answer, view.used, source)
    return proposal, (moved(first, jnp.zeros_like(first), source, view.used), seen)


def editable_runs(editable: Bool[Array, "L"]) -> tuple[Int[Array, "L"], Int[Array, "L"]]:
    """Finds the run of adjacent editable positions that contains each position.

    Args:
        editable: Whether each position is editable [L].

    Returns:
        The first position of the run and one past its last position, both [L]. A position that is not editable is a run
        of its own.
    """
    at = jnp.arange(editable.shape[0])
    joined = editable[1:] & editable[:-1]  # whether in the run of the position before [L - 1]
    begins = jnp.concatenate([jnp.array([True]), ~joined])
    ends = jnp.concatenate([~joined, jnp.array([True])])
    start = jax.lax.cummax(jnp.where(begins, at, 0))
    return start, jax.lax.cummin(jnp.where(ends, at + 1, at.shape[0]), reverse=True)


class Growth(NamedTuple):
    """Memory of `daedal`."""

    lengthening: Bool[Array, ""]  # whether the answer is still being lengthened
    front: Int[Array, ""]  # first position of the current block; -1: the first editable position


@rule(
    noise="absorbing",
    init=lambda canvas, vocab: Growth(jnp.asarray(True), jnp.asarray(-1, jnp.int32)),
    variable_length=True,
    source="DAEDAL, arXiv 2508.00819; models/LLaDA_DAEDAL.py of Li-Jinsong/DAEDAL",
)
def daedal(
    key: Key,
    view: View,
    memory: Growth,
    start: Count = 64,
    by: Count = 8,
    p: Probability = 0.9,
    p_low: Probability = 0.1,
    p_end: Probability = 0.5,
    p_full: Probability = 0.9,
    tail: Count = 32,
    block: Count = 32,
) -> tuple[Proposal, Growth]:
    """Starts with a short answer, lengthens it until its end is predicted, and expands uncertain positions.

    Decoding has two phases. Both depend on the confidence that the answer ends, see `end_confidence`.

        lengthen   An answer starts with `start` masks (`request.py` reads this parameter). While the confidence is
                   below `p_end`, each pass appends `by` masks. The pass after that appends `tail` / 2 end-of-text
                   tokens. No tokens are accepted in this phase.
        decode     Blocks of `block` positions are decoded from the left, within the same canvas. Each pass accepts the
                   masks of the block above `p`, at least one. While the confidence is below `p_full`, it also replaces
                   the least confident mask of the block, if below `p_low`, by `by` masks.

    An answer that would exceed its maximum length is cut at its end. If no id ends the answer, it never grows. The
    passes of both phases count as steps of the plan's block, which is the whole answer.

    Args:
        key: Unused.
        view: Reads `stats`, `masked`, `editable`, `used`, `growth`, `eos`, `step` and `steps`.
        memory: The phase, and where the current block begins.
        start: Number of masks that an answer starts with.
        by: Number of masks to append, or to replace an uncertain mask by.
        p: Probability above which a mask is accepted.
        p_low: Probability below which a mask is expanded.
        p_end: Confidence at which lengthening stops.
        p_full: Confidence at which expanding stops.
        tail: Number of end-of-text positions that `end_confidence` averages over.
        block: Number of positions in which masks are accepted and expanded.

    Returns:
        The proposal, and the new memory.
    """
    at, c = jnp.arange(view.canvas.shape[0]), view.stats.p_sample
    confidence = jnp.where(view.eos < 0, 1.0, end_confidence(view, tail))
    room = jnp.where(view.step + 1 >= view.steps, 0, view.growth)
    # 1. Lengthen: append masks, or end-of-text tokens in the pass that ends this phase; accept nothing.
    waiting = memory.lengthening & (view.eos >= 0) & (view.step + 1 < view.steps)
    lengthen = waiting & (confidence < p_end) & (room > 0)
    last = jnp.max(jnp.where(view.editable, at + 1, 0))
    unbounded = last >= view.used  # no given token follows, which would be moved or lost
    pad = waiting & ~lengthen & unbounded
    # 2. Decode: accept by threshold; the least confident mask of the block may become several.
    front = jnp.where(memory.front < 0, jnp.argmax(view.editable), memory.front)
    active = view.masked & (at >= front) & (at < front + block) & ~waiting
    which = active & (c > p) | top(c, active, 1)
    uncertain = active & ~which & (c < p_low) & (confidence < p_full) & (room > 0)
    uncertain = top(-c, uncertain, 1)
    # `extra` [L]: masks to insert before each position. Appending is inserting before `last`, one past the last
    # editable position. If given tokens follow the answer, a split may not push them out of the window.
    appended = jnp.where(lengthen, by, jnp.where(pad, jnp.asarray(tail) // 2, 0))
    split = jnp.where(unbounded, by - 1, jnp.minimum(by - 1, room))
    extra = jnp.where(at == last, jnp.minimum(appended, room), jnp.where(uncertain, split, 0)).astype(
        jnp.int32
    )
    canvas = jnp.where(which, view.stats.sample, view.canvas)
    answer = jnp.where(view.masked & ~which, view.stats.argmax, canvas)
    proposal = resized(view, canvas, answer, view.stats.argmax, at >= 0, extra)
    proposal = proposal._replace(used=jnp.minimum(proposal.used, view.used + room))
    # In the pass that ends phase 1, the appended positions become end-of-text tokens.
    ends = pad & (proposal.source < 0) & (at < proposal.used)
    proposal = replace_tokens(proposal, ends, view.eos)
    # The next pass decodes the block with the first remaining mask; the blocks before it are full.
    masked = (proposal.canvas == view.noise) & (at >= front) & (at < proposal.used)
    full = jnp.where(waiting | ~jnp.any(masked), 0, (jnp.argmax(masked) - front) // block)
    front = front + full * block
    return proposal, Growth(lengthen, front.astype(jnp.int32))


def end_confidence(view: View, tail: Param) -> Float[Array, ""]:
    """Computes how confident the model is that the answer ends within the canvas.

    The sum of the end-of-text probabilities of the last `tail` positions whose argmax is the end of text, divided by
    `tail`. With fewer such positions the confidence is accordingly lower.

    Args:
        view: Reads `stats`, `editable` and `eos`.
        tail: Maximum number of positions that are counted.

    Returns:
        The confidence in [0, 1], a scalar.
    """
    # The cumulative sum from the right numbers these positions from the end.
    ends = view.editable & (view.stats.argmax == view.eos)
    counted = ends & (jnp.cumsum(ends[::-1])[::-1] <= tail)
    return jnp.sum(jnp.where(counted, view.stats.p_eos, 0.0)) / tail
