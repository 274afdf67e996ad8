"""Prefix cache: keys and values of earlier requests, in chunks that are found by chained hashes.

The hash of a chunk covers its tokens and the hash of the previous chunk, so equal hashes mean equal prefixes. A chain
starts from the request's `cache_salt`: with one salt per client, no client can find out by timing what another client
has sent (CVE-2025-46570). The engine copies cached chunks into the row of a new request, and stores the chunks of a
finished request.

Layers with a sliding window keep only the newest positions of a row (`models.cache.with_rings`), so that the older
chunks of a finished request have no keys of these layers. A prefix can be used if its last chunks, those that the
window covers, have them.
"""

from __future__ import annotations

import functools
import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Int

from mercury_jax.config import ModelConfig
from mercury_jax.decode.state import State
from mercury_jax.serve.engine.programs import tree_bytes

CHUNK = 64  # tokens per chunk: the unit that is stored, found and dropped


def chunk_size(config: ModelConfig) -> int | None:
    """Computes the size of a chunk: CHUNK rounded up to whole blocks.

    In a block-causal model the keys of a token depend on its whole block, so a chunk must not split one.
    """
    if config.pattern == "bidirectional":
        return None
    block = config.block if config.pattern == "block_causal" else 1
    return -(-CHUNK // block) * block


def chunk_hashes(ids: Sequence[int], size: int, salt: str) -> Iterator[bytes]:
    """Computes the hash of each complete chunk over its tokens and all tokens before it."""
    link = hashlib.sha256(salt.encode()).digest()
    array = np.asarray(ids, np.int32)
    for end in range(size, len(array) + 1, size):
        link = hashlib.sha256(link + array[end - size : end].tobytes()).digest()
        yield link


class Chunk(NamedTuple):
    """Keys and values of consecutive positions.

    Attributes:
        leaves: Each leaf of the cache [size, ...]; None: not known, in a layer with a sliding window.
        complete: Whether all leaves are known.
    """

    leaves: tuple[Array | None, ...]
    complete: bool


@functools.partial(jax.jit, static_argnums=3)
def cut_cache(
    leaves: Sequence[Array | None], slot: Int[Array, ""], start: Int[Array, ""], size: int
) -> tuple[Array | None, ...]:
    """Copies the keys and values of the positions [start, start + size) of one row.

    Returns:
        Leaves [size, ...].
    """

    def cut(leaf: Array) -> Array:
        row = jax.lax.dynamic_index_in_dim(leaf, slot, keepdims=False)
        return jax.lax.dynamic_slice_in_dim(row, start % leaf.shape[1], size)

    return tuple(None if leaf is None else cut(leaf) for leaf in leaves)


@functools.partial(jax.jit, donate_argnums=0)
def insert_cache(row: State, leaves: Sequence[Array | None], start: Int[Array, ""]) -> State:
    """Writes a chunk to the KV cache of a row at position `start`."""
    old, structure = jax.tree.flatten(row.cache)
    insert = lambda leaf, new: jax.lax.dynamic_update_slice_in_dim(leaf, new[None], start % leaf.shape[1], 1)
    new = [a if b is None else insert(a, b) for a, b in zip(old, leaves, strict=True)]
    return row._replace(cache=structure.unflatten(new))


class Prefix(NamedTuple):
    """The cached part of a prompt.

    Attributes:
        chunks: The chunks in order.
        tokens: Number of tokens that they cover.
        recent: The position from which on a row with these chunks has the keys of layers with a sliding window.
    """

    chunks: list[Chunk]
    tokens: int
    recent: int


class PrefixCache:
    """Chunks of keys and values on the device. Beyond `limit` bytes the least recently used chunks are dropped.

    Attributes:
        bytes: Current size.
    """

    def __init__(self, config: ModelConfig, limit: int):
        size = chunk_size(config)
        self._size, self._limit, self._lookback = size or 0, limit if size else 0, config.lookback
        self._chunks: OrderedDict[bytes, Chunk] = OrderedDict()  # least recently used first
        self.bytes = 0

    def find(self, ids: Sequence[int], salt: str) -> Prefix:
        """Finds the longest cached prefix of a prompt.

        The prefix never includes the last token of the prompt, which the request must encode itself.
        """
        found: list[bytes] = []
        usable = complete = 0  # chunks of the longest usable prefix; complete chunks at the end of `found`
        if self._limit:
            # chunks that the next token attends to in layers with a window
            window = -(-self._lookback // self._size)
            for link in chunk_hashes(ids[: len(ids) - 1], self._size, salt):
                if link not in self._chunks:
                    break
                found.append(link)
                complete = complete + 1 if self._chunks[link].complete else 0
                if complete >= min(window, len(found)):
                    usable = len(found)
        del found[usable:]
        # Mark the chunks as recently used, the last one first. The first chunk of a chain thus becomes the most recent:
        # chunks are dropped from the end of a chain, since a chunk is useless without the chunks before it.
        for link in reversed(found):
            self._chunks.move_to_end(link)
        chunks = [self._chunks[link] for link in found]
        first = next((i + 1 for i in reversed(range(len(chunks))) if not chunks[i].complete), 0)
        return Prefix(chunks, len(chunks) * self._size, first * self._size)

    def insert(self, row: State, chunks: Sequence[Chunk]) -> State:
        """Writes chunks to the KV cache of a row, from position 0 on."""
        for i, chunk in enumerate(chunks):
            row = insert_cache(row, chunk.leaves, np.int32(i * self._size))
        return row

    def keep(self, state: State, slot: int, ids: Sequence[int], salt: str, recent: int = 0) -> None:
        """Stores the complete chunks of a row, and drops the least recently used ones beyond the limit."""
        if not self._limit:
            return
        chain = list(chunk_hashes(ids, self._size, salt))
        slots, leaves = state.tokens.shape[1], jax.tree.leaves(state.cache)
        for i, link in enumerate(chain):
            start, old = i * self._size, self._chunks.get(link)
            # Before `recent` the row itself has no keys of layers with a sliding window.
            if start < recent or (old is not None and old.complete):
                continue
            known = [leaf if self._holds(leaf.shape[1], slots, start, len(ids)) else None for leaf in leaves]
            complete = all(leaf is not None for leaf in known)
            if old is not None and not complete:
                continue
            chunk = Chunk(cut_cache(known, np.int32(slot), np.int32(start), self._size), complete)
            self.bytes += tree_bytes(chunk.leaves) - (0 if old is None else tree_bytes(old.leaves))
            self._chunks[link] = chunk
        for link in reversed(chain):
            if link in self._chunks:
                self._chunks.move_to_end(link)
        while self.bytes > self._limit:
            _, dropped = self._chunks.popitem(last=False)
            self.bytes -= tree_bytes(dropped.leaves)

    def _holds(self, size: int, slots: int, start: int, length: int) -> bool:
        """Tells whether a leaf of `size` slots, in a cache of `slots` slots, still holds the positions from `start` on.

        In a ring, the canvas behind the encoded tokens has overwritten positions too: at most as many as a pass has
        tokens, for which `models.cache.ring_size` leaves room twice.
        """
        return size >= slots or start >= length - size + (size - self._lookback) // 2
