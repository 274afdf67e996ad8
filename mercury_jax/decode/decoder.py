"""`mj.decoder`: the decoder as pure functions, for a user's own `jit`, `vmap`, `scan`, `grad` and `shard_map`.

`Decoder` checks arguments and calls the functions of `passes.py`, which every other public call and the server use
too; `session.py` compiles them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
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
from mercury_jax.decode.build_config import build_config, check_functions
from mercury_jax.decode.defaults import choose_sampler, complete_sampler
from mercury_jax.decode.inputs import check_lm, check_logprobs, check_whole, explain_wrong_params
from mercury_jax.decode.passes import prefill, run_until_done
from mercury_jax.decode.sampler import Sampler, SamplerLike
from mercury_jax.decode.state import (
    SEES_PADDING,
    DecodeConfig,
    Frame,
    Rows,
    State,
    first_state,
    prefill_width,
    sampling_params,
    slots_for,
)
from mercury_jax.decode.view import ends_text, window_of
from mercury_jax.sharding import in_auto_axes, varying, varying_axes
from mercury_jax.types import LM, Key, Params


@dataclass(frozen=True, eq=False)
class Decoder:
    """Pure functions that decode a batch of rows; made by `mj.decoder`.

    All methods work under `jit`, `vmap` (over keys, parameters, or both), `scan` and `grad`, and inside a user's
    `shard_map`. They are not compiled: wrap them in `jax.jit`. Under a transformation only shapes and dtypes are
    checked, since the values are traced.

    Attributes:
        config: Static sizes.
        slots: Maximum tokens of a row, prompt and answer together.
        steps: Denoising steps per block; None: one per token.
        sampler: The sampler; its parameters are numbers, or arrays with one entry per row.
        lm: The model without its parameters, which are the first argument of `init`, `step` and `run`.
    """

    config: DecodeConfig
    slots: int
    steps: int | None
    sampler: Sampler = field(repr=False)
    lm: LM = field(repr=False)

    def __repr__(self) -> str:
        steps = "one step per token" if self.steps is None else f"{self.steps} steps per block"
        return f"Decoder({self.sampler.rule.name}, {steps}, {self.slots} slots, {self.lm!r})"

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
        """Makes the state of a batch before its first denoising step, and prefills long prompts.

        Args:
            params: Parameters of the model.
            ids: Prompts, left-aligned; ids past the length of a row are ignored.
            lengths: Length of each prompt; None: P for all.
            max_tokens: Maximum number of tokens after a prompt, one number or one per row. Traced numbers cannot be
                checked: rows are then cut at the decoder's `slots`.
            key: One key, into which the row index is folded; or one key per row [B]. `mj.sample(seed=s)` uses
                `jax.random.key(s + i)` for row i.
            given: False at prompt tokens that are to be decoded as well (infilling). None: all tokens are given.

        Returns:
            The state of B rows.

        Raises:
            ValueError: Names an argument of the wrong shape, or prompts and budgets that exceed the decoder's slots.
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
        """Size S of a row's arrays: its slots and those of a canvas after them, rounded up; bidirectional: a canvas."""
        config = self.config
        if config.model.config.pattern == "bidirectional":
            return config.slots_after
        return slots_for(self.slots, config.slots_after, config.model.config.context)

    def _check_state(self, state: Any) -> None:
        """Raises ValueError unless `state` comes from a decoder with the same canvas, slots and `logprobs`."""
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
        """Computes `init` for checked arguments, all of them arrays with the batch axis first."""
        config, (count, longest), capacity = self.config, ids.shape, self._capacity
        wide = lambda x: jnp.pad(x, [(0, 0), (0, capacity - longest)])
        known = given & (jnp.arange(longest) < lengths[:, None])
        # The answer begins at the first token that is not given; the tokens before it are committed.
        committed = jnp.where(known, longest, jnp.arange(longest)).min(axis=1, initial=longest)
        committed = jnp.minimum(committed, lengths).astype(jnp.int32)
        last = jnp.minimum(lengths + most, self.slots)
        end, start = last, self.sampler.rule.params.get("start")
        # A rule of variable length starts with a short answer, which it grows up to `max_end`.
        if config.variable_length and start is not None:
            end = jnp.minimum(committed + jnp.asarray(start, jnp.int32), last)
        none = jnp.zeros((count, capacity), bool)
        rows = Rows(
            tokens=wide(ids), given=wide(known), committed=committed, end=end, seeds=keys, draft=none,
            prompt=committed, max_end=last, answer_budget=jnp.zeros_like(last),
        )  # fmt: skip
        sampling = sampling_params(self.lm, config, self.sampler, self.steps, count)
        check_functions(config, sampling, params)
        state = first_state(config, sampling, rows)
        width = prefill_width(config, capacity)
        if width is None or longest <= config.own_prefill:
            return state
        return prefill(config, params, state, width, passes=-(-longest // width))

    def step(self, params: Params, state: State) -> tuple[State, Frame]:
        """Runs one forward pass and advances every row by what that row needs next.

        Args:
            params: Parameters of the model.
            state: A state from `init`, `step`, `run` or `fork`.

        Returns:
            The next state, and a frame that shows each row's window after this pass.

        Raises:
            ValueError: Names the argument that does not fit.
        """
        return self._run(functools.partial(self.config.method.step, self.config), params, state)

    def _run(self, function: Callable[..., Any], params: Params, state: State, **more: Any) -> Any:
        """Calls function(params, state), after checking both."""
        _check_arrays(params)
        self._check_state(state)
        with explain_wrong_params(dataclasses.replace(self.lm, params=params), "params"):
            return in_auto_axes(function, state.tokens, params, state, **more)

    @overload
    def run(self, params: Params, state: State, passes: None = None) -> State: ...
    @overload
    def run(self, params: Params, state: State, passes: int) -> tuple[State, Frame]: ...
    def run(self, params: Params, state: State, passes: int | None = None) -> State | tuple[State, Frame]:
        """Runs forward passes until every row is done, or exactly `passes` of them.

        Args:
            params: Parameters of the model.
            state: A state from `init`, `step`, `run` or `fork`.
            passes: None: until every row is done, by a `while_loop`. Otherwise the length of a `scan`, which is
                differentiable; rows that are done do not change.

        Returns:
            The state; with `passes` also the frames, each leaf [passes, B, ...].

        Raises:
            ValueError: `passes` is not a whole number from 1 on.
        """
        if passes is None:
            return self._run(
                lambda params, state: run_until_done(self.config, params, state)[0], params, state
            )
        check_whole("passes", passes, 1, 2**31 - 1)

        def scan(params: Params, state: State) -> tuple[State, Frame]:
            axes = varying_axes((params, state))
            one = lambda state, _: varying(self.config.method.step(self.config, params, state), axes)
            return jax.lax.scan(one, varying(state, axes), length=passes)

        frames_too = lambda row: (PartitionSpec(row), PartitionSpec(None, row))
        return self._run(scan, params, state, out=frames_too)

    def answer(self, state: State) -> tuple[Int[Array, "B S"], Int[Array, "B"]]:
        """Extracts the answers from a state.

        Args:
            state: A state after any number of passes; a row that is not done shows the blocks that it has committed.

        Returns:
            Ids [B, S], left-aligned and padded with the model's padding id, and the length of each answer [B].

        Raises:
            ValueError: `state` is no state of this decoder.
        """
        self._check_state(state)

        def read(state: State) -> tuple[Array, Array]:
            end = jnp.where(state.done, state.limits.end, jnp.maximum(state.committed, state.prompt))
            lengths, at = end - state.prompt, jnp.arange(state.tokens.shape[1])
            source = jnp.minimum(state.prompt[:, None] + at, at[-1])
            ids = jnp.take_along_axis(state.tokens, source, axis=1)
            return jnp.where(at < lengths[:, None], ids, self.config.model.config.pad), lengths

        return in_auto_axes(read, state.tokens, state._replace(cache=()))

    def fork(self, state: State, rows: Int[Array, "N"], key: Key) -> State:
        """Copies rows of a state, each with a new key, so that copies of the same row differ from then on.

        Args:
            state: State of B rows.
            rows: Index of the row that each of the N copies continues, in 0..B - 1.
            key: Key that is split into the N keys of the copies.

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
        state = jax.tree.map(jnp.asarray, state)  # a state of numpy arrays too
        copies = in_auto_axes(lambda rows, state: jax.tree.map(lambda x: x[rows], state), rows, rows, state)
        return copies._replace(key=jax.random.split(key, rows.shape[0]))

    def estimate(self, state: State, guess: bool = True) -> tuple[Int[Array, "B S"], Int[Array, "B"]]:
        """Estimates the answers of a state: committed blocks, and the current guess of the active block.

        Args:
            state: A state after any number of passes.
            guess: True: undecided tokens are those that the rule would emit now. False: they are what the canvas
                holds, which is the mask id or, under uniform noise, a random token.

        Returns:
            Ids [B, S], left-aligned and padded, and their number per row [B]. Blocks after the active one are not
            included. For a row that is done this is its answer.
        """
        estimate = functools.partial(estimate_answers, self.config, guess=guess)
        return in_auto_axes(estimate, state.tokens, state._replace(cache=()))


def estimate_answers(
    config: DecodeConfig, state: State, guess: bool = True
) -> tuple[Int[Array, "B S"], Int[Array, "B"]]:
    """Returns what each row would emit if it ended now; see `Decoder.estimate`.

    Returns:
        Ids [B, S], left-aligned and padded, and the number of tokens of each answer [B].
    """

    def read(row: State) -> tuple[Array, Array]:
        at = jnp.arange(row.tokens.shape[0])
        # The active block, up to the end of its window. Before its first step the canvas is pure noise and not shown.
        is_open = ~row.done & (row.step > 0)
        inside = is_open & (at >= row.committed) & (at < window_of(config, row).end) & ~row.given
        shown = row.answer if guess else row.canvas
        shown = shown[jnp.clip(at - row.cache_length, 0, config.width - 1)]
        tokens = jnp.where(inside, shown, row.tokens)
        end = jnp.where(is_open, window_of(config, row).end, jnp.maximum(row.committed, row.prompt))
        end = jnp.where(row.done, row.limits.end, end)
        # A guessed end-of-text token ends the estimate as it would end the answer.
        ends = inside & ends_text(config, tokens, row)
        end = jnp.minimum(end, jnp.min(jnp.where(ends, at, end)))
        ids = jnp.roll(tokens, -row.prompt)
        return jnp.where(at < end - row.prompt, ids, config.model.config.pad), end - row.prompt

    return jax.vmap(read)(state.without_cache())


def _array(name: str, value: Any, allowed: str) -> Array:
    """Converts numbers to an array; raises ValueError for anything else."""
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError):  # a text, or a ragged list
        raise refuse(name, value, allowed) from None


def _check_arrays(params: Any) -> None:
    """Raises ValueError unless the parameters are a pytree of arrays or tracers."""
    if isinstance(params, LM | State):
        raise refuse("params", f"a {type(params).__name__}", "the parameters of the model, such as lm.params")
    if params is None or not all(hasattr(x, "dtype") for x in jax.tree.leaves(params)):
        raise refuse("params", params, "the parameters of the model, such as lm.params")


def _check_key(key: Any, allowed: str, *shapes: tuple[int, ...]) -> Key:
    """Returns the key if it is a typed key of one of these shapes; otherwise raises ValueError."""
    typed = hasattr(key, "dtype") and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not typed or key.shape not in shapes:
        raise refuse("key", key, allowed)
    return key


def _per_row(name: str, value: Any, rows: int, low: int, high: Any) -> Int[Array, "B"]:
    """Broadcasts one whole number, or one per row, to [B]; checks its range unless it is traced."""
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
    """Makes the decoder of a model: the state machine behind `mj.sample` as pure JAX functions.

    Args:
        lm: The model. Its parameters are not stored: they are the first argument of the decoder's methods.
        sampler: A rule such as `rules.threshold(0.9)`, or a `Sampler`; its parameters may be traced. None: the
            checkpoint's default, or else the default for its noise.
        plan: Block length, denoising steps, and reuse of cached keys and values.
        slots: Maximum tokens of a row, prompt and answer together.
        logprobs: Number of alternatives per token for which `State.logprobs` keeps log-probabilities, in addition to
            the emitted token's. None: none are kept.
        trajectory: Whether `State.trajectory` records the pass that accepted each token and the log-probability of
            its draw, see `Rollout`.

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
