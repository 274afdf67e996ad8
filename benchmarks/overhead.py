"""What sample() costs beyond its forward passes: against the same number of bare passes, in alternation.

The goal: at batch 1 and 8, sample() takes at most 1.10 times its forward passes alone, and compiles nothing once it is
warm. This is the only benchmark that uses the state and the program of the decoder. Run with
`python -m benchmarks.overhead`.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.script import Ints, run_script
from benchmarks.timing import alternate, prompt_ids, quartiles, ratio
from mercury_jax.bench.decode import SweepPoint, sweep
from mercury_jax.bench.timing import endless, timed
from mercury_jax.cli import arguments, show
from mercury_jax.cli.arguments import Flag, Int, Positional, option
from mercury_jax.compilation import compilations, hardware
from mercury_jax.config import at_least
from mercury_jax.decode.inputs import check_seed
from mercury_jax.decode.request import Request, encode_request, start
from mercury_jax.decode.sample import Output, sample
from mercury_jax.decode.session import Session
from mercury_jax.decode.state import DecodeConfig, State
from mercury_jax.types import LM, Params, Pass

GOAL = 1.10  # most that sample() may take, in times of its forward passes
POINTS = (SweepPoint("confidence"), SweepPoint("threshold", {"p": 0.9}))
COMPARED = "as many forward passes with the head, of the same shapes, in one compiled loop"


@dataclass(frozen=True, kw_only=True)
class OverheadBenchmark:
    """Compare sample() with its forward passes alone.

    examples:
      python -m benchmarks.overhead
      python -m benchmarks.overhead runs/mine/model --batches 1 8 64 --json

    For each rule and batch size, sample() from end to end and as many bare
    forward passes (with the head, in one compiled loop, the same shapes)
    alternate; `ratio` is the median of their ratios. The goal is 1.10 at most,
    with nothing compiled once warm: `recompilations` counts programs compiled
    after the first calls, some of the others having prompts of other lengths,
    other seeds and other parameters. On a machine that is busy with other work
    see `ratio_of_fastest` too, which compares the least times.
    """

    model: Annotated[Positional[str | None], option("MODEL")] = None
    """Folder of a saved model. Default: the embedded one."""
    rules: Annotated[tuple[str, ...], option("NAME [NAME ...]")] = ()
    """Rules. Default: confidence, and threshold at 0.9."""
    batches: Ints = (1, 8)
    """Rows decoded together."""
    tokens: Int = 64
    """Length of the answers."""
    pairs: Int = 9
    """How often both are timed."""
    seed: Int = 0
    """Draws the tokens."""
    out: Annotated[str | None, option("FILE.jsonl")] = None
    """Write the records, too."""
    json: Flag = False
    """Print one JSON object for each record."""


def run(argv: Sequence[str]) -> int:
    """Runs the benchmark; returns its exit code."""
    args = arguments.read(OverheadBenchmark, argv, "python -m benchmarks.overhead")
    chosen = sweep(args.rules) if args.rules else POINTS
    show.check_writable("--out", args.out)
    how: dict[str, Any] = dict(batches=args.batches, tokens=args.tokens, pairs=args.pairs, seed=args.seed)
    show.report(compare(show.load(args.model), chosen, **how), args.out, None if args.json else line)
    return 0


def line(row: Mapping[str, Any]) -> str:
    """A record for people."""
    low, high = row["ratio_quartiles"]
    return (
        f"{row['rule']}, batch {row['batch']}: {1000 * row['seconds']:.0f} ms for {row['passes']} passes, "
        f"{row['ratio']:.2f} times its forward passes alone (quartiles {low:.2f} to {high:.2f}, fastest "
        f"{row['ratio_of_fastest']:.2f}; the goal is {row['at_most']}), {row['recompilations']} recompilations"
    )


def compare(
    lm: LM,
    chosen: Sequence[SweepPoint] = POINTS,
    *,
    batches: Sequence[int] = (1, 8),
    tokens: int = 64,
    pairs: int = 9,
    seed: int = 0,
) -> Iterator[dict[str, Any]]:
    """Measures each setting at each batch size. The answers have a fixed length.

    Args:
        lm: The model.
        chosen: Rules with their parameters.
        batches: Rows decoded together.
        tokens: Length of the answers.
        pairs: How often both are timed.
        seed: Draws the tokens.

    Yields:
        A record with `ratio`, the median of sample() over its forward passes, its quartiles, `ratio_of_fastest` of the
        least times, which a busy machine spoils less, `prepare_seconds` of a call before the device loop, and
        `recompilations`, programs compiled after the first calls, some of which have prompts of other lengths, other
        seeds and other parameters.
    """
    at_least(1, tokens=tokens, pairs=pairs, batch=min(batches, default=0))
    lm = endless(lm)
    for setting in chosen:
        for batch in batches:
            yield _measure(lm, setting, batch, tokens, pairs, check_seed(seed))


def _measure(lm: LM, setting: SweepPoint, batch: int, tokens: int, pairs: int, seed: int) -> dict[str, Any]:
    call = functools.partial(_sample, lm, setting, batch, tokens)
    bare = BarePasses(lm, setting, batch, tokens, passes=call(seed).passes)
    call(seed)
    bare()
    before = compilations()
    times = alternate(lambda: call(seed), bare, pairs)
    prepares = [timed(lambda: _prepared(lm, setting, batch, tokens))[1] for _ in range(pairs)]
    for i in range(1, 4):
        call(seed + i, shorter=i, nudge=1 - 0.01 * i)
    again, found = compilations() - before, ratio(times)
    return {
        "rule": setting.text,
        "batch": batch,
        "tokens": tokens,
        "passes": bare.passes,
        "seconds": statistics.median(a for a, _ in times),
        "forwards_seconds": statistics.median(b for _, b in times),
        "prepare_seconds": statistics.median(prepares),
        "ratio": found,
        "ratio_quartiles": quartiles([a / b for a, b in times]),
        "ratio_of_fastest": min(a for a, _ in times) / min(b for _, b in times),
        "pairs": pairs,
        "recompilations": again,
        "at_most": GOAL,
        "within": found <= GOAL and again == 0,
        "model": lm.name,
        "hardware": hardware(),
        "seed": seed,
        "compared_with": COMPARED,
    }


def _sample(
    lm: LM, setting: SweepPoint, batch: int, tokens: int, seed: int, shorter: int = 0, nudge: float = 1.0
) -> Output:
    other = {k: v * nudge if isinstance(v, float) else v for k, v in setting.chosen.items()}
    sampler = dataclasses.replace(setting, chosen=other).sampler()
    asked = prompt_ids(lm, batch, shorter)
    return sample(lm, asked, max_tokens=tokens, seed=seed, sampler=sampler, plan=setting.plan)


def _prepared(lm: LM, setting: SweepPoint, batch: int, tokens: int) -> Session:
    """What sample() does before its first forward pass."""
    asked = Request(prompt_ids(lm, batch), max_tokens=tokens, sampler=setting.sampler(), plan=setting.plan)
    session = start(lm, encode_request(lm, asked.checked()))
    jax.block_until_ready(session.state)
    return session


class LoopConstants(NamedTuple):
    """What the bare loop closes over: the program whose passes it makes, tokens of the prompt and of the answer."""

    config: DecodeConfig
    known: int
    tokens: int


class BarePasses:
    """The forward passes of a call and nothing else: the same cache, canvas and number of passes."""

    def __init__(self, lm: LM, setting: SweepPoint, batch: int, tokens: int, passes: int) -> None:
        session = _prepared(lm, setting, batch, tokens)
        known = len(prompt_ids(lm, batch)[0])
        loop = functools.partial(_loop, LoopConstants(session.config, known, tokens))
        self.run: Callable[..., Any] = jax.jit(loop, donate_argnums=1)
        self.params, self.passes = lm.params, passes
        self.cache, self.like = session.state.cache, session.state._replace(cache=())

    def __call__(self) -> None:
        self.cache, logits = self.run(self.params, self.cache, self.like, jnp.asarray(self.passes))
        jax.block_until_ready(logits)


def _loop(
    constants: LoopConstants, params: Params, cache: Any, like: State, passes: jax.Array
) -> tuple[Any, jax.Array]:
    """Forward passes whose tokens and positions change, so that XLA can move nothing out of the loop."""
    config, model = constants.config, constants.config.model
    rows = like.done.shape[0]
    everyone, ones = jnp.zeros((rows,), bool), jnp.ones((rows,), jnp.int32)
    first = jnp.broadcast_to(jnp.arange(config.width), (rows, config.width))

    def forward(i: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        start = (constants.known + i * constants.tokens // passes // config.width * config.width) * ones
        if model.config.pattern == "bidirectional":
            start = 0 * ones
        n = config.width * ones
        tokens = (first + i) % model.config.vocab
        given = Pass(tokens, cache, start, n, start + n, everyone, like.self_cond)
        hidden, cache = model.forward(params, given)
        return model.head(params, jax.tree.map(lambda x: x[:, : config.window], hidden)), cache

    shape = jax.eval_shape(lambda c: forward(jnp.asarray(0), c)[0], cache)

    def body(i: jax.Array, loop: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        logits, cache = forward(i, loop[0])
        return cache, logits

    # All logits are carried: XLA would compute only the part of them that a loop keeps.
    return jax.lax.fori_loop(0, passes, body, (cache, jnp.zeros(shape.shape, shape.dtype)))


if __name__ == "__main__":
    sys.exit(run_script(run))
