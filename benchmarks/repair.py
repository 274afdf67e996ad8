"""Error correction: which rules correct a wrong token in a complete answer, through `mj.edit`.

The answers are held-out 4x4 Sudokus: each puzzle has one solution, so the prompt determines every cell. One digit of an
open cell is replaced by another digit. Every call is the one that a user makes, with the puzzle as a conversation in
`prompt` and the answer as text.

    settled    the text of the whole answer, one digit wrong
    drafting   its ids with half of the other open cells masked, for rules that revise only during denoising (WINO,
               ReMDM)

Run with `python -m benchmarks.repair`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import numpy as np

from benchmarks.script import run_script
from mercury_jax.cli import arguments, show
from mercury_jax.cli.arguments import Flag, Int, Positional, option
from mercury_jax.config import nearest, refuse
from mercury_jax.decode import rules
from mercury_jax.decode.edit import edit
from mercury_jax.evaluate.runner import wilson
from mercury_jax.tasks import TASKS, draw_distinct
from mercury_jax.types import LM

SETTINGS = ("settled", "drafting")
DEFAULT = "default"  # edit() without a sampler

# Rules that may change an accepted token, and the plain ones that never do.
EDITING = (
    DEFAULT,
    "editing",
    "blind_editing",
    "self_correct",
    "wino",
    "remdm_cap",
    "remdm_rescale",
    "remdm_confidence",
)
PLAIN = ("confidence", "threshold", "random", "ancestral", "entropy_bound")


@dataclass(frozen=True, kw_only=True)
class RepairBenchmark:
    """Put a wrong digit into a complete answer, and see which rules correct it.

    examples:
      python -m benchmarks.repair --limit 512
      python -m benchmarks.repair --rules default wino --seed 7 --json

    The answers are held-out 4x4 Sudokus with one wrong digit: the puzzle in the
    prompt determines the truth. Each call is mj.edit, with the answer as text.
    settled: the whole answer. drafting: half of the other open cells are masked,
    for rules that revise only during denoising. The rule `default` is mj.edit
    without a sampler.
    """

    model: Annotated[Positional[str | None], option("MODEL")] = None
    """Folder of a saved model. Default: the embedded one."""
    rules: Annotated[tuple[str, ...], option("NAME [NAME ...]")] = (*EDITING, *PLAIN)
    """Rules, or `default`."""
    limit: Int = 256
    """Answers of each rule and setting."""
    batch: Int = 64
    """Rows decoded together."""
    seed: Int = 0
    """Draws answers and errors."""
    out: Annotated[str | None, option("FILE.jsonl")] = None
    """Write the records, too."""
    json: Flag = False
    """Print one JSON object for each record."""


def run(argv: Sequence[str]) -> int:
    """Runs the benchmark; returns its exit code."""
    args = arguments.read(RepairBenchmark, argv, "python -m benchmarks.repair")
    show.check_writable("--out", args.out)
    names = tuple(dict.fromkeys(args.rules))
    found = compare(show.load(args.model), names, n=args.limit, seed=args.seed, batch=args.batch)
    show.report(found, args.out, None if args.json else line)
    return 0


def line(row: Mapping[str, Any]) -> str:
    """A record for people."""
    if "refused" in row:
        return f"{row['rule']:18} {row['setting']:9} refused: {row['refused']}"
    return (
        f"{row['rule']:18} {row['setting']:9} repaired {100 * row['repaired']:5.1f}% of {row['n']} "
        f"(95% {100 * row['low']:.1f} to {100 * row['high']:.1f}), all right {100 * row['solved']:.1f}%, "
        f"{row['forwards']:.1f} forward passes"
    )


class WrongAnswer(NamedTuple):
    """An answer with one wrong digit.

    Attributes:
        puzzle: The question.
        truth: The right answer.
        wrong: The wrong one.
        at: Index of the wrong character.
        blanks: Indices of the characters that the puzzle leaves open.
    """

    puzzle: str
    truth: str
    wrong: str
    at: int
    blanks: tuple[int, ...]


def wrong_answers(n: int, seed: int) -> list[WrongAnswer]:
    """Draws `n` held-out puzzles with their solutions, one digit of an open cell replaced by another digit.

    Args:
        n: How many.
        seed: Draws puzzles, cells and digits.

    Returns:
        The answers, the same for the same seed.
    """
    rng = np.random.default_rng((seed, 17))
    found = []
    for problem in draw_distinct(TASKS["sudoku4"], n, seed):
        truth = problem.output
        blanks = tuple(i for i, cell in enumerate(problem.input) if cell == "0")
        at = int(rng.choice(blanks))
        digit = str(rng.choice([d for d in "1234" if d != truth[at]]))
        found.append(WrongAnswer(problem.input, truth, truth[:at] + digit + truth[at + 1 :], at, blanks))
    return found


def compare(
    lm: LM, names: Sequence[str] = (*EDITING, *PLAIN), *, n: int = 256, seed: int = 0, batch: int = 64
) -> Iterator[Mapping[str, Any]]:
    """Measures how many wrong digits each rule corrects, and what else it changes.

    Args:
        lm: The model.
        names: Rules by name; "default" is `edit` without a sampler.
        n: Answers of each rule and setting.
        seed: Draws the answers, the masks of `drafting` and the tokens of rules that sample.
        batch: Rows of a call.

    Yields:
        A record for each rule and setting; for a rule that the model cannot run it has `refused`, the reason.

    Raises:
        ValueError: An unknown rule.
    """
    asked = wrong_answers(n, seed)
    for name in names:
        if name != DEFAULT and name not in rules.ALL:
            raise refuse("rules", name, nearest(name, [DEFAULT, *rules.ALL]))
    for name in names:
        for setting in SETTINGS:
            try:
                repaired = _edited(lm, asked, name, setting, seed, batch)
            except ValueError as error:
                yield {"rule": name, "setting": setting, "refused": str(error)}
                continue
            yield {"rule": name, "setting": setting, "seed": seed} | _summary(asked, repaired)


def _edited(
    lm: LM, asked: Sequence[WrongAnswer], name: str, setting: str, seed: int, batch: int
) -> list[tuple[str, int]]:
    """(text, forward passes) of each answer after `edit`."""
    rule = None if name == DEFAULT else rules.ALL[name]()
    done = []
    for i in range(0, len(asked), batch):
        some = asked[i : i + batch]
        drafting = setting == "drafting"
        texts = [_half_masked(lm, c, (seed, i + j)) if drafting else c.wrong for j, c in enumerate(some)]
        puzzles = [[{"role": "user", "content": c.puzzle}] for c in some]
        out = edit(lm, texts, prompt=puzzles, seed=seed + i, sampler=rule)
        done += zip(out.texts, out.forwards.tolist(), strict=True)
    return done


def _half_masked(lm: LM, case: WrongAnswer, seed: tuple[int, int]) -> list[int]:
    """The wrong answer as ids, with half of its other open cells masked."""
    ids = lm.tokenizer.encode(case.wrong)
    if lm.corruption.mask is None:
        raise refuse("setting", "drafting", "a model with a mask id")
    if [lm.tokenizer.decode([i]) for i in ids] != list(case.wrong):
        raise refuse("setting", "drafting", "a tokenizer that has a token for each cell of a Sudoku")
    others = [i for i in case.blanks if i != case.at]
    for i in np.random.default_rng(seed).permutation(others)[: (len(others) + 1) // 2]:
        ids[i] = lm.corruption.mask
    return ids


def _summary(asked: Sequence[WrongAnswer], edited: Sequence[tuple[str, int]]) -> dict[str, Any]:
    """Shares of answers whose wrong digit was corrected and that are right as a whole, and wrong other cells."""
    pairs = [(c, text) for c, (text, _) in zip(asked, edited, strict=True)]
    repaired = [text[c.at : c.at + 1] == c.truth[c.at] for c, text in pairs]
    solved = [text == c.truth for c, text in pairs]
    cells = lambda text, c: [x for i, x in enumerate(text) if i != c.at]
    harmed = [sum(a != b for a, b in zip(cells(text, c), cells(c.truth, c))) for c, text in pairs]
    low, high = wilson(sum(repaired), len(asked))
    return {
        "n": len(asked), "repaired": float(np.mean(repaired)), "low": low, "high": high,
        "solved": float(np.mean(solved)), "other_cells_wrong": float(np.mean(harmed)),
        "forwards": float(np.mean([nfe for _, nfe in edited])),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(run_script(run))
