"""The benchmark of rewards: equivalent problems count once, and options that contradict each other are refused."""

import numpy as np
import pytest
from scipy import stats

from benchmarks.rewards import clustered_interval, run

GAIN = np.random.default_rng(0).normal(0.3, 1.0, 40)
NAMES = [str(i) for i in range(40)]


def test_with_problems_of_their_own_classes_the_interval_is_that_of_student():
    want = stats.t.interval(0.95, 39, GAIN.mean(), stats.sem(GAIN))
    assert clustered_interval(GAIN, NAMES) == pytest.approx(want)


def test_copies_of_the_same_problems_make_no_interval_narrower():
    assert clustered_interval(np.tile(GAIN, 25), NAMES * 25) == pytest.approx(clustered_interval(GAIN, NAMES))


def test_one_class_gives_no_interval():
    assert clustered_interval(GAIN, ["the same"] * 40) is None


@pytest.mark.long
@pytest.mark.parametrize(
    "argv, words",
    [
        ("--task sudoku5", "--task is 'sudoku5'; allowed: add2, "),
        ("--task countdown3 --most-givens 5", "--most-givens is 5; allowed: a Sudoku as --task"),
        ("--most-givens 1", "--most-givens is 1; allowed: more givens"),
        ("--max-tokens 0", "--max-tokens is 0; allowed: 1 or more"),
        ("--limit 0", "--limit is 0; allowed: 1 or more"),
        ("--threshold 0.9 --temperature 1", "--threshold is 0.9; allowed: --temperature 0"),
    ],
)
def test_options_that_nothing_would_read_are_refused(argv, words):
    with pytest.raises(ValueError, match=words):
        run(["nano", "nano", *argv.split()])
