"""The programs that sample() runs, lowered from shapes alone: for compiling ahead, and for looking at them."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from mercury_jax import sharding
from mercury_jax.config import Plan, at_least, refuse
from mercury_jax.decode import defaults, launch
from mercury_jax.decode.ask import request
from mercury_jax.decode.prompts import Prompt
from mercury_jax.decode.state import begin
from mercury_jax.types import LM


def outline(
    lm: LM, rows: int, context: int, answer: int | None = None, mesh: Mesh | None = None
) -> tuple[launch.Job, int | None]:
    """(the job of `rows` prompts, as shapes; tokens of its wide encode pass, or None where the steps encode).

    A row is `context` tokens long, the last `answer` of them (None: one block) its answer, decoded as the model
    asks by default. `lm.params` may be shapes too: nothing is computed. mesh: as of `sample`.
    """
    config = lm.model.config
    answer = min(config.block, context - 1) if answer is None else answer
    at_least(1, rows=rows, answer=answer)
    if not answer < context <= config.context:
        raise refuse("context", context, f"{answer + 1}..{config.context}: the model's context")
    prompts = [Prompt([config.pad] * (context - answer), False)] * rows
    wanted = request(prompts, answer, 0)
    program, knobs, padded = launch.arranged(
        lm, wanted, defaults.sampler(lm), defaults.plan(lm, Plan()), mesh=mesh
    )
    state = jax.eval_shape(lambda: begin(program, knobs, **padded))
    on = sharding.model_parallel_mesh(lm.params)
    if on is not None:  # a shape alone does not say where its array lies
        lay = lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
        state = state._replace(
            cache=jax.tree.map(lay, state.cache, sharding.cache_shardings(state.cache, on))
        )
    job = launch.Job(program, jax.eval_shape(lambda: knobs), state, rows, launch.by_rows(lm, mesh))
    return job, launch.prefill_width(program, int(np.max(wanted.known)))


def lower_run(lm: LM, job: launch.Job, passes: int | None = None) -> Any:
    """The loop of denoising steps, lowered for the devices that the parameters' shardings name."""
    if job.mesh is None:
        return launch._run.lower(job.program, lm.params, job.state, job.knobs, passes)
    return launch._run_sharded.lower(job.program, job.mesh, lm.params, job.state, job.knobs, passes)


def lower_prefill(lm: LM, job: launch.Job, wide: int) -> Any:
    """The loop of wide encode passes, likewise."""
    return launch._prefill.lower(job.program, lm.params, job.state, wide)
