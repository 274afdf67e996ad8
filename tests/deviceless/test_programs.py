"""What the README says of machines that nobody here has: what fits, what is never made, how often devices talk."""

import json
import math

import pytest

from mercury_jax.cli import main

GB = 1e9
BIG, CANVAS, VOCAB = "diffusiongemma-26b-a4b", 256, 262144


def bytes_of(shape: str) -> int:
    """Of an fp32 array such as `f32[1,256,262144]`; other kinds are smaller than what is looked for."""
    kind, _, dims = shape.rstrip("]").partition("[")
    return 4 * math.prod(int(n) for n in dims.split(",") if n) if kind == "f32" else 0


@pytest.mark.parametrize("quantise", [None, "int8"])
def test_the_26b_model_samples_on_one_h200_with_32k_of_context(compiled, quantise):
    record = compiled(BIG, "h200", context=32768, quantise=quantise)
    assert record["fits"] and record["temp_bytes"] < 4 * GB
    logits = [r for r in record["largest"] if bytes_of(r["shape"]) >= CANVAS * VOCAB * 4]
    assert logits == []  # neither logits in fp32 nor rows times experts


def test_on_eight_h200s_a_layer_of_it_needs_two_collectives(compiled):
    record = compiled(BIG, "h200x8", context=4096, mesh="tensor=2,expert=4")
    per_pass = sum(row["per_pass"] for row in record["collectives"].values())
    assert record["fits"] and 0 < per_pass / record["layers"] <= 2


@pytest.mark.parametrize("target", ["h200x64", "v5p:8x8x8"])
def test_a_training_step_of_1b_compiles_for_many_devices(compiled, target):
    record = compiled("mercury-1b", target, what="train")
    assert record["fits"] and record["flops"] > 0 and record["collectives"]
    assert record["aliased_bytes"] > 0.9 * record["output_bytes"]  # the state is donated


@pytest.mark.parametrize("target", ["v5e:4x4", "v6e:4x4", "v5p:4x4x4"])
@pytest.mark.parametrize("what", ["sample", "train"])
def test_small_models_compile_for_tpus(compiled, target, what):
    record = compiled("mercury-100m", target, what=what, context=1024)
    assert record["fits"] and record["flops"] > 0


def test_prefill_compiles_and_writes_its_cache_in_place(compiled):
    record = compiled("mercury-100m", "h200", what="prefill", context=4096)
    assert record["fits"] and record["aliased_bytes"] > 0.9 * record["output_bytes"]


@pytest.mark.parametrize("target, arch", [("h200", "sm_90a"), ("b200", "sm_100a")])
def test_no_kernel_of_a_program_spills(compiled, target, arch):
    record = compiled(BIG, target, context=32768, quantise="int8")
    for kernel in record["kernels"]:
        assert kernel["arch"] == arch and kernel["spill_bytes"] == 0, kernel


def test_the_command_prints_one_object(capsys):
    assert main(["bench", "compile", "nano", "--for", "h200", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert {"bytes_per_device", "temp_bytes", "fits", "flops", "collectives", "kernels"} <= set(record)
    assert record["memory"] == 150e9 and record["collectives"] == {}
