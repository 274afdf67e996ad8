"""The static side of decoding: what a compiled step closes over, and the first state of a batch.

`DecodeConfig` holds the static sizes and the decoding method. A `Method` supplies the step, and what it needs of the
other functions of the decoder. `build_config.py` chooses both for a call. Lengths are rounded up to a `bucket`, so that
few programs are compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from mercury_jax.config import refuse
from mercury_jax.decode.sampler import LeaveOneOutMasks, Memory, Sampler, broadcast_params, call_part
from mercury_jax.decode.state import ArrayLike, Frame, Limits, Records, Rows, SamplingParams, State
from mercury_jax.decode.token_stats import LogprobBuffer, Trajectory
from mercury_jax.noise import Corruption
from mercury_jax.types import LM, Model, Params

PREFILL = 256  # tokens per prefill pass
QUANTUM = 64  # capacities are multiples of this number; larger ones, of its products with powers of two
SEES_PADDING = "apply takes neither lengths nor attention_mask, so it would see the padding of shorter rows"

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
    vocab_chunk: int = 32768  # ids per chunk, if no part needs all logits (`chunked_vocab.py`)
    logit_bytes: int = 2**29  # up to this size in fp32, one product computes the logits of all chunks

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
        """Slots after a row's last position, where a canvas and the leave-one-out masks after it are written."""
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
        records=Records(
            nfe=zeros,
            nan_step=zeros - 1,
            logprobs=() if config.logprobs is None else logprobs,
            trajectory=trajectory if config.trajectory else (),
        ),
        sampling=sampling._replace(method=()),
        method=config.method.init(config, sampling, rows),
    )


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
