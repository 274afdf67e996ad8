"""Decoding from a text that the caller predicts: "predicted outputs", as when a file comes back with one change.

`prediction`, for models whose encoding pass predicts the next token: the draft of a pass is what follows in the
prediction at the place that the answer has reached. The verifier accepts it as in `self_speculation`, so the text is
the one that the model alone decodes with the same seed. A row whose answer follows the prediction verifies up to
`WIDEST` tokens in a pass; other rows draft a few tokens, and those passes are narrow.

`predicted_canvas`, for the others: each block starts from the prediction instead of noise, and the rule replaces the
tokens that the model contradicts. That is an approximation: the text may differ from the one without a prediction.

Where the answer departs from the prediction, both look for the last tokens of the answer in the prediction (`align`).
The longest match counts, up to `MATCH` tokens, and of several the nearest to the place that was expected. So the rest
of the prediction is used again after an insertion or a deletion. A verifier first takes a departure for a few replaced,
inserted or deleted tokens, and looks further away after the next pass: in a text that repeats itself, a line that is
like the last one would otherwise be taken for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from mercury_jax.config import Plan, refuse
from mercury_jax.decode.defaults import default_editor
from mercury_jax.decode.denoise import plain_step
from mercury_jax.decode.methods.acceptance import check_verifier
from mercury_jax.decode.methods.block_drafter import drafted_step
from mercury_jax.decode.methods.fused_commit import seeded_step
from mercury_jax.decode.passes import alternate, unpack_state
from mercury_jax.decode.sampler import SamplerLike, check_sampler
from mercury_jax.decode.state import (
    ArrayLike,
    DecodeConfig,
    Frame,
    Method,
    Rows,
    SamplingParams,
    State,
    Step,
    bucket,
    first_memory,
    update_rows,
)
from mercury_jax.types import LM, Params

NARROW = 8  # positions of a narrow pass: the last committed token, and a draft
WIDEST = 512  # most positions of a wide pass
MATCH = 8  # tokens before a place of the prediction that must be those of the answer for a wide draft
NEAR = 8  # tokens from the expected place to a match of one token, or after the first departure


class PredictedTexts(NamedTuple):
    """The predictions of a call, which `SamplingParams.method` holds until the first state."""

    tokens: Int[ArrayLike, "B P"]
    length: Int[ArrayLike, "B"]  # 0: the row has no prediction


class PredictionSlot(NamedTuple):
    """The slot of the method in `State.method`. Its last fields are those of `block_drafter.BlockDrafts`."""

    tokens: Int[Array, "B P"]
    length: Int[Array, "B"]
    cursor: Int[Array, "B"]  # the place of the prediction that is drafted next
    aligned: Bool[Array, "B"]  # whether the tokens before it are the last tokens of the answer
    forwards: Int[Array, "B"]  # passes that verified a draft
    proposed: Int[Array, "B"]
    accepted: Int[Array, "B"]
    nan_step: Int[Array, "B"]  # -1: a text has no logits


def prediction(width: int) -> Method:
    """Makes the method of rows with a prediction.

    Args:
        width: Positions of a wide pass.
    """
    return Method(
        "prediction", predicted_step, first_slot, (draft_prediction, width), held_back=1, min_steps=1,
        position_draws=True, margin=width - NARROW, loop=repeat_predicted, report=report,
    )  # fmt: skip


def check_predictor(
    lm: LM, sampler: SamplerLike | None, plan: Plan | None, others: Mapping[str, Any]
) -> SamplerLike | None:
    """Checks that a model can decode from a prediction, and returns its sampler.

    Args:
        others: Arguments of the call that do not work with predictions, by name.
    """
    for name, value in others.items():
        if value is not None and value is not False:
            raise refuse(name, value, f"{None if value is not True else False} with draft_text=")
    verified = sampler is None or check_sampler(sampler).speculate is not None
    if lm.model.config.predicts_next and verified:
        if plan is not None and plan != Plan():
            raise refuse(
                "plan", plan, "None with draft_text=: the passes that verify a prediction have no blocks"
            )
        return check_verifier(lm, sampler, {})
    for name in ("refresh", "lookahead", "method"):
        if plan is not None and getattr(plan, name):
            raise refuse(f"plan.{name}", getattr(plan, name), "None or 0 with draft_text=")
    sampler = default_editor(lm) if sampler is None else sampler
    rule = check_sampler(sampler).rule
    if rule.variable_length or (lm.corruption.mask is not None and rule.stopping is None):
        allowed = (
            "a rule that replaces decided tokens, such as rules.blind_editing(), or None, with draft_text="
        )
        raise refuse("sampler.rule", rule.name, allowed)
    return sampler


def add_predictions(
    config: DecodeConfig, texts: Sequence[Sequence[int]], slots: int, verified: bool
) -> tuple[DecodeConfig, PredictedTexts]:
    """Chooses the method and the static sizes of rows with these predictions, and lays the predictions out.

    Args:
        slots: Tokens of the rows. What a prediction has beyond that is left out.
    """
    eos = config.model.config.eos
    if not verified and eos >= 0:  # the answer is expected to end where the prediction does
        texts = [[*ids, eos] if ids else ids for ids in texts]
    size = bucket(slots)
    length = np.array([min(len(ids), size) for ids in texts], np.int32)
    tokens = np.zeros((len(texts), size), np.int32)
    for row, ids in zip(tokens, texts, strict=True):
        row[: len(ids)] = ids[:size]
    if not verified:
        method = Method("predicted_canvas", canvas_step, first_slot, report=report)
        return config._replace(method=method), PredictedTexts(tokens, length)
    method = prediction(min(size, WIDEST))
    return config._replace(width=NARROW, block=NARROW, method=method), PredictedTexts(tokens, length)


def report(state: State) -> dict[str, Any]:
    """The counts of the drafts, for `Output.draft`."""
    return {name: getattr(state.method, name) for name in ("forwards", "proposed", "accepted", "nan_step")}


def first_slot(config: DecodeConfig, sampling: SamplingParams, rows: Rows) -> PredictionSlot:
    """Makes the slot before the first pass: the answer is expected to begin as the prediction does."""
    texts: PredictedTexts = sampling.method
    zeros = jnp.zeros((len(rows.tokens),), jnp.int32)
    tokens, length = (jnp.asarray(x, jnp.int32) for x in texts)
    return PredictionSlot(tokens, length, zeros, zeros == 0, zeros, zeros, zeros, zeros - 1)


def predicted_step(config: DecodeConfig, params: Params, state: State) -> tuple[State, Frame]:
    """Runs one pass: a wide one where a row follows its prediction, otherwise a narrow one."""
    wide, narrow = (functools.partial(step, config, params) for step in (wide_step, narrow_step))
    return jax.lax.cond(follows(config, state), wide, narrow, state)


def repeat_predicted(
    config: DecodeConfig, going: Callable[[Any], Array], advance: Callable[[Step, Any], Any], carry: Any
) -> Any:
    """Repeats passes on the device; see `passes.repeat`."""
    wide = lambda carry: follows(config, unpack_state(carry[1]))
    return alternate(going, wide, advance, (wide_step, narrow_step), carry)


def follows(config: DecodeConfig, state: State) -> Bool[Array, ""]:
    """Returns whether a row will verify more tokens of its prediction than a narrow pass holds."""
    slot: PredictionSlot = state.method
    left = jnp.minimum(slot.length - slot.cursor, state.limits.end - state.committed)
    ready = (state.cache_length >= config.encodable(state.committed)) & ~state.done
    return jnp.any(ready & slot.aligned & (left >= NARROW))


def narrow_step(config: DecodeConfig, params: Params, state: State) -> tuple[State, Frame]:
    """Drafts, and runs one pass of the verifier; its frame is as wide as that of a wide pass."""
    moved, frame = drafted_step(config, params, state)
    moved = moved._replace(method=align(state, moved, state.method.aligned))
    more = config.method.settings[1] - config.width
    widen = lambda x: jnp.pad(x, ((0, 0), (0, more))) if x.ndim == 2 else x
    return moved, jax.tree.map(widen, frame)


def wide_step(config: DecodeConfig, params: Params, state: State) -> tuple[State, Frame]:
    """Runs `narrow_step` on canvases of the width of the method; no canvas stays open after a pass."""
    width = config.method.settings[1]
    config = config._replace(width=width, block=width)
    blank = lambda x: jnp.zeros((x.shape[0], width, *x.shape[2:]), x.dtype)
    canvas = {name: getattr(state, name) for name in ("canvas", "answer", "frozen", "self_cond")}
    fresh = jax.tree.map(blank, canvas)
    memory = jax.vmap(functools.partial(first_memory, config))(state.sampling.sampler, fresh["canvas"])
    moved, frame = narrow_step(config, params, state._replace(**fresh, memory=memory))
    return moved._replace(**canvas, memory=state.memory), frame


def draft_prediction(
    config: DecodeConfig, params: Params, state: State, rows: Bool[Array, "B"]
) -> tuple[State, tuple[()]]:
    """Drafts what follows in the prediction. Implements `block_drafter.Drafting`."""
    del params
    slot: PredictionSlot = state.method
    at = slot.cursor[:, None] + jnp.arange(config.width - 1)
    draft = jnp.take_along_axis(slot.tokens, jnp.minimum(at, slot.tokens.shape[1] - 1), axis=1)
    left = jnp.maximum(slot.length - slot.cursor, 0)
    canvas = jnp.concatenate([state.canvas[:, :1], draft], axis=1)
    changes: dict[str, Any] = dict(canvas=canvas, answer=canvas, used=jnp.minimum(state.used, 1 + left))
    slot = slot._replace(forwards=slot.forwards + (rows & (left > 0)))
    return update_rows(state, rows, changes)._replace(method=slot), ()


def canvas_step(config: DecodeConfig, params: Params, state: State) -> tuple[State, Frame]:
    """Runs one pass of plain decoding, in which the blocks that begin start from the prediction."""
    # 1. Behind the text of a row that begins a block, put the prediction from its cursor on.
    slot: PredictionSlot = state.method
    at = jnp.arange(state.tokens.shape[1]) - state.committed[:, None] + slot.cursor[:, None]  # [B, S]
    behind = (at >= slot.cursor[:, None]) & (at < slot.length[:, None])
    laid = jnp.take_along_axis(slot.tokens, jnp.clip(at, 0, slot.tokens.shape[1] - 1), axis=1)
    tokens = jnp.where(behind, laid, state.tokens)
    state = update_rows(state, state.step < 0, dict(tokens=tokens, draft=behind))
    # 2. One pass; count the predicted tokens of the blocks that it commits, and those that the rule has kept.
    step = seeded_step if config.model.config.predicts_block_start else plain_step
    moved, frame = step(config, params, state)
    place = jnp.arange(state.tokens.shape[1])
    new = (place >= state.committed[:, None]) & (place < moved.committed[:, None]) & state.draft
    slot = align(state, moved, jnp.zeros_like(state.done))
    counts = [
        jnp.sum(which, axis=1, dtype=jnp.int32) for which in (new, new & (moved.tokens == state.tokens))
    ]
    slot = slot._replace(proposed=slot.proposed + counts[0], accepted=slot.accepted + counts[1])
    return moved._replace(method=slot), frame


def align(state: State, moved: State, near: Bool[Array, "B"]) -> PredictionSlot:
    """Finds the places at which the rows that a pass has moved go on in their predictions.

    Args:
        near: Rows that look no further than `NEAR` tokens from the expected place.
    """
    slot: PredictionSlot = moved.method
    count = moved.committed - state.committed
    found = (slot.tokens, slot.length, slot.cursor + count, moved.tokens, moved.committed - 1, near)
    cursor, match = jax.vmap(align_row)(*found)
    cursor = jnp.where(
        (match == 0) & (slot.accepted == 0), 0, cursor
    )  # it has not begun: a preamble, or thinking
    new = slot._replace(cursor=jnp.where(count > 0, cursor, slot.cursor))
    return new._replace(aligned=jnp.where(count > 0, match == MATCH, slot.aligned))


def align_row(
    prediction: Int[Array, "P"],
    length: Int[Array, ""],
    expected: Int[Array, ""],
    text: Int[Array, "S"],
    last: Int[Array, ""],
    near: Bool[Array, ""],
) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """Finds the place of a prediction at which a text goes on after its token `last`.

    Args:
        expected: The place if the tokens of the last pass replaced as many of the prediction.

    Returns:
        The place, and how many tokens before it are the last ones of the text, at most `MATCH`. `expected` and 0
        without a match.
    """
    at, back = jnp.arange(len(prediction)), jnp.arange(MATCH)[:, None]
    # same [MATCH, P]: whether the token n before each place of the prediction is the one n before the last of the text;
    # match [P]: how many tokens in a row are.
    same = prediction[jnp.maximum(at - back, 0)] == text[jnp.maximum(last - back, 0)]
    same &= (back <= jnp.minimum(at, last)) & (at < length)
    match = jnp.cumprod(same.astype(jnp.int32), axis=0).sum(0)
    far = jnp.abs(at + 1 - expected)
    match = jnp.where((near | (match == 1)) & (far > NEAR), 0, match)
    # An answer rarely goes back in its prediction: of equal matches, one that lies ahead comes first.
    order = jnp.where(at + 1 >= expected - NEAR, far, far + len(prediction))
    best = jnp.argmax(match * 4 * len(prediction) - jnp.minimum(order, 4 * len(prediction) - 1))
    return jnp.where(match[best] > 0, best + 1, expected).astype(jnp.int32), match[best]
