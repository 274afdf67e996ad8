"""How much batching can gain at most: the engine's device program alone, with one row and with many.

A forward pass of B rows multiplies B times as many positions with the same matrices. Where one row already keeps the
processor busy, B rows take B times as long, and no server around them can change that. This module is the only one of
`bench` that uses the internals of the engine.
"""

from __future__ import annotations

import statistics
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mercury_jax.bench.timing import endless, prompt_ids, timed
from mercury_jax.serve.engine import programs, sampling_params as sampling
from mercury_jax.serve.engine.buckets import make_buckets
from mercury_jax.serve.engine.request import EngineConfig, EngineRequest
from mercury_jax.types import LM

PASSES = 12  # of one timed run
POSITIONS = 4096  # rows of the large matrix products that measure the FLOP/s of the machine


class DeviceProgram(NamedTuple):
    """The engine's program of a number of rows, all of them in the middle of long answers."""

    rows: int
    width: int
    program: Any
    params: Any
    row_params: Any
    start: Any


class BatchingBound(NamedTuple):
    """What batching can gain, and what part the arithmetic has in it.

    Attributes:
        seconds: Rows -> median seconds of a forward pass.
        gain: Rows times the pass of one row over the pass of all rows, a median.
        rates: Rows -> GFLOP/s of the matrix products of a pass.
        matmul: GFLOP/s of such products alone, in one large batch.
    """

    seconds: dict[int, float]
    gain: float
    rates: dict[int, float]
    matmul: float


def measure_bound(lm: LM, rows: int, tokens: int, turns: int = 7) -> BatchingBound:
    """Times forward passes of 1 and of `rows` rows in alternation.

    Args:
        lm: The model.
        rows: Rows of the larger batch.
        tokens: Prompt and answer of a row.
        turns: How often both are timed.

    Returns:
        Times and rates of both batches.
    """
    few, many = device_program(lm, 1, tokens), device_program(lm, rows, tokens)
    seconds: dict[int, list[float]] = {1: [], rows: []}
    for turn in range(turns + 1):  # the first one compiles
        for part in (few, many) if turn % 2 else (many, few):
            seconds[part.rows].append(seconds_per_pass(part))
    timed_passes = {n: found[1:] for n, found in seconds.items()}
    middle = {n: statistics.median(found) for n, found in timed_passes.items()}
    gain = statistics.median(rows * a / b for a, b in zip(timed_passes[1], timed_passes[rows]))
    # 2 FLOP for each parameter of a matrix and position; attention is left out.
    work = 2.0 * sum(x.size for x in jax.tree.leaves(lm.params) if x.ndim > 1) * few.width
    rates = {n: n * work / middle[n] / 1e9 for n in middle}
    return BatchingBound(middle, gain, rates, _matmul_rate(lm) / 1e9)


def device_program(lm: LM, rows: int, tokens: int, rules: tuple[str, ...] | None = None) -> DeviceProgram:
    """The engine's program with rows that accept one token per step and never end.

    Args:
        lm: The model.
        rows: Rows of the batch.
        tokens: Prompt and answer of a row.
        rules: Rules that the program offers. Default: those of a server.

    Returns:
        The program with a state whose rows have their prompts and no answer yet.
    """
    lm = endless(lm)
    buckets = make_buckets(lm, EngineConfig(slots=rows, context=tokens, rules=rules))
    prompt = tuple(prompt_ids(lm, 1)[0][: max(1, tokens // 4)])
    names = buckets.rules.names
    slow = "confidence" if "confidence" in names else names[0]
    request = EngineRequest(prompt=prompt, max_tokens=tokens - len(prompt), rule=slow)
    size = buckets.capacity(tokens)
    width = buckets.width(size)
    start = programs.move_rows(buckets.row(size, request), np.zeros(rows, np.int32), size, width)
    row = sampling.row_params(buckets.rules, request, sampling.PLAIN, lm, 0)
    program = buckets.program(size, sampling.PLAIN)
    return DeviceProgram(rows, width, program, lm.params, sampling.stack_rows(rows, row), start)


def seconds_per_pass(part: DeviceProgram) -> float:
    """Mean seconds of a denoising pass; the pass that encodes the prompt is left out."""
    cancelled, one = np.zeros(part.rows, bool), np.int32(1)
    held = jax.device_put(part.row_params)
    step = lambda state: programs.run_passes(part.program, part.params, state, held, cancelled, one, 1).state
    state = jax.block_until_ready(step(jax.tree.map(jnp.copy, part.start)))
    state = jax.block_until_ready(step(state))

    began = time.perf_counter()
    for _ in range(PASSES):
        state = step(state)
    jax.block_until_ready(state)
    return (time.perf_counter() - began) / PASSES


def _matmul_rate(lm: LM) -> float:
    """FLOP/s of matrix products of the model's widths, each on the result of the one before."""
    config = lm.model.config
    width, hidden = config.width, getattr(config, "ffn", 4 * config.width)
    up, down = jnp.ones((width, hidden), jnp.float32) / width, jnp.ones((hidden, width), jnp.float32) / hidden
    chain = jax.jit(lambda x: jax.lax.fori_loop(0, 8, lambda i, x: x @ up @ down, x))
    x = jnp.ones((POSITIONS, width), jnp.float32)
    jax.block_until_ready(chain(x))
    best = min(timed(lambda: jax.block_until_ready(chain(x)))[1] for _ in range(5))
    return 8 * 4.0 * POSITIONS * width * hidden / best


def explain(speedup: float, found: BatchingBound, wanted: float) -> str:
    """What limits the speedup of batching, in words.

    Args:
        speedup: Measured, of the largest concurrency over the least.
        found: Of `measure_bound`.
        wanted: The speedup that is aimed at.

    Returns:
        A sentence with the figures.
    """
    rows = max(found.seconds)
    longer = found.seconds[rows] / found.seconds[1]
    share = found.rates[1] / found.matmul
    why = (
        f"a pass of {rows} rows takes {longer:.1f} times as long as one of 1 on the device alone, so that batching "
        f"can gain {found.gain:.1f} times at most; one row already multiplies at {100 * share:.0f}% of the rate that "
        f"large products reach here ({found.rates[1]:.1f} of {found.matmul:.1f} GFLOP/s, {rows} rows at "
        f"{found.rates[rows]:.1f})"
    )
    if speedup >= wanted:
        return f"nothing; {why}"
    if found.gain < wanted or speedup > 0.85 * found.gain:
        return f"the arithmetic of the forward pass: {why}"
    return f"the server around the device, which reaches {speedup / found.gain:.0%} of that: {why}"
