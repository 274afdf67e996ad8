"""The forward pass of a step, over the whole canvas or a part of it.

A bidirectional model has no keys that stay valid, because every token sees every other. `Refresh` reuses outdated
keys between two refreshes, as Fast-dLLM (arXiv 2505.22618) and dInfer do: a pass then runs over a part of the canvas
and reads the rest from the cache as it was.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.decode.decode_config import DecodeConfig
from mercury_jax.decode.state import State, window_of, window_offset
from mercury_jax.decode.view import steps_of
from mercury_jax.types import Cache, Params, Pass


def forward(
    config: DecodeConfig,
    params: Params,
    state: State,
    tokens: Int[Array, "B W"],
    used: Int[Array, "B"],
    causal: Bool[Array, "B"],
) -> tuple[Any, Any, Cache]:
    """Runs one forward pass for all rows.

    Args:
        config: Static sizes.
        params: Of the model.
        state: Of all rows.
        tokens: What each row feeds at its positions cache_length..cache_length + W.
        used: How many of them; 0 freezes the row.
        causal: Rows that write committed tokens to the cache, or verify a draft.

    Returns:
        Hidden states of each row's window [B, L, ...], the same by leave-one-out masks or None, and the cache.
    """
    offset = window_offset(config, state.cache_length, state.committed)
    if config.refresh is not None:
        hidden, cache = _partial_forward(config, params, state, used, offset)
        return hidden, None, cache
    mask = config.corruption.mask if config.leave_one_out else None
    time, start = times(config, state, causal), state.cache_length
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


def times(config: DecodeConfig, state: State, causal: Bool[Array, "B"]) -> Float[Array, "B"] | None:
    """Computes the time of each row; None for models that take no time.

    Rows that write committed tokens to the cache have time 0: their keys must not depend on the pass in which a token
    was accepted. (BD3-LM's own sampler keeps the keys of a block's last pass, whose time is the smallest.)

    Args:
        config: Static sizes.
        state: Of all rows.
        causal: Rows whose time is 0.

    Returns:
        Times in 0..1 [B], or None.
    """
    if not config.model.config.timed:
        return None

    steps = jax.vmap(lambda row: steps_of(window_of(config, row), row))(state.without_cache())
    return jnp.where(
        causal, 0.0, jnp.clip(1.0 - state.step / steps, 0.0, 1.0)
    )  # no canvas is open at step -1


def _partial_forward(
    config: DecodeConfig,
    params: Params,
    state: State,
    used: Int[Array, "B"],
    offset: Int[Array, "B"],
) -> tuple[Any, Cache]:
    """One pass with cache reuse: rows at the start of a block, or due for a refresh, run their whole canvas.

    Where any row is due, all rows run in the wide program, those that are not due with their part only: what a row
    computes does not depend on its neighbours.
    """
    refresh = config.refresh
    assert refresh is not None and refresh.after is not None
    part = min(config.width, refresh.before + config.window + refresh.after)
    due = (state.step == 0) if refresh.every is None else (state.step % refresh.every == 0)
    due = due & ~state.done
    # The part holds the window, `before` positions ahead of it and `after` positions after it.
    first = jnp.clip(offset - refresh.before, 0, config.width - part)  # of the part, within the canvas
    nobody = jnp.zeros_like(state.done)
    time = times(config, state, nobody)

    def run(cache: Cache, width: int, start: Array, count: Array) -> tuple[Any, Cache]:
        at = jnp.minimum(start[:, None] + jnp.arange(width), config.width - 1)
        gather = lambda x: jax.vmap(lambda row, index: row[index])(x, at)
        self_cond = jax.tree.map(gather, state.self_cond)
        given = Pass(gather(state.canvas), cache, start, count, used, nobody, self_cond, time)
        hidden, cache = config.model.forward(params, given)
        return slice_rows(hidden, offset - start, config.window), cache

    narrow = jnp.clip(used - first, 0, part)

    def wide(cache: Cache) -> tuple[Any, Cache]:
        return run(cache, config.width, jnp.where(due, 0, first), jnp.where(due, used, narrow))

    return jax.lax.cond(jnp.any(due), wide, lambda cache: run(cache, part, first, narrow), state.cache)
