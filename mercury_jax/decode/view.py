"""What one row sees in a step: its window, the time, and its logits after all processors. No batch axis."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mercury_jax.decode.decode_config import DecodeConfig
from mercury_jax.decode.state import (
    State,
    Window,
    ends_text,
    position_uniforms,
    step_key,
    window_of,
)
from mercury_jax.decode.token_stats import NEVER, forbid, slice_at
from mercury_jax.types import Key, View


class Observation(NamedTuple):
    """What a row sees before its logits are known, and the key of its rule."""

    view: View  # without statistics and logits
    window: Window
    key: Key  # for the rule


def observe(config: DecodeConfig, row: State) -> Observation:
    """Builds what one row sees in this step, but for its logits.

    Args:
        config: Static sizes.
        row: One row of a state.

    Returns:
        The observation; `view.stats`, `view.leave_one_out` and `view.logits` are None.
    """
    corruption, window = config.corruption, window_of(config, row)
    _, noise_key, rule_key = _step_keys(row)
    steps = steps_of(window, row)
    t, s = step_times(config, row.step, steps)
    canvas = slice_at(row.canvas, window.offset, config.window)
    if corruption.mask is None:
        masked, noise = window.editable, corruption.prior(noise_key, jnp.broadcast_to(s, canvas.shape))
    else:  # also for hybrid noise: what is not decided waits as the mask
        masked = window.editable & (canvas == corruption.mask)
        noise = jnp.full_like(canvas, corruption.mask)
    limit = jnp.minimum(row.max_end, row.cache_length + config.width)
    growth = jnp.maximum(limit - row.end, 0) if config.variable_length else jnp.zeros_like(window.used)
    view = row_view(
        config,
        row,
        canvas=canvas,
        answer=slice_at(row.answer, window.offset, config.window),
        editable=window.editable,
        masked=masked,
        used=window.used,
        growth=growth,
        noise=noise.astype(jnp.int32),
        t=t,
        s=s,
        alpha_t=corruption.alpha(t),
        alpha_s=corruption.alpha(s),
        steps=steps,
        position=window.at[0] - row.prompt,
    )
    return Observation(view, window, rule_key)


def _step_keys(row: State) -> tuple[Key, Key, Key]:
    """The keys of a step's draws, noise and rule; they depend on the row, its block and the step alone."""
    draw, noise, rule = jax.random.split(step_key(row.key, row.committed, row.step), 3)
    return draw, noise, rule


def draw_uniforms(
    config: DecodeConfig, row: State, window: Window
) -> tuple[Float[Array, "L"], Float[Array, "L"]]:
    """Draws the randomness of one row's tokens in this step.

    Args:
        config: Static sizes.
        row: One row of a state.
        window: Of the row.

    Returns:
        Uniforms that draw the tokens, or a chunk of the vocabulary, and those that draw within a chunk.
    """
    key = _step_keys(row)[0]
    if (
        config.speculative or config.drafts == "same_seed"
    ):  # a draft is drawn with the uniforms of its verification
        first = position_uniforms(row.key, window.at)
    else:
        first = jax.random.uniform(key, (config.window,))
    return first, jax.random.uniform(jax.random.fold_in(key, 1), (config.window,))


def row_view(config: DecodeConfig, row: State, **fields: Any) -> View:
    """Makes the view of a row in a denoising or a verifying pass.

    Args:
        config: Static sizes.
        row: One row of a state.
        fields: The fields that differ between the two kinds of passes.

    Returns:
        The view; `stats`, `leave_one_out` and `logits` are None, because logits processors run before they exist.
    """
    at = jnp.arange(row.tokens.shape[0])
    none = jnp.zeros((config.model.config.vocab,), jnp.int32)
    count = lambda which: none.at[row.tokens].add(which.astype(jnp.int32))
    return View(
        stats=None,  # type: ignore[arg-type]
        leave_one_out=None,  # type: ignore[arg-type]
        logits=None,  # type: ignore[arg-type]
        step=row.step,
        eos=jnp.where(row.answer_budget > 0, row.sampling.end_thinking, row.sampling.eos),
        output_counts=count((at >= row.prompt) & (at < row.committed)),
        prompt_counts=count(at < row.prompt),
        **fields,
    )


def steps_of(window: Window, row: State) -> Int[Array, ""]:
    """Returns the steps that one row's block may take.

    Args:
        window: Of the row.
        row: One row of a state.

    Returns:
        The steps.
    """
    steps = row.sampling.steps
    return jnp.where(steps > 0, steps, jnp.maximum(window.editable.sum(), 1))


def step_times(
    config: DecodeConfig, step: Int[Array, ""], steps: Int[Array, ""]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Computes the times between which a step leads.

    Args:
        config: Its `times`, if any.
        step: Steps that were taken on the block; -1 where none is open.
        steps: Steps that the block may take.

    Returns:
        The time of the canvas, and the time after the step.
    """
    if config.times is None:
        return jnp.clip(1.0 - step / steps, 0.0, 1.0), jnp.maximum(1.0 - (step + 1) / steps, 0.0)
    times = jnp.asarray(config.times)
    at = jnp.clip(step, 0, len(config.times) - 2)
    return times[at], times[at + 1]


def process_logits(
    config: DecodeConfig,
    row: State,
    view: View,
    at: Int[Array, "L"],
    logits: Float[Array, "L v"],
    first_id: int | Int[Array, ""] = 0,
) -> Float[Array, "L v"]:
    """Applies everything that changes one row's logits.

    Args:
        config: Names the ids that are never emitted.
        row: One row of a state.
        view: Of the row.
        at: Absolute positions of the logits.
        logits: As the model made them, of all ids or of a chunk.
        first_id: The id of the first column.

    Returns:
        The processed logits, all finite.
    """
    # The end of text is forbidden at the first position of an answer that follows a thinking, so that no effort level
    # ends in an empty answer. Rows under a grammar are exempt: it says itself whether an answer may be empty.
    params = row.sampling
    first = (at == row.committed) & (row.committed > row.prompt)
    first &= (row.answer_budget == 0) & (params.end_thinking >= 0)
    first &= row.tokens[jnp.maximum(row.committed - 1, 0)] == params.end_thinking
    if not isinstance(params.constrained, tuple):
        first &= ~params.constrained
    ends = ends_text(config, first_id + jnp.arange(logits.shape[-1]), row)
    logits = jnp.where(first[:, None] & ends, NEVER, logits)
    # Constraints run first too: a truncation must choose among the ids that are allowed. What may not be emitted
    # stays impossible whatever a processor does.
    sampler, never = params.sampler, config.never_emitted
    logits = forbid(logits, never, first_id)
    for processor in (*sampler.allow, *sampler.processors, *sampler.allow):
        view = view._replace(logits=logits, first_id=first_id)
        logits = jnp.maximum(processor(logits, view), NEVER)
    return forbid(logits, never, first_id) if sampler.processors else logits
