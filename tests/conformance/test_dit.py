"""`mj.sample` with `mj.presets` draws as the authors' samplers of MDLM, BD3-LM, DUO and GIDD do.

goldens/*.safetensors hold histograms of thousands of draws that the public code made on our tiny random checkpoints
(`qa/parity/reference_dit.py`): ids by position, pairs of neighbouring ids in coarse bins, and passes. Both samples are
compared by chi-square, with fixed seeds. What follows an end of text counts as further ends, because answers end there
here.
"""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

import mercury_jax as mj
from tests.hub.goldens_of import GOLDENS as CHECKPOINTS, read_all
from tests.marks import slow_except

GOLDENS = Path(__file__).parent / "goldens"
LENGTH, BINS, ROWS, EOS = 8, 12, 2048, 95
PROMPT = [5, 17, 33, 41, 8, 60, 22, 11]
LEAST = 1e-3  # p-value below which two samples differ
NO_END = {EOS: -1e9}  # the reference forbids it too, as it goes on after an end
REMDM = dict.fromkeys(("high_mode", "middle_mode", "low_mode"), "max-capped-0.3")
# family, case of its golden, arguments of the preset, logit_bias
CASES = [
    ("mdlm", "ancestral_4", dict(length=LENGTH, steps=4), NO_END),
    ("mdlm", "ancestral_16", dict(length=LENGTH, steps=16), NO_END),
    ("bd3lm", "first_hitting", dict(length=LENGTH), NO_END),
    ("bd3lm", "nucleus", dict(length=LENGTH, nucleus_p=0.6), None),
    ("duo", "ancestral", dict(length=LENGTH, steps=6), None),
    ("duo", "greedy", dict(length=LENGTH, steps=4, noise_removal="greedy"), None),
    ("duo", "psi_constant", dict(length=LENGTH, steps=10, predictor="psi", middle_mode="constant-0.5", high_frac=0.5,
                                 middle_frac=0.4), None),
    ("duo", "psi_max_capped", dict(length=LENGTH, steps=8, predictor="psi", high_frac=0.0, middle_frac=0.0, **REMDM),
     None),
    ("gidd", "ancestral", dict(max_seq_len=LENGTH, num_denoising_steps=8), NO_END),
    ("gidd", "min_p", dict(max_seq_len=LENGTH, num_denoising_steps=12, min_p=0.02), NO_END),
]  # fmt: skip


@functools.cache
def model(name: str) -> mj.LM:
    return mj.load(CHECKPOINTS / name, dtype="float32")


def p_value(theirs: np.ndarray, ours: np.ndarray) -> float:
    """Of two histograms [cells] being draws of one distribution; cells that are rare in both are one cell."""
    table = np.stack([theirs.ravel(), ours.ravel()]).astype(float)
    share = table.sum(0) / table.sum()
    rare = share * table.sum(1).min() < 5
    table = np.concatenate([table[:, ~rare], table[:, rare].sum(1, keepdims=True)], axis=1)
    table = table[:, table.sum(0) > 0]
    if table.shape[1] < 2:
        return 1.0
    found: Any = stats.chi2_contingency(table)
    return float(found.pvalue)


@pytest.mark.parametrize(
    "family, case, arguments, bias",
    slow_except(CASES),
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_draws_are_distributed_as_the_references(family, case, arguments, bias):
    golden = {
        k.split("/")[1]: v
        for k, v in read_all(GOLDENS / f"{family}.safetensors").items()
        if k.startswith(case)
    }
    how = getattr(mj.presets, family)(**arguments)
    out = mj.sample(model(family), [PROMPT] * ROWS, seed=1, logit_bias=bias, **how)
    x = np.full((ROWS, LENGTH), EOS)
    for row, tokens in zip(x, out.tokens, strict=True):
        row[: len(tokens)] = tokens
    values = []
    for i in range(LENGTH):
        ids = np.bincount(x[:, i], minlength=golden["marginal"].shape[1])
        values.append(p_value(golden["marginal"][i], ids))
    for i in range(LENGTH - 1):
        pairs = np.bincount(x[:, i] % BINS * BINS + x[:, i + 1] % BINS, minlength=BINS**2)
        values.append(p_value(golden["pairs"][i], pairs))
    assert min(values) > LEAST / len(values), values
    assert stats.kstest(values, "uniform").pvalue > LEAST, values  # nor are all of them small
    passes = np.bincount(out.forwards, minlength=len(golden["passes"]))
    whole = np.bincount([len(t) for t in out.tokens])[LENGTH:].sum() == ROWS
    if whole or family == "duo":
        assert p_value(golden["passes"], passes) > LEAST
