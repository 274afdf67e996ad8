"""`mercury demo`: the embedded model turns noise into answers, and each answer is checked."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mercury_jax.cli import options, show
from mercury_jax.cli.parser import Parser, whole
from mercury_jax.cli.scenes import TRIES, Scene, scenes

if TYPE_CHECKING:
    from mercury_jax.types import LM

MORE = """\
Bold tokens are settled, coloured ones tentative, and ░ is noise. The puzzles are held out: training never
saw them. The speed is that of a second, compiled run without the drawing, next to the same model made to
settle one token a pass. --seed draws other puzzles."""

NEXT = """\
What to try next:
  mercury demo --seed 7                              other puzzles
  mercury sample "968+754=" --chat                   a question of your own, live
  mercury infill "def area(r):\\n[[16]]\\n    return a" --escapes
  mercury eval sudoku4 --limit 64                    how often is it right?
  mercury init my_recipe.py                          write a recipe, and train a model of your own"""


SCENE, SLOWEST = 3.0, 0.5  # seconds that a scene should last, and that a frame may
WATCHED = 10  # passes of a block in the live view


class Shown(NamedTuple):
    """One answer: its text, whether it is right (None: nobody can say), and what it cost."""

    text: str
    right: bool | None
    tokens: int
    forwards: int
    seconds: float
    slow_forwards: int  # of the same model, settling one position a pass
    slow_seconds: float


def parser() -> Parser:
    p = Parser("demo", "Watch noise turn into a sudoku, a sum and a line of Python.", MORE)
    options.model(p)
    p.add_argument("--seed", type=whole, default=0, metavar="N", help="draws the puzzles (default 0)")
    p.add_argument("--no-live", action="store_true", help="only the answers")
    options.machine(p)
    return p


def run(argv: Sequence[str]) -> int:
    """0 when the sudoku and the sum ended right, else 1."""
    args = parser().read(argv)
    from mercury_jax.decode.inputs import check_seed

    seed = check_seed(args.seed)
    lm = show.load(args.model)
    acts = scenes(seed)
    say = (lambda text: None) if args.json else (lambda text: print(show.readable(text), flush=True))
    say(f"{lm.name}: {lm.parameters:,} parameters, on {show.device()}")
    live = show.lively(args)
    with show.waiting("compiling, once for all that follows"):
        seconds = _compile(lm, [s.first for s in acts], live)
    say(f"compiled in {seconds:.1f} s\n")
    results = [_act(lm, scene, live, args.json, say) for scene in acts]
    say(NEXT)
    return int(any(r.right is False for r in results))


def _compile(lm: LM, acts: Sequence[Scene], live: bool) -> float:
    """Every program that the demo needs, run once; the seconds it took."""
    began = time.perf_counter()
    for scene in acts:
        _decode(lm, scene)
        _decode(lm, scene, slow=True)
        if live:
            list(_moments(lm, scene))
    return time.perf_counter() - began


def _decode(lm: LM, scene: Scene, slow: bool = False) -> Any:
    from mercury_jax.decode import rules
    from mercury_jax.decode.sample import sample

    return sample(
        lm,
        scene.prompt,
        max_tokens=scene.max_tokens,
        sampler=rules.confidence() if slow else None,
    )


def _act(lm: LM, tries: Any, live: bool, as_json: bool, say: Any) -> Shown:
    """Problems of one kind, until one is answered right."""
    for attempt in range(TRIES):
        scene = tries.draw(attempt)
        say(f"--- {scene.title}\n")
        shown = _show(lm, scene, live, say)
        if as_json:
            show.emit(_record(scene, shown, attempt))
        else:
            say(_verdict(scene, shown))
        if shown.right is not False:
            break
        if attempt + 1 < TRIES:
            say("The next one:\n")
    return shown


def _show(lm: LM, scene: Scene, live: bool, say: Any) -> Shown:
    out = _decode(lm, scene)
    slow = _decode(lm, scene, slow=True)
    text, right = out.text, scene.check(out.text)
    if live:
        text = _watch(lm, scene)
        # What was watched and what was timed must both be right before we say so.
        right = right and scene.check(text)
    else:
        say(_plain(scene, out))
    return Shown(
        text, right, out.lengths[0], int(out.forwards[0]), out.seconds,
        int(slow.forwards[0]), slow.seconds,
    )  # fmt: skip


def _moments(lm: LM, scene: Scene) -> Any:
    """The surest tokens first, in WATCHED passes a block: the threshold would be done in one or two."""
    from mercury_jax.config import Plan
    from mercury_jax.decode import rules
    from mercury_jax.decode.stream import stream

    paced = Plan(steps=WATCHED)
    return stream(lm, scene.prompt, max_tokens=scene.max_tokens, sampler=rules.confidence(), plan=paced)


def _watch(lm: LM, scene: Scene) -> str:
    """Live, and slow enough for the eye; returns the text that was seen."""
    from rich.console import Console

    from mercury_jax.cli import live

    pace = min(max(SCENE / WATCHED, live.PACE), SLOWEST)
    seen: list[str] = []

    def noted() -> Any:
        for moment in _moments(lm, scene):
            seen.append(moment.text)
            yield moment

    moments = noted()
    room = min(scene.max_tokens, lm.model.config.block)
    live.follow(Console(highlight=False), lm.tokenizer, scene.before, room, moments, pace=pace, first="noise")
    return seen[-1]


def _plain(scene: Scene, out: Any) -> str:
    thought = out.thinking[0]
    return scene.before + (f"[thinking] {thought}\n[answer] " if thought else "") + out.text


def _verdict(scene: Scene, shown: Shown) -> str:
    told = {True: f"Right: {scene.right}.", False: f"Wrong: it should be {scene.wrong}."}
    verdict = scene.remark(shown.text) if shown.right is None else told[shown.right]
    ours = show.figures(shown.tokens, shown.forwards, shown.seconds)
    ratio = shown.slow_seconds / max(shown.seconds, 1e-9)
    slow = f"{shown.slow_forwards} forwards, {shown.slow_seconds:.2f} s, {ratio:.1f} times as long"
    return f"\n{verdict}\n  {ours}\n  the same model, one token a forward: {slow}\n"


def _record(scene: Scene, shown: Shown, attempt: int) -> dict[str, Any]:
    return {
        "scene": scene.title,
        "prompt": scene.prompt if isinstance(scene.prompt, str) else scene.prompt[0]["content"],
        "text": shown.text,
        "correct": shown.right,
        "attempt": attempt,
        "tokens": shown.tokens,
        "forwards": shown.forwards,
        "tokens_per_forward": shown.tokens / max(shown.forwards, 1),
        "seconds": shown.seconds,
        "tokens_per_second": shown.tokens / max(shown.seconds, 1e-9),
        "one_token_a_forward": {"forwards": shown.slow_forwards, "seconds": shown.slow_seconds},
    }
