"""Chunked and blockwise attention: the values of the reference, and blockwise its gradients, in less memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mercury_jax.ops import attend
from mercury_jax.ops.attention import xla
from mercury_jax.ops.attention.inputs import AttentionCall, quantise_int8
from mercury_jax.ops.attention.op import ATTENTION, CACHED_ATTENTION
from mercury_jax.ops.attention.xla import CHUNK, LONG_CHUNK
from mercury_jax.types import Device
from tests.ops.packed import packed

SLOTS, HEADS, GROUPS, WIDTH = 300, 4, 2, 8


# One long document, and five short ones whose last canvases are not whole; then padding.
ROWS = ([(150, 7)], [(40, 3), (33, 0), (20, 19), (15, 1), (9, 0)])
LAYOUTS = {
    name: jnp.asarray(packed(name, SLOTS, 32, *ROWS))
    for name in ("causal_encoder", "block_causal", "bidirectional")
}


def arrays(seed, b=2, t=SLOTS, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return [
        jnp.asarray(rng.normal(size=(b, t, n, WIDTH)).astype(dtype)) for n in (HEADS, GROUPS, GROUPS, HEADS)
    ]


@functools.cache
def graded(run, size, softcap):
    """(ranges, q, k, v, weights) -> (out, log-sum-exp, gradients of both), in tiles of `size`."""

    def total(q, k, v, ranges, w):
        more = {"scale": 0.4, "softcap": softcap, "residual": True}
        out, lse = run(AttentionCall(q, k, v, ranges, **more))
        seen = jnp.where(jnp.isneginf(lse), 0.0, lse)
        return (out * w).sum() + (jnp.sin(seen) * w[..., 0]).sum(), (out, lse)

    return jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True))


def check(run, ranges, softcap=None, size=64, seed=0):
    q, k, v, w = arrays(seed, len(ranges))
    (_, (out, lse)), slopes = graded(run, size, softcap)(q, k, v, ranges, w)
    (_, (want, told)), wanted = graded(xla.run_reference, None, softcap)(q, k, v, ranges, w)
    np.testing.assert_allclose(out, want, atol=1e-5)
    np.testing.assert_allclose(lse, told, atol=1e-5)
    for one, other in zip(slopes, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * float(jnp.abs(other).max()))
    blind = np.asarray(ranges[..., 0] >= ranges[..., 1]).all(-1)
    assert blind.any() and not np.asarray(out)[blind].any() and np.isneginf(lse)[blind].all()
    assert not np.asarray(slopes[0])[blind].any()


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blockwise_values_and_gradients_equal_the_reference_over_packed_documents(layout):
    check(xla.run_blockwise, LAYOUTS[layout])


@pytest.mark.long
@pytest.mark.parametrize("softcap, size", [(1.5, 64), (None, 256)])
def test_blockwise_values_and_gradients_with_a_softcap_and_larger_tiles(monkeypatch, softcap, size):
    monkeypatch.setattr(xla, "TILE_CPU", size)
    run = lambda call: xla.run_blockwise(call)  # a trace of its own
    check(run, LAYOUTS["causal_encoder"], softcap, size, seed=1)


@pytest.mark.long
def test_a_query_tile_visits_only_the_key_tiles_in_its_ranges():
    ranges = LAYOUTS["causal_encoder"].at[:, :64, 1].set(200)  # empty, and not at 0
    found = xla.tile_visits(ranges, SLOTS, 64)
    see = np.zeros((2, 320, 320), bool)
    see[:, :SLOTS, :SLOTS] = xla.visible(ranges, SLOTS)
    tiles = np.any(see.reshape(2, 5, 64, 5, 64), axis=(2, 4))
    np.testing.assert_array_equal(found.count, tiles.sum(-1).max(0))
    for b, i in np.ndindex(2, 5):
        some = np.flatnonzero(tiles[b, i])
        np.testing.assert_array_equal(found.order[i, b, : len(some)], some)
    assert found.count.sum() < 25


@pytest.mark.long
def test_blockwise_attention_with_fewer_queries_than_keys():
    q, k, v, _ = arrays(2, b=1)
    ranges = LAYOUTS["block_causal"][:1, 40:]
    call = AttentionCall(q[:, 40:], k, v, ranges, scale=1.0)
    np.testing.assert_allclose(xla.run_blockwise(call), xla.run_reference(call), atol=1e-5)


def test_blockwise_attention_materialises_no_scores():
    t, (q, k, v, w) = 1024, arrays(0, b=1, t=1024)
    ranges = jnp.zeros((1, t, 2, 2), jnp.int32).at[:, :, 0, 1].set(jnp.arange(t) + 1)

    def temporaries(run):
        found = graded(run, None, None).lower(q, k, v, ranges, w).compile().memory_analysis()
        assert found is not None
        return found.temp_size_in_bytes

    assert temporaries(xla.run_blockwise) < 4 * t * t < temporaries(xla.run_reference)


def test_long_passes_without_a_cache_use_blockwise_attention_and_others_do_not():
    q, k, v, _ = arrays(0, b=1)
    ranges = LAYOUTS["bidirectional"][:1]
    chosen = lambda op, n=SLOTS: op.choose("tpu", *(x[:, :n] for x in (q, k, v, ranges)), scale=1.0)
    assert chosen(ATTENTION) is ATTENTION.kernels["blockwise"]
    assert chosen(CACHED_ATTENTION) is chosen(ATTENTION, 255) is None
    with pytest.raises(ValueError, match="backend is 'blockwise'; .*255 keys; it takes 256 or more"):
        attend(q, k[:, :255], v[:, :255], ranges, backend="blockwise")
    with pytest.raises(ValueError, match="rounded keys have no gradient"):
        attend(q, quantise_int8(k), quantise_int8(v), ranges, backend="blockwise")


# --- chunked: a cache on a CPU

B, T, H, G, K = 2, 5, 4, 2, 8
run_cached, run_plain = (
    jax.jit(functools.partial(attend, backend=name)) for name in ("chunked", "reference")
)


def cache_inputs(slots: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(slots)
    q, k, v = (rng.normal(size=s).astype(np.float32) for s in [(B, T, H, K), *[(B, slots, G, K)] * 2])
    ends = np.sort(rng.integers(0, slots + 1, (B, T, 4)), axis=-1)
    return 3 * q, k, v, ends.reshape(B, T, 2, 2).astype(np.int32)


@pytest.mark.parametrize("slots", [4 * CHUNK + 1, 5 * CHUNK + 13, 7 * CHUNK])
def test_chunked_attention_equals_the_reference(slots):
    q, k, v, ranges = cache_inputs(slots)
    ranges[0, 1] = 0  # a query without keys
    ranges[1] = np.where(ranges[1] > 0, ranges[1], 1)
    np.testing.assert_allclose(run_cached(q, k, v, ranges), run_plain(q, k, v, ranges), atol=2e-6)
    assert not np.asarray(run_cached(q, k, v, ranges))[0, 1].any()


def test_a_gpu_without_a_kernel_reads_a_long_cache_in_large_chunks():
    slots = 4 * LONG_CHUNK + 300
    q, k, v, ranges = map(jnp.asarray, cache_inputs(slots))
    run = jax.jit(functools.partial(attend, backend="chunked_long"))
    np.testing.assert_allclose(run(q, k, v, ranges), run_plain(q, k, v, ranges), atol=2e-6)
    how = dict(scale=1.0, device=Device("sm_80"))
    chosen = lambda n: CACHED_ATTENTION.choose("cuda", q, k[:, :n], v[:, :n], ranges, **how)
    assert chosen(slots) is CACHED_ATTENTION.kernels["chunked_long"] and chosen(4 * LONG_CHUNK) is None


def test_chunked_attention_reads_no_chunk_outside_of_the_ranges():
    q, k, v, _ = cache_inputs(6 * CHUNK)
    ranges = np.zeros((B, T, 2, 2), np.int32)
    ranges[..., 0, :] = CHUNK + 3, 2 * CHUNK - 1
    spoiled = [x.copy() for x in (k, v)]
    for x in spoiled:  # whole chunks that no query attends to; within a chunk a NaN would be multiplied by 0
        x[:, :CHUNK] = x[:, 2 * CHUNK :] = np.nan
    np.testing.assert_array_equal(run_cached(q, *spoiled, ranges), run_cached(q, k, v, ranges))


@pytest.mark.slow
def test_chunked_attention_of_a_row_does_not_depend_on_the_ranges_of_other_rows():
    q, k, v, ranges = cache_inputs(6 * CHUNK)
    near = ranges.copy()
    near[0] = ranges[0] // 4
    far = near.copy()
    far[1] = 0, 6 * CHUNK
    np.testing.assert_array_equal(run_cached(q, k, v, near)[0], run_cached(q, k, v, far)[0])
