"""Keys of prompts seen before, found by what they hold: a chain of hashes, one link a piece of the prompt."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mercury_jax.config import ModelConfig
from mercury_jax.decode.state import State
from mercury_jax.serve.engine import device

PIECE = 64  # tokens whose keys are kept and found together


def piece_of(config: ModelConfig) -> int | None:
    """Tokens of a piece, whole blocks of them; None where a token's keys depend on what follows it."""
    if config.pattern == "bidirectional":
        return None
    block = config.block if config.pattern == "block_causal" else 1
    return -(-PIECE // block) * block


def links(ids: Sequence[int], piece: int, salt: str) -> Iterator[bytes]:
    """The key of each whole piece: a hash of it and of all that stands before it.

    The salt makes that nobody finds, or can time, what another one has sent (as CVE-2025-46570 allowed).
    """
    link = hashlib.sha256(salt.encode()).digest()
    array = np.asarray(ids, np.int32)
    for end in range(piece, len(array) + 1, piece):
        link = hashlib.sha256(link + array[end - piece : end].tobytes()).digest()
        yield link


class Prefixes:
    """Pieces of keys and values on the device, the least used one dropped where they outgrow `most` bytes."""

    def __init__(self, piece: int | None, most: int):
        self._piece, self._most = piece or 0, most if piece else 0
        self._held: OrderedDict[bytes, Any] = OrderedDict()
        self.bytes = 0

    def find(self, ids: Sequence[int], salt: str) -> list[Any]:
        """The pieces that stand at the beginning of `ids`; the last token is never among them."""
        found: list[bytes] = []
        if self._most:
            for link in links(ids[: len(ids) - 1], self._piece, salt):
                if link not in self._held:
                    break
                found.append(link)
        for link in reversed(found):  # a piece without those before it is of no use: they go last
            self._held.move_to_end(link)
        return [self._held[link] for link in found]

    def lay(self, row: State, pieces: Sequence[Any]) -> State:
        """The row with these pieces in its cache."""
        for i, piece in enumerate(pieces):
            row = device.lay(row, piece, np.int32(i * self._piece))
        return row

    def tokens(self, pieces: Sequence[Any]) -> int:
        """Tokens that so many pieces hold."""
        return len(pieces) * self._piece

    def keep(self, state: State, slot: int, ids: Sequence[int], encoded: int, salt: str) -> None:
        """Keep the keys of a row's first `encoded` tokens, whose ids are given."""
        if not self._most:
            return
        chain = list(links(ids[:encoded], self._piece, salt))
        for i, link in enumerate(chain):
            if link not in self._held:
                start = np.int32(i * self._piece)
                self._held[link] = device.cut(state.cache, np.int32(slot), start, self._piece)
                self.bytes += device.bytes_of(self._held[link])
        for link in reversed(chain):
            self._held.move_to_end(link)
        while self.bytes > self._most:
            _, dropped = self._held.popitem(last=False)
            self.bytes -= device.bytes_of(dropped)
