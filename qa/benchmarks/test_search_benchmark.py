"""The comparison of sequential Monte Carlo with best-of-n: its puzzles, its reward, and what a record says."""

import pytest

import mercury_jax as mj
from benchmarks import search
from mercury_jax.tasks import TASKS


def test_the_reward_counts_violated_constraints():
    problem = search.puzzles(1, 0)[0]
    prompt = [{"role": "user", "content": problem.input}]
    reward = lambda text: search.constraints([prompt], [text])[0]
    assert (
        sum(cell in "1234" for cell in problem.input) == 4 and TASKS["sudoku4"].split(problem.input) == "test"
    )
    assert reward(problem.output) == 1.0 == reward("_" * 32)
    assert reward(problem.output[:18]) == reward(problem.output + "1") == reward("1" * 19) == 0.0
    first = next(i for i, cell in enumerate(problem.input) if cell == "0")
    for digit in set("1234") - {problem.output[first]}:
        wrong = problem.output[:first] + digit + problem.output[first + 1 :]
        assert 0.0 < reward(wrong) <= 10 / 13
        assert reward(wrong[: first + 1] + "_" * (31 - first)) > reward(
            wrong
        )  # fewer tokens, fewer conflicts


@pytest.mark.slow
def test_a_record_compares_the_same_puzzles_at_equal_passes():
    setting = search.Setting(n=2, steps=2)
    best, smc = search.compare(mj.load(), search.puzzles(2, 0), 0, setting, temperatures=(1.0,))
    assert (best["method"], smc["method"]) == ("best of n", "smc") and best["forwards"] == smc[
        "forwards"
    ] <= 4
    assert abs(smc["solved_gain"] - (smc["solved"] - best["solved"])) < 1e-9
    assert smc["solved_gain_low"] <= smc["solved_gain"] <= smc["solved_gain_high"]
    assert "points (paired" in search.line(smc) and "paired" not in search.line(best)
