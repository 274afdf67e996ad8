"""Error correction: put a wrong token into a finished answer, and see which rules repair it through `mj.edit`.

The answers are held-out 4x4 Sudokus: each puzzle has one solution, so the prompt determines the truth of every cell.
One digit of an open cell is replaced by another digit. Cells are characters of the answer; every call is the one that
a user makes, with the puzzle as a conversation in `prompt`.

    settled    the text of the whole answer, one digit wrong
    drafting   its ids, half of the other open cells being masks: for rules that revise only while they still draft
               (WINO, ReMDM)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mercury_jax.config import refuse
from mercury_jax.decode import rules
from mercury_jax.decode.edit import edit
from mercury_jax.evaluate.report import wilson
from mercury_jax.evaluate.tasks import draw, find
from mercury_jax.types import LM

SETTINGS = ("settled", "drafting")
DEFAULT = "default"  # edit() without a sampler

# Rules that may change a settled token, and the plain ones that never do.
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


class Case(NamedTuple):
    """One wrong answer: the puzzle, the right text, the wrong one, and where they differ."""

    puzzle: str
    truth: str
    wrong: str
    at: int  # index of the wrong character
    blanks: tuple[int, ...]  # characters of the answer that the puzzle leaves open


class Repair(NamedTuple):
    """What `edit` made of a case."""

    text: str
    forwards: int


def cases(n: int, seed: int) -> list[Case]:
    """`n` held-out puzzles with their solution, one digit of an open cell replaced by another digit."""
    rng = np.random.default_rng((seed, 17))
    task = find("sudoku4")
    assert task.generator is not None
    found = []
    for problem in draw(task.generator, n, seed):
        truth = problem.output
        blanks = tuple(i for i, cell in enumerate(problem.input) if cell == "0")
        at = int(rng.choice(blanks))
        digit = str(rng.choice([d for d in "1234" if d != truth[at]]))
        found.append(Case(problem.input, truth, truth[:at] + digit + truth[at + 1 :], at, blanks))
    return found


def run(
    lm: LM, names: Sequence[str] = (*EDITING, *PLAIN), *, n: int = 256, seed: int = 0, batch: int = 64
) -> Iterator[Mapping[str, Any]]:
    """Measures how many wrong digits each rule repairs, and what else it changes.

    Args:
        lm: The model.
        names: Rules by name; "default" is `edit` without a sampler.
        n: Cases of each rule and setting.
        seed: Draws the cases, the masks of `drafting` and what rules draw.
        batch: Rows of a call.

    Yields:
        A row for each rule and setting; a rule that the model cannot follow gives a row with `refused`.
    """
    asked = cases(n, seed)
    for name in names:
        if name != DEFAULT and name not in rules.ALL:
            raise refuse("rule", name, ", ".join((DEFAULT, *rules.ALL)))
    for name in names:
        for setting in SETTINGS:
            try:
                repairs = _repaired(lm, asked, name, setting, seed, batch)
            except ValueError as error:
                yield {"rule": name, "setting": setting, "refused": str(error)}
                continue
            yield {"rule": name, "setting": setting, "seed": seed} | _row(asked, repairs)


def _repaired(lm: LM, asked: Sequence[Case], name: str, setting: str, seed: int, batch: int) -> list[Repair]:
    rule = None if name == DEFAULT else rules.ALL[name]()
    done = []
    for i in range(0, len(asked), batch):
        some = asked[i : i + batch]
        texts = [
            c.wrong if setting == "settled" else _drafted(lm, c, (seed, i + j)) for j, c in enumerate(some)
        ]
        puzzles = [[{"role": "user", "content": c.puzzle}] for c in some]
        out = edit(lm, texts, prompt=puzzles, seed=seed + i, sampler=rule)
        done += [Repair(*row) for row in zip(out.texts, out.forwards.tolist(), strict=True)]
    return done


def _drafted(lm: LM, case: Case, seed: tuple[int, int]) -> list[int]:
    """The wrong answer as ids, half of its other open cells being masks."""
    ids = lm.tokenizer.encode(case.wrong)
    if lm.corruption.mask is None:
        raise refuse("setting", "drafting", "a model with a mask id")
    if [lm.tokenizer.decode([i]) for i in ids] != list(case.wrong):
        raise refuse("setting", "drafting", "a tokenizer that has a token for each cell of a Sudoku")
    others = [i for i in case.blanks if i != case.at]
    for i in np.random.default_rng(seed).permutation(others)[: (len(others) + 1) // 2]:
        ids[i] = lm.corruption.mask
    return ids


def _row(asked: Sequence[Case], repairs: Sequence[Repair]) -> dict[str, Any]:
    pairs = list(zip(asked, repairs, strict=True))
    repaired = [r.text[c.at : c.at + 1] == c.truth[c.at] for c, r in pairs]
    solved = [r.text == c.truth for c, r in pairs]
    cells = lambda text, c: [x for i, x in enumerate(text) if i != c.at]
    harmed = [sum(a != b for a, b in zip(cells(r.text, c), cells(c.truth, c))) for c, r in pairs]
    low, high = wilson(sum(repaired), len(asked))
    return {
        "n": len(asked), "repaired": float(np.mean(repaired)), "low": low, "high": high,
        "solved": float(np.mean(solved)), "other_cells_wrong": float(np.mean(harmed)),
        "forwards": float(np.mean([r.forwards for r in repairs])),
    }  # fmt: skip
