"""Rows folded into tiles, the keys that a tile visits, splits of the keys and their merging."""

import jax.numpy as jnp
import numpy as np
import pytest

from mercury_jax.kernels import reference, tiling

RNG = np.random.default_rng(0)


def test_unfolding_inverts_folding():
    q = jnp.asarray(RNG.normal(size=(2, 5, 6, 8)), jnp.float32)
    rows = tiling.fold_queries(q, 2, 64)
    assert rows.shape == (4, 64, 8) and not np.asarray(rows)[:, 15:].any()
    np.testing.assert_array_equal(rows[2, 4], q[1, 1, 1])  # batch 1, key head 0: query 1, its second head
    np.testing.assert_array_equal(tiling.unfold_queries(rows, 2, 5, 6), q)
    np.testing.assert_array_equal(tiling.unfold_queries(rows[..., 0], 2, 5, 6), q[..., 0])


@pytest.mark.parametrize("seed", range(5))
def test_tile_bounds_hold_every_key_in_the_ranges_of_a_tile(seed):
    rng, keys, slots, rows = np.random.default_rng(seed), 16, 200, 8
    cut = np.sort(
        rng.integers(0, slots + 9, (2, 10, 4)), axis=-1
    )  # ends beyond the slots count as the last slot
    ranges = jnp.asarray(cut.reshape(2, 10, 2, 2), jnp.int32).at[:, 3].set(0)
    edges = tiling.fold_ranges(ranges, 2, rows)
    told = np.asarray(tiling.tile_bounds(edges, rows, keys, slots))
    see = np.repeat(np.asarray(reference.visible(ranges, slots)), 2, axis=1)
    see = np.concatenate([see, see[:, -1:].repeat(-see.shape[1] % rows, 1)], axis=1).reshape(
        2, -1, rows, slots
    )
    at = np.arange(slots)
    for b, tile in np.ndindex(told.shape[:2]):
        first, last, start, end, *hulls = told[b, tile]
        seen = np.flatnonzero(see[b, tile].any(axis=0))
        assert (first, last) == (seen[0] // keys, seen[-1] // keys + 1)
        assert see[b, tile][:, (at >= start) & (at < end)].all()
        covered = [(at >= low) & (at < high) for low, high in zip(hulls[::2], hulls[1::2], strict=True)]
        assert not (see[b, tile].any(axis=0) & ~np.any(covered, axis=0)).any()


def test_rows_without_keys_visit_no_tile():
    told = np.asarray(tiling.tile_bounds(jnp.zeros((1, 4, 8), jnp.int32), 8, 16, 64))[0, 0]
    assert told[0] == told[1] and not told[4:].any()


@pytest.mark.parametrize(
    "programs, steps, least", [(32, 128, 0.95), (8, 128, 0.9), (1, 512, 0.6), (100, 64, 0.7)]
)
def test_splits_keep_the_processors_busy(programs, steps, least):
    count = tiling.choose_splits(programs, steps, 132)
    waves = -(-programs * count // 132)
    assert programs * steps >= least * waves * 132 * -(-steps // count)
    assert tiling.choose_splits(132, steps, 132) == 1 and tiling.choose_splits(programs, 1, 132) == 1


def test_merged_splits_equal_attention_over_all_keys():
    scores, values = RNG.normal(size=(3, 4, 6, 20)), RNG.normal(size=(4, 20, 8))
    scores[0, :, 0], scores[:, :, 1] = -np.inf, -np.inf  # a row that sees nothing in one part; one in none
    with np.errstate(divide="ignore", invalid="ignore"):
        sums = np.exp(scores).sum(axis=-1)
        outs = np.nan_to_num(np.exp(scores) @ values / sums[..., None])
        lses = np.log(sums)
        whole = np.log(sums.sum(axis=0))
    out, lse = tiling.merge_splits(jnp.asarray(outs, jnp.float32), jnp.asarray(lses, jnp.float32))
    want = np.nan_to_num(
        (outs * sums[..., None]).sum(axis=0) / np.maximum(sums.sum(axis=0), 1e-30)[..., None]
    )
    np.testing.assert_allclose(out, want, atol=1e-5)
    np.testing.assert_allclose(lse, whole, atol=1e-5)
