"""`mercury demo`: the embedded model turns noise into answers, and each answer is checked.

The questions are held-out sudokus and sums, and the start of a Python function. Of each kind the demo asks until an
answer is correct, at most `TRIES` times.
"""

from __future__ import annotations

import ast
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
        check: Whether an answer is correct; None where that cannot be told.
        right, wrong: What is said of a correct answer, and the correct answer beside a wrong one.
        remark: What is said of an answer that cannot be checked.
    """

    title: str
    before: str
    prompt: Any
    max_tokens: int
    check: Callable[[str], bool | None]
    right: str = ""
    wrong: str = ""
    remark: Callable[[str], str] = lambda text: ""


class DemoAnswer(NamedTuple):
    """One answer, whether it is right (None: that cannot be told), and what it cost."""

    text: str
    right: bool | None
    tokens: int
    nfe: int
    seconds: float
    slow_nfe: int  # of the same model, accepting one token per step
    slow_seconds: float


def run(argv: Sequence[str]) -> int:
    """Runs the command; returns 0 when the sudoku and the sum were answered correctly, else 1."""
    args = arguments.read(Demo, argv, "mercury demo")
    arguments.check_request(args.seed, None)
    lm = show.load(args.model)
    kinds = questions(args.seed)
    say = (lambda text: None) if args.json else (lambda text: print(show.readable(text), flush=True))
    say(f"{lm.name}: {lm.parameters:,} parameters, on {show.device()}")
    live = show.terminal() and not (args.no_live or args.json)
    with show.waiting("compiling, once for all that follows"):
        began = time.perf_counter()
        for question in (draw(0) for draw in kinds):
            _decode(lm, question)
            _decode(lm, question, one_per_step=True)
            if live:
                list(_frames(lm, question))
        seconds = time.perf_counter() - began
    say(f"compiled in {seconds:.1f} s\n")
    results = [_ask(lm, draw, live, args.json, say) for draw in kinds]
    say(NEXT)
    return int(any(shown.right is False for shown in results))


# --- questions


def questions(seed: int) -> list[Callable[[int], Question]]:
    """The three kinds of questions, each as a function of the attempt; `seed` draws them."""
    return [
        lambda attempt: _sudoku(seed, attempt),
        lambda attempt: _sum(seed, attempt),
        lambda attempt: _python(PYTHON[(seed + attempt) % len(PYTHON)]),
    ]


def _problem(name: str, seed: int, attempt: int) -> tuple[Any, Any]:
    """(task, a held-out problem of it): of several sudokus the one with the most blanks, which has most to show."""
    import numpy as np

    from mercury_jax.tasks import TASKS, draw

    task, rng = TASKS[name], np.random.default_rng((seed, attempt))
    drawn = [draw(task, rng, "test") for _ in range(DRAWN)]
    return task, max(drawn, key=lambda p: p.input.count("0")) if name == "sudoku4" else drawn[0]


def _sudoku(seed: int, attempt: int) -> Question:
    task, problem = _problem("sudoku4", seed, attempt)
    return Question(
        title="A 4x4 sudoku that training never saw",
        before=problem.input.replace("0", ".") + "\n\n",
        prompt=[{"role": "user", "content": problem.input}],
        max_tokens=32,
        check=lambda text: task.check(problem.input, text),
        right="every row, column and box has each digit once, and the given digits stand",
        wrong=problem.output.replace("\n", " / "),
    )


def _sum(seed: int, attempt: int) -> Question:
    task, problem = _problem("add3", seed, attempt)
    return Question(
        title="A sum, worked out column by column before it answers",
        before=problem.input + "\n",
        prompt=[{"role": "user", "content": problem.input}],
        max_tokens=64,
        check=lambda text: task.check(problem.input, text),
        right=f"{problem.input}{problem.output}",
        wrong=problem.output,
    )


def _python(start: str) -> Question:
    def remark(text: str) -> str:
        try:
            ast.parse((start + text).rpartition("\n")[0])  # the last line may be cut
        except (SyntaxError, ValueError):
            return "It does not parse as Python."
        return "Its whole lines parse as Python."

    return Question(
        title="Python, in the manner of the standard library it was trained on",
        before=start,
        prompt=start,
        max_tokens=64,
        check=lambda text: None,
        remark=remark,
    )


# --- answers


def _decode(lm: LM, question: Question, one_per_step: bool = False) -> Any:
    from mercury_jax.decode.sample import sample

    sampler = arguments.registered().rules["confidence"].make() if one_per_step else None
    return sample(lm, question.prompt, max_tokens=question.max_tokens, sampler=sampler)


def _ask(
    lm: LM, draw: Callable[[int], Question], live: bool, as_json: bool, say: Callable[[str], None]
) -> DemoAnswer:
    """Asks questions of one kind until one is answered correctly."""
    for attempt in range(TRIES):
        question = draw(attempt)
        say(f"--- {question.title}\n")
        shown = _show(lm, question, live, say)
        if as_json:
            show.emit(_record(question, shown, attempt))
        else:
            say(_verdict(question, shown))
        if shown.right is not False:
            break
        if attempt + 1 < TRIES:
            say("The next one:\n")
    return shown


def _show(lm: LM, question: Question, live: bool, say: Callable[[str], None]) -> DemoAnswer:
    """Answers a question, shows it, and times it against one token per step."""
    out, slow = _decode(lm, question), _decode(lm, question, one_per_step=True)
    text, right = out.text, question.check(out.text)
    if live:
        text = _watch(lm, question)
        right = right and question.check(text)  # both the answer that was shown and the one that was timed
    else:
        thinking = out.thinking[0]
        say(question.before + (f"[thinking] {thinking}\n[answer] " if thinking else "") + out.text)
    return DemoAnswer(
        text, right, out.lengths[0], int(out.forwards[0]), out.seconds, int(slow.forwards[0]), slow.seconds
    )


def _frames(lm: LM, question: Question) -> Any:
    """The answer step by step: the most confident tokens first, in LIVE_STEPS steps a block. The default rule would
    need one or two steps, too few to watch."""
    from mercury_jax.config import Plan
    from mercury_jax.decode.stream import stream

    rule = arguments.registered().rules["confidence"].make()
    plan = Plan(steps=LIVE_STEPS)
    return stream(lm, question.prompt, max_tokens=question.max_tokens, sampler=rule, plan=plan)


def _watch(lm: LM, question: Question) -> str:
    """Shows an answer live, slowly enough to follow; returns its text."""
    from rich.console import Console

    from mercury_jax.cli import live

    pace = min(max(SECONDS / LIVE_STEPS, live.PACE), SLOWEST_FRAME)
    size = min(question.max_tokens, lm.model.config.block)
    console, frames = Console(highlight=False), _frames(lm, question)
    last = live.follow(console, lm.tokenizer, question.before, size, frames, pace=pace, first="noise")
    return last.text


def _verdict(question: Question, shown: DemoAnswer) -> str:
    """What is said of an answer: right or wrong, and its speed beside one token per step."""
    told = {True: f"Right: {question.right}.", False: f"Wrong: it should be {question.wrong}."}
    verdict = question.remark(shown.text) if shown.right is None else told[shown.right]
    ours = show.figures(shown.tokens, shown.nfe, shown.seconds)
    ratio = shown.slow_seconds / max(shown.seconds, 1e-9)
    slow = f"{shown.slow_nfe} forward passes, {shown.slow_seconds:.2f} s, {ratio:.1f} times as long"
    return f"\n{verdict}\n  {ours}\n  the same model, one token per step: {slow}\n"


def _record(question: Question, shown: DemoAnswer, attempt: int) -> dict[str, Any]:
    return {
        "scene": question.title,
        "prompt": question.prompt if isinstance(question.prompt, str) else question.prompt[0]["content"],
        "text": shown.text,
        "correct": shown.right,
        "attempt": attempt,
        "tokens": shown.tokens,
        "forwards": shown.nfe,
        "tokens_per_forward": shown.tokens / max(shown.nfe, 1),
        "seconds": shown.seconds,
        "tokens_per_second": shown.tokens / max(shown.seconds, 1e-9),
        "one_token_a_forward": {"forwards": shown.slow_nfe, "seconds": shown.slow_seconds},
    }
