"""SmolLM2 on real text, against transformers on the same file, both in fp32."""

import os

import numpy as np
import pytest

import mercury_jax as mj

FULL = os.environ.get("MERCURY_REAL") == "full"  # all passages, as the nightly run scores them
TIE = 2e-3  # logits that are closer may change places by rounding


def test_greedy_answers_are_the_tokens_of_transformers(lm, reference):
    asked = reference["answers"]
    chats = [[{"role": "user", "content": one["prompt"]}] for one in asked]
    out = mj.sample(lm, chats, max_tokens=48)
    equal = 0
    for one, tokens in zip(asked, out.tokens, strict=True):
        end = lm.tokenizer.end_turn
        want = one["tokens"][: one["tokens"].index(end)] if end in one["tokens"] else one["tokens"]
        found = [int(i) for i in tokens]
        differs = next((i for i, pair in enumerate(zip(found, want)) if pair[0] != pair[1]), None)
        if differs is None:
            assert len(found) == len(want), one["prompt"]
            equal += 1
        else:
            assert one["close"].get(str(differs), 1.0) < TIE, (
                one["prompt"],
                differs,
                lm.tokenizer.decode(found),
            )
    print(f"{equal} of {len(asked)} answers equal, the others part at a tie")
    assert equal >= len(asked) - 2


def test_log_likelihoods_are_those_of_transformers(lm, reference):
    passages = reference["passages"][:: 1 if FULL else 5]
    ids = [lm.tokenizer.encode(one["text"]) for one in passages]
    assert [len(i) for i in ids] == [one["tokens"] for one in passages]
    found = mj.score(lm, [i[:1] for i in ids], [i[1:] for i in ids])
    want = np.array([one["log_likelihood"] for one in passages])
    off = np.abs(found.log_p - want) / (found.tokens)
    print(f"largest difference {off.max():.1e} nats a token over {len(passages)} passages")
    assert off.max() < 1e-3


@pytest.mark.slow
def test_what_follows_a_text_that_fills_the_context(lm, reference):
    long = reference["long"]
    assert len(long["ids"]) == lm.model.config.context - 1
    out = mj.sample(lm, [long["ids"]], max_tokens=1, logprobs=8)
    assert out.logprobs is not None
    assert out.logprobs[0].top_ids[0].tolist() == long["next"]
    np.testing.assert_allclose(out.logprobs[0].top[0], long["log_probabilities"], atol=1e-3)
