"""Training data: sources and their mixture, packed into batches whose order can be resumed exactly.

mix = mixture((stdlib(), 0.3), (generated("sudoku4"), 0.7))
batches = build(mix, tokenizer, model.layout, rows=16, row=512, seed=0)
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from mercury_jax.train.data.sources import (
    Chat,
    Generated,
    Mixture,
    Source,
    Text,
    chat,
    generated,
    hf,
    jsonl,
    mixture,
    stdlib,
    text,
)

if TYPE_CHECKING:
    from mercury_jax.train.data.pipeline import build, check_fit, held_out, texts

__all__ = [
    "Chat", "Generated", "Mixture", "Source", "Text", "build", "chat", "check_fit", "generated", "held_out",
    "hf", "jsonl", "mixture", "stdlib", "text", "texts",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """The pipeline needs grain; a recipe that only names its sources, an evaluation and `mercury info` do not."""
    if name not in ("build", "check_fit", "held_out", "texts"):
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__]
        )
    from mercury_jax.train.data import pipeline

    return getattr(pipeline, name)
