"""What a generator is: problems without end, a check of any valid answer, and a split that cannot leak."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

from mercury_jax.config import one_of
from mercury_jax.train.generators.reserved import RESERVED

Split = Literal["train", "validation", "test"]

HELD_OUT_SHARE = 16  # one class of equivalent problems in this many is never trained on
VALIDATION_SHARE = 4  # of these one in this many is for choosing settings, the others for reporting


class Problem(NamedTuple):
    """A question, its answer, and optionally the way there written out."""

    input: str
    output: str
    thinking: str | None = None


class Generator(NamedTuple):
    """A task as data. `canonical`, `split` and `check` raise ValueError for any other input.

    canonical(input)           a form that all equivalent problems share
    split(input)               its Split; equivalent problems fall on the same side
    check(input, prediction)   whether the prediction is a right answer, not only the one we would give
    """

    name: str
    problem: Callable[[np.random.Generator], Problem]
    canonical: Callable[[str], str]
    split: Callable[[str], Split]
    check: Callable[[str, str], bool]


def draw(generator: Generator, rng: np.random.Generator, split: Split) -> Problem:
    """The next problem of one side of the split."""
    one_of(Split, split=split)
    while True:
        problem = generator.problem(rng)
        if generator.split(problem.input) == split:
            return problem


def bucket(name: str, canonical: str) -> Split:
    """Side of a class of problems, by a hash that is the same in every process and every version."""
    digest = hashlib.blake2b(f"{name}:{canonical}".encode(), digest_size=8).digest()
    which, side = divmod(int.from_bytes(digest, "big"), HELD_OUT_SHARE)
    if side:
        return "train"
    return "test" if which % VALIDATION_SHARE else "validation"


def reserved(name: str, key: str) -> bool:
    """Whether the problem is one of the public test files that we evaluate on."""
    return fingerprint(name, key) in RESERVED


def fingerprint(name: str, key: str) -> str:
    """How `RESERVED` writes a problem: 48 bits of hash, so that we need not copy the files."""
    return hashlib.blake2b(f"{name}:{key}".encode(), digest_size=6).hexdigest()
