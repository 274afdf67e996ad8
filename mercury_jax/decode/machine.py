"""The state machine of decoding: one State, one step, under every call and the server alike.

A row's phase is derived from its numbers, never stored: done; else *encode* while
`length < encodable(known)`; else *denoise*. Commit is encode: a settled block is written to `text`,
`known` rises, and the row encodes in the next pass while its neighbours denoise.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from mercury_jax.decode.row import advance
from mercury_jax.decode.state import Frame, Knobs, Program, State, memory, row_key
from mercury_jax.types import Key, Params


def step(program: Program, params: Params, state: State, knobs: Knobs) -> tuple[State, Frame]:
    """One forward: rows behind their text encode, rows with a canvas denoise, done rows stand still."""
    state = _open(program, state, knobs)
    encoding, ready = _phases(program, state)
    n = jnp.where(encoding, jnp.minimum(program.width, ready - state.length), state.n)
    n = jnp.where(state.done, 0, n)
    behind = jax.vmap(lambda text, at: jax.lax.dynamic_slice(text, (at,), (program.width,)))
    tokens = jnp.where(encoding[:, None], behind(state.text, state.length), state.canvas)
    hidden, cache = program.model.forward(
        params, tokens, state.cache, state.length, n, state.length + n, encoding, state.carry
    )
    state = state._replace(cache=cache)
    denoising = ~encoding & ~state.done
    state, frame = _denoise(program, params, state, knobs, hidden, denoising)
    return state._replace(length=state.length + jnp.where(encoding, n, 0)), frame


def prefill(program: Program, params: Params, state: State, width: int) -> State:
    """Encode what is known in passes of `width` tokens, for prompts much longer than a canvas."""

    def behind(state: State) -> Array:
        return (program.model.encodable(state.known) - state.length) * ~state.done

    def body(state: State) -> State:
        n = jnp.minimum(behind(state), width)
        slots = state.length[:, None] + jnp.arange(width)
        tokens = jnp.take_along_axis(state.text, jnp.minimum(slots, state.text.shape[1] - 1), axis=1)
        everyone = jnp.ones_like(state.done)
        end = state.length + n
        _, cache = program.model.forward(
            params, tokens, state.cache, state.length, n, end, everyone, state.carry
        )
        return state._replace(cache=cache, length=end)

    return jax.lax.while_loop(lambda s: jnp.any(behind(s) > 0), body, state)


def run(
    program: Program, params: Params, state: State, knobs: Knobs, passes: int | None
) -> tuple[State, Frame | None, Int[Array, ""]]:
    """Step on the device until every row is done, or `passes` passes were made.

    Frames [passes, B, ...] are returned only where `passes` is a number; the third result says how
    many of them were used.
    """
    if passes is None:
        loop = lambda s: step(program, params, s, knobs)[0]
        return jax.lax.while_loop(lambda s: ~jnp.all(s.done), loop, state), None, jnp.asarray(0)
    like = jax.eval_shape(lambda s: step(program, params, s, knobs)[1], state)
    empty = jax.tree.map(lambda x: jnp.zeros((passes, *x.shape), x.dtype), like)

    def body(loop: tuple[Array, State, Frame]) -> tuple[Array, State, Frame]:
        i, state, frames = loop
        state, frame = step(program, params, state, knobs)
        return i + 1, state, jax.tree.map(lambda all, one: all.at[i].set(one), frames, frame)

    going = lambda loop: (loop[0] < passes) & ~jnp.all(loop[1].done)
    used, state, frames = jax.lax.while_loop(going, body, (jnp.asarray(0), state, empty))
    return state, frames, used


def _phases(program: Program, state: State) -> tuple[Array, Array]:
    ready = program.model.encodable(state.known)
    return (state.length < ready) & ~state.done, ready


def _choose(rows: Bool[Array, "B"], new: Any, old: Any) -> Any:
    """Take `new` where a row is chosen. Only for small leaves: never over a cache."""
    return jax.tree.map(lambda a, b: jnp.where(rows.reshape(-1, *[1] * (a.ndim - 1)), a, b), new, old)


def _open(program: Program, state: State, knobs: Knobs) -> State:
    """Lay a fresh canvas where a row has encoded all it can and has none open."""
    encoding, _ = _phases(program, state)
    opening = ~encoding & ~state.done & (state.step < 0)

    def lay(text: Array, given: Array, length: Array, known: Array, key: Key) -> tuple[Array, Array]:
        at = length + jnp.arange(program.width)
        cut = lambda x: jax.lax.dynamic_slice(x, (length,), (program.width,))
        held = (at < known) | cut(given)
        ones = jnp.ones((program.width,), jnp.float32)
        noise = program.corruption.prior(row_key(key, known, jnp.asarray(-1)), ones)
        return jnp.where(held, cut(text), noise).astype(jnp.int32), held

    canvas, held = jax.vmap(lay)(state.text, state.given, state.length, state.known, state.key)
    fresh = state._replace(
        canvas=canvas,
        answer=canvas,
        held=held,
        n=jnp.minimum(program.width, state.total - state.length),
        step=jnp.zeros_like(state.step),
        carry=jax.tree.map(jnp.zeros_like, state.carry),
        memory=jax.vmap(functools.partial(memory, knobs.sampler))(canvas),
    )
    kept = ("cache", "key")
    chosen = {k: _choose(opening, v, getattr(state, k)) for k, v in fresh._asdict().items() if k not in kept}
    return state._replace(**chosen)


def _denoise(
    program: Program, params: Params, state: State, knobs: Knobs, hidden: Array, rows: Array
) -> tuple[State, Frame]:
    logits = program.model.head(params, hidden)
    row = functools.partial(advance, program)
    seen = state._replace(cache=(), carry=())  # what a row's own step may look at
    fresh, settled, confidence, shaped = jax.vmap(row)(seen, logits, knobs.sampler, knobs.steps)
    carry = program.model.condition(params, shaped)
    moved = state._replace(
        **{k: _choose(rows, v, getattr(state, k)) for k, v in fresh.items()},
        carry=_choose(rows, carry, state.carry),
        forwards=state.forwards + rows,
    )
    frame = Frame(state.length, jnp.where(rows, state.n, 0), moved.answer, settled, confidence, moved.done)
    return moved, frame
