"""Lossless drafting by a block drafter, which reads hidden states of the model that verifies (DFlash, 2602.06036).

A block is the last committed token and L - 1 masks. The drafter predicts all masks in one pass: its positions attend
to each other, and to keys that it computed from the verifier's hidden states at all earlier positions. The verifier
then runs one causal pass over the last committed token and the draft, as in `self_speculation`, and accepts the longest
prefix of the draft that it agrees with, and one token more. The hidden states of this pass extend what the drafter
reads.

If the last three tokens have occurred in the text before, the draft is what followed them there (`prompt_lookup`),
unless `DrafterConfig.lookup` says otherwise.

The drafter reads the text through the verifier, so that one to three layers are enough. Embedding and head are the
verifier's. Both models are joined to one `Model` (`models.drafter.join`), whose cache holds the keys of both: each pass
of the verifier writes them, prefill included. What a rejected draft has written lies behind `cache_length`, and the
next pass overwrites it.

Above temperature 0 a draft is accepted as in `drafting`. "same_seed": both models draw the token of a position with the
same uniform, and the verifier's draws are the text. "rejection": the draft has draws of its own, and its tokens are
accepted with probability min(1, p / q), where q is the distribution from which the one pass has drawn them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.config import refuse
from mercury_jax.decode.denoise import open_canvases
from mercury_jax.decode.inputs import check_lm
from mercury_jax.decode.methods.acceptance import (
    DRAFT_KEY,
    Proposals,
    accept_or_redraw,
    count_drafts,
    look_up_row,
)
from mercury_jax.decode.methods.causal import idle_frame, verify, verifying_pass
from mercury_jax.decode.state import (
    DecodeConfig,
    Frame,
    Method,
    Rows,
    SamplingParams,
    State,
    position_uniforms,
    update_rows,
)
from mercury_jax.decode.token_stats import NEVER, draw
from mercury_jax.decode.view import process_logits, row_view
from mercury_jax.types import LM, BlockDrafter, DrafterPasses, DraftMethod, LookupDrafter, Model, Params, Pass

# --- before decoding


def with_block_drafter(lm: LM, drafter: BlockDrafter | LookupDrafter | str | Path) -> LM:
    """Returns the language model with a block drafter: `sample`, `stream`, a decoder and a server decode with it.

    A row under a grammar has no draft: it gets one token in each pass.

    Args:
        lm: The model that the drafter was trained for, an autoregressive transformer.
        drafter: The drafter, from `load_drafter`, or what that loads: a folder, "smollm2-drafter" or "lookup".

    Returns:
        The language model; its parameters are {"target": those of `lm`, "drafter": those of the drafter}, or those of
        `lm` with "lookup".

    Raises:
        ValueError: The drafter was trained for another model, no hidden states of the model can be read, or there is no
            such drafter.
        CheckpointError: A file of the drafter is missing or damaged.

    Example:
        >>> lm = mj.with_block_drafter(mj.load(TARGET), mj.load_drafter(FOLDER))
        >>> for frame in mj.stream(lm, prompt): ...
    """
    check_lm(lm)
    if isinstance(drafter, str | Path):
        from mercury_jax.hub.drafters import load_drafter

        drafter = load_drafter(drafter)
    if isinstance(drafter, LookupDrafter):
        if not lm.model.config.autoregressive:
            raise refuse("lm", lm.name, 'an autoregressive model, to verify drafts of "lookup"')
        return dataclasses.replace(lm, model=lm.model._replace(drafter=drafter))
    sizes = {name: getattr(lm.model.config, name) for name in ("vocab", "width", "layers")}
    for name, value in (sizes | {"tokenizer": lm.tokenizer.fingerprint}).items():
        if drafter.target[name] != value:
            found = f"{drafter.name}, for a model with {name} {drafter.target[name]}"
            raise refuse("draft", found, f"a drafter for {lm.name}, whose {name} is {value}")
    model, found = drafter.join(lm.model), jax.tree.map(jnp.shape, drafter.params)
    if found != _shapes(model):
        count = len(jax.tree.leaves(drafter.params))
        raise refuse(
            "draft.params", f"{count} arrays", "the parameters of this drafter, as load_drafter reads them"
        )
    assert isinstance(model.drafter, DrafterPasses)
    model = model._replace(drafter=model.drafter._replace(acceptance=drafter.method))
    return dataclasses.replace(lm, model=model, params={"target": lm.params, "drafter": drafter.params})


def without_drafter(lm: LM) -> LM:
    """Returns the language model that decodes left to right: what was joined to its drafter, or `lm` itself."""
    drafter = lm.model.drafter
    if isinstance(drafter, DrafterPasses):
        return dataclasses.replace(lm, model=drafter.target, params=lm.params["target"])
    return dataclasses.replace(lm, model=lm.model._replace(drafter=None))


@functools.cache
def _shapes(model: Model) -> Any:
    """Returns the shapes of the drafter's parameters of a joined model."""
    return jax.tree.map(jnp.shape, jax.eval_shape(model.init, jax.eval_shape(jax.random.key, 0))["drafter"])


# --- the method


class BlockDrafts(NamedTuple):
    """The slot of the method in `State.method`: counts of the drafts."""

    forwards: Int[Array, "B"]  # passes of the drafter
    proposed: Int[Array, "B"]  # draft tokens that were verified
    accepted: Int[Array, "B"]  # draft tokens that the verifier accepted
    nan_step: Int[Array, "B"]  # the pass in which the drafter's logits were NaN; -1: none


def block_drafting(acceptance: DraftMethod) -> Method:
    """Makes the method of a model that was joined to a block drafter."""
    return drafted_method("block_drafting", draft_block, acceptance)


# drafting(config, params, state, rows [B]) -> (the state whose canvases hold the drafts of these rows, `Proposals`)
Drafting = Callable[[DecodeConfig, Params, State, Array], tuple[State, Any]]


def drafted_method(name: str, drafting: Drafting, option: Any) -> Method:
    """Makes a method that drafts and verifies; its `settings` are `drafting` and an option of that. Equal arguments
    give equal methods, which share programs.
    """
    return Method(
        name, drafted_step, first_drafts, (drafting, option),
        # The verifying pass feeds the last committed token, then the draft, whose tokens it draws by position.
        held_back=1, min_steps=1, position_draws=True, report=report,
    )  # fmt: skip


def report(state: State) -> dict[str, Any]:
    """The counts of the drafts, for `Output.draft`."""
    return state.method._asdict()


def first_drafts(config: DecodeConfig, sampling: SamplingParams, rows: Rows) -> BlockDrafts:
    """Makes the slot before the first pass."""
    zeros = jnp.zeros((len(rows.tokens),), jnp.int32)
    return BlockDrafts(zeros, zeros, zeros, zeros - 1)


def drafted_step(config: DecodeConfig, params: Params, state: State) -> tuple[State, Frame]:
    """Drafts a block, and runs one pass of the verifier in which rows encode their prompt or verify the block."""
    # 1. A row that has encoded its prompt opens a canvas: the last committed token, and the positions of a draft.
    opened = open_canvases(config, state)
    unverified = (state.step < 0) & (opened.step >= 0)  # a draft is verified in the pass after it
    # A grammar mask covers one token: rows under a grammar have no draft.
    if not isinstance(state.sampling.constrained, tuple):
        opened = update_rows(opened, state.sampling.constrained, dict(used=jnp.minimum(opened.used, 1)))
    # 2. The draft fills the canvas.
    drafting, option = config.method.settings
    state, proposals = drafting(config, params, opened, unverified & ~opened.done)
    # 3. One causal pass of the verifier, which also writes the drafter's keys of the tokens that it feeds.
    feed, verifying, hidden, state = verifying_pass(config, params, state, unverified)
    logits = config.model.head(params, hidden)
    accept, drawn = (accept_or_redraw, proposals) if option == "rejection" else (None, ())
    # 4. Commit what the verifier has accepted, and its own token after it.
    moved, frame = verify(config, state, logits, verifying, state, idle_frame(state), accept, drawn)
    slot, (proposed, accepted) = state.method, count_drafts(state, frame, verifying)
    slot = slot._replace(proposed=slot.proposed + proposed, accepted=slot.accepted + accepted)
    return feed.advance(moved._replace(method=slot)), frame


def draft_block(
    config: DecodeConfig, params: Params, state: State, rows: Bool[Array, "B"]
) -> tuple[State, Proposals]:
    """Drafts a block for some rows by one pass of the drafter.

    Returns:
        The state whose canvases hold the drafts, and the distributions from which they were drawn.
    """
    passes, start = config.model.drafter, state.cache_length
    assert isinstance(passes, DrafterPasses)
    # 1. tokens [B, L]: the last committed token, then masks. Other rows use 0 tokens, which freezes their cache.
    tokens = jnp.where(jnp.arange(config.width) == 0, state.canvas, -1)
    used, draws = jnp.where(rows, state.used, 0), jnp.zeros_like(rows)
    given = Pass(tokens, state.cache, start, used, start + used, draws, length=state.limits.max_end)
    hidden, cache = passes.propose(params, given)
    # 2. Each mask predicts its own token: logits [B, L - 1, V] of the tokens after the committed one.
    logits = passes.head(params, jax.tree.map(lambda x: x[:, 1:], hidden))
    if passes.config.ids:
        every = jnp.full((*logits.shape[:-1], config.model.config.vocab), NEVER, logits.dtype)
        ids = np.asarray(passes.config.ids, np.int32)
        logits = every.at[..., ids].set(logits, indices_are_sorted=True, unique_indices=True)
    drafts, logits = jax.vmap(functools.partial(draw_draft, config))(state.without_cache(), logits)
    # 3. If the last `lookup` tokens have occurred before, what followed them there is the better draft.
    looked = jnp.zeros_like(rows)
    if ngram := passes.config.lookup:
        search = functools.partial(look_up_row, drafts.shape[1], ngram)
        before, length = jax.vmap(search)(state.tokens, state.cache_length)
        looked = length == ngram
        drafts = jnp.where(looked[:, None], before, drafts)
    # 4. The canvas [B, L]: the last committed token, and the draft.
    canvas = jnp.concatenate([state.canvas[:, :1], drafts], axis=1)
    slot: BlockDrafts = state.method
    is_nan = rows & (slot.nan_step < 0) & jnp.isnan(logits[:, 0].sum(-1))
    slot = slot._replace(forwards=slot.forwards + rows, nan_step=jnp.where(is_nan, state.nfe, slot.nan_step))
    drafted = update_rows(state, rows, dict(canvas=canvas, answer=canvas))
    # The verifying pass predicts one position more than the draft has.
    behind = jnp.pad(logits, ((0, 0), (0, 1), (0, 0)))
    temperature = jnp.asarray(state.sampling.sampler.temperature, jnp.float32)
    sampled = jnp.broadcast_to(((temperature > 0) & ~looked)[:, None], tokens.shape)
    return drafted._replace(cache=cache, method=slot), Proposals(behind, sampled, temperature)


def draw_draft(
    config: DecodeConfig, row: State, logits: Float[Array, "L V"]
) -> tuple[Int[Array, "L"], Float[Array, "L V"]]:
    """Draws the draft of one row, and returns it with the logits after all processors.

    The processors are the verifier's. They see a canvas of open positions.
    """
    at = row.cache_length + 1 + jnp.arange(len(logits), dtype=jnp.int32)
    blank, one = jnp.zeros(at.shape, jnp.int32), jnp.ones(())
    is_open = at < row.limits.end
    view = row_view(
        config, row, canvas=blank, answer=blank, editable=is_open, masked=is_open, used=row.used - 1,
        growth=jnp.zeros_like(row.used), noise=blank, t=one, s=one * 0, alpha_t=one * 0, alpha_s=one,
        steps=jnp.ones_like(row.step), position=at[0] - row.prompt,
    )  # fmt: skip
    _, processed = process_logits(config, row, view, at, logits)
    key = jax.random.fold_in(row.key, DRAFT_KEY) if config.method.settings[1] == "rejection" else row.key
    temperature = jnp.asarray(row.sampling.sampler.temperature, jnp.float32)
    return draw(processed, position_uniforms(key, at), temperature), processed
