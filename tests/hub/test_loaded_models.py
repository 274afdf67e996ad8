"""A loaded checkpoint can be sampled, scored, converted both ways, and described."""

import dataclasses
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax import hub
from mercury_jax.checkpoint import CheckpointError
from mercury_jax.cli import main
from mercury_jax.config import ModelConfig
from mercury_jax.hub.load import open_checkpoint
from mercury_jax.hub.tokenizer import IdTokenizer, unpack
from mercury_jax.types import Pass
from tests.hub.goldens_of import GOLDENS, forward, golden, logits_of
from tests.marks import slow_except
from tests.tiny import tiny

PROMPT = [5, 17, 3, 40, 21, 8, 33, 2]


def greedy(name, tokens, count):
    """Plain autoregressive decoding, a whole pass for each token; what follows it says nothing to it."""
    row = np.zeros((1, len(PROMPT) + 6), int)
    row[0, : len(tokens)] = tokens
    for at in range(len(tokens), len(tokens) + count):
        row[0, at] = logits_of(golden(name), row)[0, at - 1].argmax()
    return row[0, len(tokens) : at + 1].tolist()


@pytest.mark.long
@pytest.mark.parametrize("name", slow_except(["llama3", "gemma4_dense"], "llama3"))
def test_the_score_of_an_autoregressive_model_is_its_likelihood(name):
    """Of one answer and of rows of several lengths, against one plain pass over prompt and answer."""
    lm, answers = mj.load(GOLDENS / name), [[9, 4], [30], [7, 7, 12, 1, 25]]

    def nats(answer):
        text = [*PROMPT, *answer]
        log_p = jax.nn.log_softmax(logits_of(golden(name), np.array([text])))[0]
        return -sum(float(log_p[i - 1, text[i]]) for i in range(len(PROMPT), len(text)))

    want = [nats(answer) for answer in answers]
    found = mj.score(lm, PROMPT, answers)
    np.testing.assert_allclose(-found.log_p, want, rtol=1e-5)
    assert (
        np.array_equal(found.se, [0.0] * 3) and np.array_equal(found.tokens, [2, 1, 5]) and found.samples == 0
    )
    parts = mj.score(lm, PROMPT[:5], PROMPT[5:]), mj.score(lm, PROMPT[:5], [*PROMPT[5:], *answers[0]])
    assert parts[1].log_p - parts[0].log_p == pytest.approx(-want[0], rel=1e-4)  # the chain rule
    with pytest.raises(ValueError, match="prompt is 'no token'; allowed: at least one"):
        mj.score(lm, "", [3, 4])


def test_an_autoregressive_model_samples_as_a_plain_loop():
    lm = mj.load(GOLDENS / "llama3")
    out = mj.sample(lm, PROMPT, max_tokens=6)
    assert out.tokens[0].tolist() == greedy("llama3", PROMPT, 6)
    assert out.text == " ".join(map(str, out.tokens[0])) and out.forwards[0] == 6
    with pytest.raises(ValueError, match="no tokenizer"):
        mj.sample(lm, "text")


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3", "gemma4_dense", "duo", "diffusion_gemma"])
def test_a_mask_that_a_model_would_not_use_is_refused(name, tmp_path, capsys):
    words = "mask is 9; allowed: None: this model is autoregressive, or its noise has no mask. A recipe makes"
    for call in (mj.load, hub.info, lambda folder, mask: hub.convert(folder, tmp_path / "out", mask=mask)):
        with pytest.raises(ValueError, match=words):
            call(GOLDENS / name, mask=9)
    assert main(["sample", "x", "--model", str(GOLDENS / name), "--mask", "9"]) == 2
    assert "--mask is 9; allowed: nothing" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_mask_is_refused_for_an_autoregressive_folder_of_ours(tmp_path):
    hub.convert(GOLDENS / "qwen3", tmp_path / "ours")
    with pytest.raises(ValueError, match="mask is 9; allowed: None"):
        mj.load(tmp_path / "ours", mask=9)


@pytest.mark.long
@pytest.mark.parametrize("name", slow_except(["qwen3", "gemma4_dense"], "qwen3"))
def test_a_canvas_of_an_autoregressive_model_is_read_from_left_to_right(name):
    lm = mj.load(GOLDENS / name)
    whole = mj.logits(lm, [[7, 8, 9, 10], [7, 8, 11, 10]], PROMPT)
    np.testing.assert_allclose(whole[0, :2], whole[1, :2], atol=1e-5)  # what follows says nothing to it
    for i in range(4):  # one token behind a longer prompt reads the same
        alone = mj.logits(lm, [7 + i], [*PROMPT, *range(7, 7 + i)])
        np.testing.assert_allclose(whole[0, i], alone[0, 0], atol=1e-4)
    with pytest.raises(ValueError, match=r"plan.block is 4; allowed: a divisor of 1"):
        mj.sample(lm, PROMPT, plan=mj.Plan(block=4))
    with pytest.raises(ValueError, match="lm is '.*, an autoregressive model'; allowed: a diffusion model"):
        mj.edit(lm, [7, 8, 9])


@pytest.mark.long
@pytest.mark.parametrize("name", slow_except(["dream", "fast_dllm"], "fast_dllm"))
def test_a_shifted_model_is_read_at_the_previous_position(name):
    g = golden(name)
    mask = g.opened.config.mask
    lm = mj.load(GOLDENS / name, mask=mask)
    seen = [*PROMPT, mask] if g.opened.config.pattern == "bidirectional" else PROMPT
    said = logits_of(g, np.array([seen]))[0, -1].copy()
    said[mask] = -np.inf
    tokens = mj.sample(lm, PROMPT, max_tokens=1, temperature=0.0).tokens  # Dream's own settings draw
    assert tokens[0].tolist() == [int(said.argmax())]


@pytest.mark.long
def test_each_of_several_end_ids_ends_an_answer():
    lm = mj.load(GOLDENS / "llama3")
    third = greedy("llama3", PROMPT, 6)[2]
    model = lm.model._replace(config=dataclasses.replace(lm.model.config, ends=(third,)))
    out = mj.sample(dataclasses.replace(lm, model=model), PROMPT, max_tokens=6)
    assert out.tokens[0].tolist() == greedy("llama3", PROMPT, 2) and out.finish == ["stop"]


@pytest.mark.long
def test_a_checkpoint_converted_to_our_layout_is_the_same_model(tmp_path, capsys):
    assert main(["convert", str(GOLDENS / "llama3"), str(tmp_path / "ours"), "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    theirs, ours = mj.load(GOLDENS / "llama3"), mj.load(tmp_path / "ours")
    assert row["parameters"] == theirs.parameters and ours.model.config == theirs.model.config
    jax.tree.map(np.testing.assert_array_equal, ours.params, theirs.params)
    assert mj.sample(ours, PROMPT, max_tokens=6).tokens[0].tolist() == greedy("llama3", PROMPT, 6)
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "back"), "--to", "hf"]) == 0
    again = open_checkpoint(tmp_path / "back")
    for name in again.folder.tensors:
        np.testing.assert_array_equal(again.folder.read(name), golden("llama3").opened.folder.read(name))
    with pytest.raises(ValueError, match="a new or empty folder"):
        hub.convert(GOLDENS / "llama3", tmp_path / "ours")


@pytest.mark.long
def test_a_model_of_our_own_build_is_written_with_the_same_logits(tmp_path):
    lm = tiny("bidirectional")
    rng = np.random.default_rng(1)
    noisy = jax.tree.map(lambda x: x + jnp.asarray(rng.normal(0, 0.2, x.shape), x.dtype), lm.params)
    lm = dataclasses.replace(lm, params=noisy)
    folder = hub.save_hf(tmp_path / "hf", lm)
    read = hub.load(folder, dtype="float32")
    assert read.card["family"] == "tiny-A2D" and not read.model.config.zero_centred
    assert read.tokenizer.fingerprint == lm.tokenizer.fingerprint and (folder / "tokenizer.json").is_file()
    ids = np.arange(12)[None] % lm.model.config.vocab
    full = lambda x: jnp.full((1,), x, jnp.int32)
    run = lambda x: forward(
        x.model,
        x.params,
        Pass(jnp.asarray(ids), x.model.empty_cache(1, 12), full(0), full(12), full(12), full(0) > 0),
    )
    both = [run(x)[0] for x in (lm, read)]
    np.testing.assert_allclose(both[0], both[1], atol=1e-5)


def test_a_model_that_no_family_can_hold_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"model is 'causal_encoder \(block \d+\), transformer"):
        hub.save_hf(tmp_path / "a", tiny("causal_encoder"))
    with pytest.raises(ValueError, match="family is 'Dream'; allowed: tiny-A2D"):
        hub.save_hf(tmp_path / "b", tiny("bidirectional"), family="Dream")
    with pytest.raises(ValueError, match="family is 'Mamba'; allowed: .*DiffusionGemma, LLaDA"):
        hub.save_hf(tmp_path / "c", tiny("bidirectional"), family="Mamba")
    for kind in ("int8", "fp8"):
        small = hub.load(GOLDENS / "llama3", quantise=kind)
        with pytest.raises(ValueError, match=f"params is '{kind}'"):
            hub.save_hf(tmp_path / "d", small)
        with pytest.raises(ValueError, match=f"params is '{kind}'"):
            hub.save(tmp_path / "e", small, None)


def test_a_recipe_may_take_the_config_of_a_loaded_model():
    found = hub.config_of(GOLDENS / "qwen3", mask=96, pattern="bidirectional", block=32, predicts_next=False)
    assert isinstance(found, ModelConfig) and found.pattern == "bidirectional" and found.mask == 96
    with pytest.raises(ValueError, match="config is 'patern'"):
        hub.config_of(GOLDENS / "qwen3", patern="bidirectional")


def test_a_conversion_keeps_an_id_tokenizer():
    config = golden("llama3").opened.config
    again = unpack(IdTokenizer.of(config).proto)
    assert (
        again.ends == (config.eos, *config.ends) and again.fingerprint == IdTokenizer.of(config).fingerprint
    )


def test_a_source_that_is_neither_folder_nor_id_is_refused(tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match="does not exist"):
        mj.load("not a model")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(CheckpointError, match="could not be fetched"):
        mj.load("org/name-that-nobody-has")


def test_nano_names_the_embedded_model_unless_it_is_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert hub.folder_of("nano") == hub.NANO and hub.info("nano")["name"] == "nano"
    (tmp_path / "nano").mkdir()
    assert hub.folder_of("nano") == Path("nano")


def test_info_describes_a_checkpoint_without_loading_it(capsys, monkeypatch):
    monkeypatch.setattr(sys.modules["mercury_jax.hub.load"], "load_params", None)
    assert main(["info", str(GOLDENS / "llada2"), "--mask", "70", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["family"] == "LLaDA2.0, 2.1" and row["mask"] == 70 and row["experts"] and row["block"] == 32
    assert set(row["bytes_per_device"]) == {"1", "2", "4", "8"} and "auto_map" in row["notes"][0]
    assert main(["info", str(GOLDENS / "llada2"), "--mask", "70"]) == 0
    assert "memory of each device" in capsys.readouterr().out


def test_the_command_line_passes_its_options_to_load(capsys, monkeypatch):
    seen = {}
    monkeypatch.setattr("mercury_jax.cli.show.load", lambda source, **how: seen.update(how) or golden_lm())
    argv = ["infill", "a[[4]]", "--model", "x", "--quantise", "int8", "--mask", "7"]
    assert main(argv) == 2 and "no tokenizer" in capsys.readouterr().err
    assert seen == {"quantise": "int8", "mask": 7, "context": None, "ignore_config": ()}
    monkeypatch.undo()
    assert main(["sample", "x", "--model", str(GOLDENS / "llama3"), "--quantise", "int4"]) == 2
    assert "--quantise is 'int4'; allowed: int8, fp8" in capsys.readouterr().err


def golden_lm():
    return hub.load(GOLDENS / "llada", mask=7)
