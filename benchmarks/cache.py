"""Reuse of keys within a canvas: each cache policy against computing all of the canvas in every step.

Run with `python -m benchmarks.cache`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from benchmarks.script import run_script
from mercury_jax.bench import decode
from mercury_jax.bench.decode import QuestionSet, SweepEntry
from mercury_jax.cli import arguments, show
from mercury_jax.cli.arguments import Flag, Int, OptionalInt, Positional, option
from mercury_jax.config import CachePolicyLike, Plan, Refresh, nearest, refuse
from mercury_jax.decode import rules
from mercury_jax.decode.methods import cache_refresh
from mercury_jax.decode.sampler import SamplerLike
from mercury_jax.types import LM

NO_CACHE = "no cache"

POLICIES: dict[str, Refresh | CachePolicyLike | None] = {
    NO_CACHE: None,
    "prefix": Refresh.prefix(),
    "dual": Refresh.dual(),
    "dual, every 4 steps": Refresh.dual(every=4),
    "vicinity of 8": Refresh.vicinity(8),
    "vicinity of 8, every 4 steps": Refresh.vicinity(8, every=4),
    "dkv_decode": cache_refresh.dkv_decode(every=8),
    "dkv_decode, once": cache_refresh.dkv_decode(every=1 << 20),
    "dkv_greedy": cache_refresh.dkv_greedy(every=2, window=4),
    "dllm_cache": cache_refresh.dllm_cache(prompt_every=100, answer_every=7, ratio=0.25),
    "elastic_cache": cache_refresh.elastic_cache(gamma=0.9, window=32),
    "suffix_pruning": cache_refresh.suffix_pruning(window=32),
    "suffix_pruning, dual": cache_refresh.suffix_pruning(window=32, reuse=2),
}
# Rows leave lockstep under all of these but the first.
RULES: dict[str, Callable[[], SamplerLike]] = {
    "confidence": rules.confidence,
    "threshold(0.9)": lambda: rules.threshold(0.9),
    "threshold(0.99)": lambda: rules.threshold(0.99),
    "factor(1.0)": lambda: rules.factor(1.0),
    "factor(0.1)": lambda: rules.factor(0.1),
}
BLOCK = 16  # of a bidirectional model
PAIRS = decode.PAIRED  # batches of which every entry is timed beside the baseline


@dataclass(frozen=True, kw_only=True)
class CacheBenchmark:
    """Compare reuse of keys with computing all of the canvas in every step.

    examples:
      mercury train configs/nano_bidirectional.py --out runs/bidirectional
      python -m benchmarks.cache runs/bidirectional/model
      python -m benchmarks.cache --caches "dkv_decode, once" --rules "threshold(0.99)"

    Every token of a canvas attends to every other one, so no key of it stays
    valid; the canvas of a bidirectional model is the whole sequence. Prefix and
    dual caches (Fast-dLLM), vicinity refresh (dInfer) and cache policies
    (dKV-Cache, dLLM-Cache, Elastic-Cache, DPad) reuse outdated keys. `agreement`
    is the share of answers that are token for token those without a cache,
    `points` the paired difference in accuracy with its 95%
    interval, and `speedup` the median ratio of tokens per second to no cache,
    with the same rule, on the same batches; `cpu_speedup` the same ratio of
    tokens per second of CPU time, which a busy machine disturbs less.
    """

    model: Annotated[Positional[str | None], option("MODEL")] = None
    """Folder of a saved model. Default: the embedded one."""
    tasks: Annotated[tuple[str, ...], option("TASK [TASK ...]")] = ("sudoku4", "add3")
    """Tasks."""
    rules: Annotated[tuple[str, ...], option("RULE [RULE ...]")] = tuple(RULES)
    """Decoding rules."""
    caches: Annotated[tuple[str, ...], option("CACHE [CACHE ...]")] = ()
    """What is compared. Default: all that the model takes."""
    limit: Int = 256
    """Questions of each task, at the largest batch that it fills."""
    batches: Annotated[tuple[Int, ...], option("ROWS [ROWS ...]")] = (1, 8, 32, 64)
    """Rows decoded together. Smaller ones are asked four batches of questions."""
    max_tokens: OptionalInt = None
    """Most tokens of an answer, all of which a pass computes. Default: the task's."""
    block: OptionalInt = None
    """Tokens of a block. Default: 16 in a bidirectional model, else the model's."""
    steps: OptionalInt = None
    """Denoising steps of a block. Default: its tokens."""
    seed: Int = 0
    """Draws the questions."""
    out: Annotated[str | None, option("FILE.jsonl")] = None
    """Write the records, too."""
    json: Flag = False
    """Print one JSON object for each record."""


def run(argv: Sequence[str]) -> int:
    """Runs the benchmark; returns its exit code."""
    args = arguments.read(CacheBenchmark, argv, "python -m benchmarks.cache")
    show.check_writable("--out", args.out)
    for field, known in (("rules", RULES), ("caches", POLICIES)):
        for name in getattr(args, field):
            if name not in known:
                raise refuse(f"--{field}", name, nearest(name, list(known)))
    lm = show.load(args.model)
    whole = max(b for b in args.batches if b <= max(args.limit, min(args.batches)))
    asked = [
        decode.questions(
            task, limit=args.limit if batch == whole else min(args.limit, PAIRS * batch), batch=batch,
            seed=args.seed, max_tokens=args.max_tokens, alone=0,
        )
        for task in args.tasks
        for batch in args.batches
    ]  # fmt: skip
    with show.progress("time", quiet=args.json) as update:
        found = compare(
            lm, asked, rules=args.rules, caches=args.caches or None, block=args.block, steps=args.steps,
            tick=lambda text: update(description=text),
        )  # fmt: skip
        show.report(found, args.out, None if args.json else line)
    return 0


def entries(
    lm: LM,
    block: int | None = None,
    steps: int | None = None,
    rule: str = "confidence",
    caches: Sequence[str] | None = None,
) -> list[SweepEntry]:
    """One entry for each cache, decoding in blocks by one rule; the first one computes everything.

    Args:
        lm: The model.
        block: Tokens of a block. Default: 16 in a bidirectional model, else the model's.
        steps: Denoising steps of a block. Default: its tokens.
        rule: A key of `RULES`.
        caches: Keys of `POLICIES`. Default: all that the model takes.

    Returns:
        The entries for `decode.run`.

    Raises:
        ValueError: The model computes its canvas alone, which a `Refresh` cannot divide.
    """
    bidirectional = lm.model.config.pattern == "bidirectional"
    fitting = [name for name, how in POLICIES.items() if bidirectional or not isinstance(how, Refresh)]
    for name in caches or ():
        if name not in fitting:
            raise refuse(
                "--caches", name, f"for a {lm.model.config.pattern} model, any of {', '.join(fitting)}"
            )
    if block is None:
        block = BLOCK if bidirectional else lm.model.config.block
    plan = lambda name: Plan(block=block, steps=steps, refresh=POLICIES[name])
    names = dict.fromkeys((NO_CACHE, *(caches or fitting)))
    return [SweepEntry(name, name, lm, RULES[rule], plan(name)) for name in names]


def compare(
    lm: LM,
    asked: Sequence[QuestionSet],
    *,
    rules: Sequence[str] = ("confidence",),
    caches: Sequence[str] | None = None,
    block: int | None = None,
    steps: int | None = None,
    tick: Callable[[str], None] = lambda text: None,
) -> Iterator[dict[str, Any]]:
    """Yields a record for each task, batch, rule and cache: accuracy, and agreement and speed against no cache.

    Args:
        lm: The model.
        asked: The questions of each task and batch.
        rules: Keys of `RULES`.
        caches: Keys of `POLICIES`. Default: all that the model takes.
        block: Tokens of a block. Default: as of `entries`.
        steps: Denoising steps of a block. Default: its tokens.
        tick: Called with what comes next.

    Yields:
        The records.
    """
    for one in asked:
        for rule in rules:
            found = entries(lm, block, steps, rule, caches)
            for record in decode.records(decode.run(found, one, tick), one):
                name = record.pop("rule")
                yield {
                    "cache": name,
                    "rule": rule,
                    "block": found[0].plan.block,
                    **record,
                    "compared_with": NO_CACHE,
                }


def line(row: Mapping[str, Any]) -> str:
    """A record for people."""
    return (
        f"{row['task']:8} {row['rule']:15} batch {row['batch']:2} {row['cache']:28} {row['speedup']:.2f} times "
        f"({row['cpu_speedup']:.2f} by CPU time), "
        f"{row['forwards']:.1f} passes, {100 * row['accuracy']:5.1f}% of {row['n']} right, points "
        f"{row['points']:+.1f} ({row['points_low']:+.1f} to {row['points_high']:+.1f}), agreement "
        f"{100 * row['agreement']:5.1f}%"
    )


if __name__ == "__main__":
    sys.exit(run_script(run))
