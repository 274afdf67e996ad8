"""The questions of a real model: which answers are right, and what a record says of drafts and of transformers."""

import jax
import numpy as np
import pytest

import mercury_jax as mj
from benchmarks import real
from tests.decode.test_block_drafter import verifier


@pytest.fixture
def gsm8k(tmp_path):
    path = tmp_path / "test.jsonl"
    path.write_text(
        '{"question": "Two and two?", "answer": "2 + 2 = <<2+2=4>>4\\n#### 1,004"}\n', encoding="utf-8"
    )
    return real.gsm8k(str(path))[0]


@pytest.mark.parametrize(
    "text, right",
    [
        ("It is 1004.", True),
        ("2 and 2 are 1,004", True),
        ("The sum is $1004.00", False),  # as written; only a trailing .0 is the same number
        ("1004.0", True),
        ("1004 or 3", False),
        ("none", False),
        ("", False),
    ],
)
def test_the_last_number_of_an_answer_counts(gsm8k, text, right):
    assert gsm8k.check("Two and two?", text) is right


def test_the_answer_of_a_short_question_is_a_whole_word():
    task, problems = real.short(None)
    one = next(p for p in problems if p.output.lower() == "paris")
    assert len({p.input for p in problems}) == len(problems) == 200
    assert task.check(one.input, "The capital is Paris.") and not task.check(
        one.input, "Parisians live there"
    )


@pytest.mark.parametrize(
    "text, right",
    [
        ('{{"{0}": 1, "{1}": "x", "{2}": null}}', True),
        ('```json\n{{"{2}": 1, "{1}": 2, "{0}": 3}}\n```', True),
        ('{{"{0}": 1, "{1}": 2}}', False),
        ('{{"{0}": 1, "{1}": 2, "{2}": 3, "more": 4}}', False),
        ('{{"{0}": 1, "{1}": 2, "{2}": }}', False),
        ('["{0}", "{1}", "{2}"]', False),
    ],
)
def test_an_object_has_exactly_the_keys(text, right):
    task, problems = real.objects(None)
    keys = problems[0].output.strip("[]").replace('"', "").split(", ")
    assert task.check(problems[0].input, text.format(*keys)) is right


def test_ways_are_compared_on_the_same_questions():
    lm, (task, problems) = verifier(), real.short(None)
    asked = real.ask((task._replace(max_tokens=8), problems), 3, 1, 0)
    with jax.enable_x64(True):
        answers = [mj.sample(lm, asked.message(i), max_tokens=8, seed=0) for i in range(3)]
    left = iter([answers[0], *answers] * 2)

    def peer(ids, max_tokens, lookup):
        out = next(left)
        return {
            "ids": [*map(int, out.tokens[0][: out.lengths[0]])],
            "seconds": 1.0,
            "passes": 4 if lookup else 8,
        }

    ways = [real.way("left to right", lm), real.way("lookup", mj.with_block_drafter(lm, "lookup"))]
    with jax.enable_x64(True):  # of which `verifier` is
        records = {row["way"]: row for row in real.compare(ways, [asked], peer=peer)}
    assert list(records) == ["left to right", "lookup", "transformers", "transformers, lookup"]
    assert {row["agreement"] for row in records.values()} == {1.0}
    assert records["left to right"]["speedup"] == 1.0
    theirs, base = records["transformers, lookup"], records["left to right"]
    assert theirs["tokens"] == base["tokens"] and theirs["forwards"] == 4
    assert np.isclose(theirs["tokens_per_second"], base["tokens"])  # a second each
    assert np.isclose(theirs["speedup"], theirs["tokens_per_second"] / base["tokens_per_second"])
