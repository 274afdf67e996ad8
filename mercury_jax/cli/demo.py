"""`mercury demo`: the embedded model turns noise into answers, and each answer is checked.

The questions are held-out sudokus and sums, and the start of a Python function. Of each kind the demo asks until an
answer is correct, at most `TRIES` times.
"""

from __future__ import annotations

import ast
import functools
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from mercury_jax.cli import arguments, show
from mercury_jax.cli.arguments import Flag, Int, option

if TYPE_CHECKING:
    from mercury_jax.types import LM


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Watch noise turn into a sudoku, a sum and a line of Python.

    Bold tokens are accepted, coloured ones are guesses, and ░ is noise. The
    puzzles are held out: the model was not trained on them. The speed is that of
    a second call, already compiled and without drawing, beside the same model
    accepting one token per step.

    examples:
      mercury demo
      mercury demo --seed 7
    """

    model: Annotated[str | None, option("MODEL")] = None
    """Folder or Hugging Face id of a model. Default: the embedded one."""
    seed: Int = 0
    """Draws the puzzles."""
    no_live: Flag = False
    """Print only the answers."""
    json: Flag = False
    """Print one JSON object for each question."""


NEXT = """\
What to try next:
  mercury demo --seed 7                              other puzzles
  mercury sample "968+754=" --chat                   a question of your own, live
  mercury infill "def area(r):\\n[[16]]\\n    return a" --escapes
  mercury eval sudoku4 --limit 64                    how often is it right?
  mercury init my_recipe.py                          write a recipe, and train a model of your own"""

SECONDS, SLOWEST_FRAME = 3.0, 0.5  # that the live view of one answer should take, and that a frame may
LIVE_STEPS = 10  # denoising steps of a block in the live view
TRIES = 5  # questions of one kind
DRAWN = 8  # puzzles of which the one with the most blanks is asked

# Beginnings that the standard library knows well: a model of this size writes its idiom, not its logic.
PYTHON = (
    "def __repr__(self):\n",
    "def __init__(self, name, value):\n",
    "def close(self):\n",
)


class Question(NamedTuple):
    """What the demo asks, and how the answer is judged.

    Attributes:
        before: What precedes the answer on the screen.
        check: Whether an answer is correct; None where that cannot be decided.
        right: Printed with a correct answer: why it is correct.
        wrong: Printed with a wrong answer: a correct one.
        remark: Text -> what is printed with an answer that cannot be checked.
    """

    title: str
    before: str
    prompt: Any
    max_tokens: int
    check: Callable[[str], bool | None]
    right: str = ""
    wrong: str = ""
    remark: Callable[[str], str] = lambda text: ""


def run(argv: Sequence[str]) -> int:
    """Runs the command; returns 0 when the sudoku and the sum were answered correctly, else 1."""
    args = arguments.read(Demo, argv, "mercury demo")
    arguments.check_request(args.seed, None)
    lm = show.load(args.model)
    kinds = questions(args.seed)
    say = (lambda text: None) if args.json else (lambda text: print(show.readable(text), flush=True))
    say(f"{lm.name}: {lm.parameters:,} parameters, on {show.device()}")
    live = show.terminal() and not (args.no_live or args.json)
    with show.progress(text="compiling, once for all that follows"):
        began = time.perf_counter()
        for question in (draw(0) for draw in kinds):
            _decode(lm, question)
            _decode(lm, question, one_per_step=True)
            if live:
                list(_frames(lm, question))
        seconds = time.perf_counter() - began
    say(f"compiled in {seconds:.1f} s\n")
    right = [_ask(lm, draw, live, args.json, say) for draw in kinds]
    say(_first() + NEXT)
    return int(False in right)


def _first() -> str:
    """How to get the command `mercury`, where it is installed in an environment that is not active."""
    activate = Path(sys.executable).with_name("activate")
    if shutil.which("mercury") is not None or not activate.is_file():
        return ""
    return f"The command mercury: source {os.path.relpath(activate)}\n\n"


# --- questions


def questions(seed: int) -> list[Callable[[int], Question]]:
    """The three kinds of questions, each as a function of the attempt.

    Args:
        seed: Draws the questions.

    Returns:
        A sudoku, a sum and a start of Python; each attempt gives another one.
    """
    puzzles = [functools.partial(_puzzle, name, seed) for name in ("sudoku4", "add3")]
    return [*puzzles, lambda attempt: _python(PYTHON[(seed + attempt) % len(PYTHON)])]


def _puzzle(name: str, seed: int, attempt: int) -> Question:
    """A held-out problem of a task; of several sudokus the one with the most blanks, which has most to show."""
    import numpy as np

    from mercury_jax.tasks import TASKS, draw

    task, rng = TASKS[name], np.random.default_rng((seed, attempt))
    drawn = [draw(task, rng, "test") for _ in range(DRAWN)]
    problem = max(drawn, key=lambda p: p.input.count("0")) if name == "sudoku4" else drawn[0]
    prompt = [{"role": "user", "content": problem.input}]
    check = lambda text: task.check(problem.input, text)
    if name == "sudoku4":
        return Question(
            "A 4x4 sudoku that training never saw", problem.input.replace("0", ".") + "\n\n", prompt, 32, check,
            right="every row, column and box has each digit once, and the given digits stand",
            wrong=problem.output.replace("\n", " / "),
        )  # fmt: skip
    return Question(
        "A sum, worked out column by column before it answers", problem.input + "\n", prompt, 64, check,
        right=f"{problem.input}{problem.output}", wrong=problem.output,
    )  # fmt: skip


def _python(start: str) -> Question:
    def remark(text: str) -> str:
        try:
            ast.parse((start + text).rpartition("\n")[0])  # the last line may be cut
        except (SyntaxError, ValueError):
            return "It does not parse as Python."
        return "Its whole lines parse as Python."

    title = "Python, in the manner of the standard library it was trained on"
    return Question(title, start, start, 64, check=lambda text: None, remark=remark)


# --- answers


def _decode(lm: LM, question: Question, one_per_step: bool = False) -> Any:
    from mercury_jax.decode import rules
    from mercury_jax.decode.sample import sample

    sampler = rules.confidence() if one_per_step else None
    return sample(lm, question.prompt, max_tokens=question.max_tokens, sampler=sampler)


def _ask(
    lm: LM, draw: Callable[[int], Question], live: bool, as_json: bool, say: Callable[[str], None]
) -> bool | None:
    """Asks questions of one kind until one is answered correctly, and times each answer against one token per step.

    Args:
        lm: The model.
        draw: Attempt -> question.
        live: Whether to draw the answer step by step.
        as_json: Whether to print a record for each question.
        say: Prints text for people.

    Returns:
        Whether the last answer is correct; None where that cannot be decided.
    """
    right = False
    for attempt in range(TRIES):
        question = draw(attempt)
        say(f"--- {question.title}\n")
        out, slow = _decode(lm, question), _decode(lm, question, one_per_step=True)
        text, right = out.text, question.check(out.text)
        if live:
            text = _watch(lm, question)
            right = right and question.check(
                text
            )  # both the answer that was shown and the one that was timed
        else:
            thinking = f"[thinking] {out.thinking[0]}\n[answer] " if out.thinking[0] else ""
            say(question.before + thinking + out.text)
        tokens, nfe, slow_nfe = out.lengths[0], int(out.forwards[0]), int(slow.forwards[0])
        if as_json:
            prompt = question.prompt if isinstance(question.prompt, str) else question.prompt[0]["content"]
            show.emit({
                "scene": question.title, "prompt": prompt, "text": text, "correct": right, "attempt": attempt,
                "tokens": tokens, "forwards": nfe, "tokens_per_forward": tokens / max(nfe, 1),
                "seconds": out.seconds, "tokens_per_second": tokens / max(out.seconds, 1e-9),
                "one_token_a_forward": {"forwards": slow_nfe, "seconds": slow.seconds},
            })  # fmt: skip
        verdicts = {True: f"Right: {question.right}.", False: f"Wrong: it should be {question.wrong}."}
        verdict = question.remark(text) if right is None else verdicts[right]
        ratio = slow.seconds / max(out.seconds, 1e-9)
        say(
            f"\n{verdict}\n  {show.figures(tokens, nfe, out.seconds)}\n  the same model, one token per step: "
            f"{slow_nfe} forward passes, {slow.seconds:.2f} s, {ratio:.1f} times as long\n"
        )
        if right is not False:
            break
        if attempt + 1 < TRIES:
            say("The next one:\n")
    return right


def _frames(lm: LM, question: Question) -> Any:
    """The answer step by step: the most confident tokens first, in LIVE_STEPS steps a block. The default rule would
    need one or two steps, too few to watch."""
    from mercury_jax.config import Plan
    from mercury_jax.decode import rules
    from mercury_jax.decode.stream import stream

    how: dict[str, Any] = dict(sampler=rules.confidence(), plan=Plan(steps=LIVE_STEPS))
    return stream(lm, question.prompt, max_tokens=question.max_tokens, **how)


def _watch(lm: LM, question: Question) -> str:
    """Shows an answer live, slowly enough to follow; returns its text."""
    from rich.console import Console

    pace = min(max(SECONDS / LIVE_STEPS, show.PACE), SLOWEST_FRAME)
    size = min(question.max_tokens, lm.model.config.block)
    console, frames = Console(highlight=False), _frames(lm, question)
    last = show.follow(console, lm.tokenizer, question.before, size, frames, pace=pace, first="noise")
    return last.text
