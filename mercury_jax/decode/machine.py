"""The state machine of decoding: one State, one step, under every call and the server alike.

A row's phase is derived from its numbers, never stored: done; else *encode* while
`length < ready`; else *check* where a draft waits for its causal check; else *denoise*. Commit is
encode: a settled block is written to `text`, `known` rises, and the row encodes in the next pass
while its neighbours denoise.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from mercury_jax.decode import passes as forwards, pieces, row as rows_of, verify
from mercury_jax.decode.read import draw, read
from mercury_jax.decode.sight import Sight, look, shaped
from mercury_jax.decode.state import Frame, Knobs, Program, State, memory, row_key
from mercury_jax.decode.window import cut, offset_of, window_of
from mercury_jax.types import Key, Params, Pass, Reading

_KEPT = ("cache", "key", "nats")  # never chosen row by row when a canvas is laid


def step(program: Program, params: Params, state: State, knobs: Knobs) -> tuple[State, Frame]:
    """One forward: rows behind their text encode, rows with a canvas denoise, done rows stand still."""
    state = _open(program, state, knobs)
    ready = encoded(program, state.known)
    encoding = (state.length < ready) & ~state.done
    checking = state.tentative & ~state.done
    n = jnp.where(encoding, jnp.minimum(program.width, ready - state.length), state.n)
    n = jnp.where(state.done, 0, n)
    behind = jax.vmap(lambda text, at: jax.lax.dynamic_slice(text, (at,), (program.width,)))
    tokens = jnp.where(encoding[:, None], behind(state.text, state.length), state.canvas)
    if program.verify:
        tokens = jnp.where(checking[:, None], state.answer, tokens)
    hidden, blind, cache = forwards.forward(program, params, state, tokens, n, encoding | checking, knobs)
    state = state._replace(cache=cache)
    moved, frame = _denoise(program, params, state, knobs, hidden, blind, ~encoding & ~checking & ~state.done)
    if program.verify:
        logits = program.model.head(params, hidden)
        moved, frame = _check(program, state, knobs, logits, checking, moved, frame)
    return moved._replace(length=moved.length + jnp.where(encoding, n, 0)), frame


def encoded(program: Program, known: Int[Array, "B"]) -> Int[Array, "B"]:
    """How many of the known tokens get keys for good; a check encodes the last one itself."""
    ready = program.model.encodable(known)
    return jnp.minimum(ready, known - 1) if program.verify else ready


def prefill(program: Program, params: Params, state: State, width: int) -> State:
    """Encode what is known in passes of `width` tokens, for prompts much longer than a canvas."""

    def behind(state: State) -> Array:
        return (encoded(program, state.known) - state.length) * ~state.done

    def body(state: State) -> State:
        n = jnp.minimum(behind(state), width)
        slots = state.length[:, None] + jnp.arange(width)
        tokens = jnp.take_along_axis(state.text, jnp.minimum(slots, state.text.shape[1] - 1), axis=1)
        everyone = jnp.ones_like(state.done)
        end = state.length + n
        nothing = jax.tree.map(lambda x: jnp.zeros((x.shape[0], width, *x.shape[2:]), x.dtype), state.carry)
        clean = jnp.zeros(end.shape) if program.model.config.timed else None
        given = Pass(tokens, state.cache, state.length, n, end, everyone, nothing, clean)
        _, cache = program.model.forward(params, given)
        return state._replace(cache=cache, length=end)

    return jax.lax.while_loop(lambda s: jnp.any(behind(s) > 0), body, state)


def run(
    program: Program,
    params: Params,
    state: State,
    knobs: Knobs,
    passes: int | None,
    limit: Int[Array, ""] | None = None,
) -> tuple[State, Frame | None, Int[Array, ""]]:
    """Step on the device until every row is done, or `passes` passes were made, or `limit` where it is less.

    Frames [passes, B, ...] are returned only where `passes` is a number; the third result says how
    many passes were made.
    """
    if passes is None:
        loop = lambda s: (s[0] + 1, step(program, params, s[1], knobs)[0])
        used, state = jax.lax.while_loop(lambda s: ~jnp.all(s[1].done), loop, (jnp.asarray(0), state))
        return state, None, used
    like = jax.eval_shape(lambda s: step(program, params, s, knobs)[1], state)
    empty = jax.tree.map(lambda x: jnp.zeros((passes, *x.shape), x.dtype), like)

    def body(loop: tuple[Array, State, Frame]) -> tuple[Array, State, Frame]:
        i, state, frames = loop
        state, frame = step(program, params, state, knobs)
        return i + 1, state, jax.tree.map(lambda all, one: all.at[i].set(one), frames, frame)

    most = passes if limit is None else jnp.minimum(limit, passes)
    going = lambda loop: (loop[0] < most) & ~jnp.all(loop[1].done)
    used, state, frames = jax.lax.while_loop(going, body, (jnp.asarray(0), state, empty))
    return state, frames, used


def _choose(rows: Bool[Array, "B"], new: Any, old: Any) -> Any:
    """Take `new` where a row is chosen. Only for small leaves: never over a cache."""
    return jax.tree.map(lambda a, b: jnp.where(rows.reshape(-1, *[1] * (a.ndim - 1)), a, b), new, old)


def _open(program: Program, state: State, knobs: Knobs) -> State:
    """Lay a fresh canvas where a row has encoded all it can and has none open."""
    opening = (state.length >= encoded(program, state.known)) & ~state.done & (state.step < 0)

    def lay(
        text: Array, given: Array, draft: Array, length: Array, known: Array, key: Key
    ) -> tuple[Array, Array, Array]:
        at = length + jnp.arange(program.width)
        slice_of = lambda x: jax.lax.dynamic_slice(x, (length,), (program.width,))
        held = (at < known - program.back) | slice_of(given)
        ones = jnp.ones((program.width,), jnp.float32)
        noise = program.corruption.prior(row_key(key, known, jnp.asarray(-1)), ones)
        canvas = jnp.where(held | (at < known) | slice_of(draft), slice_of(text), noise).astype(jnp.int32)
        return canvas, held, cut(canvas, offset_of(program, length, known), program.window)

    canvas, held, window = jax.vmap(lay)(
        state.text, state.given, state.draft, state.length, state.known, state.key
    )
    n = jnp.minimum(program.width, state.total - state.length)
    fresh = state._replace(
        canvas=canvas,
        answer=canvas,
        held=held,
        n=n,
        step=jnp.zeros_like(state.step),
        carry=jax.tree.map(jnp.zeros_like, state.carry),
        memory=jax.vmap(functools.partial(memory, program))(knobs.sampler, window),
        tentative=(n <= 1) if program.verify else state.tentative,  # a lead alone is a draft of nothing
    )
    chosen = {k: _choose(opening, v, getattr(state, k)) for k, v in fresh._asdict().items() if k not in _KEPT}
    return state._replace(**chosen)


class Seen(NamedTuple):
    """What every row reads in a pass."""

    sight: Sight  # with logits only where some part looks at them
    reading: Reading
    raw: Any  # the logits before any shaper, or None
    carry: Any  # what the window hands to the next pass


def _read(program: Program, params: Params, state: State, knobs: Knobs, hidden: Any) -> Seen:
    sight = jax.vmap(functools.partial(look, program))(state, knobs)
    if pieces.applies(program, knobs.sampler):
        reading, carry = pieces.read(program, params, state, hidden, sight, knobs)
        return Seen(sight, reading, None, carry)
    raw = program.model.head(params, hidden)
    logits = jax.vmap(functools.partial(shaped, program))(state, sight, raw, knobs)
    drawn = _draw(logits, sight.uniforms, knobs.sampler.temperature)
    view = sight.view._replace(logits=logits)
    reading = jax.vmap(read)(logits, view.canvas, drawn, view.eos)
    return Seen(sight._replace(view=view), reading, raw, program.model.condition(params, logits))


def _denoise(
    program: Program, params: Params, state: State, knobs: Knobs, hidden: Any, blind: Any, rows: Array
) -> tuple[State, Frame]:
    row = state._replace(cache=(), carry=())  # what a row's own step may look at
    seen = _read(program, params, row, knobs, hidden)
    shadow = None if blind is None else program.model.head(params, blind)
    decide = functools.partial(rows_of.decide, program)
    fresh, settled, confidence = jax.vmap(decide)(row, seen.sight, seen.reading, seen.raw, shadow, knobs)
    carry = _conditioned(program, state, seen.carry)
    moved = state._replace(
        **{k: _choose(rows, v, getattr(state, k)) for k, v in fresh.items()},
        carry=_choose(rows, carry, state.carry),
        forwards=state.forwards + rows,
    )
    answer = cut_window(program, state, moved.answer)
    used = jax.vmap(lambda one: window_of(program, one).n)(row) if not program.grows else moved.n
    start = state.length + offset_of(program, state.length, state.known)
    return moved, Frame(start, jnp.where(rows, used, 0), answer, settled, confidence, moved.done)


def _draw(logits: Array, uniforms: Array, temperature: Array) -> Int[Array, "B L"]:
    """Tokens of every row; the cumulative sum is made only where some row draws at all."""
    warm = lambda: jax.vmap(draw)(logits, uniforms, temperature.astype(jnp.float32))
    cold = lambda: logits.argmax(-1).astype(jnp.int32)
    return jax.lax.cond(jnp.any(temperature > 0), warm, cold)


def cut_window(program: Program, state: State, x: Array) -> Array:
    """Each row's window of an array over the canvas [B, W]."""
    offset = offset_of(program, state.length, state.known)
    return jax.vmap(lambda row, start: cut(row, start, program.window))(x, offset)


def _conditioned(program: Program, state: State, fresh: Any) -> Any:
    """The carry after this step: that of the window put into the canvas's."""
    if program.window == program.width:
        return fresh
    offset = offset_of(program, state.length, state.known)
    put = jax.vmap(
        lambda old, new, at: jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), at, 0)
    )
    return jax.tree.map(lambda old, new: put(old, new, offset), state.carry, fresh)


def _check(
    program: Program, state: State, knobs: Knobs, logits: Array, rows: Array, moved: State, frame: Frame
) -> tuple[State, Frame]:
    """Rows whose draft was checked: as far as it agreed it is text now, and one token more."""
    seen = state._replace(cache=(), carry=())
    fresh, count, drawn = jax.vmap(functools.partial(verify.check, program))(seen, logits, knobs)
    moved = moved._replace(**{k: _choose(rows, v, getattr(moved, k)) for k, v in fresh.items()})
    moved = moved._replace(forwards=moved.forwards + rows)
    width = drawn.shape[1]
    shown = Frame(
        start=state.length + 1,
        n=jnp.where(rows, jnp.minimum(count, moved.total - state.length - 1), 0),
        answer=drawn,
        settled=jnp.ones((drawn.shape[0], width), bool),
        confidence=jax.nn.softmax(logits, axis=-1).max(-1).astype(frame.confidence.dtype),
        done=moved.done,
    )
    return moved, _choose(rows, shown, frame)
