"""Rules that insert and delete: DreamOn's expansion, LLaDA2.2's Levenshtein edits, DAEDAL's growth.

They say for every position of their proposal which old one it continues (`Proposal.source`). Positions
that the user gave keep their token and their order.
"""

from __future__ import annotations

from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.decode import stop as stops
from mercury_jax.decode.parts import Knob, Part, rule
from mercury_jax.decode.ranges import AtLeast, Between
from mercury_jax.decode.read import NEVER
from mercury_jax.decode.rules.masked import best
from mercury_jax.types import Key, Proposal, View


def _budget(canvas: jax.Array, vocab: int) -> jax.Array:
    del vocab
    return jnp.asarray(canvas.shape[0], jnp.int32)


@rule(init=_budget, grows=True, fits=("masked",))
def expand(
    key: Key,
    view: View,
    memory: jax.Array,
    *,
    expand: Annotated[Knob, AtLeast(-1, whole=True)] = -1,
    delete: Annotated[Knob, AtLeast(-1, whole=True)] = -1,
    p: Annotated[Knob, Between(0, 1)] = 0.9,
) -> tuple[Proposal, jax.Array]:
    """Threshold decoding in which a mask may say that it stands for two, or for none.

    DreamOn (arXiv 2602.01326; eval/generator.py of DreamLM/DreamOn): a settled prediction of the id
    `expand` becomes two masks while the window has room; one of `delete` (DreamOn: the end of text)
    removes the position; -1: no such id. Masks above probability `p` settle, at least one; p = 1 is the
    reference's one a step. In a full window probabilities are those without `expand`. The model must be
    free to predict both ids; no answer holds them. Each block expands at most as often as the window
    has positions, so that expansions and removals cannot take turns for ever. The reference's option
    to empty everything behind a predicted end is left out: with several holes it would empty the
    later ones.
    """
    del key
    word, _ = without(view, expand, delete)
    room = jnp.where(_last(view), 0, jnp.minimum(view.room, memory))
    token, c = _unexpanded(view, expand, room == 0)
    accept = view.masked & (c > p) | best(c, view.masked, jnp.asarray(1))
    twice = accept & (token == expand)
    grow = twice & (jnp.cumsum(twice) <= room)  # the others wait as masks
    gone = accept & (token == delete)
    written = accept & ~twice & ~gone
    canvas = jnp.where(written, token, view.canvas)
    answer = jnp.where(view.masked & ~written, word, canvas)
    return resized(view, canvas, answer, word, ~gone, grow), memory - grow.sum().astype(memory.dtype)


def _unexpanded(view: View, expand: Knob, full: Array) -> tuple[Int[Array, "L"], Float[Array, "L"]]:
    """(token, its probability) of the draw, or, where the window is full, as if `expand` were impossible."""
    log_p = _free(view, expand)
    token = jnp.where(view.reading.sample == expand, log_p.argmax(-1).astype(jnp.int32), view.reading.sample)
    c = jnp.exp(jnp.take_along_axis(log_p, token[:, None], axis=-1)[:, 0])
    return jnp.where(full, token, view.reading.sample), jnp.where(full, c, view.reading.p_sample)


LOOP = 16  # canvases remembered: no block is edited for longer once it is full


def _unseen(canvas: jax.Array, vocab: int) -> tuple[jax.Array, jax.Array]:
    del vocab
    return jnp.ones(canvas.shape, bool), jnp.full((LOOP, *canvas.shape), -1, jnp.int32)


def _sixteen() -> Part:
    return stops.fixed_point(patience=1, limit=LOOP)


@rule(init=_unseen, grows=True, fits=("masked",), stop=_sixteen)
def levenshtein(
    key: Key,
    view: View,
    memory: tuple[jax.Array, jax.Array],
    *,
    delete: Annotated[Knob, AtLeast(-1, whole=True)] = -1,
    insert: Annotated[Knob, AtLeast(-1, whole=True)] = -1,
    p: Annotated[Knob, Between(0, 1)] = 0.5,
    p_edit: Annotated[Knob, Between(0, 1)] = 0.0,
) -> tuple[Proposal, tuple[jax.Array, jax.Array]]:
    """Joint-threshold editing that may also remove a position, or insert a mask before it.

    LLaDA2.2 (its technical report; sglang/srt/dllm/algorithm/joint_threshold_indel.py). A mask settles
    on the argmax above `p`, a settled token is edited where the argmax differs and has more than
    `p_edit`; an argmax of `delete` removes the position, of `insert` puts a mask before it. The
    length stays: each run of editable positions is padded with masks or cut at its end, so given
    tokens do not move. While masks of the start are left, a step settles at least one more than
    edits have brought in, after that all; once a pass finds the block full, up to 16 passes edit. (The
    reference counts them from when no mask of the start is left, and so gives up sooner where edits
    keep bringing masks in.)

    Against loops: a step that leads back to one of the last 16 canvases, and the last step of the
    block, only fill masks, with neither id. (The reference then puts the next best token at the least
    sure position; both end, this one without a token that nothing speaks for.)
    """
    del key
    first, seen = memory
    word, p_word = without(view, delete, insert)
    token, c = view.reading.argmax, view.reading.p_argmax
    at_first = first & view.masked
    brought = (view.masked & ~at_first).sum()
    quota = jnp.where(jnp.any(at_first), 1 + brought, view.masked.sum())
    settles = lambda score: view.masked & (score > p) | best(score, view.masked, quota)
    wrong = view.editable & ~view.masked & (token != view.canvas) & (c > p_edit)
    source = jnp.arange(token.shape[0], dtype=jnp.int32)
    edited, moves = _edited(view, token, settles(c) | wrong, delete, insert)
    seen = seen.at[view.step % LOOP].set(view.canvas)
    again = jnp.any(jnp.all((seen == edited) | ~view.editable, axis=-1)) | _last(view)
    canvas = jnp.where(again, jnp.where(settles(p_word), word, view.canvas), edited)
    source = jnp.where(again, source, moves)
    answer = jnp.where(view.editable & (canvas == view.noise), _carried(word, word, source, view.n), canvas)
    proposal = Proposal(canvas, answer, view.n, source)
    return proposal, (_carried(first, jnp.zeros_like(first), source, view.n), seen)


def _edited(
    view: View, token: Array, write: Array, delete: Knob, insert: Knob
) -> tuple[Int[Array, "L"], Int[Array, "L"]]:
    """(canvas, source) after writing tokens and following the two ids, run by run."""
    gone, split = write & (token == delete), write & (token == insert)
    canvas = jnp.where(write & ~gone & ~split, token, view.canvas)
    source = rearrange(~gone, split, *runs(view.editable))
    return jnp.where(source >= 0, canvas[jnp.maximum(source, 0)], view.noise), source


@rule(init=lambda canvas, vocab: jnp.asarray(True), grows=True, fits=("masked",))
def daedal(
    key: Key,
    view: View,
    memory: jax.Array,
    *,
    start: Annotated[Knob, AtLeast(1, whole=True)] = 64,
    by: Annotated[Knob, AtLeast(1, whole=True)] = 8,
    p: Annotated[Knob, Between(0, 1)] = 0.9,
    p_low: Annotated[Knob, Between(0, 1)] = 0.1,
    p_end: Annotated[Knob, Between(0, 1)] = 0.5,
    p_full: Annotated[Knob, Between(0, 1)] = 0.9,
    tail: Annotated[Knob, AtLeast(1, whole=True)] = 32,
) -> tuple[Proposal, jax.Array]:
    """Begin short, lengthen until the model sees its end coming, and widen where it is at a loss.

    DAEDAL (arXiv 2508.00819; models/LLaDA_DAEDAL.py of Li-Jinsong/DAEDAL). An answer begins with
    `start` masks (whoever opens the block reads that knob). First, while its end is less sure than
    `p_end`, each pass adds `by` masks behind it and settles nothing. Then masks above `p` settle, at
    least one, and while the end is less sure than `p_full` the least sure mask under `p_low` becomes
    `by` masks. How sure the end is: see `ending`. All within `view.room`; where no id ends the answer
    nothing grows. The passes that lengthen count as steps of the block.

    The reference then fixes 16 tokens of end-of-text behind the answer, and decodes in blocks of its
    own; here the answer is not padded, and blocks are the plan's.
    """
    del key, start
    sure = jnp.where(view.eos < 0, 1.0, ending(view, tail))
    room = jnp.where(_last(view), 0, view.room)
    lengthen = memory & (sure < p_end) & (room > 0)
    c, at = view.reading.p_sample, jnp.arange(view.canvas.shape[0])
    accept = (view.masked & (c > p) | best(c, view.masked, jnp.asarray(1))) & ~lengthen
    lost = view.masked & ~accept & (c < p_low) & (sure < p_full) & ~lengthen
    lost = best(-c, lost, jnp.asarray(1))
    behind = at == jnp.max(jnp.where(view.editable, at + 1, 0))
    extra = jnp.where(lengthen & behind, by, jnp.where(lost, jnp.maximum(by - 1, 0), 0))
    canvas = jnp.where(accept, view.reading.sample, view.canvas)
    answer = jnp.where(view.masked & ~accept, view.reading.argmax, canvas)
    extra = jnp.minimum(extra, room).astype(jnp.int32)
    return resized(view, canvas, answer, view.reading.argmax, at >= 0, extra), lengthen


def ending(view: View, tail: Knob) -> Float[Array, ""]:
    """How sure the end of the answer is: the last `tail` positions that say end-of-text, summed, over `tail`."""
    says = view.editable & (view.reading.argmax == view.eos)
    counted = says & (jnp.cumsum(says[::-1])[::-1] <= tail)
    return jnp.sum(jnp.where(counted, view.reading.p_eos, 0.0)) / tail


def without(view: View, *ids: Knob) -> tuple[Int[Array, "L"], Float[Array, "L"]]:
    """(the likeliest token, its probability) at every position, were the given ids impossible."""
    log_p = _free(view, *ids)
    return log_p.argmax(-1).astype(jnp.int32), jnp.exp(log_p.max(-1))


def _free(view: View, *ids: Knob) -> Float[Array, "L V"]:
    vocab = jnp.arange(view.logits.shape[-1])
    banned = jnp.any(jnp.stack([vocab == i for i in ids]), axis=0)
    return jax.nn.log_softmax(jnp.where(banned, NEVER, view.logits), axis=-1)


def resized(
    view: View, canvas: Array, answer: Array, word: Array, keep: Bool[Array, "L"], extra: Array
) -> Proposal:
    """A proposal whose old position i is kept or not, behind `extra[i]` new masks.

    canvas, answer: in the old order. word: what the answer holds at a new mask, which no pass has read
    yet, is what its place said before. The caller sees to it that everything fits.
    """
    size = canvas.shape[0]
    at = jnp.arange(size)
    keep = keep & (at < view.n)
    source = rearrange(keep, extra, jnp.zeros_like(at), jnp.full_like(at, size))
    n = jnp.minimum((keep + extra.astype(jnp.int32)).sum(), size).astype(view.n.dtype)
    used = lambda x: jnp.where(at < n, x, view.noise)
    canvas = _carried(canvas, view.noise, source, view.n)
    return Proposal(used(canvas), used(_carried(answer, word, source, view.n)), n, source)


def rearrange(
    keep: Bool[Array, "L"], extra: Array, start: Int[Array, "L"], end: Int[Array, "L"]
) -> Int[Array, "L"]:
    """For each position afterwards the old one that stands there, -1 where a new one (or none) does.

    Old position i is dropped unless keep[i], and preceded by extra[i] new ones; it stays within its
    stretch [start[i], end[i]), which fills from the left and is cut at its end.
    """
    size = keep.shape[0]
    count = keep + extra.astype(jnp.int32)
    before = jnp.cumsum(count) - count
    to = start + before - before[start] + extra.astype(jnp.int32)
    to = jnp.where(keep & (to < end), to, size)
    at = jnp.arange(size, dtype=jnp.int32)
    return jnp.full((size,), -1, jnp.int32).at[to].set(at, mode="drop")


def runs(editable: Bool[Array, "L"]) -> tuple[Int[Array, "L"], Int[Array, "L"]]:
    """(start, end) of the run of editable positions that each one is in; any other is a run of its own."""
    at = jnp.arange(editable.shape[0])
    joined = editable[1:] & editable[:-1]  # with the position before it
    begins = jnp.concatenate([jnp.array([True]), ~joined])
    ends = jnp.concatenate([~joined, jnp.array([True])])
    start = jax.lax.cummax(jnp.where(begins, at, 0))
    return start, jax.lax.cummin(jnp.where(ends, at + 1, at.shape[0]), reverse=True)


def _carried(old: Array, new: Array, source: Int[Array, "L"], n: Int[Array, ""]) -> Array:
    """`old` moved along with its positions; at a new one, `new` as it stood at that place (at most n - 1)."""
    place = jnp.clip(jnp.arange(source.shape[0]), 0, jnp.maximum(n - 1, 0))
    return jnp.where(source >= 0, old[jnp.maximum(source, 0)], new[place])


def _last(view: View) -> Bool[Array, ""]:
    return view.step + 1 >= view.steps
