"""A decoding in progress, held by the host: `Session`, and the compiled programs that advance it.

`request.start` makes a session of a call's arguments; `sample`, `stream`, `infill` and `edit` advance it. The programs
are the decoder's pure functions under `jit`, with the state donated.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Int

from mercury_jax.decode.decode_config import DecodeConfig
from mercury_jax.decode.decoder import prefill, run_limited, run_until_done
from mercury_jax.decode.inputs import Prompt, explain_wrong_params
from mercury_jax.decode.state import Drafter, Frame, Rows, SamplingParams, State, first_state
from mercury_jax.decode.token_stats import LogprobBuffer
from mercury_jax.types import LM, Params


@dataclass(frozen=True)
class Session:
    """A decoding in progress, as a value; `Output.state` of `sample` is one.

    Pass it to `sample(..., state=)` to continue from there. A finished one continues with new text or messages, without
    encoding the old again; one that was stopped by `passes=` continues where it was, with `prompt=None`. It can be
    used more than once.
    """

    config: DecodeConfig = field(repr=False)
    state: State = field(repr=False)
    rows: int  # of the request; further rows of the state only fill its bucket
    mesh: Mesh | None = field(repr=False)  # its devices decode rows of their own; None: all share all passes
    prompts: list[Prompt] = field(repr=False, default_factory=list)
    stops: list[tuple[str, ...]] = field(repr=False, default_factory=list)  # of each row; []: no row has any
    stopped: dict[int, str] = field(
        repr=False, default_factory=dict
    )  # answers of rows that a stop text has ended
    n: int = 1  # answers to each prompt

    @property
    def done(self) -> bool:
        """Whether every row has finished its answer."""
        return bool(np.all(np.asarray(self.state.done)))

    @property
    def tokens(self) -> list[np.ndarray]:
        """Prompt and answer of each row as ids, as far as they are decided."""
        state = self.state
        tokens, committed, end, done = jax.device_get((state.tokens, state.committed, state.end, state.done))
        ends = np.where(done, end, committed)
        return [tokens[i, : ends[i]] for i in range(self.rows)]


def advance(
    lm: LM, session: Session, passes: int | None, watch: np.ndarray | None = None
) -> tuple[Session, Frame | None, jax.Array]:
    """Runs a session, without waiting for the device.

    Args:
        lm: Its parameters are used.
        session: Its state is donated: it cannot be read afterwards.
        passes: Most passes; None: until every row is done.
        watch: Also stop after a pass in which one of these rows [B] has committed tokens.

    Returns:
        The session, frames [passes, B, ...] (None without `passes`), and how many passes were made: a number, or one
        per device that decodes rows of its own.
    """
    program, config = run_program, (session.config,)
    if session.mesh is not None:
        program, config = run_sharded_program, (session.config, session.mesh)
    with explain_wrong_params(lm):
        state, frames, made = program(*config, lm.params, session.state, passes, watch)
    return replace(session, state=state), frames, made


def check_nan(session: Session) -> None:
    """Raises ValueError, naming row and pass, where the logits of a row were NaN.

    Args:
        session: After its passes.

    Raises:
        ValueError: Names row and pass.
    """
    check_nan_steps(np.asarray(session.state.nan_step)[: session.rows])


def check_nan_steps(nan_step: Int[np.ndarray, "B"], name: str = "logits") -> None:
    """Raises ValueError, naming row and pass, where the logits of a row were NaN.

    Args:
        nan_step: The pass of each row; -1: none.
        name: What errors call the logits.

    Raises:
        ValueError: Names row and pass.
    """
    for row in np.flatnonzero(nan_step >= 0):
        raise ValueError(
            f"{name} of row {row} are NaN in denoising pass {nan_step[row]}; allowed: numbers. "
            "The parameters hold NaN, or the arithmetic overflowed: try dtype float32"
        )


class Answers(NamedTuple):
    """The fields of a `State` that an `Output` is made of."""

    tokens: Int[Array, "B S"]
    prompt: Int[Array, "B"]
    committed: Int[Array, "B"]
    end: Int[Array, "B"]
    done: Bool[Array, "B"]
    nfe: Int[Array, "B"]
    evaluated: Int[Array, "B"]
    cache_length: Int[Array, "B"]
    nan_step: Int[Array, "B"]
    logprobs: LogprobBuffer | tuple[()]
    drafter: Any = ()  # forwards, proposed, accepted and nan_step [B] of a model that drafts; (): none


def read_answers(state: State) -> Answers:
    """Returns what an `Output` needs of a state.

    Args:
        state: Of all rows.
    """
    drafter = state.drafter
    if isinstance(drafter, Drafter):
        drafter = (drafter.forwards, drafter.proposed, drafter.accepted, drafter.state.nan_step)
    fields: Any = {name: getattr(state, name) for name in Answers._fields}
    return Answers(**fields | {"drafter": drafter})


class Fork(NamedTuple):
    """Which rows share a prompt, where several answers to each prompt are decoded."""

    first: Int[Array, "P"] | np.ndarray  # a row of each prompt
    source: Int[Array, "B"] | np.ndarray  # the prompt of each row, an index of `first`


def forked_prefill(config: DecodeConfig, params: Params, state: State, fork: Fork, width: int) -> State:
    """Encodes each prompt once, in the first of its rows, and copies its keys to the others.

    Args:
        config: Static sizes.
        params: Of the model.
        state: Of all rows.
        fork: Of the rows.
        width: Tokens per pass.

    Returns:
        The state, with all prompts in the cache.
    """
    prompts = jax.tree.map(lambda x: x[fork.first], state)
    prompts = prefill(config, params, prompts, width, limit=jnp.asarray(state.tokens.shape[1]))
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
    """Decodes a batch from its prompts to its answers, in one program: a call that keeps nothing needs no other.

    Args:
        config: Static sizes.
        width: Tokens of one pass over long prompts; None: the decoder's own steps encode them.
        params: Of the model.
        sampling: Of each row.
        rows: Padded, with all fields set.
        fork: Which rows share a prompt; None: none do.

    Returns:
        The answers, and how many passes were made.
    """
    state = first_state(config, sampling, rows)
    if width is not None and fork is not None:
        state = forked_prefill(config, params, state, fork, width)
    elif width is not None:
        state = prefill(config, params, state, width)
    state, made = run_until_done(config, params, state)
    return read_answers(state), made


def run_session(
    config: DecodeConfig,
    params: Params,
    state: State,
    passes: int | None,
    watch: Bool[Array, "B"] | None = None,
) -> tuple[State, Frame | None, Int[Array, ""]]:
    """Runs for some passes, or until every row is done.

    Args:
        config: Static sizes.
        params: Of the model.
        state: Of all rows.
        passes: Most passes; None for no bound.
        watch: Also stop after a pass in which one of these rows has committed tokens.

    Returns:
        The state, frames [passes, B, ...] (None without `passes`), and how many passes were made.
    """
    if passes is not None:
        return run_limited(config, params, state, passes, watch=watch)
    state, made = run_until_done(config, params, state, watch)
    return state, None, made


# The compiled programs of the public calls. Their states are donated.
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
    """`run_session` with the rows over the mesh's `data` axis: every device makes its own number of passes.

    Args:
        config: Static sizes.
        mesh: With an axis `data`.
        params: Of the model, replicated.
        state: Of all rows; donated.
        passes: Most passes; None for no bound.
        watch: As of `run_session`; a device stops for its own rows only.

    Returns:
        As of `run_session`, with one number of passes per device.
    """
    row, whole = PartitionSpec("data"), PartitionSpec()

    def local(params: Params, state: State, watch: Array | None) -> tuple[State, Frame | None, Array]:
        state, frames, made = run_session(config, params, state, passes, watch)
        return state, frames, jnp.reshape(made, (1,))

    ins, outs = (whole, row, row), (row, PartitionSpec(None, "data"), row)
    spread = jax.shard_map(local, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)
    return spread(params, state, watch)
