"""infill(): any number of holes in known text.

Models that see both sides of a hole (full attention, or a causal encoder's canvas) denoise all holes at once. Holes of
open length are decided by a rule of variable length, or by filling several lengths and keeping the one under which the
model finds filling and following text most probable.

A block-causal model cannot see what follows a hole: it gets the text in FIM order (arXiv 2207.14255),

    <|fim_prefix|>before<|fim_suffix|>behind<|fim_middle|>middle<|eos|>

and its holes are filled from left to right, each one with the holes before it filled and the later ones left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh

from mercury_jax.config import Plan, refuse
from mercury_jax.decode.decode_config import QUANTUM, bucket
from mercury_jax.decode.defaults import complete_sampler, default_sampler
from mercury_jax.decode.inputs import MAX_TOKENS, Ids, Seeds, check_ids, check_lm, check_whole, row_seeds
from mercury_jax.decode.request import Request, start
from mercury_jax.decode.sampler import Param, SamplerLike, Static, check_sampler
from mercury_jax.decode.score import MaskedDocument, draw_masks, weighted_nats
from mercury_jax.decode.session import Session, advance, check_nan
from mercury_jax.decode.state import Frame, Rows
from mercury_jax.types import LM

SCORED_BEHIND = 16  # tokens of following text that are scored with a filling
SCORE_SAMPLES = 8  # samples of each bound


@dataclass(frozen=True)
class Hole:
    """A gap in known text.

    Attributes:
        tokens: Its exact number of tokens; None: whatever length fits, up to `most`.
        most: Most tokens of a hole of open length. Under a rule of variable length, which moves tokens from hole to
            hole, most tokens of all open holes of a row are the sum of theirs.

    Raises:
        ValueError: A number below 1.
    """

    tokens: int | None = None
    most: int = 32

    def __post_init__(self) -> None:
        check_whole("Hole.most", self.most, 1, MAX_TOKENS)
        if self.tokens is not None:
            check_whole("Hole.tokens", self.tokens, 1, MAX_TOKENS)

    @property
    def room(self) -> int:
        """The most tokens that it may take."""
        return self.most if self.tokens is None else self.tokens


Parts: TypeAlias = Sequence[str | Ids | Hole]
Pieces: TypeAlias = list[Any]  # Holes, and the ids of known texts, in order
FrameCallback: TypeAlias = Callable[[Frame], None]  # takes the Frame [1, B, ...] of a pass, on the host


class Filled(NamedTuple):
    """What fills each row's holes, as ids, and the forward passes of each row."""

    fillings: list[list[np.ndarray]]
    forwards: np.ndarray


class LengthSearch(NamedTuple):
    """How finely shapes and lengths are distinguished; a coarse search is fast and needs few programs.

    Attributes:
        quantum: Texts and canvases take multiples of this many positions.
        growth: Factor from one length to try to the next.
        rows: The lengths of an open hole are tried in batches of a multiple of this many.
    """

    quantum: int = QUANTUM
    growth: float = 1.25
    rows: int = 1


@dataclass(frozen=True)
class InfillOutput:
    """Completed texts; lists have one entry per request."""

    texts: list[str]
    fillings: list[list[str]]  # of each request's holes, left to right
    tokens: list[np.ndarray] = field(repr=False)  # the whole sequence as ids
    filled: list[int] = field(repr=False)  # tokens that were denoised
    forwards: np.ndarray  # forward passes of each row (NFE)
    seconds: float

    @property
    def text(self) -> str:
        """The first completed text."""
        return self.texts[0]

    @property
    def holes(self) -> list[str]:
        """What fills the first request's holes."""
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
        lm: The model. One with full attention takes the whole sequence as its canvas, a causal encoder what lies
            between the first hole and the end. A block-causal model gets FIM order and must have been trained so.
        parts: Texts, ids (lists or 1-D arrays) and Holes in order, or a list of such lists. Where the first part is
            ids, they begin the row as they are.
        seed: Row i draws from seed + i; or a list with one for each; or keys, as of `sample`.
        sampler: A rule or a `Sampler`. None: the model's own. A rule of variable length (`rules.expand`) decides the
            length of open holes while it decodes; FIM decodes up to the end of text; other rules try several lengths.
        plan: Steps, and reuse of keys.
        temperature: Of drawn tokens, one number or one per row.
        mesh: Shard the rows over its `data` axis.

    Returns:
        The completed texts.

    Raises:
        ValueError: No hole, or one that does not fit into the context.

    Example:
        >>> mj.infill(lm, ["def area(r):\\n", mj.Hole(24), "\\n    return a"]).text
    """
    check_lm(lm)
    if isinstance(parts, str) or not isinstance(parts, Sequence) or not parts:
        raise refuse("parts", parts, "texts, ids and Holes, or a non-empty list of such lists")
    several = not any(isinstance(part, str | Hole) for part in parts)
    rows = [_encode_parts(lm, p, i) for i, p in enumerate(parts if several else [parts])]
    request = Request(seed=row_seeds(seed, len(rows), each="row"), sampler=sampler, plan=plan, mesh=mesh)
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
    """Texts as ids; refuses what does not fit into the context."""
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
    # FIM order has its own place for the tokens that begin a text; ids begin as the caller wants.
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
    """Fills the holes of rows of ids and Holes; `infill` without texts.

    Args:
        lm: The model.
        rows: Of each request.
        request: Checked: its seed, sampler, plan, temperature and mesh apply; what is a list or an array has one entry
            per row.
        on_frame: Called after every pass (not of holes in FIM order).
        search: How finely shapes and the lengths of open holes are distinguished.

    Returns:
        The fillings.

    Raises:
        ValueError: Names what does not fit.
    """
    if request.sampler is None:
        request = request._replace(sampler=default_sampler(lm, request.temperature), temperature=None)
    if lm.model.config.pattern == "block_causal":
        return _fill_fim(lm, rows, request)
    if complete_sampler(request.sampler, lm.corruption).rule.variable_length:
        sized = [[Hole(1) if _is_open(p) else p for p in row] for row in rows]
        growth = [sum(p.most - 1 for p in row if _is_open(p)) for row in rows]
        return _fill_sized(lm, request, on_frame, search, sized, growth)
    if any(_is_open(p) for row in rows for p in row):
        return _fill_open(lm, rows, request, on_frame, search)
    return _fill_sized(lm, request, on_frame, search, rows)


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
    """Fills rows whose holes have a size, in one session. growth: positions that each row may grow by; None: 0."""
    # 1. Rows of ids with masks in the holes (without a mask id the canvas starts from noise there).
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
    # 2. One canvas for everything between the first hole and the end.
    bidirectional = lm.model.config.pattern == "bidirectional"
    width = int(end.max()) if bidirectional else int((end - committed).max())
    quantum = search.quantum if bidirectional else search.quantum // 2  # a canvas costs more than a prefix
    block = bucket(width, lm.model.config.block if not bidirectional and default else quantum)
    seeds = row_seeds(request.seed, len(rows), each="row")
    layout = Rows(tokens, given, committed, end, seeds, max_end=max_end)
    session = start(lm, request._replace(rows=layout, block=block, infilling=True))
    session = _run(lm, session, on_frame)
    # 3. What was not given is filled; rules of variable length have moved it.
    s = session.state
    text, ends, kept, nfe = jax.device_get((s.tokens, s.end, s.given, s.nfe))
    fillings = [split_fillings(row, text[i, : ends[i]], kept[i]) for i, row in enumerate(rows)]
    return Filled(fillings, nfe[: session.rows])


def _run(lm: LM, session: Session, on_frame: FrameCallback | None) -> Session:
    """Runs a session to its end, with single passes where a callback wants their frames."""
    if on_frame is None:
        session, _, _ = advance(lm, session, None)
    while not session.done:
        session, frames, _ = advance(lm, session, 1)
        assert on_frame is not None and frames is not None
        on_frame(jax.device_get(frames))
    check_nan(session)
    return session


def split_fillings(row: Pieces, tokens: np.ndarray, given: np.ndarray) -> list[np.ndarray]:
    """Finds what fills the holes of a finished row: the tokens that were not given, cut at its texts.

    Texts keep their tokens and their order, so the given tokens up to a hole are as many as the texts before it hold,
    wherever they have moved.

    Args:
        row: Texts and holes.
        tokens: The finished row.
        given: Which tokens are from the texts.

    Returns:
        The ids in each hole.
    """
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
    """Returns a row's ids with its holes filled.

    Args:
        row: Texts and holes.
        fillings: The ids in each hole.

    Returns:
        The whole sequence.
    """
    rest = iter(fillings)
    return np.concatenate([np.asarray(next(rest) if isinstance(p, Hole) else p, np.int32) for p in row])


def candidate_lengths(most: int, growth: float = LengthSearch().growth) -> list[int]:
    """Returns lengths to try: 1, each next one longer by `growth` (1.25: every one up to 8), and `most` itself.

    Args:
        most: Of the hole.
        growth: Factor from one length to the next.

    Returns:
        Rising lengths.
    """
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(min(most, max(sizes[-1] + 1, int(sizes[-1] * growth))))
    return sizes


def select_rows(request: Request, which: Sequence[int], rows: int) -> Request:
    """Returns the request of some of its rows, with the seed, temperature and rule parameters of each.

    Args:
        request: Of all rows.
        which: The rows; one may come several times.
        rows: How many the request has.

    Returns:
        A request of len(which) rows.
    """
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
    """Fills rows with holes of open length; each is decided from left to right.

    For each length n the model fills n masks between the same texts. What is compared is
    log p(filling, following text | text before), by the any-order bound of `score`: a filling of the wrong length
    leaves the text after it improbable.
    """
    # An open hole starts at a guess, until it is decided itself.
    guess = lambda p: Hole(max(1, p.most // 4)) if _is_open(p) else p
    forwards, fillings = np.zeros(len(rows), int), []
    for i, row in enumerate(rows):
        chosen, filling = [guess(p) for p in row], []
        # A row without open holes makes one attempt (j = -1).
        for j in [j for j, p in enumerate(row) if _is_open(p)] or [-1]:
            sizes = candidate_lengths(row[j].most, search.growth) if j >= 0 else [0]
            tries = [[Hole(n) if k == j else p for k, p in enumerate(chosen)] for n in sizes]
            spare = -len(tries) % search.rows if j >= 0 else 0
            # All tries of a row draw from its seed: they differ in the length alone.
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
    """-log p(filling and what follows it | what is before it), a bound."""
    rest = iter(fillings)
    parts = [np.asarray(next(rest) if isinstance(p, Hole) else p, np.int32) for p in row]
    before = np.concatenate([*parts[:at], np.zeros(0, np.int32)])
    ids = np.concatenate(parts)[: len(before) + len(parts[at]) + SCORED_BEHIND]
    if len(before) == 0:  # a bound needs a token to condition on; the first one is not scored
        before = ids[:1]
    if len(ids) <= len(before):
        return 0.0
    laid = lm.model.layout(ids, len(before), all_clean=False)
    document = MaskedDocument(laid, *draw_masks(laid, SCORE_SAMPLES, np.random.default_rng(0)))
    return float(weighted_nats(lm, [document], quantum).mean())


def _fill_fim(lm: LM, rows: Sequence[Pieces], request: Request) -> Filled:
    """Fills every row's holes one after the other, in FIM order; rows side by side."""
    # 1. Refuse holes that a block-causal model cannot fill.
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
    # 2. One session for each place: the first holes of all rows, then the second ones.
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
        # A hole of a fixed length is not ended by an end of text: where all are fixed, no id ends the answer.
        fixed = all(hole.tokens is not None for _, hole in prompts)
        session = _run(lm, start(lm, some._replace(rows=layout, infilling=fixed)), None)
        s = session.state
        text, ends, nfe = jax.device_get((s.tokens, s.end, s.nfe))
        for at, i in enumerate(which):
            fillings[i].append(text[at, committed[at] : ends[at]])
            forwards[i] += nfe[at]
    return Filled(fillings, forwards)


def fim_prompt(lm: LM, row: Pieces, filled: Sequence[np.ndarray]) -> tuple[list[int], Hole]:
    """Lays a row out in FIM order.

    Args:
        lm: Its tokenizer has the FIM tokens.
        row: Texts and holes.
        filled: What fills its first holes; the next one is to be filled, later ones are left out.

    Returns:
        The prompt, and the hole to fill.
    """
    marks, holes = lm.tokenizer.fim, [i for i, part in enumerate(row) if isinstance(part, Hole)]
    at = holes[len(filled)]
    done: dict[int, Any] = dict(zip(holes, filled, strict=False))
    before = [int(x) for i, part in enumerate(row[:at]) for x in done.get(i, part)]
    behind = [x for part in row[at + 1 :] if not isinstance(part, Hole) for x in part]
    assert marks is not None
    return [*lm.tokenizer.begin, marks.prefix, *before, marks.suffix, *behind, marks.middle], row[at]
