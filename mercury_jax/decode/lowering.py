"""The programs of a call, lowered from shapes alone, to compile them ahead of time or to inspect them.

Nothing is computed; `lm.params` may be `jax.ShapeDtypeStruct`s with shardings.
"""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh

from mercury_jax import sharding
from mercury_jax.config import Plan, at_least, refuse
from mercury_jax.decode.defaults import choose_sampler
from mercury_jax.decode.inputs import Prompt
from mercury_jax.decode.request import Request, configure, row_mesh, rows_of
from mercury_jax.decode.session import Session, prefill_program, run_program, run_sharded_program
from mercury_jax.decode.state import first_state, prefill_width
from mercury_jax.types import LM


def abstract_session(
    lm: LM, rows: int, context: int, answer: int | None = None, mesh: Mesh | None = None
) -> tuple[Session, int | None]:
    """Makes the session of a call with `jax.ShapeDtypeStruct`s instead of arrays.

    Returns:
        The session, and the tokens per prefill pass; None if prompts are so short that `step` encodes them.
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
    # `eval_shape` drops shardings, and the lowered program needs the sharding of the cache
    if on is not None:
        place = lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
        shardings = sharding.cache_shardings(state.cache, on)
        state = state._replace(cache=jax.tree.map(place, state.cache, shardings))
    session = Session(decode_config, state, rows, row_mesh(lm, mesh))
    width = prefill_width(decode_config, padded.tokens.shape[1])
    return session, None if int(np.max(padded.committed)) <= decode_config.own_prefill else width


def lower_run(lm: LM, session: Session, passes: int | None = None) -> jax.stages.Lowered:
    """Lowers the decoding loop for the devices in the shardings of the parameters."""
    varying = lm.params, session.state, passes
    if session.mesh is None:
        return run_program.lower(session.config, *varying)
    return run_sharded_program.lower(session.config, session.mesh, *varying)


def lower_prefill(lm: LM, session: Session, width: int) -> jax.stages.Lowered:
    """Lowers the prefill loop of long prompts for the devices in the shardings of the parameters."""
    return prefill_program.lower(session.config, lm.params, session.state, width)
