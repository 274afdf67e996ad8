"""Rows laid out at once are those of their pieces laid out one by one and packed."""

import numpy as np
import pytest

from mercury_jax.config import ModelConfig
from mercury_jax.models.row_layout import DocumentLayout
from mercury_jax.training.data import packing
from mercury_jax.types import RowLayout, RowPieces

EOS, PAD = 3, 0
CASES = [
    ("bidirectional", 8), ("causal_encoder", 8), ("block_causal", 8), ("causal_encoder", 1), ("causal", 8),
    ("causal, filled", 8), ("autoregressive", 1),
]  # fmt: skip


def document_layout(pattern: str, block: int) -> DocumentLayout:
    """ "causal": a causal encoder that predicts the next token, whose clean part holds the whole document; "filled":
    and the ids that complete its last canvas."""
    if pattern == "autoregressive":
        config = ModelConfig(vocab=1000, block=1, pattern="block_causal", predicts_next=True, mask=None)
        return DocumentLayout(config)
    predicts_next = pattern.startswith("causal,") or pattern == "causal"
    kind = "causal_encoder" if predicts_next else pattern
    config = ModelConfig(vocab=1000, block=block, pattern=kind, predicts_next=predicts_next)
    return DocumentLayout(config, clean_fill="filled" in pattern)


def random_rows(layout: DocumentLayout, length: int, rng: np.random.Generator):
    """Rows of random pieces, as packed documents and as the arguments of `layout.rows`."""
    rows, pieces, tokens = [], [], []
    for number in range(int(rng.integers(1, 5))):
        row, room = packing.PackedRow(), length
        while True:
            n = int(rng.integers(1, 60))
            prompt = int(rng.integers(min(layout.block, n)))
            slots = int(layout.sizes(np.array([n]), np.array([prompt])).slots[0])
            if slots > room:
                break
            ids = rng.integers(10, 900, n).astype(np.int32)
            row.add((0, 0), layout(ids, prompt, EOS))
            assert len(row.laid[-1].tokens) == slots
            pieces.append((number, sum(map(len, tokens)), n, prompt))
            tokens.append(ids)
            room -= slots
        if not row.laid:
            return random_rows(layout, length, rng)
        rows.append(row)
    return rows, np.concatenate(tokens), RowPieces(*np.array(pieces).T)


@pytest.mark.parametrize("pattern, block", CASES)
def test_rows_are_those_of_documents_laid_out_one_by_one(pattern, block):
    layout, rng = document_layout(pattern, block), np.random.default_rng(0)
    assert isinstance(layout, RowLayout)
    for _ in range(30):
        length = int(rng.integers(60, 200))
        rows, tokens, pieces = random_rows(layout, length, rng)
        wanted = packing.pack(rows, length, PAD)
        found = layout.rows(tokens, pieces, (len(rows), length), fill=EOS, pad=PAD)
        for name, a, b in zip(wanted._fields, wanted, found):
            np.testing.assert_array_equal(a, b, err_msg=name)
            assert a.dtype == b.dtype


@pytest.mark.parametrize("pattern, block", CASES)
def test_the_longest_fitting_piece_fits_and_one_more_canvas_does_not(pattern, block):
    layout = document_layout(pattern, block)
    slots = lambda n, prompt: len(layout(np.zeros(n, np.int32), prompt, EOS).tokens)
    for prompt in range(block):
        for room in range(70):
            n = layout.fitting(room, prompt)
            assert n == 0 or (n > prompt and slots(n, prompt) <= room)
            first = int(layout.first_canvas(np.array([prompt]))[0])
            assert slots((n or first) + block, prompt) > room


def test_spans_narrow_what_may_be_noised():
    layout = document_layout("causal_encoder", 8)
    rows, tokens, pieces = random_rows(layout, 150, np.random.default_rng(1))
    seen = []

    def first_token(piece, editable):
        seen.append((piece, editable.copy()))
        return np.stack([editable[:, 0], editable[:, 0] + 1], 1)

    batch = layout.rows(tokens, pieces, (len(rows), 150), fill=EOS, pad=PAD, spans=first_token)
    [(piece, editable)] = seen
    assert len(piece) == sum(int(laid.canvas.max()) + 1 for row in rows for laid in row.laid)
    assert ((0 < np.diff(editable)) & (np.diff(editable) <= 8)).all()
    assert batch.editable.sum() == len(piece)
    np.testing.assert_array_equal(np.sort(batch.positions[batch.editable]), np.sort(editable[:, 0]))
