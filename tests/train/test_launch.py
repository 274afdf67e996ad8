"""Two processes train as one does, and save one checkpoint."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import tiny_training as tiny

from mercury_jax import checkpoint
from mercury_jax.train import launch, loop

HERE = Path(__file__).parent
WORKER = """
import sys
from mercury_jax.train import launch, loop
launch.distributed()
import jax
import tiny_training as tiny
from mercury_jax import sharding

class Share(tiny.Data):
    def __next__(self):
        at, count = sharding.share(loop.mesh_of(config))
        rows = config.batch // count
        return jax.tree.map(lambda x: x[at * rows : (at + 1) * rows], super().__next__())

    def get_state(self):
        return {**super().get_state(), "rows": {str(jax.process_index()): "its own"}}

config = tiny.config(sys.argv[1], steps=6, mesh=tiny.recipe.MeshConfig(data=1, fsdp=2))
loop.run(config, tiny.model(), tiny.CORRUPTION, Share())
"""


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        place = f"localhost:{free.getsockname()[1]}"
    job = {"JAX_COORDINATOR_ADDRESS": place, "JAX_NUM_PROCESSES": "2", "XLA_FLAGS": ""}
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE)])
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, tmp_path / "two"], stderr=subprocess.PIPE, text=True,
            env=os.environ | job | {"JAX_PROCESS_ID": str(i), "PYTHONPATH": path},
        )
        for i in range(2)
    ]  # fmt: skip
    errors = [worker.communicate(timeout=300)[1] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], errors

    one = loop.run(tiny.config(tmp_path / "one", steps=6), tiny.model(), tiny.CORRUPTION, tiny.Data())
    target = {"params": jax.tree.map(jnp.zeros_like, one.params)}
    found = checkpoint.restore(tmp_path / "two" / "checkpoints", target)
    assert found.step == 6 and tiny.near(found.tree["params"], one.params, 1e-5)
    assert found.extra["data"] == {"number": 6, "rows": {"0": "its own", "1": "its own"}}


def test_without_other_processes_distributed_is_refused_in_words(monkeypatch):
    def alone(**given):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", alone)
    with pytest.raises(
        ValueError, match="distributed is True; allowed: a job of SLURM.*JAX_COORDINATOR_ADDRESS"
    ):
        launch.distributed()
