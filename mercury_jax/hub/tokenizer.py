"""Tokenizers of published checkpoints, under the protocol of `mercury_jax.tokenizer`.

`HFTokenizer` is tokenizer.json and the chat template of a checkpoint. User text is never encoded as a control token,
and what the template writes always is (`ControlTokens`). What a checkpoint lacks (a chat template, tokens for
thinking or for fill-in-the-middle) is None, or a ValueError from the call that needs it. `IdTokenizer` stands for a
checkpoint without a tokenizer: ids go in and come out.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from mercury_jax import install
from mercury_jax.checkpoint import CheckpointError
from mercury_jax.config import ModelConfig, refuse
from mercury_jax.hub.tokenizer_files import (
    MAX_BYTES,
    ControlTokens,
    TokenizerData,
    respell,
    token_bytes,
    tokenizer_data,
)
from mercury_jax.tokenizer import AnyTokenizer, Fim, Messages, Thinking, Tokenizer, lazy, valid

if TYPE_CHECKING:
    from mercury_jax.hub.chat_template import ChatTemplate

# The opening token and the text after it; the closing token and the text after it.
THINKING = (
    ("<think>", "\n", "</think>", "\n\n"),  # Qwen3, SDAR, LLaDA2, DeepSeek
    ("<|channel>", "thought\n", "<channel|>", ""),  # Gemma 4, DiffusionGemma
    ("<seed:think>", "\n", "</seed:think>", "\n"),
    ("[THINK]", "", "[/THINK]", ""),
    ("<|think|>", "", "<|end_think|>", ""),  # ours, by `tokenizer_files.own_files`
)
FIM = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5, Dream-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"),  # Seed-Coder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
)
USED = {text for row in FIM for text in row} | {text for row in THINKING for text in row[::2]}
MAX_IDS = 4_000_000  # the largest known vocabularies have 262,144
IDS = "ids.json"  # the ids beside the files, in `HFTokenizer.proto`
ID_TOKENIZER = b"ids only "  # how `IdTokenizer.proto` starts


class _ThinkingMarks(NamedTuple):
    opening: tuple[int, ...]  # the opening token and the ids of `lead`
    close: int
    lead: str  # text after the opening token
    tail: str  # text after the closing token


@dataclass(frozen=True, eq=False)
class HFTokenizer:
    """A checkpoint's tokenizer; made by `of` from what `tokenizer_files.read_files` returns.

    Attributes:
        files: The tokenizer files by name.
        data: What they say.
        tokens: The tokenizer, with control tokens that user text cannot produce.
        mask: Id of the mask token, or None.
        eos: Id that ends a text.
        pad: Id that fills rows of a batch.
        ends: Ids that end an answer; `eos` is the first.
        vocab: Size of the model's vocabulary, whose last ids may have no text. None: the tokenizer's.
    """

    files: Mapping[str, bytes] = field(repr=False)
    data: TokenizerData = field(repr=False)
    tokens: ControlTokens = field(repr=False)
    mask: int | None
    eos: int
    pad: int
    ends: tuple[int, ...]
    vocab: int | None = None
    _compiled: dict[str, ChatTemplate] = field(default_factory=dict, init=False, repr=False)

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
        """Builds a tokenizer from its files.

        Args:
            files: Contents by name.
            mask: The model's mask id. Default: as the files name it.
            eos: The model's end of text. Default: as the files name it.
            pad: The model's padding. Default: as the files name it, else `eos`.
            ends: Further ids that end an answer.
            vocab: Size of the model's vocabulary. Default: unknown.

        Returns:
            The tokenizer.

        Raises:
            CheckpointError: A file is damaged.
            ValueError: An id is out of range, or there is no end of text.
        """
        data = tokenizer_data(files, [i for i in (mask, eos, pad, *ends) if i is not None])
        tokens = respell(data, USED)
        named = {
            name: tokens.control.get(data.named.get(f"{name}_token", "")) for name in ("mask", "eos", "pad")
        }
        first = next((i for i in (eos, named["eos"], *ends) if i is not None), None)
        if first is None:
            raise refuse("eos", None, "an id: tokenizer_config.json names no eos_token")
        found = cls(
            files, data._replace(json={"decoder": data.json.get("decoder")}), tokens,
            mask=named["mask"] if mask is None else mask, eos=first,
            pad=next(i for i in (pad, named["pad"], first) if i is not None),
            ends=tuple(dict.fromkeys((first, *ends))), vocab=vocab,
        )  # fmt: skip
        if found.vocab_size > MAX_IDS:
            raise CheckpointError(f"tokenizer.json: id {found.vocab_size - 1}; allowed: 0..{MAX_IDS - 1}")
        size = max(vocab or 0, found.vocab_size)
        ids = {"mask": found.mask, "pad": found.pad} | {f"ends[{n}]": i for n, i in enumerate(found.ends)}
        for name, i in ids.items():
            # The mask may be the id after the last token that has a text.
            most = size if name == "mask" and vocab is None else size - 1
            if i is not None and not 0 <= i <= most:
                raise refuse(name, i, f"an id in 0..{most}")
        return found

    def with_mask(self, mask: int) -> HFTokenizer:
        """Returns the same tokenizer with another mask id, which an autoregressive checkpoint lacks."""
        if mask == self.mask:
            return self
        given = {"eos": self.eos, "pad": self.pad, "ends": self.ends, "vocab": self.vocab}
        return HFTokenizer.of(self.files, mask=mask, **given)

    @lazy
    def proto(self) -> bytes:
        """The files and the ids as one zip archive, which `unpack` reads."""
        ids = {name: getattr(self, name) for name in ("mask", "eos", "pad", "ends", "vocab")}
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as archive:
            for name, data in sorted({**self.files, IDS: json.dumps(ids).encode()}.items()):
                archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)  # without a date
        return out.getvalue()

    @lazy
    def fingerprint(self) -> str:
        """SHA-256 of the files and the ids in hex."""
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
        return self.tokens.core.get_vocab(with_added_tokens=True)

    @cached_property
    def _hidden(self) -> frozenset[int]:
        """Ids that an answer does not show: special ones, and those that end it."""
        special = {i for i, token in self.data.added.items() if token.special}
        return frozenset({*special, *self.ends, self.pad, *(() if self.mask is None else (self.mask,))})

    @lazy
    def pieces(self) -> tuple[bytes, ...]:
        """[vocab_size] the bytes of each id; empty for ids that an answer does not show."""
        added = {i: token.text for i, token in self.data.added.items()}
        found = token_bytes(self.data.json["decoder"], self._ids, added)
        return tuple(b"" if i in self._hidden else piece for i, piece in enumerate(found))

    @lazy
    def begin(self) -> tuple[int, ...]:
        """Ids before a text that is not a conversation: the beginning-of-text token, where the files ask for it."""
        bos = self.tokens.control.get(self.data.named.get("bos_token", ""))
        if self.data.adds_bos is not None:
            return (bos,) if self.data.adds_bos and bos is not None else ()
        whole = self.tokens.core.encode("a", add_special_tokens=True).ids
        plain = self.tokens.encode("a")
        starts = [k for k in range(len(whole)) if whole[k : k + len(plain)] == plain]
        return tuple(whole[: starts[0]]) if starts else ()

    def encode(self, text: str) -> list[int]:
        """Encodes a text.

        Args:
            text: Any text; what looks like a control token is encoded as ordinary characters.

        Returns:
            Ids, none of them of a control token.

        Raises:
            ValueError: The text contains a lone surrogate.
        """
        return self.tokens.encode(valid(text))

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Decodes ids by the checkpoint's own decoder.

        Args:
            ids: Any iterable of integers. Ids of the model beyond the tokenizer's have no text.
            skip_special: Leave out what an answer does not show.

        Returns:
            The text. Bytes that are no UTF-8 become U+FFFD.

        Raises:
            ValueError: An id is outside of the model's vocabulary.
        """
        found = []
        for i in map(int, ids):
            if i < 0 or (self.vocab is not None and i >= max(self.vocab, self.vocab_size)):
                raise ValueError(f"ids: {i}; must be in 0..{max(self.vocab or 0, self.vocab_size) - 1}")
            if i < self.vocab_size and not (skip_special and i in self._hidden):
                found.append(i)
        return self.tokens.decode(found)

    @lazy
    def fim(self) -> Fim | None:
        """The tokens of fill-in-the-middle; None if the vocabulary has none."""
        ids = self.tokens.control
        return next((Fim(*(ids[text] for text in row)) for row in FIM if set(row) <= set(ids)), None)

    # --- conversations

    @cached_property
    def _marks(self) -> _ThinkingMarks | None:
        ids, encode = self.tokens.control, self.tokens.encode
        for first, lead, last, tail in THINKING:
            if first in ids and last in ids:
                return _ThinkingMarks((ids[first], *encode(lead)), ids[last], lead, tail)
        return None

    @property
    def thinking(self) -> Thinking | None:
        """Tokens around thinking; None if the vocabulary has none."""
        return None if self._marks is None else Thinking(self._marks.opening, self._marks.close)

    @lazy
    def end_turn(self) -> int:
        """Id that the chat template writes after an answer; the end of text if there is no template."""
        try:
            ids = self._rendered([], None, prompt=False, after_answer=True)
        except ValueError:  # no template, or one that does not allow for it
            return self.eos
        control = set(self.tokens.control.values())
        return next((i for i in ids if i in control), self.eos)

    def render(
        self,
        messages: Messages,
        thinking: bool = False,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        at_once: bool = False,
    ) -> list[int]:
        """Encodes a conversation by the chat template.

        Args:
            messages: As of `Tokenizer.render`; a template may read further keys.
            thinking: Also open the thinking, so that the answer starts with it. Otherwise the template decides.
            add_generation_prompt: End with the start of an assistant's turn.
            tools: What the model may call, as JSON schemas.
            at_once: If `thinking` is False, tell the template not to think, and close a thinking section that it opens.

        Returns:
            Ids.

        Raises:
            ValueError: A message is malformed, or the template failed; the message says how.
        """
        thinks = True if thinking else False if at_once else None
        ids = self._rendered(messages, thinks, prompt=add_generation_prompt, tools=tools)
        return self._with_thinking(ids, thinks) if add_generation_prompt and thinks is not None else ids

    def follow(self, messages: Messages, thinking: bool = False) -> list[int]:
        """Encodes what continues a conversation after an answer: the end of its turn, then further messages.

        Args:
            messages: As for `render`.
            thinking: As for `render`.

        Returns:
            Ids, open for the next answer.
        """
        ids = self._rendered(messages, thinking or None, prompt=True, after_answer=True)
        return self._with_thinking(ids, True) if thinking else ids

    def example(self, prompt: str, answer: str, thinking: str | None = None) -> tuple[list[int], list[int]]:
        """Encodes a training example.

        Args:
            prompt: Text of the user's turn.
            answer: Text of the answer.
            thinking: Text of the thinking before it. Default: none.

        Returns:
            (prompt ids, response ids): the user's turn with the start of the answer, and the answer with its end.
        """
        question, encode = self.render([{"role": "user", "content": prompt}]), self.tokens.encode
        end = self.end_turn if self.end_turn in (*self.ends, self.pad) else self.eos
        if thinking is None:
            return question, [*encode(answer), end]
        marks = self._required_marks()
        # Thinking that starts on a line of its own also ends on one.
        inside = encode(marks.lead + thinking + ("\n" if marks.lead else ""))
        return question, [marks.opening[0], *inside, marks.close, *encode(marks.tail + answer), end]

    def split_answer(self, ids: Iterable[int]) -> tuple[str | None, str]:
        """Splits sampled ids into thinking and answer; line breaks between the two belong to neither.

        Args:
            ids: Sampled ids, read up to the first that ends the answer.

        Returns:
            (thinking or None, answer). The answer is empty if the thinking was not closed.
        """
        shown: list[int] = []
        for i in map(int, ids):
            if i in (*self.ends, self.pad, self.end_turn):
                break
            shown.append(i)
        marks = self._marks
        if marks is None or not {marks.opening[0], marks.close} & set(shown):
            return None, self.decode(shown)
        close = shown.index(marks.close) if marks.close in shown else len(shown)
        thinking = self.decode(i for i in shown[:close] if i != marks.opening[0])
        return thinking.removeprefix(marks.lead).strip("\n"), self.decode(shown[close + 1 :]).lstrip("\n")

    def _required_marks(self) -> _ThinkingMarks:
        if self._marks is None:
            known = ", ".join(f"{first} {last}" for first, _, last, _ in THINKING)
            allowed = f"none: this checkpoint's tokenizer has no tokens for it ({known})"
            raise refuse("thinking", True, allowed)
        return self._marks

    def _with_thinking(self, ids: list[int], thinking: bool) -> list[int]:
        """A prompt with its thinking open, or without thinking: what the template opened is closed, empty."""
        marks = self._required_marks() if thinking else self._marks
        if marks is None:
            return ids
        # Thinking is open from `at` on: at the end of the prompt if the template did so, else after the prompt.
        last = {i: at for at, i in enumerate(ids) if i in (marks.opening[0], marks.close)}
        at = last.get(marks.opening[0], -1)
        opened = at > last.get(marks.close, -1) and at >= len(ids) - len(marks.opening)
        if thinking:
            return [*ids[: at if opened else len(ids)], *marks.opening]
        if not opened:
            return ids
        encode, line = self.tokens.encode, "\n" if marks.tail else ""
        return [*ids[:at], marks.opening[0], *encode(marks.lead + line), marks.close, *encode(marks.tail)]

    def _rendered(
        self,
        messages: Messages,
        thinking: bool | None,
        *,
        prompt: bool,
        tools: Messages | None = None,
        after_answer: bool = False,
    ) -> list[int]:
        """Ids of a conversation by the chat template.

        Args:
            messages: The conversation.
            thinking: Passed to the template; None: it decides.
            prompt: End with the start of an assistant's turn.
            tools: What the model may call.
            after_answer: Put a question and an answer in front, and return only what follows the answer.

        Returns:
            Ids.
        """
        if thinking:
            self._required_marks()
        templates = self.data.templates
        name = "tool_use" if tools and "tool_use" in templates else "default"
        if name not in templates:
            has = f"; it has {', '.join(templates)}" if templates else ""
            raise refuse("messages", "a conversation", f"a text: this checkpoint has no chat template{has}")
        if name not in self._compiled:
            try:
                from mercury_jax.hub.chat_template import ChatTemplate  # imports jinja2
            except ModuleNotFoundError as error:
                if (error.name or "").partition(".")[0] != "jinja2":
                    raise
                raise refuse("chat_template", "jinja2 is not installed", install.command("hub")) from error
            self._compiled[name] = ChatTemplate(templates[name])
        more = {} if thinking is None else {"enable_thinking": thinking, "thinking": thinking}
        more |= {"tools": tools, "documents": None, "add_generation_prompt": prompt}
        texts = list(_texts([messages, tools]))
        answer, before = "", []
        if after_answer:
            # A placeholder that occurs in no message shows where the answer ends.
            names = (f"Answer{n}here" for n in range(len(texts) + 1))
            answer = next(p for p in names if not any(p in text for text in texts))
            before = [{"role": "user", "content": "Question"}, {"role": "assistant", "content": answer}]
        text = self._compiled[name].render([*before, *messages], self.data.named, **more)
        plain, mask = str.__str__(text), text.mask
        if after_answer:
            if plain.count(answer) != 1:
                allowed = "a whole conversation: this chat template cannot continue one after an answer"
                raise refuse("messages", f"{len(messages)} messages", allowed)
            start = plain.index(answer) + len(answer)
            plain, mask = plain[start:], mask[start:]
        # A control token that is neither the template's own nor part of a message was put together by the template in a
        # way that `TracedText` does not follow. It is refused, because encoding it as characters would be wrong.
        for token in self.tokens.foreign(plain, mask):
            if not any(token in x for x in texts):
                raise ValueError(f"chat_template: puts {token!r} together in a way that is not supported")
        return self.tokens.encode_rendered(plain, mask)


def _texts(value: object) -> Iterator[str]:
    """Yields every text in plain data, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple):
        for inside in value:
            yield from _texts(inside)


@dataclass(frozen=True)
class IdTokenizer:
    """Stands for the tokenizer that a checkpoint does not have: ids are written as decimal numbers, text is refused.

    Attributes:
        vocab_size: Size of the model's vocabulary.
        mask: Id of the mask token, or None.
        pad: Id that fills rows of a batch.
        ends: Ids that end an answer.
    """

    vocab_size: int
    mask: int | None
    pad: int
    ends: tuple[int, ...]

    begin = ()
    thinking = None
    fim = None
    files = MappingProxyType[str, bytes]({})

    @classmethod
    def of(cls, config: ModelConfig) -> IdTokenizer:
        """Returns the tokenizer of a model."""
        return cls(config.vocab, config.mask, config.pad, (config.eos, *config.ends))

    def with_mask(self, mask: int) -> IdTokenizer:
        """Returns the same ids with another mask."""
        return replace(self, mask=mask)

    @property
    def eos(self) -> int:
        """Id that ends a text."""
        return self.ends[0]

    end_turn = eos

    @property
    def proto(self) -> bytes:
        """The ids as bytes, which `unpack` reads."""
        ids = {"vocab": self.vocab_size, "mask": self.mask, "pad": self.pad, "ends": self.ends}
        return ID_TOKENIZER + json.dumps(ids).encode()

    @property
    def fingerprint(self) -> str:
        """SHA-256 of `proto` in hex."""
        return hashlib.sha256(self.proto).hexdigest()

    @property
    def pieces(self) -> tuple[bytes, ...]:
        """[vocab_size] empty bytes: what an id stands for is unknown."""
        return (b"",) * self.vocab_size

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Writes ids as text.

        Args:
            ids: Any iterable of integers.
            skip_special: No effect: which ids are special is unknown.

        Returns:
            Decimal numbers, with spaces between them.
        """
        return " ".join(str(int(i)) for i in ids)

    def split_answer(self, ids: Iterable[int]) -> tuple[str | None, str]:
        """Returns (None, the ids as decimal numbers)."""
        return None, self.decode(ids)

    def encode(self, *texts: object, **options: object) -> NoReturn:
        """Raises ValueError, as do `render`, `follow` and `example`: ids are needed.

        Args:
            *texts: Texts or messages.
            **options: Of the other tokenizers.

        Raises:
            ValueError: Always.
        """
        raise refuse("prompt", texts[0], "ids: this model has no tokenizer")

    render = follow = example = encode


def unpack(proto: bytes) -> AnyTokenizer:
    """Reads a tokenizer from the bytes that are saved with a model.

    Args:
        proto: The `proto` of a `Tokenizer`, an `HFTokenizer` or an `IdTokenizer`.

    Returns:
        The tokenizer.

    Raises:
        ValueError: The bytes are something else or damaged.
    """
    if proto.startswith(ID_TOKENIZER):
        ids = json.loads(proto.removeprefix(ID_TOKENIZER))
        return IdTokenizer(ids["vocab"], ids["mask"], ids["pad"], tuple(ids["ends"]))
    if proto[:2] != b"PK":
        return Tokenizer(proto)
    files: dict[str, bytes] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(proto)) as archive:
            for entry in archive.infolist():
                limit = MAX_BYTES.get(entry.filename, MAX_BYTES["chat_template.jinja"])
                if entry.file_size > limit:
                    found = f"{entry.filename[:80]!r} has {entry.file_size} bytes"
                    raise CheckpointError(f"tokenizer: {found}; allowed: {limit}")
                files[entry.filename] = archive.read(entry)
        ids = json.loads(files.pop(IDS))
        return HFTokenizer.of(files, **{**ids, "ends": tuple(ids["ends"])})
    except (zipfile.BadZipFile, LookupError, TypeError, OSError) as error:
        raise CheckpointError(f"tokenizer: the archive is damaged: {error}") from None
