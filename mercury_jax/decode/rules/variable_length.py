"""Rules that insert and delete positions: DreamOn's expansion, LLaDA2.2's Levenshtein edits, DAEDAL's growth.

Their proposals say for every position which old one it continues (`Proposal.source`, -1 for a new one). Positions that
the user gave keep their token and their order.
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

HISTORY = 16  # canvases that `levenshtein` remembers; no full block is edited for longer


def log_p_without(view: View, *ids: Param) -> Float[Array, "L V"]:
    """Returns the log-probabilities if the given ids were impossible."""
    vocab = jnp.arange(view.logits.shape[-1])
    banned = jnp.any(jnp.stack([vocab == i for i in ids]), axis=0)
    return jax.nn.log_softmax(jnp.where(banned, NEVER, view.logits), axis=-1)


def argmax_without(view: View, *ids: Param) -> tuple[Int[Array, "L"], Float[Array, "L"]]:
    """Returns the most probable token of each position, and its probability, if the given ids were impossible."""
    log_p = log_p_without(view, *ids)
    return log_p.argmax(-1).astype(jnp.int32), jnp.exp(log_p.max(-1))


def rearrange(
    keep: Bool[Array, "L"], extra: Array, start: Int[Array, "L"], end: Int[Array, "L"]
) -> Int[Array, "L"]:
    """Computes where each old position goes when some are deleted and new ones inserted.

    Args:
        keep: Whether an old position is kept.
        extra: How many new positions are inserted before it.
        start: Start of the stretch that it stays within, which is filled from the left.
        end: End of that stretch; what would go beyond it is cut off.

    Returns:
        For each new position the old one that it continues; -1 where it is new, or unused.
    """
    size = keep.shape[0]
    # Each old position leaves `count` new ones: those inserted before it, and itself where it is kept. Its new place
    # is that of its stretch, plus what the positions before it in the stretch leave, plus what is inserted before it.
    count = keep + extra.astype(jnp.int32)
    before = jnp.cumsum(count) - count
    to = start + before - before[start] + extra.astype(jnp.int32)
    to = jnp.where(keep & (to < end), to, size)
    at = jnp.arange(size, dtype=jnp.int32)
    return jnp.full((size,), -1, jnp.int32).at[to].set(at, mode="drop")


def moved(old: Array, new: Array, source: Int[Array, "L"], used: Int[Array, ""]) -> Array:
    """Moves values along with their positions.

    Args:
        old: Value of each old position.
        new: Values for new positions, by place (at most that of the last old position).
        source: As of `rearrange`.
        used: How many positions were used before.

    Returns:
        The value of each new position.
    """
    place = jnp.clip(jnp.arange(source.shape[0]), 0, jnp.maximum(used - 1, 0))
    return jnp.where(source >= 0, old[jnp.maximum(source, 0)], new[place])


def resized(
    view: View, canvas: Array, answer: Array, word: Array, keep: Bool[Array, "L"], extra: Array
) -> Proposal:
    """Makes a proposal that deletes positions and inserts masks. The caller ensures that everything fits.

    Args:
        view: Of one row.
        canvas: The new tokens, in the old order.
        answer: What would be emitted, in the old order.
        word: What the answer holds at a new mask, which no pass has predicted yet: the prediction at its place.
        keep: Whether an old position is kept.
        extra: How many masks are inserted before it.

    Returns:
        The proposal.
    """
    size = canvas.shape[0]
    at = jnp.arange(size)
    keep = keep & (at < view.used)
    source = rearrange(keep, extra, jnp.zeros_like(at), jnp.full_like(at, size))
    used = jnp.minimum((keep + extra.astype(jnp.int32)).sum(), size).astype(view.used.dtype)
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

    An accepted prediction of the id `expand` becomes two masks while the window can grow; one of `delete` (DreamOn:
    the end of text) deletes the position. Masks above probability `p` are accepted, at least one. In a full window
    probabilities are those without `expand`. The model must be free to predict both ids; no answer holds them. Each
    block expands at most as often as the window has positions, so that expansions and deletions cannot alternate
    for ever.

    Args:
        key: Unused.
        view: Reads `logits`, `stats`, `masked` and `growth`.
        memory: Expansions that are left in this block.
        expand: The id that splits a mask; -1: none.
        delete: The id that deletes a position; -1: none.
        p: Probability from which a mask is accepted; 1 accepts one per step, as the reference does.

    Returns:
        The proposal, and the expansions that are left.

    Departs from the reference: its option to empty everything after a predicted end is left out, because with
    several holes it would empty the later ones.
    """
    # What the answer shows at open masks: the two ids are no text.
    word, _ = argmax_without(view, expand, delete)
    room = jnp.where(view.step + 1 >= view.steps, 0, jnp.minimum(view.growth, memory))
    # In a full window: the draw and its probability as if `expand` were impossible.
    log_p, drawn = log_p_without(view, expand), view.stats.sample
    other = jnp.where(drawn == expand, log_p.argmax(-1).astype(jnp.int32), drawn)
    p_other = jnp.exp(jnp.take_along_axis(log_p, other[:, None], axis=-1)[:, 0])
    token, c = jnp.where(room == 0, other, drawn), jnp.where(room == 0, p_other, view.stats.p_sample)
    which = view.masked & (c > p) | top(c, view.masked, 1)
    # Accepted predictions either split their mask, or delete it, or are written.
    split = which & (token == expand)
    grow = split & (jnp.cumsum(split) <= room)  # the others remain masks
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

    A mask becomes the argmax above `p`; a decided token is edited where the argmax differs and has more than `p_edit`.
    An argmax of `delete` deletes the position, of `insert` puts a mask before it. The length stays: each run of
    editable positions is padded with masks or cut at its end, so that given tokens do not move. While masks of the
    start remain, a step accepts at least one more than edits have brought in, afterwards all; once a pass finds the
    block full, up to 16 passes edit.

    Against loops: a step that leads back to one of the last 16 canvases, and the last step of the block, only fill
    masks, with neither id.

    Args:
        key: Unused.
        view: Reads `logits`, `stats`, `canvas`, `masked`, `editable`, `step` and `steps`.
        memory: Which masks are there from the start, and the last 16 canvases.
        delete: The id that deletes a position; -1: none.
        insert: The id that inserts a mask; -1: none.
        p: Probability from which a mask is filled.
        p_edit: Probability from which a decided token is edited.

    Returns:
        The proposal, and the new memory.

    Departs from the reference: it counts the 16 passes from when no mask of the start is left, and so gives up sooner
    where edits keep bringing masks in; and against a loop it puts the next best token at the least certain position,
    where this rule writes nothing that no pass has predicted.
    """
    first, seen = memory
    word, p_word = argmax_without(view, delete, insert)
    token, c = view.stats.argmax, view.stats.p_argmax
    original = first & view.masked
    inserted = (view.masked & ~original).sum()
    quota = jnp.where(jnp.any(original), 1 + inserted, view.masked.sum())
    fills = lambda score: view.masked & (score > p) | top(score, view.masked, quota)
    wrong = view.editable & ~view.masked & (token != view.canvas) & (c > p_edit)
    # 1. The edit: write tokens, follow the two ids run by run.
    write = fills(c) | wrong
    gone, split = write & (token == delete), write & (token == insert)
    written = jnp.where(write & ~gone & ~split, token, view.canvas)
    moves = rearrange(~gone, split, *editable_runs(view.editable))
    edited = jnp.where(moves >= 0, written[jnp.maximum(moves, 0)], view.noise)
    # 2. If it leads back to a canvas that was there before, only fill.
    seen = seen.at[view.step % HISTORY].set(view.canvas)
    looping = jnp.any(jnp.all((seen == edited) | ~view.editable, axis=-1)) | (view.step + 1 >= view.steps)
    source = jnp.where(looping, jnp.arange(token.shape[0], dtype=jnp.int32), moves)
    canvas = jnp.where(looping, jnp.where(fills(p_word), word, view.canvas), edited)
    answer = jnp.where(view.editable & (canvas == view.noise), moved(word, word, source, view.used), canvas)
    proposal = Proposal(canvas, answer, view.used, source)
    return proposal, (moved(first, jnp.zeros_like(first), source, view.used), seen)


def editable_runs(editable: Bool[Array, "L"]) -> tuple[Int[Array, "L"], Int[Array, "L"]]:
    """Finds the run of adjacent editable positions that each position is in.

    Returns:
        Start and end of the run; a position that is not editable is a run of its own.
    """
    at = jnp.arange(editable.shape[0])
    joined = editable[1:] & editable[:-1]  # with the position before it
    begins = jnp.concatenate([jnp.array([True]), ~joined])
    ends = jnp.concatenate([~joined, jnp.array([True])])
    start = jax.lax.cummax(jnp.where(begins, at, 0))
    return start, jax.lax.cummin(jnp.where(ends, at + 1, at.shape[0]), reverse=True)


class Growth(NamedTuple):
    """What `daedal` remembers."""

    lengthening: Bool[Array, ""]  # whether the answer is still being lengthened
    front: Int[Array, ""]  # where the block that is decoded begins; -1: at the first editable position


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

    An answer starts with `start` masks (`request.py` reads this parameter). First, while the confidence in the end is
    below `p_end`, each pass appends `by` masks; the next pass appends `tail` / 2 ends of text. None of these passes
    accepts a token. Then blocks of `block` positions are decoded from the left, within the same canvas: masks of the
    block above `p` are accepted, at least one, and while the confidence in the end is below `p_full`, the least
    confident mask of the block below `p_low` becomes `by` masks. Where the answer may not grow so far, it is cut at its
    end; where no id ends the answer nothing grows. The passes that lengthen count as steps of the block of the plan,
    which is the whole answer.

    Args:
        key: Unused.
        view: Reads `stats`, `masked`, `editable`, `growth`, `eos`, `step` and `steps`.
        memory: Whether the answer is still being lengthened, and where the block begins.
        start: Masks that an answer starts with.
        by: Masks that are added at once.
        p: Probability above which a mask is accepted.
        p_low: Probability below which a mask is expanded.
        p_end: Confidence in the end at which lengthening stops.
        p_full: Confidence in the end at which expanding stops.
        tail: See `end_confidence`.
        block: Positions in which masks are accepted and expanded.

    Returns:
        The proposal, and the new memory.
    """
    at, c = jnp.arange(view.canvas.shape[0]), view.stats.p_sample
    confidence = jnp.where(view.eos < 0, 1.0, end_confidence(view, tail))
    room = jnp.where(view.step + 1 >= view.steps, 0, view.growth)
    # 1. Lengthening: masks are appended, in the pass after it ends of text, and nothing is accepted.
    waiting = memory.lengthening & (view.eos >= 0) & (view.step + 1 < view.steps)
    lengthen = waiting & (confidence < p_end) & (room > 0)
    last = jnp.max(jnp.where(view.editable, at + 1, 0))
    unbounded = last >= view.used  # no given token follows, which would be moved or lost
    pad = waiting & ~lengthen & unbounded
    # 2. Decoding: accept by threshold; the least confident mask of the block may become several.
    front = jnp.where(memory.front < 0, jnp.argmax(view.editable), memory.front)
    active = view.masked & (at >= front) & (at < front + block) & ~waiting
    which = active & (c > p) | top(c, active, 1)
    uncertain = active & ~which & (c < p_low) & (confidence < p_full) & (room > 0)
    uncertain = top(-c, uncertain, 1)
    appended = jnp.where(lengthen, by, jnp.where(pad, jnp.asarray(tail) // 2, 0))
    split = jnp.where(unbounded, by - 1, jnp.minimum(by - 1, room))
    extra = jnp.where(at == last, jnp.minimum(appended, room), jnp.where(uncertain, split, 0)).astype(
        jnp.int32
    )
    canvas = jnp.where(which, view.stats.sample, view.canvas)
    answer = jnp.where(view.masked & ~which, view.stats.argmax, canvas)
    proposal = resized(view, canvas, answer, view.stats.argmax, at >= 0, extra)
    proposal = proposal._replace(used=jnp.minimum(proposal.used, view.used + room))
    ends = pad & (proposal.source < 0) & (at < proposal.used)
    proposal = replace_tokens(proposal, ends, view.eos)
    # The next pass decodes the block that holds the first mask; blocks before it are full.
    masked = (proposal.canvas == view.noise) & (at >= front) & (at < proposal.used)
    full = jnp.where(waiting | ~jnp.any(masked), 0, (jnp.argmax(masked) - front) // block)
    front = front + full * block
    return proposal, Growth(lengthen, front.astype(jnp.int32))


def end_confidence(view: View, tail: Param) -> Float[Array, ""]:
    """Returns how confidently the answer's end is predicted.

    The probabilities of the last `tail` positions whose argmax is the end of text, summed and divided by `tail`.

    Args:
        view: Reads `stats`, `editable` and `eos`.
        tail: Positions that are counted.

    Returns:
        The confidence, in 0..1.
    """
    ends = view.editable & (view.stats.argmax == view.eos)
    counted = ends & (jnp.cumsum(ends[::-1])[::-1] <= tail)
    return jnp.sum(jnp.where(counted, view.stats.p_eos, 0.0)) / tail
