"""Hopper attention with a gradient, in the Mosaic GPU interpreter: values and gradients of the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mercury_jax import sharding
from mercury_jax.bench.gpu.interpreter import interpreted
from mercury_jax.models.tensor_parallel import training_ops
from mercury_jax.ops import attend, attention_kernel, device as kernel_device
from mercury_jax.ops.attention import xla
from mercury_jax.ops.attention.inputs import quantise_int8
from tests.marks import slow_except
from tests.ops.packed import packed

BF16 = jnp.bfloat16


def causal(queries, keys, ranges):
    """Each query attends to the keys up to its own, cut into adjacent ranges; every seventh query to none."""
    end = np.arange(queries)[:, None] * keys // queries + 1
    cut = end * np.arange(ranges + 1) // ranges
    found = np.stack([cut[:, :-1], cut[:, 1:]], axis=-1).astype(np.int32)
    found[3::7] = 0
    return found[None]


CASES = {  # heads, key heads, head size, keys, softcap; ranges
    "causal, lengths that are no multiple of a tile": (2, 1, 64, 70, None, causal(40, 70, 1)),
    "block diffusion, two documents in a row": (
        2, 1, 64, 136, None, packed("causal_encoder", 136, 16, [(40, 7), (30, 3)]),
    ),
    "block-causal, two rows": (2, 2, 64, 200, None, packed("block_causal", 200, 16, [(90, 7)], [(33, 0), (20, 19)])),
    "bidirectional documents": (3, 1, 64, 150, None, packed("bidirectional", 150, 16, [(80, 3), (60, 0)])),
    "more tiles than in flight, three ranges": (6, 1, 64, 700, None, causal(100, 700, 3)),
    "a softcap": (2, 1, 64, 70, 2.0, causal(40, 70, 2)),
    "head size 128": (2, 1, 128, 136, None, packed("causal_encoder", 136, 16, [(50, 3)])),
    "head size 256": (2, 1, 256, 130, 2.0, causal(33, 130, 2)),
}  # fmt: skip


def drawn(heads, groups, width, keys, ranges, seed=0):
    """q, k, v in bf16, ranges, and cotangents of the output and of the log-sum-exp, 0 where that is -inf."""
    rng, (b, t) = np.random.default_rng(seed), ranges.shape[:2]
    shapes = ((t, heads), (keys, groups), (keys, groups), (t, heads))
    q, k, v, d_out = (jnp.asarray(rng.normal(size=(b, n, m, width)), BF16) for n, m in shapes)
    d_lse = np.where(blind(ranges)[..., None], 0, rng.normal(size=(b, t, heads)))
    return q, k, v, jnp.asarray(ranges), d_out, jnp.asarray(d_lse, jnp.float32)


def blind(ranges):
    return (ranges[..., 0] >= ranges[..., 1]).all(-1)


def graded(softcap=None, **how):
    """(inputs of `drawn`) -> (out, log-sum-exp, dq, dk, dv) by a backend."""

    @jax.jit
    def run(q, k, v, ranges, d_out, d_lse):
        f = lambda *xs: attend(*xs, ranges, scale=0.2, softcap=softcap, residual=True, **how)
        found, back = jax.vjp(f, q, k, v)
        return *found, *back((d_out, d_lse))

    return run


kernel = functools.partial(graded, backend="hopper_training", device=interpreted())


@pytest.mark.long
@pytest.mark.parametrize("name", slow_except(CASES, "block diffusion, two documents in a row"))
def test_values_and_gradients_equal_those_of_the_reference(name):
    heads, groups, width, keys, softcap, ranges = CASES[name]
    inputs = drawn(heads, groups, width, keys, ranges)
    wide = [x.astype(jnp.float32) if x.dtype == BF16 else x for x in inputs]
    want = graded(softcap, backend="reference")(*wide)
    got = kernel(softcap)(*inputs)
    assert [x.dtype for x in got] == [BF16, jnp.float32, BF16, BF16, BF16]
    np.testing.assert_allclose(got[1], want[1], atol=1e-3)  # -inf where nothing is seen
    for one, other in zip((got[0], *got[2:]), (want[0], *want[2:]), strict=True):
        error = np.abs(np.float32(one) - np.float32(other)).max()
        assert error <= 1e-2 * float(jnp.abs(other).max())
    out, _, dq, dk, dv = (np.asarray(x, np.float32) for x in got)
    assert not out[blind(ranges)].any() and not dq[blind(ranges)].any()
    unseen = ~np.asarray(xla.visible(jnp.asarray(ranges), keys)).any(axis=1)
    assert not dk[unseen].any() and not dv[unseen].any()


@pytest.mark.slow
def test_tiles_without_a_visible_pair_are_neither_read_nor_multiplied():
    """Tiles of queries that see nothing, and of keys that nobody sees, are NaN; so are the cotangents of the first."""
    ranges = np.zeros((1, 256, 2, 2), np.int32)
    ranges[:, :128, 0, 1] = 128 + np.arange(128) // 2  # with two heads two tiles of rows, and 192 keys
    ranges[:, :128, 0, 0] = ranges[:, :128, 1, 0] = 128
    ranges[:, :128, 1] = (
        300,
        310,
    )  # behind a tile of keys that nobody sees, like the one before the first range
    q, k, v, ranges, d_out, d_lse = drawn(1, 1, 64, 384, ranges)
    k, v = (x.at[:, :128].set(jnp.nan) for x in (k, v))
    q, d_out = (x.at[:, 128:].set(jnp.nan) for x in (q, d_out))
    got = kernel()(q, k, v, ranges, d_out, d_lse)
    clean = [jnp.nan_to_num(x.astype(jnp.float32)) for x in (q, k, v, d_out)]
    want = graded(backend="reference")(*clean[:3], ranges, clean[3], d_lse)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(
            np.float32(one), other, atol=2e-2 * float(jnp.nan_to_num(other, neginf=0).max())
        )


def test_what_has_no_gradient_is_refused_by_name():
    def told(width=64, dtype=BF16, ranges=2, softcap=None, int8=False):
        array = jax.ShapeDtypeStruct
        q, k = array((1, 40, 4, width), dtype), array((1, 50, 2, width), dtype)
        k, seen = jax.eval_shape(quantise_int8, k) if int8 else k, array((1, 40, ranges, 2), jnp.int32)
        how = dict(softcap=softcap, backend="hopper_training", device=kernel_device.target("sm_90a"))
        jax.eval_shape(lambda *xs: attend(*xs, **how), q, k, k, seen)

    told()
    told(width=256, softcap=30.0)
    for wrong, match in (
        (dict(width=512), "head size 512 is not one of 64, 128, 256, which have a gradient"),
        (dict(dtype=jnp.float16), "gradients in float16 overflow"),
        (dict(dtype=jnp.float32), "float32; the tensor cores take bfloat16"),
        (dict(width=128, softcap=30.0), "head size 128 with a softcap has no gradient"),
        (dict(int8=True), "rounded keys have no gradient"),
        (dict(ranges=4), "4 ranges"),
    ):
        with pytest.raises(ValueError, match=f"backend is 'hopper_training'; .*{match}"):
            told(**wrong)


def kernel_of(*args, device=None):
    """The kernel that a call with arrays of these shapes runs."""
    names = []
    jax.eval_shape(lambda *arrays: names.append(attention_kernel(*arrays, device=device)), *args)
    return names[0]


@pytest.mark.long
@pytest.mark.parametrize("rows, heads", [(4, 4), (3, 4), (4, 3)])
def test_on_a_mesh_the_kernels_run_on_the_rows_and_heads_of_each_device(rows, heads):
    """XLA's partitioner would gather all rows for a kernel on every device."""
    mesh = sharding.mesh(data=1, fsdp=2, tensor=2, devices=jax.devices()[:4])
    array = jax.ShapeDtypeStruct
    q = array((rows, 256, heads, 64), BF16)
    args = (q, q, q, array((rows, 256, 2, 2), jnp.int32))

    def gradients(q, k, v, ranges):
        ops = training_ops(mesh, kernel_device.target("sm_90a"))
        return jax.grad(lambda *xs: ops.attend(*xs, ranges).astype(jnp.float32).sum(), (0, 1, 2))(q, k, v)

    with jax.set_mesh(mesh):
        text = str(jax.make_jaxpr(gradients)(*args))
    assert "shard_map" in text
    local = (rows // 2 if rows % 2 == 0 else rows) * (heads // 2 if heads % 2 == 0 else heads)
    assert f"bf16[{local},256,64]" in text  # the folded queries of the devices' own programs
    assert kernel_of(*args, device=kernel_device.target("sm_90a")) == "hopper_training"


def test_without_a_kernel_the_partitioner_divides_attention():
    mesh = sharding.mesh(data=1, fsdp=2, devices=jax.devices()[:2])
    q = jax.ShapeDtypeStruct((4, 256, 2, 64), BF16)
    seen = jax.ShapeDtypeStruct((4, 256, 2, 2), jnp.int32)
    assert kernel_of(q, q, q, seen) is None
    assert "shard_map" not in str(jax.make_jaxpr(training_ops(mesh, None).attend)(q, q, q, seen))
