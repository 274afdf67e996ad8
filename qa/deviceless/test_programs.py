"""Figures of docs/performance.md for GPUs and TPUs that are not here: memory, temporaries, collectives."""

import json
import math

import pytest

from benchmarks import plan
from mercury_jax.cli import app, main
from mercury_jax.models.weight_quant import FORMATS

GB = 1e9
BIG, CANVAS, VOCAB = "diffusiongemma-26b-a4b", 256, 262144


def numbers(shape: str) -> int:
    """In an array such as `f32[1,256,262144]`."""
    dims = shape.rstrip("]").partition("[")[2]
    return math.prod(int(n) for n in dims.split(",") if n)


def bytes_of(shape: str) -> int:
    """Of an fp32 array such as `f32[1,256,262144]`; other kinds are smaller than what is looked for."""
    return 4 * numbers(shape) if shape.startswith("f32") else 0


@pytest.mark.parametrize("quantise", [None, "int8"])
def test_the_26b_model_samples_on_one_h200_with_32k_of_context(compiled, quantise):
    record = compiled(BIG, "h200", context=32768, quantise=quantise)
    assert record["fits"] and record["temp_bytes"] < GB
    # One canvas: its logits in fp32, and nothing larger, such as rows times experts.
    assert max(bytes_of(r["shape"]) for r in record["largest"]) == CANVAS * VOCAB * 4


def test_a_batch_of_canvases_never_has_all_logits(compiled):
    record = compiled(BIG, "h200", context=2048, batch=4, quantise="int8")
    assert [r for r in record["largest"] if bytes_of(r["shape"]) >= 4 * CANVAS * VOCAB] == []


@pytest.mark.parametrize("quantise, gigabytes, kernels", [("int8", 31, 480), (None, 57, 480)])
def test_what_a_pass_of_the_26b_model_moves_and_launches(compiled, quantise, gigabytes, kernels):
    record = compiled(BIG, "h200", context=2048, quantise=quantise)
    assert record["bytes_per_pass"] < gigabytes * GB and record["kernels_per_pass"] < kernels
    assert record["temp_bytes"] < 0.42 * GB


@pytest.mark.parametrize("target", ["t4", "l4", "a100", "rtx5090", "h100"])
def test_small_models_compile_for_every_gpu(compiled, target):
    record = compiled("mercury-100m", target, context=1024)
    assert record["fits"] and record["implied"]["tokens_per_second"] > 0


def test_without_a_kernel_no_scores_of_a_long_cache_are_made(compiled):
    """Of 131,072 slots the scores of one layer would be 2.1 GB in fp32."""
    record = compiled(BIG, "a100", context=131072, quantise="int8")
    assert record["fits"] and max(bytes_of(r["shape"]) for r in record["largest"]) == CANVAS * VOCAB * 4
    # XLA transposes the keys of the global layers when a call begins: five layers of 0.34 GB, and scratch memory.
    assert record["temp_bytes"] < 2.5 * GB


def test_on_eight_h200s_a_layer_of_it_needs_two_collectives(compiled):
    record = compiled(BIG, "h200x8", context=4096, mesh="tensor=2,expert=4")
    rows = record["collectives"].values()
    assert record["fits"] and 0 < sum(row["in_layers"] for row in rows) <= 2 * record["layers"]
    # Outside of the layers: where tokens enter, and what the halves of the vocabulary tell.
    assert sum(row["per_pass"] for row in rows) <= 2 * record["layers"] + 3
    assert sum(row["bytes"] for row in rows) < GB  # no stack of experts, no table of words goes around


@pytest.mark.parametrize("target", ["h200x64", "v5p:8x8x8"])
def test_a_training_step_of_1b_compiles_for_many_devices(compiled, target):
    record = compiled("mercury-1b", target, what="train")
    assert record["fits"] and record["flops"] > 0 and record["collectives"]
    assert record["aliased_bytes"] > 0.9 * record["output_bytes"]  # the state is donated
    # Parameters and two moments in fp32 lie over `fsdp`, and what moves is parameters and their gradients: a few
    # bytes of each, where activations of all rows would be hundreds.
    state = record["argument_bytes"] * record["mesh"]["fsdp"]
    assert 12e9 < state < 13e9
    assert sum(row["bytes"] for row in record["collectives"].values()) < 2 * state
    assert record["temp_bytes"] < 40 * GB


def test_a_training_step_makes_neither_scores_nor_logits_of_a_whole_row(compiled):
    record = compiled("mercury-100m", "h200", what="train")
    assert record["fits"] and record["aliased_bytes"] > 0.9 * record["output_bytes"]
    rows, slots, vocab, heads = record["batch"], record["context"], 32768, 12
    least = min(rows * slots * vocab, rows * heads * slots * slots)
    assert [r for r in record["largest"] if numbers(r["shape"]) >= least] == []
    assert record["temp_bytes"] < 10 * GB


@pytest.mark.parametrize("target", ["v5e:4x4", "v6e:4x4", "v5p:4x4x4"])
@pytest.mark.parametrize("what", ["sample", "train"])
def test_small_models_compile_for_tpus(compiled, target, what):
    record = compiled("mercury-100m", target, what=what, context=1024)
    assert record["fits"] and record["flops"] > 0
    ours = [kernel for kernel in record["kernels"] if kernel["name"] == "canvas_attention"]
    assert [k["count"] for k in ours] == (
        [record["layers"]] if what == "sample" else []
    )  # it has no gradient


def test_prefill_compiles_and_writes_its_cache_in_place(compiled):
    record = compiled("mercury-100m", "h200", what="prefill", context=4096)
    assert record["fits"] and record["aliased_bytes"] > 0.9 * record["output_bytes"]


@pytest.mark.parametrize(
    "target, arch, quantise",
    [("b200", "sm_100a", "int8"), *(("h200", "sm_90a", quantise) for quantise in (None, *FORMATS))],
)
def test_no_kernel_of_a_program_spills(compiled, target, arch, quantise):
    """On a Hopper also its products in one launch, in every format of the matrices and of the rows."""
    record = compiled(BIG, target, context=32768, quantise=quantise)
    assert target == "b200" or any("grouped" in kernel["name"] for kernel in record["kernels"])
    for kernel in record["kernels"]:
        assert kernel["arch"] == arch and kernel["spill_bytes"] == 0, kernel


def test_the_command_prints_one_object(capsys):
    assert main(["bench", "compile", "nano", "--for", "h200", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert {"bytes_per_device", "temp_bytes", "fits", "flops", "collectives", "kernels"} <= set(record)
    assert record["memory"] == 150e9 and record["collectives"] == {}


def test_a_plan_of_two_models_for_two_chips_compiles_or_says_why_not(tmp_path, capsys):
    file = tmp_path / "plan.jsonl"
    words = ["mercury-100m", BIG, "--for", "l4,v5e-1", "--context", "1k", "--out", str(file)]
    assert app.execute(plan.run, [*words, "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(r["model"], r["for"]) for r in rows] == [
        ("mercury-100m", "l4"), ("mercury-100m", "v5e-1"), (BIG, "l4"), (BIG, "v5e-1")
    ]  # fmt: skip
    for small, large in zip(rows[:2], rows[2:], strict=True):
        assert (
            small["status"] == "compiled"
            and small["weight_bytes"] < small["bytes_per_device"] < small["memory"]
        )
        assert small["implied"]["tokens_per_second"] > 0
        assert large["status"] == "too large" and "compile_seconds" not in large  # 26 GB of weights
    assert app.execute(plan.run, [*words, "--markdown"]) == 0  # from the file: nothing is compiled
    assert "tok/s |" in capsys.readouterr().out and len(file.read_text().splitlines()) == 4
