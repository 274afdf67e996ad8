"""Lossless lookahead: drafts of future canvases, verified together with the current one in one pass.

Plain decoding needs a pass over a row's canvas before it knows the next canvas. Here a pass also computes up to n
guesses of the canvases after it, as further rows of the batch. Then each row takes as many steps as it can:

1. It takes a step from the logits of its canvas, as plain decoding would. If the pass has also computed the canvas
   after this step, its logits are what the next pass would compute, and the row takes the next step at once.
2. From the first canvas that the pass has not computed on, steps are guesses: the rule, with the logits of the last
   canvas that was computed. These are the drafts of the next pass.

A draft decides nothing, it only says of which canvases the logits are known: whatever is drafted, the tokens are those
of plain decoding with the same seed, by any rule, at any temperature. Random numbers depend on the block and the step
alone, and so does what a rule remembers. In fp64 this holds bit for bit; in fp32 two programs may round differently,
so that a near tie may be broken differently.

Sources: FreeDave, arXiv 2510.00294 (`generation/core.py`), and self-speculative decoding for diffusion models,
arXiv 2510.04147. Departs from both: they draft the most confident tokens one by one; here the rule itself drafts, with
its parallel steps, its memory and its random numbers. FreeDave accepts a draft whose tokens are a subset of the next
canvas; here it must be equal to it, because a canvas with fewer tokens has other logits. Drafts end with their block.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from mercury_jax.decode.denoise import denoise, open_canvases
from mercury_jax.decode.methods.causal import first_tokens
from mercury_jax.decode.passes import forward, next_feed
from mercury_jax.decode.state import DecodeConfig, Frame, Method, Rows, SamplingParams, State, update_rows
from mercury_jax.sharding import varying, varying_axes
from mercury_jax.types import Params


class Drafts(NamedTuple):
    """The slot of lookahead in `State.method`: drafts of the canvases of the next n steps, and their cost."""

    canvas: Int[Array, "B n W"]
    used: Int[Array, "B n"]  # `State.used` of each draft; 0: no draft
    step: Int[Array, "B n"]  # `State.step` of each draft
    computed: Int[Array, "B"]  # canvases computed so far, drafts included


def lookahead(drafts: int) -> Method:
    """Makes the method that drafts up to `drafts` canvases of later steps."""
    return Method("lookahead", lookahead_step, first_slot, settings=drafts, report=report)


def report(state: State) -> dict[str, Array]:
    """Counts the canvases of a row that passes have computed, drafts included."""
    return {"evaluated": state.method.computed}


def first_slot(config: DecodeConfig, sampling: SamplingParams, rows: Rows) -> Drafts:
    """Makes the slot before the first pass, without drafts."""
    none = jnp.zeros((len(rows.tokens), config.method.settings), jnp.int32)
    return Drafts(jnp.zeros((*none.shape, config.width), jnp.int32), none, none, none[:, 0])


def lookahead_step(config: DecodeConfig, params: Params, state: State) -> tuple[State, Frame]:
    """Runs one pass over the canvases and their drafts, and takes all the steps that it has computed."""
    state = open_canvases(config, state)
    feed = next_feed(config, state)
    hidden, leave_one_out, before = forward_drafts(config, params, state, *feed)
    denoising = ~feed.encoding & ~state.done
    moved, frame = denoise_ahead(config, params, before, hidden, leave_one_out, denoising)
    if config.model.config.predicts_block_start:
        own = jax.tree.map(lambda x: x[:: 1 + config.method.settings], hidden)
        moved = first_tokens(config, params, own, before, feed, moved)
    return feed.advance(moved), frame


def forward_drafts(
    config: DecodeConfig,
    params: Params,
    state: State,
    tokens: Int[Array, "B W"],
    used: Int[Array, "B"],
    causal: Bool[Array, "B"],
) -> tuple[Any, Any, State]:
    """Runs one forward pass over each row's canvas and its drafts: a batch of B (1 + n) rows.

    The KV cache is repeated for the drafts, and of what the pass writes only that of the canvases is kept: keys of a
    canvas are computed anew in each pass.

    Returns:
        Hidden states of each row's window and of its drafts' [B (1 + n), L, ...], row by row; the same by leave-one-out
        masks or None; and the state with the cache of B rows.
    """
    count, drafts = 1 + config.method.settings, state.method
    denoising = (used > 0) & ~causal
    # [B, 1 + n, ...] as [B (1 + n), ...]: the canvas of a row, then its drafts.
    beside = lambda own, others: jnp.concatenate([own[:, None], others], axis=1).reshape(-1, *own.shape[1:])
    source = jnp.repeat(jnp.arange(used.shape[0]), count)
    rows = jax.tree.map(lambda x: x[source], state._replace(method=()))
    rows = rows._replace(step=beside(state.step, drafts.step))
    tokens, used = beside(tokens, drafts.canvas), beside(used, drafts.used * denoising[:, None])
    causal = beside(causal, jnp.zeros(drafts.used.shape, bool))
    hidden, leave_one_out, moved = forward(config, params, rows, tokens, used, causal)
    cache = jax.tree.map(lambda x: x[::count], moved.cache)
    return hidden, leave_one_out, state._replace(cache=cache)


class _Walk(NamedTuple):
    """The steps that rows take after a pass."""

    real: State  # the state of plain decoding, without its cache
    ahead: State  # the same, or a guess of a later one
    frame: Frame
    branch: Int[Array, "B"]  # of which of the computed canvases the logits are used
    known: Bool[Array, "B"]  # `ahead` is real and the logits are its own
    live: Bool[Array, "B"]  # rows that take a further step
    drafts: Drafts
    count: Int[Array, "B"]  # drafts so far
    links: Int[Array, ""]  # steps so far


def denoise_ahead(
    config: DecodeConfig,
    params: Params,
    state: State,
    hidden: Any,
    leave_one_out: Any,
    rows: Bool[Array, "B"],
) -> tuple[State, Frame]:
    """Takes all the denoising steps whose logits a pass has computed, and drafts the steps after them.

    Args:
        hidden: Of each row's window and of its drafts', from `forward_drafts`.
        leave_one_out: The same by leave-one-out masks, or None.

    Returns:
        The next state, with the drafts of the next pass, and a frame that shows each row's window after its last step.
        `nfe` counts the pass once, `Drafts.computed` its canvas and its drafts.
    """
    drafts, size, most = state.method, rows.shape[0], config.method.settings
    each = jnp.arange(size)
    split = lambda tree: jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), tree)
    hidden, leave_one_out = split(hidden), split(leave_one_out)  # [B, 1 + n, L, ...]
    # What the pass has computed, the canvas first. A draft with used = 0 is none.
    beside = lambda own, others: jnp.concatenate([own[:, None], others], axis=1)
    canvases, used = beside(state.canvas, drafts.canvas), beside(state.used, drafts.used)
    steps = beside(state.step, drafts.step)

    def one_step(walk: _Walk) -> _Walk:
        pick = lambda tree: jax.tree.map(lambda x: x[each, walk.branch], tree)
        moved, shown = denoise(config, params, walk.ahead, pick(hidden), pick(leave_one_out), walk.live)
        moved = moved._replace(records=moved.records._replace(nfe=state.nfe))
        # A step from known logits is one of plain decoding.
        verified = walk.live & walk.known
        real = update_rows(walk.real, verified, moved._asdict())
        frame = update_rows(walk.frame, verified | (walk.links == 0), shown._asdict())
        # Has the pass computed the canvas that the row has come to?
        same = jnp.all(canvases == moved.canvas[:, None], axis=-1) & (used == moved.used[:, None])
        if config.model.config.timed:
            same &= steps == moved.step[:, None]
        known = verified & jnp.any(same, axis=1)
        live = walk.live & (moved.step >= 0) & ~moved.done  # the block is still open
        # A step from other logits is a guess: a draft, unless it ends the block.
        guessed = live & ~walk.known
        slot = jnp.where(guessed, walk.count, most)
        put = lambda old, new: old.at[each, slot].set(new, mode="drop")
        named = ("canvas", "used", "step")
        found = walk.drafts._replace(**{x: put(getattr(walk.drafts, x), getattr(moved, x)) for x in named})
        count = walk.count + guessed
        return _Walk(
            real=real, ahead=moved, frame=frame,
            branch=jnp.where(known, jnp.argmax(same, axis=1), walk.branch).astype(jnp.int32), known=known,
            live=live & (count < most), drafts=found, count=count, links=walk.links + 1,
        )  # fmt: skip

    bare = state._replace(cache=(), method=())
    zeros = lambda shape: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shape)
    own = lambda tree: jax.tree.map(lambda x: x[:, 0], tree)
    like = jax.eval_shape(lambda: denoise(config, params, bare, own(hidden), own(leave_one_out), rows))
    none, axes = jnp.zeros((size,), jnp.int32), varying_axes((params, state, hidden))
    empty = drafts._replace(used=jnp.zeros_like(drafts.used))
    start = _Walk(bare, bare, zeros(like[1]), none, rows, rows, empty, none, jnp.asarray(0))
    # The first step is taken in any case: its frame shows the rows that do not denoise too.
    unfinished = lambda walk: (walk.links == 0) | jnp.any(walk.live)
    walk = jax.lax.while_loop(unfinished, one_step, varying(start, axes))
    computed = drafts.computed + rows * (1 + (drafts.used > 0).sum(axis=1))
    moved = walk.real._replace(
        records=walk.real.records._replace(nfe=state.nfe + rows),
        cache=state.cache,
        method=walk.drafts._replace(computed=computed.astype(jnp.int32)),
    )
    return moved, walk.frame._replace(done=moved.done)
