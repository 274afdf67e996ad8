"""Laws of the code tasks: a model that knows nothing pays ln V a token; holes are what they claim to be."""

import dataclasses
import math

import jax
import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax import evaluate, models, noise
from mercury_jax.config import Plan
from mercury_jax.decode import rules
from mercury_jax.decode.infill import InfillOutput
from mercury_jax.evaluate import TASKS, code
from mercury_jax.training.data import packing, sources
from mercury_jax.types import LM
from tests.tiny import tiny

FILES = [
    (
        f"m{i}.py",
        "".join(f"def f{j}(x, y):\n    value = x + {i * j}\n    return value, y\n\n\n" for j in range(40)),
    )
    for i in range(4)
]


@pytest.fixture(autouse=True)
def _small_corpus(monkeypatch):
    monkeypatch.setattr(sources, "stdlib_files", lambda split: FILES if split == "test" else [])


def ignorant(pattern: str) -> LM:
    """All weights zero: every token that may be emitted is equally likely."""
    lm = tiny(pattern)
    return LM(lm.model, jax.tree.map(lambda x: 0 * x, lm.params), lm.tokenizer, lm.corruption)


@pytest.mark.parametrize("pattern", ["causal_encoder", "bidirectional"])
def test_without_knowledge_a_token_costs_the_log_of_the_vocabulary(pattern):
    lm = ignorant(pattern)
    found = evaluate.run(lm, "code-bpb", limit=9, batch=4)
    s, choices = found.summary, lm.model.config.vocab - len(lm.corruption.forbidden)
    # Exactly, whatever was masked: weight m / k times k tokens is m.
    assert s["nats_per_token"] == pytest.approx(math.log(choices), rel=1e-6)
    assert s["bits_per_byte"] == pytest.approx(s["tokens"] * math.log2(choices) / s["bytes"], rel=1e-6)
    assert s["n"] == 9 == len(found.rows) and s["low"] <= s["bits_per_byte"] <= s["high"]
    assert sum(r["bytes"] for r in found.rows) == s["bytes"]


def autoregressive() -> LM:
    config = dataclasses.replace(tiny("block_causal").model.config, block=1, predicts_next=True, mask=None)
    model, tok = models.build(config), tiny().tokenizer
    corruption = noise.uniform(config.vocab, forbidden=noise.specials(tok))
    return LM(model, model.init(jax.random.key(0)), tok, corruption)


@pytest.mark.long
def test_an_autoregressive_model_is_scored_exactly_behind_the_first_token():
    lm = autoregressive()
    [row] = evaluate.run(lm, "code-bpb", limit=1).rows
    [laid] = code.chunks(lm, 1, 0)
    tokens, rest = laid.tokens, laid.tokens[1:]
    assert len(tokens) <= 96 and row["tokens"] == len(rest) > 1
    logits = np.array(mj.logits(lm, [tokens.tolist()]))[0, :-1]  # of the token after each position
    logits[:, list(lm.corruption.forbidden)] = -np.inf
    want = jax.nn.log_softmax(logits)[np.arange(len(rest)), rest].sum()
    assert row["nats"] == pytest.approx(-float(want), rel=1e-5)


@pytest.mark.parametrize("make", [tiny, autoregressive])
def test_the_chunks_are_scored_in_batches_and_the_progress_is_told(make):
    told = []
    evaluate.run(make(), "code-bpb", limit=5, batch=2, progress=lambda *x: told.append(x))
    assert told == [(2, 5), (4, 5), (5, 5)]


def test_the_bound_is_repeatable_and_depends_on_neither_batch_nor_order():
    lm = tiny()
    one, other = (evaluate.run(lm, "code-bpb", limit=6, batch=b).rows for b in (2, 6))
    assert [r["nats"] for r in one] == pytest.approx([r["nats"] for r in other], rel=1e-5)
    again = evaluate.run(lm, "code-bpb", limit=6, batch=2, seed=1).rows
    assert [r["nats"] for r in one] != [r["nats"] for r in again]


def test_chunks_bytes_are_those_of_their_scored_text():
    lm = tiny()
    for laid in code.chunks(lm, 6, 0):
        scored = [int(i) for i in laid.tokens[laid.editable]]
        text = lm.tokenizer.decode(scored)
        assert sum(len(lm.tokenizer.pieces[i]) for i in scored) == len(text.encode())
        assert any(text in whole for _, whole in FILES)
        assert len(laid.tokens) <= code.ROW * lm.model.config.block


def test_masks_are_unbiased_and_spread_over_k():
    lm = tiny()
    laid = code.chunks(lm, 1, 0)[0]
    batch = packing.pack([packing.PackedRow(laid=[laid])] * 400, len(laid.tokens), 0)
    hidden, weight, _ = code.draw_masks(batch, 0.3, np.random.default_rng(0))
    assert not (hidden & ~batch.editable).any()
    # Each token's expected weighted indicator is 1: that makes the sum of cross-entropies the bound.
    mean = (hidden * weight).mean(0)[laid.editable]
    assert mean == pytest.approx(1.0, abs=0.35) and mean.mean() == pytest.approx(1.0, abs=1e-9)
    first = np.flatnonzero(laid.canvas == 0)
    counts = np.bincount(hidden[:, first].sum(1), minlength=len(first) + 1)
    assert counts[0] == 0 and counts[1:].min() > 0.7 * 400 / len(first)


def test_the_standard_error_of_a_ratio_by_hand():
    cost, size = np.array([2.0, 4.0, 9.0]), np.array([1, 2, 3])
    # r = 15/6; the rests are -0.5, -1 and 1.5; se = sqrt(3/2 * 3.5) / 6
    assert code.ratio(cost, size) == pytest.approx((2.5, math.sqrt(5.25) / 6))
    assert code.ratio(cost[:1], size[:1]) == (2.0, math.inf)


def test_holes_are_parts_of_lines_that_fit_one_canvas():
    lm = tiny(block=32)
    found = code.draw_holes(lm, 10, 0)
    assert found == code.draw_holes(lm, 10, 0) and [b.whole for b in found] == [True, False] * 5
    for b in found:
        whole = dict(FILES)[b.path]
        assert b.before + b.target + b.after in whole and "\n" not in b.target
        assert len(lm.tokenizer.encode(b.target)) == b.tokens
        assert len(lm.tokenizer.encode(b.target + b.after)) == lm.model.config.block
        if b.whole:
            assert b.before.endswith("\n") and b.after.startswith("\n")


def test_infilling_counts_what_comes_back_exactly(monkeypatch):
    known = {b.before: b for b in code.draw_holes(tiny(block=32), 5, 0)}

    def infill(lm, parts, **options):
        targets = [known[before].target if known[before].whole else "?" for before, _, _ in parts]
        n = len(parts)
        return InfillOutput([""] * n, [[t] for t in targets], [], [1] * n, np.full(n, 2), 0.5)

    monkeypatch.setattr(code.infilling, "infill", infill)
    found = evaluate.run(tiny(block=32), "code-infill", limit=5, batch=2)
    assert [r["correct"] for r in found.rows] == [True, False, True, False, True]
    assert found.summary["right_lines"] == 3 == found.summary["correct"] and found.summary["right_spans"] == 0


def test_a_small_model_infills_end_to_end():
    found = evaluate.run(tiny(block=32), "code-infill", limit=2, batch=2)
    assert found.summary["n"] == 2 and 0 < found.summary["forwards"] <= 16
    assert all(isinstance(r["prediction"], str) for r in found.rows)


def test_what_the_code_tasks_do_not_use_is_refused():
    lm = tiny()
    for task, option in [
        ("code-bpb", {"sampler": rules.confidence()}), ("code-bpb", {"file": "x"}), ("code-bpb", {"max_tokens": 3}),
        ("code-bpb", {"plan": Plan(steps=4)}), ("code-infill", {"max_tokens": 3}), ("code-infill", {"file": "x"}),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=f"{next(iter(option))} is .*{task} has no use"):
            evaluate.run(lm, task, **option)
    with pytest.raises(ValueError, match="corruption is 'uniform'"):
        evaluate.run(tiny(kind="uniform"), "code-bpb")
    assert TASKS["code-bpb"].task is None
