"""decide: probabilities of labels against exhaustive scoring, reads, passes, and what is refused."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax import models
from mercury_jax.decode import label_scores
from mercury_jax.decode.decide import Settings, ask
from mercury_jax.decode.questions import from_json
from tests.marks import slow_except
from tests.tiny import tiny

CHOICE, YES_NO, SCALE = mj.questions.MultipleChoice, mj.questions.YesNo, mj.questions.Scale
STATE = "def value(x):\n    return total"
# Labels of one and of several tokens, with a common beginning, and one that is the beginning of another.
LABELS = ("x", "xy", "count", "counter of values", "total")
FAMILIES = {
    "autoregressive": ("block_causal", 1, "uniform"),
    "causal_encoder": ("causal_encoder", 8),
    "block_causal": ("block_causal", 8),
    "block_start": ("block_causal", 8),  # the last token of a block predicts the first one of the next
    "bidirectional": ("bidirectional", 8),
}


@functools.cache
def family(name):
    lm = tiny(*FAMILIES[name])
    if name not in ("autoregressive", "block_start"):
        return lm
    own = {"mask": None, "predicts_next": True} if name == "autoregressive" else {"alignment": "shifted"}
    config = dataclasses.replace(lm.model.config, **own)
    assert config.autoregressive or config.predicts_block_start
    return dataclasses.replace(lm, model=models.build(config))


def with_context(lm, context):
    config = dataclasses.replace(lm.model.config, context=context)
    return dataclasses.replace(lm, model=models.build(config))


def prompts(lm, question, state=STATE):
    [asked] = ask(lm, state, {"question": question}, Settings())
    return asked.prompts[0]


def decide(lm, state, question, **settings):
    return mj.decide(lm, state, {"question": question}, **settings)["question"]


def softmax(x):
    p = np.exp(x - np.max(x))
    return p / p.sum()


def test_labels_of_an_autoregressive_model_have_the_probabilities_of_exhaustive_scoring():
    lm, question = family("autoregressive"), CHOICE(LABELS)
    # The conversation that a user would score: the state, the question, and each label with the end of the text.
    asked = f"{STATE}\n\n{mj.questions.prompt_of(question, range(len(LABELS)))}"
    answers = [[*lm.tokenizer.encode(label), lm.model.config.eos] for label in LABELS]
    assert len(set(map(len, answers))) > 1
    scores = mj.score(lm, [{"role": "user", "content": asked}], answers).log_p
    found = decide(lm, STATE, question)
    np.testing.assert_allclose(found.log_p[0], scores, atol=1e-4)
    np.testing.assert_allclose(found.probabilities, softmax(scores), atol=1e-4)
    assert found.label == LABELS[int(np.argmax(scores))] and found.confidence == found.probabilities.max()


@pytest.mark.parametrize(
    "name", slow_except(list(FAMILIES)[1:], "block_causal", "block_start", "bidirectional")
)
def test_labels_of_a_denoiser_are_read_token_by_token_at_the_start_of_a_canvas(name):
    lm = family(name)
    prompt = prompts(lm, CHOICE(LABELS))
    longest = max(map(len, prompt.labels))
    log_p = []
    for label in prompt.labels:
        total = 0.0
        for k, token in enumerate(label):
            given = [*prompt.ids, *label[:k]]
            size = (
                longest + 1 - k
                if name == "bidirectional"
                else 8 - (len(given) % 8) * (name != "causal_encoder")
            )
            [[logits, *_]] = mj.logits(lm, [lm.corruption.mask] * size, given)
            logits = logits.at[np.array(lm.corruption.forbidden)].set(-jnp.inf)
            total += float(jax.nn.log_softmax(logits)[token])
        log_p.append(total)
    found = decide(lm, STATE, CHOICE(LABELS))
    np.testing.assert_allclose(found.log_p[0], log_p, atol=1e-4)


@pytest.mark.parametrize("name", slow_except(FAMILIES, "autoregressive"))
def test_an_answer_does_not_depend_on_the_other_questions_and_states(name):
    lm = family(name)
    named = {
        "a": CHOICE(LABELS),
        "b": YES_NO("Is it so?"),
        "c": SCALE(["low", "middle", "high"], "How much?"),
    }
    states = [STATE, {"x": 1, "y": [2, "z"]}, "in range"]
    together = mj.decide(lm, states, named)
    assert isinstance(together, list)
    for state, found in zip(states, together, strict=True):
        for key, question in named.items():
            alone = decide(lm, state, question)
            np.testing.assert_allclose(found[key].probabilities, alone.probabilities, atol=2e-6)
            assert found[key].probabilities.sum() == pytest.approx(1)
    assert together[0]["b"].yes == together[0]["b"].probabilities[0]
    assert together[1]["c"].score == pytest.approx(together[1]["c"].probabilities @ [0, 1, 2])


def test_eight_questions_take_one_pass_and_share_the_state(monkeypatch):
    lm, calls = family("autoregressive"), {"_encode": [], "_extend": [], "_read": []}
    for name, made in calls.items():
        program = getattr(label_scores, name)
        record = lambda *args, made=made, program=program: made.append(args) or program(*args)
        monkeypatch.setattr(label_scores, name, record)
    named = {f"q{i}": YES_NO(f"{i}?") for i in range(8)}
    found = mj.decide(lm, STATE, named)
    assert found.forwards == 1 and len(found.answers) == 8
    assert [len(made) for made in calls.values()] == [1, 1, 1]
    # The state is encoded in one row, the rest of each question behind it, and the labels behind the questions.
    [(_, _, cache, tokens, _, [shared])] = calls["_encode"]
    sizes = [len(prompts(lm, question).ids) for question in named.values()]
    assert len(tokens) == 1 and {x.shape[0] for x in jax.tree.leaves(cache)} == {1}
    assert shared > len(lm.tokenizer.encode(STATE))
    [(_, _, _, state, tokens, start, lengths)] = calls["_extend"]
    assert set(state.tolist()) == {0} and set(start.tolist()) == {shared} and tokens.shape[0] == 8
    assert lengths.tolist() == [size - 1 for size in sizes]
    assert calls["_read"][0][-1].tokens.shape[1] <= label_scores.NARROW
    assert found.prompt_tokens == shared + sum(size - shared for size in sizes)


def test_reads_of_all_rotations_do_not_depend_on_where_the_list_of_labels_begins():
    lm, labels = family("autoregressive"), ["x", "y", "z", "count"]
    first = decide(lm, STATE, CHOICE(labels, "Which?"), reads=4)
    turned = decide(lm, STATE, CHOICE([*labels[1:], labels[0]], "Which?"), reads=4)
    single = decide(lm, STATE, CHOICE([*labels[1:], labels[0]], "Which?"))
    np.testing.assert_allclose(np.roll(turned.probabilities, 1), first.probabilities, atol=1e-6)
    assert np.abs(np.roll(single.probabilities, 1) - first.probabilities).max() > 1e-3
    each = np.array([softmax(x) for x in first.log_p])
    np.testing.assert_allclose(first.probabilities, each.mean(axis=0), atol=1e-12)
    np.testing.assert_allclose(first.se, each.std(axis=0, ddof=1) / 2, atol=1e-12)
    assert np.isnan(single.se).all() and single.reads == 1


def test_draws_of_uniform_noise_differ_by_read_and_repeat_by_seed():
    lm = tiny("causal_encoder", 8, "uniform")
    question = YES_NO("Is it so?")
    ask_with = lambda **more: decide(lm, STATE, question, **more).log_p
    np.testing.assert_array_equal(ask_with(reads=4, seed=3), ask_with(reads=4, seed=3))
    many = ask_with(reads=4, seed=3)
    # Reads 0 and 2 list yes and no in the same order, so that they differ by their noise only.
    assert np.abs(many[0] - many[2]).max() > 1e-4
    assert np.abs(many - ask_with(reads=4, seed=4)).max() > 1e-4


def test_questions_in_doubt_are_read_again():
    lm = family("autoregressive")
    named = {"a": CHOICE(["x", "y", "z"]), "b": YES_NO("Is it so?")}
    all_again = mj.decide(lm, STATE, named, reads=2, second_reads=2, doubt=0.0)
    at_once = mj.decide(lm, STATE, named, reads=4)
    assert (all_again.forwards, at_once.forwards) == (2, 1)
    for key in named:
        np.testing.assert_allclose(all_again[key].probabilities, at_once[key].probabilities, atol=1e-6)
    between = (
        mj.decide(lm, STATE, named, reads=2)["a"].entropy + mj.decide(lm, STATE, named, reads=2)["b"].entropy
    ) / 2
    some = mj.decide(lm, STATE, named, reads=2, second_reads=2, doubt=between)
    assert sorted(x.reads for x in some.answers.values()) == [2, 4]


def test_a_temperature_divides_the_log_likelihoods():
    lm = family("autoregressive")
    found = decide(lm, STATE, CHOICE(LABELS), temperature=4.0)
    np.testing.assert_allclose(found.probabilities, softmax(found.log_p[0] / 4.0), atol=1e-12)
    assert mj.decide(lm, STATE, {"a": CHOICE(LABELS)}, temperature=4.0).temperature == 4.0


@pytest.mark.parametrize("count", [2, 255])
def test_as_many_labels_as_allowed(count):
    lm = with_context(family("autoregressive"), 4096)
    labels = [a + b for a, b in itertools.product("abcdefghijklmnop", repeat=2)][:count]
    found = decide(lm, STATE, CHOICE(labels))
    assert found.probabilities.shape == (count,) and found.probabilities.sum() == pytest.approx(1)


def test_a_model_without_a_chat_template_continues_a_text():
    lm = family("autoregressive")

    class Plain:
        def __getattr__(self, name):
            return getattr(lm.tokenizer, name)

        def render(self, *args, **more):
            raise ValueError("no chat template")

    plain = dataclasses.replace(lm, tokenizer=Plain())
    prompt = prompts(plain, CHOICE(LABELS))
    assert lm.tokenizer.decode(prompt.ids).endswith("Answer:")
    assert lm.tokenizer.decode([*prompt.ids, *prompt.labels[2][:-1]]).endswith("Answer: count")
    with pytest.raises(ValueError, match="no chat template"):
        decide(plain, [{"role": "user", "content": "x"}], CHOICE(LABELS))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"type": "choice", "criteria": {}}, "labels is '0 entries'"),
        ({"type": "choice", "criteria": ["a"]}, "criteria is .* an object of labels"),
        ({"type": "score", "criteria": {"a": None}}, "criteria is .* a list of levels"),
        ({"type": "score", "criteria": []}, "levels is '0 entries'; allowed: 1 to 255"),
        ({"type": "noul"}, "instructions is ''"),
        ({"type": "noul", "criteria": "x"}, "an object with true and false"),
        ({"type": "box"}, "type is 'box'; allowed: choice, noul, score"),
        (3, "an object with type"),
    ],
)
def test_a_wrong_question_of_json_is_refused_by_its_field(data, said):
    with pytest.raises(ValueError, match=said):
        from_json(data, "questions.q")
