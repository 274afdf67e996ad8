"""Traces one row's denoising step with a sampler before its program is compiled, to name what its parts do wrong.

A user's own rule, processor or stopping criterion is first called where a program is traced, which is after long
prompts were encoded and, for a stream, at its first frame. `check_sampler` calls them before, on shapes alone and
without the model.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from mercury_jax.decode import pieces
from mercury_jax.decode.read import read
from mercury_jax.decode.row import decide
from mercury_jax.decode.sight import look, shaped
from mercury_jax.decode.state import Knobs, Program, begin
from mercury_jax.types import wide


def check_sampler(program: Program, knobs: Knobs) -> None:
    """Traces the sampler's parts as a step of the program calls them, on shapes; nothing is computed.

    Takes as long as tracing the parts, once for each program and sampler; parameters of other values are no other
    sampler. A sampler whose parts are all of this package, where tests call each, is not traced.

    Args:
        program: Its canvas, block and vocabulary give the shapes.
        knobs: Every leaf has the batch axis first.

    Raises:
        ValueError: A part fails or returns something else than its kind must, with what is allowed.
    """
    sampler = knobs.sampler
    assert sampler.stop is not None
    if all(_ours(part.step) for part in (sampler.rule, sampler.stop, *sampler.shape, *sampler.allow)):
        return
    leaves, tree = jax.tree.flatten(knobs)
    _traced(program, tree, tuple((x.shape[1:], jnp.result_type(x)) for x in leaves))


def _ours(step: Any) -> bool:
    steps = getattr(step, "steps", (step,))  # those of `rules.one_of`
    return all(getattr(one, "__module__", "").startswith("mercury_jax.") for one in steps)


@functools.lru_cache(maxsize=512)
def _traced(program: Program, tree: Any, leaves: tuple[tuple[Any, Any], ...]) -> None:
    shapes = tree.unflatten([jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in leaves])
    jax.eval_shape(functools.partial(_step, program), shapes)


def _step(program: Program, knobs: Knobs) -> Any:
    """`machine._denoise` of one row without the model: zeros in place of its logits."""
    zero, blank = jnp.zeros((1,), jnp.int32), jnp.zeros((1, program.width), jnp.int32)
    none = jnp.zeros(blank.shape, bool)
    state = begin(
        program, jax.tree.map(lambda x: x[None], knobs), blank, none, none, known=zero, total=zero + 1, most=zero + 1,
        reserve=zero, prompt=zero, seeds=zero,
    )  # fmt: skip
    row = jax.tree.map(lambda x: x[0], state._replace(cache=(), carry=()))
    config = program.model.config
    raw = jnp.zeros((program.window, config.vocab), wide(jnp.dtype(config.dtype)))
    sight = look(program, row, knobs)
    logits = shaped(program, row, sight, raw, knobs)
    reading = read(logits, sight.view.canvas, logits.argmax(-1).astype(jnp.int32), sight.view.eos)
    if not pieces.applies(program, knobs.sampler):
        sight = sight._replace(view=sight.view._replace(logits=logits))
    return decide(program, row, sight, reading, raw, raw if program.blind else None, knobs)
