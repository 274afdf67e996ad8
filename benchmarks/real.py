"""A real model on real text: SmolLM2 left to right, and with what is said to be faster, on the same questions.

    lookup            drafts what followed the same words before: no model, no training
    smollm2-drafter   the block drafter in the package
    FOLDER            a drafter that `mercury train configs/drafter_smollm2.py` made
    adapted, RULE, N  the diffusion model that `configs/adapt_smollm2.py` made, in blocks of N (`--adapter`)
    transformers      its `generate` on the same file, plain and with its own lookup (`--peer`)

Drafted answers are those of left to right, token for token, so that their accuracy can differ only where fp32 rounding
decides between two tokens; `agreement` says how often it does. An adapted model is another model. Run with
`python -m benchmarks.real --gsm8k test.jsonl`.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

import mercury_jax as mj
from benchmarks.peer import Worker, worker
from benchmarks.script import run_script
from mercury_jax.bench import decode
from mercury_jax.bench.decode import QuestionSet, SweepEntry, Trial
from mercury_jax.cli import arguments, show
from mercury_jax.cli.arguments import Flag, Int, option
from mercury_jax.config import Plan, nearest, refuse
from mercury_jax.decode import rules
from mercury_jax.decode.methods.block_drafter import with_block_drafter
from mercury_jax.evaluate.runner import LEFT_TO_RIGHT
from mercury_jax.hub.gguf import find_gguf
from mercury_jax.tasks.task import Problem, Task, hashed_split, parse_json_line, read_lines
from mercury_jax.types import LM

WORKER = Path(__file__).with_name("real_worker.py")
PEER = {"transformers": 0, "transformers, lookup": 7}  # tokens of a draft, as many as of `lookup`
RULES = {"threshold(0.9)": lambda: rules.threshold(p=0.9), "factor(1.0)": lambda: rules.factor(f=1.0)}
BLOCKS = (4, 8, 16)  # tokens
SHORT = Path(__file__).with_name("short_questions.txt")
KEYS = ("name", "age", "city", "email", "price", "colour", "title", "year")
THINGS = ("a person", "a book", "a car", "a shop", "a hotel", "a film", "a student", "a product")


@dataclass(frozen=True, kw_only=True)
class RealBenchmark:
    """Measure a pretrained model left to right and with drafts: accuracy, tokens a pass, tokens a second.

    examples:
      python -m benchmarks.real --gsm8k test.jsonl --drafts lookup smollm2-drafter
      python -m benchmarks.real --tasks short --batches 1 --limit 20

    All ways decode a batch of questions before the next batch begins, in
    alternating order; `speedup` is the ratio of all tokens per second to left
    to right, with a 95% interval by resampling the batches.
    """

    model: Annotated[str, option("MODEL")] = "smollm2"
    """An autoregressive model."""
    drafts: Annotated[tuple[str, ...], option("DRAFTER [DRAFTER ...]")] = ("lookup", "smollm2-drafter")
    """What is compared: see `mercury sample --draft`."""
    adapter: Annotated[str | None, option("FOLDER")] = None
    """Adapter that makes the model a diffusion model: decoded in blocks of 4, 8 and 16, by two rules."""
    tasks: Annotated[tuple[str, ...], option("TASK [TASK ...]")] = ("gsm8k", "short", "json")
    """gsm8k: the file of --gsm8k. short: 200 questions with a word as the answer. json: an object with given keys."""
    gsm8k: Annotated[str | None, option("FILE.jsonl")] = None
    """Questions and answers of GSM8K, {"question", "answer"} on each line."""
    limit: Int = 64
    """Questions of each task at the largest batch; smaller batches get as many batches."""
    batches: Annotated[tuple[Int, ...], option("ROWS [ROWS ...]")] = (1, 8)
    """Rows decoded together."""
    seed: Int = 0
    """Draws the questions."""
    peer: Annotated[str | None, option("PYTHON")] = None
    """Interpreter with torch, transformers, gguf and accelerate, which decodes the same questions at batch 1."""
    out: Annotated[str | None, option("FILE.jsonl")] = None
    """Write the records, too."""
    json: Flag = False
    """Print one JSON object for each record."""


def run(argv: Sequence[str]) -> int:
    """Runs the benchmark; returns its exit code."""
    args = arguments.read(RealBenchmark, argv, "python -m benchmarks.real")
    show.check_writable("--out", args.out)
    for name in args.tasks:
        if name not in TASKS:
            raise refuse("--tasks", name, nearest(name, list(TASKS)))
    if "gsm8k" in args.tasks and args.gsm8k is None:
        raise refuse("--gsm8k", None, "a file of GSM8K, or --tasks without gsm8k")
    lm = show.load(args.model)
    ways = [way(LEFT_TO_RIGHT, lm), *(way(name, with_block_drafter(lm, name)) for name in args.drafts)]
    if args.adapter is not None:
        adapted = show.load(args.model, adapter=args.adapter)
        ways += [
            way(f"adapted, {name}, {n}", adapted, rule, n) for name, rule in RULES.items() for n in BLOCKS
        ]
    most = max(args.batches)
    asked = [
        ask(TASKS[task](args.gsm8k), -(-args.limit * batch // most), batch, args.seed)
        for task in args.tasks
        for batch in args.batches
    ]
    with show.progress("time", quiet=args.json) as update, contextlib.ExitStack() as stack:
        ask_peer = args.peer and stack.enter_context(worker(args.peer, WORKER, str(find_gguf(args.model))))
        found = compare(ways, asked, lambda text: update(description=text), ask_peer or None)
        show.report(found, args.out, None if args.json else line)
    return 0


# --- questions


def ask(made: tuple[Task, list[Problem]], limit: int, batch: int, seed: int) -> QuestionSet:
    """Draws questions of a task."""
    task, problems = made
    chosen = np.random.default_rng(seed).permutation(len(problems))[: max(limit, batch)]
    return QuestionSet(task, [problems[i] for i in chosen], task.max_tokens, batch, seed, 0)


def task_of(
    name: str, problems: list[Problem], check: Callable[[str, str], bool], max_tokens: int
) -> tuple[Task, list[Problem]]:
    """A task over fixed questions; `check` gets the right answer and the text of the model."""
    answers = {p.input: p.output for p in problems}
    split = lambda text: hashed_split(name, text)
    own = Task(
        name, name, lambda rng: problems[rng.integers(len(problems))], str, split,
        lambda question, text: check(answers[question], text), max_tokens,
    )  # fmt: skip
    return own, problems


def gsm8k(file: str | None) -> tuple[Task, list[Problem]]:
    """School mathematics in words (arXiv 2110.14168): the last number of the answer counts."""
    assert file is not None
    lines = [parse_json_line(place, line) for place, line in read_lines(file, "gsm8k")]
    number = lambda text: (re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", "")) or ["none"])[
        -1
    ].removesuffix(".0")
    problems = [Problem(str(x["question"]), number(str(x["answer"]))) for x in lines]
    return task_of("gsm8k", problems, lambda right, text: number(text) == right, 192)


def short(_: str | None) -> tuple[Task, list[Problem]]:
    """Questions whose answer is a word, which the text has to hold."""
    lines = [line.split("|") for line in SHORT.read_text(encoding="utf-8").splitlines()]
    problems = [Problem(question, answer) for question, answer in lines]
    words = lambda text: f" {' '.join(re.findall(r'[a-z0-9]+', text.lower()))} "
    return task_of("short", problems, lambda right, text: words(right) in words(text), 48)


def objects(_: str | None) -> tuple[Task, list[Problem]]:
    """An object in JSON with three keys, without a grammar."""
    rng, problems = np.random.default_rng(0), []
    for thing in THINGS:
        for __ in range(8):
            keys = sorted(rng.choice(KEYS, 3, replace=False).tolist())
            asked = f"Write a JSON object that describes {thing}, with the keys {', '.join(keys)}."
            problems.append(Problem(f"{asked} Answer with JSON only.", json.dumps(keys)))
    distinct = list({p.input: p for p in problems}.values())
    return task_of("json", distinct, _has_keys, 96)


def _has_keys(keys: str, text: str) -> bool:
    found = re.search(r"\{.*\}", text, re.DOTALL)
    try:
        value = json.loads(found.group()) if found else None
    except ValueError:
        return False
    return isinstance(value, dict) and sorted(value) == json.loads(keys)


TASKS = {"gsm8k": gsm8k, "short": short, "json": objects}


# --- measuring


def way(
    name: str, lm: LM, rule: Callable[[], Any] = rules.autoregressive, block: int | None = None
) -> SweepEntry:
    """A way of decoding."""
    return SweepEntry(name, name, lm, rule, Plan(block=block))


def compare(
    ways: Sequence[SweepEntry],
    asked: Sequence[QuestionSet],
    tick: decode.Tick = lambda text: None,
    peer: Worker | None = None,
) -> Iterator[dict[str, Any]]:
    """Yields a record for each task, batch and way of decoding; the first way is what the others are compared with."""
    for one in asked:
        trials = decode.run(ways, one, tick)
        for trial, record in zip(trials, decode.records(trials, one), strict=True):
            yield finish(trials[0], trial, record)
        if peer is not None and one.batch == 1:
            trials = [trials[0], *(of_peer(peer, trials[0], one, *how) for how in PEER.items())]
            for trial, record in zip(trials[1:], decode.records(trials, one)[1:], strict=True):
                del record["cpu_speedup"]  # the other process is not in it
                yield finish(trials[0], trial, record)


def finish(base: Trial, trial: Trial, record: dict[str, Any]) -> dict[str, Any]:
    """A record with the ratio of tokens per second to those of the first way, and its interval."""
    if trial.refused is not None:
        return {"way": record.pop("rule"), **record}
    low, high = speed_interval(base, trial)
    ratio = {"speedup": _rate(trial) / _rate(base), "speedup_low": low, "speedup_high": high}
    return {"way": record.pop("rule"), **record, **ratio, "compared_with": LEFT_TO_RIGHT}


def of_peer(peer: Worker, base: Trial, asked: QuestionSet, name: str, lookup: int) -> Trial:
    """Measures transformers on the same questions, after all ways of this library; `lookup`: tokens of a draft."""
    lm, n = base.entry.lm, len(asked.problems)
    ids = [mj.prompt_ids(lm, asked.message(i))[0][0].tolist() for i in range(n)]
    calls = [peer(ids=one, max_tokens=asked.max_tokens, lookup=lookup) for one in (ids[0], *ids)][1:]  # warm
    ends = {lm.tokenizer.eos, lm.tokenizer.end_turn}
    tokens = [np.asarray(c["ids"][:-1] if c["ids"][-1] in ends else c["ids"]) for c in calls]
    texts = [lm.tokenizer.decode(one) for one in tokens]
    right = [asked.task.check(p.input, text) for p, text in zip(asked.problems, texts, strict=True)]
    seconds, passes = [c["seconds"] for c in calls], [c["passes"] for c in calls]
    ratios = [
        len(t) / s / r for t, s, r in zip(tokens, seconds, np.divide(base.made, base.seconds), strict=True)
    ]
    return Trial(
        base.entry._replace(rule=name, curve=name), right, tokens, passes, base.sampler,
        made=[len(one) for one in tokens], passes=passes, seconds=seconds, ratios=ratios, cpu_ratios=ratios,
    )  # fmt: skip


def _rate(trial: Trial, chosen: np.ndarray | slice = slice(None)) -> float:
    return float(np.sum(np.asarray(trial.made)[chosen]) / np.sum(np.asarray(trial.seconds)[chosen]))


def speed_interval(base: Trial, trial: Trial, draws: int = 2000) -> tuple[float, float]:
    """The 95% interval of the ratio of tokens per second, by drawing the batches again with replacement."""
    count = len(base.seconds)
    chosen = np.random.default_rng(0).integers(0, count, (draws, count))
    ratios = [_rate(trial, one) / _rate(base, one) for one in chosen]
    return float(np.quantile(ratios, 0.025)), float(np.quantile(ratios, 0.975))


def line(row: Mapping[str, Any]) -> str:
    """A record for people."""
    if "refused" in row:
        return f"{row['task']:6} batch {row['batch']} {row['way']:16} refused: {row['refused']}"
    same = "" if row["agreement"] is None else f", agreement {100 * row['agreement']:.0f}%"
    return (
        f"{row['task']:6} batch {row['batch']} {row['way']:16} {row['tokens_per_second']:6.1f} tokens/s, "
        f"{row['speedup']:.2f} times ({row['speedup_low']:.2f} to {row['speedup_high']:.2f}), "
        f"{row['tokens_per_forward']:.2f} tokens a pass, {row['correct']} of {row['n']} right "
        f"({100 * row['low']:.0f} to {100 * row['high']:.0f}%){same}"
    )


if __name__ == "__main__":
    sys.exit(run_script(run))
