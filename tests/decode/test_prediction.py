"""Laws of decoding from a predicted text: the text is the verifier's, and the passes are those of the changes."""

# pyright: reportOptionalMemberAccess=false

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax import rules
from mercury_jax.decode.methods.prediction import MATCH, NEAR, align_row
from mercury_jax.decode.sampler import LogitsProcessor
from tests.decode.test_block_drafter import asked, check_same, prompts, verifier
from tests.tiny import tiny


@functools.cache
def nano():
    return mj.load()


def edited(rng, ids):
    """A text with some tokens replaced, inserted and deleted."""
    ids = list(ids)
    for _ in range(rng.integers(0, 3)):
        at, size = rng.integers(0, len(ids) + 1), rng.integers(1, 4)
        ids[at : at + rng.integers(0, 2) * size] = rng.integers(5, 300, rng.integers(0, 2) * size).tolist()
    return ids


def test_text_is_the_verifiers_whatever_is_predicted():
    lm, rng = verifier(), np.random.default_rng(3)
    with jax.enable_x64(True):
        plain = mj.sample(lm, prompts(), **asked())
        texts = [lm.tokenizer.decode(edited(rng, ids)) for ids in plain.tokens]
        texts = [None if i % 5 == 4 else text for i, text in enumerate(texts)]
        out = mj.sample(lm, prompts(), draft_text=texts, **asked())
    check_same(plain, out)
    assert set(out.finish) == {"stop", "length"}
    without = np.array([text is None for text in texts])
    assert (out.forwards[without] == plain.forwards[without]).all() and not out.draft.proposed[without].any()
    assert (out.forwards <= plain.forwards).all() and out.forwards.sum() < plain.forwards.sum() / 2
    assert 0 < out.draft.accepted.sum() <= out.draft.proposed.sum()


def test_answers_to_one_prompt_follow_the_prediction_with_seeds_of_their_own():
    lm = nano()
    how = dict(max_tokens=24, n=3, temperature=0.8, seed=4)
    plain = mj.sample(lm, ["import os\n", "def f(x):\n"], sampler=rules.autoregressive(), **how)
    out = mj.sample(lm, ["import os\n", "def f(x):\n"], draft_text=[plain.texts[1], plain.texts[5]], **how)
    assert out.texts == plain.texts
    assert out.forwards[1] < 12 and out.forwards[5] < 12 and (plain.forwards == 24).all()


# 36 lines that share few tokens in a row, as texts whose tokens the model writes one by one.
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
LINES = ["".join(LETTERS[(7 * n * n + 13 * k * (n + 3)) % 36] for k in range(11)) + "\n" for n in range(34)]


@functools.cache
def truth():
    return np.asarray(nano().tokenizer.encode("".join(LINES)), np.int32)


def write(logits, view):
    """Leaves one token possible at each position: that of the lines."""
    at = jnp.minimum(view.position + jnp.arange(len(logits)), len(truth()) - 1)
    return jnp.where(jnp.arange(logits.shape[-1]) == jnp.asarray(truth())[at][:, None], logits, -1e9)


def verified(prediction):
    """What the embedded model answers that is made to write the lines, with a prediction of them."""
    sampler = rules.autoregressive()._replace(processors=(LogitsProcessor(write, {}, "write"),))
    out = mj.sample(nano(), [5, 6, 7], max_tokens=len(truth()), sampler=sampler, draft_text=prediction)
    assert out.tokens[0].tolist() == truth().tolist()  # whatever is predicted
    return out


def joined(*parts):
    return "".join("".join(part) for part in parts)


def test_what_is_predicted_takes_one_pass_and_a_change_a_few_more():
    assert len(truth()) > 350
    whole = verified(joined(LINES))
    assert whole.forwards[0] == 1 and whole.draft.accepted[0] == len(truth())
    changes = {
        "one token": joined(LINES[:17], ["+" + LINES[17][1:]], LINES[18:]),
        "a new line": joined(LINES[:17], ["what no one writes here\n"], LINES[17:]),
        "a line twice": joined(LINES[:17], LINES[16:]),
        "a preamble": joined(["Here is the file: "], LINES),
    }
    for name, prediction in changes.items():
        assert verified(prediction).forwards[0] <= 8, name
    # A line that is not predicted is written token by token; then the rest is found again.
    missing = verified(joined(LINES[:17], LINES[18:]))
    size = len(nano().tokenizer.encode(LINES[17]))
    assert size < missing.forwards[0] <= size + 7
    moved = verified(joined(LINES[17:], LINES[:17]))
    assert moved.forwards[0] <= 12


def test_a_wrong_prediction_costs_no_pass_more_than_none():
    out = verified("?" * 400)
    assert out.forwards[0] == len(truth()) and out.draft.accepted[0] == 0
    empty = verified("")
    assert empty.forwards[0] == len(truth()) and empty.draft.proposed[0] == 0


def expected_place(prediction, expected, text, near):
    """The place by search: the longest match of the end of the text, then the nearest one, first ahead."""
    best, place = 0, expected
    for end in range(len(prediction)):
        match = 0
        while match < min(MATCH, end + 1, len(text)) and prediction[end - match] == text[-1 - match]:
            match += 1
        distance = abs(end + 1 - expected)
        if distance > NEAR and (near or match == 1):
            match = 0
        ahead = end + 1 >= expected - NEAR
        rank = (match, ahead, -distance)
        if match and (best == 0 or rank > best):
            best, place = rank, end + 1
    return place, best[0] if best else 0


@pytest.mark.parametrize("ids", [2, 6, 40])
def test_the_place_is_that_of_the_longest_match_and_the_nearest(ids):
    rng, found = np.random.default_rng(ids), jax.jit(align_row)
    for turn in range(120):
        prediction, text = (
            rng.integers(0, ids, 40).tolist(),
            rng.integers(0, ids, rng.integers(1, 20)).tolist(),
        )
        if rng.random() < 0.5:  # a text that ends as a part of the prediction
            at = rng.integers(0, 20)
            text[len(text) // 2 :] = prediction[at : at + len(text) - len(text) // 2]
        length, expected, near = rng.integers(1, 41), rng.integers(0, 40), bool(rng.random() < 0.3)
        if turn % 4 == 0:  # a line again and again: a place behind and one ahead match as well
            prediction, text = (prediction[:19] * 3)[:40], prediction[:19]
            length, expected, near = 40, rng.integers(26, 31), False
        padded = np.asarray(text + rng.integers(0, ids, 24 - len(text)).tolist())
        place, match = found(np.asarray(prediction), length, expected, padded, len(text) - 1, near)
        assert (place, match) == expected_place(prediction[:length], expected, text, near)


@pytest.mark.long
@pytest.mark.parametrize("pattern, kind", [("bidirectional", "absorbing"), ("block_causal", "absorbing"),
                                           ("causal_encoder", "uniform")])  # fmt: skip
def test_canvases_start_from_the_prediction_where_a_model_cannot_verify(pattern, kind):
    """A token that the model does not contradict stays; the rows without a prediction are those of a call without."""
    lm = tiny(pattern, 8, kind)
    rule = rules.blind_editing(p_edit=1.0) if kind == "absorbing" else rules.entropy_bound()
    how = dict(max_tokens=[30, 30], seed=2, sampler=rule)
    plain = mj.sample(lm, ["def x", "return"], **how)
    text = "print(value) for total in range"
    out = mj.sample(lm, ["def x", "return"], draft_text=[text, None], **how)
    assert out.tokens[1].tolist() == plain.tokens[1].tolist() and not out.draft.proposed[1]
    assert out.draft.proposed[0] > 0 and 0 <= out.draft.accepted[0] <= out.draft.proposed[0]
    if kind == "absorbing":  # no probability is above 1, so that nothing is replaced
        assert out.texts[0] == text and out.finish[0] == "stop" and out.forwards[0] < plain.forwards[0]


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"draft_text": 5}, "draft_text is 5; allowed: the text"),
        ({"draft_text": ["a", "b"]}, "draft_text is 'a list of 2'"),
        ({"draft_text": "a", "schema": {"type": "null"}}, "schema is .*; allowed: None with draft_text="),
        ({"draft_text": "a", "draft": "lookup"}, "draft_text is 'a'; allowed: None with draft="),
        ({"draft_text": "a", "plan": mj.Plan(block=8)}, "plan is .*None with draft_text="),
        ({"draft_text": "a", "sampler": rules.confidence()}, "sampler.rule is 'confidence'.*blind_editing"),
        ({"draft_text": "a", "sampler": rules.blind_editing(), "plan": mj.Plan(lookahead=1)}, "plan.lookahead is 1"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(wrong, words):
    lm = mj.with_block_drafter(verifier("float32"), "lookup") if "draft" in wrong else nano()
    with pytest.raises(ValueError, match=words):
        mj.sample(lm, "x", **wrong)
