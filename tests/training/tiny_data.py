"""Small texts, a tokenizer of bytes and the calls that the tests of the data share."""

import functools
import json

import numpy as np

from mercury_jax.config import ModelConfig, Pattern
from mercury_jax.models import masks
from mercury_jax.models.row_layout import DocumentLayout
from mercury_jax.tokenizer import SPECIAL, Tokenizer
from mercury_jax.training import data
from mercury_jax.training.data import packing

FIRST = len(SPECIAL)
BLOCK = 8


class Bytes:
    """A tokenizer of bytes, with the real special ids."""

    special = SPECIAL
    mask, pad, eos, vocab_size = SPECIAL.mask, SPECIAL.pad, SPECIAL.eos, FIRST + 256
    end_turn, ends = SPECIAL.end_turn, (SPECIAL.eos,)

    def encode(self, text: str) -> list[int]:
        return [FIRST + byte for byte in text.encode()]

    render, follow, example = Tokenizer.render, Tokenizer.follow, Tokenizer.example  # type: ignore[assignment]
    _content_ids = Tokenizer._content_ids  # type: ignore[assignment]


class Runs(Bytes):
    """The text "7 30" is thirty times the id of document 7: a token tells whose it is."""

    vocab_size = FIRST + 1000

    def encode(self, text: str) -> list[int]:
        name, n = map(int, text.split())
        return [FIRST + name] * n


class Numbers(Bytes):
    """A text is its ids: "21 22". What shards need of a tokenizer is there too."""

    vocab_size, fingerprint, proto, end_turn = 50_000, "numbers", b"numbers", SPECIAL.end_turn

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids, skip_special=True) -> str:
        return " ".join(str(i) for i in ids if i >= FIRST)


def row_layout(pattern: Pattern = "causal_encoder"):
    """As a model lays out rows; `layout` lays out documents alone."""
    return DocumentLayout(ModelConfig(vocab=Numbers.vocab_size, block=BLOCK, pattern=pattern))


def layout(pattern: Pattern = "causal_encoder"):
    return functools.partial(masks.layout, ModelConfig(vocab=FIRST + 1000, block=BLOCK, pattern=pattern))


def conversation(question: str, answer: str) -> str:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": turns})


def build(mixture, tokenizer=None, pattern: Pattern = "causal_encoder", **more):
    setting = {"rows": 4, "row": 128, "seed": 3, **more}
    return data.build(mixture, tokenizer or Bytes(), layout(pattern), **setting)


def take(iterator, n):
    return [next(iterator) for _ in range(n)]


def assert_same(left, right):
    assert len(left) == len(right)
    for a, b in zip(left, right):
        for x, y in zip(a, b):
            np.testing.assert_array_equal(x, y)


def epoch(source, row=256, limit=4, pattern: Pattern = "causal_encoder", epoch=0):
    """One epoch of a source, packed, its open rows flushed."""
    opened = source.open(packing.StreamSettings(Runs(), layout(pattern), row, (0, 0), "train"))
    assert opened is not None
    at, size = opened.at, opened.size
    open_rows, closed = [], []
    for i in range(size):
        done = packing.place(open_rows, (0, i), at(epoch * size + i), row, limit)
        closed += [done] if done else []
    return packing.pack(closed + open_rows, row, Runs.pad)


def owners(row_tokens):
    """The document of each slot of a row, -1 for padding; an eos belongs to the document before it."""
    own = np.where(row_tokens >= FIRST, row_tokens - FIRST, -1)
    for i in np.flatnonzero(row_tokens == Runs.eos):
        own[i] = own[i - 1]
    return own
