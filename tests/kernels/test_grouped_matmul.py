"""The grouped product, interpreted on a CPU: each row times its own expert's matrix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mercury_jax.kernels import grouped_matmul
from mercury_jax.kernels.device import target
from mercury_jax.kernels.grouped_matmul import tiles_of
from mercury_jax.kernels.interpreter import interpreted
from tests.marks import slow_except


def wide(x):
    return np.asarray(x, np.float32)


def drawn(sizes, inputs, outputs, small=None):
    """Rows, matrices, scales (of 8-bit ones only); all numbers of about one size."""
    rng = np.random.default_rng(len(sizes) + sum(sizes))
    x = jnp.asarray(rng.normal(size=(sum(sizes), inputs)), jnp.bfloat16)
    if not small:
        return (
            x,
            jnp.asarray(rng.normal(size=(len(sizes), inputs, outputs)) * inputs**-0.5, jnp.bfloat16),
            None,
        )
    w = jnp.asarray(rng.integers(-127, 128, size=(len(sizes), inputs, outputs)), small)
    return x, w, jnp.asarray(rng.uniform(0.5, 2.0, (len(sizes), outputs)) / 100, jnp.float32)


def plain(x, w, sizes, scale=None):
    owner = np.repeat(np.arange(len(sizes)), sizes)
    full = wide(w) if scale is None else wide(w) * wide(scale)[:, None]
    return np.einsum("mi,mio->mo", wide(x), full[owner]), full[owner], owner


def run(x, w, sizes, scale=None, dtype=None, dy=None):
    """y by the interpreted kernel, and with a cotangent the gradients of x and w."""

    def both(x, w, dy):
        product = lambda x, w: grouped_matmul.grouped_matmul(
            x, w, jnp.asarray(sizes), scale, dtype, device=interpreted()
        )
        y, back = jax.vjp(product, x, w)
        return (y,) if dy is None else (y, *back(dy))

    return jax.jit(both)(x, w, dy)


def close(got, want, tolerance=1e-2):
    np.testing.assert_allclose(wide(got), want, atol=tolerance * np.abs(want).max())


CASES = {
    "uneven, one empty": ((13, 0, 20), 128, 64, None, None),
    "one has everything": ((0, 34), 64, 64, None, None),
    "fewer rows than a tile": ((2, 3), 64, 64, None, None),
    "blocks of 128 outputs, in fp32": ((5, 12), 64, 256, None, jnp.float32),
    "int8": ((13, 0, 20), 128, 64, jnp.int8, None),
    "fp8, blocks of 128": ((5, 12), 64, 128, jnp.float8_e4m3fn, None),
    "starts at 0 to 7 above a multiple of 8": ((11,) * 8, 64, 64, None, None),
}


@pytest.mark.parametrize("name", CASES)
def test_each_row_is_multiplied_by_its_own_experts_matrix(name):
    sizes, inputs, outputs, small, dtype = CASES[name]
    x, w, scale = drawn(sizes, inputs, outputs, small)
    (y,) = run(x, w, sizes, scale, dtype)
    assert y.dtype == (dtype or x.dtype)
    # Also that all is written: what the interpreter gives a kernel to write is NaN. fp32 sums are exact to fp32.
    close(y, plain(x, w, sizes, scale)[0], 1e-5 if dtype == jnp.float32 else 1e-2)


def test_nan_in_unused_rows_does_not_spread():
    sizes = (13, 0, 7, 13)
    x, w, _ = drawn(sizes, 64, 64)
    theirs = np.repeat(np.arange(4), sizes) == 2
    poisoned = jnp.where(theirs[:, None], jnp.nan, x)
    (y,) = run(poisoned, w.at[1].set(jnp.nan), sizes)
    close(y[~theirs], plain(x, w, sizes)[0][~theirs])
    assert np.isnan(wide(y)[theirs]).all()


@pytest.mark.parametrize("small", [None, jnp.int8])
def test_gradients_equal_those_of_the_plain_product(small):
    sizes = (13, 0, 20)
    x, w, scale = drawn(sizes, 64, 128, small)
    dy = jnp.asarray(np.random.default_rng(1).normal(size=(33, 128)), jnp.bfloat16)
    _, dx, dw = run(x, w, sizes, scale, None, dy)
    _, full, owner = plain(x, w, sizes, scale)
    close(dx, np.einsum("mo,mio->mi", wide(dy), full))
    if small is None:
        each = np.einsum("mi,mo->mio", wide(x), wide(dy))
        close(dw, np.stack([each[owner == e].sum(0) for e in range(3)]))


def test_the_grouped_kernel_names_what_it_refuses():
    x, w, _ = drawn((2, 3), 64, 64)
    narrow = jnp.zeros((2, 64, 40), jnp.bfloat16)
    assert "sm_90a" in str(grouped_matmul.refuses(x, w))
    assert "sm_100a does not have" in str(grouped_matmul.refuses(x, w, device=target("sm_100a")))
    hopper = target("sm_90a")
    assert grouped_matmul.refuses(x, w, device=hopper) is None
    assert "rows are float32" in str(grouped_matmul.refuses(wide(x), w, device=hopper))
    assert "scale" in str(grouped_matmul.refuses(x, w.astype(jnp.int8), device=hopper))
    with pytest.raises(ValueError, match="64 by 40"):
        grouped_matmul.grouped_matmul(x, narrow, jnp.asarray([2, 3]), device=hopper)
    with pytest.raises(ValueError, match="sm_90a, sm_100a"):
        target("h200")


def test_tile_sizes_are_multiples_of_8():
    x, w, _ = drawn((2, 3), 64, 64)
    with pytest.raises(ValueError, match="12 rows, no multiple of 8 up to 128"):
        grouped_matmul.grouped_matmul(x, w, jnp.asarray([2, 3]), tile=12, device=target("sm_90a"))


@pytest.mark.parametrize("tile", [16, 48])
def test_tiles_cover_every_row_once_and_stay_within_their_expert(tile):
    sizes = np.array([0, 50, 16, 0, 97, 1])
    p = tiles_of(jnp.asarray(sizes), int(sizes.sum()), tile)
    covered = np.concatenate(
        [np.arange(s, min(s + tile, e)) for s, e in zip(p.start[: p.count], p.end[: p.count])]
    )
    np.testing.assert_array_equal(covered, np.arange(sizes.sum()))
    owner = np.repeat(np.arange(len(sizes)), sizes)
    np.testing.assert_array_equal(owner[np.asarray(p.start[: p.count])], p.expert[: p.count])


SIZES = {
    "uneven": (0, 50, 16, 0, 97, 1),
    "one row each": (1,) * 40,
    "as many tiles as can be": (
        7,
        10,
        14,
        10,
        14,
        10,
        14,
        10,
    ),  # 16 rows hold 9 of a tile that starts 7 rows early
    "all in the last": (0, 0, 0, 200),
    "fewer rows than there is room for": (3, 9, 0, 5),
}


@pytest.mark.parametrize("tile", slow_except([8, 16, 128], 16))
@pytest.mark.parametrize("name", SIZES)
def test_visits_start_at_multiples_of_8_and_write_every_row_once(name, tile):
    sizes = np.array(SIZES[name])
    rows = int(sizes.sum()) + (20 if name.startswith("fewer") else 0)
    room = max(-(-rows // 8) * 8, tile)
    expert, first, low, high = np.asarray(grouped_matmul._visits(jnp.asarray(sizes), rows, tile, room))
    assert not (first % 8).any() and (first + tile <= room).all() and (first >= 0).all()
    written = [np.arange(a, b) for a, b in zip(low, high)]
    np.testing.assert_array_equal(np.concatenate(written), np.arange(sizes.sum()))
    owner = np.repeat(np.arange(len(sizes)), sizes)
    for e, at, each in zip(expert, first, written):
        assert (owner[each] == e).all() and ((each >= at) & (each < at + tile)).all()
