"""What a device can do at most, measured: bytes a second through its memory, products a second."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mercury_jax.bench.timing import timed

REPEATS = 5


class Ceilings(NamedTuple):
    """bandwidth: bytes a second, read and written. matmul: FLOP a second of large products in bf16."""

    bandwidth: float
    matmul: float

    def bound(self, bytes: float, flops: float) -> float:
        """Seconds that so much work takes at least: whichever of the two takes longer."""
        return max(bytes / self.bandwidth, flops / self.matmul)


def ceilings(megabytes: int = 2048, width: int = 8192) -> Ceilings:
    """Of the first device. megabytes: of the array that is copied; width: of the square matrices."""
    return Ceilings(_bandwidth(megabytes << 20), _matmul(width))


def per_call(call: Callable[[Any], Any], start: Any, calls: int = 16, repeats: int = REPEATS) -> float:
    """Seconds of call(x), which gives something like x: so many in one program, each on what the one before gave.

    The fastest of `repeats` such programs: what else a device does only adds.
    """

    def chain(x: Any) -> Any:
        for _ in range(calls):
            x = call(x)
        return x

    program = jax.jit(chain)
    run = lambda: jax.block_until_ready(program(start))
    run()
    return min(timed(run)[1] for _ in range(repeats)) / calls


def _bandwidth(size: int) -> float:
    """Of adding 1 to every number: each is read and written."""
    x = jax.jit(lambda: (jnp.arange(size // 2, dtype=jnp.int32) % 251).astype(jnp.bfloat16))()  # never zeros
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    jax.block_until_ready(step(x + 0))

    def turn(calls: int = 8) -> Any:
        y = x + 0
        jax.block_until_ready(y)
        seconds = timed(functools.partial(_steps, step, y, calls))[1]
        return seconds / calls

    return 2.0 * size / min(turn() for _ in range(REPEATS))


def _steps(step: Callable[[Any], Any], x: Any, calls: int) -> Any:
    for _ in range(calls):
        x = step(x)
    return jax.block_until_ready(x)


def _matmul(width: int) -> float:
    w = jax.random.normal(jax.random.key(0), (width, width), jnp.bfloat16) * width**-0.5
    return 2.0 * width**3 / per_call(lambda x: x @ w, w, calls=4)
