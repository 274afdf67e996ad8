"""The arguments of published scripts: what becomes of them, and what is refused. tests/conformance runs them."""

import inspect

import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax.decode import presets
from tests.hub.goldens_of import GOLDENS, golden

NAMES = [
    name
    for name, made in vars(presets).items()
    if inspect.isfunction(made) and made.__module__ == presets.__name__
]
OF_EDIT = "gidd_self_correction"
PUBLIC = [name for name in NAMES if not name.startswith("_") and name != OF_EDIT]


@pytest.mark.parametrize("name", PUBLIC)
def test_the_defaults_are_arguments_of_sample(name):
    found = getattr(mj.presets, name)()
    assert {"max_tokens", "sampler", "plan"} <= set(found) <= set(inspect.signature(mj.sample).parameters)


@pytest.mark.long
def test_self_correction_edits_a_sample_at_a_time_near_0():
    found = mj.presets.gidd_self_correction(num_inference_steps=4, t0=0.01)
    assert set(found) <= set(inspect.signature(mj.edit).parameters)
    times = found["plan"].times
    assert len(set(times)) == 1 and 1e-4 + (1 - 2e-4) * times[0] == pytest.approx(0.01)
    gidd = mj.load(GOLDENS / "gidd", dtype="float32")
    text = [5, 17, 33, 41, 8, 60, 22, 11]
    out = mj.edit(gidd, text, **found)
    assert len(out.tokens[0]) == len(text) and 96 not in out.tokens[0] and out.forwards[0] <= 4
    assert 1 <= len(out.changes[0]) <= 4  # one token a pass


def test_duo_waits_at_a_time_and_weighs_its_posterior_by_part():
    how = dict(predictor="psi", steps=9, high_frac=0.3, middle_frac=0.4, middle_mode="constant-0.25")
    found = mj.presets.duo(time_profile="linear-constant-linear-0.9-inv", **how)
    times = np.array(found["plan"].times)
    assert (
        len(times) == 11 and times[-1] == 0 and np.allclose(times[2:7], 0.1) and np.all(np.diff(times) <= 0)
    )
    kappa = found["sampler"].rule.params["kappa"].value
    assert kappa.tolist() == [1, 1, 1, 0.25, 0.25, 0.25, 0.25, 1, 1, 1]
    capped = mj.presets.duo(
        predictor="psi", steps=4, low_mode="max-capped-0.3", high_frac=0.0, middle_frac=0.0
    )
    # 1 - min(0.3, (1 - alpha_s) / alpha_t) / (1 - alpha_s) at times 1, 3/4, 1/2, 1/4, and 1 in the last pass
    want = [1 - 0.3 / 0.75, 1 - 0.3 / 0.5, 1 - 0.3 / 0.25, 0.0, 1.0]
    np.testing.assert_allclose(capped["sampler"].rule.params["kappa"].value, np.clip(want, 0, 1), atol=1e-4)


def test_steps_are_divided_among_the_blocks():
    plan = mj.presets.llada(steps=64, gen_length=128, block_length=32)["plan"]
    assert (plan.block, plan.steps) == (32, 16)
    assert mj.presets.fast_dllm(gen_length=64, block_length=32, threshold=0.9)["plan"].steps is None


def test_guidance_is_against_masks_and_only_where_it_is_asked_for():
    assert "guidance" not in mj.presets.llada()
    found = mj.presets.llada(cfg_scale=1.5)
    assert found["guidance"] == 1.5 and found["negative"] == "masked"


@pytest.mark.long
def test_llada_accepts_its_ends_last(monkeypatch):
    """The script's loop in numpy, with two ids of a small model as the ends, against `mj.sample`."""
    ends = [47, 9]  # in the answer without the argument, which has other tokens
    monkeypatch.setattr(presets, "LLADA_EOS", ends[0])
    monkeypatch.setattr(presets, "LLADA_EOT", ends[1])
    lm = mj.load(GOLDENS / "llada", dtype="float32")
    mask, prompt, length = lm.model.config.mask, [55, 44, 24, 27, 73], 8
    text = np.array([*prompt, *[mask] * length])
    for _ in range(length):
        logits = np.array(mj.logits(lm, text.tolist())[0, len(prompt) :], np.float64)
        logits[:, mask] = -np.inf
        drawn, kept = logits.argmax(-1), np.delete(logits, ends, axis=1)
        p = np.exp(logits.max(-1)) / np.exp(kept).sum(-1)
        p = np.where(np.isin(drawn, ends), 0.0, p)
        at = np.where(text[len(prompt) :] == mask, p, -1.0).argmax()
        text[len(prompt) + at] = drawn[at]
    how = dict(steps=length, gen_length=length, block_length=length)
    out = mj.sample(lm, [prompt], **mj.presets.llada(**how, confidence_eos_eot_inf=True))
    assert out.tokens[0].tolist() == text[len(prompt) :].tolist()
    assert out.text != mj.sample(lm, [prompt], **mj.presets.llada(**how)).text
    monkeypatch.setattr(presets, "LLADA_EOT", lm.model.config.vocab)
    with pytest.raises(ValueError, match="confidence_without"):
        mj.sample(lm, [prompt], **mj.presets.llada(**how, confidence_eos_eot_inf=True))


def test_dream_reads_its_confidence_behind_temperature_top_p_and_top_k():
    sampler = mj.presets.dream(temperature=0.2, top_p=0.95, top_k=20, alg="entropy")["sampler"]
    assert [p.name for p in sampler.processors] == [
        "temperature",
        "top_p",
        "top_k",
    ] and sampler.temperature == 1.0
    greedy = mj.presets.dream(temperature=0.0, top_p=1.0, alg="topk_margin", alg_temp=None)["sampler"]
    assert greedy.processors == () and greedy.temperature == 0.0


@pytest.mark.long
def test_open_dcoder_plans_with_the_tempered_probabilities_of_its_tokens():
    how = dict(max_new_tokens=16, steps=8, temperature=0.8, top_k=20)
    found = mj.presets.open_dcoder(alg="p2", **how)
    sampler = found["sampler"]
    assert sampler.rule == mj.rules.p2() and [p.name for p in sampler.processors] == ["temperature", "top_k"]
    assert sampler.temperature == 1.0 and (found["plan"].block, found["plan"].steps) == (16, 8)
    assert mj.presets.open_dcoder(alg="entropy", **how) == mj.presets.dream(alg="entropy", **how)
    mask = int(golden("open_dcoder").said["mask_id"][0])
    lm = mj.load(GOLDENS / "open_dcoder", dtype="float32", mask=mask)
    out = mj.sample(lm, [[3, 5, 8]], seed=1, **found)
    assert out.forwards[0] <= 8 and 0 < len(out.tokens[0]) <= 16


def test_fast_dllm_names_its_caches():
    refresh = lambda **how: mj.presets.fast_dllm(**how)["plan"].refresh
    assert refresh() is None and refresh(use_cache=True) == mj.Refresh.prefix()
    assert refresh(use_cache=True, dual_cache=True) == mj.Refresh.dual()


@pytest.mark.parametrize(
    "name, arguments, named",
    [
        ("llada", {"gen_length": 100, "block_length": 32}, "block_length"),
        ("llada", {"gen_length": 128, "block_length": 32, "steps": 30}, "steps"),
        ("llada", {"remasking": "entropy"}, "remasking"),
        ("llada", {"temperature": -1}, "temperature"),
        ("llada", {"cfg_scale": -0.5}, "cfg_scale"),
        ("llada", {"confidence_eos_eot_inf": 1}, "confidence_eos_eot_inf"),
        ("llada", {"confidence_eos_eot_inf": True, "temperature": 0.5}, "confidence_eos_eot_inf"),
        ("llada", {"confidence_eos_eot_inf": True, "remasking": "random"}, "confidence_eos_eot_inf"),
        ("dream", {"alg": "p2"}, "alg"),
        ("dream", {"steps": 0}, "steps"),
        ("dream", {"max_new_tokens": 2.5}, "max_new_tokens"),
        ("dream", {"top_p": 1.0, "top_k": 0}, "top_k"),
        ("open_dcoder", {"alg": "p3"}, "alg"),
        ("open_dcoder", {"alg": "p2", "steps": 0}, "steps"),
        ("fast_dllm", {"dual_cache": True}, "dual_cache"),
        ("fast_dllm", {"use_cache": "dual"}, "use_cache"),
        ("fast_dllm", {"threshold": 1.5}, "threshold"),
        ("fast_dllm", {"threshold": 0.9, "remasking": "random"}, "remasking"),
        ("sdar", {"remasking_strategy": "random"}, "remasking_strategy"),
        ("sdar", {"denoising_steps": 5}, "denoising_steps"),
        ("sdar", {"confidence_threshold": 85}, "confidence_threshold"),
        ("llada2", {"top_p": 2.0, "temperature": 1.0}, "top_p"),
        ("llada2", {"minimal_topk": 0}, "minimal_topk"),
        ("llada21", {"editing_threshold": -0.1}, "editing_threshold"),
        ("llada21", {"num_to_transfer": 33}, "num_to_transfer"),
        ("fast_dllm_v2", {"use_block_cache": True}, "use_block_cache"),
        ("mdlm", {"predictor": "analytic"}, "predictor"),
        ("bd3lm", {"first_hitting": 1}, "first_hitting"),
        ("bd3lm", {"nucleus_p": 1.1}, "nucleus_p"),
        ("duo", {"predictor": "analytic"}, "predictor"),
        ("duo", {"noise_removal": "none"}, "noise_removal"),
        ("duo", {"predictor": "psi", "high_mode": "constant-2"}, "high_mode"),
        ("duo", {"predictor": "psi", "time_profile": "linear-constant"}, "time_profile"),
        ("duo", {"high_frac": 0.7, "middle_frac": 0.6}, "middle_frac"),
        ("gidd", {"num_denoising_steps": 1}, "num_denoising_steps"),
        ("gidd_self_correction", {"t0": 0.0}, "t0"),
        ("fast_dllm_dream", {"use_cache": True, "alg": "origin", "max_new_tokens": 64}, "alg"),
        ("fast_dllm_dream", {"alg": "confidence_threshold", "max_new_tokens": 64, "steps": 60}, "steps"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(name, arguments, named):
    with pytest.raises(ValueError, match=named):
        getattr(mj.presets, name)(**arguments)
