"""One pass of plain decoding, and its denoising step: token statistics, the rule's decision, stopping, commit.

`plain_step` is the whole pass: rows open their canvases, one forward pass serves all rows, some rows encode committed
tokens and the others denoise.

`open_canvases` makes the canvas on which a row begins a block. `denoise` works on the batch and vmaps `decide`, which
works on one row. A step of a row ends in one of two ways: the canvas becomes the rule's proposal, or the block is
finished and committed to `tokens`, and later passes encode it.

Other methods have steps of their own, which call `denoise` after the forward pass; `view.py` builds what the rule sees.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.decode.passes import forward, next_feed
from mercury_jax.decode.sampler import call_part
from mercury_jax.decode.state import (
    DecodeConfig,
    Frame,
    Method,
    Predictions,
    State,
    Written,
    close_thinking,
    first_memory,
    step_key,
    update_rows,
)
from mercury_jax.decode.token_stats import draw, forbid, most_probable, slice_at, token_stats, write_at
from mercury_jax.decode.view import (
    Observation,
    Window,
    draw_uniforms,
    ends_section,
    observe,
    process_logits,
    window_offset,
)
from mercury_jax.types import Params, Proposal, TokenStats, View


def plain_step(config: DecodeConfig, params: Params, state: State) -> tuple[State, Frame]:
    """Runs one forward pass and advances every row by what that row needs next.

    In the same batch some rows encode (they write committed tokens to the KV cache), some denoise (they update their
    canvas), and finished rows do nothing. All of them share the pass.
    """
    state = open_canvases(config, state)  # rows that finished a block start the next one
    feed = next_feed(config, state)  # committed tokens, or a canvas
    # `hidden` is opaque: leaves [B, L, ...].
    hidden, leave_one_out, state = forward(config, params, state, *feed)
    # Statistics of each position, the rule's decision, the stopping criterion, and the commit of finished blocks.
    state, frame = denoise(config, params, state, hidden, leave_one_out, ~feed.encoding & ~state.done)
    return feed.advance(state), frame


PLAIN = Method("plain", plain_step)


def open_canvases(config: DecodeConfig, state: State) -> State:
    """Initializes the canvas of every row that has encoded its committed tokens and has no open canvas.

    Returns:
        The state with the new canvases. A canvas holds the committed, given and draft tokens at their positions, and
        noise elsewhere. The memories of the rule and of the stopping criterion start anew.
    """
    ready = config.encodable(state.committed)
    opening = (state.cache_length >= ready) & ~state.done & (state.step < 0)

    def lay(row: State) -> tuple[Array, Array, Array]:
        # The canvas covers the W positions after the cache. Positions that are committed, given or drafted start with
        # their tokens, the others with noise. Of the committed ones, the last `revisable` stay editable.
        at = row.cache_length + jnp.arange(config.width)  # [W]
        here = lambda x: jax.lax.dynamic_slice(x, (row.cache_length,), (config.width,))
        frozen = (at < row.committed - config.revisable) | here(row.given)
        ones = jnp.ones((config.width,), jnp.float32)
        noise = config.corruption.prior(step_key(row.key, row.committed, jnp.asarray(-1)), ones)
        decided = frozen | (at < row.committed) | here(row.draft)
        canvas = jnp.where(decided, here(row.tokens), noise).astype(jnp.int32)
        offset = window_offset(config, row.cache_length, row.committed)
        return canvas, frozen, slice_at(canvas, offset, config.window)

    canvas, frozen, window = jax.vmap(lay)(state.without_cache())
    used = jnp.minimum(config.width, state.limits.end - state.cache_length)
    fresh: dict[str, Any] = dict(
        canvas=canvas, answer=canvas, frozen=frozen, used=used, step=jnp.zeros_like(state.step),
        self_cond=jax.tree.map(jnp.zeros_like, state.self_cond),
        memory=jax.vmap(functools.partial(first_memory, config))(state.sampling.sampler, window),
    )  # fmt: skip
    return update_rows(state, opening, fresh)


def denoise(
    config: DecodeConfig,
    params: Params,
    state: State,
    hidden: Any,
    leave_one_out: Any,
    rows: Bool[Array, "B"],
) -> tuple[State, Frame]:
    """Takes one denoising step.

    Args:
        hidden: Hidden states of each row's window, leaves [B, L, ...].
        leave_one_out: Hidden states of the additional masks that do not see the token at their position, with the same
            shapes; None unless the rule has `leave_one_out`.
    """
    small = state.without_cache()
    seen = jax.vmap(functools.partial(observe, config))(small)
    # 1. Token statistics of each position [B, L], and the self-conditioning for the next pass.
    predict = config.predict or predict_tokens
    seen, stats, raw, self_cond = predict(config, params, small, hidden, seen)
    other_logits = None if leave_one_out is None else config.model.head(params, leave_one_out)
    rule = state.sampling.sampler.rule
    if rule.needs_hidden:
        name = f"needs_hidden of the rule {rule.name}"
        shown = hidden if rule.needs_hidden is True else call_part(name, rule.needs_hidden, params, hidden)
        seen = seen._replace(view=seen.view._replace(hidden=shown))
    # 2. The rule's decision, row by row.
    step = functools.partial(decide, config)
    changes, accepted, confidence = jax.vmap(step)(small, seen, stats, raw, other_logits)
    # The rule saw the window [L]; the state keeps the canvas [W], in which the window begins at `offset`.
    offset = window_offset(config, state.cache_length, state.committed)
    # The self-conditioning of the window [B, L, D] replaces that part of the canvas's [B, W, D].
    if config.window < config.width:
        put = jax.vmap(lambda old, new, at: write_at(old, new, at))
        self_cond = jax.tree.map(lambda old, new: put(old, new, offset), state.self_cond, self_cond)
    moved = update_rows(state, rows, changes | {"self_cond": self_cond})
    moved = moved._replace(records=moved.records._replace(nfe=state.nfe + rows))
    # 3. The frame of this pass; rows that did not denoise have used = 0 in it.
    answer = jax.vmap(lambda x, start: slice_at(x, start, config.window))(moved.answer, offset)
    used = jnp.where(rows, moved.used if config.variable_length else seen.window.used, 0)
    return moved, Frame(state.cache_length + offset, used, answer, accepted, confidence, moved.done)


def predict_tokens(
    config: DecodeConfig, params: Params, state: State, hidden: Any, seen: Observation
) -> Predictions:
    """Computes the logits of each row's window, all ids at once, and from them the statistics of each position."""
    raw = config.model.head(params, hidden)  # [B, L, V]
    process = functools.partial(process_logits, config)
    logits, draw_logits = jax.vmap(process)(state, seen.view, seen.window.at, raw)
    # Sampling needs uniforms and cumulative sums over the vocabulary. They are computed only if a row has a
    # temperature above 0.
    temperature = jnp.asarray(state.sampling.sampler.temperature, jnp.float32)

    def draw_tokens() -> Int[Array, "B L"]:
        uniforms, _ = jax.vmap(functools.partial(draw_uniforms, config))(state, seen.window)
        return jax.vmap(draw)(draw_logits, uniforms, temperature)

    greedy = most_probable(draw_logits)
    drawn = jax.lax.cond(jnp.any(temperature > 0), draw_tokens, lambda: greedy)
    view = seen.view._replace(logits=logits, draw_logits=draw_logits)
    stats = jax.vmap(token_stats)(logits, view.canvas, drawn, view.eos)
    return Predictions(seen._replace(view=view), stats, raw, config.model.condition(params, logits))


class Decision(NamedTuple):
    """A rule's proposal with the given tokens restored, before it is written to the state."""

    proposal: Proposal
    frozen: Bool[Array, "L"]  # committed or given, at the positions of the proposal
    open: Bool[Array, "L"]  # editable and still noise
    row_end: Int[Array, ""]  # absolute end of the row; changes if the rule inserted or deleted positions
    block_end: Int[Array, ""]  # absolute end of the active block


def decide(
    config: DecodeConfig,
    row: State,
    seen: Observation,
    stats: TokenStats,
    raw: Float[Array, "L V"] | None,
    other_logits: Float[Array, "L V"] | None,
) -> tuple[dict[str, Any], Bool[Array, "L"], Float[Array, "L"]]:
    """Applies the rule and the stopping criterion to one row, and commits its block if it is finished.

    Returns:
        The fields of the state that change, which positions are accepted, and the probability of the argmax at each
        position.
    """
    sampler, window, constrained = row.sampling.sampler, seen.window, row.sampling.constrained
    view = seen.view._replace(stats=stats, leave_one_out=stats)
    if other_logits is not None:
        logits = forbid(other_logits, config.never_emitted)
        view = view._replace(leave_one_out=token_stats(logits, view.canvas, most_probable(logits), view.eos))
    proposal, rule_memory = sampler.rule(seen.key, view, row.memory[0])
    if not isinstance(constrained, tuple):
        proposal = sample_front(view, proposal, constrained & (row.limits.answer_budget == 0))
    decision = _restore_given(config, row, view, window, proposal)
    assert sampler.stopping is not None
    stopped, stopping_memory = sampler.stopping(view, decision.proposal, row.memory[1])
    # ends the row; the host raises, and names the pass
    is_nan = jnp.any(jnp.isnan(stats.entropy) & view.editable)
    changes, accepted = _commit(config, row, view, window, decision, stopped & ~is_nan)
    changes |= dict(memory=(rule_memory, stopping_memory), done=changes["done"] | is_nan)
    # Positions whose log-probability this pass writes: those open before it, and those whose token it replaces. A
    # token that is remasked and accepted again thus has the log-probability of its last acceptance.
    source = decision.proposal.source if config.variable_length else None
    changed = view.masked | (decision.proposal.canvas != view.canvas)
    changes["records"] = row.records.with_nan(is_nan).with_tokens(Written(
        decision.proposal.answer, changed, window.at[0], config.corruption.forbidden, raw, view.draw_logits,
        jnp.asarray(sampler.temperature, jnp.float32), source,
    ))  # fmt: skip
    return changes, accepted, stats.p_argmax


def sample_front(view: View, proposal: Proposal, constrained: Bool[Array, ""]) -> Proposal:
    """For grammar-constrained rows, always samples the first undecided token.

    The grammar mask covers only this token, and the host commits it after the pass.
    """
    first = constrained & view.editable & (jnp.cumsum(view.editable) == 1)
    waits = first & (proposal.canvas != proposal.answer)
    put = lambda old: jnp.where(waits, view.stats.sample, old)
    return proposal._replace(canvas=put(proposal.canvas), answer=put(proposal.answer))


def _restore_given(
    config: DecodeConfig, row: State, view: View, window: Window, proposal: Proposal
) -> Decision:
    """Restores the frozen tokens of the canvas in a proposal, at the positions to which the rule moved them."""
    mask = config.corruption.mask
    if not config.variable_length:
        keep = lambda new: jnp.where(view.editable, new, view.canvas).astype(jnp.int32)
        proposal = proposal._replace(canvas=keep(proposal.canvas), answer=keep(proposal.answer))
        is_open = view.editable if mask is None else view.editable & (proposal.canvas == mask)
        return Decision(proposal, window.frozen, is_open, row.limits.end, window.end)
    proposal, frozen = _moved_proposal(config, view, window, proposal)
    editable = ~frozen & (jnp.arange(config.window) < proposal.used)
    is_open = editable if mask is None else editable & (proposal.canvas == mask)
    # The window is the whole canvas here, so the end of the row moves with it.
    row_end = (row.limits.end + proposal.used - view.used).astype(jnp.int32)
    return Decision(proposal, frozen, is_open, row_end, window.at[0] + proposal.used)


def _moved_proposal(
    config: DecodeConfig, view: View, window: Window, proposal: Proposal
) -> tuple[Proposal, Bool[Array, "L"]]:
    """Validates the proposal of a rule of variable length.

    Returns:
        The proposal with its frozen tokens restored, and which of its positions are frozen. If the rule dropped or
        reordered a frozen token, the unchanged canvas instead.
    """
    at = jnp.arange(config.window)
    used = jnp.clip(proposal.used, 0, jnp.minimum(view.used + view.growth, config.window))
    # source[i]: the position of the old canvas that position i comes from; -1 for an inserted or unused one. [L]
    source = jnp.where(at < used, proposal.source, -1)
    old = jnp.maximum(source, 0)
    frozen = (source >= 0) & window.frozen[old]
    # Frozen tokens keep their order if each source exceeds the sources of all frozen tokens before it. None is lost if
    # their number is the same as before.
    order = jnp.where(frozen, source, -1)
    before = jnp.concatenate([jnp.array([-1]), jax.lax.cummax(order)[:-1]])
    valid = jnp.all(~frozen | (order > before))
    valid &= frozen.sum() == (window.frozen & (at < view.used)).sum()
    mask = config.corruption.mask or 0
    put = lambda new: jnp.where(frozen, view.canvas[old], jnp.where(at < used, new, mask))
    unchanged = Proposal(view.canvas, view.answer, view.used, at)
    moved = Proposal(put(proposal.canvas), put(proposal.answer), used, source)
    pick = lambda a, b: jnp.where(valid, a, b).astype(jnp.int32)
    return jax.tree.map(pick, moved, unchanged), jnp.where(valid, frozen, window.frozen)


def _commit(
    config: DecodeConfig, row: State, view: View, window: Window, decision: Decision, stopped: Bool[Array, ""]
) -> tuple[dict[str, Any], Bool[Array, "L"]]:
    """Writes the proposal into the canvas, and commits the block to the row's tokens if it is finished."""
    proposal, at, params = decision.proposal, window.at, row.sampling
    editable = ~decision.frozen & (at < decision.block_end)
    ends = lambda tokens: ends_section(config, tokens, row)
    first_end = jnp.min(jnp.where(editable & ends(proposal.answer), at, decision.row_end))
    finished = stopped | (view.step + 1 >= view.steps)
    assert params.sampler.stopping is not None
    if config.corruption.mask is not None and params.sampler.stopping.keeps_decided:
        # The canvas holds an end of text with no mask before it: the positions after it need no more steps.
        far = at[-1] + 1
        first_open = jnp.min(jnp.where(decision.open, at, far))
        finished |= jnp.min(jnp.where(editable & ends(proposal.canvas), at, far)) < first_open
    # the host commits grammar-constrained tokens, except thinking
    if not isinstance(params.constrained, tuple):
        finished &= ~params.constrained | (row.limits.answer_budget > 0)
    # An answer ends before its first end-of-text token, which stays in `tokens` at `end`: the host reads there whether
    # the model ended the answer. Editable positions after it become end of text too.
    behind = finished & (at > first_end) & editable & (params.eos >= 0)
    answer = jnp.where(behind, view.eos, proposal.answer)
    end = jnp.where(finished, jnp.minimum(decision.row_end, first_end), decision.row_end)
    committed = jnp.where(finished, jnp.minimum(decision.block_end, end), row.committed)
    # Row tokens [S] with the answer of the active block written at the window; the rest is unchanged. Frozen positions
    # are written only under variable length, where they may have moved.
    writable = (at < decision.block_end) & (~decision.frozen | config.variable_length)
    old = jax.lax.dynamic_slice_in_dim(row.tokens, at[0], config.window)
    written = write_at(row.tokens, jnp.where(writable, answer, old), at[0])
    changes: dict[str, Any] = dict(
        tokens=jnp.where(finished, written, row.tokens),
        committed=committed,
        limits=row.limits._replace(end=end),
        canvas=write_at(row.canvas, proposal.canvas, window.offset),
        answer=write_at(row.answer, answer, window.offset),
        frozen=write_at(row.frozen, decision.frozen, window.offset),
        step=jnp.where(finished, -1, row.step + 1),
        done=row.done | (finished & (committed >= end)),
    )
    if config.variable_length:
        given = write_at(row.given, decision.frozen & (at < decision.block_end), at[0])
        changes["given"] = jnp.where(finished, given, row.given)
        changes["used"] = decision.block_end - row.cache_length
    changes |= close_thinking(row, changes)
    for name in {"committed", "limits", "step", "used"} & set(changes):
        changes[name] = jax.tree.map(lambda x: x.astype(jnp.int32), changes[name])
    return changes, (proposal.canvas == answer) | finished
