"""The view of one row in one step: its window, the time, and its logits after all processors. No batch axis.

`denoise.py` calls `observe` before the forward pass is read, `process_logits` on its logits (or on chunks of them), and
then gives the view with its statistics to the rule.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.decode.sampler import LogitsProcessor
from mercury_jax.decode.state import DecodeConfig, State, position_uniforms, step_key
from mercury_jax.decode.token_stats import NEVER, forbid, slice_at
from mercury_jax.types import Key, View


class Window(NamedTuple):
    """The window of one row, without a batch axis."""

    offset: Int[Array, ""]  # index of its first position within the canvas
    at: Int[Array, "L"]  # absolute positions
    end: Int[Array, ""]  # absolute end of the active block
    used: Int[Array, ""]  # number of positions before `end`
    frozen: Bool[Array, "L"]  # committed or given
    editable: Bool[Array, "L"]  # before `end` and not frozen


def window_offset(config: DecodeConfig, cache_length: Array, committed: Array) -> Array:
    """Computes where the window begins within the canvas, for one row or for B rows.

    Args:
        cache_length: `State.cache_length`, a scalar or [B].
        committed: `State.committed`, with the same shape.
    """
    first = committed - cache_length - config.revisable
    # Active blocks shorter than the model's block (the small blocks of Fast-dLLM v2, arXiv 2509.26328) are aligned to
    # the start of the model's block, even if the prompt ends inside one of them.
    if config.model.config.pattern == "block_causal":
        first = first // config.block * config.block
    return jnp.clip(first, 0, config.width - config.window)


def window_of(config: DecodeConfig, row: State) -> Window:
    """Computes the window of a row: its active block, and the editable positions before it."""
    offset = window_offset(config, row.cache_length, row.committed)
    at = row.cache_length + offset + jnp.arange(config.window, dtype=jnp.int32)
    # The active block ends at the end of the row, at the end of the canvas, or `block` positions after its start,
    # whichever comes first. It starts after the committed tokens, in a block-causal model at its aligned start.
    start = at[0] if config.model.config.pattern == "block_causal" else row.committed
    end = jnp.minimum(jnp.minimum(row.limits.end, row.cache_length + config.width), start + config.block)
    frozen = slice_at(row.frozen, offset, config.window)
    return Window(offset, at, end, jnp.clip(end - at[0], 0, config.window), frozen, ~frozen & (at < end))


def ends_text(config: DecodeConfig, tokens: Int[Array, "*s"], row: State) -> Bool[Array, "*s"]:
    """Returns which tokens end an answer: the row's `eos` and the other end ids of the model."""
    eos = row.sampling.eos
    ends = tokens == eos
    for other in config.model.config.ends:
        ends |= tokens == other
    return ends & (eos >= 0)


def ends_section(config: DecodeConfig, tokens: Int[Array, "*s"], row: State) -> Bool[Array, "*s"]:
    """Returns which tokens end the text or, while the row thinks, its thinking."""
    return ends_text(config, tokens, row) | (row.limits.answer_budget > 0) & (
        tokens == row.sampling.end_thinking
    )


class Observation(NamedTuple):
    """The view of a row before its logits are known, its window, and the key of its rule."""

    view: View  # without statistics and logits
    window: Window
    key: Key  # for the rule


def observe(config: DecodeConfig, row: State) -> Observation:
    """Builds the view of one row in this step, without its logits."""
    corruption, window = config.corruption, window_of(config, row)
    _, noise_key, rule_key = _step_keys(row)
    steps = steps_of(window, row)
    t, s = step_times(config, row.step, steps)
    canvas = slice_at(row.canvas, window.offset, config.window)
    if corruption.mask is None:
        masked, noise = window.editable, corruption.prior(noise_key, jnp.broadcast_to(s, canvas.shape))
    else:  # also for hybrid noise: open positions hold the mask
        masked = window.editable & (canvas == corruption.mask)
        noise = jnp.full_like(canvas, corruption.mask)
    # A rule of variable length may lengthen the row up to its `max_end`, and within the width of the canvas.
    limit = jnp.minimum(row.limits.max_end, row.cache_length + config.width)
    growth = jnp.maximum(limit - row.limits.end, 0) if config.variable_length else jnp.zeros_like(window.used)
    view = row_view(
        config, row, canvas=canvas, answer=slice_at(row.answer, window.offset, config.window),
        editable=window.editable, masked=masked, used=window.used, growth=growth, noise=noise.astype(jnp.int32),
        t=t, s=s, alpha_t=corruption.alpha(t), alpha_s=corruption.alpha(s), steps=steps,
        position=window.at[0] - row.prompt,
    )  # fmt: skip
    return Observation(view, window, rule_key)


def _step_keys(row: State) -> tuple[Key, Key, Key]:
    """Derives the keys for the token draws, the noise and the rule of a step.

    They depend only on the row's key, the start of its block and the step, never on the batch: in the same program a
    row generates the same tokens, bit for bit, whichever rows share its passes. Across programs this holds in fp64.
    """
    draw, noise, rule = jax.random.split(step_key(row.key, row.committed, row.step), 3)
    return draw, noise, rule


def draw_uniforms(
    config: DecodeConfig, row: State, window: Window
) -> tuple[Float[Array, "L"], Float[Array, "L"]]:
    """Draws the uniform numbers from which one row's tokens are sampled in this step.

    Returns:
        Two arrays [L] in [0, 1). The first selects the token, or the chunk of the vocabulary when statistics are
        computed in chunks; the second then selects the token within the chunk.
    """
    key = _step_keys(row)[0]
    if config.method.position_draws:
        first = position_uniforms(row.key, window.at)
    else:
        first = jax.random.uniform(key, (config.window,))
    return first, jax.random.uniform(jax.random.fold_in(key, 1), (config.window,))


def row_view(config: DecodeConfig, row: State, **fields: Any) -> View:
    """Makes the view of a row in a denoising or a verifying pass.

    Args:
        fields: The fields that differ between the two kinds of passes.
    """
    # Histograms [V] over the row's tokens [S], for the repetition, presence and frequency penalties.
    at = jnp.arange(row.tokens.shape[0])
    none = jnp.zeros((config.model.config.vocab,), jnp.int32)
    count = lambda which: none.at[row.tokens].add(which.astype(jnp.int32))
    return View(
        stats=None,  # type: ignore[arg-type]
        leave_one_out=None,  # type: ignore[arg-type]
        logits=None,  # type: ignore[arg-type]
        step=row.step,
        eos=jnp.where(row.limits.answer_budget > 0, row.sampling.end_thinking, row.sampling.eos),
        output_counts=count((at >= row.prompt) & (at < row.committed)),
        prompt_counts=count(at < row.prompt),
        **fields,
    )


def steps_of(window: Window, row: State) -> Int[Array, ""]:
    """Returns how many denoising steps the block of one row may take."""
    steps = row.sampling.steps
    return jnp.where(steps > 0, steps, jnp.maximum(window.editable.sum(), 1))


def step_times(
    config: DecodeConfig, step: Int[Array, ""], steps: Int[Array, ""]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Computes the times before and after a step."""
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
) -> tuple[Float[Array, "L v"], Float[Array, "L v"]]:
    """Applies forbidden ids, constraints and logits processors to the logits of one row.

    Returns:
        The logits that the statistics are computed from, and those that tokens are drawn from: the same array unless a
        processor has `draws_only`. All are finite: a forbidden id has the logit `NEVER`.
    """
    # Forbid the end of text at the first position after the thinking section, so that no effort level gives an empty
    # answer. Rows under a grammar are exempt: the grammar says whether the answer may be empty.
    params = row.sampling
    first = (at == row.committed) & (row.committed > row.prompt)
    first &= (row.limits.answer_budget == 0) & (params.end_thinking >= 0)
    first &= row.tokens[jnp.maximum(row.committed - 1, 0)] == params.end_thinking
    if not isinstance(params.constrained, tuple):
        first &= ~params.constrained
    ends = ends_text(config, first_id + jnp.arange(logits.shape[-1]), row)
    logits = jnp.where(first[:, None] & ends, NEVER, logits)
    # Constraints (`allow`) run twice: before the processors, so that top-k and top-p choose among the allowed ids, and
    # after them, so that no processor can make a forbidden id possible again.
    sampler, never = params.sampler, config.never_emitted
    logits = drawn = forbid(logits, never, first_id)

    def apply(part: LogitsProcessor, logits: Float[Array, "L v"]) -> Float[Array, "L v"]:
        return jnp.maximum(part(logits, view._replace(logits=logits, first_id=first_id)), NEVER)

    for part in (*sampler.allow, *sampler.processors, *sampler.allow):
        new = apply(part, drawn)
        if not part.draws_only:
            logits = new if logits is drawn else apply(part, logits)
        drawn = new
    if not sampler.processors:
        return logits, drawn
    return forbid(logits, never, first_id), forbid(drawn, never, first_id)
