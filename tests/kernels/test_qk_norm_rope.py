"""Head norms, RoPE and the cache write, interpreted on a CPU: they are what the plain computation gives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mercury_jax.kernels.attention_inputs import quantise_int8
from mercury_jax.kernels.device import target
from mercury_jax.kernels.fused_norms import (
    HeadFactors,
    Projections,
    kernel_norm_rope_write,
    refuses_heads,
)
from mercury_jax.kernels.interpreter import interpreted
from mercury_jax.models.rope import norm_rope_write, rope_table

B, S = 2, 11


def drawn(width, heads, groups, tokens, own_values=True, dtype=jnp.bfloat16):
    rng = np.random.default_rng(width + heads)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape) * 3, dtype)
    q, k, v = (normal(B, tokens, n, width) for n in (heads, groups, groups))
    factors = HeadFactors(*(1 + 0.2 * normal(width) for _ in range(2)))
    frequencies = 1e4 ** (-np.arange(width // 2) / (width // 2))
    frequencies[width // 8 :] = 0.0  # pairs that are not rotated
    at = rng.integers(0, 2000, (B, 1)) + np.arange(tokens)
    slots = at % S  # a ring
    slots[0, 1], slots[1, 0] = S, S + 5  # not written
    x = Projections(q, k, v if own_values else None)
    table = rope_table(jnp.asarray(at, jnp.int32), frequencies)
    kv = normal(B, S, groups, width), normal(B, S, groups, width)
    return x, factors, table, kv, jnp.asarray(slots, jnp.int32)


def check(ours, want):
    """Rounds where the plain computation does: a few numbers, whose sums of squares differ, round to a neighbour."""
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype == jnp.bfloat16 and a.shape == b.shape
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, rtol=2**-6, atol=1e-2)
        assert (a == b).mean() > 0.98


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
def test_the_kernel_equals_the_plain_computation(width, heads, groups, tokens, own_values):
    args = drawn(width, heads, groups, tokens, own_values)
    ours = jax.jit(lambda: kernel_norm_rope_write(norm_rope_write, *args, 1e-6, interpreted()))()
    check(ours, norm_rope_write(*args, 1e-6))
    written = np.zeros((B, S), bool)
    for row, slots in enumerate(np.asarray(args[4])):
        written[row, slots[slots < S]] = True
    for old, new in zip(args[3], ours[1], strict=True):
        changed = (np.asarray(old, np.float32) != np.asarray(new, np.float32)).any((2, 3))
        np.testing.assert_array_equal(changed, written)


@pytest.mark.long
def test_a_token_with_nan_changes_no_other():
    x, *rest = drawn(256, 2, 1, 4)
    broken = x._replace(q=x.q.at[0, 2].set(jnp.nan), k=x.k.at[0, 2].set(jnp.nan))
    run = jax.jit(lambda x: kernel_norm_rope_write(norm_rope_write, x, *rest, 1e-6, interpreted()))
    (q, (k, v)), (want, (keys, values)) = run(broken), run(x)
    others = np.arange(4) != 2
    assert np.isnan(np.asarray(q, np.float32)[0, 2]).all()
    np.testing.assert_array_equal(q[:, others], want[:, others])
    np.testing.assert_array_equal(v, values)
    slot = int(rest[-1][0, 2])
    assert np.isnan(np.asarray(k, np.float32)[0, slot]).all()
    np.testing.assert_array_equal(k.at[0, slot].set(0), keys.at[0, slot].set(0))


def test_its_gradient_is_that_of_the_plain_computation():
    x, factors, table, kv, slots = drawn(256, 2, 1, 3)
    slots = slots.at[0, 1].set(int(slots[0, 0]) + 1)

    def gradient(run):
        loss = lambda x, factors, kv: sum(
            (y.astype(jnp.float32) ** 3).sum()
            for y in jax.tree.leaves(run(x, factors, table, kv, slots, 1e-6))
        )
        return jax.tree.leaves(jax.jit(jax.grad(loss, (0, 1, 2)))(x, factors, kv))

    ours = gradient(functools.partial(kernel_norm_rope_write, norm_rope_write, device=interpreted()))
    for a, b in zip(ours, gradient(norm_rope_write), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, atol=2e-2 * np.abs(b).max())


def test_the_kernel_names_what_it_refuses():
    hopper, (x, _, table, kv, _) = target("sm_90a"), drawn(256, 4, 2, 3)
    assert refuses_heads(x, table, kv, hopper) is None
    assert "sm_90a" in str(refuses_heads(x, table, kv)) and "sm_90a" in str(
        refuses_heads(x, table, kv, target("sm_100a"))
    )
    assert "Int8Vectors" in str(refuses_heads(x, table, tuple(map(quantise_int8, kv)), hopper))
    wide = jax.tree.map(lambda y: y.astype(jnp.float32), (x, table, kv))
    assert "float32" in str(refuses_heads(*wide, hopper))
    assert "float32" in str(refuses_heads(wide[0], table, kv, hopper))
    assert "head size is 128" in str(
        refuses_heads(jax.tree.map(lambda y: y[..., :128], x), table, kv, hopper)
    )
    many = x._replace(q=jnp.zeros((B, 3, 64, 256), jnp.bfloat16))
    assert "64 query heads" in str(refuses_heads(many, table, kv, hopper))
    half = tuple(y[..., :64] for y in table)
    assert "64 pairs" in str(refuses_heads(x, half, kv, hopper))
    with pytest.raises(ValueError, match="sm_90a"):
        kernel_norm_rope_write(norm_rope_write, *drawn(256, 4, 2, 3), 1e-6)
