"""Device memory of an engine: how much its slots need, and which number of slots and context fit.

All sizes are computed from abstract values (`jax.eval_shape`), so nothing is allocated. `Engine` calls `check_memory`
before it compiles; `mercury serve` calls `fit_config` first if the user set no number of slots or no context.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mercury_jax.config import refuse
from mercury_jax.decode.chunked_vocab import ChunkedVocab
from mercury_jax.hub import params
from mercury_jax.models.weight_quant import stored_bytes
from mercury_jax.serve.engine.buckets import PREFILL_WIDTH, longest_image_pass, make_buckets
from mercury_jax.serve.engine.request import EngineConfig
from mercury_jax.types import LM

SHARE = 0.9  # fraction of the free memory to use; the rest is left to the allocator and the compiled programs
LOGIT_COPIES = 3  # temporary arrays as large as the logits of a pass: raw, processed, probabilities
# temporary arrays as large as a layer's hidden states: normalised, queries, values, gates, ...
HIDDEN_COPIES = 8
# `fit_config` halves the context down to the first of these, then reduces the slots before it goes below it, and so on.
CONTEXT_FLOORS = (32_768, 8_192, 2_048, 256)


class EngineMemory(NamedTuple):
    """Memory of an engine on each device, in bytes.

    Attributes:
        cache: KV cache of all slots. Includes a second bucket, since two exist while rows move between them.
        other: Other arrays of the slots, and the prefix cache.
        activations: Temporary arrays of a forward pass (an estimate).
        weights: Parameters of the model. They are already loaded, and not part of `total`.
    """

    cache: int
    other: int
    activations: int
    weights: int

    @property
    def total(self) -> int:
        """Bytes that the engine needs in addition to the weights."""
        return self.cache + self.other + self.activations

    def __str__(self) -> str:
        return (
            f"{_formatted(self.total)} (keys and values {_formatted(self.cache)}, other arrays "
            f"{_formatted(self.other)}, a pass {_formatted(self.activations)}) beside "
            f"{_formatted(self.weights)} of weights"
        )


def engine_memory(lm: LM, config: EngineConfig) -> EngineMemory:
    """Computes the memory that an engine needs on each device of the model."""
    buckets = make_buckets(lm, config)
    largest = buckets.largest
    state = jax.eval_shape(lambda: buckets.idle(largest))
    shardings = buckets.shardings(state)
    rest, rest_shardings = (
        state._replace(cache=()),
        None if shardings is None else shardings._replace(cache=()),
    )
    # While rows move to another bucket, both states exist: the worst case is the largest and the second largest bucket.
    areas = sorted(rows * capacity for rows in buckets.rows for capacity in buckets.capacities)
    states = 1 + (areas[-2] / areas[-1] if len(areas) > 1 else 0)
    program, model = buckets.program(largest.capacity, largest.level), lm.model.config
    # Activations, in fp32: hidden states [positions, width] of all canvases and of one prefill pass, and the logits of
    # all active blocks, which are computed in chunks of the vocabulary unless they are small.
    positions = largest.rows * program.width + max(PREFILL_WIDTH, longest_image_pass(lm.model))
    shards = 1 if buckets.mesh is None else dict(buckets.mesh.shape).get("tensor", 1)
    vocab, chunks = -(-model.vocab // shards), ChunkedVocab()
    whole = 4 * largest.rows * program.window * vocab <= chunks.logit_bytes
    ids = vocab if whole else min(vocab, chunks.size)
    logits = largest.rows * program.window * ids * LOGIT_COPIES
    return EngineMemory(
        cache=int(_device_bytes(state.cache, shardings and shardings.cache) * states),
        other=int(_device_bytes(rest, rest_shardings) * states) + config.prefix_bytes,
        activations=4 * (positions * model.width * HIDDEN_COPIES + logits + _tower_values(lm)),
        weights=_device_bytes(lm.params),
    )


def _tower_values(lm: LM) -> int:
    """Counts the values of the temporary arrays of the vision tower, for the largest image; 0 without a tower."""
    if lm.model.vision is None:
        return 0
    c = lm.model.vision.config
    return longest_image_pass(lm.model) * c.pool**2 * c.width * HIDDEN_COPIES


def fit_config(lm: LM, config: EngineConfig, *, slots: bool, context: bool) -> EngineConfig:
    """Reduces the context and the number of slots of a configuration until the engine fits into memory.

    The context is halved before the number of slots is, as long as it stays above the current one of CONTEXT_FLOORS.

    Args:
        config: The wanted configuration. Its `memory` limits the bytes per device; None: the free memory of the
            model's devices.
    """
    available = free_memory(lm, config)
    if available is None:
        return config
    for rows, tokens in _candidates(lm, config, slots, context):
        smaller = dataclasses.replace(config, slots=rows, context=tokens)
        if engine_memory(lm, smaller).total <= available:
            return smaller
    check_memory(lm, config)  # no candidate fits: raises the error with the sizes of the wanted configuration
    return config


def check_memory(lm: LM, config: EngineConfig) -> None:
    """Checks that the devices have enough memory for an engine; accepts any if the free memory is unknown."""
    available = free_memory(lm, config)
    if available is None:
        return
    needed = engine_memory(lm, config)
    if needed.total > available:
        raise refuse(
            f"{lm.name}: memory for {config.slots} slots of {config.context or lm.model.config.context} tokens",
            f"{needed} on each device",
            f"up to {_formatted(available)}: fewer --slots, a shorter --context, keys as int8 (--kv int8), or more "
            "devices (--mesh)",
        )


def free_memory(lm: LM, config: EngineConfig) -> int | None:
    """Returns the memory that an engine may use on each device."""
    if config.memory is not None:
        return config.memory
    here = jax.process_index()
    shardings = [leaf.sharding for leaf in jax.tree.leaves(lm.params) if hasattr(leaf, "sharding")]
    devices = {d for sharding in shardings for d in sharding.device_set if d.process_index == here}
    free = params.free_memory(sorted(devices, key=lambda d: d.id) or jax.devices()[:1])
    return None if free is None else int(free * SHARE)


def _candidates(lm: LM, config: EngineConfig, slots: bool, context: bool) -> Iterator[tuple[int, int]]:
    """Yields pairs (slots, context) in the order in which they are tried.

    For each floor: all numbers of slots from the wanted one down, and for each the context from the wanted one down to
    the floor. A floor thus has priority over the number of slots.
    """
    longest = min(config.context or lm.model.config.context, lm.model.config.context)
    counts = [config.slots >> i for i in range(config.slots.bit_length())] if slots else [config.slots]
    if not context:
        yield from ((count, longest) for count in counts)
        return
    for floor in CONTEXT_FLOORS:
        for count in counts:
            tokens = longest
            while tokens >= min(floor, longest):
                yield count, tokens
                tokens //= 2


def _device_bytes(tree: Any, shardings: Any = None) -> int:
    """Computes the bytes of a tree on one device.

    Args:
        tree: Concrete arrays, which have their own shardings, or abstract ones.
        shardings: Shardings of abstract arrays, a tree of the same structure. None: replicated.
    """
    leaves = jax.tree.leaves(tree)
    placed = jax.tree.leaves(shardings) if shardings is not None else [None] * len(leaves)
    total = 0
    for leaf, sharding in zip(leaves, placed, strict=True):
        sharding = sharding or getattr(leaf, "sharding", None)
        shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        packed = jax.default_backend() != "cpu"
        total += (
            8 * math.prod(shape) if is_key else stored_bytes(jax.ShapeDtypeStruct(shape, leaf.dtype), packed)
        )
    return total


def _formatted(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.2f} MiB"
