"""One row's denoising step: read what it sees, apply the rule, stop, commit. No batch axis."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from mercury_jax.decode import nats
from mercury_jax.decode.read import forbid, read
from mercury_jax.decode.returned import called, done_of, proposal_of
from mercury_jax.decode.sight import Sight, ends_text
from mercury_jax.decode.state import Knobs, Program, State
from mercury_jax.decode.window import Window, paste
from mercury_jax.types import Proposal, Reading, View


class Settled(NamedTuple):
    """What a rule's step comes to, before it goes into the text."""

    proposal: Proposal
    held: Bool[Array, "L"]
    open: Bool[Array, "L"]  # still noise
    total: Int[Array, ""]
    end: Int[Array, ""]


def decide(
    program: Program, row: State, sight: Sight, reading: Reading, raw: Any, blind: Any, knobs: Knobs
) -> tuple[dict[str, Any], Array, Array]:
    """Apply the rule and the stop, and commit where the block is settled.

    raw: the logits [L, V] before any shaper, where they are there; blind: those of blind masks, or None.
    Returns what changed of the row, which positions are settled, and the confidence of each.
    """
    sampler = knobs.sampler
    view = sight.view._replace(reading=reading, blind=reading)
    if blind is not None:
        never = (*program.corruption.forbidden, *program.forbidden)
        logits = forbid(blind, never)
        view = view._replace(blind=read(logits, view.canvas, logits.argmax(-1).astype(jnp.int32), view.eos))
    returned = called(sampler.rule, sampler.rule, sight.key, view, row.memory[0])
    proposal, rule_memory = proposal_of(sampler.rule, returned, view, row.memory[0])
    if not isinstance(knobs.gated, tuple):
        proposal = _front_drawn(view, proposal, knobs.gated & (row.reserve == 0))
    settled = _place(program, row, view, sight.window, proposal)
    assert sampler.stop is not None
    returned = called(sampler.stop, sampler.stop, view, settled.proposal, row.memory[1])
    stopped, stop_memory = done_of(sampler.stop, returned, row.memory[1])
    # A number that is none ends the row here; the caller names the pass.
    broken = jnp.any(jnp.isnan(reading.entropy) & view.editable)
    fresh, shown = _commit(program, row, view, sight.window, settled, stopped & ~broken, knobs)
    fresh |= dict(
        memory=(rule_memory, stop_memory),
        bad=jnp.where(broken & (row.bad < 0), row.forwards, row.bad),
        done=fresh["done"] | broken,
    )
    if program.logprobs is not None:
        source = settled.proposal.source if program.grows else None
        changed = view.masked | (settled.proposal.canvas != view.canvas)
        fresh["nats"] = nats.keep(row.nats, raw, settled.proposal.answer, changed, sight.window.at[0], source)
    return fresh, shown, reading.p_argmax


def _front_drawn(view: View, proposal: Proposal, gated: Bool[Array, ""]) -> Proposal:
    """Of a gated row the first open token is drawn in every pass, though the rule may wait: the host takes it."""
    first = gated & view.editable & (jnp.cumsum(view.editable) == 1)
    waits = first & (proposal.canvas != proposal.answer)
    put = lambda old: jnp.where(waits, view.reading.sample, old)
    return proposal._replace(canvas=put(proposal.canvas), answer=put(proposal.answer))


def _place(program: Program, row: State, view: View, window: Window, proposal: Proposal) -> Settled:
    """The proposal with given tokens put back where they belong, moved along where the rule moved them."""
    if not program.grows:
        keep = lambda new: jnp.where(view.editable, new, view.canvas).astype(jnp.int32)
        proposal = proposal._replace(canvas=keep(proposal.canvas), answer=keep(proposal.answer))
        return Settled(proposal, window.held, _open(program, view.editable, proposal), row.total, window.end)
    proposal, held = _moved(program, view, window, proposal)
    editable = ~held & (jnp.arange(program.window) < proposal.n)
    # The window is the whole canvas here, so the row's end moves with it.
    total = (row.total + proposal.n - view.n).astype(jnp.int32)
    return Settled(proposal, held, _open(program, editable, proposal), total, window.at[0] + proposal.n)


def _moved(
    program: Program, view: View, window: Window, proposal: Proposal
) -> tuple[Proposal, Bool[Array, "L"]]:
    """A growing rule's proposal; one that loses or disorders a given token is dropped."""
    at = jnp.arange(program.window)
    n = jnp.clip(proposal.n, 0, jnp.minimum(view.n + view.room, program.window))
    source = jnp.where(at < n, proposal.source, -1)
    old = jnp.maximum(source, 0)
    held = (source >= 0) & window.held[old]
    order = jnp.where(held, source, -1)
    rising = jnp.all(~held | (order > jnp.concatenate([jnp.array([-1]), jax.lax.cummax(order)[:-1]])))
    sound = rising & (held.sum() == (window.held & (at < view.n)).sum())
    mask = program.corruption.mask or 0
    put = lambda new: jnp.where(held, view.canvas[old], jnp.where(at < n, new, mask))
    same = Proposal(view.canvas, view.answer, view.n, at)
    moved = Proposal(put(proposal.canvas), put(proposal.answer), n, source)
    pick = lambda a, b: jnp.where(sound, a, b).astype(jnp.int32)
    return jax.tree.map(pick, moved, same), jnp.where(sound, held, window.held)


def _open(program: Program, editable: Array, proposal: Proposal) -> Bool[Array, "L"]:
    mask = program.corruption.mask
    return editable if mask is None else editable & (proposal.canvas == mask)


def _commit(
    program: Program,
    row: State,
    view: View,
    window: Window,
    settled: Settled,
    stopped: Array,
    knobs: Knobs,
) -> tuple[dict[str, Any], Array]:
    proposal, at = settled.proposal, window.at
    editable = ~settled.held & (at < settled.end)
    ends = _ends(program, proposal.answer, row, knobs) & editable
    first = jnp.min(jnp.where(ends, at, settled.total))
    over = stopped | (view.step + 1 >= view.steps) | _ended(program, row, knobs, settled, editable, at)
    if not isinstance(knobs.gated, tuple):
        over &= ~knobs.gated | (row.reserve > 0)
    answer = proposal.answer
    # A row that ended keeps its end-of-text token just behind its text.
    answer = jnp.where(over & (at > first) & editable & (knobs.eos >= 0), view.eos, answer)
    total = jnp.where(over, jnp.minimum(settled.total, first), settled.total)
    known = jnp.where(over, jnp.minimum(settled.end, total), row.known)
    fresh = dict(
        text=jnp.where(over, _written(program, row, answer, settled, window), row.text),
        known=known,
        total=total,
        canvas=paste(row.canvas, proposal.canvas, window.offset),
        answer=paste(row.answer, answer, window.offset),
        held=paste(row.held, settled.held, window.offset),
        step=jnp.where(over, -1, row.step + 1),
        done=row.done | (over & (known >= total)),
    )
    if program.grows:
        given = paste(row.given, settled.held & (at < settled.end), window.at[0])
        fresh |= dict(given=jnp.where(over, given, row.given), n=(settled.end - row.length))
    if program.verify:  # the draft waits for its check; nothing is written yet
        fresh |= dict(text=row.text, known=row.known, total=row.total, done=row.done, tentative=over)
        fresh["step"] = row.step + 1
    else:
        fresh |= close_thinking(row, fresh, knobs)
    ints = {k: v.astype(jnp.int32) for k, v in fresh.items() if k in ("known", "total", "step", "n")}
    return fresh | ints, (proposal.canvas == answer) | over


def close_thinking(row: State, fresh: dict[str, Any], knobs: Knobs) -> dict[str, Any]:
    """Where a row's thinking is over, close it and open the answer, whose room was kept for it."""
    shut = fresh["done"] & ~row.done & (row.reserve > 0)
    end = fresh["total"]
    text = fresh["text"].at[jnp.where(shut, end, row.text.shape[0])].set(knobs.close, mode="drop")
    return dict(
        text=text,
        known=jnp.where(shut, end + 1, fresh["known"]),
        total=jnp.where(shut, end + 1 + row.reserve, end),
        reserve=jnp.where(shut, 0, row.reserve),
        done=fresh["done"] & ~shut,
    )


def _ends(program: Program, tokens: Array, row: State, knobs: Knobs) -> Array:
    """Tokens that end what is being written: the end of text, and while thinking also its close."""
    thinking = (row.reserve > 0) & (knobs.close >= 0) & (tokens == knobs.close)
    return thinking | ends_text(program, tokens, knobs)


def _ended(program: Program, row: State, knobs: Knobs, settled: Settled, editable: Array, at: Array) -> Array:
    """Whether the chain holds an end of text with nothing open before it: the rest need not settle."""
    assert knobs.sampler.stop is not None
    if program.corruption.mask is None or knobs.sampler.stop.name != "filled":
        return jnp.asarray(False)  # a stop of its own: the rule may still revise what stands there
    far = at[-1] + 1
    ends = _ends(program, settled.proposal.canvas, row, knobs) & editable
    return jnp.min(jnp.where(ends, at, far)) < jnp.min(jnp.where(settled.open, at, far))


def _written(program: Program, row: State, answer: Array, settled: Settled, window: Window) -> Array:
    """The text with the window in it: the active block's answer, the rest as it stood."""
    mine = (window.at < settled.end) & (~settled.held | program.grows)
    old = jax.lax.dynamic_slice_in_dim(row.text, window.at[0], program.window)
    return paste(row.text, jnp.where(mine, answer, old), window.at[0])
