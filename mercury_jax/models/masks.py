"""Who sees whom: each attention pattern as key ranges, for a pass over a cache and for training.

A mask is never stored. Every query row sees at most two ranges of keys [start, end): in training,
the clean tokens before its canvas and the canvas itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from mercury_jax.config import ModelConfig
from mercury_jax.types import Laid, Pass


def encodable(config: ModelConfig, known: Int[Array, "B"]) -> Int[Array, "B"]:
    """How many of `known` settled tokens can be encoded for good: none, whole blocks, or all."""
    if config.pattern == "bidirectional":
        return jnp.zeros_like(known)
    if config.pattern == "block_causal":
        return known // config.block * config.block
    return known


def pass_ranges(
    config: ModelConfig,
    positions: Int[Array, "B T"],
    live: Bool[Array, "B T"],
    end: Int[Array, "B"],
    encoding: Bool[Array, "B"],
) -> Int[Array, "B T R 2"]:
    """Key ranges of one pass over a cache: rows that encode are causal, rows that denoise see all."""
    stop = jnp.broadcast_to(end[:, None], positions.shape)
    if config.pattern == "causal_encoder":
        causal = positions + 1
    elif config.pattern == "block_causal":
        causal = jnp.minimum((positions // config.block + 1) * config.block, stop)
    else:
        causal = stop
    stop = jnp.where(live, jnp.where(encoding[:, None], causal, stop), 0)
    first = jnp.stack([jnp.zeros_like(stop), stop], axis=-1)
    return jnp.stack([first, jnp.zeros_like(first)], axis=2)


def padded(ranges: Int[Array, "B T 2 2"]) -> Int[Array, "B T 3 2"]:
    """The same ranges with an empty third one."""
    return jnp.concatenate([ranges, jnp.zeros_like(ranges[:, :, :1])], axis=2)


def blind_ranges(
    positions: Int[Array, "B T"], live: Bool[Array, "B T"], end: Int[Array, "B"], slots: Int[Array, "B T"]
) -> Int[Array, "B T 3 2"]:
    """What a mask sees that stands in for the token at its position: all others, and its own key."""
    stop = jnp.broadcast_to(end[:, None], positions.shape)
    pairs = [(jnp.zeros_like(stop), positions), (positions + 1, stop), (slots, slots + 1)]
    ranges = jnp.stack([jnp.stack(pair, axis=-1) for pair in pairs], axis=2)
    return jnp.where(live[:, :, None, None], ranges, 0)


def near(ranges: Int[Array, "B T R 2"], lowest: Int[Array, "B T"]) -> Int[Array, "B T R 2"]:
    """The ranges without the slots before `lowest`: what a sliding layer sees of them."""
    start = jnp.maximum(ranges[..., 0], lowest[..., None])
    return jnp.stack([start, jnp.maximum(ranges[..., 1], start)], axis=-1)


def windowed(ranges: Int[Array, "B T R 2"], window: int) -> Int[Array, "B T R 2"]:
    """The ranges of an autoregressive model in a layer with a sliding window.

    A query sees `window` tokens, itself included: those at positions (p - window, p]. Its first range ends with itself,
    or, where it has a slot elsewhere (a canvas token in training, the mask of a blind pass), with the token before it,
    and a later range holds its own slot.
    """
    apart = (ranges[:, :, 1:, 1] > ranges[:, :, 1:, 0]).any(axis=-1)
    return near(ranges, ranges[:, :, 0, 1] - window + apart)


def layout(
    config: ModelConfig, ids: np.ndarray, prompt: int, fill: int | None = None, whole: bool | None = None
) -> Laid:
    """One document as training and scoring see it: clean tokens, then its canvases, in one row.

    ids [n]; the first `prompt` of them are never noised. `fill` completes the last canvas with
    that id (end of text), editable like the rest; None leaves it short.
    The clean part ends where the last canvas starts: nobody looks at what would follow. `whole` keeps the
    whole document there (without the fill), so that each token is a target of the one before it; None: where
    the model predicts the next token.
    """
    ids = np.asarray(ids, np.int32)
    if not 0 <= prompt < len(ids):
        raise ValueError(
            f"prompt is {prompt}; allowed: 0..{len(ids) - 1}, so that a token is left to denoise"
        )
    first, said = _first_canvas(config, prompt), len(ids)
    if fill is not None:
        short = -(len(ids) - first) % config.block
        ids = np.concatenate([ids, np.full(short, fill, np.int32)])
    if config.pattern == "bidirectional":
        return _one_canvas(ids, prompt)
    starts = np.arange(first, len(ids), config.block)
    clean = said if (config.predicts_next if whole is None else whole) else int(starts[-1])
    return _clean_and_canvases(config, ids, prompt, starts, clean)


def _first_canvas(config: ModelConfig, prompt: int) -> int:
    if config.pattern == "block_causal":
        return prompt // config.block * config.block
    return prompt if config.pattern == "causal_encoder" else 0


def _one_canvas(ids: np.ndarray, prompt: int) -> Laid:
    n = len(ids)
    ranges = np.zeros((n, 2, 2), np.int32)
    ranges[:, 0, 1] = n
    positions = np.arange(n, dtype=np.int32)
    return Laid(ids, positions, ranges, positions >= prompt, np.zeros(n, np.int32))


def _clean_and_canvases(
    config: ModelConfig, ids: np.ndarray, prompt: int, starts: np.ndarray, clean: int
) -> Laid:
    noisy = np.arange(starts[0], len(ids))
    positions = np.concatenate([np.arange(clean), noisy]).astype(np.int32)
    canvas = (noisy - starts[0]) // config.block
    ranges = np.zeros((len(positions), 2, 2), np.int32)
    ranges[:clean, 0, 1] = _clean_ends(config, clean)
    ranges[clean:, 0, 1] = starts[canvas]
    # A canvas token at absolute position p stands in slot clean + (p - starts[0]).
    ranges[clean:, 1, 0] = clean + canvas * config.block
    ranges[clean:, 1, 1] = np.minimum(clean + (canvas + 1) * config.block, len(positions))
    editable = np.concatenate([np.zeros(clean, bool), noisy >= prompt])
    ids_of_canvas = np.concatenate([np.full(clean, -1), canvas]).astype(np.int32)
    return Laid(ids[positions], positions, ranges, editable, ids_of_canvas)


def _clean_ends(config: ModelConfig, clean: int) -> np.ndarray:
    p = np.arange(clean)
    if config.pattern == "causal_encoder":
        return p + 1
    return np.minimum((p // config.block + 1) * config.block, clean)


def layout_of(config: ModelConfig) -> Callable[..., Laid]:
    """`layout` with the config closed over, as `Model.layout`."""
    return functools.partial(layout, config)


class NetInputs(NamedTuple):
    """What a network computes on in a pass over a cache: the tokens given, and the leave-one-out masks behind them."""

    tokens: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    ranges: Int[Array, "B T R 2"]
    slots: Int[Array, "B T"]  # where keys are written; the capacity for none
    live: Bool[Array, "B T"]


def cached_pass(config: ModelConfig, given: Pass, capacity: int) -> NetInputs:
    """Positions, slots and key ranges of a pass over a cache of `capacity` slots.

    With `given.leave_one_out` one mask follows for each token. It attends to every position but that of its token, and
    to its own key in the slots from `end` on.
    """
    tokens, encoding = given.tokens, given.encoding[:, None]
    offsets = jnp.arange(tokens.shape[1])[None]
    live = offsets < given.used[:, None]
    positions = given.start[:, None] + offsets
    slots = jnp.where(live, positions, capacity)  # unused tokens are dropped
    ranges = pass_ranges(config, positions, live, given.end, given.encoding)
    if given.leave_one_out is None:
        return NetInputs(tokens, positions, ranges, slots, live)
    shown = live & ~encoding
    own = jnp.where(shown, given.end[:, None] + offsets, capacity)
    beside = lambda a, b: jnp.concatenate([a, b], axis=1)
    return NetInputs(
        beside(tokens, jnp.full_like(tokens, given.leave_one_out)),
        beside(positions, positions),
        beside(padded(ranges), blind_ranges(positions, shown, given.end, own)),
        beside(slots, own),
        beside(live, shown),
    )
