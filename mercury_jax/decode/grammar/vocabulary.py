"""A tokenizer's vocabulary: for llguidance in its own tokens and, for searching an end, in single bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mercury_jax.decode.grammar.lark import llguidance, special_name
from mercury_jax.tokenizer import AnyTokenizer

MOST_PIECE = 64  # bytes of a token that a completion uses
MOST_CACHED = 4  # vocabularies
_MOST_SPELLED = 4_096  # texts whose tokens are cached

Unit: TypeAlias = int  # a byte, or 256 + the index of a special token in `specials`


class Spelling(NamedTuple):
    """The fewest tokens of a text that grows: to its end, and to the positions shortly before it."""

    text: bytes  # the last bytes
    costs: tuple[int, ...]  # up to each of these bytes, and to the end


NOTHING = Spelling(b"", (0,))
_NEVER = 1 << 30


class GrammarVocabulary:
    """Tokens and bytes of one tokenizer.

    Attributes:
        tokens: llguidance's view of the tokens.
        units: llguidance's view of single bytes and special tokens.
        words: uint32 words of a mask of all ids.
        ends: Ids that end the text.
        end: The first of them.
    """

    def __init__(self, tokenizer: AnyTokenizer):
        ends = tuple(int(i) for i in tokenizer.ends)
        more = max(ends) + 1 - len(tokenizer.pieces)
        pieces = [*tokenizer.pieces, *[b""] * more]  # an end id may be beyond the last token with a text
        for id in ends:
            pieces[id] = b""
        self.pieces = pieces
        self.words = -(-len(pieces) // 32)
        self.ends, self.end = frozenset(ends), ends[0]
        self.specials = [i for i, piece in enumerate(pieces) if not piece]
        self._unit = {id: 256 + n for n, id in enumerate(self.specials)}
        self.end_unit = self._unit[self.end]
        self._id: dict[bytes, int] = {}
        for i, piece in enumerate(pieces):
            # Of two tokens with the same bytes, the one that the tokenizer emits.
            if 0 < len(piece) <= MOST_PIECE and (
                piece not in self._id or tokenizer.encode(piece.decode(errors="replace")) == [i]
            ):
                self._id[piece] = i
        self._longest = max(map(len, self._id), default=1)
        self._single = [self._id.get(bytes([b]), -1) for b in range(256)] + self.specials
        # Lengths of the tokens that begin with each byte, short ones first.
        sizes: list[set[int]] = [set() for _ in range(256)]
        for piece in self._id:
            sizes[piece[0]].add(len(piece))
        self._sizes = [sorted(some) for some in sizes]
        self._spelt: dict[bytes, list[int] | None] = {}
        self._without: dict[bytes, np.ndarray] = {}
        self.whole = min(self._single) >= 0  # every byte is a token
        names = [b"\xff" + special_name(i).encode() for i in self.specials]
        named = dict(zip(self.specials, names, strict=True))
        spelled = [piece or named[i] for i, piece in enumerate(pieces)]
        self.tokens = _tokenizer(
            spelled, self.specials, sorted(self.ends), lambda text: self._encoded(tokenizer, text)
        )
        single = [*(bytes([b]) for b in range(256)), *names]
        stops = [self._unit[i] for i in sorted(self.ends)]
        self.units = _tokenizer(single, list(self._unit.values()), stops, list)
        # All bytes, first those whose repetition is the longest token: filler made of them is cheapest.
        run = np.zeros(256, int)
        for piece in self._id:
            if len(set(piece)) == 1:
                run[piece[0]] = max(run[piece[0]], len(piece))
        plain = b'1023456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz "'
        place = {byte: n for n, byte in enumerate(plain)}
        self.fill = sorted(range(256), key=lambda byte: (-run[byte], place.get(byte, 256 + byte)))

    def units_of(self, ids: Sequence[int]) -> list[Unit]:
        """Converts tokens to bytes and special tokens."""
        return [unit for i in ids for unit in (self.pieces[i] or (self._unit[i],))]

    def units_of_marks(self, parts: Sequence[int | str]) -> list[Unit]:
        """Converts ids of special tokens and texts to bytes and special tokens."""
        return [u for p in parts for u in ([self._unit[p]] if isinstance(p, int) else p.encode())]

    def spell(self, units: Sequence[Unit]) -> list[int] | None:
        """Returns the fewest tokens that spell the units; None where the vocabulary lacks a byte."""
        found: list[int] = []
        run = bytearray()
        for unit in (*units, None):
            if unit is not None and unit < 256:
                run.append(unit)
                continue
            ids = self._fewest(bytes(run))
            if ids is None:
                return None
            found += ids + ([] if unit is None else [self.specials[unit - 256]])
            run.clear()
        return found

    def cost(self, units: Sequence[Unit], enough: int | None = None) -> int | None:
        """Counts the tokens that spell the units."""
        if enough is not None and self.whole and len(units) <= enough:
            return len(units)
        ids = self.spell(units)
        return None if ids is None else len(ids)

    def extended(self, old: Spelling, units: Sequence[Unit]) -> Spelling:
        """Appends units to a spelling."""
        text, costs = old
        for unit in units:
            if unit > 255:
                text, costs = b"", (costs[-1] + 1,)
                continue
            text += bytes([unit])
            sizes = range(1, min(len(text), self._longest) + 1)
            ways = [costs[-size] + 1 for size in sizes if text[-size:] in self._id]
            costs = (*costs, min(ways, default=_NEVER))[-self._longest - 1 :]
            text = text[-self._longest :]
        return Spelling(text, costs)

    def bytewise(self, units: Sequence[Unit]) -> list[int] | None:
        """Returns tokens of one byte each, which is fast; the fewest tokens where the vocabulary lacks some byte."""
        return [self._single[unit] for unit in units] if self.whole else self.spell(units)

    def without(self, start: bytes) -> np.ndarray:
        """Returns the tokens of whole characters that lack a byte, as bits of uint32 [words]; b"": lack none."""
        if start not in self._without:
            whole = lambda piece: piece.decode(errors="ignore").encode() == piece
            ids = [bool(p) and not (start and start in p) and whole(p) for p in self.pieces]
            bits = np.zeros(32 * self.words, bool)
            bits[: len(ids)] = ids
            self._without[start] = np.packbits(bits, bitorder="little").view(np.uint32)
        return self._without[start]

    def begins(self, units: Sequence[Unit], mask: bytes) -> bool:
        """Returns whether a mask of tokens allows the first unit; True where that is not a token of its own."""
        id = self._single[units[0]] if units else -1
        return id < 0 or bool(mask[id >> 3] >> (id & 7) & 1)

    def _fewest(self, text: bytes) -> list[int] | None:
        """Shortest path over the positions of the text, from its end, so that the longest first token wins a tie."""
        if text in self._spelt:
            return self._spelt[text]
        # cost[i]: fewest tokens of text[i:]; step[i]: bytes of the first of them.
        far = len(text) + 1
        cost = [far] * len(text) + [0]
        step = [0] * len(text)
        for at in range(len(text) - 1, -1, -1):
            for size in self._sizes[text[at]]:
                if at + size < far and cost[at + size] < cost[at] and text[at : at + size] in self._id:
                    cost[at], step[at] = cost[at + size] + 1, size
        ids, at = [], 0
        while cost[0] < far and at < len(text):
            ids.append(self._id[text[at : at + step[at]]])
            at += step[at]
        if len(self._spelt) >= _MOST_SPELLED:
            self._spelt.clear()
        self._spelt[text] = ids if cost[0] < far else None
        return self._spelt[text]

    def _encoded(self, tokenizer: AnyTokenizer, wanted: bytes) -> list[int]:
        """As the tokenizer encodes it; where that adds to the text (a space in front), in the fewest tokens."""
        ids = tokenizer.encode(wanted.decode("utf-8", errors="replace"))
        if b"".join(self.pieces[i] for i in ids) == wanted:
            return ids
        return list(self._fewest(wanted) or [])


class _TokenizerAdapter:
    """What llguidance requires of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], specials: list[int], end: int, encode: Callable):
        self.tokens, self.special_token_ids, self.eos_token_id, self._encode = tokens, specials, end, encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, bytes) else text.encode())


def _tokenizer(
    tokens: list[bytes], specials: list[int], ends: list[int], encode: Callable[[bytes], list[int]]
) -> Any:
    """A tokenizer of llguidance."""
    package = llguidance()
    wrapped = package.TokenizerWrapper(_TokenizerAdapter(tokens, specials, ends[0], encode))
    return package.LLTokenizer(wrapped, eos_token=ends)


_kept: OrderedDict[str, GrammarVocabulary] = OrderedDict()
_lock = threading.Lock()


def vocabulary_of(tokenizer: AnyTokenizer) -> GrammarVocabulary:
    """Returns the vocabulary of a tokenizer; the last few are cached."""
    with _lock:
        if tokenizer.fingerprint not in _kept:
            _kept[tokenizer.fingerprint] = GrammarVocabulary(tokenizer)
        _kept.move_to_end(tokenizer.fingerprint)
        while len(_kept) > MOST_CACHED:
            _kept.popitem(last=False)
        return _kept[tokenizer.fingerprint]
