"""The shapes that the slots come in."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mercury_jax.decode.program import bucket, slots_for
from mercury_jax.decode.state import Program, State
from mercury_jax.serve.engine import device, knobs
from mercury_jax.serve.engine.types import Job, Settings
from mercury_jax.sharding import along, apart, caches, over
from mercury_jax.types import LM

FIRST = 256  # positions of the smallest slot; each next size has twice as many
WIDE = 256  # tokens of an encoding pass over a long prompt; whole blocks, for models whose blocks are powers of two


class Shape(NamedTuple):
    """How many rows decode together, how many positions each has, and what its sampler can do."""

    rows: int
    slots: int
    level: int


class Plan(NamedTuple):
    """What is fixed for an engine: its model, rules, and sizes."""

    lm: LM
    menu: knobs.Menu
    settings: Settings
    block: int  # positions of the active block
    context: int
    rows: tuple[int, ...]
    slots: tuple[int, ...]


def plan(lm: LM, settings: Settings) -> Plan:
    """Row counts in steps of four, positions in steps of two, the largest ones always among them."""
    config, menu = lm.model.config, knobs.menu(lm, settings.rules)
    context = min(settings.context or config.context, config.context)
    block = settings.block or config.block
    if menu.own.verify is not None:
        block = min(block, menu.own.verify + 1)
    lm = dataclasses.replace(lm, model=over(lm.model, apart(lm.params)))
    bare = Plan(lm, menu, settings, block, context, (settings.slots,), ())
    most = positions(bare, context)
    few = settings.programs == "one"
    rows = {settings.slots} | ({4**i for i in range(8) if 4**i < settings.slots} if not few else set())
    slots = {most} | ({FIRST << i for i in range(20) if (FIRST << i) < most} if not few else set())
    return bare._replace(rows=tuple(sorted(rows)), slots=tuple(sorted(slots)))


def positions(plan: Plan, tokens: int) -> int:
    """Positions of a slot that holds so many tokens: one canvas more, which is written behind them."""
    blind = any(part.blind for part in plan.menu.rules)
    if plan.lm.model.config.pattern == "bidirectional":
        return bucket(tokens) * (2 if blind else 1)
    return slots_for(tokens, width_of(plan, tokens) * (2 if blind else 1), plan.context)


def width_of(plan: Plan, slots: int) -> int:
    """Positions of a canvas."""
    config = plan.lm.model.config
    if config.pattern == "bidirectional":
        return slots // (2 if any(part.blind for part in plan.menu.rules) else 1)
    return config.block if config.pattern == "block_causal" and plan.menu.own.verify is None else plan.block


def program(plan: Plan, slots: int, level: int) -> Program:
    """The program of a shape; the number of rows is not part of it."""
    width = width_of(plan, slots)
    return Program(
        plan.lm.model,
        plan.lm.corruption,
        width=width,
        block=min(plan.block, width),
        blind=any(part.blind for part in plan.menu.rules),
        verify=plan.menu.own.verify is not None,
        logprobs=plan.settings.alternatives if level > knobs.PLAIN else None,
    )


def idle(plan: Plan, shape: Shape) -> State:
    """A state in which nothing runs. Log-probabilities have their room at every level."""
    one = row(plan, shape.slots, Job(prompt=(0,), max_tokens=1), 0)
    return device.move(one, np.full(shape.rows, -1, np.int32), shape.slots, width_of(plan, shape.slots))


def row(plan: Plan, slots: int, job: Job, length: int) -> State:
    """A state of one row for a job; `length` keys are about to be laid into it."""
    text = np.zeros((1, slots), np.int32)
    text[0, : len(job.prompt)] = job.prompt
    first = len(job.prompt) + (job.thinking or job.max_tokens)
    reserve = job.max_tokens if job.thinking else 0
    numbers = (len(job.prompt), first, first, reserve, job.seed % 2**31, length)
    full = program(plan, slots, knobs.CUT)
    one = knobs.stack(1, knobs.row(plan.menu, job, knobs.PLAIN, plan.lm, plan.block))
    return device.start(full, one, text, np.asarray(numbers, np.int32))


def tokens_of(job: Job) -> int:
    """The most tokens that a job's row may come to hold."""
    return len(job.prompt) + job.max_tokens + (job.thinking + 1 if job.thinking else 0)


def mesh_of(params: Any) -> Mesh | None:
    """The mesh that a model was loaded on; None for a single device."""
    for leaf in jax.tree.leaves(params):
        on = getattr(leaf, "sharding", None)
        if isinstance(on, NamedSharding) and on.mesh.size > 1:
            return on.mesh  # type: ignore[return-value]
    return None


def placed(plan: Plan, state: Any) -> Any:
    """Where each array of a state lies: rows over `data`, the heads of keys and values over `tensor`."""
    mesh = mesh_of(plan.lm.params)
    if mesh is None:
        return None

    def one(leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(along(("data",), leaf.shape[0], mesh) or None))

    return jax.tree.map(one, state)._replace(cache=caches(state.cache, mesh))


def seated(plan: Plan, state: State) -> State:
    """The state laid onto the model's mesh; as it is on a single device."""
    where = placed(plan, state)
    return state if where is None else jax.device_put(state, where)
