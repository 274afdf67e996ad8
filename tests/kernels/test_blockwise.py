"""Attention in tiles: the reference's values and gradients over packed rows, in a fraction of its memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mercury_jax.config import ModelConfig
from mercury_jax.kernels import attend, attention, blockwise, reference
from mercury_jax.kernels.rounded import rounded
from mercury_jax.models import masks
from mercury_jax.train.data import packing

SLOTS, HEADS, GROUPS, WIDTH = 300, 4, 2, 8


def packed(pattern, *rows):
    """Ranges of rows of documents (tokens, prompt); what is left of a row is padding, which sees nothing."""
    config = ModelConfig(
        vocab=16, width=8, layers=1, heads=1, kv_heads=1, head_dim=8, ffn=8, pattern=pattern, block=32
    )
    made = []
    for documents in rows:
        made.append(packing.Row())
        for n, prompt in documents:
            made[-1].add((0, 0), masks.layout(config, np.full(n, 5), prompt))
    return jnp.asarray(packing.batch(made, SLOTS, 0).ranges)


# One long document, and five short ones whose last canvases are not whole; then padding.
ROWS = ([(150, 7)], [(40, 3), (33, 0), (20, 19), (15, 1), (9, 0)])
LAYOUTS = {name: packed(name, *ROWS) for name in ("causal_encoder", "block_causal", "bidirectional")}


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
        out, lse = run(q, k, v, ranges, **more)
        seen = jnp.where(jnp.isneginf(lse), 0.0, lse)
        return (out * w).sum() + (jnp.sin(seen) * w[..., 0]).sum(), (out, lse)

    return jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True))


def check(run, ranges, softcap=None, size=64, seed=0):
    q, k, v, w = arrays(seed, len(ranges))
    (_, (out, lse)), slopes = graded(run, size, softcap)(q, k, v, ranges, w)
    (_, (want, told)), wanted = graded(reference.run, None, softcap)(q, k, v, ranges, w)
    np.testing.assert_allclose(out, want, atol=1e-5)
    np.testing.assert_allclose(lse, told, atol=1e-5)
    for one, other in zip(slopes, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * float(jnp.abs(other).max()))
    blind = np.asarray(ranges[..., 0] >= ranges[..., 1]).all(-1)
    assert blind.any() and not np.asarray(out)[blind].any() and np.isneginf(lse)[blind].all()
    assert not np.asarray(slopes[0])[blind].any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_gradients_are_the_references_over_packed_documents(layout):
    check(blockwise.run, LAYOUTS[layout])


@pytest.mark.parametrize("softcap, size", [(1.5, 64), (None, 256)])
def test_so_they_are_with_a_softcap_and_in_an_accelerators_tiles(monkeypatch, softcap, size):
    monkeypatch.setattr(blockwise, "ON_CPU", size)
    run = lambda *args, **how: blockwise.run(*args, **how)  # a trace of its own
    check(run, LAYOUTS["causal_encoder"], softcap, size, seed=1)


def test_a_tile_visits_the_tiles_of_keys_that_its_rows_see_and_no_others():
    ranges = LAYOUTS["causal_encoder"].at[:, :64, 1].set(200)  # empty, and not at 0
    found = blockwise.plan(ranges, SLOTS, 64)
    see = np.zeros((2, 320, 320), bool)
    see[:, :SLOTS, :SLOTS] = reference.visible(ranges, SLOTS)
    tiles = np.any(see.reshape(2, 5, 64, 5, 64), axis=(2, 4))
    np.testing.assert_array_equal(found.count, tiles.sum(-1).max(0))
    for b, i in np.ndindex(2, 5):
        some = np.flatnonzero(tiles[b, i])
        np.testing.assert_array_equal(found.order[i, b, : len(some)], some)
    assert found.count.sum() < 25


def test_fewer_queries_than_keys_see_what_their_ranges_say():
    q, k, v, _ = arrays(2, b=1)
    ranges = LAYOUTS["block_causal"][:1, 40:]
    out = blockwise.run(q[:, 40:], k, v, ranges, scale=1.0)
    np.testing.assert_allclose(out, reference.run(q[:, 40:], k, v, ranges, scale=1.0), atol=1e-5)


def test_no_array_has_both_axes_of_the_scores():
    t, (q, k, v, w) = 1024, arrays(0, b=1, t=1024)
    ranges = jnp.zeros((1, t, 2, 2), jnp.int32).at[:, :, 0, 1].set(jnp.arange(t) + 1)

    def temporaries(run):
        found = graded(run, None, None).lower(q, k, v, ranges, w).compile().memory_analysis()
        assert found is not None
        return found.temp_size_in_bytes

    assert temporaries(blockwise.run) < 4 * t * t < temporaries(reference.run)


def test_long_passes_without_a_cache_take_it_and_others_do_not():
    q, k, v, _ = arrays(0, b=1)
    ranges, asked = LAYOUTS["bidirectional"][:1], {"scale": 1.0, "softcap": None, "residual": False}
    chosen = lambda cached, n=SLOTS: attention._first(
        "tpu", cached, q[:, :n], k[:, :n], v[:, :n], ranges[:, :n], asked
    )
    assert chosen(False).run is blockwise.run
    assert chosen(True).run is not blockwise.run and chosen(False, 255).run is reference.run
    with pytest.raises(ValueError, match="backend is 'blockwise'; .*255 keys; it takes 256 or more"):
        attend(q, k[:, :255], v[:, :255], ranges, backend="blockwise")
    with pytest.raises(ValueError, match="rounded keys have no gradient"):
        attend(q, rounded(k), rounded(v), ranges, backend="blockwise")
