"""The decoder: pure functions over one `State`, under every public call and the server alike.

A row's phase follows from its numbers and is never stored: done; else *encode* while `cache_length` is below the
number of committed tokens; else *verify* where a draft waits for its causal pass; else *denoise*. To commit a block is
to write it to `tokens` and raise `committed`: the row encodes it in the next pass, while other rows denoise.

`step` is one pass, `run_until_done` and `run_limited` repeat it. `Decoder` offers them to the user's own `jit`, `vmap`,
`scan`, `grad` and `shard_map`; `session.py` compiles them for the public calls.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Int

from mercury_jax import sharding
from mercury_jax.config import Plan, refuse
from mercury_jax.decode.decode_config import (
    SEES_PADDING,
    DecodeConfig,
    build_config,
    prefill_width,
    slots_for,
)
from mercury_jax.decode.defaults import choose_sampler, complete_sampler
from mercury_jax.decode.denoise import check_parts, denoise
from mercury_jax.decode.drafting import count_drafts, draft_block, idle_frame
from mercury_jax.decode.forward import forward, note_confidence
from mercury_jax.decode.inputs import check_lm, check_logprobs, check_whole, explain_wrong_params
from mercury_jax.decode.lookahead import denoise_ahead, forward_drafts
from mercury_jax.decode.sampler import Sampler, SamplerLike
from mercury_jax.decode.self_speculation import first_tokens, verify
from mercury_jax.decode.state import (
    Drafter,
    Frame,
    Rows,
    State,
    ends_text,
    first_memory,
    first_state,
    sampling_params,
    step_key,
    update_rows,
    window_of,
    window_offset,
)
from mercury_jax.decode.token_stats import slice_at
from mercury_jax.sharding import in_auto_axes, varying, varying_axes
from mercury_jax.types import LM, Key, Params, Pass


def step(config: DecodeConfig, params: Params, state: State) -> tuple[State, Frame]:
    """Runs one forward pass and advances every row by what that row needs next.

    In the same batch some rows encode (they write committed tokens to the KV cache), some denoise (they update their
    canvas), some verify a draft, and finished rows do nothing. All of them share the pass: `used` says how many of
    the W tokens each row contributes, and 0 freezes it.

    Args:
        config: Static sizes; equal configs share one compilation.
        params: Parameters of the model.
        state: Every leaf has the batch axis B first.

    Returns:
        The next state, and a frame that shows each row's window after this pass.
    """
    state = open_canvases(config, state)  # rows that finished a block start the next one
    if config.drafter is not None:
        state = draft_block(step, config, params, state)
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
    run_pass = forward_drafts if config.lookahead else forward
    hidden, leave_one_out, state = run_pass(config, params, state, tokens, used, causal)

    # 3. Denoising rows: statistics of each position, the rule's decision, the stopping criterion, commit.
    denoising = ~encoding & ~verifying & ~state.done
    take_steps = denoise_ahead if config.lookahead else denoise
    if config.drafter is None:
        moved, frame = take_steps(config, params, state, hidden, leave_one_out, denoising)
        moved = note_confidence(config, moved, frame)
    else:  # another model denoises: these rows encode or verify
        moved, frame = state, idle_frame(state)
    if config.speculative:
        logits = config.model.head(params, hidden)
        moved, frame = verify(config, state, logits, verifying, moved, frame)
        if config.drafter is not None:
            moved = count_drafts(state, moved, frame, verifying)
    if config.seeded:
        finished = encoding & (state.cache_length + used == state.committed)
        moved = first_tokens(config, params, hidden, finished, moved)
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


def open_canvases(config: DecodeConfig, state: State) -> State:
    """Lays a new canvas for every row that has encoded all it can and has none open.

    Args:
        config: Static sizes.
        state: Of all rows. The rule and the stopping criterion start with a fresh memory.

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
        memory=jax.vmap(functools.partial(first_memory, config))(state.sampling.sampler, window),
    )
    if config.speculative:  # a committed token alone is a draft of nothing
        fresh["unverified"] = (used <= 1) | (config.drafter is not None)
    return update_rows(state, opening, fresh)


def prefill(
    config: DecodeConfig,
    params: Params,
    state: State,
    width: int,
    limit: Int[Array, ""] | None = None,
    passes: int | None = None,
) -> State:
    """Encodes committed tokens in passes of `width` tokens, where prompts are much longer than a canvas.

    It stops where `config.own_prefill` tokens or fewer are left: `step` encodes these.

    Args:
        config: Static sizes.
        params: Of the model.
        state: Of all rows.
        width: Tokens per pass.
        limit: Encode no further than this position; None: all that can be encoded.
        passes: Make exactly as many, which is differentiable; None: as many as the longest row needs.

    Returns:
        The state with a longer cache.
    """
    if config.drafter is not None and isinstance(state.drafter, Drafter):
        own = state.drafter.state
        if (wide := prefill_width(config.drafter, own.tokens.shape[1])) is not None:
            own = prefill(config.drafter, params.drafter, own, wide)
            state = state._replace(drafter=state.drafter._replace(state=own))
    committed = state.committed if limit is None else jnp.minimum(state.committed, limit)
    if config.seeded:  # `step` encodes the last block, and decides the token after it
        committed = committed - 1

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

    axes = varying_axes((params, state))
    state = varying(state, axes)
    if passes is not None:
        return jax.lax.fori_loop(0, passes, lambda _, s: varying(body(s), axes), state)
    many = lambda state: jnp.any(pending(state) > (config.own_prefill if limit is None else 0))
    return jax.lax.while_loop(many, lambda s: varying(body(s), axes), state)


def run_until_done(
    config: DecodeConfig, params: Params, state: State, watch: Bool[Array, "B"] | None = None
) -> tuple[State, Int[Array, ""]]:
    """Repeats `step` on the device until every row is done.

    Args:
        config: Static sizes.
        params: Of the model.
        state: Of all rows.
        watch: Also stop after a pass in which one of these rows has committed tokens.

    Returns:
        The state, and how many passes were made.
    """
    axes = varying_axes((params, state))

    def body(carry: tuple[Array, State]) -> tuple[Array, State]:
        made, state = carry
        return varying((made + 1, step(config, params, state)[0]), axes)

    begun, start = state.committed, varying((jnp.asarray(0), state), axes)
    made, state = jax.lax.while_loop(lambda carry: unfinished(carry[1], begun, watch), body, start)
    return state, made


def unfinished(state: State, begun: Int[Array, "B"], watch: Bool[Array, "B"] | None) -> Bool[Array, ""]:
    """Returns whether a loop of passes goes on: a row is not done, and no watched row has committed tokens.

    Args:
        state: Of all rows.
        begun: `committed` of each row when the loop began.
        watch: The watched rows; None: none.

    Returns:
        One bool.
    """
    going = ~jnp.all(state.done)
    return going if watch is None else going & ~jnp.any(watch & (state.committed != begun))


def run_limited(
    config: DecodeConfig,
    params: Params,
    state: State,
    passes: int,
    limit: Int[Array, ""] | None = None,
    watch: Bool[Array, "B"] | None = None,
) -> tuple[State, Frame, Int[Array, ""]]:
    """Repeats `step` on the device until every row is done or the passes are used up.

    Args:
        config: Static sizes.
        params: Of the model.
        state: Of all rows.
        passes: Most passes.
        limit: A traced bound on the passes, where it is smaller.
        watch: As of `run_until_done`.

    Returns:
        The state, frames [passes, B, ...], and how many passes were made.
    """
    axes = varying_axes((params, state))
    like = jax.eval_shape(lambda s: step(config, params, s)[1], state)
    empty = jax.tree.map(lambda x: jnp.zeros((passes, *x.shape), x.dtype), like)
    most = passes if limit is None else jnp.minimum(limit, passes)

    def body(carry: tuple[Array, State, Frame]) -> tuple[Array, State, Frame]:
        i, state, frames = carry
        state, frame = step(config, params, state)
        frames = jax.tree.map(lambda all, one: all.at[i].set(one), frames, frame)
        return varying((i + 1, state, frames), axes)

    begun = state.committed
    going = lambda carry: (carry[0] < most) & unfinished(carry[1], begun, watch)
    made, state, frames = jax.lax.while_loop(going, body, varying((jnp.asarray(0), state, empty), axes))
    return state, frames, made


@dataclass(frozen=True, eq=False)
class Decoder:
    """Pure functions that decode a batch of rows; made by `mj.decoder`.

    All of them work under `jit`, `vmap` (over keys, parameters, or both), `scan` and `grad`, and inside of a user's
    `shard_map`. Nothing is compiled or checked on the host but shapes: wrap them in `jax.jit`.

    Attributes:
        config: Static sizes.
        slots: Positions of a row, prompt and answer together.
        steps: Denoising steps of a block; None: as many as it has tokens.
        sampler: How answers are decoded; its parameters are numbers or arrays with one entry per row.
    """

    config: DecodeConfig
    slots: int
    steps: int | None
    sampler: Sampler = field(repr=False)
    lm: LM = field(repr=False)  # without its parameters

    def init(
        self,
        params: Params,
        ids: Int[Array, "B P"],
        lengths: Int[Array, "B"] | None = None,
        *,
        max_tokens: int | Int[Array, "B"] = 0,
        key: Key,
        given: Bool[Array, "B P"] | None = None,
    ) -> State:
        """Makes the state of a batch before its first denoising step, with long prompts encoded.

        Args:
            params: Parameters of the model.
            ids: Prompts, left-aligned; what lies past a row's length is ignored.
            lengths: Tokens of each prompt; None: P.
            max_tokens: Most tokens that are written after a prompt, one number or one per row. Rows end at the
                decoder's `slots` at the latest, where these numbers are traced.
            key: One key, from which each row gets its own; or one key per row [B]. `mj.sample(seed=s)` uses
                `jax.random.key(s + i)` for row i.
            given: Which tokens of the prompts are known; the others are decoded as well (infilling). None: all are.

        Returns:
            The state.

        Raises:
            ValueError: Names the argument of a wrong shape, or prompts and budgets that exceed the decoder's slots.
        """
        _check_arrays(params)
        ids, vocab = _array("ids", ids, "whole numbers [B, P]"), self.config.model.config.vocab
        if ids.ndim != 2 or not jnp.issubdtype(ids.dtype, jnp.integer) or not ids.size:
            raise refuse("ids", f"{ids.dtype}{list(ids.shape)}", "whole numbers [B, P]; [ids] for one prompt")
        if not isinstance(ids, Tracer):
            low, high = np.asarray(ids).min(), np.asarray(ids).max()
            if low < 0 or high >= vocab:
                raise refuse("ids", f"from {low} to {high}", f"ids in 0..{vocab - 1}")
        count, longest = ids.shape
        if longest > self.slots:
            raise refuse("ids", f"{longest} tokens", f"at most the {self.slots} slots of this decoder")
        if not self.config.model.hides_padding:
            numbers = (longest if lengths is None else lengths, max_tokens)
            if any(isinstance(x, Tracer) for x in numbers):
                raise refuse("lengths and max_tokens", numbers, f"known numbers: {SEES_PADDING}")
            ends = np.asarray(numbers[0]) + np.asarray(numbers[1])
            if (ends != self.slots).any():
                allowed = f"slots = {self.slots} in every row: {SEES_PADDING}"
                raise refuse("lengths plus max_tokens", ends.tolist(), allowed)
        lengths = _per_row("lengths", longest if lengths is None else lengths, count, 0, longest)
        room = self.slots - (lengths if isinstance(lengths, Tracer) else int(np.asarray(lengths).max()))
        most = _per_row("max_tokens", max_tokens, count, 0, room)
        keys = _check_key(key, f"a key of jax.random.key, or {count} of them", (), (count,))
        if keys.ndim == 0:
            keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(keys, jnp.arange(count))
        given = jnp.ones(ids.shape, bool) if given is None else jnp.asarray(given)
        if given.shape != ids.shape or given.dtype != jnp.bool_:
            raise refuse("given", f"{given.dtype}{list(given.shape)}", f"bool{list(ids.shape)}")
        with explain_wrong_params(dataclasses.replace(self.lm, params=params), "params"):
            return in_auto_axes(self._init, ids, params, ids, lengths, most, keys, given)

    @property
    def _capacity(self) -> int:
        """Positions of a row's arrays: its slots and a canvas after them, rounded up."""
        config = self.config
        if config.model.config.pattern == "bidirectional":
            return config.slots_after
        return slots_for(self.slots, config.slots_after, config.model.config.context)

    def _check_state(self, state: Any) -> None:
        """Refuses what is no state of this decoder."""
        if not isinstance(state, State):
            raise refuse(
                "state", state, "a state of init; run(params, state, passes=) returns one and frames"
            )
        width = state.canvas.shape[-1]
        if width != self.config.width:
            allowed = f"one of this decoder, whose canvases have {self.config.width}"
            raise refuse("state", f"a state with canvases of {width} positions", allowed)
        slots = state.tokens.shape[-1]
        if slots != self._capacity:
            allowed = f"one of this decoder, whose rows have {self._capacity}"
            raise refuse("state", f"a state with rows of {slots} positions", allowed)
        if (state.logprobs == ()) != (self.config.logprobs is None):
            raise refuse("state", "a state of a decoder with another logprobs=", "one of this decoder")

    def _init(
        self, params: Params, ids: Array, lengths: Array, most: Array, keys: Key, given: Array
    ) -> State:
        """`init` with all arguments set, one entry per row."""
        config, (count, longest), capacity = self.config, ids.shape, self._capacity
        wide = lambda x: jnp.pad(x, [(0, 0), (0, capacity - longest)])
        known = given & (jnp.arange(longest) < lengths[:, None])
        # The first unknown token begins the answer; what precedes it is committed.
        committed = jnp.where(known, longest, jnp.arange(longest)).min(axis=1, initial=longest)
        committed = jnp.minimum(committed, lengths).astype(jnp.int32)
        last = jnp.minimum(lengths + most, self.slots)
        end, start = last, self.sampler.rule.params.get("start")
        if config.variable_length and start is not None:  # such a rule says how short an answer starts
            end = jnp.minimum(committed + jnp.asarray(start, jnp.int32), last)
        none = jnp.zeros((count, capacity), bool)
        rows = Rows(
            tokens=wide(ids), given=wide(known), committed=committed, end=end, seeds=keys, draft=none,
            prompt=committed, max_end=last, answer_budget=jnp.zeros_like(last),
        )  # fmt: skip
        sampling = sampling_params(self.lm, config, self.sampler, self.steps, count)
        check_parts(config, sampling)
        state = first_state(config, sampling, rows)
        width = prefill_width(config, capacity)
        if width is None or longest <= config.own_prefill:
            return state
        return prefill(config, params, state, width, passes=-(-longest // width))

    def step(self, params: Params, state: State) -> tuple[State, Frame]:
        """Makes one forward pass, which advances every row by what that row needs next.

        Args:
            params: Parameters of the model.
            state: From `init`.

        Returns:
            The next state, and a frame that shows each row's window after this pass.

        Raises:
            ValueError: Names the argument that does not fit.
        """
        _check_arrays(params)
        self._check_state(state)
        with explain_wrong_params(dataclasses.replace(self.lm, params=params), "params"):
            return in_auto_axes(functools.partial(step, self.config), state.tokens, params, state)

    @overload
    def run(self, params: Params, state: State, passes: None = None) -> State: ...
    @overload
    def run(self, params: Params, state: State, passes: int) -> tuple[State, Frame]: ...
    def run(self, params: Params, state: State, passes: int | None = None) -> State | tuple[State, Frame]:
        """Makes forward passes until every row is done, or exactly as many as are wanted.

        Args:
            params: Parameters of the model.
            state: From `init`.
            passes: None: until every row is done, by a `while_loop`. Else the number of passes of a `scan`, which is
                differentiable; rows that are done do not change.

        Returns:
            The state; with `passes` also the frames [passes, B, ...].

        Raises:
            ValueError: `passes` is not a whole number from 1 on.
        """
        _check_arrays(params)
        self._check_state(state)
        explained = explain_wrong_params(dataclasses.replace(self.lm, params=params), "params")
        if passes is None:
            until_done = lambda params, state: run_until_done(self.config, params, state)[0]
            with explained:
                return in_auto_axes(until_done, state.tokens, params, state)
        check_whole("passes", passes, 1, 2**31 - 1)

        def scan(params: Params, state: State) -> tuple[State, Frame]:
            axes = varying_axes((params, state))
            one = lambda state, _: varying(step(self.config, params, state), axes)
            return jax.lax.scan(one, varying(state, axes), length=passes)

        frames_too = lambda row: (PartitionSpec(row), PartitionSpec(None, row))
        with explained:
            return in_auto_axes(scan, state.tokens, params, state, out=frames_too)

    def answer(self, state: State) -> tuple[Int[Array, "B S"], Int[Array, "B"]]:
        """Reads the answers off a state.

        Args:
            state: Of any time; a row that is not done shows the blocks that it has finished.

        Returns:
            Ids, left-aligned and padded, and the number of tokens of each answer.

        Raises:
            ValueError: `state` is no state of this decoder.
        """
        self._check_state(state)

        def read(state: State) -> tuple[Array, Array]:
            end = jnp.where(state.done, state.end, jnp.maximum(state.committed, state.prompt))
            lengths, at = end - state.prompt, jnp.arange(state.tokens.shape[1])
            source = jnp.minimum(state.prompt[:, None] + at, at[-1])
            ids = jnp.take_along_axis(state.tokens, source, axis=1)
            return jnp.where(at < lengths[:, None], ids, self.config.model.config.pad), lengths

        return in_auto_axes(read, state.tokens, state._replace(cache=()))

    def fork(self, state: State, rows: Int[Array, "N"], key: Key) -> State:
        """Copies rows of a state. Each copy draws from a fresh key, so that copies of one row differ from then on.

        Args:
            state: Of B rows.
            rows: Which row each copy continues, in 0..B - 1.
            key: The copies' keys are split from it.

        Returns:
            A state of N rows.

        Raises:
            ValueError: Names the argument that does not fit.
        """
        self._check_state(state)
        allowed = f"rows [N] in 0..{state.tokens.shape[0] - 1}"
        found, rows = rows, _array("rows", rows, allowed)
        if rows.ndim != 1 or not rows.size or not jnp.issubdtype(rows.dtype, jnp.integer):
            raise refuse("rows", found, allowed)
        if not isinstance(rows, Tracer):
            low, high = np.asarray(rows).min(), np.asarray(rows).max()
            if low < 0 or high >= state.tokens.shape[0]:
                raise refuse("rows", found, allowed)
        key = _check_key(key, "a key of jax.random.key", ())
        state = jax.tree.map(
            lambda x: x if isinstance(x, jax.Array) else jnp.asarray(x), state
        )  # numpy's too
        copies = in_auto_axes(lambda rows, state: jax.tree.map(lambda x: x[rows], state), rows, rows, state)
        return copies._replace(key=jax.random.split(key, rows.shape[0]))

    def estimate(self, state: State, guess: bool = True) -> tuple[Int[Array, "B S"], Int[Array, "B"]]:
        """Reads off a state what would be emitted if it ended now: finished blocks, and the guess of the open one.

        Args:
            state: Of any time.
            guess: Whether undecided tokens are those that the rule would emit now; else they are the mask id (under
                uniform noise, what the canvas holds).

        Returns:
            Ids, left-aligned and padded, and the number of tokens of each answer. Blocks after the open one are left
            out. Of a row that is done it is the answer.
        """
        estimate = functools.partial(estimate_answers, self.config, guess=guess)
        return in_auto_axes(estimate, state.tokens, state._replace(cache=()))


def estimate_answers(
    config: DecodeConfig, state: State, guess: bool = True
) -> tuple[Int[Array, "B S"], Int[Array, "B"]]:
    """Returns what each row would emit if it ended now; see `Decoder.estimate`.

    Args:
        config: Static sizes.
        state: Of all rows.
        guess: Also show what the open block's last pass would emit; else only what its canvas holds.

    Returns:
        Ids, left-aligned, and the number of tokens of each answer.
    """

    def read(row: State) -> tuple[Array, Array]:
        at = jnp.arange(row.tokens.shape[0])
        # The open block: what its last pass would emit, up to the end of its window. A new canvas holds only noise.
        is_open = ~row.done & (row.step > 0)
        inside = is_open & (at >= row.committed) & (at < window_of(config, row).end) & ~row.given
        shown = row.answer if guess else row.canvas
        shown = shown[jnp.clip(at - row.cache_length, 0, config.width - 1)]
        tokens = jnp.where(inside, shown, row.tokens)
        end = jnp.where(is_open, window_of(config, row).end, jnp.maximum(row.committed, row.prompt))
        end = jnp.where(row.done, row.end, end)
        ends = inside & ends_text(config, tokens, row)
        end = jnp.minimum(end, jnp.min(jnp.where(ends, at, end)))
        ids = jnp.roll(tokens, -row.prompt)
        return jnp.where(at < end - row.prompt, ids, config.model.config.pad), end - row.prompt

    return jax.vmap(read)(state.without_cache())


def _array(name: str, value: Any, allowed: str) -> Array:
    """Converts numbers to an array; refuses what is none."""
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError):  # texts, or lists of several lengths
        raise refuse(name, value, allowed) from None


def _check_arrays(params: Any) -> None:
    """Refuses parameters that are no arrays."""
    if isinstance(params, LM | State):
        raise refuse("params", f"a {type(params).__name__}", "the parameters of the model, such as lm.params")
    if params is None or not all(hasattr(x, "dtype") for x in jax.tree.leaves(params)):
        raise refuse("params", params, "the parameters of the model, such as lm.params")


def _check_key(key: Any, allowed: str, *shapes: tuple[int, ...]) -> Key:
    """Refuses what is no key of these shapes."""
    typed = hasattr(key, "dtype") and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not typed or key.shape not in shapes:
        raise refuse("key", key, allowed)
    return key


def _per_row(name: str, value: Any, rows: int, low: int, high: Any) -> Int[Array, "B"]:
    """Broadcasts one whole number, or one per row, to [B]; checks the range where the numbers are known."""
    allowed = f"a whole number in {low}..{high}, or one for each of the {rows} rows"
    numbers = _array(name, value, allowed)
    if numbers.shape not in ((), (rows,)) or not jnp.issubdtype(numbers.dtype, jnp.integer):
        raise refuse(name, value, allowed)
    known = not isinstance(numbers, Tracer) and not isinstance(high, Tracer)
    if known and not (np.all(low <= np.asarray(numbers)) and np.all(np.asarray(numbers) <= high)):
        raise refuse(name, value, allowed)
    return jnp.broadcast_to(numbers.astype(jnp.int32), (rows,))


def decoder(
    lm: LM,
    sampler: SamplerLike | None = None,
    plan: Plan | None = None,
    *,
    slots: int,
    logprobs: int | None = None,
    trajectory: bool = False,
) -> Decoder:
    """Makes the decoder of a model: the state machine under `sample` as pure JAX functions.

    Args:
        lm: The model. Its parameters are not kept: they are the first argument of the decoder's functions.
        sampler: A rule such as `rules.threshold(0.9)`, or a `Sampler`. None: the model's own. Its parameters may be
            traced.
        plan: Block, steps, and reuse of keys.
        slots: Positions of a row, prompt and answer together.
        logprobs: Keep log-probabilities in the state, with this many alternatives at each token.
        trajectory: Keep in `State.trajectory` in which pass each token was accepted and the log-probability of its
            draw, see `Rollout`.

    Returns:
        The decoder.

    Raises:
        ValueError: Names the argument that does not fit.

    Example:
        >>> decoder = mj.decoder(lm, mj.rules.threshold(0.9), slots=128)
        >>> state = decoder.init(lm.params, ids, max_tokens=64, key=jax.random.key(0))
        >>> ids, lengths = decoder.answer(jax.jit(decoder.run)(lm.params, state))
    """
    check_lm(lm)
    if not isinstance(plan, Plan | None):
        raise refuse("plan", plan, "a Plan, such as mj.Plan(block=32, steps=16), or None")
    slots = check_whole("slots", slots, 2, lm.model.config.context)
    chosen, plan = choose_sampler(lm, sampler, plan or Plan(), None)
    complete = complete_sampler(chosen, lm.corruption, lm.model.config.autoregressive)
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(lm.params)):
        model = lm.model
    else:
        model = sharding.with_mesh(lm.model, sharding.model_parallel_mesh(lm.params))
    if not isinstance(trajectory, bool):
        raise refuse("trajectory", trajectory, "True or False")
    config = build_config(
        lm, complete, plan, model=model, longest=slots, region=slots, logprobs=check_logprobs(logprobs),
        trajectory=trajectory,
    )  # fmt: skip
    return Decoder(config, slots, plan.steps, complete, dataclasses.replace(lm, params=()))
