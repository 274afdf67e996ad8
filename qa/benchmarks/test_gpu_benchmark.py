"""`python -m benchmarks.gpu` without a GPU: what a pass must read, what is timed, and what is left out."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import gpu, gpu_kernels, gpu_models
from mercury_jax import sharding
from mercury_jax.bench import abstract_params as ap
from mercury_jax.bench.gpu import commands
from mercury_jax.bench.gpu.profile import find

ROOT = Path(__file__).parents[2]


def test_every_case_names_work_that_there_is():
    for case in (*gpu.speed_cases(), *gpu.model_cases(), *gpu.speed_cases(True), *gpu.model_cases(True)):
        module = {gpu.KERNELS: gpu_kernels, gpu.MODELS: gpu_models}[case.module]
        assert callable(getattr(module, case.work))
        assert (gpu.LOOPS in case.name) == (gpu.GRAPHS in case.env) and (gpu.PLAIN in case.name) == (
            gpu.OFF in case.env
        )


def test_the_load_of_a_pass_reads_all_experts_and_multiplies_with_the_active_ones():
    """DiffusionGemma: 25.2B parameters, 3.8B of them active."""
    found = find(commands.GEMMA)
    lm = ap.abstract_lm(found, sharding.mesh(devices=jax.devices()[:1]))
    bytes, flops = gpu_models.load(lm, 1, 1024)
    assert 50e9 < bytes < 54e9 and 1.9e12 < flops < 2.3e12


def test_a_training_row_is_full_and_costs_six_flop_for_each_parameter_and_position():
    c = ap.find_preset("mercury-100m").config
    data = gpu_models.batch_of(c, 2, 2048)
    assert data.tokens.shape == (2, 2048) and data.editable[0].sum() == data.editable[1].sum() >= 1024
    params = {"a": jax.ShapeDtypeStruct((10, 10), jnp.float32), "b": jax.ShapeDtypeStruct((10,), jnp.float32)}
    alone = gpu_models.flops_of(params, c, data._replace(ranges=np.zeros_like(data.ranges)))
    assert alone == 6 * 100 * 2 * 2048


def test_routings_have_all_rows_and_differ():
    for routing in ("even", "random", "skewed"):
        assert gpu_kernels.routed(routing, 2048, 128).sum() == 2048
    assert gpu_kernels.routed("even", 2048, 128).max() == 16 < gpu_kernels.routed("skewed", 2048, 128).max()


@pytest.mark.slow
def test_the_command_times_what_it_can_and_says_why_not_the_rest(tmp_path):
    out = tmp_path / "rows.jsonl"
    assert gpu.main(["speed", "--small", "--only", "attention b=1 t=32", "--out", str(out), "--json"]) == 0
    rows = {r["case"].split(", ")[-1]: r for r in map(json.loads, out.read_text().splitlines())}
    assert "cuDNN" in rows["cudnn"]["refused"] and rows["ours"]["computed_by"] == "plain XLA"
    assert rows["ours"]["times_as_fast"] == rows["xla"]["seconds"] / rows["ours"]["seconds"]
    assert 0 < rows["xla"]["share_of_bound"]


def test_missing_transformers_is_reported():
    script = str(ROOT / "benchmarks/transformers_worker.py")
    absent = (
        f"import sys; sys.modules['torch'] = None; sys.argv = [{script!r}]; exec(open({script!r}).read())"
    )
    args = {"config": {}, "prompt": [1], "steps": [1, 2], "device": "cuda", "dtype": "bfloat16"}
    done = subprocess.run(
        [sys.executable, "-c", absent], input=json.dumps(args), capture_output=True, text=True
    )
    assert "install torch" in json.loads(done.stdout)["left_out"]
