"""What training and decoding need of a tokenizer, whoever made it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    lazy = property  # pyright takes no cached_property for a protocol's property
else:
    lazy = cached_property

Messages = Sequence[Mapping[str, Any]]  # of {"role", "content"}


class Thinking(NamedTuple):
    """opening: what stands before thinking, its first id the token for it; close: the token that ends it."""

    opening: tuple[int, ...]
    close: int


class Fim(NamedTuple):
    """The tokens of fill-in-the-middle: prefix, what is before; suffix, what is behind; middle, the answer."""

    prefix: int
    suffix: int
    middle: int


class AnyTokenizer(Protocol):
    """What training and decoding need of a tokenizer, ours or a checkpoint's (`hub.tokenizer.HFTokenizer`).

    No text turns into a token of control. ends: ids that end an answer, `eos` the first. begin: what
    stands before a text that is no conversation. end_turn: what closes a turn of a conversation. thinking,
    fim: None where there are no tokens for it. proto: all of it as bytes. files: what lies beside a
    checkpoint for other libraries, by name. Conversations as in `mercury_jax.chat`.
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
    def byte_lengths(self) -> np.ndarray: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str: ...
    def render(
        self, messages: Messages, thinking: bool = False, add_generation_prompt: bool = True
    ) -> list[int]: ...
    def follow(self, messages: Messages, thinking: bool = False) -> list[int]: ...
    def example(
        self, prompt: str, answer: str, thinking: str | None = None
    ) -> tuple[list[int], list[int]]: ...
    def split_answer(self, ids: Iterable[int]) -> tuple[str | None, str]: ...


if not TYPE_CHECKING:
    # For the type checker alone: at run time a check would have to compute each property.
    AnyTokenizer = Any


def valid(text: str, name: str = "text") -> str:
    """`text`. ValueError for what is no str, and for a lone surrogate, which no UTF-8 text has."""
    if not isinstance(text, str):
        raise ValueError(f"{name}: {type(text).__name__}; must be a str")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"lone surrogate U+{ord(text[error.start]):04X} at {error.start}"
        raise ValueError(f"{name}: {found}; must be valid Unicode") from None
    return text
