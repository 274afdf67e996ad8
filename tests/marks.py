"""Marks for the parameters of a test."""

from collections.abc import Iterable

import pytest


def slow_except(cases: Iterable, *quick) -> list:
    """Parameters of which `make test` runs only those in `quick`, and `make test-all` all.

    Args:
        cases: Values for `pytest.mark.parametrize`; a value may be a tuple of arguments.
        quick: Values that are not marked `slow`.
    """
    missing = [case for case in quick if case not in (cases := list(cases))]
    assert not missing, f"no such cases: {missing}"
    many = lambda case: case if type(case) is tuple else (case,)  # a NamedTuple is one argument
    return [pytest.param(*many(case), marks=() if case in quick else pytest.mark.slow) for case in cases]
