"""Prefix cache: keys and values of prompts seen before, in chunks found by a chain of hashes.

The key of a chunk hashes its tokens and the key of the chunk before it, so equal keys mean equal prefixes. A chain
starts from the request's `cache_salt`: with a salt per client nobody finds, or can time, what another client has sent
(CVE-2025-46570). The engine copies chunks into the row of a new request and keeps those of a finished one.
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

CHUNK = 64  # tokens whose keys and values are kept and found together


def chunk_size(config: ModelConfig) -> int | None:
    """Tokens of a chunk, CHUNK rounded up to whole blocks.

    Returns:
        None for bidirectional models, where the keys of a token depend on what follows it.
    """
    if config.pattern == "bidirectional":
        return None
    block = config.block if config.pattern == "block_causal" else 1
    return -(-CHUNK // block) * block


def chunk_hashes(ids: Sequence[int], size: int, salt: str) -> Iterator[bytes]:
    """The key of each whole chunk: a hash of its tokens and of all that stands before it.

    Args:
        ids: Token ids.
        size: Tokens of a chunk.
        salt: Start of the chain.

    Yields:
        32 bytes for each whole chunk.
    """
    link = hashlib.sha256(salt.encode()).digest()
    array = np.asarray(ids, np.int32)
    for end in range(size, len(array) + 1, size):
        link = hashlib.sha256(link + array[end - size : end].tobytes()).digest()
        yield link


@functools.partial(jax.jit, static_argnums=3)
def cut_cache(cache: Cache, slot: Int[Array, ""], start: Int[Array, ""], size: int) -> Cache:
    """Keys and values of positions start..start + size of one row.

    Args:
        cache: KV cache of all rows.
        slot: The row.
        start: First position.
        size: Number of positions.

    Returns:
        A chunk whose leaves have the position as first axis.
    """
    row = lambda leaf: jax.lax.dynamic_index_in_dim(leaf, slot, keepdims=False)
    return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(row(leaf), start, size), cache)


@functools.partial(jax.jit, donate_argnums=0)
def insert_cache(row: State, chunk: Cache, start: Int[Array, ""]) -> State:
    """A row with a chunk of `cut_cache` written to its cache at position `start`.

    Args:
        row: A state of one row; donated.
        chunk: Of `cut_cache`.
        start: First position of the chunk.

    Returns:
        The row.
    """
    insert = lambda leaf, new: jax.lax.dynamic_update_slice_in_dim(leaf, new[None], start, 1)
    return row._replace(cache=jax.tree.map(insert, row.cache, chunk))


class PrefixCache:
    """Chunks of keys and values on the device. The least recently used are dropped beyond `limit` bytes.

    Args:
        size: Tokens of a chunk (`chunk_size`); None disables the cache.
        limit: Most bytes; 0 disables the cache.
    """

    def __init__(self, size: int | None, limit: int):
        self._size, self._limit = size or 0, limit if size else 0
        self._chunks: OrderedDict[bytes, Cache] = OrderedDict()  # the least recently used first
        self.bytes = 0

    def find(self, ids: Sequence[int], salt: str) -> tuple[list[Cache], int]:
        """The longest cached prefix of a prompt. Its last token is never part of it: it must be encoded.

        Args:
            ids: The prompt.
            salt: Of the request.

        Returns:
            The chunks, and how many tokens they cover.
        """
        found: list[bytes] = []
        if self._limit:
            for link in chunk_hashes(ids[: len(ids) - 1], self._size, salt):
                if link not in self._chunks:
                    break
                found.append(link)
        for link in reversed(found):  # the end of a chain first: a chunk is of no use without those before it
            self._chunks.move_to_end(link)
        return [self._chunks[link] for link in found], len(found) * self._size

    def insert(self, row: State, chunks: Sequence[Cache]) -> State:
        """A row with these chunks in its KV cache, from position 0 on. The row is donated.

        Args:
            row: A state of one row.
            chunks: As `find` returns them.

        Returns:
            The row.
        """
        for i, chunk in enumerate(chunks):
            row = insert_cache(row, chunk, np.int32(i * self._size))
        return row

    def keep(self, state: State, slot: int, ids: Sequence[int], salt: str) -> None:
        """Keeps the chunks of a row.

        Args:
            state: The slots.
            slot: The row.
            ids: Tokens of the row whose keys and values are in its cache.
            salt: Of the request.
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
