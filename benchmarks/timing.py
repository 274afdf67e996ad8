"""Two calls timed in alternation, the statistics of their times, and prompts of a fixed length."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from mercury_jax.bench.timing import timed
from mercury_jax.types import LM

TEXT = "def area(r):\n    return 3.14159 * r * r\n\n\ndef total(values):\n    return sum(values)\n\n\n"


def alternate(
    first: Callable[[], object], other: Callable[[], object], pairs: int
) -> list[tuple[float, float]]:
    """Times two calls in pairs, alternating which of them runs first.

    On a shared machine both calls of a pair see the same load, so their ratio varies less than either time.

    Args:
        first, other: Functions without arguments that wait for their results.
        pairs: Number of pairs.

    Returns:
        (seconds of `first`, seconds of `other`) for each pair.
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
    """Returns the median of first / other over the pairs of `alternate`."""
    return statistics.median(a / max(b, 1e-12) for a, b in pairs)


def quartiles(values: Sequence[float]) -> list[float]:
    """Returns the first and third quartile; a single value twice."""
    if len(values) < 2:
        return [*values, *values]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [low, high]


def prompt_ids(lm: LM, batch: int, shorter: int = 0) -> list[list[int]]:
    """Makes equal prompts of up to one block, which a single forward pass encodes.

    Args:
        lm: The model.
        batch: Number of prompts.
        shorter: Number of tokens by which a prompt is shorter than a block.

    Returns:
        The same ids `batch` times.
    """
    ids = lm.tokenizer.encode(TEXT * 8)
    size = max(min(lm.model.config.block, len(ids)) - shorter, 1)
    return [ids[:size] for _ in range(batch)]
