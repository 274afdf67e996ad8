"""How good a model is: tasks with a count, an interval and a cost for every figure.

    from mercury_jax import evaluate
    report = evaluate.run(lm, "sudoku4", limit=100)
    print(report)                        # 93 of 100 right, ...

runner   the tasks by name; `run` evaluates one, `compare` by several decoding rules; summaries, tables, plots
code     the code tasks: a bound on the bits per byte, and infilling
card     the card of a model, `python -m mercury_jax.evaluate.card`
"""

from mercury_jax.evaluate import code as _code  # noqa: F401  it adds its tasks to `TASKS`
from mercury_jax.evaluate.runner import TASKS, EvalReport, Evaluation, compare, find, plot, run, table, wilson

__all__ = ["TASKS", "EvalReport", "Evaluation", "compare", "find", "plot", "run", "table", "wilson"]
