"""Forward passes: what each row feeds, prefill, and the loops that repeat passes on the device.

The phase of a row is derived from its fields and never stored. The first that applies counts:

    done     nothing is left to write
    encode   fewer slots are filled than `config.encodable(committed)`, the committed tokens whose keys no later token
             changes: the pass writes their keys and values to the KV cache
    denoise  otherwise: the pass updates the canvas

Committing a block writes it to `tokens` and raises `committed`; once its keys are final, the row encodes it in its next
pass, while other rows denoise. In a bidirectional model (LLaDA, Dream) no key is ever final: `encodable` is 0, the
canvas is the whole row, and no row encodes.

`denoise.plain_step` is one pass of plain decoding. Other methods supply a step of their own (`state.Method`), written
with the same functions. `run_until_done` and `run_limited` repeat passes of any method.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.decode.state import DecodeConfig, Frame, State, Step
from mercury_jax.decode.view import step_times, steps_of, window_of, window_offset
from mercury_jax.sharding import varying, varying_axes
from mercury_jax.types import ImageTokens, LeaveOneOut, Params, Pass


class Feed(NamedTuple):
    """What each row feeds to a pass: committed tokens that are not in the KV cache yet, or its canvas."""

    tokens: Int[Array, "B W"]  # at positions cache_length .. cache_length + W - 1
    used: Int[Array, "B"]  # how many of them; 0 freezes the row
    encoding: Bool[Array, "B"]  # rows that write committed tokens to the cache

    def advance(self, state: State) -> State:
        """Moves the end of the cache behind what the pass has encoded.

        Only encoding rows keep what a pass writes to the cache. A denoising row overwrites it in its next pass.
        """
        return state._replace(cache_length=state.cache_length + jnp.where(self.encoding, self.used, 0))


def next_feed(config: DecodeConfig, state: State) -> Feed:
    """Chooses what each row feeds next."""
    encodable = config.encodable(state.committed)
    encoding = (state.cache_length < encodable) & ~state.done
    used = jnp.where(encoding, jnp.minimum(config.width, encodable - state.cache_length), state.used)
    pending = jax.vmap(lambda x, at: jax.lax.dynamic_slice(x, (at,), (config.width,)))
    tokens = jnp.where(encoding[:, None], pending(state.tokens, state.cache_length), state.canvas)
    return Feed(tokens, jnp.where(state.done, 0, used), encoding)


def forward(
    config: DecodeConfig,
    params: Params,
    state: State,
    tokens: Int[Array, "B W"],
    used: Int[Array, "B"],
    causal: Bool[Array, "B"],
) -> tuple[Any, Any, State]:
    """Runs one forward pass for all rows.

    Returns:
        Hidden states of each row's window [B, L, ...]; hidden states of the leave-one-out masks with the same shapes,
        or None; and the state with the cache that this pass has written.
    """
    offset = window_offset(config, state.cache_length, state.committed)
    time, start = times(config, state, causal), state.cache_length
    given = Pass(
        tokens, state.cache, start, used, start + used, causal, state.self_cond, time, length=state.limits.max_end
    )  # fmt: skip
    if not config.leave_one_out:
        hidden, cache = config.model.forward(params, given)
        return slice_rows(hidden, offset, config.window), None, state._replace(cache=cache)
    # One leave-one-out mask for each position of the active block and each editable position before it. columns [B, L]
    # are the indices of these positions in the canvas; -1 where there is no such position.
    assert config.corruption.mask is not None
    columns = offset[:, None] + jnp.arange(config.window)
    at, first = start[:, None] + columns, (state.committed - config.revisable)[:, None]
    inside = (at >= first) & (at < state.committed[:, None] + config.block)
    joint = config.leave_one_out == "joint"
    masks = LeaveOneOut(config.corruption.mask, jnp.where(inside, columns, -1), joint)
    hidden, cache = config.model.forward(params, given._replace(leave_one_out=masks))
    # The pass returns W + L hidden states per row: those of the tokens, then those of the masks.
    own = slice_rows(jax.tree.map(lambda x: x[:, : config.width], hidden), offset, config.window)
    return own, jax.tree.map(lambda x: x[:, config.width :], hidden), state._replace(cache=cache)


def slice_rows(tree: Any, start: Int[Array, "B"], size: int) -> Any:
    """Slices axis 1 of every leaf [B, T, ...] at [start[b] : start[b] + size] of row b.

    Args:
        tree: Tree with leaves [B, T, ...].

    Returns:
        A tree with leaves [B, size, ...].
    """
    one = lambda x, s: jax.lax.dynamic_slice_in_dim(x, s, size)
    return jax.tree.map(lambda x: x if x.shape[1] == size else jax.vmap(one)(x, start), tree)


def times(config: DecodeConfig, state: State, causal: Bool[Array, "B"]) -> Float[Array, "B"] | None:
    """Computes the diffusion time of each row; None for models that take no time.

    Rows that write committed tokens to the cache have time 0, so that their keys do not depend on the pass in which a
    token was accepted. BD3-LM's own sampler instead keeps the keys of a block's last pass, whose time is the smallest.
    """
    if not config.model.config.timed:
        return None
    time = lambda row: step_times(config, row.step, steps_of(window_of(config, row), row))[0]
    return jnp.where(causal, 0.0, jax.vmap(time)(state.without_cache()))


# soft(start [B], used [B], slots [B, T]) -> used [B], and the soft tokens among the tokens of the slots
SoftTokens: TypeAlias = Callable[[Array, Array, Array], tuple[Array, ImageTokens | None]]


def text_only(start: Int[Array, "B"], used: Int[Array, "B"], slots: Int[Array, "B T"]) -> tuple[Array, None]:
    """Is the `soft` of rows without images."""
    return used, None


def prefill(
    config: DecodeConfig,
    params: Params,
    state: State,
    width: int,
    limit: Int[Array, ""] | None = None,
    passes: int | None = None,
    soft: SoftTokens = text_only,
) -> State:
    """Encodes committed tokens in passes of `width` tokens, for prompts that are much longer than a canvas.

    Args:
        limit: Encode only tokens before this position, and then all of them. None: stop when no row has more than
            `config.own_prefill` tokens left, which `step` encodes.
        passes: Number of passes, by a `fori_loop` that is differentiable; None: as many as the longest row needs, by a
            `while_loop`.
        soft: soft(start, used, slots) -> how many tokens of each row the pass encodes, and what replaces the embeddings
            of some of them.
    """
    if config.method.prefill is not None:
        state = config.method.prefill(config, params, state)
    committed = state.committed if limit is None else jnp.minimum(state.committed, limit)
    # the last block is left to `step`, which also predicts the first token of the next block
    if config.model.config.predicts_block_start:
        committed = committed - 1

    def pending(state: State) -> Int[Array, "B"]:
        return (config.encodable(committed) - state.cache_length) * ~state.done

    def body(state: State) -> State:
        # tokens [B, width]: the next tokens of each row, of which the first used[b] are encoded.
        slots = state.cache_length[:, None] + jnp.arange(width)
        used, images = soft(state.cache_length, jnp.minimum(pending(state), width), slots)
        tokens = jnp.take_along_axis(state.tokens, jnp.minimum(slots, state.tokens.shape[1] - 1), axis=1)
        everyone = jnp.ones_like(state.done)
        end = state.cache_length + used
        zeros = lambda x: jnp.zeros((x.shape[0], width, *x.shape[2:]), x.dtype)
        no_self_cond = jax.tree.map(zeros, state.self_cond)
        clean = jnp.zeros(end.shape) if config.model.config.timed else None  # time 0: text without noise
        start, length = state.cache_length, state.limits.max_end
        given = Pass(
            tokens, state.cache, start, used, end, everyone, no_self_cond, clean, images=images, length=length
        )
        _, cache = config.model.forward(params, given)
        return state._replace(cache=cache, cache_length=end)

    axes = varying_axes((params, state))
    state = varying(state, axes)
    if passes is not None:
        return jax.lax.fori_loop(0, passes, lambda _, s: varying(body(s), axes), state)
    many = lambda state: jnp.any(pending(state) > (config.own_prefill if limit is None else 0))
    return jax.lax.while_loop(many, lambda s: varying(body(s), axes), state)


def run_until_done(
    config: DecodeConfig, params: Params, state: State, watch: Bool[Array, "B"] | None = None
) -> tuple[State, Int[Array, ""]]:
    """Repeats passes on the device until every row is done.

    Args:
        watch: Rows [B] whose text the host searches for stop texts: the loop also stops after a pass in which one of
            them commits tokens. None: none.
    """
    axes = varying_axes((params, state))

    def advance(step: Step, carry: tuple[Array, PackedState]) -> tuple[Array, PackedState]:
        made, packed = carry
        state, _ = step(config, params, unpack_state(packed))
        return varying((made + 1, pack_state(state)), axes)

    begun, start = state.committed, varying((jnp.asarray(0), pack_state(state)), axes)
    going = lambda carry: unfinished(unpack_state(carry[1]), begun, watch)
    made, packed = repeat(config, going, advance, start)
    return unpack_state(packed), made


def repeat(
    config: DecodeConfig, going: Callable[[Any], Array], advance: Callable[[Step, Any], Any], carry: Any
) -> Any:
    """Repeats passes on the device, by the loop of the method if it has one.

    Args:
        advance: advance(step, carry) -> the carry after the pass `step`.
        carry: What the loop carries; `carry[1]` is the packed state.
    """
    if config.method.loop is not None:
        return config.method.loop(config, going, advance, carry)
    return jax.lax.while_loop(going, functools.partial(advance, config.method.step), carry)


def alternate(
    going: Callable[[Any], Array],
    wide: Callable[[Any], Array],
    advance: Callable[[Step, Any], Any],
    steps: tuple[Step, Step],
    carry: Any,
) -> Any:
    """Repeats passes of two steps on the device, for the loop of a method.

    Loops inside the loop and no `cond`: XLA updates the KV cache of a loop in place, but copies that of a `cond`.

    Args:
        wide: wide(carry) -> whether the next pass is one of the first step.
    """

    def passes(carry: Any) -> Any:
        first = lambda carry: going(carry) & wide(carry)
        rest = lambda carry: going(carry) & ~wide(carry)
        carry = jax.lax.while_loop(first, functools.partial(advance, steps[0]), carry)
        return jax.lax.while_loop(rest, functools.partial(advance, steps[1]), carry)

    return jax.lax.while_loop(going, passes, carry)


def unfinished(state: State, begun: Int[Array, "B"], watch: Bool[Array, "B"] | None) -> Bool[Array, ""]:
    """Returns whether a decoding loop continues: some row is not done, and no watched row has committed tokens."""
    going = ~jnp.all(state.done)
    return going if watch is None else going & ~jnp.any(watch & (state.committed != begun))


def run_limited(
    config: DecodeConfig,
    params: Params,
    state: State,
    passes: int,
    limit: Int[Array, ""] | None = None,
    watch: Bool[Array, "B"] | None = None,
    after: Callable[[State, State, Frame], State] = lambda before, state, frame: state,
) -> tuple[State, Frame, Int[Array, ""]]:
    """Repeats passes on the device until every row is done, but at most `passes` times, and keeps the frames.

    Returns:
        The state, frames [passes, B, ...] (zeros after the passes made), and the number of passes made.
    """
    axes = varying_axes((params, state))
    like = jax.eval_shape(lambda s: config.method.step(config, params, s)[1], state)
    empty = jax.tree.map(lambda x: jnp.zeros((passes, *x.shape), x.dtype), like)
    most = passes if limit is None else jnp.minimum(limit, passes)

    def advance(step: Step, carry: tuple[Array, PackedState, Frame]) -> tuple[Array, PackedState, Frame]:
        i, packed, frames = carry
        before = unpack_state(packed)
        state, frame = step(config, params, before)
        state = after(before, state, frame)
        frames = jax.tree.map(lambda all, one: all.at[i].set(one), frames, frame)
        return varying((i + 1, pack_state(state), frames), axes)

    begun = state.committed
    going = lambda carry: (carry[0] < most) & unfinished(unpack_state(carry[1]), begun, watch)
    start = varying((jnp.asarray(0), pack_state(state), empty), axes)
    made, packed, frames = repeat(config, going, advance, start)
    return unpack_state(packed), frames, made


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
