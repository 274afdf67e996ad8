"""The measurement of an accelerator, on a machine that has none: its arithmetic, its rows, and what it leaves out."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mercury_jax.bench import gpu, gpu_attention, gpu_models, gpu_page, gpu_training
from mercury_jax.bench.ceilings import Ceilings, per_call
from mercury_jax.bench.known import find
from mercury_jax.cli import main

MOST = Ceilings(bandwidth=1e9, matmul=1e12)
SHAPE = gpu_attention.Shape("some", 1, 4, 300, 4, 2, 8)


def test_the_bound_is_whichever_takes_longer():
    assert MOST.bound(2e9, 1e12) == 2.0 and MOST.bound(1e9, 3e12) == 3.0


def test_a_call_of_a_chain_runs_on_what_the_one_before_gave():
    seen = []
    assert per_call(lambda x: seen.append(1) or x + 1, jnp.zeros(()), calls=5, repeats=1) > 0
    assert len(seen) == 5  # traced once, in one program


def test_work_of_attention_is_counted_from_its_definition():
    """Two products of T x S x K a head; keys and values read, queries read, the result written."""
    bytes, flops = gpu_attention.work(SHAPE)
    assert bytes == 2 * (2 * 300 * 2 * 8 + 2 * 4 * 4 * 8) and flops == 2 * 2 * 4 * 300 * 8 * 4
    assert gpu_attention.work(SHAPE._replace(causal=True))[1] == flops / 2


def test_every_way_is_timed_against_the_reference_or_says_why_not(monkeypatch):
    monkeypatch.setattr(gpu_attention, "per_call", lambda *a: 0.5)
    rows = {row["way"]: row for row in gpu_attention.measure(MOST, [SHAPE])}
    assert rows["reference"]["relative_error"] < 0.02 and rows["jax xla"]["relative_error"] < 0.02
    assert rows["reference"]["times_as_fast_as_jax"] == 1.0 and "cuDNN" in rows["jax cudnn"]["refused"]
    wrong = {"wrong": lambda q, k, v, ranges: q + 1}
    monkeypatch.setattr(gpu_attention, "ways", lambda shape: wrong)
    (row,) = gpu_attention.measure(MOST, [SHAPE])
    assert row["relative_error"] > 0.1


def test_the_load_of_a_pass_counts_experts_once_each_and_products_of_the_active_alone():
    """DiffusionGemma: 25.2B parameters, 3.8B of them active; every expert is read, few of them multiply."""
    asked = gpu_models.Running("diffusiongemma-26b-a4b", prefix=1024)
    found = gpu_models.weightless.source(asked.name)
    lm = gpu_models.weightless.lm(found, gpu_models.sharding.mesh(devices=jax.devices()[:1]))
    bytes, flops = gpu_models.load(lm, asked)
    assert 50e9 < bytes < 54e9 and 1.9e12 < flops < 2.3e12


def test_a_training_row_is_full_and_its_work_is_six_a_parameter_and_position():
    c = find("mercury-100m").config()
    data = gpu_training.batch(c, 2, 2048)
    assert data.tokens.shape == (2, 2048) and data.editable[0].sum() == data.editable[1].sum() >= 1024
    params = {"a": jax.ShapeDtypeStruct((10, 10), jnp.float32), "b": jax.ShapeDtypeStruct((10,), jnp.float32)}
    alone = gpu_training.flops(params, c, data._replace(ranges=np.zeros_like(data.ranges)))
    assert alone == 6 * 100 * 2 * 2048


def test_what_fails_or_comes_too_late_has_a_row_and_the_others_are_measured(monkeypatch):
    def fails():
        raise MemoryError("too large")

    steps = [("large", fails), ("small", lambda: iter([{"experiment": "training", "mfu": 0.5}]))]
    monkeypatch.setattr(gpu, "ceilings", lambda *a: MOST)
    monkeypatch.setattr(gpu, "_steps", lambda *a: iter(steps))
    first, bad, good = gpu.measure()
    assert first["bytes_per_second"] == 1e9 and "too large" in bad["failed"] and good["mfu"] == 0.5
    assert [row.get("left_out") for row in gpu.measure(minutes=0)][1:] == ["0 minutes were over"] * 2


def test_the_command_measures_a_small_model_and_draws_its_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "SMALL", gpu.SMALL[:1])
    monkeypatch.setattr(gpu, "SMALL_SHAPES", gpu.SMALL_SHAPES[:1])
    out, plot = tmp_path / "rows.jsonl", tmp_path / "page.png"
    assert main(["bench", "gpu", "--small", "--out", str(out), "--plot", str(plot)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r["experiment"] for r in rows if "failed" in r or "left_out" in r] == []
    assert {r["experiment"] for r in rows} == {"ceilings", "decoding", "attention", "training"}
    told = next(r for r in rows if r["experiment"] == "decoding")
    assert told["passes"] == [gpu_models.SHORT, gpu_models.LONG] and told["seconds_per_forward"] > 0
    assert plot.stat().st_size > 10_000 and "a pass" in capsys.readouterr().out
    with pytest.raises(ValueError, match="plot"):
        gpu_page.page(rows, tmp_path / "page.txt")
