"""Recipes whose models are meant for other libraries: trained, converted with the command line, and read back."""

import dataclasses
import json

import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax.cli import main
from mercury_jax.config import ModelConfig
from mercury_jax.training import data
from mercury_jax.training.recipe import load_recipe

pytestmark = pytest.mark.slow

TARGETS = {
    "nano_sdar": "SDARForCausalLM",
    "nano_bidirectional": "A2DQwen3LMHeadModel",
    "twin_nano": "Qwen3ForCausalLM",
}


@pytest.mark.parametrize("name", TARGETS)
def test_a_trained_recipe_of_each_target_converts_without_changing_logits(name, tmp_path, capsys):
    recipe = load_recipe(name)
    assert isinstance(recipe.model, ModelConfig)
    small = dataclasses.replace(recipe.model, width=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn=32)
    mj.train(
        dataclasses.replace(
            recipe, model=small, data=data.generated("add3"), tokenizer=str(mj.hub.NANO / "tokenizer.model"), init="",
            steps=2, batch=4, eval_every=0, sample_every=0, save_every=2, out=str(tmp_path / "run"),
        )
    )  # fmt: skip
    ours, theirs = tmp_path / "run" / "model", tmp_path / "hf"
    assert main(["convert", str(ours), str(theirs), "--to", "hf"]) == 0, capsys.readouterr().err
    assert json.loads((theirs / "config.json").read_text())["architectures"] == [TARGETS[name]]
    a, b = mj.load(ours), mj.load(theirs)
    canvas = a.tokenizer.encode("347+585=932")
    assert b.tokenizer.encode("347+585=932") == canvas
    want, got = (np.asarray(mj.logits(lm, canvas, "1+2=")) for lm in (a, b))
    allowed = [i for i in range(small.vocab) if i not in a.corruption.forbidden]
    assert np.abs(got - want)[..., allowed].max() < 1e-5 * max(1.0, np.abs(want)[..., allowed].max())


def test_a_model_without_a_counterpart_is_refused_with_those_that_have_one(tmp_path, capsys):
    assert main(["convert", "nano", str(tmp_path / "out"), "--to", "hf"]) == 2
    told = capsys.readouterr().err
    assert "causal_encoder" in told and "nano_sdar" in told and not (tmp_path / "out").exists()
