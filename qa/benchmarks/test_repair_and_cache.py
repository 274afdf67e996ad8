"""Error correction on the embedded model, and the caches of bidirectional models."""

import pytest

import mercury_jax as mj
from benchmarks import cache, repair
from mercury_jax.bench import decode
from mercury_jax.bench.timing import endless
from tests.tiny import tiny

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def nano():
    return mj.load()


def test_a_wrong_answer_has_one_wrong_digit_in_an_open_cell():
    for case in repair.wrong_answers(16, 3):
        differ = [i for i, (a, b) in enumerate(zip(case.truth, case.wrong, strict=True)) if a != b]
        assert differ == [case.at] and case.puzzle[case.at] == "0" and case.wrong[case.at] in "1234"
    assert repair.wrong_answers(4, 3) == repair.wrong_answers(4, 3)


def test_editing_rules_repair_a_wrong_digit_given_as_text_and_plain_rules_never_do(nano):
    names = ("default", "editing", "self_correct", "threshold")
    found = {(r["rule"], r["setting"]): r for r in repair.compare(nano, names, n=32, batch=32, seed=3)}
    for rule in ("default", "editing", "self_correct"):
        assert found[rule, "settled"]["solved"] >= 0.9, found
    assert found["threshold", "settled"]["repaired"] == found["threshold", "drafting"]["repaired"] == 0


def test_edit_repairs_the_answer_of_a_conversation_with_every_seed(nano):
    puzzle = [{"role": "user", "content": "0200\n4302\n3401\n0004"}]
    out = mj.edit(nano, ["1243\n4312\n3421\n2124"] * 10, prompt=puzzle, seed=0)
    assert out.texts == ["1243\n4312\n3421\n2134"] * 10 and [len(c) for c in out.changes] == [1] * 10


def test_every_cache_is_measured_against_no_cache(nano):
    lm = endless(tiny("bidirectional"))  # answers of random parameters may be empty
    rows = list(
        cache.compare(
            lm, [decode.questions("add3", limit=4, batch=4, max_tokens=16, alone=0)], block=8, steps=2
        )
    )
    assert [r["cache"] for r in rows] == list(cache.POLICIES)
    assert rows[0]["agreement"] == 1.0 and all(r["n"] == 4 and r["speedup"] > 0 for r in rows)
    with pytest.raises(ValueError, match="--caches is 'dual'.*dkv_decode"):
        cache.entries(nano, caches=["dual"])
    assert all(entry.plan.block == 32 for entry in cache.entries(nano))
    assert "dual" not in {entry.rule for entry in cache.entries(nano)}
