"""What one row sees before its tokens are drawn: its window, the time, how its logits are shaped. No batch axis."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mercury_jax.decode.parts import Sampler
from mercury_jax.decode.read import NEVER, forbid
from mercury_jax.decode.returned import called, logits_of
from mercury_jax.decode.state import Knobs, Program, State, row_key, uniforms_at
from mercury_jax.decode.window import Window, cut, window_of
from mercury_jax.types import Key, View


class Sight(NamedTuple):
    """What a row sees before its tokens are drawn."""

    view: View  # no readings and no logits yet
    window: Window
    uniforms: Float[Array, "L"]  # to draw with
    inside: Float[Array, "L"]  # to draw with inside of a piece of the vocabulary
    key: Key  # for the rule


def look(program: Program, row: State, knobs: Knobs) -> Sight:
    """What one row sees but its logits."""
    window = window_of(program, row)
    steps = steps_of(window, knobs)
    draw_key, noise_key, rule_key = jax.random.split(row_key(row.key, row.known, row.step), 3)
    view = _view(program, row, window, steps, knobs, noise_key)
    if program.verify:  # a draft is drawn with the uniforms of its check
        uniforms = uniforms_at(row.key, window.at)
    else:
        uniforms = jax.random.uniform(draw_key, (program.window,))
    inside = jax.random.uniform(jax.random.fold_in(draw_key, 1), (program.window,))
    return Sight(view, window, uniforms, inside, rule_key)


def shaped(
    program: Program, row: State, sight: Sight, logits: Float[Array, "L V"], knobs: Knobs, first: Any = 0
) -> Float[Array, "L V"]:
    """One row's logits after all that applies to them, of the ids from `first` on."""
    begun = begins(program, row, logits, sight.window.at, knobs, first)
    return shape(program, knobs.sampler, sight.view._replace(logits=begun, first=first))


def steps_of(window: Window, knobs: Knobs) -> Int[Array, ""]:
    """Steps that one row's block may take."""
    return jnp.where(knobs.steps > 0, knobs.steps, jnp.maximum(window.editable.sum(), 1))


def time_of(step: Int[Array, ""], steps: Int[Array, ""]) -> Float[Array, ""]:
    """The time of a canvas after so many steps, 1 = noise."""
    return 1.0 - step / steps


def begins(
    program: Program,
    row: State,
    logits: Float[Array, "L V"],
    at: Int[Array, "L"],
    knobs: Knobs,
    start: Any = 0,
) -> Array:
    """The logits, where an answer that follows a thinking does not begin with its end: no effort ends in nothing.

    A grammar knows itself whether an answer may be empty. start: the id of the first column.
    """
    first = (at == row.known) & (row.known > row.prompt) & (row.reserve == 0) & (knobs.close >= 0)
    first &= row.text[jnp.maximum(row.known - 1, 0)] == knobs.close
    if not isinstance(knobs.gated, tuple):
        first &= ~knobs.gated
    ends = ends_text(program, start + jnp.arange(logits.shape[-1]), knobs)
    return jnp.where(first[:, None] & ends, NEVER, logits)


def shape(program: Program, sampler: Sampler, view: View) -> Float[Array, "L V"]:
    """The logits after every shaper; what may not be emitted stays impossible, and all stay finite."""
    never = (*program.corruption.forbidden, *program.forbidden)
    view = view._replace(logits=forbid(view.logits, never, view.first))
    # Constraints first too: a truncation must choose among what is allowed.
    for part in (*sampler.allow, *sampler.shape, *sampler.allow):
        logits = logits_of(part, called(part, part, view.logits, view), view.logits)
        view = view._replace(logits=jnp.maximum(logits, NEVER))
    return forbid(view.logits, never, view.first) if sampler.shape else view.logits


def counts(row: State, vocab: int) -> tuple[Int[Array, "V"], Int[Array, "V"]]:
    """(how often each id stands in the answer before the window, in the prompt)."""
    at = jnp.arange(row.text.shape[0])
    tally = lambda which: jnp.zeros((vocab,), jnp.int32).at[row.text].add(which.astype(jnp.int32))
    return tally((at >= row.prompt) & (at < row.known)), tally(at < row.prompt)


def _view(program: Program, row: State, window: Window, steps: Array, knobs: Knobs, key: Key) -> View:
    c = program.corruption
    t = time_of(row.step, steps)
    s = jnp.maximum(time_of(row.step + 1, steps), 0.0)
    canvas = cut(row.canvas, window.offset, program.window)
    if c.mask is None:
        masked, noise = window.editable, c.prior(key, jnp.broadcast_to(s, canvas.shape))
    else:
        # Also for hybrid noise: what is not yet settled waits as the mask.
        masked, noise = window.editable & (canvas == c.mask), jnp.full_like(canvas, c.mask)
    said, told = counts(row, program.model.config.vocab)
    most = jnp.minimum(row.most, row.length + program.width)
    return View(
        canvas=canvas,
        answer=cut(row.answer, window.offset, program.window),
        reading=None,  # type: ignore[arg-type]  # shapers run before it exists
        blind=None,  # type: ignore[arg-type]
        logits=None,  # type: ignore[arg-type]
        editable=window.editable,
        masked=masked,
        n=window.n,
        room=jnp.maximum(most - row.total, 0) if program.grows else jnp.zeros_like(window.n),
        noise=noise.astype(jnp.int32),
        t=t,
        s=s,
        keep_t=c.alpha(t),
        keep_s=c.alpha(s),
        step=row.step,
        steps=steps,
        eos=jnp.where(row.reserve > 0, knobs.close, knobs.eos),
        at=window.at[0] - row.prompt,
        said=said,
        told=told,
    )


def ends_text(program: Program, tokens: Array, knobs: Knobs) -> Array:
    """Whether each token ends an answer: the id that knobs name, or, of those a model has beside it, any."""
    ends = tokens == knobs.eos
    for other in program.model.config.ends:
        ends |= tokens == other
    return ends & (knobs.eos >= 0)
