"""Decoding measurements: the baseline compares equal to itself, nothing timed compiles, recommendations are honest."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import timing as alternation
from mercury_jax import tasks
from mercury_jax.bench import decode, timing
from mercury_jax.bench.decode import GRID, RuleResult, SweepPoint, sweep
from mercury_jax.cli import main
from mercury_jax.config import Plan
from mercury_jax.decode import rules
from mercury_jax.decode.defaults import complete_sampler
from mercury_jax.decode.registration import rule
from mercury_jax.decode.sampler import accept
from mercury_jax.evaluate.runner import ONE_A_STEP
from tests.tiny import tiny

FIELDS = {
    "rule", "task", "n", "accuracy", "low", "high", "points", "points_low", "points_high", "agreement", "forwards",
    "tokens_per_forward", "forwards_per_second", "tokens_per_second", "speedup", "time_to_first_frame",
    "time_to_last_token", "call_seconds", "model", "hardware", "seed", "batch",
}  # fmt: skip


@rule(noise="uniform")
def stranger(key, view, memory):
    """A rule that models with a mask cannot run."""
    return accept(view, view.masked), memory


@rule
def everything(key, view, memory):
    """Accepts all tokens at once."""
    return accept(view, view.masked), memory


@pytest.fixture
def grown(monkeypatch):
    """Two further registered rules."""
    monkeypatch.setitem(rules.ALL, "stranger", stranger)
    monkeypatch.setitem(rules.ALL, "everything", everything)


# --- timing


def test_calls_that_compile_are_not_timed():
    calls = []
    step = jax.jit(lambda x: x * 3 + 1)

    def call():
        calls.append(0)
        return float(step(jnp.arange(7.0))[1])

    assert timing.steady(call)[0] == 4.0 and len(calls) == 2
    assert timing.steady(call)[0] == 4.0 and len(calls) == 3
    with pytest.raises(RuntimeError, match="no steady state"):
        timing.steady(lambda: jax.jit(lambda x: x + len(calls))(jnp.arange(3.0)))


def test_calls_alternate_and_their_ratio_is_a_median():
    order = []
    pairs = alternation.alternate(lambda: order.append("a"), lambda: order.append("b"), 3)
    assert "".join(order) == "abbaab" and len(pairs) == 3
    assert alternation.ratio([(1.0, 1.0), (6.0, 2.0), (100.0, 1.0)]) == 3.0


# --- sweeps


def test_a_rule_outside_the_grid_is_measured_with_its_defaults(grown):
    assert sweep(["everything", "threshold", "everything"])[0] == SweepPoint("everything")
    assert {s.rule for s in sweep()} == set(rules.ALL)
    with pytest.raises(ValueError, match="'treshold'.*threshold is the nearest"):
        sweep(["treshold"])


def test_a_sweep_point_as_text_and_as_python():
    assert SweepPoint("threshold", {"p": 0.99}).text == "threshold(p=0.99)"
    assert SweepPoint("threshold", {"p": 0.99}).code == "mj.rules.threshold(p=0.99)"
    slow = SweepPoint("confidence", {}, Plan(steps=4))
    assert slow.text == "confidence() in 4 steps"
    assert slow.code == "sampler=mj.rules.confidence(), plan=mj.Plan(steps=4)"


def test_every_point_of_the_grid_fits_its_rule():
    assert set(GRID) <= set(rules.ALL)
    for name, values in GRID.items():
        points = sweep([name])
        assert len(points) == len(next(iter(values.values()))) and all(point.sampler() for point in points)


# --- decoding


@pytest.fixture(scope="module")
def measured():
    chosen = [SweepPoint("threshold", {"p": 1.0}), SweepPoint("threshold", {"p": 0.0})]
    patch = pytest.MonkeyPatch()
    patch.setitem(rules.ALL, "stranger", stranger)
    patch.setattr(decode, "STALE", -1.0)  # one token a step is timed anew before every other run
    asked = decode.questions("add3", limit=6, batch=3, max_tokens=16, alone=1)
    found = decode.entries(tiny(), [*chosen, SweepPoint("stranger")])
    ticks = []
    trials = decode.run(found, asked, ticks.append)
    patch.undo()
    assert len(ticks) == decode.units(found, asked) - 3  # the stranger was only compiled
    return asked, trials


@pytest.mark.slow
def test_records_have_every_figure_and_the_baseline_compares_equal_to_itself(measured):
    asked, trials = measured
    base, surest, once, refused = decode.records(trials, asked)
    assert set(base) >= FIELDS and set(base) == set(surest) == set(once)
    json.dumps([base, surest, once, refused])
    assert (base["rule"], base["points"], base["agreement"], base["speedup"]) == (ONE_A_STEP, 0.0, 1.0, 1.0)
    assert base["n"] == 6 and base["time_to_first_frame"] < base["time_to_last_token"]
    product = base["tokens_per_forward"] * base["forwards_per_second"]
    assert base["tokens_per_second"] == pytest.approx(product)
    # At p = 1 no token is confident enough, so the rule accepts one token per step.
    assert (surest["agreement"], surest["forwards"]) == (1.0, base["forwards"])
    assert once["forwards"] == 2 * asked.max_tokens / 16 < base["forwards"] and once["agreement"] < 1
    assert once["points_low"] <= once["points"] <= once["points_high"]


@pytest.mark.long
def test_a_rule_that_does_not_fit_says_why(measured):
    asked, trials = measured
    refused = decode.records(trials, asked)[-1]
    assert "uniform" in refused["refused"] and "accuracy" not in refused
    assert refused["rule"] == "stranger()" and refused["task"] == "add3"
    base, able = decode.results(trials, asked)
    assert base.rule == ONE_A_STEP and [c.rule for c in able] == ["threshold(p=1.0)", "threshold(p=0.0)"]


def test_the_repeated_baseline_is_timed_but_counted_once(measured):
    _, trials = measured
    assert [len(t.seconds) for t in trials] == [2, 2, 2, 0]
    assert [len(t.ratios) for t in trials] == [2, 2, 2, 0] and trials[0].ratios == [1.0, 1.0]


def test_a_twin_must_be_autoregressive(measured):
    asked, _ = measured
    with pytest.raises(ValueError, match="twin is 'causal_encoder with blocks of 8'.*block_causal"):
        decode.entries(tiny(), [], tiny())
    assert [entry.rule for entry in decode.entries(tiny(), [], default=True)] == [ONE_A_STEP, "default"]
    found = decode.entries(tiny(), [], tiny("block_causal", block=1))
    assert [e.rule for e in found] == [ONE_A_STEP, decode.TWIN]


def test_questions_are_checked_before_anything_runs():
    for bad in (dict(limit=0), dict(batch=0), dict(seed=-1), dict(max_tokens=0), dict(alone=-1)):
        with pytest.raises(ValueError, match=f"{next(iter(bad))} is"):
            decode.questions("add3", **bad)
    with pytest.raises(ValueError, match="task is 'code-bpb'.*sudoku4"):
        decode.questions("code-bpb")
    with pytest.raises(ValueError, match="task is 'exact'.*sudoku4"):  # its questions are in a file
        decode.questions("exact")
    asked = decode.questions("add3", limit=5, batch=2)
    cut = decode.batches(asked)
    assert sorted(i for b in cut for i in b.chosen) == list(range(5))
    assert [len(b.filled) for b in cut] == [2, 2, 2] and cut[2].filled[0] == cut[2].filled[1]


# --- recommendation

N = 400


def one(name, wrong=(), forwards=10, task="sums", n=N):
    right = np.ones(n, bool)
    right[list(wrong)] = False
    return RuleResult(
        name, f"mj.rules.{name}()", task, right.tolist(), [20] * n, [forwards] * n, 20.0 * n, 1.0, 2.0
    )


FIRST, SECOND = decode._halves(N, 0)


def test_the_fastest_rule_that_loses_nothing_is_recommended():
    base = one(ONE_A_STEP, forwards=20)
    others = [
        one("slow", forwards=15),
        one("good", forwards=5),
        one("rash", wrong=range(0, N, 20), forwards=1),
    ]
    advice = decode.recommend([base], others)
    assert advice.code == "mj.rules.good()" and advice.ruled_out and advice.considered == 3
    assert advice.tokens_per_forward == 4.0 and advice.tokens_per_second == 20.0 * N
    assert advice.tasks[0]["n"] == N // 2 and advice.tasks[0]["tokens_per_forward_one_a_step"] == 1.0
    # Were the losses allowed, it would be the rash one.
    assert decode.recommend([base], [one("rash", forwards=1), *others[:2]]).rule == "rash"


def test_the_reported_questions_had_no_part_in_the_choice():
    assert set(FIRST) & set(SECOND) == set() and len(FIRST) + len(SECOND) == N
    base = one(ONE_A_STEP, forwards=20)
    lucky = decode.recommend([base], [one("lucky", wrong=SECOND[:40], forwards=1), one("good", forwards=5)])
    assert lucky.code is None and lucky.rule == "lucky" and "worse on the second" in lucky.reason
    assert lucky.tasks[0]["points"] == pytest.approx(-20.0)
    # A few losses there are reported, and not enough to call it worse.
    few = decode.recommend([base], [one("few", wrong=SECOND[:3], forwards=1)])
    assert few.code is not None and few.ruled_out is False and few.tasks[0]["points"] == pytest.approx(-1.5)


def test_the_reason_why_no_rule_is_recommended():
    base = one(ONE_A_STEP, forwards=20)
    reason = lambda *others, base=base: decode.recommend([base], others).reason
    assert "needs fewer forward passes" in reason(one("slower", forwards=30))
    assert "the nearest, near, is at -2" in reason(
        one("near", wrong=FIRST[:4], forwards=5), one("far", wrong=FIRST[:60], forwards=1)
    )
    assert "ask 196 or more" in reason(one("x", n=150), base=one(ONE_A_STEP, forwards=20, n=150))
    helpless = one(ONE_A_STEP, wrong=range(2, N), forwards=20)
    assert "could not lose" in reason(one("x"), base=helpless)


def test_losing_nothing_is_two_conditions():
    assert decode.loses_nothing((-0.4, -1.5, 0.7)) and decode.loses_nothing((3.0, 1.0, 5.0))
    assert not decode.loses_nothing((-1.0, -1.4, -0.6))  # little, but surely
    assert not decode.loses_nothing((-1.0, -5.0, 3.0))  # nothing that can be seen, in too few questions


def test_a_pass_of_twice_the_width_counts_twice():
    @rule(leave_one_out=True)
    def wide(key, view, memory):
        return accept(view, view.masked), memory

    asked = decode.questions("add3", limit=2, batch=2)
    found = []
    for make in (everything, wide):
        entry = decode.SweepEntry(make.__name__, make.__name__, tiny(), make, Plan(), "code")
        trial = decode.Trial(
            entry, [True] * 2, [np.arange(4)] * 2, [3, 5], complete_sampler(make(), tiny().corruption)
        )
        trial.made, trial.seconds, trial.ratios = [8], [1.0], [1.0]
        found.append(trial)
    _, (narrow, doubled) = decode.results([found[0], *found], asked)
    assert (narrow.forwards, doubled.forwards) == ([3, 5], [6, 10])


def test_equal_answers_are_just_enough_at_the_least_number_of_questions():
    for n, enough in ((decode.LEAST, True), (decode.LEAST - 1, False)):
        same = decode.points(one("a", n=n), one("b", n=n), np.arange(n))
        assert decode.loses_nothing(same) == enough


def test_a_rule_must_keep_every_task():
    base = [one(ONE_A_STEP, forwards=20), one(ONE_A_STEP, forwards=20, task="puzzles")]
    bold = [one("bold", forwards=1), one("bold", wrong=FIRST[:30], forwards=1, task="puzzles")]
    calm = [one("calm", forwards=10), one("calm", forwards=10, task="puzzles")]
    advice = decode.recommend(base, [*bold, *calm, one("half", forwards=1)])
    assert advice.rule == "calm" and [t["task"] for t in advice.tasks] == ["sums", "puzzles"]
    assert advice.considered == 2  # one answered the first task only


# --- plot


@pytest.mark.long
def test_the_plot_has_a_curve_a_rule(measured, tmp_path, monkeypatch):
    asked, trials = measured
    made = decode.records(trials, asked)
    assert decode.plot(made, tmp_path / "a.png").stat().st_size > 5000
    with pytest.raises(ValueError, match="ends in .png"):
        decode.check_plot(tmp_path / "a.txt")
    with pytest.raises(ValueError, match="folder that exists"):
        decode.check_plot(tmp_path / "none" / "a.png")
    with pytest.raises(ValueError, match="rows"):
        decode.plot(made[-1:], tmp_path / "b.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"needs matplotlib: pip install .*\[plot\]"):
        decode.check_plot(tmp_path / "a.png")


# --- the command line


@pytest.fixture
def at_hand(monkeypatch):
    monkeypatch.setattr("mercury_jax.cli.show.load", lambda source, **how: tiny())


def test_the_command_prints_one_object_a_line_and_writes_them(at_hand, tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    call = ["bench", "decode", "--rules", "threshold", "--tasks", "add3", "--limit", "6", "--batch", "3"]
    call += ["--max-tokens", "16", "--alone", "1", "--out", str(out), "--recommend"]
    assert main([*call, "--json"]) == 0
    *made, advice = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [r["rule"] for r in made] == [ONE_A_STEP, *(s.text for s in sweep(["threshold"]))]
    assert all(set(r) >= FIELDS for r in made)
    assert [json.loads(line) for line in out.read_text().splitlines()] == made
    assert advice["recommend"] is None and "questions" in advice["reason"]
    assert main(call) == 0
    shown = capsys.readouterr().out
    assert "threshold(p=0.99)" in shown and "No rule to recommend" in shown and "\x1b[" not in shown


def test_rules_are_chosen_on_other_questions_than_those_of_the_figures(monkeypatch, capsys):
    monkeypatch.setattr("mercury_jax.cli.show.load", lambda source, **how: tiny())
    drawn, draw = [], tasks.draw_distinct

    def enough(*args):
        drawn.append({problem.input for problem in draw(*args)})
        raise ValueError("the questions are known: nothing needs to be decoded")

    monkeypatch.setattr(tasks, "draw_distinct", enough)
    assert main(["bench", "decode", "--rules", "threshold", "--tasks", "add3", "--limit", "9"]) == 2
    assert main(["eval", "add3", "--limit", "9"]) == 2
    chosen, reported = drawn
    assert len(chosen) == len(reported) == 9 and not chosen & reported
    assert {tasks.TASKS["add3"].split(question) for question in chosen} == {"validation"}


@pytest.mark.long
@pytest.mark.parametrize(
    "argv, words",
    [
        (["bench", "decoed"], ["'decoed'", "decode is the nearest"]),
        (["bench", "decode", "--rules", "treshold"], ["'treshold'", "threshold is the nearest"]),
        (["bench", "decode", "--tasks", "sudoku5"], ["'sudoku5'", "nearest"]),
        (["bench", "decode", "--tasks", "code-bpb"], ["'code-bpb'", "sudoku4"]),
        (["bench", "decode", "--limit", "0"], ["limit", "0"]),
        (["bench", "decode", "--out", "/no/such/folder/x.jsonl"], ["--out", "/no/such/folder"]),
        (["bench", "decode", "--plot", "x.txt"], ["plot", "'x.txt'", ".png"]),
        (["bench", "decode", "/no/such/model", "--limit", "2"], ["/no/such/model"]),
    ],
    ids=lambda value: " ".join(value[1:3]) if value[0] == "bench" else None,
)
def test_bench_refuses_bad_input(argv, words, capsys):
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err and [w for w in words if w not in err] == []
