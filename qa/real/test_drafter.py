"""SmolLM2 with its drafter: the text of left to right in fewer passes, and its distribution at temperature 1."""

# pyright: reportOptionalMemberAccess=false

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from scipy import stats

import mercury_jax as mj
from qa.real.test_reference import FULL, TIE

DRAFTS = ("smollm2-drafter", "lookup")


def same_or_a_tie(lm, chat, plain, drafted):
    """Whether two answers are the same; where they part, the logits of both tokens must be nearly equal."""
    place = next((i for i, (a, b) in enumerate(zip(plain, drafted)) if a != b), None)
    if place is None:
        assert len(plain) == len(drafted)
        return True
    ids = np.concatenate([mj.prompt_ids(lm, chat)[0][0], plain[:place]])
    logits = np.asarray(mj.logits(lm, [ids.tolist()]))[0][len(ids) - 1]
    assert abs(logits[plain[place]] - logits[drafted[place]]) < TIE, (place, plain, drafted)
    return False


@pytest.mark.parametrize("draft", DRAFTS)
def test_greedy_text_is_that_of_left_to_right(lm, reference, draft):
    chats = [[{"role": "user", "content": one["prompt"]}] for one in reference["answers"]][
        :: 1 if FULL else 5
    ]
    plain = mj.sample(lm, chats, max_tokens=64, temperature=0.0)
    out = mj.sample(lm, chats, max_tokens=64, temperature=0.0, draft=draft)
    same = sum(
        same_or_a_tie(lm, chat, a.tolist(), b.tolist())
        for chat, a, b in zip(chats, plain.tokens, out.tokens, strict=True)
    )
    rate = sum(out.lengths) / out.forwards.sum()
    print(f"{draft}: {same} of {len(chats)} answers equal, {rate:.2f} tokens a pass")
    assert same >= len(chats) - 2 and rate > 1.05


@pytest.mark.slow
@pytest.mark.parametrize("method", ["same_seed", "rejection"])
def test_tokens_at_temperature_1_have_the_distribution_of_left_to_right(lm, method):
    """Of 256 answers with each (512 in full), each of the first five tokens: chi-square, rare ids joined."""
    chat = [{"role": "user", "content": "Tom has 3 apples and buys 4 more. How many apples does he have?"}]
    drafter, rows = mj.load_drafter("smollm2-drafter", method=method), 64
    found = []
    calls = 8 if FULL else 4
    for draft, seeds in ((None, range(calls)), (drafter, range(100, 100 + calls))):
        outs = [
            mj.sample(lm, chat, n=rows, max_tokens=5, temperature=1.0, seed=seed * 1000, draft=draft)
            for seed in seeds
        ]
        found.append([ids for out in outs for ids in out.tokens])
    assert outs[0].draft.accepted.sum() > 0
    for place in range(5):
        counts = np.zeros((2, lm.model.config.vocab + 1))
        for side, answers in enumerate(found):
            np.add.at(counts[side], [ids[place] if place < len(ids) else -1 for ids in answers], 1)
        often = counts.sum(0) >= 16
        table = np.concatenate([counts[:, often], counts[:, ~often].sum(1, keepdims=True)], axis=1)
        table = table[:, table.sum(0) > 0]
        found_p: Any = stats.chi2_contingency(table)[1] if table.shape[1] > 1 else 1.0
        p = float(found_p)
        print(f"{method}: token {place + 1}, {table.shape[1]} classes, p = {p:.3f}")
        assert p > 0.001


@pytest.mark.slow
def test_the_demo_shows_the_pretrained_model():
    told = subprocess.run(
        [sys.executable, "-m", "mercury_jax", "demo", "--json"], capture_output=True, text=True, timeout=600
    )
    last = json.loads(told.stdout.splitlines()[-1])
    assert told.returncode == 0, told.stderr
    assert last["correct"] and last["text"] and last["forwards"] < 0.8 * last["autoregressive"]["forwards"]
