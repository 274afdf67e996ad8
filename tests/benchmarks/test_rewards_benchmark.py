"""Intervals of the benchmark of rewards: equivalent problems count once."""

import numpy as np
import pytest
from scipy import stats

from benchmarks.rewards import clustered_interval

GAIN = np.random.default_rng(0).normal(0.3, 1.0, 40)
NAMES = [str(i) for i in range(40)]


def test_with_problems_of_their_own_classes_the_interval_is_that_of_student():
    want = stats.t.interval(0.95, 39, GAIN.mean(), stats.sem(GAIN))
    assert clustered_interval(GAIN, NAMES) == pytest.approx(want)


def test_copies_of_the_same_problems_make_no_interval_narrower():
    assert clustered_interval(np.tile(GAIN, 25), NAMES * 25) == pytest.approx(clustered_interval(GAIN, NAMES))


def test_one_class_gives_no_interval():
    assert clustered_interval(GAIN, ["the same"] * 40) is None
