"""code-infill: part of a line of held-out files is hidden, and counts when it comes back exactly."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from mercury_jax.config import Plan, refuse
from mercury_jax.decode import defaults, infill as filling
from mercury_jax.evaluate.report import Report, counted
from mercury_jax.evaluate.tasks import Settings, Task, refuse_unused, rule_name
from mercury_jax.train.data import corpus
from mercury_jax.types import LM


class Blank(NamedTuple):
    """A part of a line, or a whole one, with the text on either side of it."""

    path: str
    before: str
    target: str
    after: str
    tokens: int  # of the target
    whole: bool


def infills(lm: LM, task: Task, settings: Settings) -> Report:
    """How often a hidden part of a line is restored exactly, its number of tokens given.

    Half of the holes are whole lines, half are spans within a line. The model sees two blocks of text
    before the hole and one block of hole and text behind it together, as a causal encoder was trained to.
    """
    refuse_unused(task, settings, "max_tokens")
    began, timed = time.perf_counter(), []
    rows: list[dict[str, Any]] = []
    sampler = defaults.default_sampler(lm) if settings.sampler is None else settings.sampler
    named, plan = rule_name(lm, sampler), settings.plan or Plan()
    found = blanks(lm, settings.limit or task.limit, settings.seed)
    size = min(settings.batch, len(found))
    for at in range(0, len(found), size):
        part = found[at : at + size]
        filled = part + part[-1:] * (size - len(part))
        out = filling.infill(
            lm, [[b.before, filling.Hole(b.tokens), b.after] for b in filled],
            seed=(settings.seed + at) % 2**31, sampler=sampler, plan=plan,
        )  # fmt: skip
        rows += [_filled_row(b, out.fillings[i][0], int(out.forwards[i])) for i, b in enumerate(part)]
        timed.append((len(part), sum(b.tokens for b in part), out.seconds))
        settings.progress(len(rows), len(found))
    about = dict(task=task.name, data="held-out files", rule=named)
    about |= dict(steps=plan.steps, seed=settings.seed, batch=settings.batch)
    kinds = {
        f"right_{name}": sum(r["correct"] for r in rows if r["whole"] == whole)
        for name, whole in (("lines", True), ("spans", False))
    }
    return Report(about | counted(rows, timed, time.perf_counter() - began) | kinds, rows)


def _filled_row(blank: Blank, prediction: str, forwards: int) -> dict[str, Any]:
    return {
        "input": f"{blank.before}<hole>{blank.after}",
        "output": blank.target,
        "prediction": prediction,
        "correct": prediction == blank.target,
        "forwards": forwards,
        "tokens": blank.tokens,
        "whole": blank.whole,
        "path": blank.path,
    }


def blanks(lm: LM, n: int, seed: int) -> list[Blank]:
    """`n` holes, the same for the same seed and tokenizer; whole lines and spans in turn."""
    rng, block = np.random.default_rng((seed, 2)), lm.model.config.block
    docs = [(path, lm.tokenizer.encode(text)) for path, text in corpus.files("test")]
    docs = [(path, ids) for path, ids in docs if len(ids) > 4 * block]
    if not docs:
        raise refuse("code-infill", "no held-out file", "an interpreter that comes with its library's source")
    share = np.array([len(ids) for _, ids in docs], float)
    found: list[Blank] = []
    for _ in range(200 * n):
        path, ids = docs[rng.choice(len(docs), p=share / share.sum())]
        blank = _blank(lm, path, ids, bool(len(found) % 2 == 0), rng)
        found += [blank] if blank else []
        if len(found) == n:
            return found
    raise refuse("limit", n, f"1..{len(found)}, what the held-out files have for this tokenizer")


def _blank(lm: LM, path: str, ids: list[int], whole: bool, rng: np.random.Generator) -> Blank | None:
    """A hole near a random place; None where no line there fits, or where cutting changes the tokens."""
    block, text = lm.model.config.block, lm.tokenizer.decode
    at = int(rng.integers(2 * block, len(ids) - block))
    line = next(_lines(lm, ids, at, block), None)
    if line is None:
        return None
    start, stop = line
    if not whole:
        n = int(rng.integers(1, stop - start + 1))
        start = start + int(rng.integers(0, stop - start - n + 1))
        stop = start + n
    cut = [ids[start - 2 * block : start], ids[start:stop], ids[stop : start + block]]
    before, target, after = map(text, cut)
    # Cut inside a character or a merge, the pieces have other tokens than the file: leave those out.
    if not target.strip() or [lm.tokenizer.encode(x) for x in (before, target, after)] != cut:
        return None
    return Blank(path, before, target, after, stop - start, whole)


def _lines(lm: LM, ids: list[int], at: int, block: int) -> Iterator[tuple[int, int]]:
    """Token ranges of the lines that begin at or after `at`, without their line ends, up to half a block."""
    ends = [b"\n" in lm.tokenizer.pieces[i] for i in ids[at : at + 2 * block]]
    breaks = [at + i for i, end in enumerate(ends) if end]
    for before, stop in pairwise(breaks):
        start = before + 1
        if 2 <= stop - start <= block // 2 and start + block <= len(ids) and start >= 2 * block:
            yield start, stop
