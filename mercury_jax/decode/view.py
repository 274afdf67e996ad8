"""What one row sees in a step: its window, the time, and its logits after all processors. No batch axis."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mercury_jax.decode.sampler import Logits, Sampler
from mercury_jax.decode.state import (
    DecodeConfig,
    SamplingParams,
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
    """What a row sees before its logits are known, and the randomness of this step."""

    view: View  # without statistics and logits
    window: Window
    uniforms: Float[Array, "L"]  # draw the tokens
    chunk_uniforms: Float[Array, "L"]  # draw within a chunk of the vocabulary
    key: Key  # for the rule


def observe(config: DecodeConfig, row: State, params: SamplingParams) -> Observation:
    """Builds what one row sees in this step, but for its logits.

    Args:
        config: Static sizes.
        row: One row of a state.
        params: Of the row.

    Returns:
        The observation; `view.stats`, `view.leave_one_out` and `view.logits` are None.
    """
    corruption, window = config.corruption, window_of(config, row)
    draw_key, noise_key, rule_key = jax.random.split(step_key(row.key, row.committed, row.step), 3)
    if config.speculative:  # a draft is drawn with the uniforms of its verification
        uniforms = position_uniforms(row.key, window.at)
    else:
        uniforms = jax.random.uniform(draw_key, (config.window,))
    chunk_uniforms = jax.random.uniform(jax.random.fold_in(draw_key, 1), (config.window,))
    steps = steps_of(window, params)
    t = time_of(row.step, steps)
    s = jnp.maximum(time_of(row.step + 1, steps), 0.0)
    canvas = slice_at(row.canvas, window.offset, config.window)
    if corruption.mask is None:
        masked, noise = window.editable, corruption.prior(noise_key, jnp.broadcast_to(s, canvas.shape))
    else:  # also for hybrid noise: what is not decided waits as the mask
        masked = window.editable & (canvas == corruption.mask)
        noise = jnp.full_like(canvas, corruption.mask)
    output_counts, prompt_counts = token_counts(row, config.model.config.vocab)
    limit = jnp.minimum(row.max_end, row.cache_length + config.width)
    growth = jnp.maximum(limit - row.end, 0) if config.variable_length else jnp.zeros_like(window.used)
    view = View(
        canvas=canvas,
        answer=slice_at(row.answer, window.offset, config.window),
        stats=None,  # type: ignore[arg-type]  # logits processors run before it exists
        leave_one_out=None,  # type: ignore[arg-type]
        logits=None,  # type: ignore[arg-type]
        editable=window.editable,
        masked=masked,
        used=window.used,
        growth=growth,
        noise=noise.astype(jnp.int32),
        t=t,
        s=s,
        alpha_t=corruption.alpha(t),
        alpha_s=corruption.alpha(s),
        step=row.step,
        steps=steps,
        eos=jnp.where(row.answer_budget > 0, params.end_thinking, params.eos),
        position=window.at[0] - row.prompt,
        output_counts=output_counts,
        prompt_counts=prompt_counts,
    )
    return Observation(view, window, uniforms, chunk_uniforms, rule_key)


def steps_of(window: Window, params: SamplingParams) -> Int[Array, ""]:
    """Returns the steps that one row's block may take.

    Args:
        window: Of the row.
        params: Of the row.

    Returns:
        The steps.
    """
    return jnp.where(params.steps > 0, params.steps, jnp.maximum(window.editable.sum(), 1))


def time_of(step: Int[Array, ""], steps: Int[Array, ""]) -> Float[Array, ""]:
    """Returns the time of a canvas after some steps, 1 = noise.

    Args:
        step: Steps that were taken.
        steps: Steps that the block may take.

    Returns:
        The time.
    """
    return 1.0 - step / steps


def token_counts(row: State, vocab: int) -> tuple[Int[Array, "V"], Int[Array, "V"]]:
    """Counts how often each id occurs in the answer before the window, and in the prompt.

    Args:
        row: One row of a state.
        vocab: V.

    Returns:
        Both counts.
    """
    at = jnp.arange(row.tokens.shape[0])
    count = lambda which: jnp.zeros((vocab,), jnp.int32).at[row.tokens].add(which.astype(jnp.int32))
    return count((at >= row.prompt) & (at < row.committed)), count(at < row.prompt)


def process_row(
    config: DecodeConfig,
    row: State,
    seen: Observation,
    logits: Float[Array, "L v"],
    params: SamplingParams,
    first_id: int | Int[Array, ""] = 0,
) -> Float[Array, "L v"]:
    """Applies everything that changes one row's logits.

    Args:
        config: Static sizes.
        row: One row of a state.
        seen: Of the row.
        logits: As the model made them, of all ids or of a chunk.
        params: Of the row.
        first_id: The id of the first column.

    Returns:
        The processed logits.
    """
    logits = forbid_empty_answer(config, row, logits, seen.window.at, params, first_id)
    return process_logits(config, params.sampler, seen.view._replace(logits=logits, first_id=first_id))


def forbid_empty_answer(
    config: DecodeConfig,
    row: State,
    logits: Float[Array, "L v"],
    at: Int[Array, "L"],
    params: SamplingParams,
    first_id: int | Int[Array, ""] = 0,
) -> Float[Array, "L v"]:
    """Forbids the end of text at the first position of an answer that follows a thinking.

    So no effort level ends in an empty answer. Rows under a grammar are exempt: it says itself whether an answer may
    be empty.

    Args:
        config: Static sizes.
        row: One row of a state.
        logits: Of the positions `at`.
        at: Absolute positions.
        params: Of the row.
        first_id: The id of the first column.

    Returns:
        The logits.
    """
    first = (at == row.committed) & (row.committed > row.prompt)
    first &= (row.answer_budget == 0) & (params.end_thinking >= 0)
    first &= row.tokens[jnp.maximum(row.committed - 1, 0)] == params.end_thinking
    if not isinstance(params.constrained, tuple):
        first &= ~params.constrained
    ends = ends_text(config, first_id + jnp.arange(logits.shape[-1]), params)
    return jnp.where(first[:, None] & ends, NEVER, logits)


def process_logits(config: DecodeConfig, sampler: Sampler, view: View) -> Logits:
    """Runs the sampler's processors; what may not be emitted stays impossible, and all logits stay finite.

    Args:
        config: Names the ids that are never emitted.
        sampler: Of one row.
        view: With the logits to process.

    Returns:
        The processed logits.
    """
    never = config.never_emitted
    view = view._replace(logits=forbid(view.logits, never, view.first_id))
    # Constraints run first too: a truncation must choose among the ids that are allowed.
    for processor in (*sampler.allow, *sampler.processors, *sampler.allow):
        view = view._replace(logits=jnp.maximum(processor(view.logits, view), NEVER))
    return forbid(view.logits, never, view.first_id) if sampler.processors else view.logits
