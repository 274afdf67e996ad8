"""Training from a published checkpoint leaves a model that loads and samples."""

import dataclasses
import gc
import json
import shutil

import jax
import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax import cli, hub, models, noise
from mercury_jax.config import ModelConfig, NoiseConfig
from mercury_jax.hub.tokenizer import HFTokenizer
from mercury_jax.training import data, loop, optim, step as steps
from mercury_jax.training.objectives import masked_elbo
from mercury_jax.training.recipe import MeshConfig
from tests.hub.goldens_of import GOLDENS
from tests.hub.tiny_tokenizers import byte_level
from tests.marks import slow_except
from tests.tiny import tiny


def recipe(folder, out, **changes):
    config = mj.hub.config_of(folder, pattern="block_causal", block=8, context=128)
    made = mj.TrainConfig(
        name="from", model=config, objective=masked_elbo(), data=data.mixture((data.generated("add3"), 1.0)),
        steps=2, batch=4, row=96, eval_every=0, sample_every=0, save_every=2, init=str(folder), out=str(out),
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


@pytest.mark.slow
def test_training_starts_from_a_checkpoint(tmp_path):
    folder = hub.save_hf(tmp_path / "hf", tiny("bidirectional"))
    result = mj.train(recipe(folder, tmp_path / "run", sampler=mj.rules.factor(0.5)))
    assert result.step == 2 and np.isfinite(result.metrics["loss"])
    lm = mj.load(tmp_path / "run" / "model")
    assert lm.card["init"] == str(folder) and lm.model.config.pattern == "block_causal"
    default = {"rule": "factor", "params": {"f": 0.5, "accept_last": 1}}
    assert lm.decoding == default  # the recipe's sampler
    own, named = (mj.sample(lm, "1+2=", max_tokens=8, sampler=s) for s in (None, mj.rules.factor(0.5)))
    assert own.forwards[0] == named.forwards[0] > 0 and own.text == named.text
    with pytest.raises(ValueError, match=r"sampler is .*; allowed: a rule of mercury_jax\.rules"):
        mj.train(recipe(folder, tmp_path / "c", sampler=mj.Sampler(mj.rules.factor(0.5))))
    other = dataclasses.replace(recipe(folder, tmp_path / "b").model, width=32)
    with pytest.raises(ValueError, match="model.width is 32; allowed: 16, as in init"):
        mj.train(recipe(folder, tmp_path / "b", model=other))


PADDED = 512  # ids of the model; the tokenizer has fewer, as Qwen3's 151,669 of 151,936


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    """A folder as Qwen3 is published: autoregressive, no mask in the tokenizer, a vocabulary that is rounded up."""
    files = dict(byte_level())
    about = json.loads(files["tokenizer_config.json"])
    files["tokenizer_config.json"] = json.dumps(
        {k: v for k, v in about.items() if k != "mask_token"}
    ).encode()
    tok = HFTokenizer.of(files, vocab=PADDED)
    config = ModelConfig(
        vocab=PADDED, width=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn=32, pattern="block_causal", block=1,
        mask=None, pad=tok.pad, eos=tok.eos, zero_centred=False, scale_embed=False, context=256,
        predicts_next=True,
    )  # fmt: skip
    model = models.build(config)
    lm = mj.LM(model, model.init(jax.random.key(0)), tok, noise.uniform(PADDED))
    return hub.save_hf(tmp_path_factory.mktemp("qwen3") / "hf", lm, family="Qwen3"), tok


RECIPE = """
from mercury_jax import hub
from mercury_jax.training import data
from mercury_jax.training.objectives import masked_elbo
from mercury_jax.training.recipe import TrainConfig

def config():
    return TrainConfig(
        name="a2d", objective=masked_elbo(), data=data.mixture((data.generated("add3"), 1.0)),
        model=hub.config_of("FOLDER", mask=MASK, pattern="bidirectional", block=8, predicts_next=False),
        steps=2, batch=4, row=160, eval_every=0, sample_every=0, save_every=2,
    )
"""


@pytest.mark.slow
@pytest.mark.parametrize("to", slow_except(["hf", "ours"], "ours"))
def test_training_makes_a_diffusion_model_of_an_autoregressive_checkpoint(qwen3, tmp_path, to, capsys):
    folder, tok = qwen3
    mask = tok.vocab_size  # the first id that stands for nothing
    if to == "ours":
        folder = hub.convert(folder, tmp_path / "converted")
    path = tmp_path / "recipe.py"
    path.write_text(RECIPE.replace("FOLDER", str(folder)).replace("MASK", str(mask)))
    argv = ["train", str(path), "--init", str(folder), "--out", str(tmp_path / "run"), "--json"]
    assert cli.main(argv) == 0, capsys.readouterr().err
    lm = mj.load(tmp_path / "run" / "model")
    c = lm.model.config
    assert (c.mask, lm.tokenizer.mask, c.vocab, c.pattern) == (mask, mask, PADDED, "bidirectional")
    # Two steps leave the probabilities near uniform, where one token in four would be an id without a text.
    out = mj.sample(lm, "1+2=", max_tokens=96, temperature=2.0, seed=0)
    assert len(out.tokens[0]) and max(out.tokens[0]) < tok.vocab_size
    drawn = noise.uniform(PADDED, forbidden=lm.corruption.forbidden).prior(jax.random.key(0), np.zeros(4096))
    assert int(drawn.max()) < tok.vocab_size


def alive(shape: tuple[int, ...]) -> int:
    """How many arrays of a shape are alive."""
    return sum(x.shape == shape for x in jax.live_arrays() if not x.is_deleted())


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.slow
def test_initial_parameters_are_placed_on_the_mesh_and_freed(tmp_path, monkeypatch, resume):
    hub.save(tmp_path / "first", tiny("bidirectional"), NoiseConfig())
    found, given = [], []

    def objective(key, model, params, batch, corruption):
        found.append(alive(embedding))  # at last when the first update is traced: its state stands
        return masked_elbo()(key, model, params, batch, corruption)

    init = steps.init_state
    monkeypatch.setattr(
        loop.steps, "init_state", lambda *args: given.append(shardings(args[-1])) or init(*args)
    )
    config = recipe(
        tmp_path / "first", tmp_path / "run", objective=objective, mesh=MeshConfig(data=1, fsdp=4)
    )
    model, on = models.build(config.model), loop.mesh_of(config)
    tx, lr = (
        optim.optimizer(config.optim, config.steps, model.config.width),
        optim.schedule(config.optim, config.steps),
    )
    setup = steps.TrainSetup(model, objective, noise.absorbing(0), tx, lr, ema=config.ema)
    state = steps.abstract_state(setup, on)
    embedding = max(jax.tree.leaves(state.params), key=lambda x: x.size).shape
    if resume:
        mj.train(config)
        config = dataclasses.replace(config, steps=4, resume=True)
    gc.collect()
    before = alive(embedding)
    mj.train(config)
    # The parameters, their average and the optimizer's moments: the initial ones are none beside them.
    assert found[-1] - before == sum(x.shape == embedding for x in jax.tree.leaves(state)) >= 3
    assert given == [shardings(state.params)]


def shardings(tree):
    return jax.tree.map(lambda x: x.sharding, tree)


@pytest.mark.parametrize(
    "kind, words",
    [("absorbing", "model.mask is None; allowed: an id: absorbing noise needs one, unlike uniform noise"),
     ("uniform", "noise.kind is 'uniform'; allowed: absorbing, for masked_elbo; uniform_elbo or diffusion_gemma")],
)  # fmt: skip
def test_noise_that_does_not_fit_is_refused_before_a_model_is_loaded(tmp_path, monkeypatch, kind, words):
    monkeypatch.setattr(hub, "load", lambda *args, **more: pytest.fail("the checkpoint was loaded"))
    config = hub.config_of(GOLDENS / "diffusion_gemma")
    made = mj.TrainConfig(
        name="gemma", model=config, objective=masked_elbo(), data=data.mixture((data.generated("add3"), 1.0)),
        init=str(GOLDENS / "diffusion_gemma"), noise=NoiseConfig(kind=kind), out=str(tmp_path / "run"), batch=4,
    )  # fmt: skip
    with pytest.raises(ValueError, match=words):
        mj.train(made)


def test_training_takes_the_keys_that_the_user_vouches_for(tmp_path, monkeypatch):
    class Loaded(Exception):
        pass

    def load(*args, ignore_config, **more):
        raise Loaded(ignore_config)

    folder = shutil.copytree(GOLDENS / "sdar", tmp_path / "m")
    made = recipe(folder, tmp_path / "run")
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**about, "logit_scale": 0.5}))
    monkeypatch.setattr(hub, "load", load)
    with pytest.raises(ValueError, match="logit_scale=0.5 is unknown"):
        mj.train(made)
    with pytest.raises(Loaded, match="logit_scale"):
        mj.train(dataclasses.replace(made, ignore_config=("logit_scale",)))
