"""Endless problems with answers that can be checked, split so that no held-out problem is ever trained on.

    problem = generators.draw(generators.sudoku4, rng, "train")
    generators.sudoku4.check(problem.input, prediction)

A problem's split follows from the hash of its class of equivalent problems; those of the public test files are test
problems. Settings are chosen on "validation", figures are reported on "test".
"""

from mercury_jax.train.generators.arithmetic import addition, subtraction
from mercury_jax.train.generators.base import Generator, Problem, Split, draw
from mercury_jax.train.generators.countdown import countdown3, countdown4
from mercury_jax.train.generators.sudoku import sudoku4
from mercury_jax.train.generators.sudoku9 import sudoku9

add2, add3, add4 = addition(2), addition(3), addition(4)
sub3 = subtraction(3)

ALL: dict[str, Generator] = {
    generator.name: generator
    for generator in (sudoku4, sudoku9, countdown3, countdown4, add2, add3, add4, sub3)
}

__all__ = [
    "ALL",
    "Generator",
    "Problem",
    "Split",
    "add2",
    "add3",
    "add4",
    "addition",
    "countdown3",
    "countdown4",
    "draw",
    "sub3",
    "subtraction",
    "sudoku4",
    "sudoku9",
]
