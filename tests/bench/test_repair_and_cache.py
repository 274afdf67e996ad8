"""Error correction on the embedded model, and the caches of bidirectional ones."""

import dataclasses

import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax import models
from mercury_jax.bench import cache, questions, repair


@pytest.fixture(scope="module")
def nano():
    return mj.load()


def test_a_case_has_one_wrong_digit_where_the_puzzle_leaves_a_cell_open(nano):
    for case in repair.cases(nano, 16, 3):
        assert np.flatnonzero(case.wrong != case.truth).tolist() == [case.at] and case.at in case.blanks
        assert nano.tokenizer.decode([int(case.wrong[case.at])]) in "1234"
    for a, b in zip(repair.cases(nano, 4, 3), repair.cases(nano, 4, 3), strict=True):
        np.testing.assert_array_equal(a.wrong, b.wrong)


def test_editing_repairs_a_settled_token_and_plain_rules_never_do(nano):
    found = {
        (r["rule"], r["setting"]): r
        for r in repair.run(nano, ("blind_editing", "editing", "threshold"), n=16, batch=16)
    }
    for rule in ("blind_editing", "editing"):
        assert found[rule, "settled"]["repaired"] >= 0.8
    assert found["threshold", "settled"]["repaired"] == found["threshold", "drafting"]["repaired"] == 0


def test_edit_repairs_the_answer_of_a_conversation(nano):
    puzzle = [{"role": "user", "content": "0200\n4302\n3401\n0004"}]
    right = "1243\n4312\n3421\n2134"
    out = mj.edit(nano, right[:-1] + "1", prompt=puzzle)
    assert out.text == right and len(out.changes[0]) == 1


def test_every_cache_is_measured_against_no_cache(nano):
    model = models.build(dataclasses.replace(nano.model.config, pattern="bidirectional", predicts_next=False))
    lm = dataclasses.replace(nano, model=model)
    rows = cache.run(lm, [questions.ask("sudoku4", limit=4, batch=4, alone=0)], steps=2)
    assert [r["cache"] for r in rows] == list(cache.POLICIES)
    assert rows[0]["agreement"] == 1.0 and all(r["n"] == 4 and r["speedup"] > 0 for r in rows)
    with pytest.raises(ValueError, match="bidirectional"):
        cache.entries(nano, 16)
