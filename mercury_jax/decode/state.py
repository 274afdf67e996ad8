"""The decoding state: what varies per row, and what changes from pass to pass.

The rows of a batch are at different points of their answers. For each row:

    tokens   [S]  the sequence, left-aligned
    canvas   [W]  the positions after the tokens in the KV cache
    window   [L]  the part of the canvas that a rule sees: the active block, and the editable positions before it

`request.py` makes the `Rows` of a call, `first_state` the `State` of these rows, and `decoder.py` advances it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from mercury_jax import decode
from mercury_jax.decode.cache_refresh import CachePolicy, Reuse, first_reuse
from mercury_jax.decode.decode_config import DecodeConfig
from mercury_jax.decode.sampler import Memory, Sampler, broadcast_params, call_part
from mercury_jax.decode.token_stats import LogprobBuffer, Trajectory, slice_at
from mercury_jax.types import LM, Cache, Key, Params, SelfCond, accumulation_dtype, fields_shown

ArrayLike: TypeAlias = np.ndarray | jax.Array


class SamplingParams(NamedTuple):
    """What varies per row: the parameters of the sampler, the number of steps, and the ids that end the text."""

    sampler: Sampler  # with parameters [B, ...]
    steps: Int[Array, "B"]  # denoising steps per block; 0: one per token
    eos: Int[Array, "B"]  # id that ends the answer; -1: none (infilling)
    end_thinking: Int[Array, "B"]  # id that ends the thinking section; -1: none
    constrained: Any = ()  # Bool[B], grammar-constrained rows, whose tokens the host commits; (): no such row
    drafter: Any = ()  # SamplingParams of the drafter; () in a `State`, where `State.drafter` holds them


def sampling_params(
    lm: LM, config: DecodeConfig, sampler: Sampler, steps: int | ArrayLike | None, rows: int, n: int = 1
) -> SamplingParams:
    """Makes the sampling parameters of rows that do not think and end with the model's end-of-text token.

    Args:
        sampler: A sampler completed by `defaults.complete_sampler`. Its parameters are numbers, or arrays with one
            entry per prompt.
    """
    ids: Any = lambda x: np.full((rows,), x, np.int32)  # numpy, whose dispatch costs the host less than jnp's
    # A draft always takes at least one step: 0 would mean one step per token.
    most = np.maximum(0 if steps is None else steps, 1 if config.speculative else 0)
    params = broadcast_params(sampler._replace(speculate=None), rows, n)
    most = ids(np.repeat(most, n) if most.ndim else most)
    return SamplingParams(params, most, ids(lm.model.config.eos), ids(-1))


class Rows(NamedTuple):
    """The rows of a request as left-aligned arrays. `request.py` pads them and replaces None by the default."""

    tokens: Int[ArrayLike, "B S"]  # prompts, and drafts of their answers if there are any
    given: Bool[ArrayLike, "B S"]  # tokens of the user, which never change
    committed: Int[ArrayLike, "B"]  # length of the decided prefix
    end: Int[ArrayLike, "B"]  # absolute end of the row; while the row thinks, the latest end of its thinking
    seeds: Int[ArrayLike, "B"] | Key  # seeds, or typed keys [B]
    # positions whose token starts on the canvas, instead of noise
    draft: Bool[ArrayLike, "B S"] | None = None
    prompt: Int[ArrayLike, "B"] | None = None  # position where the answer begins; None: `committed`
    max_end: Int[ArrayLike, "B"] | None = None  # largest end of a row of variable length; None: `end`
    answer_budget: Int[ArrayLike, "B"] | None = None  # tokens reserved for the answer after the thinking


class Limits(NamedTuple):
    """Where a row ends; absolute positions."""

    end: Int[Array, "B"]  # end of the row; while the row thinks, the latest end of its thinking
    max_end: Int[Array, "B"]  # largest end of a row of variable length
    answer_budget: Int[Array, "B"]  # while the row thinks: tokens reserved for its answer; otherwise 0


class Records(NamedTuple):
    """What decoding counts and keeps for the user; no pass decides by it."""

    nfe: Int[Array, "B"]  # denoising and verifying passes so far
    nan_step: Int[Array, "B"]  # the pass whose logits were NaN; -1: none
    logprobs: LogprobBuffer | tuple[()]
    trajectory: Trajectory | tuple[()]

    def with_nan(self, is_nan: Bool[Array, ""]) -> Records:
        """Notes that the logits of a row were NaN in this pass, unless an earlier pass had any."""
        return self._replace(nan_step=jnp.where(is_nan & (self.nan_step < 0), self.nfe, self.nan_step))


class Drafts(NamedTuple):
    """Drafts of the canvases of the next n steps, and their cost (`lookahead.py`)."""

    canvas: Int[Array, "B n W"]
    used: Int[Array, "B n"]  # `State.used` of each draft; 0: no draft
    step: Int[Array, "B n"]  # `State.step` of each draft
    computed: Int[Array, "B"]  # canvases computed so far, drafts included


class Drawn(NamedTuple):
    """The distribution from which a drafter sampled the tokens of its last step (`drafting.py`)."""

    logits: Float[Array, "B L V"]  # logits of the drafter's window, after all processors
    fresh: Bool[Array, "B L"]  # positions sampled from these logits, independently of each other
    start: Int[Array, "B"]  # absolute position of the window


class Drafter(NamedTuple):
    """The model that drafts for another one (`drafting.py`): its decoding state, and counts of its drafts."""

    state: State
    forwards: Int[Array, "B"]  # passes of the drafter, including those that encode verified tokens
    proposed: Int[Array, "B"]  # draft tokens that were verified
    accepted: Int[Array, "B"]  # draft tokens that the verifier accepted


class State(NamedTuple):
    """Everything that decoding changes; the batch axis comes first in every leaf.

    Positions and lengths are absolute: they count from the start of the row.
    """

    # The row.
    tokens: Int[Array, "B S"]  # the sequence by absolute position
    given: Bool[Array, "B S"]  # tokens of the user, which never change
    draft: Bool[Array, "B S"]  # positions whose token starts on the canvas, instead of noise
    prompt: Int[Array, "B"]  # position where the answer begins
    cache_length: Int[Array, "B"]  # slots of the KV cache that hold valid keys and values
    committed: Int[Array, "B"]  # length of the decided prefix
    limits: Limits  # where the row ends
    cache: Cache
    # The canvas of the active block.
    canvas: Int[Array, "B W"]  # x_t at positions cache_length..cache_length + W - 1
    answer: Int[Array, "B W"]  # the tokens that would be emitted if the block ended now
    frozen: Bool[Array, "B W"]  # canvas positions that are committed or given
    used: Int[Array, "B"]  # number of canvas positions before the end of the row
    step: Int[Array, "B"]  # denoising steps taken on this block; -1: no canvas is open
    self_cond: SelfCond
    memory: tuple[Memory, Memory]  # memories of the rule and of the stopping criterion
    key: Key  # [B], one per row, made from its seed
    done: Bool[Array, "B"]
    unverified: Bool[Array, "B"]  # the canvas is a draft that waits for its verifying pass
    records: Records
    # Parameters and optional methods.
    sampling: SamplingParams  # () between two dispatches of the server, which stores them separately
    reuse: Reuse | tuple[()] = ()  # statistics of earlier passes for a cache policy
    lookahead: Drafts | tuple[()] = ()  # drafts of the active block's next steps; () without lookahead
    drafter: Drafter | tuple[()] = ()  # another model that drafts for this one (`drafting.py`)
    drawn: Drawn | tuple[()] = ()  # set for a drafter whose drafts are accepted by rejection sampling

    def __repr__(self) -> str:
        return fields_shown(
            self, ("tokens", "canvas", "cache", "prompt", "committed", "limits", "step", "nfe", "done")
        )

    @property
    def nfe(self) -> Int[Array, "B"]:
        """Denoising and verifying passes so far."""
        return self.records.nfe

    @property
    def logprobs(self) -> LogprobBuffer | tuple[()]:
        """Log-probabilities of the tokens, if the decoder keeps them."""
        return self.records.logprobs

    @property
    def trajectory(self) -> Trajectory | tuple[()]:
        """The pass that accepted each token, if the decoder keeps it."""
        return self.records.trajectory

    @property
    def evaluated(self) -> Int[Array, "B"]:
        """Canvases computed by denoising and verifying passes: `nfe`, plus the drafts of lookahead."""
        return self.lookahead.computed if isinstance(self.lookahead, Drafts) else self.nfe

    def without_cache(self) -> State:
        """Returns the state without its large fields, so that it can be vmapped over the rows at low cost."""
        return self._replace(cache=(), self_cond=(), reuse=(), drafter=(), drawn=())


class Frame(NamedTuple):
    """What one pass shows of each row's window; small enough to keep for every pass."""

    start: Int[Array, "B"]  # absolute position of the window
    # number of positions of the window in use; 0 if the row did not denoise in this pass
    used: Int[Array, "B"]
    answer: Int[Array, "B L"]  # the tokens that would be emitted now
    accepted: Bool[Array, "B L"]  # the canvas already holds the token of `answer`
    confidence: Float[Array, "B L"]  # probability of the argmax
    done: Bool[Array, "B"]

    def __repr__(self) -> str:
        return fields_shown(self, self._fields)

    def _repr_html_(self) -> str:
        return decode.pictures().frame(self)


Step = Callable[[DecodeConfig, Params, State], tuple[State, Frame]]  # one pass


def first_state(config: DecodeConfig, sampling: SamplingParams, rows: Rows) -> State:
    """Makes the state before the first pass."""
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
        limits=Limits(end, int32(rows.max_end), int32(rows.answer_budget)),
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
        records=Records(
            nfe=zeros,
            nan_step=zeros - 1,
            logprobs=() if config.logprobs is None else logprobs,
            trajectory=trajectory if config.trajectory else (),
        ),
        sampling=sampling._replace(drafter=()),
        lookahead=drafts if config.lookahead else (),
        drafter=() if config.drafter is None else _first_drafter(config.drafter, sampling.drafter, rows),
        drawn=_nothing_drawn(config, count) if config.drafts == "rejection" else (),
        reuse=first_reuse(config.refresh, config.model, count, config.width)
        if isinstance(config.refresh, CachePolicy)
        else (),
    )


def _first_drafter(config: DecodeConfig, sampling: SamplingParams, rows: Rows) -> Drafter:
    """Makes the drafter's state before the first pass, with the rows of the verifier.

    It has the slots of the rows and of the drafter's own canvas after them.
    """
    slots = rows.tokens.shape[1] + config.slots_after
    if config.model.config.pattern == "bidirectional":
        slots = config.slots_after
    fit = lambda x: jnp.pad(x[:, :slots], [(0, 0), (0, max(0, slots - x.shape[1]))])
    tokens, given, draft = fit(rows.tokens), fit(rows.given), jnp.zeros((len(rows.tokens), slots), bool)
    zeros = jnp.zeros((len(rows.tokens),), jnp.int32)
    own = rows._replace(tokens=tokens, given=given, draft=draft, answer_budget=zeros)
    state = first_state(config, sampling, own)
    # Rejection sampling needs draws that are independent of the verifier's.
    if config.drafts == "rejection":
        state = state._replace(key=jax.vmap(lambda key: jax.random.fold_in(key, 0x7FFFFFFD))(state.key))
    return Drafter(state, zeros, zeros, zeros)


def _nothing_drawn(config: DecodeConfig, rows: int) -> Drawn:
    """Makes the `Drawn` of a drafter before its first pass, with no sampled position."""
    shape, sizes = (rows, config.window), config.model.config
    dtype = accumulation_dtype(jnp.dtype(sizes.dtype))
    zeros = jnp.zeros((rows,), jnp.int32)
    return Drawn(jnp.zeros((*shape, sizes.vocab), dtype), jnp.zeros(shape, bool), zeros)


def admit(state: State, slot: int | Int[Array, ""], row: State) -> State:
    """Writes the state of one row into a slot of a larger state, as continuous batching does for a new request."""
    return jax.tree.map(lambda old, new: old.at[slot].set(new[0]), state, row)


Record = TypeVar("Record", State, Frame)


def update_rows(record: Record, rows: Bool[Array, "B"], changes: Mapping[str, Any]) -> Record:
    """Changes fields of a state or frame in some rows.

    Not for the cache: selecting by row copies the whole field.

    Args:
        changes: {field: new value}; the values have entries for all B rows.
    """
    pick = lambda new, old: jnp.where(rows.reshape(-1, *[1] * (new.ndim - 1)), new, old)
    updated = {name: jax.tree.map(pick, x, getattr(record, name)) for name, x in changes.items()}
    return record._replace(**updated)


# Fields with numbers and flags of a row that change from pass to pass.
COUNTED = ("cache_length", "committed", "limits", "used", "step", "done", "unverified", "records")


class PackedState(NamedTuple):
    """A state as the carry of a decoding loop, with the numbers and flags of its fields `COUNTED` in one array.

    On a GPU each small array of the carry costs a pass one kernel that computes it, and often another that copies it.
    """

    counters: Int[Array, "n B"]
    rest: State  # with arrays of no elements in place of the packed ones


def pack_state(state: State) -> PackedState:
    """Packs the numbers and flags [B] of a state."""
    fields = {name: getattr(state, name) for name in COUNTED}
    counted = lambda x: x.ndim == 1 and x.dtype in (jnp.int32, jnp.bool_)
    counters = jnp.stack([x.astype(jnp.int32) for x in jax.tree.leaves(fields) if counted(x)])
    rest = jax.tree.map(lambda x: jnp.zeros((0,), x.dtype) if counted(x) else x, fields)
    return PackedState(counters, state._replace(**rest))


def unpack_state(packed: PackedState) -> State:
    """Inverts `pack_state`."""
    fields, counters = {name: getattr(packed.rest, name) for name in COUNTED}, iter(packed.counters)
    fill = lambda x: next(counters).astype(x.dtype) if x.shape == (0,) else x
    return packed.rest._replace(**jax.tree.map(fill, fields))


def first_memory(config: DecodeConfig, sampler: Sampler, canvas: Int[Array, "L"]) -> tuple[Memory, Memory]:
    """Makes the memories of the rule and of the stopping criterion for one row, at the start of a block."""
    rule, stopping, vocab = sampler.rule, sampler.stopping, config.model.config.vocab
    assert stopping is not None
    memory = call_part(f"init of the rule {rule.name}", rule.init, canvas, vocab)
    return memory, call_part(f"init of the stopping criterion {stopping.name}", stopping.init, canvas, vocab)


def step_key(key: Key, committed: Int[Array, ""], step: Int[Array, ""]) -> Key:
    """Derives the key of one step of one row.

    The key depends only on the start of the block and on the step, so that neither the chunks of the prefill nor the
    other rows of the batch change the text.
    """
    return jax.random.fold_in(jax.random.fold_in(key, committed), step)


def position_uniforms(key: Key, at: Int[Array, "L"]) -> Float[Array, "L"]:
    """Draws one uniform per absolute position, the same in every pass.

    A draft and the pass that verifies it thus sample each token with the same uniform.
    """
    each = lambda p: jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, 0x7FFFFFFF), p))
    return jax.vmap(each)(at)


class Window(NamedTuple):
    """The window of one row, without a batch axis."""

    offset: Int[Array, ""]  # index of its first position within the canvas
    at: Int[Array, "L"]  # absolute positions
    end: Int[Array, ""]  # absolute end of the active block
    used: Int[Array, ""]  # number of positions before `end`
    frozen: Bool[Array, "L"]  # committed or given
    editable: Bool[Array, "L"]  # before `end` and not frozen


def window_offset(config: DecodeConfig, cache_length: Array, committed: Array) -> Array:
    """Computes where the window begins within the canvas, for one row or for B rows.

    Args:
        cache_length: `State.cache_length`, a scalar or [B].
        committed: `State.committed`, with the same shape.
    """
    first = committed - cache_length - config.revisable
    # Active blocks shorter than the model's block (the small blocks of Fast-dLLM v2, arXiv 2509.26328) are aligned to
    # the start of the model's block, even if the prompt ends inside one of them.
    if config.model.config.pattern == "block_causal":
        first = first // config.block * config.block
    return jnp.clip(first, 0, config.width - config.window)


def window_of(config: DecodeConfig, row: State) -> Window:
    """Computes the window of a row: its active block, and the editable positions before it."""
    offset = window_offset(config, row.cache_length, row.committed)
    at = row.cache_length + offset + jnp.arange(config.window, dtype=jnp.int32)
    # The active block ends at the end of the row, at the end of the canvas, or `block` positions after its start,
    # whichever comes first. It starts after the committed tokens, in a block-causal model at its aligned start.
    start = at[0] if config.model.config.pattern == "block_causal" else row.committed
    end = jnp.minimum(jnp.minimum(row.limits.end, row.cache_length + config.width), start + config.block)
    frozen = slice_at(row.frozen, offset, config.window)
    return Window(offset, at, end, jnp.clip(end - at[0], 0, config.window), frozen, ~frozen & (at < end))


def ends_text(config: DecodeConfig, tokens: Int[Array, "*s"], row: State) -> Bool[Array, "*s"]:
    """Returns which tokens end an answer: the row's `eos` and the other end ids of the model."""
    eos = row.sampling.eos
    ends = tokens == eos
    for other in config.model.config.ends:
        ends |= tokens == other
    return ends & (eos >= 0)


def close_thinking(row: State, changes: Mapping[str, Any]) -> dict[str, Any]:
    """When the thinking of a row ends, writes the closing token and starts the answer with its reserved budget."""
    # While a row thinks, `end` bounds the thinking: a row that becomes done has finished it, by the closing token or
    # by the budget, and continues with the answer. Other rows write at index `slots`, which mode="drop" ignores.
    budget, end, slots = row.limits.answer_budget, changes["limits"].end, row.tokens.shape[0]
    closing = changes["done"] & ~row.done & (budget > 0)
    tokens = changes["tokens"].at[jnp.where(closing, end, slots)].set(row.sampling.end_thinking, mode="drop")
    return dict(
        tokens=tokens,
        committed=jnp.where(closing, end + 1, changes["committed"]),
        limits=row.limits._replace(
            end=jnp.where(closing, end + 1 + budget, end), answer_budget=jnp.where(closing, 0, budget)
        ),
        done=changes["done"] & ~closing,
    )
