"""Tokenizers: the protocol that training, decoding and serving rely on, and our own SentencePiece tokenizer.

`AnyTokenizer` is the protocol. It is implemented by `Tokenizer` here (a byte-complete SentencePiece BPE, trained for a
new model), by `hub.tokenizer.HFTokenizer` (tokenizer.json of a published checkpoint) and by `hub.tokenizer.IdTokenizer`
(a checkpoint without a tokenizer). None of them ever encodes user text as a special token.

`chat.py` describes the conversation format of `Tokenizer`.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import sentencepiece as spm

from mercury_jax import chat
from mercury_jax.config import refuse

if TYPE_CHECKING:
    lazy = property  # pyright does not accept a cached_property where a protocol has a property
else:
    lazy = cached_property

Messages = Sequence[Mapping[str, Any]]  # of {"role", "content"}; see `Tokenizer.render`


class Thinking(NamedTuple):
    """The tokens that enclose a model's thinking.

    Attributes:
        opening: Ids before the thinking; the first one is the token that opens it.
        close: Id of the token that closes the thinking.
    """

    opening: tuple[int, ...]
    close: int


class Fim(NamedTuple):
    """Special tokens of fill-in-the-middle, which precede the prefix, the suffix, and the middle to generate."""

    prefix: int
    suffix: int
    middle: int


if TYPE_CHECKING:

    class AnyTokenizer(Protocol):
        """The protocol of a tokenizer, as training, decoding and serving use it.

        Attributes:
            mask: Id of the mask token, or None.
            pad: Id that pads the rows of a batch.
            eos: Id that ends a text.
            ends: All ids that end an answer; `eos` is the first.
            begin: Ids that are put before a text that is not a conversation.
            end_turn: Id that closes a turn of a conversation.
            thinking: Tokens that enclose the thinking; None if the vocabulary has none.
            fim: Tokens of fill-in-the-middle; None if the vocabulary has none.
            vocab_size: One more than the largest id that has a text.
            fingerprint: SHA-256 in hex; equal tokenizers have equal fingerprints.
            proto: The whole tokenizer as bytes, as it is saved with a model.
            files: Tokenizer files for other libraries, by file name.
            pieces: [vocab_size] UTF-8 bytes of each id; empty for ids that an answer does not show.

        `encode`, `decode`, `render`, `follow`, `example` and `split_answer` are documented at `Tokenizer`.
        """

        @property
        def mask(self) -> int | None: ...
        @property
        def pad(self) -> int: ...
        @property
        def eos(self) -> int: ...
        @property
        def ends(self) -> tuple[int, ...]: ...
        @property
        def begin(self) -> tuple[int, ...]: ...
        @property
        def end_turn(self) -> int: ...
        @property
        def thinking(self) -> Thinking | None: ...
        @property
        def fim(self) -> Fim | None: ...
        @property
        def vocab_size(self) -> int: ...
        @property
        def fingerprint(self) -> str: ...
        @property
        def proto(self) -> bytes: ...
        @property
        def files(self) -> Mapping[str, bytes]: ...
        @property
        def pieces(self) -> tuple[bytes, ...]: ...
        def with_mask(self, mask: int) -> AnyTokenizer: ...
        def encode(self, text: str) -> list[int]: ...
        def decode(self, ids: Iterable[int], skip_special: bool = True) -> str: ...
        def render(
            self,
            messages: Messages,
            thinking: bool = False,
            add_generation_prompt: bool = True,
            tools: Sequence[Mapping[str, Any]] | None = None,
            at_once: bool = False,
            continue_final_message: bool = False,
        ) -> list[int]: ...
        def follow(self, messages: Messages, thinking: bool = False) -> list[int]: ...
        def example(
            self, prompt: str, answer: str, thinking: str | None = None
        ) -> tuple[list[int], list[int]]: ...
        def split_answer(self, ids: Iterable[int]) -> tuple[str | None, str]: ...

else:
    AnyTokenizer = Any  # a runtime check of the protocol (beartype in tests) would compute every property


def valid(text: str, name: str = "text") -> str:
    """Checks that a value is a text that UTF-8 can encode."""
    if not isinstance(text, str):
        raise ValueError(f"{name}: {type(text).__name__}; must be a str")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"lone surrogate U+{ord(text[error.start]):04X} at {error.start}"
        raise ValueError(f"{name}: {found}; must be valid Unicode") from None
    return text


def until_end(ids: Iterable[int], ends: Collection[int]) -> list[int]:
    """Cuts sampled ids at the first that ends them."""
    return list(itertools.takewhile(lambda i: i not in ends, map(int, ids)))


def has_chat_template(tokenizer: AnyTokenizer) -> bool:
    """Says whether a tokenizer can encode a conversation."""
    try:
        return bool(tokenizer.render([{"role": "user", "content": "x"}]))
    except ValueError:
        return False


class Special(NamedTuple):
    """Ids of the special tokens, the same in every `Tokenizer`.

    `unk` exists because SentencePiece requires it; with byte fallback `encode` never returns it.
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

_SPACE = "\u2581"  # SentencePiece represents a space by U+2581; a literal one is encoded as its bytes
# For source code: newlines and runs of spaces are single pieces, whether or not the training text contains them.
_WHITESPACE = ("\n", "\n\n", "\t", *(_SPACE * n for n in (2, 4, 8, 12, 16)))
# Training text is split at characters that the trainer drops or reserves. It is also split inside "<|" and "<0", so
# that no learned piece can spell a special token or a byte piece.
_BREAK = re.compile("[\n\0\u2581\u2585]|(?<=<)(?=[|0])")
_MAX_SENTENCE = 2_000  # characters; the trainer skips sentences above `max_sentence_length` bytes


@dataclass(frozen=True)
class Tokenizer:
    """A byte-complete SentencePiece BPE: `decode(encode(s)) == s` for every `str` that UTF-8 can encode.

    Digits are single tokens, whitespace is preserved, and characters outside the vocabulary become byte tokens.
    Special tokens have the ids of `SPECIAL`, and no text is encoded as one.

    Attributes:
        proto: The serialised SentencePiece model.

    Raises:
        ValueError: `proto` is not a complete model of this kind.
    """

    proto: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.proto, bytes):
            raise refuse(
                "proto", self.proto, "the bytes of a sentencepiece model; Tokenizer.load reads a file"
            )
        try:
            if not self.proto:  # SentencePiece would load nothing, and then log an error at every call
                raise ValueError("empty")
            names = [  # the pieces that no text can match
                self._model.id_to_piece(i)
                for i in range(min(self.vocab_size, len(SPECIAL)))
                if self._model.is_control(i) or self._model.is_unknown(i)
            ]
            all_bytes = sum(self._model.is_byte(i) for i in range(self.vocab_size)) == 256
            complete = all_bytes and names == [f"<|{name}|>" for name in SPECIAL._fields]
            if complete:  # a file cut at a field boundary still parses, but fails this round trip
                probe = " a  b\t<|mask|>\n\n    12"
                ids = self.encode(probe)
                complete = self.decode(ids) == probe and min(ids) >= len(SPECIAL)
        except (RuntimeError, ValueError, IndexError) as error:
            raise ValueError(f"proto: {len(self.proto)} bytes are no complete sentencepiece model") from error
        if not complete:
            raise ValueError(
                f"proto: a sentencepiece model of {self.vocab_size} pieces, cut short or not ours; "
                "must have our special tokens first, byte fallback and no normalisation"
            )

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> Tokenizer:
        """Trains a tokenizer. The same texts always give the same model.

        Args:
            texts: Training texts.
            vocab_size: Number of pieces. 285 of them are fixed: special tokens, whitespace pieces and the 256 bytes.

        Returns:
            The tokenizer.

        Raises:
            ValueError: `vocab_size` is too small for the characters of the texts, or larger than the number of
                pieces that can be learned from them.
        """
        fixed = len(SPECIAL) + len(_WHITESPACE) + 256
        if isinstance(texts, str | bytes) or not isinstance(texts, Iterable):
            raise refuse("texts", texts, "several texts: a list, or a generator")
        if isinstance(vocab_size, bool) or not isinstance(vocab_size, int):
            raise refuse("vocab_size", vocab_size, "a whole number")
        if vocab_size <= fixed:
            allowed = f"more than the {fixed} fixed pieces (specials, whitespace, bytes)"
            raise refuse("vocab_size", vocab_size, allowed)
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
                max_sentence_length=8 * _MAX_SENTENCE, num_threads=1, minloglevel=2,
            )  # fmt: skip
        except RuntimeError as error:
            # The trainer's message contains the bound.
            if most := re.search(r"too high .*<= (\d+)", str(error)):
                allowed = (
                    f"at most {most[1]}: these texts have no more pieces to learn. "
                    "More or more varied text allows more"
                )
            elif least := re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(error)):
                allowed = (
                    f"at least {least[1]}: {fixed} fixed pieces (specials, whitespace, bytes), and one for each "
                    "different character of these texts"
                )
            else:
                allowed = f"a size that sentencepiece can make of these texts; it says: {error}"
            raise refuse("vocab_size", vocab_size, allowed) from error
        return cls(out.getvalue())

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Reads a file that `save` wrote.

        Args:
            path: The file.

        Returns:
            The tokenizer.

        Raises:
            ValueError: The file is missing, cut short, or another kind of file.
        """
        try:
            proto = Path(path).read_bytes()
        except OSError as error:
            raise ValueError(f"tokenizer is {str(path)!r}: it cannot be read: {error.strerror}") from error
        try:
            return cls(proto)
        except ValueError as error:
            raise ValueError(f"path: {str(path)!r} holds no tokenizer of ours: {error}") from error

    def save(self, path: str | Path) -> None:
        """Writes the SentencePiece model to `path`."""
        Path(path).write_bytes(self.proto)

    # --- ids

    special = SPECIAL
    mask = SPECIAL.mask
    pad = SPECIAL.pad
    eos = SPECIAL.eos
    ends = (SPECIAL.eos,)
    begin = ()
    end_turn = SPECIAL.end_turn
    thinking = Thinking((SPECIAL.think,), SPECIAL.end_think)
    fim = Fim(SPECIAL.fim_prefix, SPECIAL.fim_suffix, SPECIAL.fim_middle)

    @property
    def vocab_size(self) -> int:
        """Number of pieces."""
        return self._model.get_piece_size()

    @property
    def files(self) -> Mapping[str, bytes]:
        """The model under SentencePiece's usual file name."""
        return {"tokenizer.model": self.proto}

    @lazy
    def fingerprint(self) -> str:
        """SHA-256 of the model in hex."""
        return hashlib.sha256(self.proto).hexdigest()

    @lazy
    def pieces(self) -> tuple[bytes, ...]:
        """[vocab_size] UTF-8 bytes of each id; empty for special tokens."""
        found = []
        for i in range(self.vocab_size):
            piece = self._model.id_to_piece(i)
            if self._model.is_control(i) or self._model.is_unknown(i):
                found.append(b"")
            elif self._model.is_byte(i):
                found.append(bytes([int(piece[3:5], 16)]))
            else:
                found.append(piece.replace(_SPACE, " ").encode())
        return tuple(found)

    def with_mask(self, mask: int) -> Tokenizer:
        """Returns this tokenizer unchanged: its mask id is fixed.

        Raises:
            ValueError: `mask` differs from the id of the mask token.
        """
        if mask != self.mask:
            raise refuse("mask", mask, f"{self.mask}, as in the tokenizer")
        return self

    # --- texts

    def encode(self, text: str) -> list[int]:
        """Encodes a text.

        Args:
            text: Any text; text that spells a special token is encoded as ordinary characters.

        Returns:
            Ids, none of which is a special token.

        Raises:
            ValueError: The text contains a lone surrogate.
        """
        first, *rest = valid(text).split(_SPACE)
        ids = self._model.encode(first)
        for part in rest:
            ids += [self._model.piece_to_id(f"<0x{byte:02X}>") for byte in _SPACE.encode()]
            ids += self._model.encode(part)
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Decodes ids.

        Args:
            ids: Any iterable of integers.
            skip_special: Whether special tokens are left out; False writes them as `<|name|>`.

        Returns:
            The text. Bytes that are not valid UTF-8, such as half a character, become U+FFFD.

        Raises:
            ValueError: An id is outside the vocabulary.
        """
        found: list[bytes] = []
        size = len(self.pieces)
        for i in map(int, ids):
            if not 0 <= i < size:
                raise ValueError(f"ids: {i}; must be in 0..{size - 1}")
            named = not skip_special and i < len(SPECIAL)
            found.append(f"<|{SPECIAL._fields[i]}|>".encode() if named else self.pieces[i])
        return b"".join(found).decode("utf-8", errors="replace")

    # --- conversations, in the format of `chat.py`

    def render(
        self,
        messages: Messages,
        thinking: bool = False,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        at_once: bool = False,
        continue_final_message: bool = False,
    ) -> list[int]:
        """Encodes a conversation.

        Args:
            messages: Mappings {"role", "content"}; a role is one of `chat.ROLES`. An assistant message may have
                `tool_calls`, a list of {"function": {"name", "arguments"}} whose arguments are a mapping, or a text
                that is written as it is; its content may then be None. A tool message has the `tool_call_id` of the
                call that it answers.
            thinking: Append the token that opens the thinking, so that the answer starts with it. False: the model
                decides whether to think.
            add_generation_prompt: End with the start of an assistant turn.
            tools: Functions that the model may call, {"function": {"name", "description", "parameters"}} each.
            at_once: Only for chat templates of other checkpoints: without `thinking`, tell the template explicitly
                that there is no thinking. No effect here.
            continue_final_message: End with the text of the last message, without the end of its turn.

        Returns:
            Ids.

        Raises:
            ValueError: `messages` is empty, a role is unknown, or content is missing or not a text.
        """
        if isinstance(messages, (str, Mapping)) or not messages:
            raise ValueError(f"messages: {messages!r}; must be a list of at least one message")
        ids: list[int] = []
        for i, message in enumerate(messages):
            role = chat.check_message(message, f"messages[{i}]")
            content = self._content_ids(f"messages[{i}]", message)
            if tools and i == 0:
                listed = [SPECIAL.tool, *self.encode(chat.tools_text(tools))]
                ids += [] if role == "system" else [SPECIAL.system, *listed, SPECIAL.end_turn]
                content += listed if role == "system" else []
            ids += [getattr(SPECIAL, role), *content, SPECIAL.end_turn]
        if continue_final_message:
            return ids[:-1]
        if add_generation_prompt:
            ids.append(SPECIAL.assistant)
            ids += [SPECIAL.think] * thinking
        return ids

    def _content_ids(self, name: str, message: Mapping[str, Any]) -> list[int]:
        role, ids = message["role"], self.encode(message.get("content") or "")
        if message.get("tool_calls") and role != "assistant":
            raise ValueError(f"{name}.tool_calls: in a {role} message; only an assistant calls tools")
        if role == "tool" and message.get("tool_call_id") is not None:
            return [SPECIAL.tool_result, *ids, SPECIAL.end_tool_result]
        for j, call in enumerate(message.get("tool_calls") or ()):
            function = call.get("function") if isinstance(call, Mapping) else None
            if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
                must = "must have a function with name and arguments"
                raise ValueError(f"{name}.tool_calls[{j}]: {call!r}; {must}")
            if not isinstance(function.get("arguments"), Mapping | str):
                raise ValueError(f"{name}.tool_calls[{j}].function.arguments: must be a mapping or a text")
            text = chat.call_text(function["name"], function["arguments"])
            ids += [SPECIAL.tool_call, *self.encode(text), SPECIAL.end_tool_call]
        return ids

    def follow(self, messages: Messages, thinking: bool = False) -> list[int]:
        """Encodes the continuation of a conversation after an answer: the end of its turn, then further messages.

        Args:
            messages: As for `render`.
            thinking: As for `render`.

        Returns:
            Ids.
        """
        return [self.end_turn, *self.render(messages, thinking)]

    def example(self, prompt: str, answer: str, thinking: str | None = None) -> tuple[list[int], list[int]]:
        """Encodes a training example.

        Args:
            prompt: Text of the user's turn.
            answer: Text of the answer.
            thinking: Text of the thinking before the answer; None: no thinking.

        Returns:
            (prompt ids, response ids): the user turn and the start of the assistant turn; then the thinking and the
            answer, closed by `eos`.
        """
        response = [*self.encode(answer), SPECIAL.eos]
        if thinking is not None:
            response = [SPECIAL.think, *self.encode(thinking), SPECIAL.end_think, *response]
        return self.render([{"role": "user", "content": prompt}]), response

    def split_answer(self, ids: Iterable[int]) -> tuple[str | None, str]:
        """Splits sampled ids into thinking and answer: `split_answer(example(p, a, t)[1]) == (t, a)`.

        Args:
            ids: Sampled ids, read up to the first `eos`, `end_turn` or `pad`. The token that opens the thinking may be
                missing, because the prompt may end with it.

        Returns:
            (thinking or None, answer). The answer is empty if the thinking was not closed.
        """
        shown = until_end(ids, (SPECIAL.eos, SPECIAL.end_turn, SPECIAL.pad))
        if SPECIAL.end_think in shown:
            close = shown.index(SPECIAL.end_think)
            return self.decode(shown[:close]), self.decode(shown[close + 1 :])
        return (self.decode(shown), "") if SPECIAL.think in shown else (None, self.decode(shown))

    @cached_property
    def _model(self) -> spm.SentencePieceProcessor:
        return spm.SentencePieceProcessor(model_proto=self.proto)


def _sentences(texts: Iterable[str]) -> Iterator[str]:
    """Yields the lines of the texts, at most `_MAX_SENTENCE` characters each, split at `_BREAK`."""
    yield " "  # with `required_chars`, this makes the space a piece even if no text has one
    for text in texts:
        for line in _BREAK.split(text):
            for start in range(0, len(line), _MAX_SENTENCE):
                yield line[start : start + _MAX_SENTENCE]
