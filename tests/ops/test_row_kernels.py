"""Norms, head norms with RoPE and the cache write, routing and dispatch, interpreted on a CPU.

Each kernel gives what the plain computation gives, where inputs are unusual too.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mercury_jax.bench.gpu.interpreter import interpreted
from mercury_jax.models.cache import KV
from mercury_jax.models.norms import RESIDUAL_NORMS
from mercury_jax.models.rope import NORM_ROPE_WRITE, rope_table
from mercury_jax.ops.experts.op import DISPATCH, ROUTE, ExpertOutputs, combine
from mercury_jax.ops.norms.op import ROUND_ROWS, HeadFactors, Projections, Residual
from mercury_jax.ops.quantised_rows import quantise_rows


def kernel(op, *arrays, **static):
    """What the interpreted kernel of an operation gives."""
    return jax.jit(functools.partial(op.run, backend="hopper", device=interpreted(), **static))(*arrays)


def plain(op, *arrays, **static):
    return op.run(*arrays, backend="reference", **static)


def wide(x):
    return np.asarray(x, np.float32)


def alike(ours, want, equal=0.97):
    """Rounds where the plain computation does: a few numbers, whose sums of squares differ, round to a neighbour."""
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_allclose(wide(a), wide(b), rtol=2**-6, atol=1e-2)
        assert (wide(a) == wide(b)).mean() > equal


def same_gradients(op, arrays, **static):
    """The gradients of an operation's outputs by its kernel and by its plain form, for one cotangent."""

    def gradient(run):
        @jax.jit
        def back(*arrays):
            out, pull = jax.vjp(lambda *arrays: run(op, *arrays, **static), *arrays)
            cotangent = lambda y: jnp.sin(jnp.arange(y.size)).reshape(y.shape).astype(y.dtype)
            return pull(jax.tree.map(cotangent, out))

        return jax.tree.leaves(back(*arrays))

    for a, b in zip(gradient(kernel), gradient(plain), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        if a.dtype != jax.dtypes.float0:  # of integers
            np.testing.assert_allclose(wide(a), wide(b), atol=2e-2 * np.abs(wide(b)).max())


# --- residual norms


def drawn(width, case, dtype=jnp.float32):
    rng = np.random.default_rng(width)
    factor = lambda: jnp.asarray(1 + 0.3 * rng.normal(size=width), dtype)
    x, y, z = (jnp.asarray(rng.normal(size=(2, 3, width)) * size, jnp.bfloat16) for size in (1.0, 5.0, 2.0))
    scale = lambda size: jnp.full((1,), size, dtype)
    rank, weights = rng.permutation(6 * 4)[:18].reshape(2, 3, 3), rng.uniform(0.1, 1.0, (2, 3, 3))
    states = jnp.asarray(rng.normal(size=(6 * 4, width)) * 3, jnp.bfloat16)
    outputs = ExpertOutputs(states, jnp.asarray(rank, jnp.int32), jnp.asarray(weights, jnp.float32))
    choice = jnp.asarray([[1, 0, 1], [0, 0, 1]], bool)
    residual = {
        "a sum": lambda: Residual((y,), (None,)),
        "a norm": lambda: Residual((y,), (factor(),)),
        "two branches": lambda: Residual((y, z), (factor(), factor()), factor(), (scale(0.7),)),
        "outputs of experts": lambda: Residual((y, outputs), (factor(), factor()), factor(), (scale(0.7),)),
        "two scales": lambda: Residual((y,), (factor(),), None, (scale(0.7), scale(1.9)), choice),
    }[case]()
    return x, residual, [factor(), factor(), factor()]


@pytest.mark.long
@pytest.mark.parametrize("case", ["a sum", "a norm", "two branches", "outputs of experts", "two scales"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_residual_norms_equal_the_plain_ones(case, dtype):
    arrays = drawn(512, case, dtype)
    alike(kernel(RESIDUAL_NORMS, *arrays, eps=1e-6), plain(RESIDUAL_NORMS, *arrays, eps=1e-6))


def rounded_alike(got, want):
    """Equal, but for a number half-way between two: a division that is compiled may round its quotient otherwise."""
    np.testing.assert_allclose(got.scale, want.scale, rtol=1e-6)
    assert got.values.dtype == want.values.dtype
    np.testing.assert_allclose(wide(got.values), wide(want.values), rtol=1 / 8, atol=1)
    assert (wide(got.values) == wide(want.values)).mean() > 0.995


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
def test_norms_are_rounded_as_rows_are_and_then_have_no_gradient(dtype):
    arrays = drawn(256, "a norm")
    total, found = kernel(RESIDUAL_NORMS, *arrays, eps=1e-6, rounded=(dtype, None, dtype))
    same, norms = kernel(RESIDUAL_NORMS, *arrays, eps=1e-6)
    np.testing.assert_array_equal(total, same)
    np.testing.assert_array_equal(found[1], norms[1])
    for got, norm in ((found[0], norms[0]), (found[2], norms[2])):
        rounded_alike(got, quantise_rows(norm, dtype))
    loss = lambda x: kernel(RESIDUAL_NORMS, x, *arrays[1:], eps=1e-6, rounded=(dtype,))[0].sum()
    with pytest.raises(ValueError, match="quantise is .*dynamic"):
        jax.eval_shape(jax.grad(loss), arrays[0])


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(6, 704), (3, 256)], ids=["two rows a program", "one"])
def test_rows_that_no_other_kernel_holds_are_rounded_alike(shape, dtype):
    sizes = np.resize([1.0, 30.0, 0.0], (shape[0], 1))
    x = jnp.asarray(np.random.default_rng(0).normal(size=shape) * sizes, jnp.bfloat16)
    rounded_alike(kernel(ROUND_ROWS, x, dtype=dtype), quantise_rows(x, dtype))


def test_the_outputs_of_experts_are_summed_as_the_plain_sum_is():
    x, residual, _ = drawn(256, "outputs of experts")
    outputs = residual.branches[1]
    assert isinstance(outputs, ExpertOutputs)
    weights = outputs.weights.at[1, 0].set(jnp.nan)  # as of a token that chose no expert
    outputs = outputs._replace(rows=outputs.rows.at[outputs.rank[0, 2, 1]].set(jnp.nan), weights=weights)
    total, none = kernel(RESIDUAL_NORMS, 0 * x, Residual((outputs,), (None,)), [], eps=1e-6)
    assert none == []
    np.testing.assert_allclose(wide(total), wide(combine(outputs)), rtol=2**-7, atol=1e-6)
    np.testing.assert_array_equal(np.isnan(wide(total)).any(-1), [[False, False, True], [True, False, False]])


@pytest.mark.long
@pytest.mark.parametrize("case", ["two branches", "outputs of experts"])
def test_the_gradient_of_residual_norms_is_that_of_the_plain_ones(case):
    same_gradients(RESIDUAL_NORMS, drawn(256, case), eps=1e-6)


# --- head norms, RoPE and the cache write

B, S = 2, 11


def projected(width, heads, groups, tokens, own_values=True):
    rng = np.random.default_rng(width + heads)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape) * 3, jnp.bfloat16)
    q, k, v = (normal(B, tokens, n, width) for n in (heads, groups, groups))
    factors = HeadFactors(*(1 + 0.2 * normal(width) for _ in range(2)))
    frequencies = 1e4 ** (-np.arange(width // 2) / (width // 2))
    frequencies[width // 8 :] = 0.0  # pairs that are not rotated
    at = rng.integers(0, 2000, (B, 1)) + np.arange(tokens)
    slots = at % S  # a ring
    slots[0, 1], slots[1, 0] = S, S + 5  # not written
    table = rope_table(jnp.asarray(at, jnp.int32), frequencies)
    kv = KV(normal(B, S, groups, width), normal(B, S, groups, width))
    return Projections(q, k, v if own_values else None), factors, table, kv, jnp.asarray(slots, jnp.int32)


@pytest.mark.long
@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    "width, heads, groups, tokens, own_values",
    [
        (256, 4, 2, 3, True),
        (256, 2, 2, 3, True),  # one query head for each key head
        (512, 8, 1, 8, False),  # a whole block of the order that attention reads; keys as values
        (512, 4, 2, 3, False),
        (256, 3, 1, 3, True),  # a number of query heads that attention takes for further queries
    ],
)
def test_heads_are_normalised_rotated_and_written_as_in_the_plain_pass(
    width, heads, groups, tokens, own_values
):
    arrays = projected(width, heads, groups, tokens, own_values)
    ours = kernel(NORM_ROPE_WRITE, *arrays, eps=1e-6)
    alike(ours, plain(NORM_ROPE_WRITE, *arrays, eps=1e-6), equal=0.98)
    written = np.zeros((B, S), bool)
    for row, slots in enumerate(np.asarray(arrays[4])):
        written[row, slots[slots < S]] = True
    for old, new in zip(arrays[3], ours[1], strict=True):
        np.testing.assert_array_equal((wide(old) != wide(new)).any((2, 3)), written)


@pytest.mark.long
def test_a_token_with_nan_changes_no_other():
    x, *rest = projected(256, 2, 1, 4)
    broken = x._replace(q=x.q.at[0, 2].set(jnp.nan), k=x.k.at[0, 2].set(jnp.nan))
    (q, (k, v)), (want, (keys, values)) = (kernel(NORM_ROPE_WRITE, y, *rest, eps=1e-6) for y in (broken, x))
    others = np.arange(4) != 2
    assert np.isnan(wide(q)[0, 2]).all()
    np.testing.assert_array_equal(q[:, others], want[:, others])
    np.testing.assert_array_equal(v, values)
    slot = int(rest[-1][0, 2])
    assert np.isnan(wide(k)[0, slot]).all()
    np.testing.assert_array_equal(k.at[0, slot].set(0), keys.at[0, slot].set(0))


def test_the_gradient_of_head_norms_is_that_of_the_plain_ones():
    *arrays, slots = projected(256, 2, 1, 3)
    same_gradients(NORM_ROPE_WRITE, (*arrays, slots.at[0, 1].set(int(slots[0, 0]) + 1)), eps=1e-6)


# --- routing


@pytest.mark.long
@pytest.mark.parametrize("experts, active", [(128, 8), (256, 3)])
def test_the_most_probable_experts_are_chosen(experts, active):
    rng = np.random.default_rng(experts)
    logits = np.round(rng.normal(size=(2, 3, experts)) * 4, 1).astype(np.float32)  # rounded: many are equal
    logits[0, 1] = 0.0  # all are equal: the first k
    logits[1, 2] = 80.0 * logits[1, 2]  # one has nearly all of the probability
    factors = jnp.asarray(rng.uniform(0.5, 2.0, experts), jnp.bfloat16 if active == 3 else jnp.float32)
    (ids, weights), (want_ids, want) = (
        run(ROUTE, jnp.asarray(logits), factors, active=active, scale=0.5) for run in (kernel, plain)
    )
    np.testing.assert_allclose(weights, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(ids[0], want_ids[0])
    np.testing.assert_array_equal(ids[0, 1], np.arange(active))


def test_a_token_with_nan_chooses_no_expert():
    logits = jnp.zeros((2, 128)).at[0, 5].set(jnp.nan)
    ids, weights = kernel(ROUTE, logits, jnp.ones(128), active=2)
    assert (np.asarray(ids[0]) == 128).all() and np.isnan(weights[0]).all()
    np.testing.assert_array_equal(ids[1], [0, 1])
    np.testing.assert_allclose(weights[1], 0.5)


# --- dispatch: rows, places and offsets of a stable sort by expert

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
def test_tokens_are_copied_to_their_experts(name, tokens):
    rng = np.random.default_rng(tokens)
    x = jnp.asarray(rng.normal(size=(tokens, D)), jnp.bfloat16).at[1, 5].set(jnp.nan)  # NaN stays in its rows
    expert = jnp.asarray(ROUTINGS[name](rng, tokens), jnp.int32)
    found, want = (run(DISPATCH, x, expert, count=E) for run in (kernel, plain))
    np.testing.assert_array_equal(found.rank, want.rank)
    np.testing.assert_array_equal(found.offsets[: E + 1], want.offsets[: E + 1])
    np.testing.assert_array_equal(wide(found.rows), wide(want.rows))
    assert np.isnan(wide(found.rows)).sum() == K


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
def test_rounded_rows_are_copied_with_their_scales(dtype):
    rng = np.random.default_rng(0)
    x = quantise_rows(jnp.asarray(rng.normal(size=(16, D)), jnp.bfloat16), dtype)
    expert = jnp.asarray(rng.integers(0, E, (16, K)), jnp.int32)
    found, expected = (run(DISPATCH, x, expert, count=E) for run in (kernel, plain))
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got[: len(want)], want)


def test_dispatch_is_differentiable_in_the_hidden_states():
    rng = np.random.default_rng(0)
    x, dy = (jnp.asarray(rng.normal(size=(n, D)), jnp.bfloat16) for n in (16, 16 * K))
    expert = jnp.asarray(rng.integers(0, E, (16, K)), jnp.int32)
    gradient = lambda run: jax.vjp(lambda x: run(DISPATCH, x, expert, count=E).rows, x)[1](dy)[0]
    np.testing.assert_allclose(wide(gradient(kernel)), wide(gradient(plain)), atol=0.1)


def test_rows_that_were_not_computed_add_nothing():
    rows = jnp.asarray([[1.0, 2.0], [jnp.nan, jnp.nan], [3.0, 5.0]])
    outputs = ExpertOutputs(rows, jnp.asarray([[2, 0], [0, 1]]), jnp.asarray([[0.5, 2.0], [3.0, 1.0]]))
    np.testing.assert_array_equal(combine(outputs)[0], [3.5, 6.5])
    held = jnp.asarray([[True, True], [True, False]])
    np.testing.assert_array_equal(combine(outputs, held), [[3.5, 6.5], [3.0, 6.0]])
