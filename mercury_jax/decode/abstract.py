"""The programs that sample() runs, lowered from shapes alone: for compiling ahead of time, and for inspection.

Nothing is computed and no parameters are needed; `lm.params` may be `jax.ShapeDtypeStruct`s with shardings.
"""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh

from mercury_jax import sharding
from mercury_jax.config import Plan, at_least, refuse
from mercury_jax.decode.decoder import Session, prefill_program, run_program, run_sharded_program
from mercury_jax.decode.defaults import choose_sampler
from mercury_jax.decode.inputs import Prompt
from mercury_jax.decode.request import Request, configure, prefill_width, row_mesh, rows_of
from mercury_jax.decode.state import first_state
from mercury_jax.types import LM


def abstract_session(
    lm: LM, rows: int, context: int, answer: int | None = None, mesh: Mesh | None = None
) -> tuple[Session, int | None]:
    """Makes the session of a call as shapes.

    Args:
        lm: The model, decoded by its own sampler and plan.
        rows: Prompts of the call.
        context: Tokens of a row, prompt and answer together.
        answer: Tokens of the answer among them; None: one block.
        mesh: As of `sample`.

    Returns:
        A session whose state consists of shapes, and the tokens of one pass over its long prompts (None where the
        decoder's own steps encode them).

    Raises:
        ValueError: The sizes do not fit the model's context.
    """
    config = lm.model.config
    answer = min(config.block, context - 1) if answer is None else answer
    at_least(1, rows=rows, answer=answer)
    if not answer < context <= config.context:
        raise refuse("context", context, f"{answer + 1}..{config.context}: the model's context")
    prompts = [Prompt([config.pad] * (context - answer), False)] * rows
    sampler, plan = choose_sampler(lm, None, Plan(), None)
    request = Request(sampler=sampler, plan=plan, mesh=mesh, rows=rows_of(prompts, answer, 0))
    decode_config, sampling, padded = configure(lm, request)
    state = jax.eval_shape(lambda: first_state(decode_config, sampling, padded))
    on = sharding.model_parallel_mesh(lm.params)
    if on is not None:  # a shape alone does not say where its array lies
        place = lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
        shardings = sharding.cache_shardings(state.cache, on)
        state = state._replace(cache=jax.tree.map(place, state.cache, shardings))
    shapes = jax.eval_shape(lambda: sampling)
    session = Session(decode_config, shapes, state, rows, row_mesh(lm, mesh))
    return session, prefill_width(decode_config, int(np.max(padded.committed)))


def lower_run(lm: LM, session: Session, passes: int | None = None) -> jax.stages.Lowered:
    """Lowers the loop of passes for the devices that the parameters' shardings name.

    Args:
        lm: Its parameters may be shapes.
        session: From `abstract_session`, or a real one.
        passes: Most passes; None: until every row is done.

    Returns:
        The lowered program.
    """
    varying = lm.params, session.state, session.sampling, passes
    if session.mesh is None:
        return run_program.lower(session.config, *varying)
    return run_sharded_program.lower(session.config, session.mesh, *varying)


def lower_prefill(lm: LM, session: Session, width: int) -> jax.stages.Lowered:
    """Lowers the loop over a long prompt, for the same devices.

    Args:
        lm: Its parameters may be shapes.
        session: From `abstract_session`, or a real one.
        width: Tokens per pass.

    Returns:
        The lowered program.
    """
    return prefill_program.lower(session.config, lm.params, session.state, width)
