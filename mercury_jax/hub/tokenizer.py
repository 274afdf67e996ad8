"""The tokenizer of a checkpoint: tokenizer.json and its chat template, with the face of our own.

User text never turns into a token of control, and a template's own always does: `spelling.py` says how.
What a checkpoint does not have (a chat template, thinking, the FIM tokens) is refused in words where it is
asked for.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mercury_jax.checkpoint import CheckpointError
from mercury_jax.config import refuse
from mercury_jax.hub import bytes_of, vocabulary
from mercury_jax.hub.spelling import Spelt, respell
from mercury_jax.hub.template import Template, strings
from mercury_jax.hub.vocabulary import Vocabulary
from mercury_jax.tokenizer import AnyTokenizer, Fim, Thinking, Tokenizer, check_text

# What opens thinking, what the model writes behind that, and what closes it; the first that a vocabulary has.
THINKING = (
    ("<think>", "\n", "</think>"),  # Qwen3, SDAR, LLaDA2, DeepSeek
    ("<|channel>", "thought\n", "<channel|>"),  # Gemma 4, DiffusionGemma
    ("<seed:think>", "\n", "</seed:think>"),
    ("[THINK]", "", "[/THINK]"),
)
FIM = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5, Dream-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"),  # Seed-Coder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
)
_USED = {text for row in (*THINKING, *FIM) for text in row if len(text) > 2}


@dataclass(frozen=True, eq=False)
class HFTokenizer:
    """A tokenizer from the files of a checkpoint, by name; `load` reads them.

    mask, eos, pad: the model's ids (None: as the files name them; without a name the pad is the eos).
    ends: further ids that end an answer. vocab: the model's, whose last ids may have no text (None: not known).
    CheckpointError, or ValueError naming the id, where they do not go together.
    """

    files: Mapping[str, bytes] = field(repr=False)
    mask: int | None = None
    eos: int | None = None
    pad: int | None = None
    ends: tuple[int, ...] = ()
    vocab: int | None = None

    def __post_init__(self) -> None:
        put = lambda name, value: object.__setattr__(self, name, value)
        ids = {name: self._id(f"{name}_token") for name in ("mask", "eos", "pad")}
        put("eos", ids["eos"] if self.eos is None else self.eos)
        if self.eos is None:
            raise refuse("eos", None, "an id: tokenizer_config.json names no eos_token")
        put("mask", ids["mask"] if self.mask is None else self.mask)
        put("pad", next(i for i in (self.pad, ids["pad"], self.eos) if i is not None))
        put("ends", tuple(dict.fromkeys((self.eos, *self.ends))))
        for name in ("mask", "pad", "ends"):
            for i in np.atleast_1d(getattr(self, name) if getattr(self, name) is not None else ()):
                if not 0 <= i < max(self.vocab or 0, self.vocab_size):
                    raise refuse(name, int(i), f"an id in 0..{max(self.vocab or 0, self.vocab_size) - 1}")

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        mask: int | None = None,
        eos: int | None = None,
        pad: int | None = None,
        ends: Sequence[int] = (),
        vocab: int | None = None,
    ) -> HFTokenizer:
        """Read a folder in Hugging Face's layout. CheckpointError naming the file that is missing or damaged."""
        return cls(vocabulary.read(folder), mask, eos, pad, tuple(ends), vocab)

    def save(self, folder: str | Path) -> None:
        """Write the files as they were read."""
        for name, data in self.files.items():
            path = Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    # --- ids and texts

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id that has a text; the model's vocabulary may be larger."""
        return 1 + max(self._ids.values(), default=-1)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the files and the ids, in hex."""
        return hashlib.sha256(self.proto).hexdigest()

    @cached_property
    def proto(self) -> bytes:
        """The files and the ids as one archive, which `unpack` reads."""
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in sorted({**self.files, _IDS: self._numbers()}.items()):
                archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)  # a fixed date
        return out.getvalue()

    @cached_property
    def pieces(self) -> tuple[bytes, ...]:
        """[vocab_size] the bytes that each id stands for; empty for what answers do not show."""
        found = bytes_of.pieces(
            self._files.data, self._ids, {i: t.text for i, t in self._files.added.items()}
        )
        return tuple(b"" if i in self._hidden else piece for i, piece in enumerate(found))

    def byte_lengths(self) -> np.ndarray:
        """int32 [vocab_size]: the bytes of each id, 0 for those that are not shown."""
        return np.array([len(piece) for piece in self.pieces], np.int32)

    @cached_property
    def begin(self) -> tuple[int, ...]:
        """What stands before a text that is no conversation: the beginning of text, where the checkpoint wants it."""
        bos = self._id("bos_token")
        if self._files.adds_bos is not None:
            return (bos,) if self._files.adds_bos and bos is not None else ()
        whole = self._spelt.core.encode("a", add_special_tokens=True).ids
        plain = self._spelt.core.encode("a", add_special_tokens=False).ids
        starts = [k for k in range(len(whole)) if whole[k : k + len(plain)] == plain]
        return tuple(whole[: starts[0]]) if starts else ()

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, none of them of control. ValueError for a lone surrogate, which no UTF-8 text has."""
        return self._spelt.encode(check_text(text))

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of `ids` as the checkpoint's own decoder has it; bytes that are no UTF-8 show as U+FFFD.

        skip_special: leave out special tokens and those that end an answer. Ids of the model that the
        tokenizer does not know have no text. ValueError for negative ones.
        """
        found = []
        for i in map(int, ids):
            if i < 0 or (self.vocab is not None and i >= max(self.vocab, self.vocab_size)):
                raise ValueError(f"ids: {i}; must be in 0..{(self.vocab or self.vocab_size) - 1}")
            if i < self.vocab_size and not (skip_special and i in self._hidden):
                found.append(i)
        return self._spelt.decode(found)

    # --- conversations

    @cached_property
    def thinking(self) -> Thinking | None:
        """What opens and closes thinking, where the vocabulary has it."""
        for first, lead, last in THINKING:
            ids = self._spelt.control
            if first in ids and last in ids:
                return Thinking((ids[first], *self.encode(lead)), ids[last])
        return None

    @cached_property
    def fim(self) -> Fim | None:
        """The tokens of fill-in-the-middle, where the vocabulary has them."""
        for row in FIM:
            if all(text in self._spelt.control for text in row):
                return Fim(*(self._spelt.control[text] for text in row))
        return None

    @cached_property
    def end_turn(self) -> int:
        """What the chat template writes behind an answer; without one, the end of text."""
        if "default" not in self._files.templates:
            return self.ends[0]
        behind = self._encoded(self._behind_answer([], add_generation_prompt=False), [])
        control = set(self._spelt.control.values())
        return next((i for i in behind if i in control), self.ends[0])

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        thinking: bool = False,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Ids of a conversation by the checkpoint's chat template, open for an answer unless told otherwise.

        thinking: also open the thinking, so that the answer must begin with it; without it the template
        decides. tools: what the model may call, as JSON schemas. ValueError naming the message that
        does not fit, or what the template did.
        """
        text = self._text(messages, thinking, add_generation_prompt, tools)
        return self._opened(self._encoded(text, [messages, tools]), thinking and add_generation_prompt)

    def follow(self, messages: Sequence[Mapping[str, Any]], thinking: bool = False) -> list[int]:
        """Ids that go on behind an answer: the end of its turn, and the messages, open for the next answer."""
        text = self._behind_answer(messages, thinking, True)
        return self._opened(self._encoded(text, [messages]), thinking)

    def split_answer(self, ids: Iterable[int]) -> tuple[str | None, str]:
        """(thinking or None, answer) of sampled ids, up to the first that ends it."""
        said: list[int] = []
        for i in map(int, ids):
            if i in self.ends or i in (self.pad, self.end_turn):
                break
            said.append(i)
        marks = self.thinking
        if marks is None or not {marks.opening[0], marks.close} & set(said):
            return None, self.decode(said)
        close = said.index(marks.close) if marks.close in said else len(said)
        lead = self.decode(marks.opening[1:])
        thought = self.decode([i for i in said[:close] if i != marks.opening[0]]).removeprefix(lead)
        return thought.strip("\n"), self.decode(said[close + 1 :]).lstrip("\n")

    def example(self, prompt: str, answer: str, thinking: str | None = None) -> tuple[list[int], list[int]]:
        """(prompt ids, response ids) to train on: a user turn open for the answer; the answer and its end."""
        ends = self.end_turn if self.end_turn in self.ends else self.ends[0]
        response = [*self.encode(answer), ends]
        if thinking is not None:
            marks = self._thinking()
            response = [*marks.opening, *self.encode(thinking), *self.encode("\n"), marks.close, *response]
        return self.render([{"role": "user", "content": prompt}]), response

    # --- how

    @cached_property
    def _files(self) -> Vocabulary:
        return vocabulary.vocabulary(self.files)

    @cached_property
    def _spelt(self) -> Spelt:
        return respell(self._files, _USED)

    @cached_property
    def _ids(self) -> dict[str, int]:
        return self._spelt.core.get_vocab(with_added_tokens=True)
