"""What decoding carries: the program it runs, the knobs of each row, and the state that changes."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.config import Refresh
from mercury_jax.decode.parts import Sampler
from mercury_jax.decode.returned import called
from mercury_jax.noise import Corruption
from mercury_jax.types import Cache, Carry, Key, Model


class Program(NamedTuple):
    """What a compiled step closes over. Hashable: equal programs share one compilation."""

    model: Model
    corruption: Corruption
    width: int  # positions of a canvas
    block: int  # positions of the active block, at most the width
    forbidden: tuple[int, ...] = ()  # ids never emitted, beside the corruption's
    back: int = 0  # positions before the active block that stay editable
    refresh: Refresh | None = None  # bidirectional: reuse keys between steps; None: never
    blind: bool = False  # every pass also reads each position by a mask that cannot see its token
    grows: bool = False  # the rule inserts and deletes
    verify: bool = False  # drafts are checked by the causal pass
    logprobs: int | None = None  # keep log-probabilities, with so many alternatives; None: keep none
    piece: int = 32768  # ids whose logits are made at once, where no part asks for those of all (`pieces`)

    @property
    def window(self) -> int:
        """L, the positions that a rule sees."""
        return min(self.width, self.block + self.back)


class Knobs(NamedTuple):
    """What varies by row: the sampler's numbers, the step budget, the ids that end things."""

    sampler: Sampler
    steps: Int[Array, "B"]  # of a block; 0: as many as it has tokens
    eos: Int[Array, "B"]  # ends an answer; -1: nothing does (infilling)
    close: Int[Array, "B"]  # ends the thinking; -1: there is none
    gated: Any = ()  # Bool[B]: the host settles what such a row writes behind its thinking (`amend`); (): no row


class Nats(NamedTuple):
    """Log-probabilities by position of the text, of the unshaped model; k alternatives each."""

    token: Float[Array, "B S"]
    ids: Int[Array, "B S k"]
    top: Float[Array, "B S k"]


class State(NamedTuple):
    """Everything that decoding changes; the batch axis comes first in every leaf."""

    text: Int[Array, "B S"]  # the sequence by absolute position
    given: Bool[Array, "B S"]  # tokens that the user gave, and that stay
    draft: Bool[Array, "B S"]  # tokens that a canvas starts from, where it would start from noise
    prompt: Int[Array, "B"]  # where the answer begins
    length: Int[Array, "B"]  # slots with valid keys and values
    known: Int[Array, "B"]  # settled prefix
    total: Int[Array, "B"]  # where the row ends
    most: Int[Array, "B"]  # how far a growing row may reach
    reserve: Int[Array, "B"]  # while the row thinks: tokens kept for its answer
    cache: Cache
    canvas: Int[Array, "B W"]  # the chain; stands at length..length + W
    answer: Int[Array, "B W"]  # what would be emitted now
    held: Bool[Array, "B W"]  # canvas positions that are known or given
    n: Int[Array, "B"]  # used positions of the canvas
    step: Int[Array, "B"]  # steps taken on this block; -1: no canvas is open
    carry: Carry
    memory: Any  # of the rule and of the stop
    key: Any  # [B] typed keys, one a row, from its seed
    done: Bool[Array, "B"]
    tentative: Bool[Array, "B"]  # drafted, waiting for a causal check
    forwards: Int[Array, "B"]  # denoiser passes, and causal checks
    bad: Int[Array, "B"]  # the pass whose logits were no numbers; -1: none
    nats: Any  # Nats, or ()


class Frame(NamedTuple):
    """What one pass shows of each row; cheap enough to keep for every pass."""

    start: Int[Array, "B"]  # absolute position of the window
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
    draft: Bool[Array, "B S"],
    known: Int[Array, "B"],
    total: Int[Array, "B"],
    most: Int[Array, "B"],
    reserve: Int[Array, "B"],
    prompt: Int[Array, "B"],
    seeds: Int[Array, "B"],
) -> State:
    """A state whose rows hold `known` settled tokens and want `total`; rows with none left are done."""
    rows, slots = text.shape
    int32 = lambda x: x.astype(jnp.int32)
    zeros = jnp.zeros((rows,), jnp.int32)
    blank = jnp.zeros((rows, program.width), jnp.int32)
    carry = jax.eval_shape(lambda: program.model.condition(None, jnp.zeros((rows, program.width, 1))))
    return State(
        text=int32(text),
        given=given,
        draft=draft,
        prompt=int32(prompt),
        length=zeros,
        known=int32(known),
        total=int32(total),
        most=int32(most),
        reserve=int32(reserve),
        cache=program.model.empty_cache(rows, slots),
        canvas=blank,
        answer=blank,
        held=jnp.zeros((rows, program.width), bool),
        n=zeros,
        step=zeros - 1,
        carry=jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), carry),
        memory=jax.vmap(functools.partial(memory, program))(knobs.sampler, blank[:, : program.window]),
        key=jax.vmap(jax.random.key)(seeds),
        done=known >= total,
        tentative=jnp.zeros((rows,), bool),
        forwards=zeros,
        bad=zeros - 1,
        nats=_no_nats(rows, slots, program.logprobs),
    )


def _no_nats(rows: int, slots: int, alternatives: int | None) -> Any:
    if alternatives is None:
        return ()
    few = (rows, slots, alternatives)
    return Nats(jnp.zeros((rows, slots)), jnp.zeros(few, jnp.int32), jnp.zeros(few))


def admit(state: State, slot: int | Array, row: State) -> State:
    """Put a state of one row (from `begin`) into a slot; its neighbours are untouched."""
    return jax.tree.map(lambda old, new: old.at[slot].set(new[0]), state, row)


def memory(program: Program, sampler: Sampler, canvas: Array) -> tuple[Any, Any]:
    """One row's memories at the start of a block: the rule's and the stop's. canvas [L]."""
    assert sampler.stop is not None
    vocab = program.model.config.vocab
    start = lambda part: called(part, part.init, canvas, vocab, doing="init of ")
    return start(sampler.rule), start(sampler.stop)


def row_key(key: Key, known: Array, step: Array) -> Key:
    """Depends on the block's start and the step only, not on how the prompt was chunked."""
    return jax.random.fold_in(jax.random.fold_in(key, known), step)


def uniforms_at(key: Key, at: Int[Array, "L"]) -> Float[Array, "L"]:
    """One uniform for each absolute position, the same in every pass: a draft and its check share it."""
    each = lambda p: jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, 0x7FFFFFFF), p))
    return jax.vmap(each)(at)
