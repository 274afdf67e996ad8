"""The residual sum with its norms, interpreted on a CPU: it is what the plain computation gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mercury_jax.kernels.device import target
from mercury_jax.kernels.fused_norms import Residual, kernel_residual_norms, refuses_residual
from mercury_jax.kernels.interpreter import interpreted
from mercury_jax.kernels.quantised_rows import kernel_quantise_rows, quantise_rows
from mercury_jax.kernels.routing import ExpertOutputs, combine
from mercury_jax.models.norms import residual_norms


def drawn(width, case, dtype=jnp.float32):
    rng = np.random.default_rng(width)
    factor = lambda: jnp.asarray(1 + 0.3 * rng.normal(size=width), dtype)
    x, y, z = (jnp.asarray(rng.normal(size=(2, 3, width)) * size, jnp.bfloat16) for size in (1.0, 5.0, 2.0))
    scale = lambda size: jnp.full((1,), size, dtype)
    rank, weights = rng.permutation(6 * 4)[:18].reshape(2, 3, 3), rng.uniform(0.1, 1.0, (2, 3, 3))
    rows = jnp.asarray(rng.normal(size=(6 * 4, width)) * 3, jnp.bfloat16)
    outputs = ExpertOutputs(rows, jnp.asarray(rank, jnp.int32), jnp.asarray(weights, jnp.float32))
    residual = {
        "a sum": lambda: Residual((y,), (None,)),
        "a norm": lambda: Residual((y,), (factor(),)),
        "two branches": lambda: Residual((y, z), (factor(), factor()), factor(), (scale(0.7),)),
        "outputs of experts": lambda: Residual((y, outputs), (factor(), factor()), factor(), (scale(0.7),)),
        "two scales": lambda: Residual(
            (y,), (factor(),), None, (scale(0.7), scale(1.9)), jnp.asarray([[1, 0, 1], [0, 0, 1]], bool)
        ),
    }[case]()
    return x, residual, [factor(), factor(), factor()]


@pytest.mark.long
@pytest.mark.parametrize("case", ["a sum", "a norm", "two branches", "outputs of experts", "two scales"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_kernel_equals_the_plain_computation(case, dtype):
    args = drawn(512, case, dtype)
    want_sum, want = residual_norms(*args, 1e-6)
    total, found = jax.jit(lambda: kernel_residual_norms(residual_norms, *args, 1e-6, device=interpreted()))()
    # The sums of squares are added in another order: a few numbers round to a neighbour.
    for a, b in zip(jax.tree.leaves((total, found)), jax.tree.leaves((want_sum, want)), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, rtol=2**-6, atol=1e-2)
        assert (a == b).mean() > 0.97


def rounded_alike(got, want):
    """Equal, but for a number half-way between two: a division that is compiled may round its quotient otherwise."""
    np.testing.assert_allclose(got.scale, want.scale, rtol=1e-6)
    assert got.values.dtype == want.values.dtype
    a, b = (np.asarray(y.values, np.float32) for y in (got, want))
    np.testing.assert_allclose(a, b, rtol=1 / 8, atol=1)
    assert (a == b).mean() > 0.995


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
def test_rows_are_rounded_as_the_plain_computation_rounds_the_norm(dtype):
    x, residual, factors = drawn(256, "a norm")
    run = lambda rounded: kernel_residual_norms(
        residual_norms, x, residual, factors, 1e-6, interpreted(), rounded
    )
    total, found = jax.jit(lambda: run((dtype, None, dtype)))()
    same, norms = jax.jit(lambda: run(()))()
    np.testing.assert_array_equal(total, same)
    np.testing.assert_array_equal(found[1], norms[1])
    for got, norm in ((found[0], norms[0]), (found[2], norms[2])):
        rounded_alike(got, quantise_rows(norm, dtype))
    with pytest.raises(ValueError, match="quantise is .*dynamic"):
        jax.eval_shape(
            jax.grad(
                lambda x: kernel_residual_norms(
                    residual_norms, x, residual, [], 1e-6, interpreted(), (dtype,)
                )[0].sum()
            ),
            x,
        )


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(6, 704), (3, 256)], ids=["two rows a program", "one"])
def test_rows_that_no_other_kernel_holds_are_rounded_alike(shape, dtype):
    x = jnp.asarray(
        np.random.default_rng(0).normal(size=shape) * np.resize([1.0, 30.0, 0.0], (shape[0], 1)), jnp.bfloat16
    )
    ours = jax.jit(lambda x: kernel_quantise_rows(x, dtype, interpreted()))
    assert "name=quantise_rows" in str(jax.make_jaxpr(ours)(x))
    rounded_alike(ours(x), quantise_rows(x, dtype))


def test_the_outputs_of_experts_are_summed_as_the_plain_sum_is():
    x, residual, _ = drawn(256, "outputs of experts")
    outputs = residual.branches[1]
    assert isinstance(outputs, ExpertOutputs)
    weights = outputs.weights.at[1, 0].set(jnp.nan)  # as of a token that chose no expert
    outputs = outputs._replace(rows=outputs.rows.at[outputs.rank[0, 2, 1]].set(jnp.nan), weights=weights)
    run = lambda y: kernel_residual_norms(
        residual_norms, 0 * x, Residual((y,), (None,)), [], 1e-6, interpreted()
    )
    total, none = jax.jit(run)(outputs)
    total, want = (np.asarray(y, np.float32) for y in (total, combine(outputs)))
    assert none == []
    np.testing.assert_allclose(total, want, rtol=2**-7, atol=1e-6)
    np.testing.assert_array_equal(np.isnan(total).any(-1), [[False, False, True], [True, False, False]])


@pytest.mark.long
@pytest.mark.parametrize("case", ["two branches", "outputs of experts"])
def test_its_gradient_is_that_of_the_plain_computation(case):
    x, residual, factors = drawn(256, case)

    given = jax.tree.map(lambda a: jnp.sin(jnp.arange(a.size)).reshape(a.shape).astype(a.dtype), (x, [x] * 3))

    def gradient(run):
        back = lambda *args: jax.vjp(lambda *args: run(*args, 1e-6), *args)[1](given)
        return jax.tree.leaves(jax.jit(back)(x, residual, factors))

    ours = gradient(lambda *args: kernel_residual_norms(residual_norms, *args, device=interpreted()))
    for a, b in zip(ours, gradient(residual_norms), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        if a.dtype == jax.dtypes.float0:  # of integers
            continue
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, atol=1e-2 * np.abs(b).max())


def test_the_kernel_names_what_it_refuses():
    x, hopper = jax.ShapeDtypeStruct((4, 2816), jnp.bfloat16), target("sm_90a")
    assert refuses_residual(x, hopper) is None
    assert "sm_90a" in str(refuses_residual(x)) and "sm_90a" in str(refuses_residual(x, target("sm_100a")))
    assert "float32" in str(refuses_residual(jax.ShapeDtypeStruct((4, 2816), jnp.float32), hopper))
    assert "2800" in str(refuses_residual(jax.ShapeDtypeStruct((4, 2800), jnp.bfloat16), hopper))
