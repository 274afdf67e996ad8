"""The records of the decoder: the state that passes change, what is static, and the interface of a decoding method.

The rows of a batch are at different points of their answers. For each row:

    tokens   [S]  the sequence, left-aligned
    canvas   [W]  the positions after the tokens in the KV cache
    window   [L]  the part of the canvas that a rule sees: the active block, and the editable positions before it

`DecodeConfig` holds the static sizes and the decoding method; a `Method` supplies the step, and what it needs of the
functions that it shares with the other methods. `request.py` makes the `Rows` of a call, `build_config.py` its
`DecodeConfig`, `first_state` the `State` of the rows, and `passes.py` advances it.
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
from mercury_jax.config import refuse
from mercury_jax.decode.sampler import LeaveOneOutMasks, Memory, Sampler, broadcast_params, call_part
from mercury_jax.decode.token_stats import (
    LogprobBuffer,
    Trajectory,
    draw_log_prob,
    update_logprobs,
    write_changed,
)
from mercury_jax.noise import Corruption
from mercury_jax.types import LM, Cache, Key, Model, Params, SelfCond, TokenStats, fields_shown

PREFILL = 256  # tokens per prefill pass
QUANTUM = 64  # capacities are multiples of this number; larger ones, of its products with powers of two
SEES_PADDING = "apply takes neither lengths nor attention_mask, so it would see the padding of shorter rows"

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
    """What decoding counts and keeps for the user; no rule reads it."""

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


# --- what is static

Step: TypeAlias = Callable[["DecodeConfig", Params, State], tuple[State, Frame]]  # one pass


def no_slot(config: DecodeConfig, sampling: SamplingParams, rows: Rows) -> tuple[()]:
    """Returns the slot of a method that keeps nothing from pass to pass."""
    return ()


class Method(NamedTuple):
    """A decoding method: what one pass does with the rows of a batch. Hashable, compared by value.

    The last fields say what the method needs of the functions that it shares with the other methods.

    Attributes:
        name: Name for messages.
        step: step(config, params, state) -> (state, frame) makes one forward pass and advances every row.
        init: init(config, sampling, rows) makes `State.method` before the first pass: a pytree that belongs to the
            method, whose leaves have the batch axis first.
        settings: Hashable values that the step reads as `config.method.settings`; equal ones share compiled programs.
        held_back: Number of committed tokens at the end of a row that encoding passes leave to a pass of the method.
        min_steps: Smallest number of denoising steps of a block; 0: the plan's, or one per token.
        position_draws: Whether a token is drawn with the uniform of its position, the same in every pass. The logits of
            the whole vocabulary are then computed at once.
        margin: Slots after a canvas that the passes of the method also write.
        prefill: prefill(config, params, state) encodes what the method itself keeps of long prompts. None: nothing.
        loop: loop(config, going, advance, carry) repeats passes; see `passes.repeat`. None: a `while_loop` of `step`.
        report: report(state) -> {name: numbers [B]}, which `Output` shows beside its own counts. None: nothing.
    """

    name: str
    step: Step
    init: Callable[[DecodeConfig, SamplingParams, Rows], Any] = no_slot
    settings: Any = None
    held_back: int = 0
    min_steps: int = 0
    position_draws: bool = False
    margin: int = 0
    prefill: Callable[[DecodeConfig, Params, State], State] | None = None
    loop: Callable[[DecodeConfig, Callable[[Any], Array], Callable[[Step, Any], Any], Any], Any] | None = None
    report: Callable[[State], Mapping[str, Array]] | None = None

    def __repr__(self) -> str:
        return f"Method({self.name})"


class Predictions(NamedTuple):
    """What a pass predicts for the windows of all rows."""

    seen: Any  # the rows' `view.Observation`, with the logits in its view if they are kept
    stats: TokenStats  # [B, L]
    raw: Float[Array, "B L V"] | None  # logits as the model computes them; None: not kept
    self_cond: SelfCond


# predict(config, params, state, hidden, seen) -> Predictions
Predict: TypeAlias = Callable[["DecodeConfig", Params, State, Any, Any], Predictions]


class DecodeConfig(NamedTuple):
    """What a compiled step closes over. Hashable: equal configs share one compilation."""

    model: Model
    corruption: Corruption
    width: int  # W, positions of a canvas
    block: int  # positions of the active block, at most `width`
    method: Method  # the step, and what it needs of the other functions
    forbidden: tuple[int, ...] = ()  # ids that are never emitted, in addition to `corruption.forbidden`
    revisable: int = 0  # positions before the active block that stay editable
    # a pass feeds additional masks after the canvas, one per window position
    leave_one_out: LeaveOneOutMasks = False
    variable_length: bool = False  # the rule inserts and deletes positions
    # alternatives per token for which log-probabilities are kept; None: keep none
    logprobs: int | None = None
    times: tuple[float, ...] | None = None  # times t of a block's steps and its end; None: evenly from 1 to 0
    trajectory: bool = False  # record when each token was accepted, and the log-probability of its draw
    predict: Predict | None = None  # from hidden states to token statistics; None: `denoise.predict_tokens`

    @property
    def window(self) -> int:
        """L, the number of positions that a rule sees."""
        return min(self.width, self.block + self.revisable)

    @property
    def own_prefill(self) -> int:
        """The largest number of prompt tokens that `step` encodes; `prefill` encodes the rest."""
        # `step` encodes W tokens per pass, so that this rest takes two passes.
        return 2 * self.width

    @property
    def never_emitted(self) -> tuple[int, ...]:
        """Ids that may not occur in an answer."""
        return (*self.corruption.forbidden, *self.forbidden)

    @property
    def slots_after(self) -> int:
        """Slots after the last encoded token: a canvas, the leave-one-out masks after it, and the method's margin.

        These are all slots of a row of a bidirectional model, whose canvas begins at its first position.
        """
        return self.width + (self.window if self.leave_one_out else 0) + self.method.margin

    def encodable(self, committed: Int[Array, "B"]) -> Int[Array, "B"]:
        """Computes how many tokens of each row's prefix encoding passes write to the cache."""
        ready, held_back = self.model.encodable(committed), self.method.held_back
        return jnp.minimum(ready, committed - held_back) if held_back else ready


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
    keys = jnp.issubdtype(seeds.dtype, jax.dtypes.prng_key)
    return State(
        tokens=int32(rows.tokens), given=jnp.asarray(rows.given), draft=jnp.asarray(rows.draft),
        prompt=int32(rows.prompt), cache_length=zeros, committed=committed,
        limits=Limits(end, int32(rows.max_end), int32(rows.answer_budget)),
        cache=config.model.empty_cache(count, slots),
        canvas=blank, answer=blank, frozen=jnp.zeros((count, config.width), bool), used=zeros, step=zeros - 1,
        self_cond=jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self_cond),
        memory=jax.vmap(functools.partial(first_memory, config))(sampling.sampler, blank[:, : config.window]),
        key=seeds if keys else jax.vmap(jax.random.key)(seeds),
        done=committed >= end,
        records=Records(
            zeros, zeros - 1, () if config.logprobs is None else logprobs, trajectory if config.trajectory else ()
        ),
        sampling=sampling._replace(method=()),
        method=config.method.init(config, sampling, rows),
    )  # fmt: skip


def first_memory(config: DecodeConfig, sampler: Sampler, canvas: Int[Array, "L"]) -> tuple[Memory, Memory]:
    """Makes the memories of the rule and of the stopping criterion for one row, at the start of a block."""
    rule, stopping, vocab = sampler.rule, sampler.stopping, config.model.config.vocab
    assert stopping is not None
    memory = call_part(f"init of the rule {rule.name}", rule.init, canvas, vocab)
    return memory, call_part(f"init of the stopping criterion {stopping.name}", stopping.init, canvas, vocab)


def sampling_params(
    lm: LM, config: DecodeConfig, sampler: Sampler, steps: int | ArrayLike | None, rows: int, n: int = 1
) -> SamplingParams:
    """Makes the sampling parameters of rows that do not think and end with the model's end-of-text token.

    Args:
        sampler: A sampler completed by `defaults.complete_sampler`. Its parameters are numbers, or arrays with one
            entry per prompt.
    """
    ids: Any = lambda x: np.full((rows,), x, np.int32)  # numpy, whose dispatch costs the host less than jnp's
    most = np.maximum(0 if steps is None else steps, config.method.min_steps)
    params = broadcast_params(sampler._replace(speculate=None), rows, n)
    most = ids(np.repeat(most, n) if most.ndim else most)
    return SamplingParams(params, most, ids(lm.model.config.eos), ids(-1))


def check_equal_lengths(name: str, lengths: Any) -> None:
    """Raises ValueError unless all rows have the same length, for a model that would see the padding of shorter rows.

    Args:
        lengths: Length of each row, prompt and answer together.
    """
    found = sorted({int(n) for n in np.asarray(lengths)})
    if len(found) > 1:
        allowed = f"one length in a call: {SEES_PADDING}"
        raise refuse(f"lengths of the {name}", found, allowed)


def bucket(size: int, quantum: int = QUANTUM) -> int:
    """Rounds a size up to a capacity: multiples of `quantum` up to 8 quanta, then 4 capacities per doubling.

    Up to 8 quanta less than a quantum is wasted; beyond, less than a quarter of `size`.
    """
    step = quantum
    while step * 8 < size:
        step *= 2
    return -(-size // step) * step


def slots_for(tokens: int, behind: int, context: int, quantum: int = 2 * QUANTUM) -> int:
    """Computes the number of slots S of a row's tokens and KV cache: a bucket, bounded by the model's context.

    Without the bound, a row that fills a context of 2 ** k tokens would take the next bucket, a quarter more slots.

    Args:
        quantum: Smallest number of slots, and the step between buckets. The default is coarse: for a call, an empty
            slot costs little, and compiling another program costs seconds. A server compiles its programs in advance.
    """
    most = -(-(context + behind) // QUANTUM) * QUANTUM
    return min(bucket(tokens + behind, quantum), max(most, tokens + behind))


def prefill_width(config: DecodeConfig, slots: int, always: bool = False) -> int | None:
    """Chooses the number of tokens per prefill pass.

    It depends on the slots and not on the prompts, so that prompts of all lengths share a program.
    """
    short = slots <= 4 * config.width and not always
    if config.model.config.pattern == "bidirectional" or short:
        return None
    # Whole blocks: in a block-causal model the tokens of a block attend to each other, so that one pass must hold all.
    quantum = config.width if config.model.config.pattern == "block_causal" else 1
    return -(-min(PREFILL, slots // 2) // quantum) * quantum
