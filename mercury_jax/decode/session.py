"""A decoding in progress, held by the host: `Session`, and the compiled programs that advance it.

`request.start` makes a session of a call's arguments; `sample`, `stream`, `infill`, `edit`, `rollout` and `constrained`
advance it. The programs are the decoder's pure functions under `jit`, with the state donated.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Int

from mercury_jax.decode.inputs import Prompt, explain_wrong_params, refuse_nan
from mercury_jax.decode.passes import SoftTokens, prefill, run_limited, run_until_done, text_only
from mercury_jax.decode.state import DecodeConfig, Frame, Rows, SamplingParams, State, first_state
from mercury_jax.decode.token_stats import LogprobBuffer
from mercury_jax.types import LM, Params


@dataclass(frozen=True)
class Session:
    """A decoding in progress, as a value: the `Output.state` of `sample`.

    Pass it to `sample(..., state=)` to continue. A finished session continues with new text or messages, and does not
    encode the earlier tokens again. A session that was stopped by `passes=` continues where it stopped, with
    `prompt=None`. The same session can be continued several times.

    Attributes:
        config: Static configuration of the decoder.
        state: State of all rows.
        rows: Number of rows of the request; further rows of the state pad it to its bucket.
        mesh: The mesh whose devices decode rows of their own; None: all rows together.
        prompts: Prompts of the rows.
        stops: Stop texts of each row; []: no row has any.
        stopped: Answers of rows that a stop text has ended.
        n: Number of answers to each prompt.
    """

    config: DecodeConfig = field(repr=False)
    state: State = field(repr=False)
    rows: int
    mesh: Mesh | None = field(repr=False)
    prompts: list[Prompt] = field(repr=False, default_factory=list)
    stops: list[tuple[str, ...]] = field(repr=False, default_factory=list)
    stopped: dict[int, str] = field(repr=False, default_factory=dict)
    n: int = 1

    @property
    def done(self) -> bool:
        """Whether every row has finished its answer."""
        return bool(np.all(np.asarray(self.state.done)))

    @property
    def tokens(self) -> list[np.ndarray]:
        """Prompt and answer of each row as ids, as far as they are decided."""
        state = self.state
        tokens, committed, end, done = jax.device_get(
            (state.tokens, state.committed, state.limits.end, state.done)
        )
        ends = np.where(done, end, committed)
        return [tokens[i, : ends[i]] for i in range(self.rows)]


def advance(
    lm: LM, session: Session, passes: int | None, watch: np.ndarray | None = None
) -> tuple[Session, Frame | None, jax.Array]:
    """Runs a session, without waiting for the device.

    Returns:
        The session, frames [passes, B, ...] (None without `passes`), and the number of passes made: a scalar, or with a
        mesh one number per device.
    """
    program, config = run_program, (session.config,)
    if session.mesh is not None:
        program, config = run_sharded_program, (session.config, session.mesh)
    with explain_wrong_params(lm):
        state, frames, made = program(*config, lm.params, session.state, passes, watch)
    return replace(session, state=state), frames, made


def check_nan(session: Session) -> None:
    """Checks that no row of a session has had NaN logits."""
    check_nan_steps(np.asarray(session.state.records.nan_step)[: session.rows])


def check_nan_steps(nan_step: Int[np.ndarray, "B"], name: str = "logits") -> None:
    """Checks that no row has had NaN logits."""
    for row in np.flatnonzero(nan_step >= 0)[:1]:
        refuse_nan(nan_step >= 0, f"denoising pass {nan_step[row]}", name)


class Answers(NamedTuple):
    """The fields of a `State` from which an `Output` is made; without the KV cache."""

    tokens: Int[Array, "B S"]
    prompt: Int[Array, "B"]
    committed: Int[Array, "B"]
    end: Int[Array, "B"]
    done: Bool[Array, "B"]
    nfe: Int[Array, "B"]
    cache_length: Int[Array, "B"]
    nan_step: Int[Array, "B"]
    logprobs: LogprobBuffer | tuple[()]
    method: Mapping[str, Int[Array, "B"]]  # what the method reports


def read_answers(config: DecodeConfig, state: State) -> Answers:
    """Selects the fields of a state from which an `Output` is made."""
    report = config.method.report
    return Answers(
        state.tokens, state.prompt, state.committed, state.limits.end, state.done, state.nfe, state.cache_length,
        state.records.nan_step, state.logprobs, {} if report is None else report(state),
    )  # fmt: skip


class Fork(NamedTuple):
    """The rows that share a prompt, when several answers to each prompt are decoded."""

    first: Int[Array, "P"] | np.ndarray  # one row of each prompt
    source: Int[Array, "B"] | np.ndarray  # the prompt of each row, an index into `first`


def forked_prefill(
    config: DecodeConfig,
    params: Params,
    state: State,
    fork: Fork,
    width: int,
    soft: SoftTokens = text_only,
) -> State:
    """Encodes each prompt once, and copies its KV cache to all rows that share it."""
    # [B] rows -> [P] prompts -> prefill -> [B] rows
    prompts = jax.tree.map(lambda x: x[fork.first], state)
    prompts = prefill(config, params, prompts, width, jnp.asarray(state.tokens.shape[1]), soft=soft)
    cache = jax.tree.map(lambda x: x[fork.source], prompts.cache)
    return state._replace(cache=cache, cache_length=prompts.cache_length[fork.source])


@functools.partial(jax.jit, static_argnums=(0, 1))
def decode_program(
    config: DecodeConfig,
    width: int | None,
    params: Params,
    sampling: SamplingParams,
    rows: Rows,
    fork: Fork | None = None,
) -> tuple[Answers, Int[Array, ""]]:
    """Decodes a batch from its prompts to its answers in a single compiled program.

    This serves calls that do not keep the session: the KV cache never leaves the program.
    """
    state = first_state(config, sampling, rows)
    if width is not None and fork is not None:
        state = forked_prefill(config, params, state, fork, width)
    elif width is not None:
        state = prefill(config, params, state, width)
    state, made = run_until_done(config, params, state)
    return read_answers(config, state), made


def run_session(
    config: DecodeConfig,
    params: Params,
    state: State,
    passes: int | None,
    watch: Bool[Array, "B"] | None = None,
) -> tuple[State, Frame | None, Int[Array, ""]]:
    """Runs for some passes, or until every row is done.

    Returns:
        The state, frames [passes, B, ...] (None without `passes`), and the number of passes made.
    """
    if passes is not None:
        return run_limited(config, params, state, passes, watch=watch)
    state, made = run_until_done(config, params, state, watch)
    return state, None, made


# The compiled programs of the public functions. States are donated: the KV cache is updated in place.
first_state_program = jax.jit(first_state, static_argnums=0)
prefill_program = jax.jit(prefill, static_argnums=(0, 3), donate_argnums=2)
forked_prefill_program = jax.jit(forked_prefill, static_argnums=(0, 4), donate_argnums=2)
run_program = jax.jit(run_session, static_argnums=(0, 3), donate_argnums=2)


@functools.partial(jax.jit, static_argnums=(0, 1, 4), donate_argnums=3)
def run_sharded_program(
    config: DecodeConfig,
    mesh: Mesh,
    params: Params,
    state: State,
    passes: int | None,
    watch: Bool[Array, "B"] | None = None,
) -> tuple[State, Frame | None, Int[Array, "devices"]]:
    """Runs `run_session` with the rows sharded over the `data` axis of a mesh.

    Each device makes as many passes as its own rows need.

    Returns:
        As `run_session`, with one number of passes per device.
    """
    row, whole = PartitionSpec("data"), PartitionSpec()

    def local(params: Params, state: State, watch: Array | None) -> tuple[State, Frame | None, Array]:
        state, frames, made = run_session(config, params, state, passes, watch)
        return state, frames, jnp.reshape(made, (1,))

    ins, outs = (whole, row, row), (row, PartitionSpec(None, "data"), row)
    spread = jax.shard_map(local, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)
    return spread(params, state, watch)
