"""Cost of quantisation: the same questions and masks for every variant, and the bound is that of score()."""

import numpy as np
import pytest

import mercury_jax as mj
from benchmarks import quantise
from mercury_jax.decode import likelihood

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def nano():
    return mj.load()


def test_the_bound_with_a_kv_cache_equals_that_without(nano):
    for piece in quantise.masked_texts(nano, 2, 4, 0):
        ids = np.concatenate([piece.before, piece.canvas])
        laid = nano.model.layout(ids, len(piece.before), all_clean=False)
        at = np.flatnonzero(laid.editable)
        hidden, weight = np.zeros((4, len(laid.tokens)), bool), np.zeros((4, len(laid.tokens)))
        hidden[:, at], weight[:, at] = piece.hidden, piece.weight
        want = likelihood.weighted_nats(nano, [likelihood.MaskedDocument(laid, hidden, weight)]).mean() / len(
            piece.canvas
        )
        assert abs(quantise.nats_per_token(nano, piece) - want) < 1e-4


def test_every_variant_is_compared_with_the_model_in_full(monkeypatch):
    monkeypatch.setattr(quantise, "PAIRS", ((None, None), ("fp8", "3bit")))
    answers, fewer, text, rougher = quantise.compare(
        mj.load, ["sudoku4"], limit=4, batch=4, pieces=4, samples=2
    )
    assert [r["weights"] for r in (answers, fewer)] == ["float32", "fp8"] and fewer["kv"] == "3bit"
    assert answers["agreement"] == 1.0 and answers["points"] == 0.0 and fewer["n"] == 4
    assert text["more"] == 0.0 and rougher["more"] != 0.0 and rougher["low"] < rougher["nats_per_token"]
    assert fewer["parameter_bytes"] < 0.5 * answers["parameter_bytes"]
    # Six layers of two heads, keys and values, 32 numbers each: 12 bytes and 2 for the norm.
    assert (answers["cache_bytes_per_token"], fewer["cache_bytes_per_token"]) == (
        6 * 2 * 2 * 128,
        6 * 2 * 2 * 14,
    )


def test_bad_numbers_are_refused_before_a_model_is_loaded():
    with pytest.raises(ValueError, match="limit"):
        quantise.compare(lambda **how: pytest.fail("loaded"), ["sudoku4"], limit=0)
