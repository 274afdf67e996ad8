"""Infilling: `mj.infill` fills any number of holes (spans of masks) in known text.

Models whose attention covers both sides of a hole (full attention, or the canvas of a causal encoder) denoise all holes
at once. A hole of open length gets its length from a rule of variable length; with other rules, several lengths are
tried, and the one with the most probable filling and following text is kept.

A block-causal model cannot attend to the text after a hole. It gets the text in fill-in-the-middle (FIM) order,
arXiv 2207.14255:

    <|fim_prefix|>before<|fim_suffix|>behind<|fim_middle|>middle<|eos|>

Its holes are filled one after the other from left to right. The prompt of a hole contains the fillings of the holes
before it, and omits the holes after it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh

from mercury_jax.config import Plan, refuse
from mercury_jax.decode.defaults import complete_sampler, default_sampler
from mercury_jax.decode.inputs import MAX_TOKENS, Ids, Seeds, check_ids, check_lm, check_whole, row_seeds
from mercury_jax.decode.likelihood import noised_document, weighted_nats
from mercury_jax.decode.request import Request, start
from mercury_jax.decode.sampler import Param, SamplerLike, Static, check_sampler
from mercury_jax.decode.session import Session, advance, check_nan
from mercury_jax.decode.state import QUANTUM, Frame, Rows, bucket
from mercury_jax.types import LM

SCORED_BEHIND = 16  # tokens of the following text that are scored together with a filling
SCORE_SAMPLES = 8  # noised canvases per score


@dataclass(frozen=True)
class Hole:
    """A gap in known text.

    Holes without a token between them are filled as one hole, and share what fills it in their order: a hole of fixed
    length takes its number of tokens, a hole of open length the others, up to its `most`.

    Attributes:
        tokens: Exact number of tokens; None: open length, up to `most` tokens.
        most: Maximum number of tokens of a hole of open length. A rule of variable length shares it: the open holes of
            a row together have at most the sum of their `most`.

    Raises:
        ValueError: A number is below 1.
    """

    tokens: int | None = None
    most: int = 32

    def __post_init__(self) -> None:
        check_whole("Hole.most", self.most, 1, MAX_TOKENS)
        if self.tokens is not None:
            check_whole("Hole.tokens", self.tokens, 1, MAX_TOKENS)

    @property
    def room(self) -> int:
        """Maximum number of tokens."""
        return self.most if self.tokens is None else self.tokens

    @property
    def least(self) -> int:
        """Minimum number of tokens."""
        return self.tokens or 1


@dataclass(frozen=True)
class _HoleRun(Hole):
    """Holes without a token between them, filled as one hole."""

    holes: tuple[Hole, ...] = ()

    @property
    def least(self) -> int:
        return max(1, sum(hole.tokens or 0 for hole in self.holes))

    def split(self, filling: np.ndarray) -> list[np.ndarray]:
        """Divides what fills the run among its holes: each open hole takes what the fixed holes leave.

        The last open hole takes all of that, which may be more than its `most` where open holes share their growth.
        """
        found, fixed = [], sum(hole.tokens or 0 for hole in self.holes)
        last = max((i for i, hole in enumerate(self.holes) if _is_open(hole)), default=-1)
        for i, hole in enumerate(self.holes):
            fixed -= hole.tokens or 0
            rest = max(0, len(filling) - fixed)
            size = hole.tokens or (rest if i == last else min(hole.most, rest))
            found.append(filling[:size])
            filling = filling[size:]
        return found


Parts: TypeAlias = Sequence[str | Ids | Hole]
Pieces: TypeAlias = list[Any]  # Holes, and the ids of known texts, in order
FrameCallback: TypeAlias = Callable[[Frame], None]  # takes the Frame [1, B, ...] of a pass, on the host


class Filled(NamedTuple):
    """The fillings of each row as ids, and the forward passes that they took."""

    fillings: list[list[np.ndarray]]  # one per hole of each row, from left to right
    forwards: np.ndarray  # forward passes of each row (NFE)


class LengthSearch(NamedTuple):
    """Resolution of shapes and of the lengths to try; a coarse search is fast and compiles few programs.

    Attributes:
        quantum: The lengths of texts and canvases are rounded up to multiples of this number.
        growth: Ratio of successive lengths to try.
        rows: The batch of lengths to try is rounded up to a multiple of this number of rows.
    """

    quantum: int = QUANTUM
    growth: float = 1.25
    rows: int = 1


@dataclass(frozen=True)
class InfillOutput:
    """Completed texts; lists have one entry per request.

    Attributes:
        texts: The whole texts, holes filled.
        fillings: Texts of the holes, one per hole of each request, from left to right.
        tokens: The whole sequences as ids.
        filled: Number of tokens in the holes of each request.
        forwards: Forward passes of each row (NFE).
        seconds: Wall time of decoding, compilation included.
    """

    texts: list[str]
    fillings: list[list[str]]
    tokens: list[np.ndarray] = field(repr=False)
    filled: list[int] = field(repr=False)
    forwards: np.ndarray
    seconds: float

    @property
    def text(self) -> str:
        """The first completed text."""
        return self.texts[0]

    @property
    def holes(self) -> list[str]:
        """The fillings of the first request's holes."""
        return self.fillings[0]

    @property
    def tokens_per_forward(self) -> float:
        """Denoised tokens over forward passes, summed over the rows."""
        return float(sum(self.filled) / max(int(self.forwards.sum()), 1))

    @property
    def tokens_per_second(self) -> float:
        """Denoised tokens of all rows over the seconds of the call."""
        return sum(self.filled) / max(self.seconds, 1e-9)


def infill(
    lm: LM,
    parts: Parts | Sequence[Parts],
    *,
    seed: Seeds = 0,
    sampler: SamplerLike | None = None,
    plan: Plan | None = None,
    temperature: Param | Sequence[float] | None = None,
    mesh: Mesh | None = None,
) -> InfillOutput:
    """Fills the holes in known text, which never changes.

    Args:
        lm: The model. With full attention the canvas is the whole sequence, with a causal encoder the part from the
            first hole to the end. A block-causal model gets FIM order, and must have been trained with it.
        parts: Texts, ids (lists or 1-D arrays) and Holes in order, or a list of such lists. If the first part is ids,
            no begin-of-text token is put before them.
        seed: Row i draws from seed + i; or a list with one seed per row; or keys, as in `sample`.
        sampler: A rule or a `Sampler`. None: the default of the model. The length of an open hole is decided while
            decoding by a rule of variable length (`rules.expand`), by the end of text in FIM order, and by trying
            several lengths with other rules.
        plan: Number of steps, and reuse of the KV cache.
        temperature: Temperature of drawn tokens, one number or one per row.
        mesh: Shard the rows over its `data` axis.

    Returns:
        The completed texts.

    Raises:
        ValueError: There is no hole, or the parts do not fit into the context.

    Example:
        >>> mj.infill(lm, ["def area(r):\\n", mj.Hole(24), "\\n    return a"]).text
    """
    check_lm(lm)
    if isinstance(parts, str) or not isinstance(parts, Sequence) or not parts:
        raise refuse("parts", parts, "texts, ids and Holes, or a non-empty list of such lists")
    several = not any(isinstance(part, str | Hole) for part in parts)
    rows = [_encode_parts(lm, p, i) for i, p in enumerate(parts if several else [parts])]
    request = Request(
        seed=row_seeds(seed, len(rows), each="row"),
        sampler=sampler,
        plan=Plan() if plan is None else plan,
        mesh=mesh,
    )
    request = request._replace(temperature=temperature).checked()
    began = time.perf_counter()
    done = fill(lm, rows, request)
    decode = lambda ids: lm.tokenizer.decode(np.asarray(ids).tolist())
    tokens = [join_pieces(row, f) for row, f in zip(rows, done.fillings, strict=True)]
    return InfillOutput(
        texts=[decode(t) for t in tokens],
        fillings=[[decode(ids) for ids in f] for f in done.fillings],
        tokens=tokens,
        filled=[sum(len(ids) for ids in f) for f in done.fillings],
        forwards=done.forwards,
        seconds=time.perf_counter() - began,
    )


def _encode_parts(lm: LM, parts: Any, index: int) -> Pieces:
    """Encodes the texts of a row as ids; refuses a row that does not fit into the context."""
    name, context = f"parts[{index}]", lm.model.config.context
    if not isinstance(parts, Sequence) or isinstance(parts, str):
        raise refuse(name, parts, "a list of texts, ids and Holes")
    if not any(isinstance(p, Hole) for p in parts):
        raise refuse(name, parts, "at least one Hole among the texts")
    row: Pieces = []
    for i, part in enumerate(parts):
        if isinstance(part, str | Hole):
            row.append(part if isinstance(part, Hole) else lm.tokenizer.encode(part))
            continue
        ids = check_ids(lm, part, f"{name}[{i}]", "a text, ids (whole numbers), or a Hole")
        if lm.corruption.mask in ids:
            allowed = f"no mask among the ids ({lm.corruption.mask}): Hole(n) stands for n tokens to fill"
            raise refuse(f"{name}[{i}]", ids, allowed)
        row.append(ids)
    # Begin-of-text tokens: FIM order adds them itself, and a row that starts with ids is taken as it is.
    if lm.tokenizer.begin and lm.model.config.pattern != "block_causal" and isinstance(parts[0], str | Hole):
        row = [list(lm.tokenizer.begin), *row]
    size = sum(p.room if isinstance(p, Hole) else len(p) for p in row)
    if size > context:
        raise refuse(name, f"{size} tokens", f"at most the model's context of {context}")
    return row


def fill(
    lm: LM,
    rows: Sequence[Pieces],
    request: Request,
    on_frame: FrameCallback | None = None,
    search: LengthSearch = LengthSearch(),
) -> Filled:
    """Fills the holes of rows of ids and Holes: `infill` without texts.

    Args:
        request: A checked request. Reads its seed, sampler, plan, temperature and mesh; lists and arrays have one entry
            per row.
    """
    if request.sampler is None:
        request = request._replace(sampler=default_sampler(lm, request.temperature), temperature=None)
    joined = [_join_holes(row) for row in rows]
    # Three ways, by attention pattern and rule; see the module docstring.
    if lm.model.config.pattern == "block_causal":
        _check_fim(lm, rows)
        filled = _fill_fim(lm, joined, request)
    elif complete_sampler(request.sampler, lm.corruption).rule.variable_length:
        sized = [[Hole(p.least) if _is_open(p) else p for p in row] for row in joined]
        growth = [sum(p.most - p.least for p in row if _is_open(p)) for row in joined]
        filled = _fill_sized(lm, request, on_frame, search, sized, growth)
    elif any(_is_open(p) for row in joined for p in row):
        filled = _fill_open(lm, joined, request, on_frame, search)
    else:
        filled = _fill_sized(lm, request, on_frame, search, joined)
    runs = [[p for p in row if isinstance(p, Hole)] for row in joined]
    split = lambda run, ids: run.split(ids) if isinstance(run, _HoleRun) else [ids]
    pairs = [zip(row, ids, strict=True) for row, ids in zip(runs, filled.fillings, strict=True)]
    return filled._replace(fillings=[[one for run, ids in row for one in split(run, ids)] for row in pairs])


def _join_holes(row: Pieces) -> Pieces:
    """Joins the holes of a row that have no token between them to one hole."""
    joined: Pieces = []
    parts = (p for p in row if isinstance(p, Hole) or len(p))
    for is_hole, group in itertools.groupby(parts, lambda part: isinstance(part, Hole)):
        holes = tuple(group)
        if not is_hole or len(holes) == 1:
            joined += holes
            continue
        room = sum(hole.room for hole in holes)
        joined.append(_HoleRun(None if any(map(_is_open, holes)) else room, room, holes))
    return joined


def _is_open(part: Any) -> bool:
    return isinstance(part, Hole) and part.tokens is None


def _fill_sized(
    lm: LM,
    request: Request,
    on_frame: FrameCallback | None,
    search: LengthSearch,
    rows: Sequence[Pieces],
    growth: Sequence[int] | None = None,
) -> Filled:
    """Fills rows whose holes have a size, all in one session.

    `growth` is the number of positions by which each row may grow under a rule of variable length; None: 0.
    """
    # 1. Rows of ids, with masks in the holes. A model without a mask id replaces them by noise.
    mask, flat = lm.model.config.mask or 0, []
    for row in rows:
        ids = [np.full(p.tokens or 0, mask) if isinstance(p, Hole) else np.asarray(p, int) for p in row]
        hole = [np.full(len(x), isinstance(p, Hole)) for x, p in zip(ids, row, strict=True)]
        flat.append((np.concatenate(ids).astype(np.int32), np.concatenate(hole)))
    end = np.array([len(ids) for ids, _ in flat])
    max_end = end + np.asarray(growth or 0)
    longest, default = int(max_end.max()), search.quantum == QUANTUM
    tokens = np.zeros((len(rows), longest if default else bucket(longest, search.quantum)), np.int32)
    given, committed = np.zeros(tokens.shape, bool), np.zeros(len(rows), np.int64)
    for i, (ids, hole) in enumerate(flat):
        tokens[i, : len(ids)], given[i, : len(ids)] = ids, ~hole
        committed[i] = np.flatnonzero(hole)[0]
    # 2. One canvas from the first hole to the end. Its width is rounded more finely than that of a prefix, since its
    #    padding is denoised in every pass.
    bidirectional = lm.model.config.pattern == "bidirectional"
    width = int(end.max()) if bidirectional else int((end - committed).max())
    quantum = search.quantum if bidirectional else search.quantum // 2  # a canvas costs more than a prefix
    block = bucket(width, lm.model.config.block if not bidirectional and default else quantum)
    seeds = row_seeds(request.seed, len(rows), each="row")
    layout = Rows(tokens, given, committed, end, seeds, max_end=max_end)
    session = start(lm, request._replace(rows=layout, block=block, infilling=True))
    session = _run(lm, session, on_frame)
    # 3. Read the fillings: the tokens that were not given, wherever a rule of variable length has moved them.
    s = session.state
    text, ends, kept, nfe = jax.device_get((s.tokens, s.limits.end, s.given, s.nfe))
    fillings = [split_fillings(row, text[i, : ends[i]], kept[i]) for i, row in enumerate(rows)]
    return Filled(fillings, nfe[: session.rows])


def _run(lm: LM, session: Session, on_frame: FrameCallback | None) -> Session:
    """Runs a session to its end; with a callback, pass by pass."""
    if on_frame is None:
        session, _, _ = advance(lm, session, None)
    while not session.done:
        session, frames, _ = advance(lm, session, 1)
        assert on_frame is not None and frames is not None
        on_frame(jax.device_get(frames))
    check_nan(session)
    return session


def split_fillings(row: Pieces, tokens: np.ndarray, given: np.ndarray) -> list[np.ndarray]:
    """Extracts the fillings of a finished row: the tokens between its given texts.

    Given tokens may have moved, but keep their number and order. If the texts before a hole have n tokens, the hole is
    filled by the tokens between the n-th and the next given token.

    Args:
        tokens: The finished row [S].
        given: Which tokens are from the texts [S or longer].
    """
    # Positions of the given tokens, with -1 before the first and the length after the last.
    at = np.flatnonzero(given[: len(tokens)])
    at = np.concatenate([[-1], at, [len(tokens)]])
    found, passed = [], 0
    for part in row:
        if isinstance(part, Hole):
            found.append(tokens[at[passed] + 1 : at[passed + 1]])
        else:
            passed += len(part)
    return found


def join_pieces(row: Pieces, fillings: Sequence[np.ndarray]) -> np.ndarray:
    """Joins the texts and fillings of a row."""
    rest = iter(fillings)
    return np.concatenate([np.asarray(next(rest) if isinstance(p, Hole) else p, np.int32) for p in row])


def candidate_lengths(most: int, growth: float = LengthSearch().growth, least: int = 1) -> list[int]:
    """Computes the lengths to try for an open hole: a geometric series from `least` to `most`."""
    sizes = [least]
    while sizes[-1] < most:
        sizes.append(min(most, max(sizes[-1] + 1, int(sizes[-1] * growth))))
    return sizes


def select_rows(request: Request, which: Sequence[int], rows: int) -> Request:
    """Selects rows of a request, with the seed, temperature and rule parameters of each."""
    index = np.asarray(which)
    is_static = lambda x: isinstance(x, Static)  # a table for all rows
    take = lambda x: x if is_static(x) or np.ndim(x) == 0 else np.asarray(x)[index]
    sampler = None if request.sampler is None else check_sampler(request.sampler)
    return request._replace(
        seed=row_seeds(request.seed, rows, each="row")[index],
        temperature=take(request.temperature),
        sampler=jax.tree.map(take, sampler, is_leaf=is_static),
    )


def _fill_open(
    lm: LM, rows: Sequence[Pieces], request: Request, on_frame: FrameCallback | None, search: LengthSearch
) -> Filled:
    """Fills rows with holes of open length, deciding their lengths from left to right.

    For each length n the model fills n masks between the same texts. The lengths are compared by the bound of `score`
    on log p(filling, following text | text before): after a filling of the wrong length, the following text is
    improbable.
    """
    # Open holes whose length is not decided yet have a guessed length.
    guess = lambda p: Hole(max(p.least, p.most // 4)) if _is_open(p) else p
    forwards, fillings = np.zeros(len(rows), int), []
    for i, row in enumerate(rows):
        chosen, filling = [guess(p) for p in row], []
        # A row without open holes makes one attempt (j = -1).
        for j in [j for j, p in enumerate(row) if _is_open(p)] or [-1]:
            sizes = candidate_lengths(row[j].most, search.growth, row[j].least) if j >= 0 else [0]
            tries = [[Hole(n) if k == j else p for k, p in enumerate(chosen)] for n in sizes]
            spare = -len(tries) % search.rows if j >= 0 else 0
            # All lengths of a row are tried with its seed, so that they differ only in the length. Copies of the last
            # one fill up the batch.
            one = select_rows(request, [i] * (len(tries) + spare), len(rows))
            filled = _fill_sized(lm, one, on_frame, search, tries + spare * tries[-1:])
            pairs = zip(tries, filled.fillings)
            nats = [_filling_nats(lm, row, filling, max(j, 0), search.quantum) for row, filling in pairs]
            best = int(np.argmin(nats)) if len(tries) > 1 else 0
            chosen, filling = tries[best], filled.fillings[best]
            forwards[i] += int(filled.forwards[: len(tries)].sum())
        fillings.append(filling)
    return Filled(fillings, forwards)


def _filling_nats(lm: LM, row: Pieces, fillings: Sequence[np.ndarray], at: int, quantum: int) -> float:
    """Computes an upper bound on -log p(filling `at` and the text after it | the text before it), in nats."""
    rest = iter(fillings)
    parts = [np.asarray(next(rest) if isinstance(p, Hole) else p, np.int32) for p in row]
    before = np.concatenate([*parts[:at], np.zeros(0, np.int32)])
    ids = np.concatenate(parts)[: len(before) + len(parts[at]) + SCORED_BEHIND]
    if len(before) == 0:  # a bound needs a token to condition on; the first one is not scored
        before = ids[:1]
    if len(ids) <= len(before):
        return 0.0
    document = noised_document(lm, ids, len(before), SCORE_SAMPLES, seed=0)
    return float(weighted_nats(lm, [document], quantum).mean())


def _check_fim(lm: LM, rows: Sequence[Pieces]) -> None:
    """Refuses holes that a block-causal model cannot fill."""
    context, begin = lm.model.config.context, len(lm.tokenizer.begin)
    if lm.tokenizer.fim is None:
        why = f"a block-causal model fills holes in FIM order, and the tokenizer of {lm.name} has no tokens for that"
        raise refuse("parts", "a hole", f"texts: {why}")
    for i, row in enumerate(rows):
        fixed = [p.tokens is not None for p in row if isinstance(p, Hole)]
        if any(fixed) and not all(fixed):
            allowed = "one kind, for a block-causal model"
            raise refuse(f"parts[{i}]", "holes of fixed and of open length", allowed)
        size = begin + 3 + sum(p.room if isinstance(p, Hole) else len(p) for p in row)
        if size > context:
            allowed = f"at most the model's context of {context}"
            raise refuse(f"parts[{i}]", f"{size} tokens in FIM order", allowed)
    if len({p.tokens is None for row in rows for p in row if isinstance(p, Hole)}) > 1:
        allowed = "one kind in a call, for a block-causal model"
        raise refuse("parts", "rows of fixed and of open holes", allowed)


def _fill_fim(lm: LM, rows: Sequence[Pieces], request: Request) -> Filled:
    """Fills the holes of each row one after the other, in FIM order; the rows form a batch."""
    # One session fills the first holes of all rows, the next one the second holes, and so on.
    holes = [sum(isinstance(p, Hole) for p in row) for row in rows]
    fillings: list[list[np.ndarray]] = [[] for _ in rows]
    forwards = np.zeros(len(rows), int)
    for j in range(max(holes)):
        which = [i for i in range(len(rows)) if j < holes[i]]
        prompts = [fim_prompt(lm, rows[i], fillings[i]) for i in which]
        committed = np.array([len(ids) for ids, _ in prompts])
        end = committed + [hole.room for _, hole in prompts]
        tokens = np.zeros((len(prompts), int(end.max())), np.int32)
        for row, (ids, _) in zip(tokens, prompts, strict=True):
            row[: len(ids)] = ids
        given = np.arange(tokens.shape[1]) < committed[:, None]
        some = select_rows(request, which, len(rows))
        layout = Rows(tokens, given, committed, end, some.seed)
        # The end of text must not shorten a hole of fixed length; `infilling` disables it.
        fixed = all(hole.tokens is not None for _, hole in prompts)
        session = _run(lm, start(lm, some._replace(rows=layout, infilling=fixed)), None)
        s = session.state
        text, ends, nfe = jax.device_get((s.tokens, s.limits.end, s.nfe))
        for at, i in enumerate(which):
            fillings[i].append(text[at, committed[at] : ends[at]])
            forwards[i] += nfe[at]
    return Filled(fillings, forwards)


def fim_prompt(lm: LM, row: Pieces, filled: Sequence[np.ndarray]) -> tuple[list[int], Hole]:
    """Lays a row out in FIM order."""
    marks, holes = lm.tokenizer.fim, [i for i, part in enumerate(row) if isinstance(part, Hole)]
    at = holes[len(filled)]
    done: dict[int, Any] = dict(zip(holes, filled, strict=False))
    before = [int(x) for i, part in enumerate(row[:at]) for x in done.get(i, part)]
    behind = [x for part in row[at + 1 :] if not isinstance(part, Hole) for x in part]
    assert marks is not None
    return [*lm.tokenizer.begin, marks.prefix, *before, marks.suffix, *behind, marks.middle], row[at]
