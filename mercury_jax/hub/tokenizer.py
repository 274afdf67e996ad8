"""Tokenizers of published checkpoints, with the protocol of `mercury_jax.tokenizer`.

`HFTokenizer` combines tokenizer.json and the chat template of a checkpoint. Control tokens can only come from the chat
template, never from user text (`ControlTokens`). Features that a checkpoint lacks (a chat template, tokens for thinking
or for fill-in-the-middle) are None as attributes, and a ValueError from the calls that need them. `IdTokenizer`
replaces the tokenizer of a checkpoint that has none: prompts are ids, and texts are ids as decimal numbers.
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
from mercury_jax.tokenizer import AnyTokenizer, Fim, Messages, Thinking, Tokenizer, lazy, until_end, valid

if TYPE_CHECKING:
    from mercury_jax.hub.chat_template import ChatTemplate

# Known forms of thinking: opening token, text after it, closing token, text after it.
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
IDS = "ids.json"  # name of the file with the special ids in the archive of `HFTokenizer.proto`
ID_TOKENIZER = b"ids only "  # prefix of `IdTokenizer.proto`


class _ThinkingMarks(NamedTuple):
    """The form of thinking that a tokenizer has; a row of `THINKING` as ids."""

    opening: tuple[int, ...]  # the opening token and the ids of `lead`
    close: int
    lead: str  # text after the opening token
    tail: str  # text after the closing token


@dataclass(frozen=True, eq=False)
class HFTokenizer:
    """The tokenizer of a checkpoint. Use `of` to build one from the result of `tokenizer_files.read_files`.

    Attributes:
        files: Contents of the tokenizer files by name.
        data: The parsed files.
        tokens: The tokenizer, with control tokens that user text cannot produce.
        mask: Id of the mask token, or None.
        eos: Id that ends a text.
        pad: Id that pads rows of a batch.
        ends: Ids that end an answer; `eos` is the first.
        vocab: Size of the model's vocabulary, which may have more ids than the tokenizer. None: the tokenizer's size.
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
        """Builds a tokenizer from its files."""
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
            # A training recipe may add the mask as a new id, right after the tokenizer's last one.
            most = size if name == "mask" and vocab is None else size - 1
            if i is not None and not 0 <= i <= most:
                raise refuse(name, i, f"an id in 0..{most}")
        return found

    def with_mask(self, mask: int) -> HFTokenizer:
        """Returns the same tokenizer with another mask id, for checkpoints that have none or a wrong one."""
        if mask == self.mask:
            return self
        given = {"eos": self.eos, "pad": self.pad, "ends": self.ends, "vocab": self.vocab}
        return HFTokenizer.of(self.files, mask=mask, **given)

    @lazy
    def proto(self) -> bytes:
        """The files and the special ids as a zip archive, which `unpack` reads."""
        ids = {name: getattr(self, name) for name in ("mask", "eos", "pad", "ends", "vocab")}
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as archive:
            for name, data in sorted({**self.files, IDS: json.dumps(ids).encode()}.items()):
                archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)  # no date in it
        return out.getvalue()

    @lazy
    def fingerprint(self) -> str:
        """SHA-256 of the files and the special ids, in hex."""
        found = hashlib.sha256(repr((self.mask, self.eos, self.pad, self.ends, self.vocab)).encode())
        for name, data in sorted(self.files.items()):
            found.update(f"{name} {len(data)}\n".encode() + data)
        return found.hexdigest()

    # --- ids and texts

    @lazy
    def vocab_size(self) -> int:
        """One more than the tokenizer's largest id; the model's vocabulary may be larger."""
        return 1 + max(self._ids.values(), default=-1)

    @cached_property
    def _ids(self) -> dict[str, int]:
        return self.tokens.core.get_vocab(with_added_tokens=True)

    @cached_property
    def _hidden(self) -> frozenset[int]:
        """Ids that are left out of decoded answers: special tokens, ends, padding and mask."""
        special = {i for i, token in self.data.added.items() if token.special}
        return frozenset({*special, *self.ends, self.pad, *(() if self.mask is None else (self.mask,))})

    @lazy
    def pieces(self) -> tuple[bytes, ...]:
        """[vocab_size] the bytes of each id; empty for ids that are left out of answers."""
        added = {i: token.text for i, token in self.data.added.items()}
        found = token_bytes(self.data.json["decoder"], self._ids, added)
        return tuple(b"" if i in self._hidden else piece for i, piece in enumerate(found))

    @lazy
    def begin(self) -> tuple[int, ...]:
        """Ids in front of a plain text: the beginning-of-text token if the tokenizer adds one, otherwise none."""
        bos = self.tokens.control.get(self.data.named.get("bos_token", ""))
        if self.data.adds_bos and bos is not None:
            return (bos,)
        # The post-processor of tokenizer.json decides: see what it puts in front of a sample text.
        whole = self.tokens.core.encode("a", add_special_tokens=True).ids
        plain = self.tokens.encode("a")
        starts = [k for k in range(len(whole)) if whole[k : k + len(plain)] == plain]
        return tuple(whole[: starts[0]]) if starts else ()

    def encode(self, text: str) -> list[int]:
        """Encodes a text."""
        return self.tokens.encode(valid(text))

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Decodes ids with the decoder of the checkpoint."""
        found = []
        for i in map(int, ids):
            if i < 0 or (self.vocab is not None and i >= max(self.vocab, self.vocab_size)):
                raise ValueError(f"ids: {i}; must be in 0..{max(self.vocab or 0, self.vocab_size) - 1}")
            if i < self.vocab_size and not (skip_special and i in self._hidden):
                found.append(i)
        return self.tokens.decode(found)

    @lazy
    def fim(self) -> Fim | None:
        """The fill-in-the-middle tokens; None if the vocabulary has none."""
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
        """The ids that open and close thinking; None if the vocabulary has none."""
        return None if self._marks is None else Thinking(self._marks.opening, self._marks.close)

    @lazy
    def end_turn(self) -> int:
        """The id that the chat template writes after an answer; `eos` if there is no usable template."""
        try:
            ids = self._rendered([], None, prompt=False, after_answer=True)
        except ValueError:  # no template, or it refuses the probing messages
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
        continue_final_message: bool = False,
    ) -> list[int]:
        """Encodes a conversation with the chat template.

        Args:
            at_once: Answer without thinking: if `thinking` is False, disable it in the template, and close a thinking
                section that the template opens anyway.
            continue_final_message: End with the text of the last message, as in transformers; nothing follows it, not
                even the end of its turn.
        """
        if continue_final_message:
            return self._rendered(messages, False, prompt=False, tools=tools, continued=True)
        thinks = True if thinking else False if at_once else None
        ids = self._rendered(messages, thinks, prompt=add_generation_prompt, tools=tools)
        return self._with_thinking(ids, thinks) if add_generation_prompt and thinks is not None else ids

    def follow(self, messages: Messages, thinking: bool = False) -> list[int]:
        """Encodes the messages that follow an answer, to append them to the ids of a conversation."""
        ids = self._rendered(messages, thinking or None, prompt=True, after_answer=True)
        return self._with_thinking(ids, True) if thinking else ids

    def example(self, prompt: str, answer: str, thinking: str | None = None) -> tuple[list[int], list[int]]:
        """Encodes a training example.

        Returns:
            (prompt ids, response ids). The prompt includes the start of the assistant turn; the response includes the
            id that ends it.
        """
        question, encode = self.render([{"role": "user", "content": prompt}]), self.tokens.encode
        end = self.end_turn if self.end_turn in (*self.ends, self.pad) else self.eos
        if thinking is None:
            return question, [*encode(answer), end]
        marks = self._required_marks()
        # Where thinking starts on a new line, the closing token stands on its own line as well.
        inside = encode(marks.lead + thinking + ("\n" if marks.lead else ""))
        return question, [marks.opening[0], *inside, marks.close, *encode(marks.tail + answer), end]

    def split_answer(self, ids: Iterable[int]) -> tuple[str | None, str]:
        """Splits sampled ids into thinking and answer. Line breaks between the two are dropped.

        Returns:
            (thinking or None, answer). The answer is empty if the thinking is not closed.
        """
        shown = until_end(ids, (*self.ends, self.pad, self.end_turn))
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
        """Opens thinking at the end of a prompt, or (`thinking` False) closes what the template opened, empty."""
        marks = self._required_marks() if thinking else self._marks
        if marks is None:
            return ids
        # `opened`: the template itself ended the prompt with an opening token, at index `at`.
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
        continued: bool = False,
    ) -> list[int]:
        """Renders and encodes a conversation with the chat template."""
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
        if after_answer or continued:
            # A placeholder that occurs in no message, so that its place can be found in the rendered text.
            names = (f"Answer{n}here" for n in range(len(texts) + 1))
            answer = next(p for p in names if not any(p in text for text in texts))
        if continued:
            messages = [*messages[:-1], {**messages[-1], "content": (messages[-1]["content"] or "") + answer}]
        if after_answer:
            before = [{"role": "user", "content": "Question"}, {"role": "assistant", "content": answer}]
        text = self._compiled[name].render([*before, *messages], self.data.named, **more)
        plain, mask = str.__str__(text), text.mask
        if answer:
            if plain.count(answer) != 1:
                allowed = "a whole conversation: this chat template cannot continue one after an answer"
                raise refuse("messages", f"{len(messages)} messages", allowed)
            at = plain.index(answer)
            part = slice(at) if continued else slice(at + len(answer), None)
            plain, mask = plain[part], mask[part]
        # Refuse a control token that is neither marked as the template's own nor part of a message: the template has
        # composed it by an operation that `TracedText` does not trace, and it would be encoded as characters.
        for token in self.tokens.foreign(plain, mask):
            if not any(token in x for x in texts):
                raise ValueError(f"chat_template: puts {token!r} together in a way that is not supported")
        return self.tokens.encode_rendered(plain, mask)


def _texts(value: object) -> Iterator[str]:
    """Yields every string in JSON-like data, including keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple):
        for inside in value:
            yield from _texts(inside)


@dataclass(frozen=True)
class IdTokenizer:
    """The tokenizer of a checkpoint without tokenizer files: decodes ids to decimal numbers, refuses to encode text.

    Attributes:
        vocab_size: Size of the model's vocabulary.
        mask: Id of the mask token, or None.
        pad: Id that pads rows of a batch.
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
        """Returns the tokenizer for a model with this config."""
        return cls(config.vocab, config.mask, config.pad, (config.eos, *config.ends))

    def with_mask(self, mask: int) -> IdTokenizer:
        """Returns the same tokenizer with another mask id."""
        return replace(self, mask=mask)

    @property
    def eos(self) -> int:
        """Id that ends a text."""
        return self.ends[0]

    end_turn = eos

    @property
    def proto(self) -> bytes:
        """The special ids as bytes, which `unpack` reads."""
        ids = {"vocab": self.vocab_size, "mask": self.mask, "pad": self.pad, "ends": self.ends}
        return ID_TOKENIZER + json.dumps(ids).encode()

    @property
    def fingerprint(self) -> str:
        """SHA-256 of `proto` in hex."""
        return hashlib.sha256(self.proto).hexdigest()

    @property
    def pieces(self) -> tuple[bytes, ...]:
        """[vocab_size] empty bytes, because the text of the ids is unknown."""
        return (b"",) * self.vocab_size

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Writes ids as text."""
        return " ".join(str(int(i)) for i in ids)

    def split_answer(self, ids: Iterable[int]) -> tuple[str | None, str]:
        """Returns (None, the ids as decimal numbers)."""
        return None, self.decode(ids)

    def encode(self, *texts: object, **options: object) -> NoReturn:
        """Raises ValueError, because prompts must be ids. `render`, `follow` and `example` are the same function."""
        raise refuse("prompt", texts[0], "ids: this model has no tokenizer")

    render = follow = example = encode


def unpack(proto: bytes) -> AnyTokenizer:
    """Reads a tokenizer from the bytes that are saved with a model."""
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
