"""What batching can give at most: the engine's device program alone, with one row and with many, by turns.

A pass of B rows multiplies B times as many positions with the same matrices. Where one row keeps the processor
busy already, B rows take B times as long, and no server around them can change that.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mercury_jax.bench.overhead import endless, prompts
from mercury_jax.bench.timing import timed
from mercury_jax.serve.engine import programs, sampling_params as sampling
from mercury_jax.serve.engine.buckets import make_buckets
from mercury_jax.serve.engine.request import EngineConfig, EngineRequest
from mercury_jax.types import LM

PASSES = 12  # of one turn
POSITIONS = 4096  # of the products whose rate is the machine's


class Alone(NamedTuple):
    """The device program of so many rows, in the middle of long answers."""

    rows: int
    width: int
    program: Any
    params: Any
    knobs: Any
    start: Any


class Bound(NamedTuple):
    """rows -> median seconds of a pass; the most that batching can give; what the arithmetic has to do with it.

    gain: rows times the pass of one row over the pass of all, the median over turns. rates: rows -> GFLOP/s of a
    pass's products with matrices. matmul: GFLOP/s of such products alone, in one large batch.
    """

    seconds: dict[int, float]
    gain: float
    rates: dict[int, float]
    matmul: float


def bound(lm: LM, rows: int, tokens: int, turns: int = 7) -> Bound:
    """The passes of 1 and of `rows` rows, each with room for `tokens`, by turns."""
    few, many = alone(lm, 1, tokens), alone(lm, rows, tokens)
    seconds: dict[int, list[float]] = {1: [], rows: []}
    for turn in range(turns + 1):  # the first one compiles
        for part in (few, many) if turn % 2 else (many, few):
            seconds[part.rows].append(passes(part))
    kept = {n: found[1:] for n, found in seconds.items()}
    middle = {n: statistics.median(found) for n, found in kept.items()}
    gain = statistics.median(rows * a / b for a, b in zip(kept[1], kept[rows]))
    work = flops(lm, few.width)
    rates = {n: n * work / middle[n] / 1e9 for n in middle}
    return Bound(middle, gain, rates, matmul(lm) / 1e9)


def alone(lm: LM, rows: int, tokens: int, rules: tuple[str, ...] | None = None) -> Alone:
    """Rows that write one token a pass and come to no end. rules: that the program offers (None: as a server's)."""
    lm = endless(lm)
    buckets = make_buckets(lm, EngineConfig(slots=rows, context=tokens, rules=rules))
    prompt = tuple(prompts(lm, 1)[0][: max(1, tokens // 4)])
    names = buckets.rules.names
    slow = "confidence" if "confidence" in names else names[0]
    job = EngineRequest(prompt=prompt, max_tokens=tokens - len(prompt), rule=slow)
    size = buckets.capacity(tokens)
    width = buckets.width(size)
    start = programs.move_rows(buckets.row(size, job), np.zeros(rows, np.int32), size, width)
    row = sampling.row_params(buckets.rules, job, sampling.PLAIN, lm, 0)
    program = buckets.program(size, sampling.PLAIN)
    return Alone(rows, width, program, lm.params, sampling.stack_rows(rows, row), start)


def passes(part: Alone) -> float:
    """Seconds of a pass, the mean of a turn; the one that encodes the prompt is left out."""
    nobody, one = np.zeros(part.rows, bool), np.int32(1)
    held = jax.device_put(part.params)
    step = lambda state: programs.run_passes(part.program, part.params, state, held, nobody, one, 1).state
    state = jax.block_until_ready(step(jax.tree.map(jnp.copy, part.start)))
    state = jax.block_until_ready(step(state))

    def turn() -> Any:
        now = state
        for _ in range(PASSES):
            now = step(now)
        return jax.block_until_ready(now)

    return timed(turn)[1] / PASSES


def flops(lm: LM, positions: int) -> float:
    """Of the products with matrices in a pass of one row, attention left out: 2 a parameter and position."""
    sizes = (x.size for x in jax.tree.leaves(lm.params) if x.ndim > 1)
    return 2.0 * sum(sizes) * positions


def matmul(lm: LM) -> float:
    """FLOP a second of products of the model's widths, each on the result of the one before."""
    config = lm.model.config
    width, hidden = config.width, getattr(config, "ffn", 4 * config.width)
    up, down = jnp.ones((width, hidden), jnp.float32) / width, jnp.ones((hidden, width), jnp.float32) / hidden
    chain = jax.jit(lambda x: jax.lax.fori_loop(0, 8, lambda i, x: x @ up @ down, x))
    x = jnp.ones((POSITIONS, width), jnp.float32)
    jax.block_until_ready(chain(x))
    best = min(timed(lambda: jax.block_until_ready(chain(x)))[1] for _ in range(5))
    return 8 * 4.0 * POSITIONS * width * hidden / best


def words(speedup: float, found: Bound, wanted: float) -> str:
    """What bound a speedup by batching."""
    rows = max(found.seconds)
    longer = found.seconds[rows] / found.seconds[1]
    share = found.rates[1] / found.matmul
    told = (
        f"a pass of {rows} rows takes {longer:.1f} times as long as one of 1 on the device alone, so that batching "
        f"can give {found.gain:.1f} times at most; one row already multiplies at {100 * share:.0f}% of the rate that "
        f"large products reach here ({found.rates[1]:.1f} of {found.matmul:.1f} GFLOP/s, {rows} rows at "
        f"{found.rates[rows]:.1f})"
    )
    if speedup >= wanted:
        return f"nothing; {told}"
    if found.gain < wanted or speedup > 0.85 * found.gain:
        return f"the arithmetic of the forward: {told}"
    return f"the server around the device, which reaches {speedup / found.gain:.0%} of what it could: {told}"


def quartiles(values: Sequence[float]) -> list[float]:
    """The first and the third."""
    if len(values) < 2:
        return [*values, *values]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [low, high]
