"""The forward of a step: which tokens stand where, for the whole canvas or for a part of it.

A bidirectional model has no keys that stay valid: every token sees every other. `Refresh` reuses
them all the same between two refreshes, as Fast-dLLM (arXiv 2505.22618) and dInfer do: a pass
then runs over a part of the canvas and reads the rest from the cache as it was.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from mercury_jax.decode import sight
from mercury_jax.decode.state import Knobs, Program, State
from mercury_jax.decode.window import cut_rows, offset_of, window_of
from mercury_jax.types import Cache, Params, Pass


def forward(
    program: Program,
    params: Params,
    state: State,
    tokens: Int[Array, "B W"],
    n: Int[Array, "B"],
    causal: Bool[Array, "B"],
    knobs: Knobs,
) -> tuple[Any, Any, Cache]:
    """(hidden of each row's window [B, L, ...], the same by blind masks or None, cache)."""
    offset = offset_of(program, state.length, state.known)
    if program.refresh is not None:
        hidden, cache = _partly(program, params, state, n, offset, knobs)
        return hidden, None, cache
    mask = program.corruption.mask if program.blind else None
    time = times(program, state, knobs, causal)
    given = Pass(tokens, state.cache, state.length, n, state.length + n, causal, state.carry, time, mask)
    hidden, cache = program.model.forward(params, given)
    seen = cut_rows(jax.tree.map(lambda x: x[:, : program.width], hidden), offset, program.window)
    if mask is None:
        return seen, None, cache
    shadow = jax.tree.map(lambda x: x[:, program.width :], hidden)
    return seen, cut_rows(shadow, offset, program.window), cache


def times(program: Program, state: State, knobs: Knobs, causal: Bool[Array, "B"]) -> Array | None:
    """The time of each row [B]; None for models that are not timed.

    Rows that encode have time 0: what they read is settled, and its keys must not depend on the pass in which
    that came about. (BD3-LM's own sampler keeps those of a block's last pass, whose time is the smallest; no
    published one is timed.)
    """
    if not program.model.config.timed:
        return None

    def one(row: State, knobs: Knobs) -> Array:
        steps = sight.steps_of(window_of(program, row), knobs)
        return jnp.clip(sight.time_of(row.step, steps), 0.0, 1.0)  # no canvas is open at step -1

    seen = state._replace(cache=(), carry=())
    return jnp.where(causal, 0.0, jax.vmap(one)(seen, knobs))


def _partly(
    program: Program, params: Params, state: State, n: Int[Array, "B"], offset: Int[Array, "B"], knobs: Knobs
) -> tuple[Any, Cache]:
    """Rows at the start of a block, or due for a refresh, run their whole canvas, the others a part.

    Where any row needs the wide program all rows run in it, those that need it not with their part
    only: what a row computes does not depend on its neighbours.
    """
    refresh = program.refresh
    assert refresh is not None and refresh.after is not None
    part = min(program.width, refresh.before + program.window + refresh.after)
    due = (state.step == 0) if refresh.every is None else (state.step % refresh.every == 0)
    due = due & ~state.done
    first = jnp.clip(offset - refresh.before, 0, program.width - part)
    nobody = jnp.zeros_like(state.done)
    time = times(program, state, knobs, nobody)

    def run(cache: Cache, width: int, start: Array, used: Array) -> tuple[Any, Cache]:
        live = jnp.minimum(start[:, None] + jnp.arange(width), program.width - 1)
        gather = lambda x: jax.vmap(lambda row, at: row[at])(x, live)
        carry = jax.tree.map(gather, state.carry)
        given = Pass(gather(state.canvas), cache, start, used, n, nobody, carry, time)
        hidden, cache = program.model.forward(params, given)
        return cut_rows(hidden, offset - start, program.window), cache

    narrow = jnp.clip(n - first, 0, part)

    def whole(cache: Cache) -> tuple[Any, Cache]:
        return run(cache, program.width, jnp.where(due, 0, first), jnp.where(due, n, narrow))

    return jax.lax.cond(jnp.any(due), whole, lambda cache: run(cache, part, first, narrow), state.cache)
