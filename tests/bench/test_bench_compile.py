"""`mercury bench compile` without any plugin: targets, sizes, texts of programs, rooflines, refusals."""

import dataclasses
import json
import shutil
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mercury_jax import models, sharding
from mercury_jax.bench import abstract_params, chips, compile as compiling
from mercury_jax.bench.abstract_params import abstract_session
from mercury_jax.cli import main
from mercury_jax.cli.bench_compile import format_bytes, table
from mercury_jax.hub.load import open_checkpoint
from mercury_jax.hub.params import shapes_of
from mercury_jax.models.weight_quant import QuantisedWeight
from tests.hub.goldens_of import GOLDENS

CONFIG_26B = Path(__file__).parents[1] / "hub" / "diffusiongemma_26b.json"
QWEN = dict(hidden_act="silu", torch_dtype="bfloat16", tie_word_embeddings=False, rms_norm_eps=1e-6)
PUBLISHED = {  # of the config.json of each checkpoint, what its model is made of
    "dream-7b": dict(
        architectures=["DreamModel"], vocab_size=152064, hidden_size=3584, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, intermediate_size=18944, rope_theta=1e6, max_position_embeddings=131072,
        mask_token_id=151666, pad_token_id=151643, eos_token_id=151643,
    ),
    "sdar-30b-a3b": dict(
        architectures=["SDARMoeForCausalLM"], vocab_size=151936, hidden_size=2048, num_hidden_layers=48,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, intermediate_size=6144, num_experts=128,
        num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True, decoder_sparse_step=1,
        mlp_only_layers=[], rope_theta=1e6, max_position_embeddings=32768, block_size=32, mask_token_id=151669,
        pad_token_id=151643, eos_token_id=151643,
    ),
    "llada2-mini": dict(
        architectures=["LLaDA2MoeModelLM"], vocab_size=157184, hidden_size=2048, num_hidden_layers=20,
        num_attention_heads=16, num_key_value_heads=4, head_dim=128, intermediate_size=5120, num_experts=256,
        num_experts_per_tok=8, num_shared_experts=1, moe_intermediate_size=512, n_group=8, topk_group=4,
        first_k_dense_replace=1, routed_scaling_factor=2.5, score_function="sigmoid", norm_topk_prob=True,
        moe_router_enable_expert_bias=True, partial_rotary_factor=0.5, rope_theta=6e5, use_qk_norm=True,
        max_position_embeddings=32768, pad_token_id=156892, eos_token_id=156892,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name, devices, topology",
    [("h200", 1, "1x1x1"), ("h200x8", 8, "1x1x8"), ("h200x64", 64, "1x8x8"), ("b200x2", 2, "1x1x2"),
     ("t4", 1, "1x1x1"), ("rtx5090", 1, "1x1x1"), ("v5e-1", 1, "1x1"), ("v6e-1", 1, "1x1"),
     ("v5e:4x4", 16, "4x4"), ("v6e:16x16", 256, "16x16"), ("v5p:8x8x8", 512, "8x8x8")],
)  # fmt: skip
def test_a_target_is_a_chip_and_a_number_of_devices(name, devices, topology):
    found = chips.target(name)
    assert (found.devices, found.topology) == (devices, topology)
    assert found.chip.platform == ("tpu" if name.startswith("v") else "cuda")


@pytest.mark.parametrize(
    "name", ["h1000", "h200x0", "h200x12", "h200:4x4", "v5e", "v5e:4x4x4", "v5p:4x4", "v5ex4", "", "h200 "]
)
def test_other_targets_are_refused_with_what_is_allowed(name):
    with pytest.raises(ValueError, match=r"--for is .*; allowed: "):
        chips.target(name)


def test_the_description_of_every_gpu_agrees_with_its_datasheet():
    for chip in chips.ALL.values():
        if chip.platform == "cuda":
            text = (chips.TARGETS / f"{chip.name}.txtpb").read_text()
            assert f"memory_bandwidth: {chip.bandwidth:.0f}" in text and chip.label in text
            assert f"device_memory_size: {chip.memory:.0f}" in text


def test_the_26b_configuration_is_that_of_its_config_json():
    assert abstract_params.find_preset("diffusiongemma-26b-a4b").config == open_checkpoint(CONFIG_26B).config


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_is_the_model_of_its_config_json(name, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN | PUBLISHED[name]))
    opened, preset = open_checkpoint(path), abstract_params.find_preset(name)
    assert preset.config == opened.config and preset.noise == opened.noise
    assert dict(preset.decoding) == dict(opened.decoding)


@pytest.mark.long
@pytest.mark.parametrize(
    "name, billions",
    [("mercury-100m", 0.1), ("dream-7b", 7.62), ("sdar-30b-a3b", 30.5), ("llada2-mini", 16.3)],
)
def test_a_preset_has_the_parameters_that_its_name_says(name, billions):
    model = models.build(abstract_params.find_preset(name).config)
    total = sum(np.prod(x.shape) for x in shapes_of(model).values())
    assert total == pytest.approx(billions * 1e9, rel=0.02)


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match="'llada-7b'; allowed: .*llada-8b is the nearest"):
        abstract_params.source("llada-7b")


def test_abstract_parameters_are_sharded_as_loaded_ones():
    on = sharding.mesh(data=2, tensor=2)
    found = abstract_params.source("nano", "bfloat16")
    plain, small = (
        abstract_params.abstract_lm(found, on).params,
        abstract_params.abstract_lm(found, on, "int8").params,
    )
    q = plain["block_0"]["attention"]["q"]["w"]
    assert q.dtype == jnp.bfloat16 and tuple(q.sharding.spec) == ("fsdp", "tensor", None)
    scaled = small["block_0"]["attention"]["o"]["w"]
    assert isinstance(scaled, QuantisedWeight) and scaled.values.dtype == jnp.int8
    assert scaled.scale.shape == (found.config.width,) and scaled.scale.sharding.is_fully_replicated
    table = small["embed"]
    assert table.values.dtype == jnp.int8 and table.values.sharding == plain["embed"].sharding
    assert table.scale.shape == (found.config.vocab,) and table.scale.sharding.is_fully_replicated
    assert small["norm"]["scale"].dtype == jnp.bfloat16


def test_the_outline_is_the_job_that_sample_makes():
    """The same program and shapes: what is compiled ahead of time is what runs."""
    import mercury_jax as mj
    from mercury_jax.decode.request import Request, encode_request, start

    lm = mj.load("nano")
    session, wide = abstract_session(lm, 2, 80)
    block = lm.model.config.block
    asked = start(lm, encode_request(lm, Request([[5] * (80 - block)] * 2, max_tokens=block).checked()))
    assert session.config == asked.config and wide is None
    like = lambda tree: jax.tree.map(lambda x: (x.shape, str(x.dtype)), tree)
    assert like(session.state) == like(asked.state)
    assert abstract_session(lm, 1, 400)[1] == 256
    with pytest.raises(ValueError, match="context is 513; allowed: 33..512"):
        abstract_session(lm, 1, 513)


def test_the_roofline_is_the_longer_of_both_times():
    chip = chips.ALL["h200"]
    slow = chips.datasheet_roofline(chip, "bfloat16", 989e12, 4.8e12 / 2)
    assert slow["compute_seconds"] == 1.0 and slow["memory_seconds"] == 0.5 and slow["bound"] == "compute"
    fast = chips.datasheet_roofline(chip, "bfloat16", 989e10, 4.8e12)
    assert fast["seconds"] == 1.0 and fast["bound"] == "memory"
    assert chips.datasheet_roofline(chip, "float32", 494e12, 0)["seconds"] == 1.0


def test_bf16_on_a_chip_without_it_has_the_rate_of_fp32():
    slow, half = (
        chips.datasheet_roofline(chips.ALL["t4"], kind, 65e12, 0) for kind in ("bfloat16", "float16")
    )
    assert half["seconds"] == 1.0 and slow["seconds"] == pytest.approx(65 / 8.1)


def test_a_program_too_large_for_a_tpu_does_not_fit():
    told = "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. "
    told += "Used 20.50G of 15.75G hbm."
    found = compiling.refused_for_memory(told)
    assert found["bytes_per_device"] == int(20.5 * 2**30) and found["fits"] is False
    told = "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
    told += "temporaries (16.19G) exceeds available HBM (15.75G). HLO module: jit_run_session."
    found = compiling.refused_for_memory(told)
    assert (found["bytes_per_device"], found["memory"]) == (int(16.19 * 2**30), int(15.75 * 2**30))
    with pytest.raises(ValueError, match="refuses the program: INTERNAL"):
        compiling.refused_for_memory("INTERNAL: something else\nand more")


def test_a_meshs_sizes_are_read_or_refused():
    assert (
        chips.mesh_sizes("tensor=2,expert=4") == {"tensor": 2, "expert": 4} and chips.mesh_sizes(None) == {}
    )
    for bad in ("tensor", "heads=2", "tensor=two", "tensor=2,"):
        with pytest.raises(ValueError, match=r"--mesh is .*; allowed: data=N"):
            chips.mesh_sizes(bad)


@pytest.mark.long
def test_the_training_step_is_lowered_with_its_state_on_the_mesh(monkeypatch):
    monkeypatch.setattr(chips.Target, "describe", lambda self: type("T", (), {"devices": jax.devices()}))
    found = abstract_params.source("mercury-100m")
    small = dataclasses.replace(
        found.config, width=64, layers=1, ffn=64, vocab=128, heads=4, kv_heads=4, head_dim=16
    )
    made = compiling.lower(
        compiling.CompileRequest("x", "h200x4", "train", context=64, batch=4),
        found._replace(config=small),
        chips.target("h200x4"),
    )
    assert made.mesh.shape["fsdp"] == 4 and (made.rows, made.context, made.per) == (4, 64, "update")
    record = compiling.cost(made.lowered.compile(), chips.ALL["h200"], "bfloat16", "train")
    assert record["collectives"]["all-reduce"]["count"] > 0 and record["fits"]
    assert record["aliased_bytes"] > 0.9 * record["output_bytes"]  # the state is donated


def test_a_missing_plugin_is_reported_with_what_to_install(capsys, monkeypatch):
    monkeypatch.setattr(chips.importlib.util, "find_spec", lambda name: None)
    for target, what in (("h200", "CUDA plugin"), ("v5e:4x4", "libtpu")):
        assert main(["bench", "compile", "nano", "--for", target]) == 2
        told = capsys.readouterr().err
        assert what in told and "[deviceless]'" in told


@pytest.mark.parametrize(
    "words, told",
    [(["--for", "h2000"], "--for is 'h2000'"), (["--for", "h200", "--what", "serve"], "--what is 'serve'"),
     (["--for", "h200", "--mesh", "rows=2"], "--mesh is 'rows=2'"), ([], "--for"),
     (["--for", "h200", "--context", "0"], "--context is 0"),
     (["--for", "h200", "--what", "train", "--quantise", "int8"], "--quantise is 'int8'")],
)  # fmt: skip
def test_bad_options_are_refused_before_a_process_is_started(words, told, capsys, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("a process was started"))
    assert main(["bench", "compile", "nano", *words]) == 2
    assert told in capsys.readouterr().err


def test_the_child_reports_why_it_refuses(tmp_path):
    out = tmp_path / "out.json"
    shutil.copytree(GOLDENS / "qwen3", tmp_path / "m")
    about = json.loads((tmp_path / "m" / "config.json").read_text()) | {"logit_scale": 0.5}
    (tmp_path / "m" / "config.json").write_text(json.dumps(about))
    for more, told in (
        ({"model": "llada-7b"}, "llada-8b is the nearest"),
        ({"model": "llada-8b", "ignore_config": ["logit_scale"]}, "a folder or a config.json, beside"),
        ({"model": str(tmp_path / "m")}, "--ignore-config logit_scale"),
    ):
        ask = json.dumps(compiling.CompileRequest(target="h200", **more)._asdict())
        assert compiling.main(["program", ask, str(out)]) == 2
        assert told in json.loads(out.read_text())["refused"]
    found = abstract_params.source(str(tmp_path / "m"), None, None, ["logit_scale"])
    assert found.config == abstract_params.source(str(GOLDENS / "qwen3")).config


def test_a_child_that_dies_is_reported(monkeypatch):
    monkeypatch.setattr(chips, "check_plugin", lambda chip: None)
    monkeypatch.setattr(compiling.sys, "executable", "/bin/false")
    with pytest.raises(compiling.CompilerFailed, match="ended with code 1"):
        compiling.compile_for(compiling.CompileRequest("nano", "h200"))


def test_the_table_says_what_does_not_fit():
    record = {
        "what": "sample", "model": "m", "devices": 1, "chip": "NVIDIA H200", "mesh": {}, "batch": 1, "context": 8,
        "dtype": "bfloat16", "quantise": "int8", "bytes_per_device": int(2e11), "memory": int(1.5e11), "fits": False,
        "temp_bytes": None,
    }  # fmt: skip
    assert "200.00 GB of 150.00 GB" in table(record) and "DOES NOT FIT" in table(record)
    assert format_bytes(12) == "12 B" and format_bytes(1500) == "1.50 kB"


@pytest.mark.parametrize(
    "option", ["--batch 2", "--context 64", "--dtype bfloat16", "--quantise int8", "--mesh data=1"]
)
def test_options_of_a_model_are_refused_for_the_kernels(option, capsys):
    assert main(["bench", "compile", "kernels", "--for", "h200", *option.split()]) == 2
    assert f"{option.split()[0]} is" in capsys.readouterr().err
