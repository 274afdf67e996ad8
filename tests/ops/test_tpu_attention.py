"""The TPU kernel in the TPU interpreter equals the reference, over shapes, dtypes and ranges."""

import functools
from typing import Any

import jax
import jax.experimental.pallas.tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest

from mercury_jax.ops import attend, attention_kernel, device as kernel_device
from mercury_jax.ops.attention import tpu, xla
from mercury_jax.ops.attention.inputs import (
    AttentionCall,
    Int8Vectors,
    dequantise,
    quantise_fp8,
    quantise_int8,
)
from mercury_jax.ops.attention.op import CACHED_ATTENTION
from mercury_jax.types import Device
from tests.marks import slow_except


def case(b, t, h, g, s, width, r, dtype, seed=0):
    """q, k, v, ranges, and which keys any query sees; the last query sees nothing."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.normal(size=(b, n, m, width)) for n, m in ((t, h), (s, g), (s, g)))
    ranges = np.zeros((b, t, r, 2), np.int32)
    prefix = rng.integers(s // 3, s // 2, (b, 1))
    ranges[:, :, 0] = np.stack(np.broadcast_arrays(np.arange(b)[:, None] * 5, prefix + np.zeros(t, int)), -1)
    for i in range(
        1, r
    ):  # further ones grow from query to query, behind a gap that nobody sees; the last ends late
        start = prefix + 7 + (s // 4) * (i - 1)
        ends = start + 1 + np.arange(t) * 3 % (s // 5) if i < r - 1 else np.full((b, t), s + 9)
        ranges[:, :, i] = np.stack(np.broadcast_arrays(start, ends), axis=-1)
    ranges[:, -1] = 0
    some = np.asarray(xla.visible(jnp.asarray(ranges), s)).any(axis=1)
    return *(jnp.asarray(x, dtype) for x in (q, k, v)), jnp.asarray(ranges), jnp.asarray(some)[:, :, None]


def interpreted(q, k, v, ranges, **more):
    """The kernel's answer; what it has not written is NaN, and so is what lies behind the last slot."""
    device = Device("tpu", interpret=True)
    call = functools.partial(AttentionCall, **more, device=device)
    assert tpu.refuses(call(q, k, v, ranges)) is None
    return jax.jit(lambda *xs: tpu.run(call(*xs)))(q, k, v, ranges)


def expected(q, k, v, ranges, **more):
    return xla.run_reference(AttentionCall(*(x.astype(jnp.float32) for x in (q, k, v)), ranges, **more))


def alike(found, wanted, close):
    (out, nats), (want, told) = ([np.asarray(x, np.float64) for x in pair] for pair in (found, wanted))
    assert np.abs(out - want).max() <= close * np.abs(want).max()
    np.testing.assert_allclose(nats, told, atol=close, rtol=close)  # -inf where nothing is seen
    assert not out[:, -1].any() and np.isneginf(nats[:, -1]).all()


CASES = {  # B, T, H, G, S, K, R, dtype; softcap, how close
    "one head, fewer keys than a tile": ((1, 3, 1, 1, 40, 64, 1, jnp.float32), None, 1e-5),
    "two rows of a batch, keys in two tiles, the last not full": (
        (2, 20, 4, 2, 700, 128, 2, jnp.float32), None, 1e-5,
    ),
    "three ranges, capped": ((1, 9, 4, 2, 300, 192, 3, jnp.bfloat16), 2.0, 1e-2),
    "head size 512": ((1, 5, 4, 2, 200, 512, 2, jnp.bfloat16), None, 1e-2),
}  # fmt: skip


@pytest.mark.parametrize("name", slow_except(CASES, "three ranges, capped"))
def test_the_tpu_kernel_equals_the_reference(name):
    shape, softcap, close = CASES[name]
    q, k, v, ranges, some = case(*shape)
    more = dict(scale=0.1, softcap=softcap, residual=True)
    found = interpreted(q, *(jnp.where(some[..., None], x, jnp.nan) for x in (k, v)), ranges, **more)
    assert found[0].dtype == q.dtype and found[1].dtype == jnp.float32
    alike(found, expected(q, k, v, ranges, **more), close)


@pytest.mark.long
def test_each_query_tile_visits_its_own_keys(monkeypatch):
    monkeypatch.setattr(tpu, "MAX_ROWS", 16)
    monkeypatch.setattr(tpu, "KEYS", (128,))
    q, k, v, ranges, _ = case(1, 40, 2, 2, 400, 64, 2, jnp.float32)
    ranges = (
        ranges.at[0, :16, 0].set(jnp.array([260, 300])).at[0, :16, 1].set(0)
    )  # the first tile: one late range
    ranges = ranges.at[0, 16:32].set(0)  # the second: nothing at all
    more = dict(scale=0.125, softcap=None, residual=True)
    some = xla.visible(ranges, 400).any(axis=1)[..., None, None]
    found = interpreted(q, *(jnp.where(some, x, jnp.nan) for x in (k, v)), ranges, **more)
    alike(found, expected(q, k, v, ranges, **more), 1e-5)


@pytest.mark.long
def test_int8_keys_equal_their_dequantised_values_on_a_tpu():
    q, k, v, ranges, some = case(1, 6, 4, 2, 600, 64, 2, jnp.bfloat16)
    k, v = quantise_int8(k), quantise_int8(v)
    more = dict(scale=0.125, softcap=None, residual=True)
    wanted = expected(q, dequantise(k, jnp.float32), dequantise(v, jnp.float32), ranges, **more)
    k, v = (Int8Vectors(x.values, jnp.where(some, x.scale, jnp.nan)) for x in (k, v))
    alike(interpreted(q, k, v, ranges, **more), wanted, 1e-2)


@pytest.mark.long
def test_with_simulated_memory_the_kernel_reads_only_what_it_has_copied():
    """The slower interpreter, with VMEM of its own and an error for what lies outside of it."""
    q, k, v, ranges, _ = case(1, 3, 2, 2, 40, 64, 1, jnp.float32)
    more = dict(scale=0.1, softcap=None, residual=True)
    device = Device("tpu", interpret=pltpu.InterpretParams(uninitialized_memory="nan"))
    found = jax.jit(lambda *xs: tpu.run(AttentionCall(*xs, **more, device=device)))(q, k, v, ranges)
    alike(found, expected(q, k, v, ranges, **more), 1e-5)


def test_rows_are_in_as_few_tiles_as_memory_and_cores_allow(monkeypatch):
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.bfloat16)
    ranges = jax.ShapeDtypeStruct((1, 256, 2, 2), jnp.int32)
    planned: Any = lambda q, k: tpu.config_of(AttentionCall(q, k, k, ranges, 1.0))
    q, k = shape(1, 256, 16, 256), shape(1, 4096, 8, 256)
    monkeypatch.setattr(tpu, "_vmem_and_cores", lambda: (64 * 2**20, 1))
    assert planned(q, k).tiles == 1 and planned(q, k).rows == 512
    monkeypatch.setattr(tpu, "_vmem_and_cores", lambda: (64 * 2**20, 2))
    assert planned(q, k).tiles == 2  # one for each core
    monkeypatch.setattr(tpu, "_vmem_and_cores", lambda: (16 * 2**20, 1))
    p = planned(q, k)
    assert p.tiles > 1 and p.tiles * p.rows >= 512 and tpu._vmem_bytes(p, 2, 2) <= 16 * 2**20
    assert planned(shape(1, 256, 256, 512), shape(1, 4096, 256, 512)) is None


def test_the_tpu_kernel_names_what_it_refuses():
    shape = lambda s, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(s, dtype)
    q, k, ranges = shape((1, 4, 4, 64)), shape((1, 9, 2, 64)), shape((1, 4, 2, 2), jnp.int32)
    told = lambda q=q, k=k, v=None: str(tpu.refuses(AttentionCall(q, k, k if v is None else v, ranges, 0.1)))
    int8 = jax.eval_shape(quantise_int8, k)
    assert told() == told(k=int8) == "None"
    assert "fp8" in told(k=jax.eval_shape(quantise_fp8, k))
    assert "int8" in told(v=int8) and "float16" in told(shape((1, 4, 4, 64), jnp.float16))
    assert "96" in told(shape((1, 4, 4, 96)), shape((1, 9, 2, 96))) and "3 heads" in told(
        shape((1, 4, 3, 64))
    )
    huge = shape((1, 9, 256, 512))
    assert "VMEM" in told(shape((1, 4, 256, 512)), huge)


def test_the_tpu_kernel_is_not_used_where_xla_would_have_to_divide_it():
    """XLA cannot divide a kernel among devices, which shard_map does; a mesh of one device divides nothing."""
    q, k, v, ranges, _ = case(2, 4, 2, 2, 40, 64, 1, jnp.float32)
    seen = []

    def ask(q, k, v, ranges):
        seen.append(tpu.refuses(AttentionCall(q, k, v, ranges, scale=0.1)))
        return q

    rows = jax.sharding.PartitionSpec("data")

    def traced(devices, within):
        mesh = jax.make_mesh((devices, 1), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        f = jax.shard_map(ask, mesh=mesh, in_specs=(rows,) * 4, out_specs=rows) if within else ask
        args = jax.device_put((q, k, v, ranges), jax.sharding.NamedSharding(mesh, rows))
        jax.jit(f).lower(*args)
        return seen.pop()

    assert traced(1, within=False) is None and traced(2, within=True) is None
    assert "divide" in traced(2, within=False)


def test_compiled_for_a_tpu_only_passes_over_a_cache_use_the_kernel():
    arrays = case(1, 4, 2, 2, 40, 64, 1, jnp.float32)[:4]
    with pytest.raises(ValueError, match="no TPU"):
        attend(*arrays, backend="tpu")
    chosen = lambda device=None, cached=True: attention_kernel(*arrays, cached=cached, device=device)
    device = kernel_device.target(kernel_device.TPU)
    assert chosen(device) == "tpu" and chosen(device, cached=False) is None
    assert chosen() is None and chosen(kernel_device.target(kernel_device.HOPPER)) is None
    how = dict(scale=1.0, softcap=None, device=device)
    assert CACHED_ATTENTION.choose("cuda", *arrays, **how) is not CACHED_ATTENTION.kernels["tpu"]
