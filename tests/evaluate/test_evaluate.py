"""Laws of evaluation: right is what the task's check accepts, and nothing depends on the batching."""

import dataclasses
import json
import sys
from typing import Any

import numpy as np
import pytest

from benchmarks import card
from mercury_jax import evaluate, models, tasks
from mercury_jax.config import Plan
from mercury_jax.decode import rules
from mercury_jax.decode.sample import Output
from mercury_jax.evaluate import runner
from mercury_jax.hub import NANO
from tests.tiny import tiny

ASKED = [name for name, task in evaluate.TASKS.items() if task.task]


def oracle(answer):
    """A `sample` that answers each question with answer(question), four tokens in two passes."""
    calls = []

    def sample(lm, prompts, **options):
        calls.append((prompts, options))
        texts = [answer(p[0]["content"]) for p in prompts]
        n = len(texts)
        tokens = [np.zeros(4, np.int32)] * n
        return Output(texts, tokens, np.full(n, 2), ["stop"] * n, 0.5, [None] * n)

    return sample, calls


def solutions(task, n, seed=0):
    return {p.input: p.output for p in tasks.draw_distinct(tasks.TASKS[task], n, seed)}


@pytest.mark.parametrize(
    "correct, n, low, high",
    [(8, 10, 0.4902, 0.9433), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (50, 100, 0.4038, 0.5962)],
)
def test_wilson_agrees_with_a_computation_by_hand(correct, n, low, high):
    assert evaluate.wilson(correct, n) == pytest.approx((low, high), abs=1e-4)


def test_the_paired_interval_sees_only_the_changes():
    assert runner.paired([True] * 90 + [False] * 10, [True] * 88 + [False] * 12)[0] == pytest.approx(-0.02)
    mean, low, high = runner.paired([True, False] * 50, [True, False] * 50)
    assert mean == 0 and -0.03 < low < 0 < high < 0.03
    with pytest.raises(ValueError, match="other is 1"):
        runner.paired([True, True], [True])


@pytest.mark.parametrize("task", [t for t in ASKED if t != "sudoku9"])  # it takes a second to draw one
def test_right_answers_count_and_corrupted_ones_do_not(monkeypatch, task):
    known = solutions(task, 7)
    for answer, accuracy in ((known.get, 1.0), (lambda x: known[x][:-1] + "0" * 9, 0.0)):
        sample, calls = oracle(answer)
        monkeypatch.setattr(runner.sampling, "sample", sample)
        found = evaluate.run(tiny(), task, limit=7, batch=3)
        assert found.summary["accuracy"] == accuracy and found.summary["n"] == 7
        assert [r["correct"] for r in found.rows] == [accuracy == 1.0] * 7
        assert [r["input"] for r in found.rows] == list(known)  # in the order of the questions
        assert [len(prompts) for prompts, _ in calls] == [3, 3, 3]  # the last batch is filled up
        json.dumps([found.summary, found.rows])


def test_the_padding_of_the_last_batch_counts_nowhere(monkeypatch):
    sample, _ = oracle(solutions("add3", 5).get)
    monkeypatch.setattr(runner.sampling, "sample", sample)
    seen = []
    found = evaluate.run(tiny(), "add3", limit=5, batch=4, progress=lambda *x: seen.append(x))
    summary = found.summary
    assert (summary["forwards"], summary["tokens"], summary["tokens_per_forward"]) == (2.0, 4.0, 2.0)
    assert summary["tokens_per_second"] == 20 / 1.0  # five answers of 4 tokens, half a second a batch
    assert seen == [(4, 5), (5, 5)]


def test_any_valid_answer_of_a_file_counts(monkeypatch, tmp_path):
    path = tmp_path / "some.jsonl"
    path.write_text('{"input": "15,44,79,50", "output": "unseen"}\n\n{"input": "2,3,4,24", "output": "x"}\n')
    answers = {"15,44,79,50": "79-44=35,35+15=50", "2,3,4,24": "unseen"}
    sample, calls = oracle(answers.get)
    monkeypatch.setattr(runner.sampling, "sample", sample)
    found = evaluate.run(tiny(), "countdown3", file=path, max_tokens=48)
    assert [r["correct"] for r in found.rows] == [True, False]
    assert found.summary["data"] == "some.jsonl" and calls[0][1]["max_tokens"] == 48
    assert evaluate.run(tiny(), "countdown3", file=path, limit=1).summary["n"] == 1


@pytest.mark.parametrize("task", ASKED)
def test_odd_predictions_are_wrong_and_raise_nothing(task):
    made = tasks.TASKS[task]
    problem = tasks.draw_distinct(made, 1, 0)[0]
    odd = ("", " ", "\n\n", "\0", "½=²", "1/0=1", "9" * 5000, "٣+٣=٦", "\ufffd", problem.input)
    assert [made.check(problem.input, text) for text in odd] == [False] * len(odd)
    assert made.check(problem.input, problem.output)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("task", ASKED)
def test_questions_are_held_out_distinct_and_repeatable(task):
    made = tasks.TASKS[task]
    n = 2 if task == "sudoku9" else 20
    found = tasks.draw_distinct(made, n, 3)
    assert {made.split(p.input) for p in found} == {"test"}
    assert len({p.input for p in found}) == n
    assert found == tasks.draw_distinct(made, n, 3) != tasks.draw_distinct(made, n, 4)
    assert {made.split(p.input) for p in tasks.draw_distinct(made, n, 3, "validation")} == {"validation"}


def test_a_small_model_runs_end_to_end_whatever_the_batch():
    run = lambda **more: evaluate.run(tiny(), "add3", limit=3, max_tokens=16, **more)
    first = run(batch=2)
    assert first.summary["rule"] == "threshold(p=0.9)" and 0 < first.summary["forwards"] <= 16
    same = [(r["prediction"], r["forwards"]) for r in first.rows]
    assert same == [(r["prediction"], r["forwards"]) for r in run(batch=2).rows]
    assert "of 3 right" in str(first)


@pytest.mark.slow
def test_a_model_is_compared_by_the_rule_that_sample_uses():
    lm = dataclasses.replace(tiny(), decoding={"rule": "factor", "params": {"f": 0.5}})
    each, own = evaluate.compare(lm, "add3", limit=2, batch=2, max_tokens=16, split="validation")
    assert (each["rule"], own["rule"]) == (runner.ONE_A_STEP, "factor(f=0.5, accept_last=1)")
    assert own["data"] == "validation"


@pytest.mark.long
def test_the_opponent_of_a_model_that_can_is_the_same_model_left_to_right():
    config = dataclasses.replace(tiny().model.config, predicts_next=True)
    lm = dataclasses.replace(tiny(), model=models.build(config))
    left, each, own = evaluate.compare(lm, "add3", limit=2, batch=2, max_tokens=16)
    assert (left["rule"], each["rule"]) == (runner.LEFT_TO_RIGHT, runner.ONE_A_STEP)
    assert each["compared_with"] == own["compared_with"] == runner.LEFT_TO_RIGHT


def test_comparing_counts_the_forwards_of_both_rules():
    rule = {"all at once": (rules.confidence(), Plan(steps=1)), runner.ONE_A_STEP: (rules.confidence(), None)}
    once, each = evaluate.compare(tiny(), "add3", rule, limit=2, batch=2, max_tokens=16)
    assert once["forwards"] <= 2 and once["rule"] == "all at once"
    assert each["forwards_share"] == each["forwards"] / once["forwards"] > 1
    assert each["points_low"] <= each["points"] <= each["points_high"]


@pytest.mark.parametrize(
    "line, message",
    [('{"input": "1+2="', "f.jsonl:2: not JSON"), ("[1]", "f.jsonl:2: a list"),
     ('{"input": "1+2="}', "f.jsonl:2: output is None"),
     ('{"input": 3, "output": "3"}', "f.jsonl:2: input is 3"),
     ('{"input": "1-2=", "output": "3"}', "f.jsonl:2: input: '1-2='.*add3")],
)  # fmt: skip
def test_a_broken_line_is_refused_by_its_number(tmp_path, line, message):
    path = tmp_path / "f.jsonl"
    path.write_text('{"input": "1+2=", "output": "3"}\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
        evaluate.run(tiny(), "add3", file=path)


def test_what_does_not_fit_is_refused_in_words(tmp_path):
    lm = tiny()
    with pytest.raises(ValueError, match="task is 'sudoko4'.*sudoku4 is the nearest"):
        evaluate.run(lm, "sudoko4")
    with pytest.raises(ValueError, match="missing.jsonl"):
        evaluate.run(lm, "add3", file=tmp_path / "missing.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="this one is empty"):
        evaluate.run(lm, "add3", file=tmp_path / "empty.jsonl")
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="UTF-8"):
        evaluate.run(lm, "add3", file=tmp_path / "bytes.jsonl")
    wrong: list[dict[str, Any]] = [
        dict(limit=0), dict(batch=True), dict(max_tokens=-1), dict(limit=2.5), dict(seed=-1),
    ]  # fmt: skip
    for bad in wrong:
        with pytest.raises(ValueError, match=f"{next(iter(bad))} is"):
            evaluate.run(lm, "add3", **bad)
    with pytest.raises(ValueError, match="sampler is"):
        evaluate.run(lm, "add3", sampler="threshold")
    with pytest.raises(ValueError, match="split is 'train'; allowed: test, validation"):
        evaluate.run(lm, "add3", split="train")
    with pytest.raises(ValueError, match="split is 'validation'; allowed: test: code-bpb"):
        evaluate.run(lm, "code-bpb", split="validation")
    with pytest.raises(ValueError, match="samplers is"):
        evaluate.compare(lm, "add3", {})


def summaries():
    rows = [{"correct": i < 3, "forwards": 8, "tokens": 4} for i in range(4)]
    about = dict(task="sudoku4", data="x.jsonl", rule=runner.ONE_A_STEP, seed=0, limit=None)
    first = about | runner.summarise(rows, [(4, 16, 1.0)], 1.0)
    rows = [dict(r, forwards=2) for r in rows]
    other = first | runner.summarise(rows, [(4, 16, 1.0)], 1.0) | {"rule": "threshold(p=0.9)"}
    return [first, runner.compared(first, [True] * 3 + [False], other, [True] * 3 + [False])]


def test_the_card_says_what_was_measured_and_how_to_do_it_again(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps(dict(batch=2, row=8, data={"sources": [[{"kind": "generated", "name": "add3"}, 2.0]]}))
    )
    speeds = ((1, 100, 0.0), (2, 300, 100.0), (3, 500, 50.0))
    rows = [dict(step=s, kind="train", tokens=n, tokens_per_second=v) for s, n, v in speeds]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    recipe, trained = card.read_run(tmp_path)
    assert trained == {"step": 3, "tokens": 500, "seconds": 200 / 100 + 200 / 50}
    text = card.card(tiny(), summaries(), recipe=recipe, trained=trained, trained_on="a loom")
    assert "100% add3" in text and "a loom" in text and "75.0% | 30.1% to 95.4%" in text
    assert "25% of the forwards" in text and "within a third" in text
    assert "mercury eval sudoku4 --file x.jsonl --rule confidence --seed 0 --json" in text
    with pytest.raises(ValueError, match="config.json"):
        card.read_run(tmp_path / "none")
    with pytest.raises(ValueError, match="sudoku_4x4_4.jsonl"):
        card.measure(tiny(), tmp_path)


@pytest.mark.slow
def test_a_card_of_the_embedded_model_is_measured_and_written(tmp_path, capsys):
    card.main(NANO, tmp_path / "card" / "README.md", limit=1, trained_on="a loom")
    text = (tmp_path / "card" / "README.md").read_text()
    record = json.loads((tmp_path / "card" / "evaluation.json").read_text())
    found = {summary["task"] for summary in record["summaries"]}
    assert found == {item.task for item in card.SUITE if item.file is None} and record["model"] == "nano"
    assert all(task in text for task in found) and "a loom" in text and "add3" in capsys.readouterr().err


def test_plotting_needs_matplotlib_and_says_so(tmp_path, monkeypatch):
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        pass
    else:
        assert evaluate.plot(summaries(), tmp_path / "a.png").stat().st_size > 1000
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"needs matplotlib: pip install .*\[plot\]"):
        evaluate.plot(summaries(), tmp_path / "b.png")
    with pytest.raises(ValueError, match="summaries"):
        evaluate.plot([], tmp_path / "c.png")


def test_every_task_says_what_it_is():
    assert list(evaluate.TASKS) == [
        "sudoku4", "sudoku9", "countdown3", "countdown4", "add2", "add3", "add4", "sub3", "code-bpb",
        "code-infill", "exact",
    ]  # fmt: skip
    assert all(task.about and task.name == name for name, task in evaluate.TASKS.items())
    assert set(ASKED) == set(tasks.TASKS)


@pytest.mark.long
def test_the_speed_of_an_evaluation_is_without_compilation():
    """Of a single batch, which compiles: no other test of this file decodes with this rule."""
    [row] = evaluate.compare(tiny(), "add3", {"one": (rules.topk_margin(), None)}, limit=2, batch=2)
    assert 2 * row["tokens"] / row["tokens_per_second"] < row["seconds"] / 3
