"""The bytes that each token stands for, from how a tokenizer writes them in its vocabulary."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_SPACE = "\u2581"  # how sentencepiece writes a space
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def needed(data: Mapping[str, Any]) -> dict[str, Any]:
    """The part of tokenizer.json that `pieces` looks at."""
    return {"decoder": data.get("decoder")}


def pieces(data: Mapping[str, Any], ids: Mapping[str, int], added: Mapping[int, str]) -> tuple[bytes, ...]:
    """[V] bytes by id; empty where no token has the id.

    data: what is `needed` of tokenizer.json. ids: the vocabulary. added: texts of added tokens, which stand
    for themselves.
    """
    spell = _speller(data)
    found = [b""] * (1 + max(ids.values(), default=-1))
    for text, i in ids.items():
        found[i] = added[i].encode() if i in added else spell(text)
    return tuple(found)


def _speller(data: Mapping[str, Any]) -> Callable[[str], bytes]:
    decoders = list(_decoders(data.get("decoder") or {}))
    kinds = {d.get("type") for d in decoders}
    if "ByteLevel" in kinds:
        return _byte_level
    if "WordPiece" in kinds:
        prefix = next(str(d.get("prefix", "##")) for d in decoders if d.get("type") == "WordPiece")
        return lambda t: (t.removeprefix(prefix) if t.startswith(prefix) else f" {t}").encode()
    if "BPEDecoder" in kinds:
        suffix = next(str(d.get("suffix", "</w>")) for d in decoders if d.get("type") == "BPEDecoder")
        return lambda t: (t.removesuffix(suffix) + " " if t.endswith(suffix) else t).encode()
    fallback = "ByteFallback" in kinds
    return lambda t: _sentencepiece(t, fallback)


def _decoders(about: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield about
    for inside in about.get("decoders") or ():
        yield from _decoders(inside)


def _sentencepiece(text: str, fallback: bool) -> bytes:
    byte = _BYTE.fullmatch(text) if fallback else None
    return bytes([int(byte[1], 16)]) if byte else text.replace(_SPACE, " ").encode()


def _byte_level(text: str) -> bytes:
    """GPT-2's alphabet, one character for each byte; a text outside of it stands for itself."""
    try:
        return bytes(_BYTES[c] for c in text)
    except KeyError:
        return text.encode()


def _alphabet() -> dict[str, int]:
    """Bytes that print stand for themselves; the others are the characters from U+0100 on, in order."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in shown]
    return {chr(b): b for b in shown} | {chr(256 + i): b for i, b in enumerate(hidden)}


_BYTES = _alphabet()
