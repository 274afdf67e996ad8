"""The forward pass of a step, over the whole canvas or a part of it.

A bidirectional model has no keys that stay valid, because every token sees every other. `Refresh` reuses outdated
keys between two refreshes, as Fast-dLLM (arXiv 2505.22618) and dInfer do: a pass then runs over a part of the canvas
and reads the rest from the cache as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.decode.state import DecodeConfig, SamplingParams, State, window_of, window_offset
from mercury_jax.decode.view import steps_of
from mercury_jax.types import Cache, Params, Pass


def forward(
    config: DecodeConfig,
    params: Params,
    state: State,
    tokens: Int[Array, "B W"],
    used: Int[Array, "B"],
    causal: Bool[Array, "B"],
    sampling: SamplingParams,
) -> tuple[Any, Any, Cache]:
    """Runs one forward pass for all rows.

    Args:
        config: Static sizes.
        params: Of the model.
        state: Of all rows.
        tokens: What each row feeds at its positions cache_length..cache_length + W.
        used: How many of them; 0 freezes the row.
        causal: Rows that write committed tokens to the cache, or verify a draft.
        sampling: Of each row.

    Returns:
        Hidden states of each row's window [B, L, ...], the same by leave-one-out masks or None, and the cache.
    """
    offset = window_offset(config, state.cache_length, state.committed)
    if config.refresh is not None:
        hidden, cache = _partial_forward(config, params, state, used, offset, sampling)
        return hidden, None, cache
    mask = config.corruption.mask if config.leave_one_out else None
    time, start = times(config, state, sampling, causal), state.cache_length
    given = Pass(tokens, state.cache, start, used, start + used, causal, state.self_cond, time, mask)
    hidden, cache = config.model.forward(params, given)
    # With leave-one-out masks the pass returns 2 W hidden states: the tokens' and then the masks'.
    own = slice_rows(jax.tree.map(lambda x: x[:, : config.width], hidden), offset, config.window)
    if mask is None:
        return own, None, cache
    others = jax.tree.map(lambda x: x[:, config.width :], hidden)
    return own, slice_rows(others, offset, config.window), cache


def slice_rows(tree: Any, start: Int[Array, "B"], size: int) -> Any:
    """Returns each row's [start : start + size] along axis 1 of every leaf [B, T, ...].

    Args:
        tree: Leaves [B, T, ...].
        start: Of each row.
        size: Positions that are kept.

    Returns:
        A tree with leaves [B, size, ...].
    """
    one = lambda x, s: jax.lax.dynamic_slice_in_dim(x, s, size)
    return jax.tree.map(lambda x: x if x.shape[1] == size else jax.vmap(one)(x, start), tree)


def times(
    config: DecodeConfig, state: State, sampling: SamplingParams, causal: Bool[Array, "B"]
) -> Float[Array, "B"] | None:
    """Computes the time of each row; None for models that take no time.

    Rows that write committed tokens to the cache have time 0: their keys must not depend on the pass in which a token
    was accepted. (BD3-LM's own sampler keeps the keys of a block's last pass, whose time is the smallest.)

    Args:
        config: Static sizes.
        state: Of all rows.
        sampling: Of each row.
        causal: Rows whose time is 0.

    Returns:
        Times in 0..1 [B], or None.
    """
    if not config.model.config.timed:
        return None

    count = lambda row, params: steps_of(window_of(config, row), params)
    steps = jax.vmap(count)(state.without_cache(), sampling)
    return jnp.where(
        causal, 0.0, jnp.clip(1.0 - state.step / steps, 0.0, 1.0)
    )  # no canvas is open at step -1


class PartialPass(NamedTuple):
    """The positions that each row computes in one pass; every leaf has the batch axis first.

    Positions count from the start of the canvas, in rising order. The first `count` of `at` are computed.
    """

    at: Int[Array, "B W"]
    first: Int[Array, "B"]  # at[:, 0]
    count: Int[Array, "B"]  # 0 leaves the row as it is
    end: Int[Array, "B"]  # end of the keys that each position attends to
    offset: Int[Array, "B"]  # of the row's window


def _partial_forward(
    config: DecodeConfig,
    params: Params,
    state: State,
    used: Int[Array, "B"],
    offset: Int[Array, "B"],
    sampling: SamplingParams,
) -> tuple[Any, Cache]:
    """One pass with cache reuse: rows that are due run their whole canvas, the others the surroundings of their window.

    `Refresh` says when a row is due. Every pass of a row computes its window, `before` positions ahead of it and
    `after` positions after it; with `after` None all that follows, as Fast-dLLM's prefix cache does.
    """
    refresh, width = config.refresh, config.width
    assert refresh is not None
    due = (state.step == 0) if refresh.every is None else (state.step % refresh.every == 0)
    first = jnp.where(due, 0, jnp.maximum(offset - refresh.before, 0))
    stop = used if refresh.after is None else jnp.minimum(used, offset + config.window + refresh.after)
    count = jnp.maximum(jnp.where(due, used, stop) - first, 0)
    at = jnp.minimum(first[:, None] + jnp.arange(width), width - 1)
    work = PartialPass(at, first, jnp.where(state.done, 0, count), used, offset)

    least = refresh.before + config.window  # of a pass, so that it holds the window
    quarters = [-(-width * k // 32) * 8 for k in (1, 2, 3)]
    sizes = quarters if refresh.after is None else [least + refresh.after]
    widths = sorted({width, *(min(width, max(least, size)) for size in sizes)})
    nobody = jnp.zeros_like(state.done)
    time = times(config, state, sampling, nobody)
    collect = lambda rows, hidden: slice_rows(hidden, rows.offset - rows.first, config.window)
    one_row = jax.tree.map(lambda x: x[:1], (work, state, time))
    like = jax.eval_shape(lambda: collect(one_row[0], _run_rows(config, params, width, *one_row)[0]))
    blank = jax.tree.map(lambda x: jnp.zeros((*count.shape, *x.shape[1:]), x.dtype), like)
    cache, hidden = run_by_width(config, params, state, time, work, widths, collect, blank)
    return hidden, cache


def run_by_width(
    config: DecodeConfig,
    params: Params,
    state: State,
    time: Float[Array, "B"] | None,
    work: PartialPass,
    widths: Sequence[int],
    collect: Callable[[PartialPass, Any], Any],
    collected: Any,
) -> tuple[Cache, Any]:
    """Runs each row in the narrowest of several programs that holds its positions.

    Rows are at different points: one that recomputes its canvas must not make its neighbours pay for it. So the rows
    that need a width run together, in groups of about `TOKENS` positions, and groups without such a row are skipped.
    A row's group, its place in it and its program follow from its own index and count alone, so that in the same
    program its results do not depend on its neighbours, bit for bit.

    Args:
        config: Static sizes.
        params: Of the model.
        state: Of all rows, with the cache.
        time: Of the noise of each row, or None.
        work: What each row computes.
        widths: Positions of the programs, rising; the last one holds every row's.
        collect: collect(rows, their hidden states [b, T, ...]) -> what is kept of them, leaves [b, ...].
        collected: Leaves [B, ...]; the rows that ran are replaced.

    Returns:
        The cache, and `collected`.
    """
    rows, cache, lower = work.count.shape[0], state.cache, 0
    for width in widths:
        size = _group_size(rows, width, config.width)
        wanted = (work.count > lower) & (work.count <= width)
        lower = width

        def run_group(
            i: Array | int, carry: Any, width: int = width, size: int = size, wanted: Array = wanted
        ) -> Any:
            take = lambda x: x if size == rows else jax.lax.dynamic_slice_in_dim(x, i * size, size)
            cache, found = carry
            small = state.without_cache()._replace(self_cond=state.self_cond)
            run, group, now, chosen, before, old = jax.tree.map(
                take, (work, small, time, wanted, cache, found)
            )
            run = run._replace(count=jnp.where(chosen, run.count, 0))
            hidden, after = _run_rows(config, params, width, run, group._replace(cache=before), now)
            pick = lambda new, old: jnp.where(chosen.reshape(-1, *[1] * (new.ndim - 1)), new, old)
            new = jax.tree.map(pick, collect(run, hidden), old)
            if size == rows:
                return after, new
            put = lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, i * size, 0)
            return jax.tree.map(put, carry, (after, new))

        def step(
            i: Array | int, carry: Any, run: Any = run_group, size: int = size, wanted: Array = wanted
        ) -> Any:
            here = jnp.any(jax.lax.dynamic_slice_in_dim(wanted, i * size, size))
            return jax.lax.cond(here, lambda carry: run(i, carry), lambda carry: carry, carry)

        cache, collected = jax.lax.fori_loop(0, rows // size, step, (cache, collected))
    return cache, collected


# Positions of one pass over a group of rows: enough to be bound by arithmetic, on a CPU and on an accelerator.
TOKENS = 256


def _group_size(rows: int, width: int, canvas: int) -> int:
    """Rows of a group, a divisor of all. A group's part of the cache is copied, which narrow passes would not repay."""
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
    """One pass over `width` positions of some rows."""
    at = work.at[:, :width]
    gather = lambda x: jax.vmap(lambda row, index: row[index])(x, at)
    denoising = jnp.zeros_like(rows.done)
    given = Pass(
        gather(rows.canvas), rows.cache, work.first, work.count, work.end, denoising,
        jax.tree.map(gather, rows.self_cond), time,
    )  # fmt: skip
    return config.model.forward(params, given)
