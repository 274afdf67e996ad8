"""Passes over a part of the canvas, which read the keys and values of the rest from the cache.

The keys and values of a canvas become outdated in every step, because its tokens attend to each other. Two methods
reuse them nevertheless: `Refresh` recomputes all positions every few steps, as Fast-dLLM (arXiv 2505.22618) and dInfer
do, and the policies of `cache_refresh` choose positions in each pass. `run_by_width` runs rows that compute many
positions separately from rows that compute few.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.config import Refresh
from mercury_jax.decode.denoise import denoise, open_canvases
from mercury_jax.decode.methods.cache_refresh import (
    NEVER,
    CachePolicy,
    CacheView,
    Positions,
    Reuse,
    cache_vectors,
    drift as key_drift,
    first_reuse,
)
from mercury_jax.decode.passes import Feed, next_feed, slice_rows, times
from mercury_jax.decode.state import DecodeConfig, Frame, Method, Rows, SamplingParams, State, step_key
from mercury_jax.decode.token_stats import write_at
from mercury_jax.decode.view import window_of, window_offset
from mercury_jax.sharding import varying, varying_axes
from mercury_jax.types import Cache, Params, Pass


def key_reuse(policy: Refresh | CachePolicy, shifted: bool) -> Method:
    """Makes the method that reuses keys and values as `policy` says."""
    # With shifted logits a pass also feeds the token before its first position, unless it starts at position 0. A row
    # that reuses the keys before its block must fit that token into its widest pass too.
    return Method("key_reuse", reuse_step, first_slot, settings=policy, margin=8 if shifted else 0)


def first_slot(config: DecodeConfig, sampling: SamplingParams, rows: Rows) -> Reuse | tuple[()]:
    """Makes what a policy knows of earlier passes before the first one; a `Refresh` needs to know nothing."""
    policy = config.method.settings
    if not isinstance(policy, CachePolicy):
        return ()
    return first_reuse(policy, config.model, len(rows.tokens), config.width)


def reuse_step(config: DecodeConfig, params: Params, state: State) -> tuple[State, Frame]:
    """Runs one pass as `denoise.plain_step`, over a part of the canvases."""
    state = open_canvases(config, state)
    feed = next_feed(config, state)
    run = _policy_forward if isinstance(config.method.settings, CachePolicy) else _refresh_forward
    hidden, state = run(config, params, state, feed)
    state, frame = denoise(config, params, state, hidden, None, ~feed.encoding & ~state.done)
    return feed.advance(_note_confidence(state, frame)), frame


class PartialPass(NamedTuple):
    """The positions that each row computes in one pass; every leaf has the batch axis first."""

    at: Int[Array, "B W"]  # indices in the canvas; the first `count` are computed, and are in ascending order
    count: Int[Array, "B"]  # number of positions to compute; 0 leaves the row unchanged
    end: Int[Array, "B"]  # end of the slots that each position attends to
    offset: Int[Array, "B"]  # index of the window within the canvas
    encoding: Bool[Array, "B"]  # rows that write committed tokens to the cache
    slots: Int[Array, "B W"] | None = None  # slot of each canvas position; None: `at` has no gaps
    known: Bool[Array, "B W"] | None = None  # canvas positions whose slot holds their own keys


def _refresh_forward(config: DecodeConfig, params: Params, state: State, feed: Feed) -> tuple[Any, State]:
    """Runs one pass with a `Refresh`: rows that are due compute their whole canvas, the others a part of it.

    The part is the window with `before` positions before it and `after` positions after it. `after` None means all
    positions after it, which is the prefix cache of Fast-dLLM.

    Returns:
        Hidden states of each row's window [B, L, ...], and the state with the new cache.
    """
    refresh, width, used = config.method.settings, config.width, feed.used
    assert isinstance(refresh, Refresh)
    offset = window_offset(config, state.cache_length, state.committed)
    due = (state.step == 0) if refresh.every is None else (state.step % refresh.every == 0)
    first = jnp.where(due, 0, jnp.maximum(offset - refresh.before, 0))
    stop = used if refresh.after is None else jnp.minimum(used, offset + config.window + refresh.after)
    count = jnp.maximum(jnp.where(due, used, stop) - first, 0)
    at = jnp.minimum(first[:, None] + jnp.arange(width), width - 1)
    count, never = jnp.where(state.done, 0, count), jnp.zeros_like(state.done)
    work = PartialPass(at, count, used, offset, encoding=never)

    least = refresh.before + config.window  # positions that a pass must have to hold the window
    sizes = _quarters(width) if refresh.after is None else [least + refresh.after]
    time = times(config, state, never)

    def window(rows: PartialPass, hidden: Any, *unused: Any) -> Any:
        return slice_rows(hidden, rows.offset - rows.at[:, 0], config.window)

    # The buffer of hidden states that the groups of rows fill; its shapes are found by abstract evaluation.
    one_row = jax.tree.map(lambda x: x[:1], (work, state, time))
    like = jax.eval_shape(lambda: window(one_row[0], _run_rows(config, params, width, *one_row)[0]))
    blank = jax.tree.map(lambda x: jnp.zeros((*count.shape, *x.shape[1:]), x.dtype), like)
    collect = lambda old, *found: window(*found)
    cache, hidden = run_by_width(
        config, params, state, time, work, [max(least, x) for x in sizes], collect, blank
    )
    return hidden, state._replace(cache=cache)


def _policy_forward(config: DecodeConfig, params: Params, state: State, feed: Feed) -> tuple[Any, State]:
    """Runs one pass over the positions that a cache policy chooses.

    The attention mask of a pass is a range of slots per row. If the policy hides positions, the keys of the attended
    ones are therefore stored in slots without gaps, and a row whose set of attended positions changes computes all of
    them. So does a row that encodes, or that opens a canvas after the tokens that it has encoded.

    Returns:
        Hidden states of each row's window [B, L, ...], those of earlier passes where this pass computed none; and the
        state with the new cache and `Reuse`.
    """
    policy, width, old = config.method.settings, config.width, state.method
    assert isinstance(policy, CachePolicy) and isinstance(old, Reuse)
    tokens, used, encoding = feed
    offset = window_offset(config, state.cache_length, state.committed)
    # In models with an encoded prefix, a new canvas begins at other positions: nothing of it has been computed.
    if config.model.config.pattern != "bidirectional":
        old = old._replace(age=jnp.where((state.step <= 0)[:, None], NEVER, old.age))
    positions, memory = jax.vmap(functools.partial(_choose, config, policy))(state.without_cache(), old, used)
    exists = jnp.arange(width) < used[:, None]
    attend = exists & (positions.attend | encoding[:, None])
    moved = jnp.any(attend != old.attended, axis=1, keepdims=True)
    compute = attend & (positions.compute | moved | (old.age >= NEVER)) & ~state.done[:, None]
    first = state.cache_length
    slots = first[:, None] + jnp.cumsum(attend, axis=1) - 1  # [B, W] attended positions without gaps
    at = jnp.argsort(~compute, axis=1, stable=True).astype(jnp.int32)  # [B, W] computed positions first
    known = ~moved & (old.age < NEVER)
    end = first + attend.sum(1)
    work = PartialPass(at, compute.sum(1), end, offset, encoding, slots.astype(jnp.int32), known)

    limit = policy.limit(config.window, dict(policy.params))
    sizes = _quarters(width) if limit is None else [limit]
    read = (
        (lambda rows, cache, size: cache_vectors(cache, _at_positions(rows, size)[0]))
        if policy.drift
        else None
    )
    kept = (old.hidden, old.key_drift, old.value_drift)
    time, fed = times(config, state, encoding), state._replace(canvas=tokens)
    cache, kept = run_by_width(
        config, params, fed, time, work, sizes, functools.partial(_keep_hidden, width), kept, read
    )

    age = jnp.where(compute, 0, jnp.minimum(old.age + 1, NEVER))
    new = Reuse(tokens, age, attend, kept[1], kept[2], old.confidence, kept[0], memory)
    stay = lambda new, old: jnp.where(state.done.reshape(-1, *[1] * (new.ndim - 1)), old, new)
    reuse = jax.tree.map(stay, new, old)
    return slice_rows(reuse.hidden, offset, config.window), state._replace(cache=cache, method=reuse)


def _choose(
    config: DecodeConfig, policy: CachePolicy, row: State, old: Reuse, used: Int[Array, ""]
) -> tuple[Positions, Any]:
    """Builds the view of one row and calls the policy."""
    at = jnp.arange(config.width)
    window = window_of(config, row)
    exists, mask = at < used, config.corruption.mask
    block = (at >= row.committed - row.cache_length) & (at < window.end - row.cache_length)
    undecided = ~row.frozen & exists
    view = CacheView(
        canvas=row.canvas, changed=exists & (row.canvas != old.canvas),
        masked=undecided & (row.canvas == mask) if mask is not None else undecided, exists=exists,
        prompt=at < row.prompt - row.cache_length, block=block & exists, step=row.step, passes=row.nfe,
        age=jnp.minimum(old.age + 1, NEVER), attended=old.attended, key_drift=old.key_drift,
        value_drift=old.value_drift, confidence=old.confidence, hidden=old.hidden,
    )  # fmt: skip
    key = jax.random.fold_in(step_key(row.key, row.committed, row.step), 2)
    return policy(key, view, old.memory)


def _keep_hidden(
    width: int, old: tuple[Any, Array, Array], rows: PartialPass, hidden: Any, before: Any, after: Cache
) -> tuple[Any, Array, Array]:
    """Writes the results of a pass over T positions into the records of all W positions.

    Args:
        old: Hidden states, key drift and value drift of the rows, leaves [b, W, ...].
        hidden: Their hidden states, leaves [b, T, ...].
        before: Their keys and values before the pass; None if the policy reads no drift.
    """
    size = jax.tree.leaves(hidden)[0].shape[1]
    # Unused entries get the index W, which mode="drop" ignores.
    at = jnp.where(jnp.arange(size) < rows.count[:, None], rows.at[:, :size], width)
    put = lambda old, new: jax.vmap(lambda old, new, at: old.at[at].set(new, mode="drop"))(old, new, at)
    hidden = jax.tree.map(put, old[0], hidden)
    if before is None:
        return hidden, *old[1:]
    slots, known = _at_positions(rows, size)
    moved = [
        jnp.where(known, key_drift(*x), 0.0) for x in zip(before, cache_vectors(after, slots), strict=True)
    ]
    return hidden, put(old[1], moved[0]), put(old[2], moved[1])


def _at_positions(rows: PartialPass, size: int) -> tuple[Int[Array, "b T"], Bool[Array, "b T"]]:
    """Returns the slots of the first `size` positions of a pass, and whether each slot holds its position's keys."""
    assert rows.slots is not None and rows.known is not None
    slots, known = (jnp.take_along_axis(x, rows.at[:, :size], axis=1) for x in (rows.slots, rows.known))
    return slots, known


def _note_confidence(state: State, frame: Frame) -> State:
    """Records the confidence at the positions of the window, for policies that read `CacheView.confidence`."""
    if not isinstance(state.method, Reuse):  # a `Refresh`
        return state
    offset = frame.start - state.cache_length
    put = jax.vmap(lambda old, new, at: write_at(old, new, at))
    written = put(state.method.confidence, frame.confidence.astype(jnp.float32), offset)
    confidence = jnp.where((frame.used > 0)[:, None], written, state.method.confidence)
    return state._replace(method=state.method._replace(confidence=confidence))


def _quarters(width: int) -> list[int]:
    """Returns a quarter, a half and three quarters of the canvas, each rounded up to a multiple of 8."""
    return [-(-width * k // 32) * 8 for k in (1, 2, 3)]


def run_by_width(
    config: DecodeConfig,
    params: Params,
    state: State,
    time: Float[Array, "B"] | None,
    work: PartialPass,
    widths: Sequence[int],
    collect: Callable[[Any, PartialPass, Any, Any, Cache], Any],
    collected: Any,
    read: Callable[[PartialPass, Cache, int], Any] | None = None,
) -> tuple[Cache, Any]:
    """Runs each row in the narrowest of several forward passes that holds its positions.

    In the same step some rows recompute their whole canvas and others a few positions. In one pass of equal widths
    every row would cost as much as the widest one. Instead, the rows that need the same width run together, in groups
    of about `TOKENS` positions, and groups without such a row are skipped. Group, place in the group and width depend
    only on the row's own index and count, so that in the same program the results of a row do not depend on the other
    rows, bit for bit.

    Args:
        collect: collect(old, rows, hidden [b, T, ...], result of `read`, cache after the pass) -> the new value of
            `old`, leaves [b, ...], for a group of b rows.
        collected: Initial value of what `collect` returns, leaves [B, ...]. Only the rows that ran are replaced.
        read: read(rows, cache before the pass, T) -> what `collect` needs from that cache. None: nothing.

    Returns:
        The cache, and the new value of `collected`.
    """
    axes = varying_axes((params, state))
    carry, lower = varying((state.cache, collected), axes), 0
    for width in sorted({min(x, config.width) for x in (*widths, config.width)}):
        wanted = (work.count > lower) & (work.count <= width)
        carry = _run_width(config, params, state, time, work, width, wanted, collect, read, carry)
        lower = width
    return carry


def _run_width(
    config: DecodeConfig,
    params: Params,
    state: State,
    time: Float[Array, "B"] | None,
    work: PartialPass,
    width: int,
    wanted: Bool[Array, "B"],
    collect: Callable[[Any, PartialPass, Any, Any, Cache], Any],
    read: Callable[[PartialPass, Cache, int], Any] | None,
    carry: tuple[Cache, Any],
) -> tuple[Cache, Any]:
    """Runs the wanted rows in passes of one width, a group of rows at a time; groups without one are skipped.

    Returns:
        The cache, and what `collect` returned, both of all rows.
    """
    rows = work.count.shape[0]
    size = _group_size(rows, width, config.width)
    small = state.without_cache()._replace(self_cond=state.self_cond)
    axes = varying_axes((params, state))

    def take(x: Array, i: Any) -> Array:
        return x if size == rows else jax.lax.dynamic_slice_in_dim(x, i * size, size)

    def run_group(i: Any, carry: tuple[Cache, Any]) -> tuple[Cache, Any]:
        part = jax.tree.map(lambda x: take(x, i), (work, small, time, wanted, *carry))
        run, group, now, chosen, before, old = part
        run = run._replace(count=jnp.where(chosen, run.count, 0))
        seen = None
        if read is not None:
            # The keys are read before the pass overwrites them. XLA updates the cache in place only if the pass
            # depends on this read; otherwise it copies the whole cache, and an optimization barrier is removed before
            # it decides. The dependency is therefore a real one: a NaN in the keys, which makes every result NaN
            # anyway, changes the canvas. The `cond` keeps read and pass from being fused.
            look = read
            like = jax.eval_shape(lambda: look(run, before, width))
            blank = lambda: jax.tree.map(lambda x: varying(jnp.zeros(x.shape, x.dtype), axes), like)
            seen = jax.lax.cond(jnp.any(chosen), lambda: look(run, before, width), blank)
            broken = jnp.isnan(jnp.stack([x.sum() for x in jax.tree.leaves(seen)]).sum())
            group = group._replace(canvas=jnp.where(broken, 0, group.canvas))
        hidden, after = _run_rows(config, params, width, run, group._replace(cache=before), now)
        pick = lambda new, old: jnp.where(chosen.reshape(-1, *[1] * (new.ndim - 1)), new, old)
        new = jax.tree.map(pick, collect(old, run, hidden, seen, after), old)
        if size == rows:
            return after, new
        put = lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, i * size, 0)
        return jax.tree.map(put, carry, (after, new))

    def step(i: Any, carry: tuple[Cache, Any]) -> tuple[Cache, Any]:
        run = lambda carry: varying(run_group(i, carry), axes)
        return jax.lax.cond(jnp.any(take(wanted, i)), run, lambda carry: carry, carry)

    return jax.lax.fori_loop(0, rows // size, step, carry)


# Positions per pass over a group of rows, enough to be compute-bound. On two CPU cores the dual cache was 17 to 33%
# faster with 1,024 than with 128 at batches of 8 to 64, although a group also computes rows that need no pass.
TOKENS = 1024


def _group_size(rows: int, width: int, canvas: int) -> int:
    """Chooses the number of rows in a group, a divisor of the number of rows."""
    # A group smaller than the batch copies its part of the cache. For narrow passes the copy costs more than it saves.
    if 8 * width <= canvas or rows * width <= TOKENS:
        return rows
    return next(size for size in range(max(1, TOKENS // width), 0, -1) if rows % size == 0)


def _run_rows(
    config: DecodeConfig,
    params: Params,
    width: int,
    work: PartialPass,
    rows: State,
    time: Float[Array, "B"] | None,
) -> tuple[Any, Cache]:
    """Runs one pass over the first `width` positions of `work.at` for b rows.

    Returns:
        Hidden states, leaves [b, width, ...], and the cache of these rows.
    """
    at = work.at[:, :width]
    gather = lambda x: jax.vmap(lambda row, index: row[index])(x, at)
    dense = work.slots is None
    given = Pass(
        tokens=gather(rows.canvas), cache=rows.cache, start=at[:, 0] if dense else rows.cache_length,
        used=work.count, end=work.end, encoding=work.encoding, self_cond=jax.tree.map(gather, rows.self_cond),
        time=time, positions=None if dense else rows.cache_length[:, None] + at,
        slots=None if dense else gather(work.slots), length=rows.limits.max_end,
    )  # fmt: skip
    return config.model.forward(params, given)
