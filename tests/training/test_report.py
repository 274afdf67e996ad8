"""Laws of the report: rows of steps that will be taken again go, rates leave pauses out, MFU counts what multiplies."""

import dataclasses
import io
import json
import math

import jax
import pytest

from mercury_jax import models
from mercury_jax.bench import chips
from mercury_jax.config import Experts, ModelConfig
from mercury_jax.training import report
from mercury_jax.training.report import Clock, Reporter, flops_per_position, peak_flops

CONFIG = ModelConfig(vocab=320, width=16, layers=2, heads=2, kv_heads=1, head_dim=8, ffn=32)


def flops(config: ModelConfig) -> float:
    params = jax.eval_shape(models.build(config).init, jax.eval_shape(jax.random.key, 0))
    return flops_per_position(config, params)


def test_flops_are_six_for_each_parameter_that_multiplies():
    block = (
        16 * 16 + 2 * 16 * 8 + 16 * 16 + 3 * 16 * 32
    )  # queries, keys and values, output, gated feed-forward
    tied, untied = dataclasses.replace(CONFIG, tied=True), dataclasses.replace(CONFIG, tied=False)
    assert flops(tied) == flops(untied) == 6 * (2 * block + 320 * 16)


def test_of_experts_only_the_active_ones_count():
    make = lambda active: dataclasses.replace(CONFIG, experts=Experts(count=8, active=active, width=16))
    one, all_of_them = flops(make(1)), flops(make(8))
    assert all_of_them - one == 6 * 2 * 7 * 3 * 16 * 16  # layers, experts, matrices


def test_peaks_are_those_of_the_chips_that_are_compiled_for():
    kinds = {
        "t4": "Tesla T4", "l4": "NVIDIA L4", "a100": "NVIDIA A100-SXM4-80GB",
        "rtx5090": "NVIDIA GeForce RTX 5090", "h100": "NVIDIA H100 80GB HBM3", "h200": "NVIDIA H200",
        "b200": "NVIDIA B200", "v4": "TPU v4", "v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite",
    }  # fmt: skip
    assert {name: peak_flops(kind) for name, kind in kinds.items()} == {
        n: c.flops for n, c in chips.ALL.items()
    }
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12 and peak_flops("NVIDIA A100-SXM4-40GB") == 312e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12 and peak_flops("NVIDIA L40S") != peak_flops("NVIDIA L4")
    assert peak_flops("cpu") is None and peak_flops("NVIDIA A1000") is None


def rows_of(tmp_path, monkeypatch, **fields) -> list[dict]:
    now = [0.0]
    monkeypatch.setattr(report.time, "monotonic", lambda: now[0])
    reporter = Reporter(tmp_path, "x", 4, 0, **fields)
    for step in range(1, 5):
        now[0] += 0.25
        reporter.step(step, 100, 1.0)
        reporter.metrics(step, "train", {"loss": 1.0})
    reporter.metrics(4, "eval", {"loss": 2.0})
    reporter.close()
    return [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]


def test_a_row_has_step_time_mfu_and_memory(tmp_path, monkeypatch):
    *_, train, held_out = rows_of(tmp_path, monkeypatch, peak_share=0.1)
    assert train["step_seconds"] == 0.25 and train["tokens_per_second"] == 400 and train["mfu"] == 0.4
    assert math.isclose(sum("memory" in key for key in train), 1) and set(train) - {
        "step",
        "kind",
        "loss",
    } <= set(report.RATES)
    assert set(held_out) == {"step", "kind", "loss"}


def test_where_the_peak_is_unknown_there_is_no_mfu(tmp_path, monkeypatch):
    assert all("mfu" not in row for row in rows_of(tmp_path, monkeypatch))


def test_memory_is_that_of_the_fullest_device(monkeypatch):
    class Device:
        def __init__(self, used):
            self.used = used

        def memory_stats(self):
            return {"bytes_in_use": self.used, "peak_bytes_in_use": 2 * self.used}

    monkeypatch.setattr(report.jax, "local_devices", lambda: [Device(10**9), Device(3 * 10**9)])
    assert report.memory() == {"device_memory_gb": 3.0, "device_memory_peak_gb": 6.0}


class Wandb:
    """Stands for the package `wandb`: records the calls."""

    def __init__(self):
        self.calls: list = []

    def init(self, **given):
        self.calls.append(("init", given))
        return self

    def log(self, values, step):
        self.calls.append(("log", step, values))

    def finish(self):
        self.calls.append(("finish",))


def test_rows_go_to_wandb_too_under_the_same_id_when_resumed(tmp_path, monkeypatch):
    fake = Wandb()
    monkeypatch.setitem(__import__("sys").modules, "wandb", fake)
    rows = rows_of(tmp_path, monkeypatch, wandb="mine", config={"steps": 4})
    first, *logs, last = fake.calls
    assert (
        first[1]["project"] == "mine" and first[1]["config"] == {"steps": 4} and first[1]["resume"] == "allow"
    )
    assert [step for _, step, _ in logs] == [1, 2, 3, 4, 4] and last == ("finish",)
    assert logs[3][2] == {f"train/{k}": v for k, v in rows[3].items() if k not in ("step", "kind")}
    assert logs[4][2] == {"eval/loss": 2.0}
    Reporter(tmp_path, "x", 8, 4, wandb="mine").close()
    assert fake.calls[-2][1]["id"] == first[1]["id"]


def test_without_its_package_wandb_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="wandb is 'mine'; allowed: .*pip install wandb"):
        report.check_wandb("mine")
    report.check_wandb("")


def test_rows_after_the_resumed_step_are_dropped(tmp_path):
    rows = [{"step": n, "kind": "train"} for n in (10, 20, 30)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + '\n{"step": 4')
    reporter = Reporter(tmp_path, "x", 40, 20)
    reporter.metrics(30, "eval", {"loss": 1.0})
    reporter.close()
    found = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(r["step"], r["kind"]) for r in found] == [(10, "train"), (20, "train"), (30, "eval")]


def test_tokens_a_second_leave_pauses_out_and_time_left_does_not(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(report.time, "monotonic", lambda: now[0])
    clock = Clock(10)
    for step in range(1, 6):
        now[0] += 2.0
        clock.tick(step, 100)
        if step == 3:
            with clock.pause():
                now[0] += 4.0
    assert clock.speed() == 50.0
    assert clock.left(5) == 5 * (4 * 2.0 + 4.0) / 4
    assert clock.goodput() == pytest.approx(5 * 2.0 / (5 * 2.0 + 4.0))


def test_a_terminal_gets_a_bar_with_loss_speed_and_time_left(tmp_path, monkeypatch):
    screen = io.StringIO()
    screen.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(report.sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    reporter = Reporter(tmp_path, "mine", 40, 0)
    for step in range(1, 11):
        reporter.step(step, 100, 1.25)
    reporter.say("hello [brackets]")
    reporter.close()
    shown = screen.getvalue()
    assert "mine" in shown and "10/40" in shown and "loss 1.2500" in shown and "tokens/s" in shown
    assert "hello [brackets]" in shown


def test_a_process_that_is_not_the_first_writes_nothing(tmp_path):
    quiet = Reporter(tmp_path, "x", 4, 0, quiet=True)
    quiet.step(1, 3, 0.5)
    quiet.metrics(1, "train", {"loss": 0.5})
    quiet.sample(1, "text")
    quiet.close()
    assert not list(tmp_path.iterdir())
