"""Rows folded into tiles, the keys that a tile visits, splits of the keys and their merging."""

import jax.numpy as jnp
import numpy as np
import pytest

from mercury_jax.ops.attention import tiling, xla

RNG = np.random.default_rng(0)


def test_unfolding_inverts_folding():
    q = jnp.asarray(RNG.normal(size=(2, 5, 6, 8)), jnp.float32)
    rows = tiling.fold_queries(q, 2, 64)
    assert rows.shape == (4, 64, 8) and not np.asarray(rows)[:, 15:].any()
    np.testing.assert_array_equal(rows[2, 4], q[1, 1, 1])  # batch 1, key head 0: query 1, its second head
    np.testing.assert_array_equal(tiling.unfold_queries(rows, 2, 5, 6), q)
    np.testing.assert_array_equal(tiling.unfold_queries(rows[..., 0], 2, 5, 6), q[..., 0])


@pytest.mark.parametrize("block", [1, 2, 4])
def test_rows_of_a_head_follow_each_other_in_blocks_of_queries(block):
    q = jnp.asarray(RNG.normal(size=(2, 5, 6, 8)), jnp.float32)
    ranges = jnp.asarray(RNG.integers(0, 99, (2, 5, 3, 2)), jnp.int32)
    rows = tiling.fold_queries(q, 3, 8, block)
    folded = np.asarray(tiling.fold_ranges(ranges, 2, 8, block))
    for t, h in np.ndindex(5, 6):
        at = t // block * 2 * block + h % 2 * block + t % block
        np.testing.assert_array_equal(rows[3 + h // 2, at], q[1, t, h])
        np.testing.assert_array_equal(folded[1, :, at], ranges[1, t].reshape(-1))
    assert rows.shape[1] == folded.shape[2] == 16
    np.testing.assert_array_equal(tiling.unfold_queries(rows, 2, 5, 6, block), q)


@pytest.mark.parametrize("count", range(1, 7))
def test_gaps_are_the_keys_in_no_range(count):
    cut = np.sort(RNG.integers(0, 60, (2, 30, 2 * count)), axis=-1).reshape(2, 30, count, 2)
    cut[:, ::3, 0] = 7  # an empty range
    ranges = cut[:, :, RNG.permutation(count)]
    found = np.asarray(tiling.gaps(jnp.asarray(ranges, jnp.int32)))
    assert found.shape == (2, 30, count + 1, 2)
    hidden = lambda x: ((np.arange(64) >= x[..., :1]) & (np.arange(64) < x[..., 1:])).any(axis=2)
    np.testing.assert_array_equal(hidden(found), ~hidden(ranges))


@pytest.mark.parametrize("seed", range(5))
def test_tile_bounds_hold_every_key_in_the_ranges_of_a_tile(seed):
    rng, keys, slots, rows = np.random.default_rng(seed), 16, 200, 8
    cut = np.sort(
        rng.integers(0, slots + 9, (2, 10, 4)), axis=-1
    )  # ends beyond the slots count as the last slot
    ranges = jnp.asarray(cut.reshape(2, 10, 2, 2), jnp.int32).at[:, 3].set(0)
    edges = tiling.fold_ranges(ranges, 2, rows)
    told = np.asarray(tiling.tile_bounds(edges, rows, keys, slots))
    see = np.repeat(np.asarray(xla.visible(ranges, slots)), 2, axis=1)
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


@pytest.mark.parametrize("seed", range(3))
def test_visits_list_the_tiles_with_a_visible_pair_and_those_that_need_a_mask(seed):
    rng, keys, slots, rows = np.random.default_rng(seed), 16, 192, 8
    cut = np.sort(rng.integers(0, slots + 9, (2, 20, 4)), axis=-1) // 24 * 24
    ranges = jnp.asarray(cut.reshape(2, 20, 2, 2), jnp.int32).at[:, 3].set(0)
    edges = tiling.fold_ranges(ranges, 2, rows)
    see = np.repeat(np.asarray(xla.visible(ranges, slots)), 2, axis=1)  # [B, 40 rows, slots]
    pairs = np.asarray(see.reshape(2, 5, rows, 12, keys).any(axis=(2, 4)))
    one = np.repeat((ranges[..., 0, None] <= np.arange(12) * keys), 2, axis=1)
    end = np.repeat((ranges[..., 1, None] >= np.arange(1, 13) * keys), 2, axis=1)
    whole = np.asarray(np.asarray(one & end).any(axis=2).reshape(2, 5, rows, 12).all(axis=2))
    for listed, some, every in (
        (tiling.key_visits(edges, rows, keys, slots), pairs, whole),
        (
            tiling.row_visits(edges, rows, keys, slots),
            pairs.swapaxes(1, 2),
            whole.swapaxes(1, 2),
        ),
    ):
        for b, i in np.ndindex(*some.shape[:2]):
            count, *order = np.asarray(listed[b, i])
            want = [2 * j + (not every[b, i, j]) for j in np.flatnonzero(some[b, i])]
            assert order[:count] == want
    assert whole.any() and not pairs.all()
