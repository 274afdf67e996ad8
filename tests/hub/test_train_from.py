"""A training may start from a checkpoint in Hugging Face's layout, and leaves a model that loads and samples."""

import dataclasses

import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax.hub import writing
from mercury_jax.train import data
from mercury_jax.train.objectives import masked_elbo
from tests.tiny import tiny


def recipe(folder, out, **changes):
    config = mj.hub.config_of(folder, pattern="block_causal", block=8, context=128)
    made = mj.TrainConfig(
        name="from", model=config, objective=masked_elbo(), data=data.mixture((data.generated("add3"), 1.0)),
        steps=2, batch=4, row=96, eval_every=0, sample_every=0, save_every=2, init=str(folder), out=str(out),
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def test_a_training_starts_from_a_checkpoint_of_others(tmp_path):
    folder = writing.to_hf(tmp_path / "hf", tiny("bidirectional"))
    result = mj.train(recipe(folder, tmp_path / "run", sampler=mj.rules.factor(0.5)))
    assert result.step == 2 and np.isfinite(result.metrics["loss"])
    lm = mj.load(tmp_path / "run" / "model")
    assert lm.card["init"] == str(folder) and lm.model.config.pattern == "block_causal"
    assert lm.decoding == {
        "rule": "factor",
        "knobs": {"f": 0.5},
    }  # the recipe's sampler is the model's default
    own, named = (mj.sample(lm, "1+2=", max_tokens=8, sampler=s) for s in (None, mj.rules.factor(0.5)))
    assert own.forwards[0] == named.forwards[0] > 0 and own.text == named.text
    with pytest.raises(ValueError, match=r"sampler is .*; allowed: a rule of mercury_jax\.rules"):
        mj.train(recipe(folder, tmp_path / "c", sampler=mj.Sampler(mj.rules.factor(0.5))))
    other = dataclasses.replace(recipe(folder, tmp_path / "b").model, width=32)
    with pytest.raises(ValueError, match="model.width is 32; allowed: 16, as in init"):
        mj.train(recipe(folder, tmp_path / "b", model=other))
