"""The Blackwell kernel on a CPU: the definition under the Mosaic GPU interpreter, and its lowering to tcgen05.

Where the interpreter has no tcgen05, jnp.dot in shared memory stands for it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mercury_jax.kernels import attention, blackwell, device as kernel_device
from mercury_jax.kernels.attention_inputs import AttentionCall, Int8Vectors, dequantise, quantise_int8
from mercury_jax.kernels.interpreter import interpreted
from tests.kernels.test_hopper import case, dense
from tests.marks import slow_except


def check(q, k, v, ranges, more, expected):
    call = functools.partial(AttentionCall, **more, device=interpreted(kernel_device.BLACKWELL))
    assert blackwell.refuses(call(q, k, v, ranges)) is None
    out, nats = jax.jit(lambda *xs: blackwell.run(call(*xs)))(q, k, v, ranges)
    want, told = expected
    assert out.dtype == q.dtype and nats.dtype == jnp.float32
    got = np.asarray(out, np.float64)
    assert np.abs(got - want).max() <= 1e-2 * np.abs(want).max()
    np.testing.assert_allclose(nats, told, atol=5e-3)  # -inf where nothing is seen
    assert not got[:, -1].any()


CASES = {  # B, T, H, G, S, K, R, dtype, scale, softcap, processors (few: no split)
    "two tiles of rows, a last tile of keys that does not fit": (1, 66, 2, 1, 150, 128, 2, jnp.bfloat16, 0.1, None, 1),
    "three ranges, capped, split in two": (1, 3, 4, 1, 128, 256, 3, jnp.float16, 0.0625, 2.0, 148),
}  # fmt: skip


@pytest.mark.parametrize("name", slow_except(CASES, "three ranges, capped, split in two"))
def test_the_blackwell_kernel_equals_the_definition(name, monkeypatch):
    *shape, scale, softcap, processors = CASES[name]
    monkeypatch.setattr(blackwell, "PROCESSORS", processors)
    q, k, v, ranges, see = case(*shape)
    more = dict(scale=scale, softcap=softcap, residual=True)
    check(q, k, v, ranges, more, dense(q, k, v, see, scale, softcap))


@pytest.mark.long
def test_int8_keys_equal_their_dequantised_values_on_blackwell(monkeypatch):
    monkeypatch.setattr(blackwell, "PROCESSORS", 1)
    q, k, v, ranges, see = case(1, 3, 2, 1, 350, 64, 2, jnp.bfloat16)  # more tiles than are in flight
    seen = jnp.asarray(see.any(1))[:, :, None]
    k, v = (quantise_int8(jnp.where(seen[..., None], x, 0)) for x in (k, v))
    expected = dense(q, dequantise(k, q.dtype), dequantise(v, q.dtype), see, 0.125, None)
    k, v = (Int8Vectors(x.values, jnp.where(seen, x.scale, jnp.nan)) for x in (k, v))
    check(q, k, v, ranges, dict(scale=0.125, softcap=None, residual=True), expected)


def shapes(width, dtype=jnp.bfloat16, int8=False, heads=4, ranges=2):
    """q, k, v and ranges of 300 queries over 2000 keys, without contents."""
    shape = jax.ShapeDtypeStruct
    k = shape((1, 2000, 2, width), dtype)
    k = jax.eval_shape(quantise_int8, k) if int8 else k
    return shape((1, 300, heads, width), dtype), k, k, shape((1, 300, ranges, 2), jnp.int32)


@pytest.mark.long
@pytest.mark.parametrize("width, int8", [(128, False), (256, True)])
def test_the_blackwell_kernel_lowers_to_products_in_tensor_memory(width, int8):
    args, more = shapes(width, int8=int8), dict(scale=0.1, softcap=30.0, residual=True)
    device = kernel_device.target(kernel_device.BLACKWELL)
    traced = jax.jit(lambda *xs: attention.attend(*xs, cached=True, device=device, **more)).trace(*args)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text and "tcgen05" in text


@pytest.mark.parametrize("width", blackwell.KEYS)
@pytest.mark.parametrize("int8", [False, True])
def test_a_blackwell_program_fits_into_its_memories(width, int8):
    """512 columns of tensor memory, 227 KB of shared memory."""
    q, k, _, ranges = shapes(width, int8=int8, ranges=3)
    p = blackwell.config_of(AttentionCall(q, k, k, ranges, 1.0))
    s, t = blackwell.scratch_of(p, width, q.dtype)
    columns = [x.shape[1] * jnp.dtype(x.dtype).itemsize // 4 for x in (t.scores, t.weights, t.sum)]
    assert sum(columns) <= 512
    held = [x for x in (s.q, s.gaps, s.k, s.v, s.int8, s.scales, t.out) if x is not None]
    assert sum(np.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in held) < 227 * 1024
    assert p.stages > 0


@pytest.mark.long
def test_the_blackwell_kernel_is_used_on_blackwell_only_and_names_what_it_refuses():
    chosen = lambda *args, device=None: (
        attention._choose("cuda", True, AttentionCall(*args, 0.1, device=device)).run
    )
    of = lambda name: attention._BACKENDS[name].run
    told = lambda *args, scale=0.1: str(blackwell.refuses(AttentionCall(*args, scale)))
    assert chosen(*shapes(128)) is of("reference")
    assert chosen(*shapes(128), device=kernel_device.target(kernel_device.HOPPER)) is of("hopper")
    ours = kernel_device.target(kernel_device.BLACKWELL)
    assert chosen(*shapes(128), device=ours) is chosen(*shapes(64, int8=True), device=ours) is of("blackwell")
    assert chosen(*shapes(512), device=ours) is of("reference")
    assert "512" in told(*shapes(512)) and "96" in told(*shapes(96))
    assert "float32" in told(*shapes(64, jnp.float32)) and "7 ranges" in told(*shapes(64, ranges=7))
    assert "3 heads" in told(*shapes(64, heads=3)) and "scale" in told(*shapes(64), scale=0.0)
