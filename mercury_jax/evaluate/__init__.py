"""How good a model is: tasks with a count, an interval and a cost for every figure.

    from mercury_jax import evaluate
    report = evaluate.run(lm, "sudoku4", limit=100)
    print(report)                        # 93 of 100 right, ...

`compare` runs one task by several decoding rules; `python -m mercury_jax.evaluate.card` writes the card
of a model.
"""

from mercury_jax.evaluate.report import Report, plot, table, wilson
from mercury_jax.evaluate.runner import compare, run
from mercury_jax.evaluate.tasks import TASKS, Task

__all__ = ["TASKS", "Report", "Task", "compare", "plot", "run", "table", "wilson"]
