"""KV cache reuse in a bidirectional model: each refresh policy against computing everything in every step.

Run with `python -m benchmarks.cache`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from mercury_jax.bench import decode
from mercury_jax.bench.decode import QuestionSet, SweepEntry
from mercury_jax.cli import app, arguments, show
from mercury_jax.cli.arguments import Flag, Int, OptionalInt, Positional, option
from mercury_jax.config import Plan, Refresh, refuse
from mercury_jax.decode import rules
from mercury_jax.types import LM

NO_CACHE = "no cache"

POLICIES: dict[str, Refresh | None] = {
    NO_CACHE: None,
    "prefix": Refresh.prefix(),
    "dual": Refresh.dual(),
    "dual, every 4 steps": Refresh.dual(every=4),
    "vicinity of 8": Refresh.vicinity(8),
    "vicinity of 8, every 4 steps": Refresh.vicinity(8, every=4),
}


@dataclass(frozen=True, kw_only=True)
class CacheBenchmark:
    """Compare KV cache reuse with computing everything in every step.

    examples:
      mercury train configs/nano_bidirectional.py --out runs/bidirectional
      python -m benchmarks.cache runs/bidirectional/model

    In a bidirectional model every token attends to every other one, so no key
    stays valid. Prefix and dual caches (Fast-dLLM) and vicinity refresh (dInfer)
    reuse outdated keys. `agreement` is the share of answers that are token
    for token those without a cache, `speedup` the median ratio of tokens per
    second on the same batches.
    """

    model: Annotated[Positional[str | None], option("MODEL")] = None
    """Folder of a saved model. Default: the embedded one."""
    tasks: Annotated[tuple[str, ...], option("TASK [TASK ...]")] = ("sudoku4", "add3")
    """Tasks."""
    limit: Int = 256
    """Questions of each task."""
    batch: Int = 32
    """Rows decoded together."""
    block: Int = 16
    """Tokens of a block."""
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
    lm = show.load(args.model)
    asked = [decode.questions(t, limit=args.limit, batch=args.batch, seed=args.seed) for t in args.tasks]
    with show.progress("time", quiet=args.json) as update:
        found = compare(
            lm, asked, block=args.block, steps=args.steps, tick=lambda text: update(description=text)
        )
        show.report(found, args.out, None if args.json else line)
    return 0


def entries(lm: LM, block: int, steps: int | None = None) -> list[SweepEntry]:
    """One entry for each policy, decoding in blocks by LLaDA's schedule; the first one computes everything.

    Args:
        lm: A bidirectional model.
        block: Tokens of a block.
        steps: Denoising steps of a block. Default: its tokens.

    Returns:
        The entries for `decode.run`.

    Raises:
        ValueError: The model is not bidirectional.
    """
    if lm.model.config.pattern != "bidirectional":
        raise refuse(
            "model.pattern", lm.model.config.pattern, "bidirectional: the cache of other models is exact"
        )
    plan = lambda refresh: Plan(block=block, steps=steps, refresh=refresh)
    return [SweepEntry(name, name, lm, rules.confidence, plan(refresh)) for name, refresh in POLICIES.items()]


def compare(
    lm: LM,
    asked: Sequence[QuestionSet],
    *,
    block: int = 16,
    steps: int | None = None,
    tick: Callable[[str], None] = lambda text: None,
) -> Iterator[dict[str, Any]]:
    """Yields a record for each task and policy: accuracy, and agreement and speed against no cache.

    Args:
        lm: A bidirectional model.
        asked: The questions of each task.
        block: Tokens of a block.
        steps: Denoising steps of a block. Default: its tokens.
        tick: Called with what comes next.

    Yields:
        The records.
    """
    found = entries(lm, block, steps)
    for one in asked:
        for record in decode.records(decode.run(found, one, tick), one):
            yield {"cache": record.pop("rule"), "block": block, **record, "compared_with": NO_CACHE}


def line(row: Mapping[str, Any]) -> str:
    """A record for people."""
    return (
        f"{row['task']:8} {row['cache']:30} {100 * row['accuracy']:5.1f}% right, agreement "
        f"{100 * row['agreement']:5.1f}%, {row['tokens_per_second']:.0f} tokens/s, {row['speedup']:.2f} times"
    )


if __name__ == "__main__":
    sys.exit(app.run_script(run))
