"""The state machine of decoding: one State, one step, under every call and the server alike.

A row's phase is derived from its numbers, never stored: done; else *encode* while
`length < encodable(known)`; else *denoise*. Commit is encode: a settled block is written to `text`,
`known` rises, and the row encodes in the next pass while its neighbours denoise.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.decode.parts import Sampler
from mercury_jax.decode.read import draw, forbid, read
from mercury_jax.noise import Corruption
from mercury_jax.types import Cache, Carry, Key, Model, Params, Proposal, View


class Program(NamedTuple):
    """What a compiled step closes over. Hashable: equal programs share one compilation."""

    model: Model
    corruption: Corruption
    width: int  # L, positions of a canvas
    block: int  # positions of the active block, at most L
    eos: int | None  # ends an answer; None while infilling
    forbidden: tuple[int, ...] = ()  # ids never emitted, beside the corruption's


class Knobs(NamedTuple):
    """What varies by row: the sampler's numbers and the step budget (0: as many as tokens)."""

    sampler: Sampler
    steps: Int[Array, "B"]  # noqa: F821


class State(NamedTuple):
    """Everything that decoding changes; the batch axis comes first in every leaf."""

    text: Int[Array, "B S"]  # the sequence by absolute position
    given: Bool[Array, "B S"]  # tokens that the user gave
    length: Int[Array, "B"]  # noqa: F821  slots with valid keys and values
    known: Int[Array, "B"]  # noqa: F821  settled prefix
    total: Int[Array, "B"]  # noqa: F821  where the row ends
    cache: Cache
    canvas: Int[Array, "B L"]  # the chain; stands at length..length + L
    answer: Int[Array, "B L"]  # what would be emitted now
    held: Bool[Array, "B L"]  # canvas positions that are known or given
    n: Int[Array, "B"]  # noqa: F821  used positions of the canvas
    step: Int[Array, "B"]  # noqa: F821  steps taken on this block; -1: no canvas is open
    carry: Carry
    memory: Any  # of the rule and of the stop
    key: Any  # [B] typed keys, one a row, from its seed
    done: Bool[Array, "B"]  # noqa: F821
    tentative: Bool[Array, "B"]  # noqa: F821  drafted, waiting for a causal check
    forwards: Int[Array, "B"]  # noqa: F821  denoiser passes


class Frame(NamedTuple):
    """What one pass shows of each row; cheap enough to keep for every pass."""

    start: Int[Array, "B"]  # noqa: F821  absolute position of the canvas
    n: Int[Array, "B"]  # noqa: F821  used positions; 0 where the row did not denoise
    answer: Int[Array, "B L"]
    settled: Bool[Array, "B L"]  # the chain already holds the answer there
    confidence: Float[Array, "B L"]  # probability of the argmax
    done: Bool[Array, "B"]  # noqa: F821


def begin(
    program: Program,
    knobs: Knobs,
    text: Int[Array, "B S"],
    given: Bool[Array, "B S"],
    known: Int[Array, "B"],  # noqa: F821
    total: Int[Array, "B"],  # noqa: F821
    seeds: Int[Array, "B"],  # noqa: F821
) -> State:
    """A state whose rows hold `known` settled tokens and want `total`; rows with none left are done."""
    rows, width = text.shape[0], program.width
    zeros = jnp.zeros((rows,), jnp.int32)
    blank = jnp.zeros((rows, width), jnp.int32)
    memory = jax.vmap(functools.partial(_memory, knobs.sampler))(blank)
    carry = jax.eval_shape(lambda: program.model.condition(None, jnp.zeros((rows, width, 1))))
    return State(
        text=text.astype(jnp.int32),
        given=given,
        length=zeros,
        known=known.astype(jnp.int32),
        total=total.astype(jnp.int32),
        cache=program.model.empty_cache(rows, text.shape[1]),
        canvas=blank,
        answer=blank,
        held=jnp.zeros((rows, width), bool),
        n=zeros,
        step=zeros - 1,
        carry=jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), carry),
        memory=memory,
        key=jax.vmap(jax.random.key)(seeds),
        done=known >= total,
        tentative=jnp.zeros((rows,), bool),
        forwards=zeros,
    )


def admit(state: State, slot: int | Array, row: State) -> State:
    """Put a state of one row (from `begin`) into a slot; its neighbours are untouched."""
    return jax.tree.map(lambda old, new: old.at[slot].set(new[0]), state, row)


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
        loop = lambda s: step(program, params, s, knobs)[0]  # noqa: E731
        return jax.lax.while_loop(lambda s: ~jnp.all(s.done), loop, state), None, jnp.asarray(0)
    like = jax.eval_shape(lambda s: step(program, params, s, knobs)[1], state)
    empty = jax.tree.map(lambda x: jnp.zeros((passes, *x.shape), x.dtype), like)

    def body(loop: tuple[Array, State, Frame]) -> tuple[Array, State, Frame]:
        i, state, frames = loop
        state, frame = step(program, params, state, knobs)
        return i + 1, state, jax.tree.map(lambda all, one: all.at[i].set(one), frames, frame)

    going = lambda loop: (loop[0] < passes) & ~jnp.all(loop[1].done)  # noqa: E731
    used, state, frames = jax.lax.while_loop(going, body, (jnp.asarray(0), state, empty))
    return state, frames, used


def _phases(program: Program, state: State) -> tuple[Array, Array]:
    ready = program.model.encodable(state.known)
    return (state.length < ready) & ~state.done, ready


def _memory(sampler: Sampler, canvas: Array) -> tuple[Any, Any]:
    assert sampler.stop is not None
    return sampler.rule.init(canvas), sampler.stop.init(canvas)


def _choose(rows: Bool[Array, "B"], new: Any, old: Any) -> Any:  # noqa: F821
    """Take `new` where a row is chosen. Only for small leaves: never over a cache."""
    return jax.tree.map(lambda a, b: jnp.where(rows.reshape(-1, *[1] * (a.ndim - 1)), a, b), new, old)


def _row_key(key: Key, known: Array, step: Array) -> Key:
    """Depends on the block's start and the step only, not on how the prompt was chunked."""
    return jax.random.fold_in(jax.random.fold_in(key, known), step)


def _open(program: Program, state: State, knobs: Knobs) -> State:
    """Lay a fresh canvas where a row has encoded all it can and has none open."""
    encoding, _ = _phases(program, state)
    opening = ~encoding & ~state.done & (state.step < 0)

    def lay(text: Array, given: Array, length: Array, known: Array, key: Key) -> tuple[Array, Array]:
        at = length + jnp.arange(program.width)
        cut = lambda x: jax.lax.dynamic_slice(x, (length,), (program.width,))  # noqa: E731
        held = (at < known) | cut(given)
        ones = jnp.ones((program.width,), jnp.float32)
        noise = program.corruption.prior(_row_key(key, known, jnp.asarray(-1)), ones)
        return jnp.where(held, cut(text), noise).astype(jnp.int32), held

    canvas, held = jax.vmap(lay)(state.text, state.given, state.length, state.known, state.key)
    fresh = state._replace(
        canvas=canvas,
        answer=canvas,
        held=held,
        n=jnp.minimum(program.width, state.total - state.length),
        step=jnp.zeros_like(state.step),
        carry=jax.tree.map(jnp.zeros_like, state.carry),
        memory=jax.vmap(functools.partial(_memory, knobs.sampler))(canvas),
    )
    kept = ("cache", "key")
    chosen = {k: _choose(opening, v, getattr(state, k)) for k, v in fresh._asdict().items() if k not in kept}
    return state._replace(**chosen)


def _denoise(
    program: Program, params: Params, state: State, knobs: Knobs, hidden: Array, rows: Array
) -> tuple[State, Frame]:
    logits = program.model.head(params, hidden)
    row = functools.partial(_advance, program)
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


def _advance(
    program: Program, row: State, logits: Float[Array, "L V"], sampler: Sampler, limit: Array
) -> tuple[dict[str, Any], Array, Array, Array]:
    """One row's step: shape, read, rule, stop; and, where the block is settled, its commit."""
    at = row.length + jnp.arange(program.width)
    window = jnp.minimum(jnp.minimum(row.total, row.length + program.width), row.known + program.block)
    editable = ~row.held & (at >= row.known) & (at < window)
    steps = jnp.where(limit > 0, limit, jnp.maximum(editable.sum(), 1))
    key_draw, key_noise, key_rule = jax.random.split(_row_key(row.key, row.known, row.step), 3)
    view = _view(program, row, logits, editable, steps, key_noise)
    for part in sampler.shape:
        view = view._replace(logits=part(view.logits, view))
    uniforms = jax.random.uniform(key_draw, (program.width,))
    sample = draw(view.logits, uniforms, jnp.asarray(sampler.temperature, jnp.float32))
    watch = () if program.eos is None else (program.eos,)
    view = view._replace(reading=read(view.logits, row.canvas, sample, watch))
    return _commit(program, row, view, sampler, key_rule, window)


def _view(program: Program, row: State, logits: Array, editable: Array, steps: Array, key: Key) -> View:
    c = program.corruption
    t = 1.0 - row.step / steps
    s = jnp.maximum(1.0 - (row.step + 1) / steps, 0.0)
    if c.mask is None:
        masked, noise = editable, c.prior(key, jnp.broadcast_to(s, row.canvas.shape))
    else:
        # Also for hybrid noise: what is not yet settled waits as the mask.
        masked, noise = editable & (row.canvas == c.mask), jnp.full_like(row.canvas, c.mask)
    logits = forbid(logits, (*c.forbidden, *program.forbidden))
    return View(
        canvas=row.canvas,
        reading=None,  # type: ignore[arg-type]  # shapers run before it exists
        logits=logits,
        editable=editable,
        masked=masked,
        n=row.n,
        room=program.width - row.n,
        noise=noise.astype(jnp.int32),
        t=t,
        s=s,
        keep_t=c.alpha(t),
        keep_s=c.alpha(s),
        step=row.step,
        steps=steps,
    )


def _commit(
    program: Program, row: State, view: View, sampler: Sampler, key: Key, window: Array
) -> tuple[dict[str, Any], Array, Array, Array]:
    assert sampler.stop is not None
    proposal, rule_memory = sampler.rule(key, view, row.memory[0])
    keep = lambda new: jnp.where(view.editable, new, row.canvas).astype(jnp.int32)  # noqa: E731
    proposal = proposal._replace(canvas=keep(proposal.canvas), answer=keep(proposal.answer))
    stopped, stop_memory = sampler.stop(view, proposal, row.memory[1])
    at = row.length + jnp.arange(program.width)
    ended = _ended(program, proposal, view)
    over = stopped | (view.step + 1 >= view.steps) | ended
    answer, total = proposal.answer, row.total
    if program.eos is not None:
        hit = (answer == program.eos) & view.editable
        end = jnp.min(jnp.where(hit, at, row.total))
        total = jnp.where(over, jnp.minimum(total, end), total)
        # A row that ended keeps its end-of-text token just behind its text.
        answer = jnp.where(over & (at > end) & (at < window) & ~row.held, program.eos, answer)
    text = jax.lax.dynamic_update_slice(row.text, _written(row, answer, window, at, program), (row.length,))
    known = jnp.where(over, jnp.minimum(window, total), row.known)
    known, total = known.astype(jnp.int32), total.astype(jnp.int32)  # under x64 an arange is int64
    fresh = dict(
        text=jnp.where(over, text, row.text),
        known=known,
        total=total,
        canvas=proposal.canvas,
        answer=answer,
        step=jnp.where(over, -1, row.step + 1),
        memory=(rule_memory, stop_memory),
        done=row.done | (over & (known >= total)),
    )
    settled = (proposal.canvas == answer) | over
    return fresh, settled, view.reading.p_argmax, view.logits


def _ended(program: Program, proposal: Proposal, view: View) -> Array:
    """Whether the chain holds an end of text with nothing open before it: the rest need not settle."""
    if program.eos is None or program.corruption.mask is None:
        return jnp.asarray(False)
    far, at = program.width, jnp.arange(program.width)
    first_open = jnp.min(jnp.where(view.masked & (proposal.canvas == view.noise), at, far))
    return jnp.min(jnp.where((proposal.canvas == program.eos) & view.editable, at, far)) < first_open


def _written(row: State, answer: Array, window: Array, at: Array, program: Program) -> Array:
    """The canvas as it goes into the text: the active block's answer, the rest as it stood."""
    old = jax.lax.dynamic_slice(row.text, (row.length,), (program.width,))
    return jnp.where((at < window) & ~row.held, answer, old)
