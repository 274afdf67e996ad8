"""Mixture of experts: every implementation equals the plain sum over the chosen experts, with its gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mercury_jax.bench.gpu.interpreter import interpreted
from mercury_jax.models import moe
from mercury_jax.models.weight_quant import FORMATS, dequantise as restored, quantise
from mercury_jax.ops.device import target
from mercury_jax.ops.experts.grouped_matmul import offsets_of

N, D, E, F, K = 70, 12, 5, 8, 2
ACT = jax.nn.silu


def drawn() -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    shapes = [(N, D), (N, K), (E, D, 2 * F), (E, F, D)]
    return tuple(jnp.asarray(rng.normal(size=s) * s[-2] ** -0.5, jnp.float32) for s in shapes)


def plain(ids, x, weights, gate_up, down):
    """Every row through every expert; then those that were chosen."""
    each = jnp.einsum("enf,efd->end", moe.gated(ACT, jnp.einsum("nd,edf->enf", x, gate_up)), down)
    share = jnp.zeros((N, E)).at[jnp.arange(N)[:, None], ids].add(weights)
    return jnp.einsum("ne,end->nd", share, each)


def sum_of(f):
    """A scalar whose gradient tells all of f's apart."""
    ramp = jnp.linspace(-1.0, 1.0, N * D).reshape(N, D)
    return jax.jit(jax.value_and_grad(lambda ids, *args: (ramp * f(ids, *args)).sum(), argnums=(1, 2, 3, 4)))


OURS = sum_of(lambda ids, *args: moe.apply_experts(args[0], ids, *args[1:], ACT))
PLAIN = sum_of(plain)
ROUTINGS = {
    "spread": lambda rng: np.argsort(rng.random((N, E)), axis=1)[:, :K],
    "all to one pair": lambda rng: np.tile([3, 1], (N, 1)),
    "all to the last, twice": lambda rng: np.full((N, K), E - 1),
    "one row apart": lambda rng: np.where(np.arange(N)[:, None] == 40, [[0, 4]], [[2, 1]]),
}


@pytest.mark.long
@pytest.mark.parametrize("name", ROUTINGS)
def test_values_and_gradients_equal_those_of_the_plain_sum(name):
    ids = ROUTINGS[name](np.random.default_rng(1)).astype(np.int32)
    (ours, slopes), (want, wanted) = OURS(ids, *drawn()), PLAIN(ids, *drawn())
    np.testing.assert_allclose(ours, want, rtol=1e-5, atol=1e-4)
    for a, b in zip(slopes, wanted):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_experts_on_an_accelerator_equal_those_on_a_cpu():
    x, _, gate_up, down = drawn()
    offsets = offsets_of([20, 0, 33, 1, 16])
    np.testing.assert_allclose(
        moe.ragged(ACT, x, offsets, gate_up, down), moe.tiled(ACT, x, offsets, gate_up, down), atol=1e-5
    )


@pytest.mark.parametrize("sizes", [(20, 0, 33, 1, 16), (70, 0, 0, 0, 0), (14,) * 5])
def test_a_tile_of_every_expert_at_once_is_what_one_after_the_other_is(sizes):
    x, _, gate_up, down = drawn()
    offsets = offsets_of(sizes)
    rows = jnp.concatenate([x, jnp.full((5, D), jnp.nan)])  # rows of no expert may hold anything

    def both(together):
        run = functools.partial(moe.tiled, ACT, together=together)
        total = lambda x, *stacks: (run(x, offsets, *stacks) ** 2).sum()
        return run(rows, offsets, gate_up, down)[:N], jax.grad(total, (0, 1, 2))(x, gate_up, down)

    for a, b in zip(*map(jax.tree.leaves, (both(True), both(False))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("run", [moe.tiled, functools.partial(moe.tiled, together=True), moe.ragged])
def test_int8_experts_equal_their_dequantised_matrices(run):
    x, _, gate_up, down = drawn()
    offsets = offsets_of([20, 0, 33, 1, 16])
    small = jax.tree.map(jnp.asarray, [quantise(w, FORMATS["int8"], 1, 1) for w in (gate_up, down)])
    want = run(ACT, x, offsets, *(restored(w, 1) for w in small))
    np.testing.assert_allclose(run(ACT, x, offsets, *small), want, atol=1e-5)


@pytest.mark.parametrize("small", [None, "int8", "fp8_dynamic"])
def test_the_kernels_equal_the_loop_with_its_gradients(small):
    rng = np.random.default_rng(2)
    offsets, shapes = offsets_of([9, 0, 8]), [(17, 64), (3, 64, 128), (3, 64, 64)]
    x, *stacks = (jnp.asarray(rng.normal(size=s) * s[-2] ** -0.5, jnp.bfloat16) for s in shapes)
    if small:
        stacks = jax.tree.map(jnp.asarray, [quantise(w, FORMATS[small], 1, 1) for w in stacks])

    def both(run):
        if small:
            return run(ACT, x, offsets, *stacks)
        return jax.value_and_grad(
            lambda *a: (run(ACT, a[0], offsets, *a[1:]).astype(jnp.float32) ** 2).sum(), (0, 1, 2)
        )(x, *stacks)

    want = both(moe.tiled)
    device = interpreted()
    assert moe.refuses(x, *stacks, device=device) is None
    ours = jax.jit(lambda: both(functools.partial(moe.grouped_or_tiled, device=device)))()
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(want)):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        # A hidden unit may round to the next number of 3 bits.
        np.testing.assert_allclose(a, b, atol=(5e-2 if small == "fp8_dynamic" else 2e-2) * np.abs(b).max())


def test_experts_that_the_kernel_refuses_use_the_loop():
    x, _, gate_up, down = drawn()
    offsets = offsets_of([20, 0, 33, 1, 16])
    device = target("sm_90a")
    assert "rows are float32" in str(moe.refuses(x, gate_up, down, device=device))
    ours = moe.grouped_or_tiled(ACT, x, offsets, gate_up, down, device=device)
    np.testing.assert_array_equal(ours, moe.tiled(ACT, x, offsets, gate_up, down))


@pytest.mark.long
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("first", [None, 2], ids=["all experts", "some experts elsewhere"])
def test_a_layer_of_experts_on_a_gpu_equals_that_on_a_cpu(first, monkeypatch):
    """Dispatch, products and combine with the kernels: tokens [2, 32], with 2 experts each."""
    rng = np.random.default_rng(4)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape) * shape[-2] ** -0.5, jnp.bfloat16)
    x, stacks = normal(2, 32, 256), (normal(E, 256, 128), normal(E, 64, 256))
    ids = jnp.asarray(np.argsort(rng.random((2, 32, E + 2)))[..., :2], jnp.int32)  # two more are elsewhere
    ids = ids % E if first is None else ids
    weights = jnp.asarray(rng.uniform(size=ids.shape), jnp.float32)
    first = None if first is None else jnp.int32(first)
    run = functools.partial(moe.apply_experts, x, ids, weights, *stacks, ACT, first)
    want = np.asarray(run(), np.float32)
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, cuda, **others: cuda(*args))
    layer = lambda: run(device=interpreted())
    assert "name=dispatch" in str(jax.make_jaxpr(layer)())
    ours = np.asarray(jax.jit(layer)(), np.float32)
    np.testing.assert_allclose(ours, want, atol=2e-2 * np.abs(want).max())
