"""The tokenizer of a checkpoint: tokenizer.json and its chat template, with the face of our own.

User text never turns into a token of control, and a template's own always does: `spelling.py` says how.
What a checkpoint does not have (a chat template, tokens for thinking or for fill-in-the-middle) is None,
or refused in words by the call that needs it.
"""

from __future__ import annotations

import hashlib
import io
import json
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
from mercury_jax.hub.conversation import THINKING, Conversation
from mercury_jax.hub.spelling import Spelt, respell
from mercury_jax.hub.vocabulary import Vocabulary
from mercury_jax.tokenizer import AnyTokenizer, Fim, Thinking, Tokenizer, lazy, valid

FIM = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5, Dream-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"),  # Seed-Coder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
)
_USED = {text for row in FIM for text in row} | {text for row in THINKING for text in row[::2]}
MOST_IDS = 4_000_000  # the largest known vocabularies have 262,144
_IDS = "ids.json"  # in `proto`, beside the files


@dataclass(frozen=True, eq=False)
class HFTokenizer:
    """Made by `load` or `of`. vocab: the model's, whose last ids may have no text; None: the tokenizer's."""

    files: Mapping[str, bytes] = field(repr=False)
    words: Vocabulary = field(repr=False)
    spelt: Spelt = field(repr=False)
    mask: int | None
    eos: int
    pad: int
    ends: tuple[int, ...]  # ids that end an answer, the eos first
    vocab: int | None = None

    @classmethod
    def load(cls, folder: str | Path, **ids: Any) -> HFTokenizer:
        """Read a folder in Hugging Face's layout; `ids` as of `of`. CheckpointError naming the file at fault."""
        return cls.of(vocabulary.read(folder), **ids)

    @classmethod
    def of(
        cls,
        files: Mapping[str, bytes],
        *,
        mask: int | None = None,
        eos: int | None = None,
        pad: int | None = None,
        ends: Sequence[int] = (),
        vocab: int | None = None,
    ) -> HFTokenizer:
        """From files by name. mask, eos, pad: the model's ids (None: as the files name them; no pad: the eos).

        ends: further ids that end an answer. vocab: size of the model's vocabulary (None: not known).
        CheckpointError for files that are damaged, ValueError for an id that is out of range or missing.
        """
        given = [i for i in (mask, eos, pad, *ends) if i is not None]
        words = vocabulary.with_ids(vocabulary.vocabulary(files), given)
        spelt = respell(words, _USED)
        named = {
            name: spelt.control.get(words.named.get(f"{name}_token", "")) for name in ("mask", "eos", "pad")
        }
        first = next((i for i in (eos, named["eos"], *ends) if i is not None), None)
        if first is None:
            raise refuse("eos", None, "an id: tokenizer_config.json names no eos_token")
        made = cls(
            files, words._replace(data=bytes_of.needed(words.data)), spelt,
            mask=named["mask"] if mask is None else mask, eos=first,
            pad=next(i for i in (pad, named["pad"], first) if i is not None),
            ends=tuple(dict.fromkeys((first, *ends))), vocab=vocab,
        )  # fmt: skip
        made._check()
        return made

    def with_mask(self, mask: int) -> HFTokenizer:
        """The same tokenizer with another mask id: what an autoregressive checkpoint lacks."""
        if mask == self.mask:
            return self
        given = {"eos": self.eos, "pad": self.pad, "ends": self.ends, "vocab": self.vocab}
        return HFTokenizer.of(self.files, mask=mask, **given)

    def _check(self) -> None:
        if self.vocab_size > MOST_IDS:
            raise CheckpointError(f"tokenizer.json: id {self.vocab_size - 1}; allowed: 0..{MOST_IDS - 1}")
        size = max(self.vocab or 0, self.vocab_size)
        given = {"mask": self.mask, "pad": self.pad} | {f"ends[{n}]": i for n, i in enumerate(self.ends)}
        for name, i in given.items():
            # The mask may stand behind the last token that has a text.
            most = size if name == "mask" and self.vocab is None else size - 1
            if i is not None and not 0 <= i <= most:
                raise refuse(name, i, f"an id in 0..{most}")

    def save(self, folder: str | Path) -> None:
        """Write the files as they were read."""
        for name, data in self.files.items():
            path = Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    @lazy
    def proto(self) -> bytes:
        """The files and the ids as one archive, which `unpack` reads."""
        ids = {name: getattr(self, name) for name in ("mask", "eos", "pad", "ends", "vocab")}
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as archive:
            for name, data in sorted({**self.files, _IDS: json.dumps(ids).encode()}.items()):
                archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)  # of no date
        return out.getvalue()

    @lazy
    def fingerprint(self) -> str:
        """sha256 of the files and the ids, in hex: two tokenizers with the same one are the same."""
        found = hashlib.sha256(repr((self.mask, self.eos, self.pad, self.ends, self.vocab)).encode())
        for name, data in sorted(self.files.items()):
            found.update(f"{name} {len(data)}\n".encode() + data)
        return found.hexdigest()

    # --- ids and texts

    @lazy
    def vocab_size(self) -> int:
        """One more than the largest id that has a text; the model's vocabulary may be larger."""
        return 1 + max(self._ids.values(), default=-1)

    @cached_property
    def _ids(self) -> dict[str, int]:
        return self.spelt.core.get_vocab(with_added_tokens=True)

    @cached_property
    def _hidden(self) -> frozenset[int]:
        """Ids that an answer does not show: special ones, and those that end it."""
        special = {i for i, token in self.words.added.items() if token.special}
        return frozenset({*special, *self.ends, self.pad, *(() if self.mask is None else (self.mask,))})

    @lazy
    def pieces(self) -> tuple[bytes, ...]:
        """[vocab_size] the bytes that each id stands for; empty for those that are not shown."""
        added = {i: token.text for i, token in self.words.added.items()}
        found = bytes_of.pieces(self.words.data, self._ids, added)
        return tuple(b"" if i in self._hidden else piece for i, piece in enumerate(found))

    def byte_lengths(self) -> np.ndarray:
        """int32 [vocab_size]: the bytes of each id, 0 for those that are not shown."""
        return np.array([len(piece) for piece in self.pieces], np.int32)

    @lazy
    def begin(self) -> tuple[int, ...]:
        """What stands before a text that is no conversation: the beginning of text, where it is wanted."""
        bos = self.spelt.control.get(self.words.named.get("bos_token", ""))
        if self.words.adds_bos is not None:
            return (bos,) if self.words.adds_bos and bos is not None else ()
        whole = self.spelt.core.encode("a", add_special_tokens=True).ids
        plain = self.spelt.encode("a")
        starts = [k for k in range(len(whole)) if whole[k : k + len(plain)] == plain]
        return tuple(whole[: starts[0]]) if starts else ()

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, none of them of control. ValueError for a lone surrogate, which no UTF-8 text has."""
        return self.spelt.encode(valid(text))

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of `ids` by the checkpoint's own decoder; bytes that are no UTF-8 show as U+FFFD.

        skip_special: leave out what an answer does not show. The model's ids beyond the tokenizer's have
        no text. ValueError for an id that the model cannot have.
        """
        found = []
        for i in map(int, ids):
            if i < 0 or (self.vocab is not None and i >= max(self.vocab, self.vocab_size)):
                raise ValueError(f"ids: {i}; must be in 0..{max(self.vocab or 0, self.vocab_size) - 1}")
            if i < self.vocab_size and not (skip_special and i in self._hidden):
                found.append(i)
        return self.spelt.decode(found)

    # --- conversations

    @cached_property
    def chat(self) -> Conversation:
        """The chat template over these tokens."""
        return Conversation(self.words.templates, self.words.named, self.spelt, (*self.ends, self.pad))

    @lazy
    def fim(self) -> Fim | None:
        """The tokens of fill-in-the-middle; None where the vocabulary has none."""
        ids = self.spelt.control
        return next((Fim(*(ids[text] for text in row)) for row in FIM if set(row) <= set(ids)), None)

    @property
    def thinking(self) -> Thinking | None:
        """What opens and closes thinking; None where the vocabulary has no tokens for it."""
        return self.chat.thinking

    @property
    def end_turn(self) -> int:
        """What the chat template writes behind an answer."""
        return self.chat.end_turn

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        thinking: bool = False,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        at_once: bool = False,
    ) -> list[int]:
        """Ids of a conversation by the chat template, open for an answer unless told otherwise.

        thinking: also open the thinking, so that the answer must begin with it; without it the template
        decides, but with `at_once` it is told that there is none, and what it opens all the same is closed.
        tools: what the model may call, as JSON schemas. ValueError naming the message that does not fit, or
        saying what the template did.
        """
        return self.chat.render(messages, thinking, add_generation_prompt, tools, at_once)

    def follow(self, messages: Sequence[Mapping[str, Any]], thinking: bool = False) -> list[int]:
        """Ids that go on behind an answer: the end of its turn, then the messages, open for the next answer."""
        return self.chat.follow(messages, thinking)

    def example(self, prompt: str, answer: str, thinking: str | None = None) -> tuple[list[int], list[int]]:
        """(prompt ids, response ids) to train on: a user turn open for the answer; the answer and its end."""
        return self.chat.example(prompt, answer, thinking)

    def split_answer(self, ids: Iterable[int]) -> tuple[str | None, str]:
        """(thinking or None, answer) of sampled ids, up to the first that ends them; line ends between the two
        belong to neither."""
        return self.chat.split(ids, self.decode)


def unpack(proto: bytes) -> AnyTokenizer:
    """The tokenizer that a `proto` holds: ours, or a checkpoint's. ValueError for anything else."""
    if proto[:2] != b"PK":
        return Tokenizer(proto)
    try:
        with zipfile.ZipFile(io.BytesIO(proto)) as archive:
            files = {i.filename: archive.read(i) for i in archive.infolist() if _sane(i)}
        ids = json.loads(files.pop(_IDS))
        return HFTokenizer.of(files, **{**ids, "ends": tuple(ids["ends"])})
    except (zipfile.BadZipFile, LookupError, TypeError, OSError) as error:
        raise CheckpointError(f"tokenizer: the archive is damaged: {error}") from None


def _sane(entry: zipfile.ZipInfo) -> bool:
    most = vocabulary.MOST_BYTES.get(entry.filename, vocabulary.MOST_BYTES["chat_template.jinja"])
    if entry.file_size > most:
        raise CheckpointError(
            f"tokenizer: {entry.filename[:80]!r} has {entry.file_size} bytes; allowed: {most}"
        )
    return True
