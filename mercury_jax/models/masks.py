"""Attention patterns as key ranges: which keys each query attends to, in a pass over a cache and in training.

No attention mask [T, S] is ever stored. Each query attends to at most two ranges of keys [start, end), or three with
leave-one-out masks. In training, the two ranges of a canvas token are the clean tokens before its canvas and the canvas
itself (BD3-LM, arXiv 2503.09573). `ops.attend` reads the ranges.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from mercury_jax.config import ModelConfig
from mercury_jax.types import ImageTokens, LaidOutDocument, Pass


def encodable(config: ModelConfig, committed: Int[Array, "B"]) -> Int[Array, "B"]:
    """Counts the committed tokens whose keys are final, because no token after them can change them."""
    if config.pattern == "bidirectional":
        return jnp.zeros_like(committed)
    if config.pattern == "block_causal":
        return committed // config.block * config.block
    return committed


# --- a pass over a cache

OUT_OF_CACHE = 1 << 30  # slot of a token whose keys are not written; above every size of a cache


class NetworkInputs(NamedTuple):
    """The inputs of a network in one pass. With leave-one-out masks, T here is T + L of the `Pass`: masks come last."""

    tokens: Int[Array, "B T"]
    positions: Int[Array, "B T"]  # absolute positions, for RoPE
    ranges: Int[Array, "B T R 2"]  # key ranges, clipped to the window in a layer with a sliding window
    slots: Int[Array, "B T"] | None = None  # where keys are written, or OUT_OF_CACHE; None: no cache
    # of the whole row, see `RopeScaling`; None: within the original context
    length: Int[Array, "B"] | None = None


def encoded_tokens(given: Pass) -> Bool[Array, "B T"]:
    """Returns which tokens of a pass are committed text."""
    encoding = given.encoding if given.encoding.ndim == 2 else given.encoding[:, None]
    return jnp.broadcast_to(encoding, given.tokens.shape)


def cache_pass_inputs(config: ModelConfig, given: Pass) -> NetworkInputs:
    """Computes positions, slots and key ranges of a pass over a cache.

    The masks of `given.leave_one_out` follow the tokens. Each mask attends to all positions except the one that it
    predicts, and to its own key; joint masks attend to the keys of all of these masks. The keys of the masks are
    written to the slots from `end` on.
    """
    tokens, encoding = given.tokens, encoded_tokens(given)
    length = given.end if given.length is None else given.length
    offsets = jnp.arange(tokens.shape[1])[None]
    used = offsets < given.used[:, None]
    positions = given.start[:, None] + offsets if given.positions is None else given.positions
    own = positions if given.slots is None else given.slots
    slots = jnp.where(used, own, OUT_OF_CACHE)  # unused tokens are dropped
    # Committed tokens use the causal pattern of the model: the keys up to themselves, or up to the end of their block.
    # Tokens of a canvas attend to all of [0, end). `stop` [B, T] is the end of the one range of each query; unused
    # tokens get an empty range. The second range is only used in training.
    end = jnp.broadcast_to(given.end[:, None], positions.shape)
    causal = end
    if config.pattern == "causal_encoder":
        causal = positions + 1
    elif config.pattern == "block_causal":
        causal = jnp.minimum((positions // config.block + 1) * config.block, end)
    stop = jnp.where(used, jnp.where(encoding, causal, end), 0)
    first = jnp.stack([jnp.zeros_like(stop), stop], axis=-1)
    ranges = jnp.stack([first, jnp.zeros_like(first)], axis=2)  # [B, T, 2, 2]
    if given.leave_one_out is None:
        return NetworkInputs(tokens, positions, ranges, slots, length)
    mask, columns, joint = given.leave_one_out
    predicted = (columns >= 0) & (columns < given.used[:, None]) & ~encoding[:, :1]  # [B, L]
    at, after = given.start[:, None] + columns, given.end[:, None]
    own = after + jnp.cumsum(predicted, axis=1) - 1  # slots from `end` on, without gaps
    count = predicted.sum(axis=1, keepdims=True)
    shared = [jnp.where(joint, after, own), jnp.where(joint, after + count, own + 1)]
    # Three ranges [B, L, 3, 2]: positions before the predicted one, positions after it, and keys of the masks.
    pairs = [(jnp.zeros_like(at), at), (at + 1, jnp.broadcast_to(after, at.shape)), shared]
    own_ranges = jnp.stack([jnp.stack(pair, axis=-1) for pair in pairs], axis=2)
    concat = lambda a, b: jnp.concatenate([a, b.astype(a.dtype)], axis=1)
    return NetworkInputs(
        concat(tokens, jnp.full_like(columns, mask)),
        concat(positions, jnp.where(predicted, at, 0)),
        concat(
            jnp.concatenate([ranges, jnp.zeros_like(ranges[:, :, :1])], axis=2),  # an empty third range
            jnp.where(predicted[:, :, None, None], own_ranges, 0),
        ),
        concat(slots, jnp.where(predicted, own, OUT_OF_CACHE)),
        length,
    )


def with_images(inputs: NetworkInputs, images: ImageTokens) -> NetworkInputs:
    """Extends the key range of each soft token of an image to the end of the image."""
    stop = jnp.where(inputs.ranges[:, :, 0, 1] > 0, jnp.maximum(inputs.ranges[:, :, 0, 1], images.end), 0)
    return inputs._replace(ranges=inputs.ranges.at[:, :, 0, 1].set(stop))


# --- sliding windows


def clip_ranges(ranges: Int[Array, "B T R 2"], lowest: Int[Array, "B T"]) -> Int[Array, "B T R 2"]:
    """Removes the slots before `lowest` from key ranges, for a layer with a sliding window."""
    start = jnp.maximum(ranges[..., 0], lowest[..., None])
    return jnp.stack([start, jnp.maximum(ranges[..., 1], start)], axis=-1)


def sliding_window_ranges(ranges: Int[Array, "B T R 2"], window: int) -> Int[Array, "B T R 2"]:
    """Clips key ranges to the window of a layer with sliding-window attention, in an autoregressive model.

    A query at position p attends to the `window` positions (p - window, p], itself included. Usually its first range
    ends with its own key. A canvas token in training and a leave-one-out mask have their own key in a later range;
    their first range then ends with the token before them, so that it is one token shorter.
    """
    separate = (ranges[:, :, 1:, 1] > ranges[:, :, 1:, 0]).any(axis=-1)
    return clip_ranges(ranges, ranges[:, :, 0, 1] - window + separate)


def in_ring(inputs: NetworkInputs, size: int) -> NetworkInputs:
    """Translates the slots and key ranges of a layer with a sliding window to a ring of `size` slots.

    The ring holds the last `size` positions of each row, at slot position % size. A range of positions that crosses a
    multiple of `size` is two ranges of slots. All ranges of a row lie between its last position and `size` positions
    before, so they cross the same multiple.

    Returns:
        The inputs with slots below `size`, or OUT_OF_CACHE. Queries with one or two ranges, of which the first one is
        used, have two ranges now; others have twice as many.
    """
    assert inputs.slots is not None
    slots = jnp.where(inputs.slots == OUT_OF_CACHE, OUT_OF_CACHE, inputs.slots % size)
    ranges = inputs.ranges
    if ranges.shape[2] == 2:  # the second range of a pass over a cache is empty
        ranges = ranges[:, :, :1]
    last = ranges[..., 1].max(axis=(1, 2))  # [B]
    turn = (jnp.maximum(last - 1, 0) // size * size)[:, None, None, None]
    # Positions from the multiple on are at the start of the ring, those before it at its end.
    newer = jnp.maximum(ranges - turn, 0)
    older = jnp.clip(ranges - turn + size, 0, size)
    return inputs._replace(slots=slots, ranges=jnp.concatenate([newer, older], axis=2))


# --- documents in training


def layout(
    config: ModelConfig,
    ids: np.ndarray,
    prompt: int,
    fill: int | None = None,
    all_clean: bool | None = None,
    clean_fill: bool = False,
) -> LaidOutDocument:
    """Lays out one document for training and scoring: its clean tokens, then its canvases, in one row.

    For example, block_causal with block 2, ids a b c d and prompt 1: the clean part is a b, the canvases are [a b] and
    [c d]. The first canvas attends to itself, the second to a b and itself. The clean part ends where the last canvas
    starts, because no query attends to clean tokens after that.

    Args:
        ids: Tokens of the document [n].
        all_clean: Whether the clean part holds the whole document (without `fill`), so that each of its tokens can be
            predicted from the token before it. None: if the model predicts the next token.

    Returns:
        Tokens, positions and key ranges of the document. A bidirectional model has one canvas and no clean part, an
        autoregressive model a clean part and no canvas.
    """
    ids = np.asarray(ids, np.int32)
    if not 0 <= prompt < len(ids):
        raise ValueError(
            f"prompt is {prompt}; allowed: 0..{len(ids) - 1}, so that a token is left to denoise"
        )
    length = len(ids)
    if config.autoregressive and all_clean is not False:
        return _causal_document(ids, prompt)
    if config.pattern == "block_causal":
        first = prompt // config.block * config.block  # start of the block with the first token to denoise
    else:
        first = prompt if config.pattern == "causal_encoder" else 0
    if fill is not None:
        short = -(length - first) % config.block
        ids = np.concatenate([ids, np.full(short, fill, np.int32)])
    if config.pattern == "bidirectional":
        n = len(ids)
        ranges = np.zeros((n, 2, 2), np.int32)
        ranges[:, 0, 1] = n
        positions = np.arange(n, dtype=np.int32)
        return LaidOutDocument(ids, positions, ranges, positions >= prompt, np.zeros(n, np.int32))
    starts = np.arange(first, len(ids), config.block)
    whole = len(ids) if clean_fill else length
    clean = whole if (config.predicts_next if all_clean is None else all_clean) else int(starts[-1])
    return _clean_and_canvases(config, ids, prompt, starts, clean)


def _causal_document(ids: np.ndarray, prompt: int) -> LaidOutDocument:
    """Lays out a document for an autoregressive model: once, causally; editable tokens are predicted, never noised."""
    positions = np.arange(len(ids), dtype=np.int32)
    ranges = np.zeros((len(ids), 2, 2), np.int32)
    ranges[:, 0, 1] = positions + 1
    return LaidOutDocument(ids, positions, ranges, positions >= prompt, np.full(len(ids), -1, np.int32))


def _clean_and_canvases(
    config: ModelConfig, ids: np.ndarray, prompt: int, starts: np.ndarray, clean: int
) -> LaidOutDocument:
    """Lays out the first `clean` tokens, then the canvases that start at the positions `starts`."""
    noisy = np.arange(starts[0], len(ids))
    positions = np.concatenate([np.arange(clean), noisy]).astype(np.int32)
    canvas = (noisy - starts[0]) // config.block
    clean_end = np.arange(clean) + 1  # clean tokens attend to [0, clean_end): causal
    if config.pattern != "causal_encoder":
        clean_end = np.minimum(((clean_end - 1) // config.block + 1) * config.block, clean)
    ranges = np.zeros((len(positions), 2, 2), np.int32)
    ranges[:clean, 0, 1] = clean_end
    # A canvas token attends to the clean tokens before its canvas, and to its canvas.
    ranges[clean:, 0, 1] = starts[canvas]
    # The canvas token at absolute position p is in slot clean + (p - starts[0]).
    ranges[clean:, 1, 0] = clean + canvas * config.block
    ranges[clean:, 1, 1] = np.minimum(clean + (canvas + 1) * config.block, len(positions))
    editable = np.concatenate([np.zeros(clean, bool), noisy >= prompt])
    canvas_ids = np.concatenate([np.full(clean, -1), canvas]).astype(np.int32)
    return LaidOutDocument(ids[positions], positions, ranges, editable, canvas_ids)
