"""Walking the keys gives what attention over all of them gives, and stops where nobody looks further."""

import functools

import jax
import numpy as np
import pytest

from mercury_jax.kernels import attend
from mercury_jax.kernels.walk import CHUNK

B, T, H, G, K = 2, 5, 4, 2, 8
run, plain = (jax.jit(functools.partial(attend, backend=name)) for name in ("walk", "reference"))


def inputs(slots: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(slots)
    q, k, v = (rng.normal(size=s).astype(np.float32) for s in [(B, T, H, K), *[(B, slots, G, K)] * 2])
    ends = np.sort(rng.integers(0, slots + 1, (B, T, 4)), axis=-1)
    return 3 * q, k, v, ends.reshape(B, T, 2, 2).astype(np.int32)


@pytest.mark.parametrize("slots", [4 * CHUNK + 1, 5 * CHUNK + 13, 7 * CHUNK])
def test_it_gives_what_attention_gives(slots):
    q, k, v, ranges = inputs(slots)
    ranges[0, 1] = 0  # a row that sees nothing
    ranges[1] = np.where(ranges[1] > 0, ranges[1], 1)
    np.testing.assert_allclose(run(q, k, v, ranges), plain(q, k, v, ranges), atol=2e-6)
    assert not np.asarray(run(q, k, v, ranges))[0, 1].any()


def test_nothing_outside_of_the_ranges_is_read():
    q, k, v, _ = inputs(6 * CHUNK)
    ranges = np.zeros((B, T, 2, 2), np.int32)
    ranges[..., 0, :] = CHUNK + 3, 2 * CHUNK - 1
    spoiled = [x.copy() for x in (k, v)]
    for x in spoiled:  # whole chunks that no row looks at; within a chunk a NaN would be multiplied by 0
        x[:, :CHUNK] = x[:, 2 * CHUNK :] = np.nan
    np.testing.assert_array_equal(run(q, *spoiled, ranges), run(q, k, v, ranges))


def test_a_row_does_not_depend_on_how_far_its_neighbour_looks():
    q, k, v, ranges = inputs(6 * CHUNK)
    near = ranges.copy()
    near[0] = ranges[0] // 4
    far = near.copy()
    far[1] = 0, 6 * CHUNK
    np.testing.assert_array_equal(run(q, k, v, near)[0], run(q, k, v, far)[0])
