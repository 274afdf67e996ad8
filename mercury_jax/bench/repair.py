"""Error correction: put a wrong token into a settled text, and see which rules repair it.

The texts are solved 4x4 Sudokus, held out: each has one solution, so the truth at every cell is
determined by the puzzle in the prompt. One answer digit is replaced by another digit.

    settled    the whole answer stands there, one token wrong
    drafting   half of the other answer tokens are masks again: for rules that revise only while
               they still draft (WINO, ReMDM)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from mercury_jax.chat import example
from mercury_jax.config import Plan
from mercury_jax.decode import launch, rules
from mercury_jax.decode.parts import Sampler
from mercury_jax.evaluate.report import wilson
from mercury_jax.evaluate.tasks import draw, find
from mercury_jax.types import LM

SETTINGS = ("settled", "drafting")
STEPS = 32  # passes a text may take

# Rules that may change a settled token, and the plain ones that never do.
EDITING = (
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
    """One wrong text: ids of prompt and answer, the truth, and where the wrong token stands."""

    prompt: list[int]
    truth: np.ndarray
    wrong: np.ndarray
    at: int
    blanks: np.ndarray  # positions of the answer that the puzzle leaves open


def cases(lm: LM, n: int, seed: int) -> list[Case]:
    """`n` held-out puzzles with their solution, one digit of an open cell replaced by another digit."""
    rng = np.random.default_rng((seed, 17))
    task = find("sudoku4")
    assert task.generator is not None
    digits = {d: lm.tokenizer.encode(d)[-1] for d in "1234"}
    found = []
    for problem in draw(task.generator, n, seed):
        prompt, truth = example(lm.tokenizer, problem.input, problem.output)
        # The canvas as decoding leaves it: the end of text up to the end of the block.
        fill = -len(truth) % lm.model.config.block
        truth = np.asarray([*truth, *[lm.model.config.eos] * fill], np.int32)
        cells = np.flatnonzero(np.isin(truth, list(digits.values())))
        blanks = cells[[c == "0" for c in problem.input.replace("\n", "")]]
        at = int(rng.choice(blanks))
        wrong = truth.copy()
        wrong[at] = rng.choice([i for i in digits.values() if i != truth[at]])
        found.append(Case(prompt, truth, wrong, at, blanks))
    return found


def run(
    lm: LM, names: Sequence[str] = (*EDITING, *PLAIN), *, n: int = 256, seed: int = 0, batch: int = 64
) -> Iterator[Mapping[str, Any]]:
    """A row for each rule and setting: how many wrong tokens were repaired, and what else changed."""
    asked = cases(lm, n, seed)
    for name in names:
        for setting in SETTINGS:
            try:
                texts = _decode(lm, asked, rules.ALL[name](), setting, seed, batch)
            except ValueError as error:
                yield {"rule": name, "setting": setting, "refused": str(error)}
                continue
            yield {"rule": name, "setting": setting, "seed": seed} | _row(asked, texts)


def _decode(
    lm: LM, asked: Sequence[Case], rule: Any, setting: str, seed: int, batch: int
) -> list[tuple[np.ndarray, int]]:
    done = []
    sampler = rule if isinstance(rule, Sampler) else Sampler(rule)
    for i in range(0, len(asked), batch):
        some = asked[i : i + batch]
        job = launch.prepare(
            lm, _request(some, setting, seed + i), sampler, Plan(steps=STEPS), infilling=False
        )
        job, _, _ = launch.advance(lm, job, None)
        launch.refuse_broken(job)
        text, forwards = jax.device_get((job.state.text, job.state.forwards))
        done += [
            (text[j, len(c.prompt) : len(c.prompt) + len(c.truth)], int(forwards[j]))
            for j, c in enumerate(some)
        ]
    return done


def _request(some: Sequence[Case], setting: str, seed: int) -> launch.Request:
    known = np.array([len(c.prompt) for c in some])
    total = known + [len(c.truth) for c in some]
    text = np.zeros((len(some), int(total.max())), np.int32)
    given, draft = np.zeros(text.shape, bool), np.zeros(text.shape, bool)
    for i, c in enumerate(some):
        text[i, : total[i]] = [*c.prompt, *c.wrong]
        given[i, : known[i]] = True
        draft[i, known[i] : total[i]] = True
        if setting == "drafting":
            others = c.blanks[c.blanks != c.at]
            hidden = np.random.default_rng((seed, i)).permutation(others)[: (len(others) + 1) // 2]
            draft[i, known[i] + hidden] = False
    return launch.Request(text, given, known, total, np.arange(seed, seed + len(some)) % 2**31, draft=draft)


def _row(asked: Sequence[Case], texts: Sequence[tuple[np.ndarray, int]]) -> dict[str, Any]:
    repaired = [t[c.at] == c.truth[c.at] for c, (t, _) in zip(asked, texts, strict=True)]
    solved = [np.array_equal(t, c.truth) for c, (t, _) in zip(asked, texts, strict=True)]
    harmed = [
        np.sum(t != c.truth) - (t[c.at] != c.truth[c.at]) for c, (t, _) in zip(asked, texts, strict=True)
    ]
    low, high = wilson(sum(repaired), len(asked))
    return {
        "n": len(asked), "repaired": float(np.mean(repaired)), "low": low, "high": high,
        "solved": float(np.mean(solved)), "other_tokens_wrong": float(np.mean(harmed)),
        "forwards": float(np.mean([f for _, f in texts])),
    }  # fmt: skip
