"""The published settings of a family, what generation_config.json changes in them, and that `mj.sample` uses them."""

import json
import logging
import shutil

import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax.cli import main
from mercury_jax.decode import defaults
from mercury_jax.decode.rules import ALL as RULES
from mercury_jax.hub import generation
from mercury_jax.hub.family import families
from mercury_jax.hub.load import info
from mercury_jax.serve.engine import sampling_params
from mercury_jax.serve.engine.request import EngineRequest
from tests.hub.goldens_of import GOLDENS

PROMPT = [5, 17, 33, 41, 8]
GREEDY = {"rule": "autoregressive", "temperature": 0.0, "source": "s"}
DREAM = generation.dream_decoding({}, {})


@pytest.fixture
def checkpoint(tmp_path):
    """A copy of a golden checkpoint with this generation_config.json, loaded."""

    def load(name: str, **written):
        folder = shutil.copytree(GOLDENS / name, tmp_path / name, dirs_exist_ok=True)
        if written:
            (folder / "generation_config.json").write_text(json.dumps(written))
        return mj.load(folder, dtype="float32")

    return load


def test_every_family_states_settings_that_exist_and_their_source():
    for family in families():
        found = family.decoding({}, {}) if callable(family.decoding) else family.decoding
        assert set(found) <= set(defaults.SETTINGS), family.name
        if found:
            assert found["rule"] in RULES and found["source"] and generation.describe(found), family.name


def test_sample_decodes_as_published(checkpoint):
    llada = checkpoint("llada")
    out = mj.sample(llada, PROMPT, max_tokens=12)
    same = mj.sample(llada, PROMPT, max_tokens=12, sampler=mj.rules.confidence(), plan=mj.Plan(block=32))
    assert out.tokens[0].tolist() == same.tokens[0].tolist() and out.forwards[0] == same.forwards[0] == 12


@pytest.mark.long
def test_dream_takes_the_whole_answer_as_one_block(checkpoint):
    dream = checkpoint("dream")
    last = mj.processors.before_confidence(mj.processors.top_p(0.95))
    chain = (mj.processors.temperature(0.2), last)
    sampler = mj.Sampler(mj.rules.dream_entropy(), chain, temperature=1.0)
    for size in (8, 40):
        own = mj.sample(dream, PROMPT, max_tokens=size, seed=3)
        spelt = mj.sample(dream, PROMPT, max_tokens=size, seed=3, sampler=sampler, plan=mj.Plan(block=256))
        assert own.tokens[0].tolist() == spelt.tokens[0].tolist() and own.forwards[0] == spelt.forwards[0]
    # The caller's steps are kept, and the answer is still one block.
    assert mj.sample(dream, PROMPT, max_tokens=40, seed=3, plan=mj.Plan(steps=5)).forwards[0] == 5


@pytest.mark.slow
def test_the_callers_temperature_replaces_the_published_one(checkpoint):
    dream = checkpoint("dream")
    given = {"max_tokens": 8, "seed": 1}
    last = mj.processors.before_confidence(mj.processors.top_p(0.95))
    chain = lambda t: (mj.processors.temperature(t), last)
    spelt = lambda t, drawn: mj.sample(
        dream, PROMPT, plan=mj.Plan(block=256),
        sampler=mj.Sampler(mj.rules.dream_entropy(), chain(t), temperature=drawn), **given,
    ).tokens[0].tolist()  # fmt: skip
    own = lambda t: mj.sample(dream, PROMPT, temperature=t, **given).tokens[0].tolist()
    assert own(0.7) == spelt(0.7, 1.0) and own(0) == spelt(1.0, 0.0) and own(0.7) != own(0)
    both = mj.sample(dream, [PROMPT, PROMPT], temperature=np.array([0.7, 0.0]), max_tokens=8, seed=1)
    assert both.tokens[0].tolist() == own(0.7) and both.tokens[1].tolist() == own(0)


@pytest.mark.long
def test_effort_and_the_callers_own_sampler_win(checkpoint):
    dream = checkpoint("dream")
    plain = mj.sample(dream, PROMPT, max_tokens=32, sampler=mj.rules.threshold(0.9))
    effort = mj.sample(dream, PROMPT, max_tokens=32, effort="medium")
    assert effort.tokens[0].tolist() == plain.tokens[0].tolist()


@pytest.mark.long
def test_generation_config_wins_over_the_family(checkpoint):
    qwen = checkpoint("qwen3", do_sample=True, temperature=0.6, top_k=20, top_p=0.95)
    assert list(qwen.decoding["processors"]) == ["temperature", "top_k", "top_p"]
    chain = (mj.processors.temperature(0.6), mj.processors.top_k(20), mj.processors.top_p(0.95))
    spelt = mj.rules.autoregressive()._replace(processors=chain, temperature=1.0)
    draw = lambda **how: mj.sample(qwen, PROMPT, max_tokens=6, seed=2, **how).tokens[0].tolist()
    assert draw() == draw(sampler=spelt) != draw(temperature=0)


@pytest.mark.long
def test_generation_config_of_dream_names_its_algorithm(checkpoint):
    dream = checkpoint("dream", alg="maskgit_plus", alg_temp=0.1, temperature=0.5, steps=4, top_k=7)
    found = dream.decoding
    assert found["rule"] == "maskgit_plus" and found["params"] == {"alg_temp": 0.1} and found["steps"] == 4
    assert found["processors"] == {"temperature": {"t": 0.5}, "top_p": {"p": 0.95}, "top_k": {"k": 7}}
    assert mj.sample(dream, PROMPT, max_tokens=8).forwards[0] <= 4


@pytest.mark.parametrize(
    "family, file, wanted",
    [
        (GREEDY, {}, {}),
        (GREEDY, {"temperature": 0.6}, {"temperature": 0.0}),  # transformers takes the argmax
        (GREEDY, {"do_sample": True}, {"processors": {"temperature": {"t": 1.0}, "top_k": {"k": 50}}}),
        (GREEDY, {"do_sample": True, "top_k": 0, "top_p": 1.0}, {"processors": {"temperature": {"t": 1.0}}}),
        (
            GREEDY,
            {"do_sample": True, "repetition_penalty": 1.05, "top_p": 0.8, "temperature": 0.7, "top_k": 20},
            {
                "processors": {
                    "repetition": {"p": 1.05},
                    "temperature": {"t": 0.7},
                    "top_k": {"k": 20},
                    "top_p": {"p": 0.8},
                },
                "temperature": 1.0,
            },
        ),
        (
            DREAM,
            {"do_sample": False, "temperature": 0.9},
            {"temperature": 0.0, "steps": None, "processors": None},
        ),
        (DREAM, {"temperature": 0.0}, {"temperature": 0.0}),
        ({"rule": "confidence", "temperature": 0.0}, {"temperature": 0.5}, {"temperature": 0.5}),
        ({"rule": "confidence", "temperature": 0.0}, {"do_sample": True}, {"temperature": 1.0}),
        ({"rule": "confidence"}, {"num_beams": 4, "eos_token_id": 3}, {"temperature": None}),
    ],
)
def test_the_file_is_read_as_transformers_reads_it(family, file, wanted):
    found = generation.with_generation_config(family, file)
    assert {key: found.get(key) for key in wanted} == wanted
    assert list(found.get("processors", {})) == list(wanted.get("processors") or found.get("processors", {}))


@pytest.mark.parametrize(
    "key, value",
    [("temperature", -1), ("temperature", "0.6"), ("top_p", 1.5), ("top_k", 2.5), ("do_sample", 1), ("steps", 0),
     ("min_p", True), ("alg", "beam"), ("alg_temp", -0.1)],
)  # fmt: skip
def test_a_wrong_value_is_refused_by_its_key_before_a_tensor_is_read(checkpoint, key, value):
    with pytest.raises(ValueError, match=f"generation_config.json: {key}"):
        checkpoint("dream", **{key: value})


def test_a_saved_model_keeps_its_settings_and_info_shows_them(checkpoint, tmp_path):
    dream = checkpoint("dream", temperature=0.4)
    mj.hub.save(tmp_path / "own", dream, mj.NoiseConfig(kind="absorbing"))
    again = mj.load(tmp_path / "own")
    assert again.decoding == dream.decoding and list(again.decoding["processors"]) == ["temperature", "top_p"]
    assert info(tmp_path / "own")["decoding"] == info(tmp_path / "dream")["decoding"] == dream.decoding


def test_a_request_to_the_server_replaces_the_published_numbers(checkpoint):
    dream = checkpoint("dream", top_k=7)
    rules = sampling_params.rule_set(dream)

    def numbers(level: int, **asked):
        request = EngineRequest(prompt=PROMPT, max_tokens=8, **asked)
        sampler = sampling_params.build_sampler(rules, request, level)
        own = sampler.processors[: len(rules.own.processors)]
        return {part.name: next(iter(part.params.values())) for part in own}, sampler.temperature

    plain, cut = sampling_params.PLAIN, sampling_params.TRUNCATION
    assert numbers(plain) == ({"temperature": 0.2, "top_p": 0.95, "top_k": 7}, 1.0)
    assert numbers(plain, temperature=0.6) == ({"temperature": 0.6, "top_p": 0.95, "top_k": 7}, 1.0)
    assert numbers(plain, temperature=0.0) == ({"temperature": 1.0, "top_p": 0.95, "top_k": 7}, 0.0)
    assert numbers(cut, top_p=0.5)[0] == {"temperature": 0.2, "top_p": 1.0, "top_k": 7}
    # Beside another rule the model's own processors change nothing.
    assert numbers(plain, rule="threshold") == ({"temperature": 1.0, "top_p": 1.0, "top_k": 101}, 0.0)


@pytest.mark.long
def test_tables_of_generation_config_are_applied(checkpoint):
    """Ids that must not be generated, a least length, and biases, as transformers applies them."""
    greedy = lambda lm: mj.sample(lm, PROMPT, max_tokens=6).tokens[0].tolist()
    first, second = greedy(checkpoint("qwen3"))[:2]
    loud, other = [i for i in (7, 9, 11, 13) if i not in (first, second)][:2]
    lm = checkpoint(
        "qwen3", suppress_tokens=[first, 999_999], bad_words_ids=[[second]], begin_suppress_tokens=[other],
        sequence_bias=[[[loud], 2e4], [[other], 1e4]], min_new_tokens=3, eos_token_id=[loud, 1],
    )  # fmt: skip
    out = mj.sample(lm, PROMPT, max_tokens=6)
    found = out.tokens[0].tolist()
    # `loud` ends an answer, and may not before the third token; `other` is the next best, but not as the first one.
    assert found[0] not in (first, second, loud, other) and found[1:] == [other, other]
    dream = checkpoint("dream", suppress_tokens=list(range(20, 60)))
    assert "40 ids never generated" in generation.describe(dream.decoding)


@pytest.mark.long
def test_keys_of_generation_config_that_are_not_applied_are_named(checkpoint, tmp_path, capsys, caplog):
    lost = {"no_repeat_ngram_size": 3, "bad_words_ids": [[5, 6]], "num_beams": 4, "new_processor": {"a": 1},
            "encoder_repetition_penalty": 1.3}  # fmt: skip
    idle = {"num_beam_groups": 1, "typical_p": 1.0, "guidance_scale": None, "top_h": 0.4, "max_length": 20}
    logging.getLogger("mercury_jax").addHandler(caplog.handler)
    lm = checkpoint("qwen3", **lost, **idle)
    logging.getLogger("mercury_jax").removeHandler(caplog.handler)
    said = [*{record.getMessage() for record in caplog.records if "not applied" in record.getMessage()}]
    assert len(said) == 1 and said[0] in lm.card["notes"]
    assert all(key in said[0] for key in lost) and not any(key in said[0] for key in idle)
    assert main(["info", str(tmp_path / "qwen3")]) == 0
    assert "no_repeat_ngram_size=3" in capsys.readouterr().out
    # DiffusionGemma's own `generate` has no such processors, and neither has ours.
    gemma = checkpoint("diffusion_gemma", suppress_tokens=[4])
    assert any("suppress_tokens=[4]" in note for note in gemma.card["notes"])


def test_values_of_generation_config_have_the_types_of_transformers(checkpoint):
    for written in (
        {"suppress_tokens": 5},
        {"bad_words_ids": [5]},
        {"min_new_tokens": "3"},
        {"sequence_bias": [[5, 1]]},
    ):
        with pytest.raises(ValueError, match=next(iter(written))):
            checkpoint("qwen3", **written)
