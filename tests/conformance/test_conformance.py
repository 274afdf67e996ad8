"""`mj.sample` with `mj.presets` emits what the authors' own scripts emit, in as many forward passes.

goldens/*.json hold what the public code of each family computed on our tiny random checkpoints: the tokens and passes
of runs at temperature 0 (`cases`), and how often each answer came up in thousands of rows (`draws`). Every case names
the arguments of the script, which the preset takes by the same names. An answer ends at the end of text here, where
some scripts fill up the length: there the tokens before it are compared, and passes may be fewer. `idle` passes, which
a script makes over a block without a mask, are not made here.
"""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from scipy import stats

import mercury_jax as mj
from tests.hub.goldens_of import GOLDENS as CHECKPOINTS
from tests.marks import slow_except

PATHS = sorted((Path(__file__).parent / "goldens").glob("*.json"))
FILES = {path.stem: found for path in PATHS if "preset" in (found := json.loads(path.read_text()))}
CASES = [(name, case) for name, file in FILES.items() for case in file["cases"]]
DRAWS = [(name, case) for name, file in FILES.items() for case in file.get("draws", [])]
ROWS = 1024  # of a draw
LEAST = 1e-4  # p-value below which two samples differ; the seed is fixed


@functools.cache
def model(checkpoint: str, sharpness: float, mask: int | None) -> mj.LM:
    """A golden checkpoint whose queries are multiplied by `sharpness`, as the reference's were."""
    lm = mj.load(CHECKPOINTS / checkpoint, dtype="float32", mask=mask)
    scale = lambda path, x: x * sharpness if jax.tree_util.keystr(path).endswith("['q']['w']") else x
    return dataclasses.replace(lm, params=jax.tree_util.tree_map_with_path(scale, lm.params))


def decode(
    name: str, case: dict[str, Any], rows: int, seed: int = 0, fuse: int | None = None
) -> tuple[mj.LM, mj.Output]:
    file = FILES[name]
    lm = model(file["checkpoint"], file.get("sharpness", 1.0), file.get("mask"))
    how = getattr(mj.presets, file["preset"])(**case["arguments"])
    how |= {key: case[key] for key in ("max_tokens",) if key in case}
    if fuse is not None:
        how["plan"] = dataclasses.replace(how["plan"], fuse_commit=fuse)
    return lm, mj.sample(lm, [case["prompt"]] * rows, seed=seed, **how)


def until_end(lm: mj.LM, tokens: list[int]) -> list[int]:
    """The tokens before the first end of text."""
    ends = {lm.model.config.eos, *lm.model.config.ends}
    return tokens[: next((i for i, token in enumerate(tokens) if token in ends), len(tokens))]


def first_of_each(cases: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """One case of each file."""
    return [next(case for case in cases if case[0] == name) for name in dict(cases)]


def title(value: Any) -> str | None:
    return value["name"].replace(" ", "_") if isinstance(value, dict) else value


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("name, case", slow_except(CASES, *first_of_each(CASES)), ids=title)
def test_tokens_and_forwards_are_the_references(name, case):
    lm, out = decode(name, case, 1)
    wanted = until_end(lm, case["tokens"])
    assert out.tokens[0].tolist() == wanted
    passes = case["forwards"] - case.get("idle", 0)
    if len(wanted) == len(case["tokens"]):
        assert out.forwards[0] == passes
    else:
        assert out.forwards[0] <= passes


# Families that encode finished blocks without shifted logits; the others refuse to fuse.
BLOCKS = [(name, case) for name, case in CASES if name in ("llada2", "llada21", "sdar")]


@pytest.mark.long
@pytest.mark.parametrize("name, case", slow_except(BLOCKS, *first_of_each(BLOCKS)), ids=title)
def test_commits_that_share_a_pass_emit_the_references_tokens_too(name, case):
    lm, fused = decode(name, case, 1, fuse=1)
    plain = decode(name, case, 1, fuse=0)[1]
    assert fused.tokens[0].tolist() == until_end(lm, case["tokens"])
    assert fused.forwards[0] == plain.forwards[0]
    nothing_to_encode = plain.passes == plain.forwards[0]
    assert fused.passes < plain.passes or nothing_to_encode


@pytest.mark.long
@pytest.mark.parametrize("name, case", slow_except(DRAWS, DRAWS[0]), ids=title)
def test_answers_are_as_frequent_as_the_references(name, case):
    lm, out = decode(name, case, ROWS)
    counts: dict[str, int] = {}
    for tokens in out.tokens:
        answer = " ".join(map(str, tokens.tolist()))
        counts[answer] = counts.get(answer, 0) + 1
    theirs = {answer: n for answer, n in case["counts"].items() if answer}
    ours = [counts.get(answer, 0) for answer in theirs]
    table = np.array([[*theirs.values(), case["counts"][""]], [*ours, ROWS - sum(ours)]])
    # Answers that are rare in both are one column.
    rare = table.sum(0) * ROWS / table.sum() < 5
    table = np.concatenate([table[:, ~rare], table[:, rare].sum(1, keepdims=True)], axis=1)
    table = table[:, table.sum(0) > 0]
    assert table.shape[1] >= 3
    found: Any = stats.chi2_contingency(table)
    assert found.pvalue > LEAST, table


def test_every_file_has_three_settings_with_short_and_long_prompts():
    for name, file in FILES.items():
        every = [*file["cases"], *file.get("draws", [])]
        settings = {json.dumps(case["arguments"], sort_keys=True) for case in every}
        lengths = {len(case["prompt"]) for case in every}
        assert len(settings) >= 3 and min(lengths) <= 8 and max(lengths) >= 40, name
