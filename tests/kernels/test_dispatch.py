"""Dispatch of tokens to experts, interpreted on a CPU: rows, places and offsets of a stable sort by expert."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mercury_jax.kernels.device import target
from mercury_jax.kernels.interpreter import interpreted
from mercury_jax.kernels.quantised_rows import quantise_rows
from mercury_jax.kernels.routing import (
    COUNTED_ROWS,
    ExpertOutputs,
    combine,
    dispatch,
    kernel_dispatch,
    refuses_dispatch,
)

N, E, K, D = 48, 20, 8, 256
ROUTINGS = {
    "spread": lambda rng, n: np.argsort(rng.random((n, E)), axis=1)[:, :K],
    "all to the same experts": lambda rng, n: np.tile([3, 1, 19, 0, 7, 8, 9, 2], (n, 1)),
    "all to one expert": lambda rng, n: np.full((n, K), 4),
    "empty experts": lambda rng, n: rng.integers(0, 3, (n, K)) * 7 + 1,
    "some experts elsewhere": lambda rng, n: rng.integers(0, E + 1, (n, K)),
    "all experts elsewhere": lambda rng, n: np.full((n, K), E),
    "a token without experts": lambda rng, n: np.where(
        np.arange(n)[:, None] == 2, E, rng.integers(0, E, (n, K))
    ),
}


@pytest.mark.long
@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("tokens", [N, 16], ids=["more tokens than experts", "fewer tokens than experts"])
@pytest.mark.parametrize("name", ROUTINGS)
def test_the_kernel_equals_the_plain_computation(name, tokens):
    rng = np.random.default_rng(tokens)
    x = jnp.asarray(rng.normal(size=(tokens, D)), jnp.bfloat16).at[1, 5].set(jnp.nan)  # NaN stays in its rows
    expert = jnp.asarray(ROUTINGS[name](rng, tokens), jnp.int32)
    found = jax.jit(lambda x, expert: kernel_dispatch(x, expert, E, interpreted()))(x, expert)
    want = dispatch(x, expert, E)
    np.testing.assert_array_equal(found.rank, want.rank)
    np.testing.assert_array_equal(found.offsets[: E + 1], want.offsets[: E + 1])
    np.testing.assert_array_equal(np.asarray(found.rows, np.float32), np.asarray(want.rows, np.float32))
    assert np.isnan(np.asarray(found.rows, np.float32)).sum() == K


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
def test_rounded_rows_are_copied_with_their_scales(dtype):
    rng = np.random.default_rng(0)
    x = quantise_rows(jnp.asarray(rng.normal(size=(16, D)), jnp.bfloat16), dtype)
    expert = jnp.asarray(rng.integers(0, E, (16, K)), jnp.int32)
    found = jax.jit(lambda x, expert: kernel_dispatch(x, expert, E, interpreted()))(x, expert)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(dispatch(x, expert, E)), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got[: len(want)], want)


def test_it_is_differentiable_in_the_hidden_states():
    rng = np.random.default_rng(0)
    x, dy = (jnp.asarray(rng.normal(size=(rows, D)), jnp.bfloat16) for rows in (16, 16 * K))
    expert = jnp.asarray(rng.integers(0, E, (16, K)), jnp.int32)

    def gradient(run):
        return jax.jit(lambda x: jax.vjp(lambda x: run(x, expert, E).rows, x)[1](dy)[0])(x)

    ours = gradient(lambda *args: kernel_dispatch(*args, interpreted()))
    np.testing.assert_allclose(*(np.asarray(a, np.float32) for a in (ours, gradient(dispatch))), atol=0.1)


def test_rows_that_were_not_computed_add_nothing():
    rows = jnp.asarray([[1.0, 2.0], [jnp.nan, jnp.nan], [3.0, 5.0]])
    outputs = ExpertOutputs(rows, jnp.asarray([[2, 0], [0, 1]]), jnp.asarray([[0.5, 2.0], [3.0, 1.0]]))
    np.testing.assert_array_equal(combine(outputs)[0], [3.5, 6.5])
    held = jnp.asarray([[True, True], [True, False]])
    np.testing.assert_array_equal(combine(outputs, held), [[3.5, 6.5], [3.0, 6.0]])


def test_the_kernel_names_what_it_refuses():
    shape, hopper = jax.ShapeDtypeStruct, target("sm_90a")
    x, expert = shape((256, 2816), jnp.bfloat16), shape((256, 8), jnp.int32)
    assert refuses_dispatch(x, expert, 128, hopper) is None
    assert "sm_90a" in str(refuses_dispatch(x, expert, 128)) and "sm_90a" in str(
        refuses_dispatch(x, expert, 128, target("sm_100a"))
    )
    assert "float32" in str(refuses_dispatch(shape(x.shape, jnp.float32), expert, 128, hopper))
    assert "int8" in str(refuses_dispatch(x, shape((256, 8), jnp.int8), 128, hopper))
    assert "2800" in str(refuses_dispatch(shape((256, 2800), jnp.bfloat16), expert, 128, hopper))
    for tokens in (5, COUNTED_ROWS // 8 + 16):
        few = shape((tokens, 2816), jnp.bfloat16), shape((tokens, 8), jnp.int32)
        assert f"{tokens * 8} rows" in str(refuses_dispatch(*few, 128, hopper))
    assert "16 programs" in str(
        refuses_dispatch(shape((16, 256), jnp.bfloat16), shape((16, 8), jnp.int32), 4096, hopper)
    )
    with pytest.raises(ValueError, match="float32"):
        kernel_dispatch(jnp.zeros((16, D)), jnp.zeros((16, 8), jnp.int32), E, interpreted())
