"""Every rule on the same questions as one token a step, taking turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from mercury_jax.bench.questions import Asked, Batch, batches
from mercury_jax.bench.settings import Setting
from mercury_jax.bench.timing import steady
from mercury_jax.config import Plan, refuse
from mercury_jax.decode import defaults, rules, sample as sampling
from mercury_jax.decode.sample import Output
from mercury_jax.decode.stream import stream
from mercury_jax.evaluate.runner import ONE_A_STEP
from mercury_jax.types import LM

# One token a step is timed again once its last time lies this many of its own durations back, so that every
# ratio is one of neighbours; only in the first batches, as it is the slowest of all.
STALE, PAIRED = 4.0, 4

TWIN = "autoregressive twin"

Tick = Callable[[str], None]  # told what comes next


class Entry(NamedTuple):
    """Something to measure: a model and how it decodes."""

    rule: str  # with its knobs
    curve: str  # what its points have in common
    lm: LM
    sampler: Callable[[], Any]
    plan: Plan
    code: str | None = None  # Python that makes it, where it may be advised


@dataclass
class Trial:
    """What an entry did on one task, question by question in the order of the questions."""

    entry: Entry
    right: list[bool]
    tokens: list[np.ndarray]
    forwards: list[int]
    sampler: Any = None
    made: list[int] = field(default_factory=list)  # tokens of each batch, all its rows
    passes: list[int] = field(default_factory=list)  # forwards of the same, summed over the rows
    seconds: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)  # tokens a second over the baseline's, same batch
    first: float | None = None  # seconds to the first frame, one prompt alone
    last: float | None = None  # to the last token
    refused: str | None = None


def entries(lm: LM, settings: Sequence[Setting], twin: LM | None = None) -> list[Entry]:
    """One token a step first, then the settings, then the twin: a block-causal model of blocks of one token."""
    found = [Entry(ONE_A_STEP, "confidence", lm, rules.confidence, Plan())]
    found += [Entry(s.text, s.rule, lm, s.sampler, s.plan, s.code) for s in settings]
    if twin is not None:
        config = twin.model.config
        if (config.pattern, config.block) != ("block_causal", 1):
            kind = f"{config.pattern} with blocks of {config.block}"
            raise refuse("twin", kind, "block_causal with blocks of 1, as of configs/nano_ar.py")
        found.append(Entry(TWIN, TWIN, twin, rules.confidence, Plan()))
    return found


def units(found: Sequence[Entry], asked: Asked) -> int:
    """How often `run` ticks, unless a rule is refused."""
    return len(found) * (2 + len(batches(asked)))


def run(found: Sequence[Entry], asked: Asked, tick: Tick = lambda text: None) -> list[Trial]:
    """Every entry on one task; the first is the baseline of all. A rule that does not fit gives a Trial `refused`.

    Batches are swept one by one, all entries on each, there and back: a noisy minute falls on one pair
    of many. Nothing that was timed compiled anything.
    """
    trials = [_warm(entry, asked, tick) for entry in found]
    if trials[0].refused is not None:
        raise refuse("model", found[0].lm.name, f"one that can decode {ONE_A_STEP} ({trials[0].refused})")
    able = [t for t in trials if t.refused is None]
    for batch in batches(asked):
        _sweep(able[0], able[1:] if batch.number % 2 == 0 else able[:0:-1], batch, asked, tick)
    for trial in able:
        tick(f"{asked.task.name}: {trial.entry.rule}, one prompt alone")
        _latencies(trial, asked)
    return trials


def _warm(entry: Entry, asked: Asked, tick: Tick) -> Trial:
    """Compile an entry's program by a short run of it: the number of steps is traced, so one step will do."""
    tick(f"{asked.task.name}: compiling {entry.rule}")
    n = len(asked.problems)
    trial = Trial(entry, [False] * n, [np.zeros(0, np.int32)] * n, [0] * n)
    try:
        trial.sampler = defaults.complete_sampler(entry.sampler(), entry.lm.corruption)
        _decode(trial, batches(asked)[0], asked, replace(entry.plan, steps=1))
    except ValueError as error:
        trial.refused = str(error)
    return trial


def _decode(trial: Trial, batch: Batch, asked: Asked, plan: Plan) -> Output:
    return sampling.sample(
        trial.entry.lm, [asked.message(i) for i in batch.filled], max_tokens=asked.max_tokens,
        seed=(asked.seed + batch.number * asked.batch) % 2**31, sampler=trial.sampler, plan=plan,
    )  # fmt: skip


def _sweep(base: Trial, others: Sequence[Trial], batch: Batch, asked: Asked, tick: Tick) -> None:
    """One batch by all; the baseline runs before the others, and again between them once its time is stale."""
    paired, ended, last, rate = batch.number < PAIRED, -np.inf, 0.0, 0.0
    for trial in (base, *others):
        tick(f"{asked.task.name}: {trial.entry.rule}")
        if trial is base or (paired and time.perf_counter() - ended > STALE * last):
            out, last = steady(lambda: _decode(base, batch, asked, base.entry.plan))
            ended, rate = time.perf_counter(), sum(out.lengths) / last
            if trial is base:
                _record(base, batch, out, last, asked)
        if trial is not base:
            out, seconds = steady(lambda trial=trial: _decode(trial, batch, asked, trial.entry.plan))
            _record(trial, batch, out, seconds, asked)
        if paired:
            trial.ratios.append(trial.made[-1] / trial.seconds[-1] / max(rate, 1e-9))


def _record(trial: Trial, batch: Batch, out: Output, seconds: float, asked: Asked) -> None:
    for at, i in enumerate(batch.chosen):
        trial.right[i] = asked.right(i, out.texts[at])
        trial.tokens[i], trial.forwards[i] = out.tokens[at], int(out.forwards[at])
    trial.made.append(sum(out.lengths))
    trial.passes.append(int(out.forwards.sum()))
    trial.seconds.append(seconds)


def _latencies(trial: Trial, asked: Asked) -> None:
    """Medians over a few prompts, each streamed alone with a frame after every pass."""
    times = [steady(lambda i=i: _moments(trial, asked, i))[0] for i in range(asked.alone)]
    if times:
        trial.first, trial.last = (statistics.median(t[k] for t in times) for k in (0, 1))


def _moments(trial: Trial, asked: Asked, i: int) -> tuple[float, float]:
    """Seconds to the first frame of question i, and to its last token."""
    began, times = time.perf_counter(), []
    for _ in stream(
        trial.entry.lm, asked.message(i), max_tokens=asked.max_tokens, seed=asked.seed,
        sampler=trial.sampler, plan=trial.entry.plan, every=1,
    ):  # fmt: skip
        times.append(time.perf_counter() - began)
    return times[0], times[-1]
