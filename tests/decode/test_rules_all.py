"""Laws that every rule keeps: it leaves the prompt alone, ends, emits nothing forbidden, repeats with its
seed, and treats a batch as its rows."""

import functools

import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax.decode.defaults import complete_sampler
from mercury_jax.decode.inputs import Prompt
from mercury_jax.decode.request import Request, rows_of, start
from mercury_jax.decode.sampler import Sampler
from mercury_jax.decode.session import advance
from tests.decode.test_rules_sampled import with_head
from tests.decode.test_self_speculation import causal
from tests.marks import slow_except
from tests.tiny import tiny

PROMPTS = ["def x", "for value in range(count):\n    print(total", "return y if x", "if y"]
MOST = 12
OURS = [name for name, make in mj.rules.ALL.items() if make.__module__.startswith("mercury_jax.")]
QUICK = (
    "confidence",
    "threshold",
    "wino",
    "expand",
    "remdm_confidence",
    "entropy_bound",
    "diffusion_gemma",
    "ancestral",
)

# Ids that a rule of variable length reacts to; any of the tiny vocabulary's will do.
SPECIAL = {
    "adablock": dict(delimiters=300),
    "expand": dict(expand=300, delete=301),
    "levenshtein": dict(delete=300, insert=301),
}


def model_for(sampler):
    """The tiny model that a rule is made for."""
    if sampler.speculate is not None:
        return causal(layers=1)
    kind = "hybrid" if sampler.rule.name == "hybrid_ancestral" else "absorbing"
    lm = tiny(kind="uniform" if "absorbing" not in sampler.rule.noise else kind, layers=1)
    return with_head(lm) if sampler.rule.needs_hidden else lm


def made(name):
    rule = mj.rules.ALL[name](**SPECIAL.get(name, {}))
    return rule if isinstance(rule, Sampler) else Sampler(rule)


@functools.cache
def run(name, others=(1, 2, 3), seed=5):
    """Prompt 0 beside others; always four rows, so that one program serves all of it."""
    sampler = made(name)
    lm = model_for(sampler)
    ids = [lm.tokenizer.encode(PROMPTS[i]) for i in (0, *others)]
    rows = rows_of([Prompt(i, False) for i in ids], MOST, seed)
    session = start(lm, Request(sampler=sampler, plan=mj.Plan(steps=10), rows=rows))
    session, _, made_passes = advance(lm, session, None)
    tokens, end = np.asarray(session.state.tokens), np.asarray(session.state.limits.end)
    return lm, ids, tokens, end, int(made_passes), np.asarray(session.state.nfe)


@pytest.mark.long
@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("name", slow_except(OURS, *QUICK))
def test_a_rule_leaves_the_prompt_alone_ends_and_emits_nothing_forbidden(name):
    lm, ids, text, total, used, _ = run(name)
    # Ten steps for each of two blocks, or in the worst case for the draft of each token; and the encoding.
    assert used <= (2 if made(name).speculate is None else MOST) * 11 + 8
    never = [lm.tokenizer.mask, lm.tokenizer.pad, lm.tokenizer.eos]
    for row, prompt, end in zip(text, ids, total, strict=True):
        assert row[: len(prompt)].tolist() == prompt
        assert len(prompt) <= end <= len(prompt) + MOST
        assert not np.isin(row[len(prompt) : end], never).any()


@pytest.mark.parametrize("name", slow_except(OURS, *QUICK))
def test_a_rule_treats_a_batch_as_its_rows_and_repeats(name):
    _, ids, text, total, _, forwards = run(name)
    _, _, again, total_again, _, forwards_again = run(name, (3, 1, 2))
    assert total[0] == total_again[0] and forwards[0] == forwards_again[0]
    np.testing.assert_array_equal(text[0, : total[0]], again[0, : total[0]])


@pytest.mark.parametrize("name", slow_except(OURS, *QUICK))
def test_a_rule_that_draws_follows_its_seed(name):
    sampler = complete_sampler(made(name), model_for(made(name)).corruption)
    assert sampler.temperature is not None
    draws = sampler.temperature > 0 or name in ("random", "dream_origin")
    _, _, text, total, _, _ = run(name)
    _, _, other, total_other, _, _ = run(name, seed=6)
    same = all(
        np.array_equal(a[:s], b[:t]) for a, b, s, t in zip(text, other, total, total_other, strict=True)
    )
    if draws:
        assert not same
