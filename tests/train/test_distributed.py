"""Two processes train as one does, through the command line: the same losses, checkpoints and saved model."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import chex
import jax
import pytest

import mercury_jax as mj
from mercury_jax import checkpoint
from mercury_jax.train import loop
from tests.tiny import tokenizer

ROOT = Path(__file__).parents[2]
RECIPE = """
from mercury_jax.config import ModelConfig
from mercury_jax.train import data
from mercury_jax.train.objectives import masked_elbo
from mercury_jax.train.optim import OptimConfig
from mercury_jax.train.recipe import TrainConfig

def config():
    return TrainConfig(
        name="tiny", objective=masked_elbo(), data=data.mixture((data.generated("add3"), 1.0)),
        model=ModelConfig(vocab=320, width=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn=32, block=8, context=96),
        optim=OptimConfig(lr=1e-2, warmup=1), tokenizer="TOKENIZER", steps=4, batch=4, row=96, log_every=1,
        eval_every=2, eval_batches=2, save_every=2, sample_every=4, sample_prompts=("1+2=",),
    )
"""


def begin(root: Path, processes: int, out: str, *more: str) -> list[subprocess.Popen]:
    """`mercury train` in so many processes, which know of each other by the variables that JAX names."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        place = f"localhost:{free.getsockname()[1]}"
    flags = [f for f in os.environ["XLA_FLAGS"].split() if "device_count" not in f]  # one device a process
    job = {
        "JAX_COORDINATOR_ADDRESS": place,
        "JAX_NUM_PROCESSES": str(processes),
        "XLA_FLAGS": " ".join(flags),
        "MERCURY_CACHE": str(root / "compiled"),
        "PYTHONPATH": str(ROOT),
    }
    argv = ["train", str(root / "recipe.py"), "--out", str(root / out), *more]
    return [
        subprocess.Popen(
            [sys.executable, "-m", "mercury_jax", *argv, *(["--distributed"] if processes > 1 else [])],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | job | {"JAX_PROCESS_ID": str(i)},
        )
        for i in range(processes)
    ]  # fmt: skip


def finish(workers: list[subprocess.Popen]) -> None:
    said = [worker.communicate(timeout=300) for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * len(workers), said


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """The same recipe in one process and in two, split along `fsdp` or along `data`."""
    root = tmp_path_factory.mktemp("runs")
    tokenizer().save(root / "tokenizer.model")
    (root / "recipe.py").write_text(RECIPE.replace("TOKENIZER", str(root / "tokenizer.model")))
    one, split = begin(root, 1, "one"), begin(root, 2, "fsdp", "--mesh.fsdp", "2", "--mesh.data", "1")
    finish([*one, *split, *begin(root, 2, "data", "--mesh.data", "2")])
    return root


def losses(out: Path) -> list[tuple[str, int, float]]:
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [(row["kind"], row["step"], row["loss"]) for row in lines]


def assert_same_run(found: Path, want: Path) -> None:
    """Equal losses, of training and evaluation, and an equal saved model."""
    a, b = losses(found), losses(want)
    assert [x[:2] for x in a] == [x[:2] for x in b] and len(a) == 6
    assert [x[2] for x in a] == pytest.approx([x[2] for x in b], abs=1e-5)
    assert checkpoint.steps(found / "checkpoints") == [2, 4]
    left, right = (mj.load(out / "model").params for out in (found, want))
    chex.assert_trees_all_close(left, right, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["fsdp", "data"])
def test_two_processes_train_evaluate_preview_and_export_as_one(runs, axis):
    assert_same_run(runs / axis, runs / "one")
    previews = (runs / axis / "samples.txt").read_text()
    assert previews == (runs / "one" / "samples.txt").read_text()
    out = mj.sample(mj.load(runs / axis / "model"), "1+2=", max_tokens=64, seed=0)
    assert f"'1+2=' -> {out.text!r}" in previews


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_processes(runs):
    """From two processes to one, and from one to two that split the rows along `data`."""
    for source, out in (("fsdp", "to_one"), ("one", "to_two")):
        shutil.copytree(
            runs / source, runs / out, ignore=shutil.ignore_patterns("00000004", "model", "samples.txt")
        )
    last = begin(runs, 1, "to_one", "--resume", "--sample_every", "0")
    finish(last + begin(runs, 2, "to_two", "--resume", "--mesh.data", "2"))
    for out in ("to_one", "to_two"):
        assert_same_run(runs / out, runs / "one")
    assert (runs / "to_two" / "samples.txt").read_text() == (runs / "one" / "samples.txt").read_text()


def test_without_other_processes_distributed_is_refused_in_words(monkeypatch):
    def alone(**given):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", alone)
    with pytest.raises(
        ValueError, match="distributed is True; allowed: a job of SLURM.*JAX_COORDINATOR_ADDRESS"
    ):
        loop.join()
