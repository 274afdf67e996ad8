"""One row's denoising step: shape the logits, read them, apply the rule, stop, commit. No batch axis."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mercury_jax.decode.parts import Sampler
from mercury_jax.decode.read import draw, forbid, read
from mercury_jax.decode.state import Program, State, row_key
from mercury_jax.types import Key, Proposal, View


def advance(
    program: Program, row: State, logits: Float[Array, "L V"], sampler: Sampler, limit: Array
) -> tuple[dict[str, Any], Array, Array, Array]:
    """One row's step: shape, read, rule, stop; and, where the block is settled, its commit."""
    at = row.length + jnp.arange(program.width)
    window = jnp.minimum(jnp.minimum(row.total, row.length + program.width), row.known + program.block)
    editable = ~row.held & (at >= row.known) & (at < window)
    steps = jnp.where(limit > 0, limit, jnp.maximum(editable.sum(), 1))
    key_draw, key_noise, key_rule = jax.random.split(row_key(row.key, row.known, row.step), 3)
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
    keep = lambda new: jnp.where(view.editable, new, row.canvas).astype(jnp.int32)
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
