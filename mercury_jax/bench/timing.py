"""Timing without compilation: warm calls, two calls in alternation, and what the device can do at most.

`steady` and `alternate` are what every measurement of this package times with. `measure_roofline` measures the memory
bandwidth and the matmul rate that `mercury bench gpu` compares with. `endless` and `prompt_ids` give answers of fixed
length behind prompts of fixed length.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from mercury_jax.types import LM

T = TypeVar("T")

TRIES = 4  # equal calls, of which one must compile nothing
REPEATS = 5  # loops of which the fastest counts
PRODUCTS, COPIES = 4, 8  # of a loop
TEXT = "def area(r):\n    return 3.14159 * r * r\n\n\ndef total(values):\n    return sum(values)\n\n\n"


@functools.cache
def _compilation_counter() -> list[int]:
    """One number that rises with every compiled program; JAX offers no way to remove a listener."""
    count = [0]

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        count[0] += event.endswith("backend_compile_duration")

    jax.monitoring.register_event_duration_secs_listener(listen)
    return count


def compilations() -> int:
    """How many programs were compiled since the first call of this function."""
    return _compilation_counter()[0]


def timed(call: Callable[[], T]) -> tuple[T, float]:
    """(result, seconds) of a call. The result must be on the host, or waited for inside the call."""
    began = time.perf_counter()
    result = call()
    return result, time.perf_counter() - began


def steady(call: Callable[[], T]) -> tuple[T, float]:
    """Times a call during which nothing is compiled, repeating it until that is so.

    Returns:
        (result, seconds) of that call.

    Raises:
        RuntimeError: Each of `TRIES` calls compiled something, so that the time would be the compiler's.
    """
    for _ in range(TRIES):
        before = compilations()
        result, seconds = timed(call)
        if compilations() == before:
            return result, seconds
    raise RuntimeError(f"each of {TRIES} equal calls compiled a program; there is no steady state to time")


def alternate(
    first: Callable[[], object], other: Callable[[], object], pairs: int
) -> list[tuple[float, float]]:
    """Seconds of two calls, one after the other `pairs` times; which begins alternates.

    On a shared machine both calls of a pair meet the same load, so their ratio is steadier than either time.

    Args:
        first, other: Functions without arguments that wait for their results.
        pairs: How often both are called.

    Returns:
        (seconds of the first, seconds of the other) for each pair.
    """
    found = []
    for i in range(pairs):
        if i % 2:
            after = timed(other)[1]
            found.append((timed(first)[1], after))
        else:
            found.append((timed(first)[1], timed(other)[1]))
    return found


def ratio(pairs: Sequence[tuple[float, float]]) -> float:
    """Median of first / other."""
    return statistics.median(a / max(b, 1e-12) for a, b in pairs)


def quartiles(values: Sequence[float]) -> list[float]:
    """The first and the third quartile; of fewer than two values the value itself."""
    if len(values) < 2:
        return [*values, *values]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [low, high]


# --- what a device can do


class Roofline(NamedTuple):
    """Measured limits of a device: bytes/s read and written, and FLOP/s of large bf16 products."""

    bandwidth: float
    matmul: float


def measure_roofline(megabytes: int = 2048, width: int = 8192) -> Roofline:
    """Measures the first device: the fastest of several loops counts, as other work of the device only adds to it.

    Args:
        megabytes: Size of an array to whose numbers 1 is added, so that each is read and written.
        width: Rows and columns of the square bf16 matrices that are multiplied.

    Returns:
        Its memory bandwidth and matmul rate.
    """
    multiply, flops = matmul_loop(width, jnp.bfloat16)
    size = megabytes << 20
    # Not zeros: memory may be compressed.
    x = jax.jit(lambda: (jnp.arange(size // 2, dtype=jnp.int32) % 251).astype(jnp.bfloat16))()
    # Each sum takes the result of the one before, so that XLA can leave none of them out.
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    jax.block_until_ready(add(x + 0))  # compiles
    products, copies = [], []
    for _ in range(REPEATS):
        products.append(timed(multiply)[1])
        y = jax.block_until_ready(x + 0)
        began = time.perf_counter()
        for _ in range(COPIES):
            y = add(y)
        jax.block_until_ready(y)
        copies.append(time.perf_counter() - began)
    return Roofline(2.0 * size * COPIES / min(copies), flops / min(products))


def matmul_loop(width: int, dtype: DTypeLike) -> tuple[Callable[[], None], float]:
    """Products of large square matrices, the most arithmetic that a device does in a second.

    Args:
        width: Rows and columns.
        dtype: Of the matrices.

    Returns:
        A function, compiled already, that multiplies and waits, and the FLOPs of one call.
    """
    w = jax.random.normal(jax.random.key(0), (width, width), dtype) * width**-0.5
    # Each product takes the result of the one before, so that XLA can leave none of them out.
    multiply = jax.jit(lambda x: functools.reduce(lambda x, _: x @ w, range(PRODUCTS), x))
    jax.block_until_ready(multiply(w))

    def run() -> None:
        jax.block_until_ready(multiply(w))

    return run, 2.0 * width**3 * PRODUCTS


# --- answers of a fixed length


def endless(lm: LM) -> LM:
    """The same model, which never emits the end of text, so that every answer has `max_tokens` tokens."""
    c = lm.corruption
    return dataclasses.replace(lm, corruption=c._replace(forbidden=(*c.forbidden, lm.model.config.eos)))


def prompt_ids(lm: LM, batch: int, shorter: int = 0) -> list[list[int]]:
    """Prompts of one block minus `shorter` tokens each, so that one forward pass encodes them.

    Args:
        lm: The model.
        batch: How many prompts.
        shorter: Tokens by which they are shorter than a block.

    Returns:
        The same ids `batch` times.
    """
    ids = lm.tokenizer.encode(TEXT * 8)
    size = max(min(lm.model.config.block, len(ids)) - shorter, 1)
    return [ids[:size] for _ in range(batch)]
