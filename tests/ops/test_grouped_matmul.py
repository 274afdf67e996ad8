"""The grouped product, its kernel interpreted on a CPU: each row times its own expert's matrix."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mercury_jax.bench.gpu.interpreter import interpreted
from mercury_jax.models.weight_quant import quantise_rows
from mercury_jax.ops.device import target
from mercury_jax.ops.experts import grouped_matmul
from mercury_jax.ops.experts.grouped_matmul import offsets_of, tiles_of
from mercury_jax.ops.tuned import GroupedKnobs
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
    w = jnp.asarray(rng.integers(-127, 128, size=(len(sizes), outputs, inputs)), small)
    return x, w, jnp.asarray(rng.uniform(0.5, 2.0, (len(sizes), outputs)) / 100, jnp.float32)


def plain(x, w, sizes, scale=None):
    owner = np.repeat(np.arange(len(sizes)), sizes)
    full = wide(w) if scale is None else wide(w).swapaxes(1, 2) * wide(scale)[:, None]
    return np.einsum("mi,mio->mo", wide(x), full[owner]), full[owner], owner


def run(x, w, sizes, scale=None, dtype=None, dy=None):
    """y by the interpreted kernel, and with a cotangent the gradients of x and w."""

    def both(x, w, dy):
        product = lambda x, w: grouped_matmul.grouped_matmul(
            x, w, offsets_of(sizes), scale, dtype=dtype, device=interpreted()
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


@pytest.mark.long
@pytest.mark.quick_cases(6)
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


@pytest.mark.long
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


def test_tile_sizes_are_multiples_of_8():
    x, w, _ = drawn((2, 3), 64, 64)
    with pytest.raises(ValueError, match="12 rows, no multiple of 8 up to 128"):
        grouped_matmul.grouped_matmul(
            x, w, offsets_of([2, 3]), knobs=GroupedKnobs(12, 1, 64, 2), device=target("sm_90a")
        )


@pytest.mark.parametrize("tile", [16, 48])
def test_tiles_cover_every_row_once_and_stay_within_their_expert(tile):
    sizes = np.array([0, 50, 16, 0, 97, 1])
    p = tiles_of(offsets_of(sizes), int(sizes.sum()), tile)
    covered = np.concatenate(
        [np.arange(s, min(s + tile, e)) for s, e in zip(p.start[: p.count], p.end[: p.count])]
    )
    np.testing.assert_array_equal(covered, np.arange(sizes.sum()))
    owner = np.repeat(np.arange(len(sizes)), sizes)
    np.testing.assert_array_equal(owner[np.asarray(p.start[: p.count])], p.expert[: p.count])


def test_a_tile_far_into_an_experts_rows_is_multiplied():
    """Tiles of one expert follow each other in one program, or run side by side; every row is written."""
    sizes = (7, 60, 0, 1)
    x, w, _ = drawn(sizes, 64, 64)
    run = jax.jit(
        lambda: grouped_matmul.grouped_matmul(
            x, w, offsets_of(sizes), knobs=GroupedKnobs(8, 1, 64, 4), device=interpreted()
        )
    )
    close(run(), plain(x, w, sizes)[0])


GATED = {
    "bf16": (None, jax.nn.silu),
    "int8": (jnp.int8, jax.nn.gelu),
    "fp8": (jnp.float8_e4m3fn, jax.nn.silu),
}


@pytest.mark.long
@pytest.mark.parametrize("name", GATED)
def test_the_gate_is_applied_to_the_products(name):
    small, act = GATED[name]
    sizes = (13, 0, 20)
    x, w, scale = drawn(sizes, 64, 128, small)
    y = plain(x, w, sizes, scale)[0]
    run = jax.jit(
        lambda: grouped_matmul.grouped_matmul(
            x, w, offsets_of(sizes), scale, act=act, dtype=jnp.float32, device=interpreted()
        )
    )
    close(run(), act(y[:, :64]) * y[:, 64:], 1e-5)


@pytest.mark.long
@pytest.mark.parametrize("small", slow_except([None, jnp.int8], None))
def test_gradients_of_a_gated_product_equal_those_of_the_plain_one(small):
    sizes = (9, 0, 8)
    x, w, scale = drawn(sizes, 64, 128, small)
    dy = jnp.asarray(np.random.default_rng(1).normal(size=(17, 64)), jnp.bfloat16)
    _, full, owner = plain(x, w, sizes, scale)

    def exact(x, full):
        y = jnp.einsum("mi,mio->mo", x, full[owner] if full.ndim == 3 and len(full) == 3 else full)
        return jax.nn.silu(y[:, :64]) * y[:, 64:]

    def ours(x):
        return grouped_matmul.grouped_matmul(
            x, w, offsets_of(sizes), scale, act=jax.nn.silu, device=interpreted()
        )

    (dx,) = jax.jit(lambda x, dy: jax.vjp(ours, x)[1](dy))(x, dy)
    _, back = jax.vjp(lambda x: exact(x, jnp.asarray(full)), jnp.asarray(wide(x)))
    close(dx, wide(back(jnp.asarray(wide(dy)))[0]), 2e-2)


@pytest.mark.long
@pytest.mark.parametrize(
    "rows, gated, kind",
    slow_except(itertools.product([5, 200], [False, True], [jnp.int8, None]), (200, False, jnp.int8),
                (200, True, None)),
)  # fmt: skip
def test_a_dense_product_of_few_rows_is_one_of_one_expert(rows, gated, kind):
    x, w, scale = drawn((rows,), 128, 128, kind)
    y = plain(x, w, (rows,), scale)[0]
    halves = lambda a, axis: None if a is None else tuple(jnp.split(a, 2, axis)) if gated else a
    act, outputs = jax.nn.gelu if gated else None, 2 if kind is None else 1
    run = lambda x: grouped_matmul.grouped_matmul(
        x, halves(w, outputs), offsets_of([rows]), halves(scale, 1), act=act, device=interpreted()
    )
    ours = jax.jit(run)(x)
    close(ours, jax.nn.gelu(y[:, :64]) * y[:, 64:] if gated else y)


def test_a_narrow_product_in_16_bits_has_sums_in_fp32():
    x, w, _ = drawn((37,), 128, 64)
    run = functools.partial(grouped_matmul.grouped_matmul, dtype=jnp.float32, device=interpreted())
    ours = jax.jit(lambda: run(x, w, offsets_of([37])))()
    close(ours, plain(x, w, (37,))[0], 1e-5)


def test_a_product_of_few_rows_has_work_for_all_processors():
    """DiffusionGemma's products of a canvas: 132 pieces on 132 processors, where tiles of 128 rows make 44 or 66."""
    tile = grouped_matmul.few_rows_tile
    assert (tile(256, 2816, 1), tile(256, 2112, 1, gated=True)) == (48, 64)
    assert tile(256, 12288, 1) == 128  # more pieces than processors anyway
    assert tile(5, 64, 1) == 8


@pytest.mark.parametrize("kind", [jnp.int8, jnp.float8_e4m3fn])
@pytest.mark.parametrize("gated", [False, True])
def test_rows_of_8_bits_are_multiplied_as_what_they_stand_for(kind, gated):
    sizes = (13, 0, 20)
    x, w, scale = drawn(sizes, 192, 128, kind)
    rows = quantise_rows(x, kind)
    act = jax.nn.silu if gated else None
    run = jax.jit(
        lambda: grouped_matmul.grouped_matmul(
            rows.values, w, offsets_of(sizes), scale, row_scale=rows.scale, act=act, dtype=jnp.float32,
            device=interpreted(),
        )
    )  # fmt: skip
    y = plain(wide(rows.values) * wide(rows.scale)[:, None], w, sizes, scale)[0]
    want = jax.nn.silu(y[:, :64]) * y[:, 64:] if gated else y
    close(run(), want, 1e-5)


def test_a_gradient_through_rows_of_8_bits_is_refused_by_name():
    x, w, scale = drawn((2, 3), 64, 64, jnp.int8)
    rows = quantise_rows(x, jnp.int8)

    def total(row_scale):
        how = dict(row_scale=row_scale, device=target("sm_90a"))
        return grouped_matmul.grouped_matmul(rows.values, w, offsets_of([2, 3]), scale, **how).sum()

    with pytest.raises(ValueError, match="quantise is .*int8_dynamic or fp8_dynamic"):
        jax.eval_shape(jax.grad(total), rows.scale)


TOGETHER = {
    "bf16, gated": (None, None, jax.nn.silu),
    "int8": (jnp.int8, None, None),
    "rows of fp8, gated": (jnp.float8_e4m3fn, jnp.float8_e4m3fn, jax.nn.gelu),
}


@pytest.mark.long
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", TOGETHER)
def test_products_in_one_launch_are_what_they_are_alone(name):
    """A dense product of few rows beside that of experts: of other sizes, and in other tiles."""
    kind, small, act = TOGETHER[name]
    first, second = ((70,), 128, 256), ((13, 0, 20), 256, 128)

    def prepare(sizes, inputs, outputs, tile):
        x, w, scale = drawn(sizes, inputs, outputs, kind)
        rows = (x, None) if small is None else quantise_rows(x, small)
        how = dict(row_scale=rows[1], act=act, dtype=jnp.float32, device=interpreted())
        how["knobs"] = GroupedKnobs(tile, 2, 64, 3)
        return grouped_matmul.prepare(rows[0], w, offsets_of(sizes), scale, **how)

    products = lambda: (prepare(*first, 64), prepare(*second, 32))
    together = jax.jit(lambda: grouped_matmul.grouped_matmuls(*products()))
    assert str(jax.make_jaxpr(together)()).count("name=grouped") == 1
    alone = jax.jit(lambda: [grouped_matmul.grouped_matmuls(p)[0] for p in products()])
    for got, want in zip(together(), alone(), strict=True):
        np.testing.assert_array_equal(got, want)


def test_joined_products_are_columns_of_one_array_also_for_their_gradients():
    (x, first, _), (_, second, _) = drawn((20,), 64, 128), drawn((20,), 64, 256)
    dy = jnp.asarray(np.random.default_rng(1).normal(size=(20, 384)), jnp.bfloat16)

    def joined(x):
        prepare = functools.partial(grouped_matmul.prepare, offsets=offsets_of([20]), device=interpreted())
        return grouped_matmul.grouped_matmuls(prepare(x, first), prepare(x, second), joined=True)[0]

    y, back = jax.jit(lambda x: (joined(x), jax.vjp(joined, x)[1](dy)[0]))(x)
    both = np.concatenate([wide(first[0]), wide(second[0])], axis=1)
    close(y, wide(x) @ both)
    close(back, wide(dy) @ both.T)


def test_products_that_are_not_alike_are_launched_alone():
    x, w, _ = drawn((5,), 64, 64)
    _, other, scale = drawn((5,), 64, 64, jnp.int8)
    prepare = lambda *args: grouped_matmul.prepare(x, *args, device=target("sm_90a"))
    offsets = offsets_of([5])
    both = lambda: grouped_matmul.grouped_matmuls(prepare(w, offsets), prepare(other, offsets, scale))
    assert str(jax.make_jaxpr(both)()).count("name=grouped") == 2
