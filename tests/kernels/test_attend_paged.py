"""`attend_paged` equals the reference over the same keys in one array, with pages gathered or read in place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mercury_jax.kernels import device as kernel_device, reference
from mercury_jax.kernels.attention import attend_paged
from mercury_jax.kernels.attention_inputs import AttentionCall, Int8Vectors, dequantise, quantise_int8
from mercury_jax.kernels.hopper import attention
from mercury_jax.kernels.interpreter import interpreted
from tests.marks import slow_except


def case(t, h, g, width, page, dtype, r=2, seed=0):
    """Two rows of four pages each: (q, k, v in one piece, the pool's k and v, pages, ranges).

    Both rows have the same first page, in a pool of shuffled pages. Two of each lie in no range, in row 0 one of them
    between two ranges: they are NaN in the pool, or are none of its pages. The last query sees nothing.
    """
    rng = np.random.default_rng(seed)
    q, k, v = (
        rng.normal(size=(2, n, m, width)).astype(np.float32)
        for n, m in ((t, h), (4 * page, g), (4 * page, g))
    )
    ids = rng.permutation(6)
    pages = np.array([[ids[0], 10**6, ids[1], -3], [ids[0], *ids[2:5]]], np.int32)
    pool = np.full((2, 6, page, g, width), np.nan, np.float32)
    for n, (b, at) in enumerate([(0, 0), (0, 2), (1, 1)]):
        for into, x in zip(pool, (k, v), strict=True):
            into[ids[n]] = x[b, at * page : (at + 1) * page]
    for x in (k, v):
        x[1, :page] = x[0, :page]
        x[0, page : 2 * page] = x[:, 3 * page :] = x[1, 2 * page :] = 0
    ranges = np.zeros((2, t, r, 2), np.int32)
    ranges[:, :, 0] = [[[1, page - 2]], [[page // 3, page - 2]]]
    grown = 1 + np.arange(t) % page  # from query to query
    ranges[0, :, r - 1] = np.stack([0 * grown, grown], axis=-1) + 2 * page
    ranges[1, :, r - 1] = np.stack([0 * grown - 1, grown], axis=-1) + page
    ranges[:, -1] = 0
    return *(jnp.asarray(x, dtype) for x in (q, k, v, *pool)), jnp.asarray(pages), jnp.asarray(ranges)


def check(got, q, k, v, ranges, scale, softcap, tolerance):
    wide = (x.astype(jnp.float32) for x in (q, k, v))
    want, told = reference.run(AttentionCall(*wide, ranges, scale, softcap, residual=True))
    out, nats = (np.asarray(x, np.float32) for x in got)
    assert got[0].dtype == q.dtype and not out[:, -1].any() and np.isneginf(nats[:, -1]).all()
    assert np.abs(out - want).max() <= tolerance * np.abs(want).max()
    np.testing.assert_allclose(nats, told, atol=tolerance)


# On a CPU `attend` takes few slots at once, and walks many.
@pytest.mark.long
@pytest.mark.parametrize(
    "page, int8", slow_except([(5, False), (5, True), (100, False)], (5, False), (5, True))
)
def test_gathered_pages_equal_contiguous_keys(page, int8):
    q, k, v, pool_k, pool_v, pages, ranges = case(4, 4, 2, 8, page, jnp.float32)
    if int8:
        k, v, pool_k, pool_v = (
            quantise_int8(x) for x in (k, v, pool_k, pool_v)
        )  # of NaN: a scale that is NaN
        k, v = dequantise(k, q.dtype), dequantise(v, q.dtype)
    got = attend_paged(q, pool_k, pool_v, pages, ranges, softcap=3.0, residual=True)
    check(got, q, k, v, ranges, 8**-0.5, 3.0, 1e-5)
    alone = attend_paged(q, pool_k, pool_v, pages, ranges, softcap=3.0, backend="reference")
    np.testing.assert_allclose(alone, got[0], atol=1e-5)


CASES = {  # first row; T, H, G, K, page, dtype, ranges; scale, softcap, int8, processors (few: no split)
    "two tiles a page, both rows, capped, split": (0, 2, 2, 1, 256, 128, jnp.float16, 3, 0.1, 2.0, False, 4),
    "head size 512": (1, 2, 2, 1, 512, 128, jnp.bfloat16, 2, 0.044, None, False, 1),
    "int8, two key heads": (1, 2, 2, 2, 64, 128, jnp.bfloat16, 2, 0.2, None, True, 1),
}


@pytest.mark.parametrize("name", slow_except(CASES))
def test_the_hopper_kernel_reads_pages_in_place(name, monkeypatch):
    first, *shape, scale, softcap, int8, processors = CASES[name]
    monkeypatch.setattr(attention, "PROCESSORS", processors)
    q, k, v, pool_k, pool_v, pages, ranges = case(*shape)
    q, k, v, pages, ranges = (x[first:] for x in (q, k, v, pages, ranges))
    if int8:
        k, v = (dequantise(quantise_int8(x), q.dtype) for x in (k, v))
        pool_k, pool_v = (quantise_int8(x) for x in (pool_k, pool_v))
    more = dict(scale=scale, softcap=softcap, residual=True, backend="hopper", device=interpreted())
    got = jax.jit(lambda *xs: attend_paged(*xs, **more))(q, pool_k, pool_v, pages, ranges)
    check(got, q, k, v, ranges, scale, softcap, 1e-2)


def shapes(page=128, width=128, int8=False, rows=3):
    """q, k, v, pages and ranges of 3 rows with 7 pages each, without contents."""
    shape = jax.ShapeDtypeStruct
    k = shape((50, page, 2, width), jnp.bfloat16)
    k = jax.eval_shape(quantise_int8, k) if int8 else k
    q = shape((3, 40, 4, width), jnp.bfloat16)
    return q, k, k, shape((rows, 7), jnp.int32), shape((3, 40, 2, 2), jnp.int32)


@pytest.mark.long
@pytest.mark.parametrize("page, int8, copied", [(128, True, False), (48, False, True)])
def test_hopper_gathers_only_pages_of_unsupported_sizes(page, int8, copied):
    hopper = kernel_device.target(kernel_device.HOPPER)
    traced = jax.jit(lambda *xs: attend_paged(*xs, device=hopper)).trace(*shapes(page, int8=int8))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
    assert (f"tensor<3x{7 * page}x2x128x" in text) == copied


def test_refused_pages_are_named_in_the_error():
    def told(*args, **more):
        with pytest.raises((ValueError, TypeError)) as refused:  # under --jaxtyping the type may refuse first
            jax.eval_shape(lambda *xs: attend_paged(*xs, **more), *args)
        return str(refused.value)

    assert "no Hopper" in told(*shapes(), backend="hopper")
    hopper = dict(backend="hopper", device=kernel_device.target(kernel_device.HOPPER))
    assert "pages of 64 slots" in told(*shapes(64), **hopper)
    assert "pages of 96 slots" in told(*shapes(96, width=256), **hopper)
    assert "int8" in told(*shapes(width=512, int8=True), **hopper)
    q, k, v, pages, ranges = shapes()
    assert "pages" in told(*shapes(rows=2))
    assert "pages" in told(q, k, v, jax.ShapeDtypeStruct((3, 7), jnp.float32), ranges)
    assert "ranges" in told(q, k, v, pages, jax.ShapeDtypeStruct((3, 39, 2, 2), jnp.int32))
    assert "v" in told(q, k, shapes(64)[1], pages, ranges)
    assert "3 heads" in told(jax.ShapeDtypeStruct((3, 40, 3, 128), jnp.bfloat16), k, v, pages, ranges)
    short = Int8Vectors(
        jax.eval_shape(quantise_int8, k).values, jax.ShapeDtypeStruct((50, 128, 1), jnp.float32)
    )
    assert "scale" in told(q, short, short, pages, ranges)
