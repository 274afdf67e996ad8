"""Measures accuracy and speed of decoding rules, in comparison with one token per step on the same questions.

1. `questions` draws the questions of a task.
2. `sweep` and `entries` list what is measured: each rule at a few values of the parameter that trades accuracy for
   speed.
3. `run` measures the entries. Each batch is decoded with all entries before the next batch, so that speeds are
   comparable on a shared machine.
4. `records` converts the trials to JSON records, `results` to the input of `recommend`, and `plot` draws the records.

`recommend` chooses the rule with the most tokens per forward pass without a measurable loss of accuracy. The baseline
is one token per step. A rule passes on a set of questions if the paired 95% interval of its difference in accuracy
from the baseline meets two conditions:

- The upper end is at least 0: the rule is not significantly worse.
- The lower end is above -2 points: a loss of 2 points or more is ruled out (a test of non-inferiority). Without this
  condition, any rule would pass on a sufficiently small set of questions.

Both must hold on every task. The rule is chosen on one half of the questions and reported on the other half, because
the best of many rules looks better than it is on the questions that it was chosen on.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mercury_jax import install, tasks
from mercury_jax.bench.timing import steady
from mercury_jax.compilation import hardware
from mercury_jax.config import Plan, at_least, nearest, refuse
from mercury_jax.decode import defaults, rules, sample as sampling
from mercury_jax.decode.inputs import check_seed
from mercury_jax.decode.sample import Output
from mercury_jax.decode.sampler import Rule, Sampler
from mercury_jax.decode.stream import stream
from mercury_jax.evaluate.runner import ONE_A_STEP, Z, paired, wilson
from mercury_jax.tasks import Problem, Split, Task
from mercury_jax.types import LM

# Both sides of a ratio should be measured close together. In the first PAIRED batches, the baseline is therefore timed
# again when its last measurement is older than STALE times its own duration. It is the slowest entry, so not in all.
STALE, PAIRED = 4.0, 4

TWIN = "autoregressive twin"
MARKERS = "osD^v<>Pp*hX"  # of matplotlib, one per curve

Tick = Callable[[str], None]  # progress: called with a description of the next piece of work


# --- questions


class QuestionSet(NamedTuple):
    """Questions of a task, and how they are decoded.

    Attributes:
        task: The task, which checks the answers.
        problems: The questions with their solutions.
        max_tokens: Largest number of tokens of an answer.
        batch: Rows that are decoded together.
        seed: Seed of the questions, and of the sampling of each batch.
        alone: Number of questions that are streamed one at a time, to measure latencies.
    """

    task: Task
    problems: list[Problem]
    max_tokens: int
    batch: int
    seed: int
    alone: int

    def message(self, i: int) -> list[dict[str, str]]:
        """Returns question i as a conversation."""
        return [{"role": "user", "content": self.problems[i].input}]


class QuestionBatch(NamedTuple):
    """Indices of questions that are decoded together; `filled` repeats the last one up to the full batch size."""

    number: int
    chosen: list[int]
    filled: list[int]


def questions(
    name: str,
    *,
    limit: int = 512,
    batch: int = 64,
    split: Split = "validation",
    seed: int = 0,
    max_tokens: int | None = None,
    alone: int = 3,
) -> QuestionSet:
    """Draws held-out questions of a task.

    Rules are chosen on the validation split, so that the questions of the test split have no influence on the choice.
    """
    at_least(1, limit=limit, batch=batch, max_tokens=1 if max_tokens is None else max_tokens)
    at_least(0, alone=alone)
    task = tasks.find(name)
    problems = tasks.draw_distinct(task, limit, check_seed(seed), split)
    most = max_tokens or task.max_tokens
    return QuestionSet(task, problems, most, min(batch, limit), seed, min(alone, limit))


def batches(question_set: QuestionSet) -> list[QuestionBatch]:
    """Splits questions into batches of similar length, so that few shapes are compiled."""
    order = sorted(range(len(question_set.problems)), key=lambda i: len(question_set.problems[i].input))
    parts = [order[at : at + question_set.batch] for at in range(0, len(order), question_set.batch)]
    return [QuestionBatch(i, p, p + p[-1:] * (question_set.batch - len(p))) for i, p in enumerate(parts)]


# --- what is measured

# Rule -> parameter -> values, the fastest setting first; "steps" is the number of steps per block. If a rule has more
# than one parameter, their i-th values form one setting. A rule that is not listed is measured once, with its defaults.
# Rules that use all the steps they are given get fewer steps than a block has tokens: with one per token they would be
# as slow as the baseline.
GRID: dict[str, dict[str, tuple[float, ...]]] = {
    "confidence": {"steps": (4, 8, 16)},
    "random": {"steps": (4, 8)},
    "ancestral": {"steps": (4, 8)},
    "dream_origin": {"steps": (4, 8)},
    "maskgit_plus": {"steps": (4, 8)},
    "topk_margin": {"steps": (4, 8)},
    "dream_entropy": {"steps": (4, 8)},
    "remdm_cap": {"steps": (12,)},
    "remdm_rescale": {"steps": (12,)},
    "remdm_confidence": {"steps": (12,)},
    "remdm_loop": {"steps": (12,)},
    "predictor_corrector": {"steps": (16,)},
    "threshold": {"p": (0.7, 0.9, 0.95, 0.99)},
    "entropy_bound": {"gamma": (1.0, 0.1, 0.01)},
    "factor": {"f": (1.0, 0.3)},
    "frechet": {"margin": (0.02, 0.25)},
    "entropy_threshold": {"h": (0.5, 0.05)},
    "pc_sampler": {"steps": (4, 8)},
    "adablock": {"p": (0.9, 0.99)},
    "wavefront": {"steps": (4, 8)},
    "dilated": {"base": (4, 2)},
    "scheduled": {"p": (0.95, 0.99)},
    "local_leap": {"p": (0.9, 0.99), "relaxed": (0.75, 0.95)},
    "hierarchical": {"p": (0.9, 0.99), "low": (0.4, 0.8)},
    "credit": {"p": (0.9, 0.99)},
    "klass": {"p": (0.9, 0.99)},
    "slow_fast": {"p": (0.9, 0.99)},
    "wino": {"p": (0.6, 0.9)},
    "editing": {"p": (0.95, 0.99)},
    "blind_editing": {"p": (0.95, 0.99)},
    "self_correct": {"p": (0.9, 0.99)},
    "levenshtein": {"p": (0.9, 0.99)},
    "self_speculation": {"draft": (31, 7)},
}


@dataclass(frozen=True)
class SweepPoint:
    """A rule by name, the parameters that the sweep sets, and its plan."""

    rule: str
    chosen: Mapping[str, float] = field(default_factory=dict)
    plan: Plan = Plan()

    def sampler(self) -> Rule | Sampler:
        """Makes the rule or the `Sampler`."""
        return rules.ALL[self.rule](**self.chosen)

    @property
    def parameters(self) -> str:
        """All numeric parameters, including defaults, as "name=value, name=value"."""
        every = {**getattr(rules.ALL[self.rule], "params", {}), **self.chosen}
        numbers = {k: v for k, v in every.items() if isinstance(v, int | float) and not isinstance(v, bool)}
        return ", ".join(f"{k}={v}" for k, v in numbers.items())

    @property
    def text(self) -> str:
        """Name of the setting, such as "threshold(p=0.9)" or "confidence() in 8 steps"."""
        steps = "" if self.plan.steps is None else f" in {self.plan.steps} steps"
        return f"{self.rule}({self.parameters}){steps}"

    @property
    def code(self) -> str:
        """Python arguments for a call of `mj.sample`: the sampler, and the plan if it is not the default."""
        sampler = f"mj.rules.{self.rule}({self.parameters})"
        plan = [f"{k}={v}" for k in ("block", "steps") if (v := getattr(self.plan, k)) is not None]
        return f"sampler={sampler}, plan=mj.Plan({', '.join(plan)})" if plan else sampler


def sweep(names: Iterable[str] | None = None, points: int | None = None) -> list[SweepPoint]:
    """Lists the settings of `GRID` for some rules."""
    if points is not None:
        at_least(1, points=points)
    found = []
    for name in list(rules.ALL) if names is None else dict.fromkeys(names):
        if name not in rules.ALL:
            raise refuse("rules", name, nearest(name, list(rules.ALL)))
        values = GRID.get(name, {})
        every = [dict(zip(values, point)) for point in zip(*values.values(), strict=True)] or [{}]
        for chosen in every[-(points or 0) :]:
            steps = chosen.pop("steps", None)
            plan = Plan(steps=None if steps is None else int(steps))
            found.append(SweepPoint(name, chosen, plan))
    return found


class SweepEntry(NamedTuple):
    """A model with the settings that it is decoded with.

    Attributes:
        rule: Name of the rule, with its parameters.
        curve: Name of the curve in the plot; all settings of a rule share it.
        lm: The model.
        sampler: Makes the rule or `Sampler`.
        plan: Block size and steps.
        code: Python arguments for `mj.sample`; None if the entry is not to be recommended.
    """

    rule: str
    curve: str
    lm: LM
    sampler: Callable[[], Any]
    plan: Plan
    code: str | None = None


@dataclass
class Trial:
    """The measurements of an entry on one task.

    Attributes:
        entry: The entry.
        right: Whether the answer is right, per question.
        tokens: Ids of the answer, per question.
        forwards: Forward passes, per question.
        sampler: The sampler that decodes.
        made: Tokens of all rows, per batch.
        passes: Forward passes summed over the rows, per batch.
        seconds: Wall-clock seconds, per batch.
        ratios: Tokens/s relative to the baseline on the same batch, per paired batch.
        cpu: CPU seconds of the last batch.
        cpu_ratios: As `ratios`, for CPU time, on which other programs of the machine have less influence.
        first: Seconds to the first frame of a single prompt.
        last: Seconds to the last token of a single prompt.
        refused: Why the model cannot run the rule; None if it can.
    """

    entry: SweepEntry
    right: list[bool]
    tokens: list[np.ndarray]
    forwards: list[int]
    sampler: Any = None
    made: list[int] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    cpu: float = 0.0
    cpu_ratios: list[float] = field(default_factory=list)
    first: float | None = None
    last: float | None = None
    refused: str | None = None

    @property
    def canvases(self) -> int:
        """Upper bound on the canvases in a forward pass: 2 for a leave-one-out rule, otherwise 1.

        Such a rule adds a mask for each token of the active block. For a bidirectional model, whose canvas is larger
        than the block, the true cost lies between 1 and 2.
        """
        return 2 if self.sampler.rule.leave_one_out else 1


def entries(
    lm: LM, points: Sequence[SweepPoint], twin: LM | None = None, default: bool = False
) -> list[SweepEntry]:
    """Lists what is measured: the baseline (one token per step), the settings, and an autoregressive twin."""
    found = [SweepEntry(ONE_A_STEP, "confidence", lm, rules.confidence, Plan())]
    if default:
        sampler, plan = defaults.default_sampler(lm), defaults.default_plan(lm, Plan())
        found.append(SweepEntry("default", "default", lm, lambda: sampler, plan))
    found += [SweepEntry(p.text, p.rule, lm, p.sampler, p.plan, p.code) for p in points]
    if twin is not None:
        config = twin.model.config
        if (config.pattern, config.block) != ("block_causal", 1):
            kind = f"{config.pattern} with blocks of {config.block}"
            raise refuse("twin", kind, "block_causal with blocks of 1, as configs/twin_nano.py makes one")
        sampler = rules.autoregressive if config.autoregressive else rules.confidence
        found.append(SweepEntry(TWIN, TWIN, twin, sampler, Plan()))
    return found


def units(found: Sequence[SweepEntry], question_set: QuestionSet) -> int:
    """Computes how often `run` calls `tick` if no rule is refused, for a progress bar."""
    return len(found) * (2 + len(batches(question_set)))


def run(
    found: Sequence[SweepEntry], question_set: QuestionSet, tick: Tick = lambda text: None
) -> list[Trial]:
    """Measures every entry on one task.

    All entries decode a batch before the next batch begins, in alternating order, so that a temporary load on the
    machine affects few of the ratios. Timed calls compile nothing.
    """
    trials, n = [], len(question_set.problems)
    for entry in found:
        tick(f"{question_set.task.name}: compiling {entry.rule}")
        trial = Trial(entry, [False] * n, [np.zeros(0, np.int32)] * n, [0] * n)
        trials.append(trial)
        try:
            trial.sampler = defaults.complete_sampler(entry.sampler(), entry.lm.corruption)
            # The number of steps is traced: decoding with one step compiles the program for any number.
            _decode(trial, batches(question_set)[0], question_set, replace(entry.plan, steps=1))
        except ValueError as error:
            trial.refused = str(error)
    if trials[0].refused is not None:
        raise refuse("model", found[0].lm.name, f"one that can decode {ONE_A_STEP} ({trials[0].refused})")
    able = [t for t in trials if t.refused is None]
    for batch in batches(question_set):
        _measure_batch(able[0], able[1:] if batch.number % 2 == 0 else able[:0:-1], batch, question_set, tick)
    for trial in able:
        tick(f"{question_set.task.name}: {trial.entry.rule}, one prompt alone")
        times = []
        for i in range(question_set.alone):
            (seconds, _) = steady(lambda trial=trial, i=i: _stream_times(trial, question_set, i))
            times.append(seconds)
        if times:
            trial.first, trial.last = (statistics.median(t[k] for t in times) for k in (0, 1))
    return trials


def _decode(trial: Trial, batch: QuestionBatch, question_set: QuestionSet, plan: Plan) -> Output:
    began = time.process_time()
    out = sampling.sample(
        trial.entry.lm, [question_set.message(i) for i in batch.filled], max_tokens=question_set.max_tokens,
        seed=(question_set.seed + batch.number * question_set.batch) % 2**31, sampler=trial.sampler, plan=plan,
    )  # fmt: skip
    trial.cpu = time.process_time() - began
    return out


def _measure_batch(
    base: Trial, others: Sequence[Trial], batch: QuestionBatch, question_set: QuestionSet, tick: Tick
) -> None:
    """Decodes one batch with all entries. The baseline is repeated once stale in the first PAIRED batches."""
    paired, ended, last, rate = batch.number < PAIRED, -np.inf, 0.0, 0.0
    for trial in (base, *others):
        tick(f"{question_set.task.name}: {trial.entry.rule}")
        if trial is base or (paired and time.perf_counter() - ended > STALE * last):
            out, last = steady(lambda: _decode(base, batch, question_set, base.entry.plan))
            ended, rate = time.perf_counter(), sum(out.lengths) / last
            if trial is base:
                _record(base, batch, out, last, question_set)
        if trial is not base:
            out, seconds = steady(lambda trial=trial: _decode(trial, batch, question_set, trial.entry.plan))
            _record(trial, batch, out, seconds, question_set)
        if paired:
            trial.ratios.append(trial.made[-1] / trial.seconds[-1] / max(rate, 1e-9))
            cpu_rates = [one.made[-1] / max(one.cpu, 1e-9) for one in (trial, base)]
            trial.cpu_ratios.append(cpu_rates[0] / max(cpu_rates[1], 1e-9))


def _record(
    trial: Trial, batch: QuestionBatch, out: Output, seconds: float, question_set: QuestionSet
) -> None:
    """Records the answers of a batch and its time. Rows that fill up the batch count only for the speed."""
    for at, i in enumerate(batch.chosen):
        trial.right[i] = bool(question_set.task.check(question_set.problems[i].input, out.texts[at]))
        trial.tokens[i], trial.forwards[i] = out.tokens[at], int(out.forwards[at])
    trial.made.append(sum(out.lengths))
    trial.passes.append(int(out.forwards.sum()))
    trial.seconds.append(seconds)


def _stream_times(trial: Trial, question_set: QuestionSet, i: int) -> tuple[float, float]:
    """Streams question i with one frame per pass. Returns seconds to the first frame and to the last token."""
    began, times = time.perf_counter(), []
    for _ in stream(
        trial.entry.lm, question_set.message(i), max_tokens=question_set.max_tokens, seed=question_set.seed,
        sampler=trial.sampler, plan=trial.entry.plan, every=1,
    ):  # fmt: skip
        times.append(time.perf_counter() - began)
    return times[0], times[-1]


# --- records


def records(trials: Sequence[Trial], question_set: QuestionSet) -> list[dict[str, Any]]:
    """Converts trials to JSON-ready records, the baseline first.

    `forwards` and `tokens` are means over the answers, rates are over whole batches, and times are in seconds. Forwards
    are counted per row, not per iteration of the device loop. `canvases_per_forward` is 2 for a leave-one-out rule.
    `accuracy` has Wilson's 95% interval; `points` is its paired difference from the baseline in percentage points.

    Returns:
        One record per trial. For a rule that the model cannot run, it has the reason as `refused` and no figures.
    """
    base, found = trials[0], []
    for trial in trials:
        about = {
            "rule": trial.entry.rule, "curve": trial.entry.curve, "task": question_set.task.name,
            "seed": question_set.seed, "batch": question_set.batch, "max_tokens": question_set.max_tokens,
            "steps": trial.entry.plan.steps, "model": trial.entry.lm.name, "hardware": hardware(),
            "compared_with": ONE_A_STEP,
        }  # fmt: skip
        if trial.refused is not None:
            found.append(about | {"refused": trial.refused})
            continue
        n, correct = len(trial.right), sum(trial.right)
        low, high = wilson(correct, n)
        points = (0.0,) * 3 if trial is base else tuple(100 * x for x in paired(base.right, trial.right))
        same = [np.array_equal(a, b) for a, b in zip(trial.tokens, base.tokens, strict=True)]
        # Ids can be compared only if both models have the same tokenizer, which a twin may not.
        comparable = trial.entry.lm.tokenizer.fingerprint == base.entry.lm.tokenizer.fingerprint
        about |= {"n": n, "correct": correct, "accuracy": correct / n, "low": low, "high": high}
        about |= dict(zip(("points", "points_low", "points_high"), points))
        seconds, tokens = max(sum(trial.seconds), 1e-9), sum(map(len, trial.tokens))
        found.append(about | {
            "agreement": sum(same) / n if comparable else None, "tokens": tokens / n,
            "forwards": sum(trial.forwards) / n,
            "tokens_per_forward": tokens / max(sum(trial.forwards), 1), "canvases_per_forward": trial.canvases,
            "forwards_per_second": sum(trial.passes) / seconds, "tokens_per_second": sum(trial.made) / seconds,
            "call_seconds": statistics.median(trial.seconds),
            "speedup": statistics.median(trial.ratios), "pairs": len(trial.ratios),
            "cpu_speedup": statistics.median(trial.cpu_ratios),
            "time_to_first_frame": trial.first, "time_to_last_token": trial.last,
            "temperature": float(trial.sampler.temperature),
        })  # fmt: skip
    return found


def results(trials: Sequence[Trial], question_set: QuestionSet) -> tuple[RuleResult, list[RuleResult]]:
    """Converts trials to the input of `recommend`.

    A forward pass with two canvases counts as two, so that a rule gains nothing by doing more work per pass.

    Returns:
        (result of the baseline, results of the rules that may be recommended). Refused rules are left out.
    """
    able = [t for t in trials[1:] if t.refused is None and t.entry.code is not None]
    base, *others = (
        RuleResult(
            rule=t.entry.rule, code=t.entry.code or "", task=question_set.task.name, right=t.right,
            tokens=[len(ids) for ids in t.tokens], forwards=[n * t.canvases for n in t.forwards],
            made=sum(t.made), seconds=sum(t.seconds), speedup=statistics.median(t.ratios),
        )
        for t in (trials[0], *able)
    )  # fmt: skip
    return base, others


# --- plot


def check_plot(path: str | Path) -> None:
    """Refuses a plot that cannot be made or written, before anything is measured."""
    path, kinds = Path(path), (".png", ".pdf", ".svg")
    install.check("plot", "matplotlib", "plot")
    if path.suffix.lower() not in kinds:
        raise refuse("plot", str(path), f"a file that ends in {', '.join(kinds)}")
    if not path.absolute().parent.is_dir():
        raise refuse("plot", str(path), "a file in a folder that exists")


def plot(rows: Sequence[Mapping[str, Any]], path: str | Path) -> Path:
    """Draws accuracy with its 95% interval against tokens per second on a log scale."""
    shown = [r for r in rows if "accuracy" in r]
    if not shown:
        raise refuse("rows", len(rows), "at least one with an accuracy")
    check_plot(path)
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(r["task"] for r in shown))
    curves = list(dict.fromkeys(r["curve"] for r in shown))
    colors = colormaps["turbo"]
    figure = Figure(figsize=(6.5 * len(names) + 2.5, 6), layout="constrained")
    FigureCanvasAgg(figure)  # not pyplot, which would look for a window system
    panels = figure.subplots(1, len(names), squeeze=False)[0]
    for axes, task in zip(panels, names, strict=True):
        rows = [r for r in shown if r["task"] == task]
        for i, curve in enumerate(curves):
            points = sorted((r for r in rows if r["curve"] == curve), key=lambda r: r["tokens_per_second"])
            if not points:
                continue
            x, y = [r["tokens_per_second"] for r in points], [r["accuracy"] for r in points]
            # Wilson's interval is not centred; at 0 or n right answers, rounding may put the accuracy outside of it.
            low = [max(r["accuracy"] - r["low"], 0.0) for r in points]
            high = [max(r["high"] - r["accuracy"], 0.0) for r in points]
            color = colors(i / max(len(curves) - 1, 1))
            axes.plot(x, y, color=color, marker=MARKERS[i % len(MARKERS)], markersize=5, label=curve)
            axes.errorbar(x, y, yerr=(low, high), fmt="none", color=color, alpha=0.3, elinewidth=1)
        slow = [r["accuracy"] for r in rows if r["rule"] == ONE_A_STEP]
        if slow:
            axes.axhline(slow[0], color="gray", linewidth=1, linestyle=":", label=ONE_A_STEP)
        title = f"{task} (n = {rows[0]['n']})"
        axes.set(title=title, xlabel="tokens per second", ylabel="accuracy (95%)", xscale="log")
        axes.grid(alpha=0.2)
    lines = {label: line for axes in panels for line, label in zip(*axes.get_legend_handles_labels())}
    columns = 1 + len(lines) // 32
    figure.legend(lines.values(), lines.keys(), loc="outside right upper", fontsize="x-small", ncols=columns)
    title = f"{shown[0]['model']}, batches of {shown[0]['batch']}, {shown[0]['hardware']}"
    figure.suptitle(title, fontsize="small")
    figure.savefig(path, dpi=150)
    return Path(path)


MARGIN = 2.0  # points of accuracy


# The least number of questions at which a rule with the baseline's answers rules out a loss of MARGIN.
LEAST = math.floor(100 * Z / MARGIN) + 1


class RuleResult(NamedTuple):
    """The result of one rule on one task. All rules have the same questions in the same order.

    Attributes:
        rule: Name of the rule, with its parameters.
        code: Python expression that makes the rule.
        task: Name of the task.
        right: Whether the answer is right, for each question.
        tokens: Number of tokens of each answer.
        forwards: Number of forward passes of each answer.
        made: Tokens of the timed batches.
        seconds: Seconds of the timed batches.
        speedup: Tokens/s relative to one token per step.
    """

    rule: str
    code: str
    task: str
    right: Sequence[bool]
    tokens: Sequence[int]
    forwards: Sequence[int]
    made: float = 0.0
    seconds: float = 0.0
    speedup: float | None = None


class Advice(NamedTuple):
    """A recommendation, with figures from the second half of the questions.

    Attributes:
        code: Python expression of the rule; None if no rule is recommended.
        rule: Name of the rule.
        reason: Why this rule is recommended, or why none is.
        tasks: Figures on each task.
        tokens_per_forward: Over all tasks.
        tokens_per_second: On all questions, because batches are not split into halves.
        speedup: Tokens/s relative to one token per step, the geometric mean over tasks.
        ruled_out: Whether the second half rules out a loss of MARGIN points on every task as well.
        considered: Number of settings that were compared.
    """

    code: str | None
    rule: str | None
    reason: str
    tasks: tuple[dict[str, Any], ...] = ()
    tokens_per_forward: float | None = None
    tokens_per_second: float | None = None
    speedup: float | None = None
    ruled_out: bool | None = None
    considered: int = 0


def recommend(base: Sequence[RuleResult], others: Sequence[RuleResult], seed: int = 0) -> Advice:
    """Recommends one rule for all tasks."""
    if not base:
        raise refuse("base", base, "one result for each task")
    rules = _by_rule(base, others)
    halves = [_halves(len(b.right), seed) for b in base]
    first, second = [h[0] for h in halves], [h[1] for h in halves]
    reason = _uninformative(base, first)
    if reason is not None:
        return Advice(None, None, reason, considered=len(rules))
    faster = [cases for cases in rules if per_forward(cases, first) > per_forward(base, first)]
    # The difference of each faster rule from the baseline on each task.
    differences = [[points(*z) for z in zip(base, cases, first, strict=True)] for cases in faster]
    good = [cases for cases, found in zip(faster, differences) if all(map(loses_nothing, found))]
    if good:
        best = max(good, key=lambda cases: (per_forward(cases, first), _rate(cases) or 0.0))
        return _reported(base, best, second, len(rules))
    if not faster:
        reason = f"none of {len(rules)} settings needs fewer forward passes per token than one token per step"
        return Advice(None, None, reason, considered=len(rules))
    # No rule passed. Name the one that came closest: the highest lower end on its worst task.
    worst = [
        min(zip(found, cases, first, strict=True), key=lambda one: one[0][1])
        for cases, found in zip(faster, differences)
    ]
    (mean, low, high), case, some = max(worst, key=lambda one: one[0][1])
    why = "significantly worse" if high < 0 else f"a loss of {MARGIN:g} points is not ruled out"
    reason = (
        f"none of {len(faster)} faster settings keeps the accuracy of one token per step; the nearest, {case.rule}, is "
        f"at {mean:+.1f} points on {case.task} (95% {low:+.1f} to {high:+.1f}, n = {len(some)}): {why}"
    )
    return Advice(None, None, reason, considered=len(rules))


def points(before: RuleResult, now: RuleResult, chosen: np.ndarray) -> tuple[float, float, float]:
    """Computes the paired difference in accuracy on some of the questions, with its 95% interval.

    Returns:
        (mean, low, high) of accuracy(now) - accuracy(before), in percentage points.
    """
    mean, low, high = paired([before.right[i] for i in chosen], [now.right[i] for i in chosen])
    return 100 * mean, 100 * low, 100 * high


def loses_nothing(difference: tuple[float, float, float]) -> bool:
    """Says whether a difference is not significantly negative and rules out a loss of MARGIN points.

    Args:
        difference: (mean, low, high) from `points`.
    """
    return difference[2] >= 0 and difference[1] > -MARGIN


def per_forward(cases: Sequence[RuleResult], chosen: Sequence[np.ndarray]) -> float:
    """Computes the tokens per forward pass over the chosen questions of all tasks."""
    tokens = sum(c.tokens[i] for c, some in zip(cases, chosen, strict=True) for i in some)
    forwards = sum(c.forwards[i] for c, some in zip(cases, chosen, strict=True) for i in some)
    return tokens / max(forwards, 1)


def _halves(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    order = np.random.default_rng(seed).permutation(n)
    return np.sort(order[: n // 2]), np.sort(order[n // 2 :])


def _by_rule(base: Sequence[RuleResult], others: Sequence[RuleResult]) -> list[list[RuleResult]]:
    """Groups results by rule, in the order of the baseline's tasks. Rules that miss a task are left out."""
    found: dict[str, dict[str, RuleResult]] = {}
    for case in others:
        found.setdefault(case.rule, {})[case.task] = case
    whole = [[cases[b.task] for b in base] for cases in found.values() if all(b.task in cases for b in base)]
    for cases in whole:
        for b, case in zip(base, cases, strict=True):
            if len(case.right) != len(b.right):
                allowed = f"{len(b.right)} answers, as many as the baseline"
                raise refuse("others", len(case.right), allowed)
    return whole


def _uninformative(base: Sequence[RuleResult], first: Sequence[np.ndarray]) -> str | None:
    """Explains why these questions cannot tell a harmless rule from a harmful one; None if they can."""
    for b, some in zip(base, first, strict=True):
        if len(some) < LEAST:
            return (
                f"{b.task} has {len(some)} questions to choose by; with fewer than {LEAST} not even a rule that "
                f"changes no answer can be told from one that loses {MARGIN:g} points (ask {2 * LEAST} or more)"
            )
        share = 100 * sum(b.right[i] for i in some) / len(some)
        if share <= MARGIN:
            least = f"a rule could not lose {MARGIN:g} points there"
            return f"one token per step gets {share:.1f}% of {b.task} right: {least}"
    return None


def _rate(cases: Sequence[RuleResult]) -> float | None:
    """Computes tokens per second over all tasks; None if nothing was timed."""
    seconds = sum(c.seconds for c in cases)
    return sum(c.made for c in cases) / seconds if seconds > 0 else None


def _reported(
    base: Sequence[RuleResult], best: list[RuleResult], second: Sequence[np.ndarray], considered: int
) -> Advice:
    """Reports the chosen rule on the second half of the questions, which were not used to choose it."""
    tasks, differences = [], []
    for before, now, some in zip(base, best, second, strict=True):
        differences.append(points(before, now, some))
        accuracy, base_accuracy = (sum(case.right[i] for i in some) / len(some) for case in (now, before))
        tasks.append({
            "task": now.task, "n": len(some), "accuracy": accuracy, "accuracy_one_a_step": base_accuracy,
            **dict(zip(("points", "points_low", "points_high"), differences[-1])),
            "tokens_per_forward": per_forward([now], [some]),
            "tokens_per_forward_one_a_step": per_forward([before], [some]), "speedup": now.speedup,
        })  # fmt: skip
    speedups = [c.speedup for c in best if c.speedup]
    figures: dict[str, Any] = dict(
        tasks=tuple(tasks), tokens_per_forward=per_forward(best, second), tokens_per_second=_rate(best),
        speedup=statistics.geometric_mean(speedups) if len(speedups) == len(best) else None,
        ruled_out=all(map(loses_nothing, differences)), considered=considered,
    )  # fmt: skip
    lost = [c.task for c, d in zip(best, differences, strict=True) if d[2] < 0]
    if lost:
        reason = f"{best[0].rule}, the best on the first half, is significantly worse on the second: {', '.join(lost)}"
        return Advice(None, best[0].rule, reason, **figures)
    reason = f"the most tokens per forward pass of {considered} settings that lose nothing against one token per step"
    return Advice(best[0].code, best[0].rule, reason, **figures)
