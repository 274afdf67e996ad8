"""A checkpoint without a tokenizer: ids go in and come out, text is refused in words."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from mercury_jax.config import ModelConfig, refuse


class Ids:
    """Stands in for a tokenizer that a folder does not have; ids are written as numbers."""

    def __init__(self, config: ModelConfig):
        self.vocab_size, self.mask, self.pad, self.eos = config.vocab, config.mask, config.pad, config.eos
        self.ends = config.ends

    @property
    def files(self) -> Mapping[str, bytes]:
        """Nothing to write beside a checkpoint."""
        return {}

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(b"ids only").hexdigest()

    def encode(self, text: str) -> list[int]:
        raise self._missing(text)

    def render(self, messages: Any, *args: Any, **more: Any) -> list[int]:
        raise self._missing(messages)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The ids as decimal numbers."""
        return " ".join(str(int(i)) for i in ids)

    def _missing(self, given: object) -> ValueError:
        return refuse("prompt", given, "ids: the checkpoint has no tokenizer.json beside it")
