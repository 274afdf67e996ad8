"""A checkpoint without a tokenizer: ids go in and come out, text is refused in words."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import numpy as np

from mercury_jax.config import ModelConfig, refuse

MARK = b"ids only "  # how `proto` begins


class Ids:
    """Stands in for the tokenizer that a folder does not have; ids are written as numbers."""

    begin: tuple[int, ...] = ()
    thinking = None
    fim = None
    files: Mapping[str, bytes] = {}

    def __init__(self, config: ModelConfig | None = None, **given: Any):
        """From a model's config, or from what `proto` holds."""
        if config is not None:
            given = dict(
                vocab=config.vocab, mask=config.mask, pad=config.pad, ends=(config.eos, *config.ends)
            )
        self._given = given
        self.vocab_size, self.mask, self.pad = given["vocab"], given["mask"], given["pad"]
        self.ends = tuple(given["ends"])
        self.eos = self.end_turn = self.ends[0]

    def with_mask(self, mask: int) -> Ids:
        """The same ids with another mask."""
        return Ids(**{**self._given, "mask": mask})

    @property
    def proto(self) -> bytes:
        """The ids as bytes, which `of` reads."""
        return MARK + json.dumps(self._given).encode()

    @classmethod
    def of(cls, proto: bytes) -> Ids:
        """What `proto` was made from."""
        return cls(**json.loads(proto.removeprefix(MARK)))

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(self.proto).hexdigest()

    @property
    def pieces(self) -> tuple[bytes, ...]:
        """Nobody knows what an id stands for."""
        return (b"",) * self.vocab_size

    def byte_lengths(self) -> np.ndarray:
        return np.zeros(self.vocab_size, np.int32)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The ids as decimal numbers."""
        return " ".join(str(int(i)) for i in ids)

    def split_answer(self, ids: Iterable[int]) -> tuple[str | None, str]:
        return None, self.decode(ids)

    def encode(self, text: str) -> NoReturn:
        raise refuse("prompt", text, "ids: the checkpoint has no tokenizer.json beside it")

    def render(
        self, messages: Any, thinking: bool = False, add_generation_prompt: bool = True, **more: Any
    ) -> NoReturn:
        self.encode(messages)

    def follow(self, messages: Any, thinking: bool = False) -> NoReturn:
        self.encode(messages)

    def example(self, prompt: str, answer: str, thinking: str | None = None) -> NoReturn:
        self.encode(prompt)
