"""The forward pass of a step over the whole canvas: what each row feeds, and the hidden states of its window.

`key_reuse.py` has the passes over a part of a canvas.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.decode.decode_config import DecodeConfig
from mercury_jax.decode.state import State, window_of, window_offset
from mercury_jax.decode.view import step_times, steps_of
from mercury_jax.types import LeaveOneOut, Params, Pass


class Feed(NamedTuple):
    """What each row feeds to a pass: committed tokens that are not in the KV cache yet, or its canvas."""

    tokens: Int[Array, "B W"]  # at positions cache_length .. cache_length + W - 1
    used: Int[Array, "B"]  # how many of them; 0 freezes the row
    encoding: Bool[Array, "B"]  # rows that write committed tokens to the cache

    def advance(self, state: State) -> State:
        """Moves the end of the cache behind what the pass has encoded.

        Only encoding rows keep what a pass writes to the cache. A denoising row overwrites it in its next pass.
        """
        return state._replace(cache_length=state.cache_length + jnp.where(self.encoding, self.used, 0))


def next_feed(config: DecodeConfig, state: State) -> Feed:
    """Chooses what each row feeds next."""
    encodable = config.encodable(state.committed)
    encoding = (state.cache_length < encodable) & ~state.done
    used = jnp.where(encoding, jnp.minimum(config.width, encodable - state.cache_length), state.used)
    pending = jax.vmap(lambda x, at: jax.lax.dynamic_slice(x, (at,), (config.width,)))
    tokens = jnp.where(encoding[:, None], pending(state.tokens, state.cache_length), state.canvas)
    return Feed(tokens, jnp.where(state.done, 0, used), encoding)


def forward(
    config: DecodeConfig,
    params: Params,
    state: State,
    tokens: Int[Array, "B W"],
    used: Int[Array, "B"],
    causal: Bool[Array, "B"],
) -> tuple[Any, Any, State]:
    """Runs one forward pass for all rows.

    Returns:
        Hidden states of each row's window [B, L, ...]; hidden states of the leave-one-out masks with the same shapes,
        or None; and the state with the cache that this pass has written.
    """
    offset = window_offset(config, state.cache_length, state.committed)
    time, start = times(config, state, causal), state.cache_length
    given = Pass(
        tokens,
        state.cache,
        start,
        used,
        start + used,
        causal,
        state.self_cond,
        time,
        length=state.limits.max_end,
    )
    if not config.leave_one_out:
        hidden, cache = config.model.forward(params, given)
        return slice_rows(hidden, offset, config.window), None, state._replace(cache=cache)
    # One leave-one-out mask for each position of the active block and each editable position before it. columns [B, L]
    # are the indices of these positions in the canvas; -1 where there is no such position.
    assert config.corruption.mask is not None
    columns = offset[:, None] + jnp.arange(config.window)
    at, first = start[:, None] + columns, (state.committed - config.revisable)[:, None]
    inside = (at >= first) & (at < state.committed[:, None] + config.block)
    joint = config.leave_one_out == "joint"
    masks = LeaveOneOut(config.corruption.mask, jnp.where(inside, columns, -1), joint)
    hidden, cache = config.model.forward(params, given._replace(leave_one_out=masks))
    # The pass returns W + L hidden states per row: those of the tokens, then those of the masks.
    own = slice_rows(jax.tree.map(lambda x: x[:, : config.width], hidden), offset, config.window)
    return own, jax.tree.map(lambda x: x[:, config.width :], hidden), state._replace(cache=cache)


def slice_rows(tree: Any, start: Int[Array, "B"], size: int) -> Any:
    """Slices axis 1 of every leaf [B, T, ...] at [start[b] : start[b] + size] of row b.

    Args:
        tree: Tree with leaves [B, T, ...].

    Returns:
        A tree with leaves [B, size, ...].
    """
    one = lambda x, s: jax.lax.dynamic_slice_in_dim(x, s, size)
    return jax.tree.map(lambda x: x if x.shape[1] == size else jax.vmap(one)(x, start), tree)


def times(config: DecodeConfig, state: State, causal: Bool[Array, "B"]) -> Float[Array, "B"] | None:
    """Computes the diffusion time of each row; None for models that take no time.

    Rows that write committed tokens to the cache have time 0, so that their keys do not depend on the pass in which a
    token was accepted. BD3-LM's own sampler instead keeps the keys of a block's last pass, whose time is the smallest.
    """
    if not config.model.config.timed:
        return None
    time = lambda row: step_times(config, row.step, steps_of(window_of(config, row), row))[0]
    return jnp.where(causal, 0.0, jax.vmap(time)(state.without_cache()))
