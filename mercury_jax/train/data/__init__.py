"""Training data: sources and their mixture, packed into batches whose order can be resumed exactly.

mix = mixture((stdlib(), 0.3), (generated("sudoku4"), 0.7))
batches = build(mix, tokenizer, model.layout, rows=16, row=512, seed=0)
"""

from mercury_jax.train.data.pipeline import build, check_fit, held_out, texts
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

__all__ = [
    "Chat", "Generated", "Mixture", "Source", "Text", "build", "chat", "check_fit", "generated", "held_out",
    "hf", "jsonl", "mixture", "stdlib", "text", "texts",
]  # fmt: skip
