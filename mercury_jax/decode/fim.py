"""Infilling for models that cannot see behind a hole: what follows it is shown before it.

    <|fim_prefix|>before<|fim_suffix|>behind<|fim_middle|>middle<|eos|>

(FIM, arXiv 2207.14255.) Several holes are filled from left to right, each one with the holes before
it filled and the later ones left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from mercury_jax.config import Plan, refuse
from mercury_jax.decode import launch
from mercury_jax.decode.holes import Filled, Hole, Row
from mercury_jax.types import LM


def fill(
    lm: LM, rows: Sequence[Row], sampler: Any, seed: int, *, plan: Plan, temperature: Any, mesh: Mesh | None
) -> Filled:
    """Every row's holes, one after the other; rows side by side."""
    _check(lm, rows)
    fillings: list[list[np.ndarray]] = [[] for _ in rows]
    forwards = np.zeros(len(rows), int)
    for j in range(max(_holes(row) for row in rows)):
        which = [i for i, row in enumerate(rows) if j < _holes(row)]
        asked = [_asked(lm, rows[i], fillings[i]) for i in which]
        request = _request(asked, seed)
        # A hole of a fixed length is not ended by an end of text: where all are fixed, none ends.
        fixed = all(hole.tokens is not None for _, hole in asked)
        job = launch.prepare(lm, request, sampler, plan, temperature=temperature, infilling=fixed, mesh=mesh)
        job, _, _ = launch.advance(lm, job, None)
        launch.refuse_broken(job)
        text, total, passes = jax.device_get((job.state.text, job.state.total, job.state.forwards))
        for at, i in enumerate(which):
            fillings[i].append(text[at, request.known[at] : total[at]])
            forwards[i] += passes[at]
    return Filled(fillings, forwards)


def _holes(row: Row) -> int:
    return sum(isinstance(part, Hole) for part in row)


def _check(lm: LM, rows: Sequence[Row]) -> None:
    context, begin = lm.model.config.context, len(lm.tokenizer.begin)
    if lm.tokenizer.fim is None:
        raise refuse("parts", "a hole", "texts: a block-causal model fills holes in FIM order, and the tokenizer of "
                     f"{lm.name} has no tokens for that")  # fmt: skip
    for i, row in enumerate(rows):
        fixed = [p.tokens is not None for p in row if isinstance(p, Hole)]
        if any(fixed) and not all(fixed):
            raise refuse(
                f"parts[{i}]", "holes of fixed and of open length", "one kind, for a block-causal model"
            )
        size = begin + 3 + sum(p.room if isinstance(p, Hole) else len(p) for p in row)
        if size > context:
            raise refuse(
                f"parts[{i}]", f"{size} tokens in FIM order", f"at most the model's context of {context}"
            )
    kinds = {p.tokens is None for row in rows for p in row if isinstance(p, Hole)}
    if len(kinds) > 1:
        raise refuse(
            "parts", "rows of fixed and of open holes", "one kind in a call, for a block-causal model"
        )


def _asked(lm: LM, row: Row, filled: Sequence[np.ndarray]) -> tuple[list[int], Hole]:
    """(the prompt in FIM order, the hole to fill)."""
    marks, done = lm.tokenizer.fim, iter(filled)
    before: list[int] = []
    behind: list[int] = []
    hole: Hole | None = None
    for part in row:
        if not isinstance(part, Hole):
            (before if hole is None else behind).extend(part)
        elif hole is None:
            ids = next(done, None)
            if ids is None:
                hole = part
            else:
                before.extend(int(i) for i in ids)
    assert hole is not None and marks is not None
    return [*lm.tokenizer.begin, marks.prefix, *before, marks.suffix, *behind, marks.middle], hole


def _request(asked: Sequence[tuple[list[int], Hole]], seed: int) -> launch.Request:
    known = np.array([len(ids) for ids, _ in asked])
    total = known + [hole.room for _, hole in asked]
    text = np.zeros((len(asked), int(total.max())), np.int32)
    for row, (ids, _) in zip(text, asked, strict=True):
        row[: len(ids)] = ids
    given = np.arange(text.shape[1]) < known[:, None]
    return launch.Request(text, given, known, total, (seed + np.arange(len(asked))) % 2**31)
