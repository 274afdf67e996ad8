"""What an engine's slots take on each device, and the slots and context that a device has room for.

Everything is read from abstract values (`jax.eval_shape`), so nothing is allocated. `Engine` calls `check` before it
compiles; `mercury serve` calls `fitted` first, where the user named no number of slots or no context.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mercury_jax.config import refuse
from mercury_jax.hub.params import free_memory
from mercury_jax.serve.engine import knobs, shapes
from mercury_jax.serve.engine.types import Settings
from mercury_jax.types import LM

SHARE = 0.9  # of what is free: the rest is the allocator's and the compiled programs'
COPIES = 3  # of the logits of a pass: raw, shaped, as probabilities
HIDDEN = (
    8  # arrays of the size of the hidden states that a layer makes: normalised, queries, values, gates, ...
)
FLOORS = (
    32_768,
    8_192,
    2_048,
    256,
)  # contexts below which rather slots are given up, one floor after the other


class Need(NamedTuple):
    """Bytes on each device."""

    cache: int  # keys and values of all slots, of the shape before a move included
    rest: int  # the slots' other arrays, and the prefix cache
    passes: int  # what a pass of the model makes and drops: hidden states and logits
    weights: int  # loaded already, so no part of `total`

    @property
    def total(self) -> int:
        """Bytes beside the weights."""
        return self.cache + self.rest + self.passes


def need(lm: LM, settings: Settings) -> Need:
    """What an engine with these settings takes on each device that the model lies on."""
    plan = shapes.plan(lm, settings)
    largest = shapes.Shape(plan.rows[-1], plan.slots[-1], knobs.CUT)
    state = jax.eval_shape(lambda: shapes.idle(plan, largest))
    where = shapes.placed(plan, state)
    cache = _bytes(state.cache, None if where is None else where.cache)
    rest = _bytes(state._replace(cache=()), None if where is None else where._replace(cache=()))
    # While the slots move to another shape both states are there; the next smaller one is the largest beside.
    areas = sorted(rows * slots for rows in plan.rows for slots in plan.slots)
    both = 1 + (areas[-2] / areas[-1] if len(areas) > 1 else 0)
    return Need(
        int(cache * both),
        int(rest * both) + settings.prefix_bytes,
        _passes(plan, largest),
        _bytes(lm.params),
    )


def fitted(lm: LM, settings: Settings, slots: bool, context: bool) -> Settings:
    """The settings with as many slots and as long a context as the device has room for.

    A long context is halved before slots are given up, down to FLOORS.

    Args:
        lm: The model; its parameters lie where they will.
        settings: `memory` says how many bytes there are (None: what is free on the model's devices).
        slots: Whether their number may be reduced.
        context: Whether it may be reduced.

    Raises:
        ValueError: With the numbers, where nothing fits.
    """
    have = free(lm, settings)
    if have is None:
        return settings
    for rows, tokens in _candidates(lm, settings, slots, context):
        tried = dataclasses.replace(settings, slots=rows, context=tokens)
        if need(lm, tried).total <= have:
            return tried
    check(lm, settings)
    return settings


def check(lm: LM, settings: Settings) -> None:
    """Refuse, with the numbers, an engine that its devices have no room for."""
    have = free(lm, settings)
    if have is None:
        return
    wanted = need(lm, settings)
    if wanted.total <= have:
        return
    context = settings.context or lm.model.config.context
    raise refuse(
        f"memory for {settings.slots} slots of {context} tokens",
        f"{told(wanted)} on each device",
        f"up to {_gib(have)}: fewer --slots, a shorter --context, "
        "keys as int8 (--kv int8), or more devices (--mesh)",
    )


def told(need: Need) -> str:
    """The numbers in words."""
    return (
        f"{_gib(need.total)} (keys and values {_gib(need.cache)}, other arrays {_gib(need.rest)}, a pass "
        f"{_gib(need.passes)}) beside {_gib(need.weights)} of weights"
    )


def free(lm: LM, settings: Settings) -> int | None:
    """Bytes that the engine may take on each device; None where nobody tells."""
    if settings.memory is not None:
        return settings.memory
    devices = sorted({d for leaf in jax.tree.leaves(lm.params) for d in _devices(leaf)}, key=lambda d: d.id)
    have = free_memory(devices or jax.devices()[:1])
    return None if have is None else int(have * SHARE)


def _candidates(lm: LM, settings: Settings, slots: bool, context: bool) -> Iterator[tuple[int, int]]:
    whole = min(settings.context or lm.model.config.context, lm.model.config.context)
    rows = [settings.slots >> i for i in range(settings.slots.bit_length())] if slots else [settings.slots]
    if not context:
        yield from ((n, whole) for n in rows)
        return
    for floor in FLOORS:
        for n in rows:
            tokens = whole
            while tokens >= min(floor, whole):
                yield n, tokens
                tokens //= 2


def _passes(plan: shapes.Plan, shape: shapes.Shape) -> int:
    """An estimate of what one pass over all rows makes and drops: hidden states, and logits by chunks."""
    program, config = shapes.program(plan, shape.slots, shape.level), plan.lm.model.config
    positions = shape.rows * program.width + shapes.WIDE  # a long prompt is encoded beside
    logits = shape.rows * program.window * min(config.vocab, program.vocab_chunk) * COPIES
    return 4 * (positions * config.width * HIDDEN + logits)


def _bytes(tree: Any, where: Any = None) -> int:
    """Bytes on one device: of arrays by the sharding they have, of abstract ones by `where`."""
    placed = jax.tree.leaves(where) if where is not None else [None] * len(jax.tree.leaves(tree))
    total = 0
    for leaf, on in zip(jax.tree.leaves(tree), placed, strict=True):
        on = on or getattr(leaf, "sharding", None)
        shape = leaf.shape if on is None else on.shard_shape(leaf.shape)
        total += math.prod(shape) * _itemsize(leaf.dtype)
    return total


def _itemsize(dtype: Any) -> int:
    return 8 if jnp.issubdtype(dtype, jax.dtypes.prng_key) else dtype.itemsize


def _devices(leaf: Any) -> set[Any]:
    on = getattr(leaf, "sharding", None)
    return set() if on is None else {d for d in on.device_set if d.process_index == jax.process_index()}


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.2f} MiB"
