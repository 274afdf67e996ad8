"""`mercury train` on python-stdlib, killed half-way and resumed, ends as if nothing had happened."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mercury_jax import checkpoint
from mercury_jax.tokenizer import Tokenizer
from mercury_jax.training import data

RECIPE = """
from mercury_jax.config import ModelConfig
from mercury_jax.training import data
from mercury_jax.training.objectives import masked_elbo
from mercury_jax.training.recipe import TrainConfig

def config():
    return TrainConfig(
        name="killed",
        model=ModelConfig(vocab=512, width=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn=32, block=16),
        objective=masked_elbo(), data=data.mixture((data.stdlib(), 1.0)), steps=200, batch=4, row=64,
        save_every=40, eval_every=0, sample_every=0, log_every=10,
    )
"""


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Starts `mercury train` as a process of its own, with one device and a tokenizer that is there."""
    folder = tmp_path_factory.mktemp("killed")
    (folder / "recipe.py").write_text(RECIPE)
    texts = data.texts(data.mixture((data.stdlib(), 1.0)), 200_000)
    Tokenizer.train(texts, 512).save(folder / "tokenizer.model")
    # The programs of the three processes are the same: only the first one compiles them.
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "xla"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
    }
    env = os.environ | cache | {"XLA_FLAGS": "", "PYTHONPATH": str(Path(__file__).parents[2])}

    def start(out, *options):
        words = [
            "train", folder / "recipe.py", "--out", out, "--tokenizer", folder / "tokenizer.model", *options,
        ]  # fmt: skip
        call = [
            sys.executable,
            "-c",
            "import sys; from mercury_jax.cli import main; sys.exit(main())",
            *map(str, words),
        ]
        return subprocess.Popen(call, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    return start


def finish(run):
    errors = run.communicate(timeout=300)[1]
    assert run.returncode == 0, errors[-3000:]


def last_state(out):
    """Every array of the newest checkpoint: parameters, average, moments, key, step."""
    about = checkpoint.inspect(out / "checkpoints")[1]
    shapes = {
        n: jax.ShapeDtypeStruct(shape, jnp.dtype(kind)) for n, (kind, *shape) in about["arrays"].items()
    }
    return about, jax.tree.map(np.asarray, checkpoint.restore(out / "checkpoints", shapes).tree)


@pytest.mark.slow
def test_killed_half_way_and_resumed_equals_uninterrupted_bit_for_bit(train, tmp_path):
    finish(train(tmp_path / "whole"))
    with train(tmp_path / "cut") as run:
        for line in run.stderr:
            if line.startswith("100/200"):
                run.kill()
                break
    assert run.returncode == -9
    reached = checkpoint.latest(tmp_path / "cut" / "checkpoints")
    assert reached is not None and 40 <= reached < 200
    finish(train(tmp_path / "cut", "--resume"))

    about, whole = last_state(tmp_path / "whole")
    resumed, cut = last_state(tmp_path / "cut")
    assert about["step"] == resumed["step"] == 200 and about["extra"] == resumed["extra"]
    assert whole.keys() == cut.keys() and any(name.startswith("params/") for name in whole)
    assert [name for name in whole if whole[name].tobytes() != cut[name].tobytes()] == []
    rows = [
        json.loads(line)["step"] for line in (tmp_path / "cut" / "metrics.jsonl").read_text().splitlines()
    ]
    assert rows == list(range(10, 201, 10))
