"""Tasks: problems without end whose answers can be checked, for training and evaluation.

    task = tasks.TASKS["sudoku4"]
    problem = tasks.draw(task, rng, "train")
    task.check(problem.input, prediction)

Each file holds one kind of problem: how it is drawn, how an answer is checked, and which problems are equivalent. To
add a task, write its file and add its records to `TASKS`: training (`data.generated(name)`) and `mercury eval name`
then know it.

arithmetic   add2, add3, add4, sub3: written sums and differences
countdown    countdown3, countdown4: reach a target with + - * /
sudoku       sudoku4, sudoku9: 4x4 and 9x9 grids with one solution
task         the record `Task`, the split into train, validation and test, and drawing
"""

from mercury_jax.config import nearest, refuse
from mercury_jax.tasks.arithmetic import TYPED, arithmetic
from mercury_jax.tasks.countdown import countdown3, countdown4
from mercury_jax.tasks.sudoku import sudoku4, sudoku9
from mercury_jax.tasks.task import Problem, Split, Task, draw, draw_distinct, read_problems

__all__ = ["TASKS", "Problem", "Split", "Task", "draw", "draw_distinct", "find", "read_problems"]

ARITHMETIC = {"add2": (2, "+"), "add3": (3, "+", TYPED), "add4": (4, "+"), "sub3": (3, "-")}

TASKS: dict[str, Task] = {task.name: task for task in (sudoku4, sudoku9, countdown3, countdown4)}
TASKS |= {name: arithmetic(name, *options) for name, options in ARITHMETIC.items()}


def find(name: str) -> Task:
    """Finds a task by name.

    Args:
        name: A name in `TASKS`.

    Returns:
        The task.

    Raises:
        ValueError: There is no such task; the message suggests the nearest name.
    """
    if name not in TASKS:
        raise refuse("task", name, nearest(str(name), list(TASKS)))
    return TASKS[name]
