"""The state of decoding: what varies per row, and what changes from pass to pass.

A batch holds rows that are at different points. A row's tokens are left-aligned; its canvas holds the W positions
after what is in the KV cache; its window is the part of the canvas that a rule sees: the active block, and what
stays editable before it. `decoder.py` advances a `State`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.decode.cache_refresh import CachePolicy, Reuse, first_reuse
from mercury_jax.decode.decode_config import DecodeConfig
from mercury_jax.decode.sampler import Memory, Sampler, broadcast_params, call_part
from mercury_jax.decode.token_stats import LogprobBuffer, Trajectory, slice_at
from mercury_jax.types import LM, Cache, Key, SelfCond, accumulation_dtype

ArrayLike: TypeAlias = np.ndarray | jax.Array


class SamplingParams(NamedTuple):
    """What varies per row: the sampler's parameters, the step budget, and the ids that end the text."""

    sampler: Sampler
    steps: Int[Array, "B"]  # of a block; 0: as many as it has tokens
    eos: Int[Array, "B"]  # ends the answer; -1: no id does (infilling)
    end_thinking: Int[Array, "B"]  # id that ends the thinking section; -1: none
    constrained: Any = ()  # Bool[B], rows under a grammar, whose tokens the host commits (`constrained`); (): none
    drafter: Any = ()  # SamplingParams of the drafter; () in a `State`, whose drafter has its own


def sampling_params(
    lm: LM, config: DecodeConfig, sampler: Sampler, steps: int | ArrayLike | None, rows: int, n: int = 1
) -> SamplingParams:
    """Makes the sampling parameters of rows whose answers the model's end of text ends, and that do not think.

    Args:
        lm: The model.
        config: Static sizes.
        sampler: Completed; its parameters are numbers, or arrays with one entry per prompt.
        steps: Of a block, one number or one per prompt; None or 0: as many as it has tokens.
        rows: B.
        n: Rows of each prompt.

    Returns:
        Every leaf has the batch axis first.

    Raises:
        ValueError: Names a parameter whose array has another length.
    """
    ids: Any = lambda x: np.full((rows,), x, np.int32)  # numpy: a call to jnp would cost the host more
    most = np.maximum(0 if steps is None else steps, 1 if config.speculative else 0)
    params = broadcast_params(sampler._replace(speculate=None), rows, n)
    most = ids(np.repeat(most, n) if most.ndim else most)
    return SamplingParams(params, most, ids(lm.model.config.eos), ids(-1))


class Rows(NamedTuple):
    """The rows of a request as arrays, left-aligned. `request.py` pads them and fills in what is None."""

    tokens: Int[ArrayLike, "B S"]
    given: Bool[ArrayLike, "B S"]  # tokens of the user, which never change
    committed: Int[ArrayLike, "B"]  # tokens of the prefix that are decided
    end: Int[ArrayLike, "B"]  # where the row ends; while it thinks, where its thinking ends at the latest
    seeds: Int[ArrayLike, "B"] | Key  # or typed keys [B]
    draft: Bool[ArrayLike, "B S"] | None = None  # tokens that a canvas starts from, instead of noise
    prompt: Int[ArrayLike, "B"] | None = None  # where the answer begins; None: at `committed`
    max_end: Int[ArrayLike, "B"] | None = None  # how far a row of variable length may grow; None: to `end`
    answer_budget: Int[ArrayLike, "B"] | None = None  # tokens reserved for the answer after the thinking


class Drafts(NamedTuple):
    """Guesses of the canvases that rows come to in the next steps, and what they have cost (`lookahead`)."""

    canvas: Int[Array, "B n W"]
    used: Int[Array, "B n"]  # as of the state; 0: no draft
    step: Int[Array, "B n"]
    computed: Int[Array, "B"]  # canvases that passes have computed, drafts included


class Drawn(NamedTuple):
    """From what the tokens of a drafter's last step were drawn (`drafting`)."""

    logits: Float[Array, "B L V"]  # of its window, after all processors
    fresh: Bool[Array, "B L"]  # positions that were drawn from them, independently of each other
    start: Int[Array, "B"]  # absolute position of the window


class Drafter(NamedTuple):
    """A model that drafts for another one (`drafting`): its state, and what its drafts have cost and brought."""

    state: State
    forwards: Int[Array, "B"]  # its passes, those that encode verified tokens too
    proposed: Int[Array, "B"]  # draft tokens that were verified
    accepted: Int[Array, "B"]


class State(NamedTuple):
    """Everything that decoding changes; the batch axis comes first in every leaf."""

    tokens: Int[Array, "B S"]  # the sequence by absolute position
    given: Bool[Array, "B S"]  # tokens of the user, which never change
    draft: Bool[Array, "B S"]  # tokens that a canvas starts from, instead of noise
    prompt: Int[Array, "B"]  # where the answer begins
    cache_length: Int[Array, "B"]  # slots with valid keys and values
    committed: Int[Array, "B"]  # tokens of the prefix that are decided
    end: Int[Array, "B"]  # where the row ends
    max_end: Int[Array, "B"]  # how far a row of variable length may grow
    answer_budget: Int[Array, "B"]  # while the row thinks: tokens reserved for its answer, else 0
    cache: Cache
    canvas: Int[Array, "B W"]  # state of the chain, at positions cache_length..cache_length + W
    answer: Int[Array, "B W"]  # what would be emitted now
    frozen: Bool[Array, "B W"]  # canvas positions that are committed or given
    used: Int[Array, "B"]  # positions of the canvas that hold something
    step: Int[Array, "B"]  # steps taken on this block; -1: no canvas is open
    self_cond: SelfCond
    memory: tuple[Memory, Memory]  # of the rule and of the stopping criterion
    key: Key  # [B], one per row, from its seed
    done: Bool[Array, "B"]
    unverified: Bool[Array, "B"]  # the canvas is a draft that waits for its causal pass
    nfe: Int[Array, "B"]  # denoising passes, and verifying passes
    nan_step: Int[Array, "B"]  # the pass whose logits were NaN; -1: none
    logprobs: LogprobBuffer | tuple[()]
    trajectory: Trajectory | tuple[()]
    sampling: SamplingParams  # of each row; () between two dispatches of the server, which keeps them apart
    reuse: Reuse | tuple[()] = ()  # what a cache policy sees of earlier passes
    lookahead: Drafts | tuple[()] = ()  # of the open block; () without lookahead
    drafter: Drafter | tuple[()] = ()  # another model that drafts for this one (`drafting`)
    drawn: Drawn | tuple[()] = ()  # of a drafter whose drafts are accepted by rejection sampling

    @property
    def evaluated(self) -> Int[Array, "B"]:
        """Canvases that denoising and verifying passes have computed: `nfe`, and the drafts of lookahead."""
        return self.lookahead.computed if isinstance(self.lookahead, Drafts) else self.nfe

    def without_cache(self) -> State:
        """Returns what one row's own step may look at: cheap to take apart by rows."""
        return self._replace(cache=(), self_cond=(), reuse=(), drafter=(), drawn=())


class Frame(NamedTuple):
    """What one pass shows of each row; small enough to keep for every pass."""

    start: Int[Array, "B"]  # absolute position of the window
    used: Int[Array, "B"]  # positions of the window that hold something; 0 where the row did not denoise
    answer: Int[Array, "B L"]
    accepted: Bool[Array, "B L"]  # the chain already holds the answer there
    confidence: Float[Array, "B L"]  # probability of the argmax
    done: Bool[Array, "B"]


def first_state(config: DecodeConfig, sampling: SamplingParams, rows: Rows) -> State:
    """Makes the state before the first pass.

    Args:
        config: Static sizes.
        sampling: Of each row.
        rows: Padded rows with all fields set; a row with nothing left to write is done from the start.

    Returns:
        A state with an empty cache.
    """
    count, slots = rows.tokens.shape
    int32 = lambda x: jnp.asarray(x).astype(jnp.int32)
    zeros = jnp.zeros((count,), jnp.int32)
    blank = jnp.zeros((count, config.width), jnp.int32)
    self_cond = jax.eval_shape(lambda: config.model.condition(None, jnp.zeros((count, config.width, 1))))
    committed, end = int32(rows.committed), int32(rows.end)
    top = jnp.zeros((count, slots, config.logprobs or 0))
    logprobs = LogprobBuffer(jnp.zeros((count, slots)), top.astype(jnp.int32), top)
    trajectory = Trajectory(jnp.full((count, slots), -1, jnp.int32), jnp.zeros((count, slots)))
    seeds = jnp.asarray(rows.seeds)
    none = jnp.zeros((count, config.lookahead), jnp.int32)
    drafts = Drafts(jnp.zeros((*none.shape, config.width), jnp.int32), none, none, zeros)
    return State(
        tokens=int32(rows.tokens),
        given=jnp.asarray(rows.given),
        draft=jnp.asarray(rows.draft),
        prompt=int32(rows.prompt),
        cache_length=zeros,
        committed=committed,
        end=end,
        max_end=int32(rows.max_end),
        answer_budget=int32(rows.answer_budget),
        cache=config.model.empty_cache(count, slots),
        canvas=blank,
        answer=blank,
        frozen=jnp.zeros((count, config.width), bool),
        used=zeros,
        step=zeros - 1,
        self_cond=jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self_cond),
        memory=jax.vmap(functools.partial(first_memory, config))(sampling.sampler, blank[:, : config.window]),
        key=seeds if jnp.issubdtype(seeds.dtype, jax.dtypes.prng_key) else jax.vmap(jax.random.key)(seeds),
        done=committed >= end,
        unverified=jnp.zeros((count,), bool),
        nfe=zeros,
        nan_step=zeros - 1,
        logprobs=() if config.logprobs is None else logprobs,
        trajectory=trajectory if config.trajectory else (),
        sampling=sampling._replace(drafter=()),
        lookahead=drafts if config.lookahead else (),
        drafter=() if config.drafter is None else _first_drafter(config.drafter, sampling.drafter, rows),
        drawn=_nothing_drawn(config, count) if config.drafts == "rejection" else (),
        reuse=first_reuse(config.refresh, config.model, count, config.width)
        if isinstance(config.refresh, CachePolicy)
        else (),
    )


def _first_drafter(config: DecodeConfig, sampling: SamplingParams, rows: Rows) -> Drafter:
    """The drafter of rows before the first pass; its slots are those of the rows and of a canvas after them."""
    slots = rows.tokens.shape[1] + config.slots_after
    if config.model.config.pattern == "bidirectional":
        slots = config.slots_after
    fit = lambda x: jnp.pad(x[:, :slots], [(0, 0), (0, max(0, slots - x.shape[1]))])
    tokens, given, draft = fit(rows.tokens), fit(rows.given), jnp.zeros((len(rows.tokens), slots), bool)
    zeros = jnp.zeros((len(rows.tokens),), jnp.int32)
    own = rows._replace(tokens=tokens, given=given, draft=draft, answer_budget=zeros)
    state = first_state(config, sampling, own)
    if config.drafts == "rejection":  # draws that are independent of those that verify
        state = state._replace(key=jax.vmap(lambda key: jax.random.fold_in(key, 0x7FFFFFFD))(state.key))
    return Drafter(state, zeros, zeros, zeros)


def _nothing_drawn(config: DecodeConfig, rows: int) -> Drawn:
    """The record of a drafter before its first pass."""
    shape, sizes = (rows, config.window), config.model.config
    dtype = accumulation_dtype(jnp.dtype(sizes.dtype))
    zeros = jnp.zeros((rows,), jnp.int32)
    return Drawn(jnp.zeros((*shape, sizes.vocab), dtype), jnp.zeros(shape, bool), zeros)


def admit(state: State, slot: int | Int[Array, ""], row: State) -> State:
    """Puts a state of one row into a slot of another state; the other slots do not change.

    Args:
        state: Of all slots.
        slot: Index of the row to replace.
        row: A state with one row and the same shapes, from `first_state`.

    Returns:
        The state of all slots.
    """
    return jax.tree.map(lambda old, new: old.at[slot].set(new[0]), state, row)


Record = TypeVar("Record", State, Frame)


def update_rows(record: Record, rows: Bool[Array, "B"], changes: Mapping[str, Any]) -> Record:
    """Changes some rows of a state or frame. Only for small fields: never the cache.

    Args:
        record: Every leaf has the batch axis first.
        rows: Which rows change.
        changes: New values of fields, for all rows.

    Returns:
        The record with the new values in these rows.
    """
    pick = lambda new, old: jnp.where(rows.reshape(-1, *[1] * (new.ndim - 1)), new, old)
    updated = {name: jax.tree.map(pick, x, getattr(record, name)) for name, x in changes.items()}
    return record._replace(**updated)


def first_memory(config: DecodeConfig, sampler: Sampler, canvas: Int[Array, "L"]) -> tuple[Memory, Memory]:
    """Makes one row's memories of the rule and of the stopping criterion, at the start of a block.

    Args:
        config: Its model has the vocabulary size.
        sampler: Of the row.
        canvas: The window at the start of the block.

    Returns:
        Both memories.
    """
    rule, stopping, vocab = sampler.rule, sampler.stopping, config.model.config.vocab
    assert stopping is not None
    memory = call_part(f"init of the rule {rule.name}", rule.init, canvas, vocab)
    return memory, call_part(f"init of the stopping criterion {stopping.name}", stopping.init, canvas, vocab)


def step_key(key: Key, committed: Int[Array, ""], step: Int[Array, ""]) -> Key:
    """Derives the key of one step of one row.

    It depends on the block's start and the step only, so that the text does not depend on how the prompt was chunked.

    Args:
        key: Of the row.
        committed: Where the block starts.
        step: -1 for the noise of a new canvas.

    Returns:
        The key.
    """
    return jax.random.fold_in(jax.random.fold_in(key, committed), step)


def position_uniforms(key: Key, at: Int[Array, "L"]) -> Float[Array, "L"]:
    """Draws one uniform per absolute position, the same in every pass: a draft and its verification share it.

    Args:
        key: Of the row.
        at: Absolute positions.

    Returns:
        Uniforms in [0, 1).
    """
    each = lambda p: jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, 0x7FFFFFFF), p))
    return jax.vmap(each)(at)


class Window(NamedTuple):
    """One row's window, without a batch axis."""

    offset: Int[Array, ""]  # of its first position within the canvas
    at: Int[Array, "L"]  # absolute positions
    end: Int[Array, ""]  # absolute end of the active block
    used: Int[Array, ""]  # positions that hold something
    frozen: Bool[Array, "L"]
    editable: Bool[Array, "L"]


def window_offset(config: DecodeConfig, cache_length: Array, committed: Array) -> Array:
    """Computes where the window begins within the canvas, for one row or for many.

    In a model of causal blocks, active blocks that are shorter than the model's are counted from its start (the small
    blocks of Fast-dLLM v2), wherever in it the prompt ends.

    Args:
        config: Static sizes.
        cache_length: Of the row.
        committed: Of the row.

    Returns:
        The offset.
    """
    first = committed - cache_length - config.revisable
    if config.model.config.pattern == "block_causal":
        first = first // config.block * config.block
    return jnp.clip(first, 0, config.width - config.window)


def window_of(config: DecodeConfig, row: State) -> Window:
    """Computes the window of a row: its active block, and what stays editable before it.

    Args:
        config: Static sizes.
        row: One row of a state, without a batch axis.

    Returns:
        The window.
    """
    offset = window_offset(config, row.cache_length, row.committed)
    at = row.cache_length + offset + jnp.arange(config.window, dtype=jnp.int32)
    # The active block ends with the row, with the canvas, or `block` positions after the committed tokens (in a model
    # of causal blocks: after its own start).
    start = at[0] if config.model.config.pattern == "block_causal" else row.committed
    end = jnp.minimum(jnp.minimum(row.end, row.cache_length + config.width), start + config.block)
    frozen = slice_at(row.frozen, offset, config.window)
    return Window(offset, at, end, jnp.clip(end - at[0], 0, config.window), frozen, ~frozen & (at < end))


def ends_text(config: DecodeConfig, tokens: Int[Array, "*s"], row: State) -> Bool[Array, "*s"]:
    """Returns whether each token ends an answer: the row's `eos`, or one of the model's other end ids.

    Args:
        config: Its model's config lists the other ids.
        tokens: Ids.
        row: One row of a state.

    Returns:
        Bools of the shape of `tokens`.
    """
    eos = row.sampling.eos
    ends = tokens == eos
    for other in config.model.config.ends:
        ends |= tokens == other
    return ends & (eos >= 0)


def close_thinking(row: State, changes: dict[str, Array]) -> dict[str, Array]:
    """Where a row's thinking ends, writes the closing token and starts the answer with its reserved budget.

    Args:
        row: One row, before this pass.
        changes: Its new `tokens`, `committed`, `end` and `done`.

    Returns:
        These fields, and `answer_budget`.
    """
    closing = changes["done"] & ~row.done & (row.answer_budget > 0)
    end, slots = changes["end"], row.tokens.shape[0]
    tokens = changes["tokens"].at[jnp.where(closing, end, slots)].set(row.sampling.end_thinking, mode="drop")
    return dict(
        tokens=tokens,
        committed=jnp.where(closing, end + 1, changes["committed"]),
        end=jnp.where(closing, end + 1 + row.answer_budget, end),
        answer_budget=jnp.where(closing, 0, row.answer_budget),
        done=changes["done"] & ~closing,
    )
