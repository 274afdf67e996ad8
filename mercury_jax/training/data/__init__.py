"""Training data: sources and their mixture, packed into batches whose order can be resumed exactly.

mix = mixture((stdlib(), 0.3), (generated("sudoku4"), 0.7))
batches = build(mix, tokenizer, model.layout, rows=16, row=512, seed=0)

sources       data sources: the values that a recipe holds, and how each of them is read
chats         the source of conversations
conversations the forms of a conversation, and the examples that it becomes
packing       cutting, laying out and packing documents
pipeline      a mixture of sources as an iterator of batches; the only module that imports grain
corpus        a corpus that was tokenised once: its files, and the source `Shards`
filling       rows filled from the windows of such a corpus
shuffle       permutations and random numbers as functions of a key and an index
documents     reading texts of any size from files and datasets
shard_writer  tokenising texts into shards, in several processes
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from mercury_jax.training.data.chats import Chat, chat
from mercury_jax.training.data.corpus import Shards, shards
from mercury_jax.training.data.sources import (
    BatchSource,
    DataSource,
    Generated,
    Mixture,
    Text,
    generated,
    hf,
    jsonl,
    mixture,
    stdlib,
    text,
)

if TYPE_CHECKING:
    from mercury_jax.training.data.pipeline import build, check_fit, texts

__all__ = [
    "BatchSource", "Chat", "DataSource", "Generated", "Mixture", "Shards", "Text", "build", "chat", "check_fit",
    "generated", "hf", "jsonl", "mixture", "shards", "stdlib", "text", "texts",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Imports the pipeline, and grain with it, at first use: a recipe that only lists its sources needs neither."""
    if name not in ("build", "check_fit", "texts"):
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__]
        )
    from mercury_jax.training.data import pipeline

    return getattr(pipeline, name)
