"""Evaluates a model on tasks. Every figure comes with its number of questions, its interval and its cost.

    from mercury_jax import evaluate
    report = evaluate.run(lm, "sudoku4", limit=100)
    print(report)                        # 93 of 100 right, ...

runner   tasks by name; `run` evaluates one, `compare` with several decoding rules; summaries, tables, plots
code     the code tasks: a bound on the bits per byte, and infilling
exact    the task `exact`: questions of one's own from a file
calibration   the quality of the probabilities of `mj.decide`, and their calibration
harness  our models in lm-evaluation-harness, `python -m mercury_jax.evaluate.harness`
"""

from mercury_jax.evaluate import (
    code as _code,  # noqa: F401  importing it adds the code tasks to `TASKS`
    exact as _exact,  # noqa: F401  and this the task `exact`
)
from mercury_jax.evaluate.runner import (
    TASKS,
    EvalReport,
    EvalSettings,
    Evaluation,
    check,
    compare,
    find,
    plot,
    run,
    table,
    wilson,
)

__all__ = [
    "TASKS", "EvalReport", "EvalSettings", "Evaluation", "check", "compare", "find", "plot", "run", "table", "wilson",
]  # fmt: skip
