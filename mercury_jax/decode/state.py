"""The decoding state: what varies per row, and what changes from pass to pass.

The rows of a batch are at different points of their answers. For each row:

    tokens   [S]  the sequence, left-aligned
    canvas   [W]  the positions after the tokens in the KV cache
    window   [L]  the part of the canvas that a rule sees: the active block, and the editable positions before it

`request.py` makes the `Rows` of a call, `decode_config.first_state` the `State` of these rows, and `passes.py` advances
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from mercury_jax import decode
from mercury_jax.decode.sampler import Memory, Sampler
from mercury_jax.decode.token_stats import (
    LogprobBuffer,
    Trajectory,
    draw_log_prob,
    update_logprobs,
    write_changed,
)
from mercury_jax.types import Cache, Key, SelfCond, fields_shown

ArrayLike: TypeAlias = np.ndarray | jax.Array


class SamplingParams(NamedTuple):
    """What varies per row: the parameters of the sampler, the number of steps, and the ids that end the text."""

    sampler: Sampler  # with parameters [B, ...]
    steps: Int[Array, "B"]  # denoising steps per block; 0: one per token
    eos: Int[Array, "B"]  # id that ends the answer; -1: none (infilling)
    end_thinking: Int[Array, "B"]  # id that ends the thinking section; -1: none
    constrained: Any = ()  # Bool[B], grammar-constrained rows, whose tokens the host commits; (): no such row
    method: Any = ()  # what the method's `init` reads for each row; () in a `State`


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


class Written(NamedTuple):
    """The tokens that a pass has written in one row, and the logits from which they come."""

    tokens: Int[Array, "L"]
    changed: Bool[Array, "L"]  # positions whose token this pass has written
    start: Int[Array, ""]  # absolute position of the first one
    forbidden: tuple[
        int, ...
    ]  # ids that the model never emits, such as the mask; they have no share of `logprobs`
    logits: Float[Array, "L V"] | None  # as the model computes them; None: not kept
    draw_logits: Float[Array, "L V"] | None = (
        None  # after the processors; None: the trajectory leaves them out
    )
    temperature: Any = 0.0  # float []
    source: Int[Array, "L"] | None = None  # `Proposal.source` under variable length


class Records(NamedTuple):
    """What decoding counts and keeps for the user; no pass decides by it."""

    nfe: Int[Array, "B"]  # denoising and verifying passes so far
    nan_step: Int[Array, "B"]  # the pass whose logits were NaN; -1: none
    logprobs: LogprobBuffer | tuple[()]
    trajectory: Trajectory | tuple[()]

    def with_nan(self, is_nan: Bool[Array, ""]) -> Records:
        """Notes that the logits of a row were NaN in this pass, unless an earlier pass had any."""
        return self._replace(nan_step=jnp.where(is_nan & (self.nan_step < 0), self.nfe, self.nan_step))

    def with_tokens(self, written: Written) -> Records:
        """Records the tokens that this pass has written in one row: their log-probabilities and the pass."""
        tokens, where = written.tokens, (written.changed, written.start, written.source)
        logprobs, trajectory = self.logprobs, self.trajectory
        if isinstance(logprobs, LogprobBuffer):
            assert written.logits is not None
            logprobs = update_logprobs(logprobs, written.logits, tokens, written.forbidden, *where)
        if isinstance(trajectory, Trajectory) and written.draw_logits is not None:
            drawn = draw_log_prob(written.draw_logits, tokens, written.temperature)
            new = Trajectory(jnp.full_like(tokens, self.nfe), drawn)
            trajectory = jax.tree.map(lambda old, x: write_changed(old, x, *where), trajectory, new)
        return self._replace(logprobs=logprobs, trajectory=trajectory)


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
    records: Records
    sampling: SamplingParams  # () between two dispatches of the server, which stores them separately
    method: Any  # what the decoding method keeps from pass to pass; () if it keeps nothing

    def __repr__(self) -> str:
        return fields_shown(self, ("tokens", "canvas", "cache", "prompt", "committed", "step", "nfe", "done"))

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

    def without_cache(self) -> State:
        """Returns the state without its large fields, so that it can be vmapped over the rows at low cost."""
        return self._replace(cache=(), self_cond=(), method=())


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


def like_row(row: State, changes: dict[str, Any]) -> dict[str, Any]:
    """Converts new values of some fields to the dtypes of these fields."""
    cast = lambda new, old: new.astype(old.dtype)
    return {name: jax.tree.map(cast, x, getattr(row, name)) for name, x in changes.items()}


# Fields with numbers and flags of a row that change from pass to pass.
COUNTED = ("cache_length", "committed", "limits", "used", "step", "done", "records", "method")


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
