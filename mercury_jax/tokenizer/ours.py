"""Text <-> ids: a byte-complete sentencepiece BPE whose special tokens no user text can produce."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import sentencepiece as spm

from mercury_jax.config import refuse
from mercury_jax.tokenizer.protocol import Fim, Messages, Thinking, lazy, valid


class Special(NamedTuple):
    """Ids of the special tokens: the same small numbers in every tokenizer of this library.

    `unk` exists because sentencepiece demands it; byte fallback means that `encode` never emits it.
    """

    pad: int = 0
    unk: int = 1
    bos: int = 2
    eos: int = 3  # end of text: closes a document and a sampled answer
    mask: int = 4
    system: int = 5
    user: int = 6
    assistant: int = 7
    tool: int = 8
    end_turn: int = 9  # closes a turn that is part of the history
    think: int = 10
    end_think: int = 11
    tool_call: int = 12
    end_tool_call: int = 13
    tool_result: int = 14
    end_tool_result: int = 15
    fim_prefix: int = 16
    fim_suffix: int = 17
    fim_middle: int = 18
    edit: int = 19
    end_edit: int = 20


SPECIAL = Special()

_SPACE = "\u2581"  # sentencepiece writes a space so; a literal one must go around it
# Python is indentation: line ends and runs of spaces are whole pieces, whatever the training text was.
_WHITESPACE = ("\n", "\n\n", "\t", *(_SPACE * n for n in (2, 4, 8, 12, 16)))
# What the trainer drops or reserves ends a sentence; so do "<|" and "<0", lest it learn a piece that
# spells a special token or a byte piece.
_BREAK = re.compile("[\n\0\u2581\u2585]|(?<=<)(?=[|0])")
_SENTENCE = 2_000  # characters; the trainer skips sentences above `max_sentence_length` bytes


@dataclass(frozen=True)
class Tokenizer:
    """Text to ids and back, without loss: `decode(encode(s)) == s` for every `str` that UTF-8 can write.

    `proto` is the serialized sentencepiece model. Digits are single tokens, spaces are kept as they are,
    and characters outside the vocabulary become byte tokens. ValueError when the bytes are no such model.
    """

    proto: bytes = field(repr=False)

    def __post_init__(self) -> None:
        try:
            if not self.proto:  # to sentencepiece this means "load nothing"; it then logs at every call
                raise ValueError("empty")
            names = [_name(self._model, i) for i in range(min(self.vocab_size, len(SPECIAL)))]
            sound = names == [f"<|{name}|>" for name in SPECIAL._fields] and _sound(self)
        except (RuntimeError, ValueError, IndexError) as error:
            raise ValueError(f"proto: {len(self.proto)} bytes are no whole sentencepiece model") from error
        if not sound:
            raise ValueError(
                f"proto: a sentencepiece model of {self.vocab_size} pieces, cut short or not ours; "
                "must have our special tokens first, byte fallback and no normalisation"
            )

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> Tokenizer:
        """Learn a vocabulary of exactly `vocab_size` pieces; the same texts give the same model.

        Of the pieces, 285 are fixed: specials, whitespace and the 256 bytes. ValueError when `vocab_size`
        does not suit the texts (too small for their alphabet, or more than they have merges for).
        """
        fixed = len(SPECIAL) + len(_WHITESPACE) + 256
        if vocab_size <= fixed:
            raise refuse(
                "vocab_size", vocab_size, f"more than the {fixed} fixed pieces (specials, whitespace, bytes)"
            )
        out = io.BytesIO()
        try:
            spm.SentencePieceTrainer.train(
                sentence_iterator=_sentences(texts), model_writer=out,
                model_type="bpe", vocab_size=vocab_size, byte_fallback=True, split_digits=True,
                normalization_rule_name="identity", add_dummy_prefix=False,
                remove_extra_whitespaces=False, allow_whitespace_only_pieces=True, required_chars=_SPACE,
                pad_id=SPECIAL.pad, unk_id=SPECIAL.unk, bos_id=SPECIAL.bos, eos_id=SPECIAL.eos,
                pad_piece="<|pad|>", unk_piece="<|unk|>", bos_piece="<|bos|>", eos_piece="<|eos|>",
                control_symbols=[f"<|{name}|>" for name in SPECIAL._fields[4:]],
                user_defined_symbols=list(_WHITESPACE),
                max_sentence_length=8 * _SENTENCE, num_threads=1, minloglevel=2,
            )  # fmt: skip
        except RuntimeError as error:
            raise _vocab_error(vocab_size, str(error)) from error
        return cls(out.getvalue())

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read what `save` wrote. ValueError when the file is missing, cut short or of another kind."""
        try:
            proto = Path(path).read_bytes()
        except OSError as error:
            raise ValueError(f"path: cannot read tokenizer {str(path)!r}: {error.strerror}") from error
        try:
            return cls(proto)
        except ValueError as error:
            raise ValueError(f"path: {str(path)!r} holds no tokenizer of ours: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write the sentencepiece model to `path`."""
        Path(path).write_bytes(self.proto)

    @property
    def special(self) -> Special:
        """Ids of the special tokens, by name: `tok.special.mask`."""
        return SPECIAL

    mask = SPECIAL.mask
    pad = SPECIAL.pad
    eos = SPECIAL.eos
    ends = (SPECIAL.eos,)
    begin = ()
    end_turn = SPECIAL.end_turn
    thinking = Thinking((SPECIAL.think,), SPECIAL.end_think)
    fim = Fim(SPECIAL.fim_prefix, SPECIAL.fim_suffix, SPECIAL.fim_middle)

    @property
    def files(self) -> Mapping[str, bytes]:
        """The model, under sentencepiece's usual name."""
        return {"tokenizer.model": self.proto}

    @property
    def vocab_size(self) -> int:
        return self._model.get_piece_size()

    @lazy
    def fingerprint(self) -> str:
        """sha256 of the model, in hex: two tokenizers with the same one are the same."""
        return hashlib.sha256(self.proto).hexdigest()

    @lazy
    def pieces(self) -> tuple[bytes, ...]:
        """[V] the UTF-8 bytes that each id stands for; empty for a special token."""
        return tuple(_piece_bytes(self._model, i) for i in range(self.vocab_size))

    def byte_lengths(self) -> np.ndarray:
        """int32 [V]: the UTF-8 bytes of each id, 0 for specials; over a text they sum to its bytes."""
        return np.array([len(piece) for piece in self.pieces], np.int32)

    def with_mask(self, mask: int) -> Tokenizer:
        """This tokenizer, whose mask is fixed; ValueError for another one."""
        if mask != self.mask:
            raise refuse("mask", mask, f"{self.mask}, as in the tokenizer")
        return self

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, never a special one. ValueError for a lone surrogate, which no UTF-8 text has."""
        first, *rest = valid(text).split(_SPACE)
        ids = self._model.encode(first)
        for part in rest:
            ids += self._literal_space
            ids += self._model.encode(part)
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of `ids`, any iterable of ints. Bytes that are no UTF-8 (half a character) show as U+FFFD.

        `skip_special=False` writes special tokens as `<|name|>`. ValueError for an id outside 0..V-1.
        """
        found: list[bytes] = []
        for i in map(int, ids):
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"ids: {i}; must be in 0..{self.vocab_size - 1}")
            spelt = not skip_special and i < len(SPECIAL)
            found.append(f"<|{SPECIAL._fields[i]}|>".encode() if spelt else self.pieces[i])
        return b"".join(found).decode("utf-8", errors="replace")

    def render(
        self, messages: Messages, thinking: bool = False, add_generation_prompt: bool = True
    ) -> list[int]:
        """Ids of a conversation, as `chat.render`."""
        return _chat().render(self, messages, thinking, add_generation_prompt)

    def follow(self, messages: Messages, thinking: bool = False) -> list[int]:
        """Ids that go on behind an answer: the end of its turn, then the messages, open for the next answer."""
        return [self.end_turn, *_chat().render(self, messages, thinking)]

    def example(self, prompt: str, answer: str, thinking: str | None = None) -> tuple[list[int], list[int]]:
        """(prompt ids, response ids) to train on, as `chat.example`."""
        return _chat().example(self, prompt, answer, thinking)

    def split_answer(self, ids: Iterable[int]) -> tuple[str | None, str]:
        """(thinking or None, answer) of sampled ids, as `chat.split_answer`."""
        return _chat().split_answer(self, ids)

    @cached_property
    def _model(self) -> spm.SentencePieceProcessor:
        return spm.SentencePieceProcessor(model_proto=self.proto)

    @cached_property
    def _literal_space(self) -> list[int]:
        return [self._model.piece_to_id(f"<0x{byte:02X}>") for byte in _SPACE.encode()]


def _vocab_error(vocab_size: int, told: str) -> ValueError:
    """What sentencepiece's trainer says about a size, in our words; it names the bound in its message."""
    if most := re.search(r"too high .*<= (\d+)", told):
        allowed = f"at most {most[1]}: these texts hold no more pieces to learn. More or more varied text allows more"
        return refuse("vocab_size", vocab_size, allowed)
    if least := re.search(r"smaller than required_chars\. \d+ vs (\d+)", told):
        return refuse(
            "vocab_size", vocab_size, f"at least {least[1]}: so many different characters are in these texts"
        )
    return refuse(
        "vocab_size", vocab_size, f"a size that sentencepiece can make of these texts; it says: {told}"
    )


def _chat() -> Any:
    from mercury_jax import chat  # which is written over this module

    return chat


def _name(model: spm.SentencePieceProcessor, i: int) -> str:
    """Spelling of a special piece; empty for one that text can match."""
    return model.id_to_piece(i) if model.is_control(i) or model.is_unknown(i) else ""


def _piece_bytes(model: spm.SentencePieceProcessor, i: int) -> bytes:
    if _name(model, i):
        return b""
    piece = model.id_to_piece(i)
    return bytes([int(piece[3:5], 16)]) if model.is_byte(i) else piece.replace(_SPACE, " ").encode()


def _sound(tok: Tokenizer) -> bool:
    """Whether all bytes are there and a probe survives; a model cut at a field boundary still parses."""
    probe = " a  b\t<|mask|>\n\n    12"
    whole = sum(tok._model.is_byte(i) for i in range(tok.vocab_size)) == 256
    return whole and tok.decode(tok.encode(probe)) == probe and min(tok.encode(probe)) >= len(SPECIAL)


def _sentences(texts: Iterable[str]) -> Iterator[str]:
    """The lines of the texts in bounded chunks, without what the trainer would trip over."""
    yield " "  # with `required_chars`: the space is a piece even where no text has one
    for text in texts:
        for line in _BREAK.split(text):
            for start in range(0, len(line), _SENTENCE):
                yield line[start : start + _SENTENCE]
