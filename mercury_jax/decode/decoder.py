"""The decoder: pure functions over one `State`, under every public call and the server alike.

A row's phase follows from its numbers and is never stored: done; else *encode* while `cache_length` is below the
number of committed tokens; else *verify* where a draft waits for its causal pass; else *denoise*. To commit a block is
to write it to `tokens` and raise `committed`: the row encodes it in the next pass, while other rows denoise.

`step` is one pass. `run` repeats it on the device. `Session` is a decoding in progress; `advance` runs it for some
passes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Int

from mercury_jax.decode.denoise import denoise
from mercury_jax.decode.forward import forward, note_confidence
from mercury_jax.decode.inputs import Prompt, explain_wrong_params
from mercury_jax.decode.self_speculation import verify
from mercury_jax.decode.state import (
    DecodeConfig,
    Frame,
    SamplingParams,
    State,
    first_memory,
    first_state,
    step_key,
    update_rows,
    window_offset,
)
from mercury_jax.decode.token_stats import slice_at
from mercury_jax.types import LM, Params, Pass


def step(config: DecodeConfig, params: Params, state: State, sampling: SamplingParams) -> tuple[State, Frame]:
    """Runs one forward pass and advances every row by what that row needs next.

    In the same batch some rows encode (they write committed tokens to the KV cache), some denoise (they update their
    canvas), some verify a draft, and finished rows do nothing. All of them share the pass: `used` says how many of
    the W tokens each row contributes, and 0 freezes it.

    Args:
        config: Static sizes; equal configs share one compilation.
        params: Parameters of the model.
        state: Every leaf has the batch axis B first.
        sampling: Sampling parameters of each row.

    Returns:
        The next state, and a frame that shows each row's window after this pass.
    """
    state = open_canvases(config, state, sampling)  # rows that finished a block start the next one
    encodable = encodable_tokens(config, state.committed)
    encoding = (state.cache_length < encodable) & ~state.done  # [B]
    verifying = state.unverified & ~state.done  # [B]

    # 1. What each row feeds: committed tokens to encode, or its canvas. tokens [B, W], used [B]
    used = jnp.where(encoding, jnp.minimum(config.width, encodable - state.cache_length), state.used)
    used = jnp.where(state.done, 0, used)
    pending = jax.vmap(lambda x, at: jax.lax.dynamic_slice(x, (at,), (config.width,)))
    tokens = jnp.where(encoding[:, None], pending(state.tokens, state.cache_length), state.canvas)
    if config.speculative:
        tokens = jnp.where(verifying[:, None], state.answer, tokens)

    # 2. One pass for all rows. hidden is opaque, its leaves are [B, L, ...].
    causal = encoding | verifying
    hidden, leave_one_out, state = forward(config, params, state, tokens, used, causal, sampling)

    # 3. Denoising rows: statistics of each position, the rule's decision, the stopping criterion, commit.
    denoising = ~encoding & ~verifying & ~state.done
    moved, frame = denoise(config, params, state, sampling, hidden, leave_one_out, denoising)
    moved = note_confidence(config, moved, frame)
    if config.speculative:
        logits = config.model.head(params, hidden)
        moved, frame = verify(config, state, sampling, logits, verifying, moved, frame)
    return moved._replace(cache_length=moved.cache_length + jnp.where(encoding, used, 0)), frame


def encodable_tokens(config: DecodeConfig, committed: Int[Array, "B"]) -> Int[Array, "B"]:
    """Returns how many committed tokens an encoding pass writes to the cache; a verifying pass encodes the last itself.

    Args:
        config: Its model knows which tokens may be encoded.
        committed: Tokens of each row's prefix that are decided.

    Returns:
        Tokens of each row's prefix [B].
    """
    ready = config.model.encodable(committed)
    return jnp.minimum(ready, committed - 1) if config.speculative else ready


def open_canvases(config: DecodeConfig, state: State, sampling: SamplingParams) -> State:
    """Lays a new canvas for every row that has encoded all it can and has none open.

    Args:
        config: Static sizes.
        state: Of all rows.
        sampling: Of each row; the rule and the stopping criterion start with a fresh memory.

    Returns:
        The state with new canvases: noise, but for committed, given and draft tokens.
    """
    ready = encodable_tokens(config, state.committed)
    opening = (state.cache_length >= ready) & ~state.done & (state.step < 0)

    def lay(row: State) -> tuple[Array, Array, Array]:
        at = row.cache_length + jnp.arange(config.width)
        here = lambda x: jax.lax.dynamic_slice(x, (row.cache_length,), (config.width,))
        frozen = (at < row.committed - config.revisable) | here(row.given)
        ones = jnp.ones((config.width,), jnp.float32)
        noise = config.corruption.prior(step_key(row.key, row.committed, jnp.asarray(-1)), ones)
        decided = frozen | (at < row.committed) | here(row.draft)
        canvas = jnp.where(decided, here(row.tokens), noise).astype(jnp.int32)
        offset = window_offset(config, row.cache_length, row.committed)
        return canvas, frozen, slice_at(canvas, offset, config.window)

    canvas, frozen, window = jax.vmap(lay)(state.without_cache())
    used = jnp.minimum(config.width, state.end - state.cache_length)
    fresh: dict[str, Any] = dict(
        canvas=canvas,
        answer=canvas,
        frozen=frozen,
        used=used,
        step=jnp.zeros_like(state.step),
        self_cond=jax.tree.map(jnp.zeros_like, state.self_cond),
        memory=jax.vmap(functools.partial(first_memory, config))(sampling.sampler, window),
    )
    if config.speculative:  # a committed token alone is a draft of nothing
        fresh["unverified"] = used <= 1
    return update_rows(state, opening, fresh)


def prefill(
    config: DecodeConfig, params: Params, state: State, width: int, limit: Int[Array, ""] | None = None
) -> State:
    """Encodes committed tokens in passes of `width` tokens, for prompts much longer than a canvas.

    Args:
        config: Static sizes.
        params: Of the model.
        state: Of all rows.
        width: Tokens per pass.
        limit: Encode no further than this position; None: all that can be encoded.

    Returns:
        The state with a longer cache.
    """
    committed = state.committed if limit is None else jnp.minimum(state.committed, limit)

    def pending(state: State) -> Int[Array, "B"]:
        return (encodable_tokens(config, committed) - state.cache_length) * ~state.done

    def body(state: State) -> State:
        used = jnp.minimum(pending(state), width)
        # tokens [B, width]: the next ones of each row; `used` says how many of them count.
        slots = state.cache_length[:, None] + jnp.arange(width)
        tokens = jnp.take_along_axis(state.tokens, jnp.minimum(slots, state.tokens.shape[1] - 1), axis=1)
        everyone = jnp.ones_like(state.done)
        end = state.cache_length + used
        zeros = lambda x: jnp.zeros((x.shape[0], width, *x.shape[2:]), x.dtype)
        no_self_cond = jax.tree.map(zeros, state.self_cond)
        clean = jnp.zeros(end.shape) if config.model.config.timed else None
        given = Pass(tokens, state.cache, state.cache_length, used, end, everyone, no_self_cond, clean)
        _, cache = config.model.forward(params, given)
        return state._replace(cache=cache, cache_length=end)

    return jax.lax.while_loop(lambda s: jnp.any(pending(s) > 0), body, state)


def run(
    config: DecodeConfig,
    params: Params,
    state: State,
    sampling: SamplingParams,
    passes: int | None,
    limit: Int[Array, ""] | None = None,
) -> tuple[State, Frame | None, Int[Array, ""]]:
    """Repeats `step` on the device until every row is done or the passes are used up.

    Args:
        config: Static sizes.
        params: Of the model.
        state: Of all rows.
        sampling: Of each row.
        passes: Most passes; None for no bound.
        limit: A traced bound on the passes, where it is smaller.

    Returns:
        The state, frames [passes, B, ...] (None without `passes`), and how many passes were made.
    """
    if passes is None:
        loop = lambda carry: (carry[0] + 1, step(config, params, carry[1], sampling)[0])
        made, state = jax.lax.while_loop(lambda carry: ~jnp.all(carry[1].done), loop, (jnp.asarray(0), state))
        return state, None, made
    like = jax.eval_shape(lambda s: step(config, params, s, sampling)[1], state)
    empty = jax.tree.map(lambda x: jnp.zeros((passes, *x.shape), x.dtype), like)

    def body(carry: tuple[Array, State, Frame]) -> tuple[Array, State, Frame]:
        i, state, frames = carry
        state, frame = step(config, params, state, sampling)
        return i + 1, state, jax.tree.map(lambda all, one: all.at[i].set(one), frames, frame)

    most = passes if limit is None else jnp.minimum(limit, passes)
    unfinished = lambda carry: (carry[0] < most) & ~jnp.all(carry[1].done)
    made, state, frames = jax.lax.while_loop(unfinished, body, (jnp.asarray(0), state, empty))
    return state, frames, made


@dataclass(frozen=True)
class Session:
    """A decoding in progress, as a value; `Output.state` of `sample` is one.

    Pass it to `sample(..., state=)` to continue from there. A finished one continues with new text or messages, without
    encoding the old again; one that was stopped by `passes=` continues where it was, with `prompt=None`. It can be
    used more than once.
    """

    config: DecodeConfig = field(repr=False)
    sampling: SamplingParams = field(repr=False)
    state: State = field(repr=False)
    rows: int  # of the request; further rows of the state only fill its bucket
    mesh: Mesh | None = field(repr=False)  # its devices decode rows of their own; None: all share all passes
    prompts: list[Prompt] = field(repr=False, default_factory=list)

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


def advance(lm: LM, session: Session, passes: int | None) -> tuple[Session, Frame | None, jax.Array]:
    """Runs a session, without waiting for the device.

    Args:
        lm: Its parameters are used.
        session: Its state is donated: it cannot be read afterwards.
        passes: Most passes; None: until every row is done.

    Returns:
        The session, frames [passes, B, ...] (None without `passes`), and how many passes were made: a number, or one
        per device that decodes rows of its own.
    """
    program, config = run_program, (session.config,)
    if session.mesh is not None:
        program, config = run_sharded_program, (session.config, session.mesh)
    with explain_wrong_params(lm):
        state, frames, made = program(*config, lm.params, session.state, session.sampling, passes)
    return replace(session, state=state), frames, made


def check_nan(session: Session) -> None:
    """Raises ValueError, naming row and pass, where the logits of a row were NaN.

    Args:
        session: After its passes.

    Raises:
        ValueError: Names row and pass.
    """
    nan_step = np.asarray(session.state.nan_step)[: session.rows]
    for row in np.flatnonzero(nan_step >= 0):
        raise ValueError(
            f"logits of row {row} are NaN in denoising pass {nan_step[row]}; allowed: numbers. "
            "The parameters hold NaN, or the arithmetic overflowed: try dtype float32"
        )


# The compiled programs of the public calls. Their states are donated.
first_state_program = jax.jit(first_state, static_argnums=0)
prefill_program = jax.jit(prefill, static_argnums=(0, 3), donate_argnums=2)
run_program = jax.jit(run, static_argnums=(0, 4), donate_argnums=2)


@functools.partial(jax.jit, static_argnums=(0, 1, 5), donate_argnums=3)
def run_sharded_program(
    config: DecodeConfig,
    mesh: Mesh,
    params: Params,
    state: State,
    sampling: SamplingParams,
    passes: int | None,
) -> tuple[State, Frame | None, Int[Array, "devices"]]:
    """`run` with the rows over the mesh's `data` axis: every device makes its own number of passes.

    Args:
        config: Static sizes.
        mesh: With an axis `data`.
        params: Of the model, replicated.
        state: Of all rows; donated.
        sampling: Of each row.
        passes: Most passes; None for no bound.

    Returns:
        As of `run`, with one number of passes per device.
    """
    row, whole = PartitionSpec("data"), PartitionSpec()

    def local(params: Params, state: State, sampling: SamplingParams) -> tuple[State, Frame | None, Array]:
        state, frames, made = run(config, params, state, sampling, passes)
        return state, frames, jnp.reshape(made, (1,))

    ins, outs = (whole, row, row), (row, PartitionSpec(None, "data"), row)
    spread = jax.shard_map(local, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)
    return spread(params, state, sampling)
