"""infill(): any number of holes in known text, all of them denoised at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from mercury_jax.config import Plan, refuse
from mercury_jax.decode import defaults, fim, launch, lengths
from mercury_jax.decode.arguments import check_lm, checked_mesh, checked_plan
from mercury_jax.decode.holes import Filled, Hole, InfillOutput, Row, output, segments
from mercury_jax.decode.lengths import Grid
from mercury_jax.decode.parts import complete
from mercury_jax.decode.program import QUANTUM, bucket
from mercury_jax.decode.prompts import check_seed
from mercury_jax.decode.state import Frame
from mercury_jax.types import LM

__all__ = ["Hole", "InfillOutput", "infill"]

Parts = Sequence[str | Hole]
Watch = Callable[[Frame], None]  # takes the Frame [1, B, ...] of a pass, on the host


def infill(
    lm: LM,
    parts: Parts | Sequence[Parts],
    *,
    seed: int = 0,
    sampler: Any = None,
    plan: Plan | None = None,
    temperature: Any = None,
    mesh: Mesh | None = None,
) -> InfillOutput:
    """Fill the holes: `infill(lm, ["def area(r):\\n", Hole(24), "\\n    return a"])`.

    parts: texts and Holes in order, or a list of such lists. Known text never changes. A model with
    full attention takes the whole sequence as its canvas, a causal encoder what lies between the
    first hole and the end; both see the text on either side of every hole. A block-causal model
    cannot see behind a hole: it gets the text in FIM order (before, behind, then the middle), one hole
    after the other, and must have been trained so.
    Open holes (`Hole()`, at most `most` tokens): a rule that inserts (`rules.expand`) decides while it
    decodes; FIM decodes up to the end of text; otherwise several lengths are filled, and the one is taken
    under which the model finds filling and following text most probable.
    Raises ValueError for no hole, or one that does not fit the context.
    """
    check_lm(lm)
    plan, mesh = checked_plan(plan), checked_mesh(mesh)
    if isinstance(parts, str) or not isinstance(parts, Sequence) or not parts:
        raise refuse("parts", parts, "texts and Holes, or a non-empty list of such lists")
    several = not isinstance(parts[0], str | Hole)
    rows = [_row(lm, p, i) for i, p in enumerate(parts if several else [parts])]
    began = time.perf_counter()
    sampler = defaults.sampler(lm) if sampler is None else sampler
    done = fill(lm, rows, sampler, check_seed(seed), plan=plan, temperature=temperature, mesh=mesh)
    return output(lm, rows, done, time.perf_counter() - began)


def fill(
    lm: LM,
    rows: Sequence[Row],
    sampler: Any,
    seed: int,
    *,
    plan: Plan,
    temperature: Any = None,
    mesh: Mesh | None = None,
    watch: Watch | None = None,
    grid: Grid = Grid(),
) -> Filled:
    """`infill` of rows of ids and Holes. watch: called after every pass (not of holes in FIM order).

    grid: how finely shapes and the lengths of open holes are told apart.
    """
    settings: dict[str, Any] = dict(plan=plan, temperature=temperature, mesh=mesh)
    if lm.model.config.pattern == "block_causal":
        return fim.fill(lm, rows, sampler, seed, **settings)
    settings |= dict(watch=watch, grid=grid)
    if complete(sampler, lm.corruption).rule.grows:
        return _fill(lm, [_sized(row, lambda hole: 1) for row in rows], sampler, seed, grows=True, **settings)
    sized = lambda rows, seed: _fill(lm, rows, sampler, seed, **settings)
    return lengths.fill(lm, rows, seed, sized, grid) if any(_open(r) for r in rows) else sized(rows, seed)


def _open(row: Row) -> bool:
    return any(isinstance(part, Hole) and part.tokens is None for part in row)


def _sized(row: Row, size: Any) -> Row:
    """The row with its open holes given a size."""
    return [Hole(min(size(p), p.most)) if isinstance(p, Hole) and p.tokens is None else p for p in row]


def _row(lm: LM, parts: Any, index: int) -> Row:
    name = f"parts[{index}]"
    if (
        isinstance(parts, str)
        or not isinstance(parts, Sequence)
        or not all(isinstance(p, str | Hole) for p in parts)
    ):
        raise refuse(name, parts, "a list of texts and Holes")
    if not any(isinstance(p, Hole) for p in parts):
        raise refuse(name, parts, "at least one Hole among the texts")
    row: Row = [p if isinstance(p, Hole) else lm.tokenizer.encode(p) for p in parts]
    if (
        lm.tokenizer.begin and lm.model.config.pattern != "block_causal"
    ):  # FIM order has a place of its own for it
        row = [list(lm.tokenizer.begin), *row]
    total = sum(p.room if isinstance(p, Hole) else len(p) for p in row)
    if total > lm.model.config.context:
        raise refuse(name, f"{total} tokens", f"at most the model's context of {lm.model.config.context}")
    return row


def _fill(
    lm: LM,
    rows: Sequence[Row],
    sampler: Any,
    seed: int,
    *,
    plan: Plan,
    temperature: Any,
    mesh: Mesh | None,
    grows: bool = False,
    watch: Watch | None = None,
    grid: Grid = Grid(),
) -> Filled:
    """Rows whose holes have a size, in one job; a rule that grows may go on to each hole's `most`."""
    asked = _request(lm, rows, seed, grows, grid.quantum)
    full = lm.model.config.pattern == "bidirectional"
    width = int(asked.total.max()) if full else int((asked.total - asked.known).max())
    few = grid.quantum if full else grid.quantum // 2  # a canvas costs more than the text before it
    block = bucket(width, lm.model.config.block if not full and grid.quantum == QUANTUM else few)
    job = launch.prepare(
        lm, asked, sampler, plan, temperature=temperature, block=block, infilling=True, mesh=mesh
    )
    if watch is None:
        job, _, _ = launch.advance(lm, job, None)
    while not np.all(jax.device_get(job.state.done)):
        job, frames, _ = launch.advance(lm, job, 1)
        assert watch is not None and frames is not None
        watch(jax.device_get(frames))
    launch.refuse_broken(job)
    s = job.state
    text, total, given, forwards = jax.device_get((s.text, s.total, s.given, s.forwards))
    fillings = [segments(row, text[i, : total[i]], given[i]) for i, row in enumerate(rows)]
    return Filled(fillings, forwards[: job.rows])


def _request(lm: LM, rows: Sequence[Row], seed: int, grows: bool, quantum: int) -> launch.Request:
    mask = lm.model.config.mask or 0  # without a mask the canvas is laid with noise there
    flat = [_flat(row, mask) for row in rows]
    total = np.array([len(ids) for ids, _ in flat])
    room = np.array([sum(p.most for p in row if isinstance(p, Hole)) if grows else 0 for row in rows])
    longest = int((total + room).max())
    text = np.zeros((len(rows), longest if quantum == QUANTUM else bucket(longest, quantum)), np.int32)
    given = np.zeros(text.shape, bool)
    known = np.zeros(len(rows), np.int64)
    for i, (ids, hole) in enumerate(flat):
        text[i, : len(ids)], given[i, : len(ids)] = ids, ~hole
        known[i] = np.flatnonzero(hole)[0]
    seeds = (seed + np.arange(len(rows))) % 2**31
    return launch.Request(text, given, known, total, seeds, most=total + room)


def _flat(row: Row, mask: int) -> tuple[np.ndarray, np.ndarray]:
    """(ids with masks in the holes, which of them are holes)."""
    ids = [np.full(p.tokens or 0, mask) if isinstance(p, Hole) else np.asarray(p, int) for p in row]
    hole = [np.full(len(x), isinstance(p, Hole)) for x, p in zip(ids, row, strict=True)]
    return np.concatenate(ids).astype(np.int32), np.concatenate(hole)
