"""What decoding carries: the program it runs, the knobs of each row, and the state that changes."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.decode.parts import Sampler
from mercury_jax.noise import Corruption
from mercury_jax.types import Cache, Carry, Key, Model


class Program(NamedTuple):
    """What a compiled step closes over. Hashable: equal programs share one compilation."""

    model: Model
    corruption: Corruption
    width: int  # L, positions of a canvas
    block: int  # positions of the active block, at most L
    eos: int | None  # ends an answer; None while infilling
    forbidden: tuple[int, ...] = ()  # ids never emitted, beside the corruption's


class Knobs(NamedTuple):
    """What varies by row: the sampler's numbers and the step budget (0: as many as tokens)."""

    sampler: Sampler
    steps: Int[Array, "B"]


class State(NamedTuple):
    """Everything that decoding changes; the batch axis comes first in every leaf."""

    text: Int[Array, "B S"]  # the sequence by absolute position
    given: Bool[Array, "B S"]  # tokens that the user gave
    length: Int[Array, "B"]  # slots with valid keys and values
    known: Int[Array, "B"]  # settled prefix
    total: Int[Array, "B"]  # where the row ends
    cache: Cache
    canvas: Int[Array, "B L"]  # the chain; stands at length..length + L
    answer: Int[Array, "B L"]  # what would be emitted now
    held: Bool[Array, "B L"]  # canvas positions that are known or given
    n: Int[Array, "B"]  # used positions of the canvas
    step: Int[Array, "B"]  # steps taken on this block; -1: no canvas is open
    carry: Carry
    memory: Any  # of the rule and of the stop
    key: Any  # [B] typed keys, one a row, from its seed
    done: Bool[Array, "B"]
    tentative: Bool[Array, "B"]  # drafted, waiting for a causal check
    forwards: Int[Array, "B"]  # denoiser passes


class Frame(NamedTuple):
    """What one pass shows of each row; cheap enough to keep for every pass."""

    start: Int[Array, "B"]  # absolute position of the canvas
    n: Int[Array, "B"]  # used positions; 0 where the row did not denoise
    answer: Int[Array, "B L"]
    settled: Bool[Array, "B L"]  # the chain already holds the answer there
    confidence: Float[Array, "B L"]  # probability of the argmax
    done: Bool[Array, "B"]


def begin(
    program: Program,
    knobs: Knobs,
    text: Int[Array, "B S"],
    given: Bool[Array, "B S"],
    known: Int[Array, "B"],
    total: Int[Array, "B"],
    seeds: Int[Array, "B"],
) -> State:
    """A state whose rows hold `known` settled tokens and want `total`; rows with none left are done."""
    rows, width = text.shape[0], program.width
    zeros = jnp.zeros((rows,), jnp.int32)
    blank = jnp.zeros((rows, width), jnp.int32)
    carry = jax.eval_shape(lambda: program.model.condition(None, jnp.zeros((rows, width, 1))))
    return State(
        text=text.astype(jnp.int32),
        given=given,
        length=zeros,
        known=known.astype(jnp.int32),
        total=total.astype(jnp.int32),
        cache=program.model.empty_cache(rows, text.shape[1]),
        canvas=blank,
        answer=blank,
        held=jnp.zeros((rows, width), bool),
        n=zeros,
        step=zeros - 1,
        carry=jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), carry),
        memory=jax.vmap(functools.partial(memory, knobs.sampler))(blank),
        key=jax.vmap(jax.random.key)(seeds),
        done=known >= total,
        tentative=jnp.zeros((rows,), bool),
        forwards=zeros,
    )


def admit(state: State, slot: int | Array, row: State) -> State:
    """Put a state of one row (from `begin`) into a slot; its neighbours are untouched."""
    return jax.tree.map(lambda old, new: old.at[slot].set(new[0]), state, row)


def memory(sampler: Sampler, canvas: Array) -> tuple[Any, Any]:
    """One row's memories at the start of a block: the rule's and the stop's."""
    assert sampler.stop is not None
    return sampler.rule.init(canvas), sampler.stop.init(canvas)


def row_key(key: Key, known: Array, step: Array) -> Key:
    """Depends on the block's start and the step only, not on how the prompt was chunked."""
    return jax.random.fold_in(jax.random.fold_in(key, known), step)
