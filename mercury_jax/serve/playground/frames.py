"""Snapshots as frames: of each pass only the cells that changed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from mercury_jax.decode.output import decoded
from mercury_jax.serve.engine.request import Snapshot
from mercury_jax.types import LM

SETTLED, FORCED, SPECIAL, BYTES = 1, 2, 4, 8  # bits of a cell's flags
PRECISION = 1000  # steps of a confidence on the wire: fewer cells change, and no eye sees more


class Shown(NamedTuple):
    """What the reader has on its screen, one entry a cell."""

    tokens: np.ndarray  # int32 [n]
    flags: np.ndarray  # int [n]: SETTLED and FORCED
    confidence: np.ndarray  # int [n], in 1/PRECISION


NOTHING = Shown(np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, np.int64))


def look(shown: Shown, snapshot: Snapshot) -> tuple[Shown, np.ndarray]:
    """(what the reader will have, which of its cells changed).

    Cells in front of the active block keep the confidence at which they settled: the engine says 1 of them.
    """
    n, seen = len(snapshot.tokens), len(shown.tokens)
    sure = np.rint(np.nan_to_num(snapshot.confidence) * PRECISION).astype(np.int64)
    kept = min(snapshot.start, seen, n)
    sure[:kept] = shown.confidence[:kept]
    flags = SETTLED * snapshot.accepted.astype(np.int64) + FORCED * snapshot.forced.astype(np.int64)
    new = Shown(snapshot.tokens, flags, sure)
    changed = np.ones(n, bool)
    both = min(n, seen)
    changed[:both] = np.any([a[:both] != b[:both] for a, b in zip(new, shown, strict=True)], axis=0)
    return new, np.flatnonzero(changed)


class Labels:
    """What stands in a token's cell: its text, or a name where it has none."""

    def __init__(self, lm: LM):
        self.tokenizer, self.known = lm.tokenizer, {}

    def of(self, token: int) -> tuple[str, int]:
        """(text, SPECIAL, BYTES or 0). BYTES: a part of a character, in hex."""
        if token not in self.known:
            self.known[token] = self._of(token)
        return self.known[token]

    def _of(self, token: int) -> tuple[str, int]:
        pieces = self.tokenizer.pieces
        piece = pieces[token] if token < len(pieces) else b""
        if not piece:
            return self._name(token), SPECIAL
        try:
            return piece.decode(), 0
        except UnicodeDecodeError:
            return piece.hex(" ").upper(), BYTES

    def _name(self, token: int) -> str:
        try:
            name = self.tokenizer.decode([token], skip_special=False)
        except (ValueError, IndexError, KeyError):  # a vocabulary may end in unused ids
            name = ""
        return name.strip("<|>") or f"id {token}"


def frame(labels: Labels, shown: Shown, changed: Iterable[int], snapshot: Snapshot) -> dict[str, Any]:
    """One pass as JSON: {forwards, start, n, cells: [[index, id, text, flags, confidence], ...]}."""
    cells = []
    for i in map(int, changed):
        token = int(shown.tokens[i])
        text, kind = labels.of(token)
        cells.append([i, token, text, int(shown.flags[i]) | kind, int(shown.confidence[i]) / PRECISION])
    return {
        "type": "frame", "forwards": snapshot.forwards, "start": snapshot.start, "n": len(shown.tokens),
        "cells": cells,
    }  # fmt: skip


def ending(lm: LM, snapshot: Snapshot, chat: bool, seconds: float) -> dict[str, Any]:
    """The last event: the whole text, as `sample` would return it."""
    thinking, text = decoded(lm, snapshot.tokens, chat)
    return {
        "type": "end", "text": text, "thinking": thinking, "finish": snapshot.finish, "message": snapshot.message,
        "tokens": len(snapshot.tokens), "forwards": snapshot.forwards, "cached": snapshot.cached,
        "seconds": round(seconds, 6),
    }  # fmt: skip
