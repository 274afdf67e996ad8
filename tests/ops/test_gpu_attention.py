"""The kernels for Hopper and Blackwell in the Mosaic GPU interpreter equal the definition of attention.

Where the interpreter has no tcgen05, jnp.dot in shared memory stands for it; lowered, the kernel for Blackwell has it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mercury_jax.bench.gpu.interpreter import interpreted
from mercury_jax.ops import attend, attention_kernel, device as kernel_device
from mercury_jax.ops.attention import blackwell, hopper
from mercury_jax.ops.attention.inputs import (
    AttentionCall,
    Int8Vectors,
    dequantise,
    quantise_fp8,
    quantise_int8,
)
from tests.marks import slow_except


def dense(q, k, v, see, scale, softcap):
    """(softmax over the seen keys, the log-sum-exp of their scores) in fp64; zeros and -inf where none is seen."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    k, v = (np.repeat(np.where(see.any(1)[:, :, None, None], x, 0), group, axis=2) for x in (k, v))
    s = np.einsum("bthk,bshk->bhts", q, k) * scale
    s = np.where(see[:, None], s if softcap is None else softcap * np.tanh(s / softcap), -np.inf)
    with np.errstate(divide="ignore"):
        nats = np.log(np.exp(s).sum(axis=-1))
    w = np.exp(s - np.where(np.isinf(nats), 0, nats)[..., None])
    return np.einsum("bhts,bshk->bthk", w, v), nats.transpose(0, 2, 1)


def case(b, t, h, g, s, width, r, dtype, seed=0):
    """q, k, v, ranges and who sees whom; the last query sees nothing, and keys that no query sees are NaN."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.normal(size=(b, n, m, width)).astype(np.float32) for n, m in ((t, h), (s, g), (s, g)))
    ranges = np.zeros((b, t, r, 2), np.int32)
    prefix = rng.integers(s // 3, s // 2, (b, 1))
    ranges[:, :, 0] = np.stack([np.arange(b)[:, None] * 5, prefix], axis=-1)
    for i in range(1, r):  # further ranges grow from query to query, behind a gap that nobody sees
        step = s // max(4, 2 * r - 2)
        start = prefix + 7 + step * (i - 1)
        ranges[:, :, i] = np.stack(
            np.broadcast_arrays(start, start + 1 + np.arange(t) * 3 % (step * 4 // 5)), axis=-1
        )
    ranges[:, -1] = 0
    at = np.arange(s)
    see = ((at >= ranges[..., 0, None]) & (at < ranges[..., 1, None])).any(axis=2)
    k, v = (np.where(see.any(1)[:, :, None, None], x, np.nan) for x in (k, v))
    return *(jnp.asarray(x, dtype) for x in (q, k, v)), jnp.asarray(ranges), see


KERNELS = {"hopper": (hopper, kernel_device.HOPPER), "blackwell": (blackwell, kernel_device.BLACKWELL)}
CASES = {  # B, T, H, G, S, K, R, dtype, scale, softcap, processors (few: no split)
    "hopper: one query, one short tile": (1, 2, 2, 1, 40, 64, 1, jnp.bfloat16, 0.125, None, 1),
    "hopper: two warpgroups, two batches": (2, 40, 2, 1, 70, 128, 2, jnp.bfloat16, 0.1, None, 1),
    "hopper: three ranges, capped, split in two": (1, 3, 4, 1, 128, 256, 3, jnp.float16, 0.0625, 2.0, 132),
    "hopper: more tiles than in flight": (1, 3, 1, 1, 300, 256, 1, jnp.bfloat16, 0.0625, None, 1),
    "hopper: seven heads a group, split in two": (1, 10, 14, 2, 200, 128, 2, jnp.bfloat16, 0.1, None, 132),
    "hopper: six ranges, split in four": (2, 20, 16, 8, 200, 256, 6, jnp.bfloat16, 0.0625, None, 132),
    "hopper: head size 512, two groups": (1, 3, 4, 2, 200, 512, 2, jnp.bfloat16, 0.044, None, 1),
    "hopper: head size 512, capped, split in three": (1, 3, 2, 1, 300, 512, 3, jnp.float16, 0.044, 2.0, 132),
    "hopper: a last tile that does not fit": (1, 5, 2, 2, 200, 64, 2, jnp.float16, 0.2, None, 1),
    "blackwell: two tiles of rows, a last tile of keys that does not fit": (
        1, 66, 2, 1, 150, 128, 2, jnp.bfloat16, 0.1, None, 1
    ),
    "blackwell: three ranges, capped, split in two": (1, 3, 4, 1, 128, 256, 3, jnp.float16, 0.0625, 2.0, 148),
}  # fmt: skip
QUICK = ("three ranges, capped, split in two", "one query, one short tile")


@pytest.mark.parametrize(
    "name", slow_except(CASES, f"hopper: {QUICK[0]}", f"hopper: {QUICK[1]}", f"blackwell: {QUICK[0]}")
)
def test_a_kernel_equals_the_definition(name, monkeypatch):
    *shape, scale, softcap, processors = CASES[name]
    q, k, v, ranges, see = case(*shape)
    expected = dense(q, k, v, see, scale, softcap)
    check(name.partition(":")[0], q, k, v, ranges, (scale, softcap), expected, monkeypatch, processors)


def check(name, q, k, v, ranges, how, expected, monkeypatch, processors=1):
    module, kind = KERNELS[name]
    monkeypatch.setattr(module, "PROCESSORS", processors)
    make = functools.partial(
        AttentionCall, scale=how[0], softcap=how[1], residual=True, device=interpreted(kind)
    )
    assert module.refuses(make(q, k, v, ranges)) is None
    out, nats = jax.jit(lambda *xs: module.run(make(*xs)))(q, k, v, ranges)
    want, told = expected
    assert out.dtype == q.dtype and nats.dtype == jnp.float32
    got = np.asarray(out, np.float64)
    assert np.abs(got - want).max() <= 1e-2 * np.abs(want).max()
    np.testing.assert_allclose(nats, told, atol=5e-3)  # -inf where nothing is seen
    assert not got[:, -1].any()


@pytest.mark.long
@pytest.mark.parametrize("name", KERNELS)
def test_int8_keys_equal_their_dequantised_values(name, monkeypatch):
    q, k, v, ranges, see = case(1, 3, 2, 1, 350, 64, 2, jnp.bfloat16)  # more tiles than are in flight
    seen = jnp.asarray(see.any(1))[:, :, None]
    k, v = (quantise_int8(jnp.where(seen[..., None], x, 0)) for x in (k, v))
    expected = dense(q, dequantise(k, q.dtype), dequantise(v, q.dtype), see, 0.125, None)
    k, v = (Int8Vectors(x.values, jnp.where(seen, x.scale, jnp.nan)) for x in (k, v))
    check(name, q, k, v, ranges, (0.125, None), expected, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("slots, int8", slow_except([(70, False), (129, True)], (129, True)))
def test_ranges_may_end_after_the_last_slot(slots, int8):
    """They end there, as in the reference; the kernel itself reads whole tiles of keys, filled up with zeros."""
    q, k, v, ranges, _ = case(1, 3, 2, 1, slots, 64, 1, jnp.bfloat16)
    k, v = (jnp.nan_to_num(x) for x in (k, v))
    k, v = (quantise_int8(k), quantise_int8(v)) if int8 else (k, v)
    late = ranges.at[:, 0, 0, 1].set(slots + 9)
    how = dict(residual=True, backend="hopper", device=interpreted())
    out, nats = jax.jit(lambda *xs: attend(*xs, **how))(q, k, v, late)
    want, told = attend(q, k, v, late.at[:, 0, 0, 1].set(slots), residual=True, backend="reference")
    np.testing.assert_allclose(np.float32(out), np.float32(want), atol=2e-2)
    np.testing.assert_allclose(nats, told, atol=5e-3)


def test_the_hopper_kernel_names_what_it_refuses():
    shape = lambda s, dtype: jax.ShapeDtypeStruct(s, dtype)
    q, k = shape((1, 4, 4, 64), jnp.bfloat16), shape((1, 9, 2, 64), jnp.bfloat16)
    ranges = shape((1, 4, 2, 2), jnp.int32)
    refused = lambda q=q, k=k, ranges=ranges, scale=0.1: hopper.refuses(AttentionCall(q, k, k, ranges, scale))
    told = lambda *args, **more: str(refused(*args, **more))
    assert refused() is None
    wide = lambda n, dtype=jnp.bfloat16: (shape((1, 4, 4, n), dtype), shape((1, 9, 2, n), dtype))
    assert "1024" in told(*wide(1024)) and "96" in told(*wide(96))
    assert "float32" in told(*wide(64, jnp.float32)) and "float16" in told(wide(64, jnp.float16)[0])
    assert refused(k=jax.eval_shape(quantise_int8, k)) is None and refused(*wide(512)) is None
    assert "fp8" in told(k=jax.eval_shape(quantise_fp8, k))
    assert "int8" in told(wide(512)[0], jax.eval_shape(quantise_int8, wide(512)[1]))
    assert "7 ranges" in told(ranges=shape((1, 4, 7, 2), jnp.int32))
    assert "scale" in told(scale=0.0)
    assert "3 heads" in told(shape((1, 4, 3, 64), jnp.bfloat16))


# --- Blackwell


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
    traced = jax.jit(lambda *xs: attend(*xs, cached=True, device=device, **more)).trace(*args)
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
    blank = lambda x: jnp.zeros(x.shape, x.dtype)
    chosen = lambda *args, **how: attention_kernel(*jax.tree.map(blank, args), scale=0.1, cached=True, **how)
    told = lambda *args, scale=0.1: str(blackwell.refuses(AttentionCall(*args, scale)))
    ours, hopper = (kernel_device.target(kind) for kind in (kernel_device.BLACKWELL, kernel_device.HOPPER))
    assert chosen(*shapes(128)) is None and chosen(*shapes(128), device=hopper) == "hopper"
    assert chosen(*shapes(128), device=ours) == chosen(*shapes(64, int8=True), device=ours) == "blackwell"
    assert chosen(*shapes(512), device=ours) is None
    assert "512" in told(*shapes(512)) and "96" in told(*shapes(96))
    assert "float32" in told(*shapes(64, jnp.float32)) and "7 ranges" in told(*shapes(64, ranges=7))
    assert "3 heads" in told(*shapes(64, heads=3)) and "scale" in told(*shapes(64), scale=0.0)
