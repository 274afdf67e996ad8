"""The arguments of published scripts: what becomes of them, and what is refused. tests/conformance runs them."""

import inspect

import pytest

import mercury_jax as mj
from mercury_jax.decode import presets

NAMES = [
    name
    for name, made in vars(presets).items()
    if inspect.isfunction(made) and made.__module__ == presets.__name__
]
PUBLIC = [name for name in NAMES if not name.startswith("_")]


@pytest.mark.parametrize("name", PUBLIC)
def test_the_defaults_are_arguments_of_sample(name):
    found = getattr(mj.presets, name)()
    assert {"max_tokens", "sampler", "plan"} <= set(found) <= set(inspect.signature(mj.sample).parameters)


def test_steps_are_divided_among_the_blocks():
    plan = mj.presets.llada(steps=64, gen_length=128, block_length=32)["plan"]
    assert (plan.block, plan.steps) == (32, 16)
    assert mj.presets.fast_dllm(gen_length=64, block_length=32, threshold=0.9)["plan"].steps is None


def test_guidance_is_against_masks_and_only_where_it_is_asked_for():
    assert "guidance" not in mj.presets.llada()
    found = mj.presets.llada(cfg_scale=1.5)
    assert found["guidance"] == 1.5 and found["negative"] == "masked"


def test_dream_reads_its_confidence_behind_temperature_top_p_and_top_k():
    sampler = mj.presets.dream(temperature=0.2, top_p=0.95, top_k=20, alg="entropy")["sampler"]
    assert [p.name for p in sampler.processors] == [
        "temperature",
        "top_p",
        "top_k",
    ] and sampler.temperature == 1.0
    greedy = mj.presets.dream(temperature=0.0, top_p=1.0, alg="topk_margin", alg_temp=None)["sampler"]
    assert greedy.processors == () and greedy.temperature == 0.0


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
        ("llada", {"confidence_eos_eot_inf": True}, "confidence_eos_eot_inf"),
        ("dream", {"alg": "p2"}, "alg"),
        ("dream", {"steps": 0}, "steps"),
        ("dream", {"max_new_tokens": 2.5}, "max_new_tokens"),
        ("dream", {"top_p": 1.0, "top_k": 0}, "top_k"),
        ("fast_dllm", {"dual_cache": True}, "dual_cache"),
        ("fast_dllm", {"use_cache": "dual"}, "use_cache"),
        ("fast_dllm", {"threshold": 1.5}, "threshold"),
        ("fast_dllm", {"threshold": 0.9, "remasking": "random"}, "remasking"),
        ("fast_dllm_dream", {"use_cache": True, "alg": "origin", "max_new_tokens": 64}, "alg"),
        ("fast_dllm_dream", {"alg": "confidence_threshold", "max_new_tokens": 64, "steps": 60}, "steps"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(name, arguments, named):
    with pytest.raises(ValueError, match=named):
        getattr(mj.presets, name)(**arguments)
