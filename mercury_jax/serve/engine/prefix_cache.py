"""Prefix cache: keys and values of earlier requests, in chunks that are found by chained hashes.

The hash of a chunk covers its tokens and the hash of the previous chunk, so equal hashes mean equal prefixes. A chain
starts from the request's `cache_salt`: with one salt per client, no client can find out by timing what another client
has sent (CVE-2025-46570). The engine copies cached chunks into the row of a new request, and stores the chunks of a
finished request.
"""

from __future__ import annotations

import functools
import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jaxtyping import Array, Int

from mercury_jax.config import ModelConfig
from mercury_jax.decode.state import State
from mercury_jax.serve.engine.programs import tree_bytes
from mercury_jax.types import Cache

CHUNK = 64  # tokens per chunk: the unit that is stored, found and dropped


def chunk_size(config: ModelConfig) -> int | None:
    """Computes the size of a chunk: CHUNK rounded up to whole blocks.

    In a block-causal model the keys of a token depend on its whole block, so a chunk must not split one.

    Args:
        config: Configuration of the model.

    Returns:
        Tokens of a chunk. None for bidirectional models, where the keys of a token depend on the tokens after it.
    """
    if config.pattern == "bidirectional":
        return None
    block = config.block if config.pattern == "block_causal" else 1
    return -(-CHUNK // block) * block


def chunk_hashes(ids: Sequence[int], size: int, salt: str) -> Iterator[bytes]:
    """Computes the hash of each complete chunk over its tokens and all tokens before it.

    Args:
        ids: Token ids.
        size: Tokens of a chunk. An incomplete chunk at the end has no hash.
        salt: Start of the chain.

    Yields:
        A SHA-256 digest, 32 bytes, for each complete chunk.
    """
    link = hashlib.sha256(salt.encode()).digest()
    array = np.asarray(ids, np.int32)
    for end in range(size, len(array) + 1, size):
        link = hashlib.sha256(link + array[end - size : end].tobytes()).digest()
        yield link


@functools.partial(jax.jit, static_argnums=3)
def cut_cache(cache: Cache, slot: Int[Array, ""], start: Int[Array, ""], size: int) -> Cache:
    """Copies the keys and values of the positions [start, start + size) of one row.

    Args:
        cache: KV cache of all rows; leaves [B, S, ...].
        slot: Index of the row.
        start: First position.
        size: Number of positions.

    Returns:
        A chunk; leaves [size, ...].
    """
    row = lambda leaf: jax.lax.dynamic_index_in_dim(leaf, slot, keepdims=False)
    return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(row(leaf), start, size), cache)


@functools.partial(jax.jit, donate_argnums=0)
def insert_cache(row: State, chunk: Cache, start: Int[Array, ""]) -> State:
    """Writes a chunk to the KV cache of a row at position `start`.

    Args:
        row: A state of one row; donated.
        chunk: A chunk from `cut_cache`; leaves [size, ...].
        start: First position of the chunk.

    Returns:
        The row with the chunk in its KV cache.
    """
    insert = lambda leaf, new: jax.lax.dynamic_update_slice_in_dim(leaf, new[None], start, 1)
    return row._replace(cache=jax.tree.map(insert, row.cache, chunk))


class PrefixCache:
    """Chunks of keys and values on the device. Beyond `limit` bytes the least recently used chunks are dropped.

    Args:
        size: Tokens of a chunk (`chunk_size`); None disables the cache.
        limit: Maximum size in bytes; 0 disables the cache.

    Attributes:
        bytes: Current size.
    """

    def __init__(self, size: int | None, limit: int):
        self._size, self._limit = size or 0, limit if size else 0
        self._chunks: OrderedDict[bytes, Cache] = OrderedDict()  # least recently used first
        self.bytes = 0

    def find(self, ids: Sequence[int], salt: str) -> tuple[list[Cache], int]:
        """Finds the longest cached prefix of a prompt.

        The prefix never includes the last token of the prompt, which the request must encode itself.

        Args:
            ids: Token ids of the prompt.
            salt: `cache_salt` of the request.

        Returns:
            The chunks of the prefix in order, and the number of tokens that they cover.
        """
        found: list[bytes] = []
        if self._limit:
            for link in chunk_hashes(ids[: len(ids) - 1], self._size, salt):
                if link not in self._chunks:
                    break
                found.append(link)
        # Mark the chunks as recently used, the last one first. The first chunk of a chain thus becomes the most recent:
        # chunks are dropped from the end of a chain, since a chunk is useless without the chunks before it.
        for link in reversed(found):
            self._chunks.move_to_end(link)
        return [self._chunks[link] for link in found], len(found) * self._size

    def insert(self, row: State, chunks: Sequence[Cache]) -> State:
        """Writes chunks to the KV cache of a row, from position 0 on.

        Args:
            row: A state of one row; donated if there are chunks.
            chunks: The chunks that `find` returned.

        Returns:
            The row with the chunks in its KV cache.
        """
        for i, chunk in enumerate(chunks):
            row = insert_cache(row, chunk, np.int32(i * self._size))
        return row

    def keep(self, state: State, slot: int, ids: Sequence[int], salt: str) -> None:
        """Stores the complete chunks of a row, and drops the least recently used ones beyond the limit.

        Args:
            state: State of the slots.
            slot: Index of the row.
            ids: Token ids of the row, as far as their keys and values are in its KV cache.
            salt: `cache_salt` of the request.
        """
        if not self._limit:
            return
        chain = list(chunk_hashes(ids, self._size, salt))
        for i, link in enumerate(chain):
            if link not in self._chunks:
                start = np.int32(i * self._size)
                chunk = cut_cache(state.cache, np.int32(slot), start, self._size)
                self._chunks[link] = chunk
                self.bytes += tree_bytes(chunk)
        for link in reversed(chain):
            self._chunks.move_to_end(link)
        while self.bytes > self._limit:
            _, dropped = self._chunks.popitem(last=False)
            self.bytes -= tree_bytes(dropped)
