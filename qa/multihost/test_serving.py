"""A model on the devices of several processes is refused by the server: requests are scheduled in one of them."""

import subprocess
import sys

from tests.training import jobs

PROGRAM = """
import sys

import jax

import mercury_jax as mj
from mercury_jax.serve.engine.engine import Engine

jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
Engine(mj.load(mesh=mj.mesh(tensor=2)))
"""


def test_a_mesh_over_two_processes_is_refused(tmp_path):
    address = jobs.free_address()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, address, str(i)], env=jobs.environment(tmp_path),
            stderr=(tmp_path / f"serve.{i}.log").open("w"),
        )
        for i in range(2)
    ]  # fmt: skip
    assert 0 not in jobs.codes(processes, 120)
    for log in jobs.said(tmp_path, "serve"):
        assert "ValueError: the mesh has devices of several processes" in log
