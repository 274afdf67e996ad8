"""Each attention backend against the definition, written with dense masks in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mercury_jax.ops import attend, attention_kernel, backends, device as kernel_device
from mercury_jax.ops.attention.inputs import (
    Int8Vectors,
    dequantise,
    quantise_fp8,
    quantise_int8,
)
from tests.ops.test_gpu_attention import dense

SLOTS = {"reference": 9, "chunked": 300}
HERE = [name for name in backends() if name in SLOTS]  # those for an accelerator have tests of their own


def case(seed=0, b=2, t=5, s=9, h=4, g=2, width=8):
    rng = np.random.default_rng(seed)
    q, k, v = (rng.normal(size=(b, n, m, width)).astype(np.float32) for n, m in ((t, h), (s, g), (s, g)))
    cut = rng.integers(0, s + 1, (b, t, 3))
    cut.sort(axis=-1)
    # Two ranges that do not overlap, often empty; the last row of each batch sees nothing at all.
    ranges = np.stack([np.stack([cut[..., 0] * 0, cut[..., 0]], -1), cut[..., 1:]], axis=2)
    ranges[:, -1] = 0
    return jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), jnp.asarray(ranges, jnp.int32)


def seen(ranges, s):
    at, ranges = np.arange(s), np.asarray(ranges)
    return ((at >= ranges[..., 0, None]) & (at < ranges[..., 1, None])).any(axis=2)


@pytest.mark.long
@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("more", [{}, {"scale": 1.0}, {"softcap": 2.0}, {"scale": 0.7, "softcap": 0.5}])
def test_each_backend_equals_the_definition(backend, seed, more):
    q, k, v, ranges = case(seed, s=SLOTS[backend])
    out, nats = attend(q, k, v, ranges, residual=True, backend=backend, **more)
    scale, softcap = more.get("scale", q.shape[-1] ** -0.5), more.get("softcap")
    want, told = dense(q, k, v, seen(ranges, k.shape[1]), scale, softcap)
    np.testing.assert_allclose(out, want, atol=2e-6)
    np.testing.assert_allclose(nats, told, atol=2e-6)
    assert not np.asarray(out)[:, -1].any() and np.isneginf(nats[:, -1]).all()
    np.testing.assert_array_equal(attend(q, k, v, ranges, backend=backend, **more), out)


@pytest.mark.parametrize("quantise", [quantise_int8, quantise_fp8])
@pytest.mark.parametrize("backend", HERE)
def test_rounded_keys_equal_their_dequantised_values(backend, quantise):
    q, k, v, ranges = case(s=SLOTS[backend])
    k, v = quantise(k), quantise(v)
    exact = attend(q, dequantise(k, q.dtype), dequantise(v, q.dtype), ranges, backend=backend)
    np.testing.assert_allclose(attend(q, k, v, ranges, backend=backend), exact, atol=1e-6)


@pytest.mark.parametrize("backend", HERE)
def test_parts_of_the_keys_are_merged_by_log_sum_exp(backend):
    slots = SLOTS[backend]
    q, k, v, ranges = case(3, s=slots)
    cut = slots // 3
    halves = [jnp.clip(ranges, 0, cut), jnp.clip(ranges, cut, slots)]
    (a, x), (b, y) = (attend(q, k, v, half, residual=True, backend=backend) for half in halves)
    both = jnp.logaddexp(x, y)
    share = lambda part: jnp.where(jnp.isneginf(both), 0.0, jnp.exp(part - both))[..., None]
    whole, nats = attend(q, k, v, ranges, residual=True, backend=backend)
    np.testing.assert_allclose(a * share(x) + b * share(y), whole, atol=2e-6)
    np.testing.assert_allclose(both, nats, atol=2e-6)


@pytest.mark.long
def test_gradients_are_finite_for_queries_without_keys():
    q, k, v, ranges = case()
    grads = jax.grad(lambda *x: jnp.sum(attend(*x, ranges, softcap=1.0)), argnums=(0, 1, 2))(q, k, v)
    assert all(bool(jnp.isfinite(g).all()) for g in grads)


def test_a_pass_with_a_gradient_never_uses_a_backend_without_one():
    q, k, v, ranges = case(s=SLOTS["chunked"])
    through = lambda cached: jax.jit(jax.grad(lambda q, to: jnp.sum(attend(q, k, v, to, cached=cached))))
    assert jnp.isfinite(through(False)(q, ranges)).all()
    with pytest.raises(ValueError, match="Reverse-mode"):
        through(True)(q, ranges)


def test_an_unknown_backend_is_refused_and_a_known_one_gives_its_reason():
    q, k, v, ranges = case()
    with pytest.raises(ValueError, match="backend is 'abacus'; allowed: .*reference"):
        attend(q, k, v, ranges, backend="abacus")
    with pytest.raises(ValueError, match="backend is 'chunked'; .*9 keys; it takes more than 256"):
        attend(q, k, v, ranges, backend="chunked")


def test_shapes_that_do_not_match_are_refused():
    q, k, v, ranges = case()

    def told(*args):
        with pytest.raises((ValueError, TypeError)) as refused:  # under --jaxtyping the type may refuse first
            attend(*args)
        return str(refused.value)

    three = jnp.zeros((2, 9, 3, 8))
    assert "k is [2, 9, 3, 8]; allowed: [2, S, G, 8], S at least 1 and G a divisor of 4" in told(
        q, three, three, ranges
    )
    assert "ranges is [2, 5, 0, 2]" in told(q, k, v, ranges[:, :, :0])
    assert "q is [2, 0, 4, 8]" in told(q[:, :0], k, v, ranges[:, :0])
    assert "v" in told(q, k, v[:, :8], ranges)
    assert "scale" in told(q, Int8Vectors(k.astype(jnp.int8), jnp.ones((2, 9, 1))), v, ranges)


@pytest.mark.long
def test_kernels_are_used_on_their_own_device_only():
    """Traced for a Hopper its kernel is chosen, over a cache and where it takes the shapes; nowhere else."""
    q, k, v, ranges = (
        x.astype(jnp.bfloat16) if x.ndim == 4 and x.dtype != jnp.int32 else x for x in case(width=64)
    )
    chosen = lambda device=None, q=q, cached=True: attention_kernel(
        q, k, v, ranges, cached=cached, device=device
    )
    with pytest.raises(ValueError, match="no Hopper"):
        attend(q, k, v, ranges, backend="hopper")
    assert chosen() is None
    device = kernel_device.target(kernel_device.HOPPER)
    assert chosen(device) == "hopper" and chosen(device, cached=False) == "hopper_training"
    assert chosen(device, q.astype(jnp.float16), cached=False) is None
    assert chosen(device, q.astype(jnp.float32)) is None
    assert chosen(kernel_device.target(kernel_device.BLACKWELL)) == "blackwell"
