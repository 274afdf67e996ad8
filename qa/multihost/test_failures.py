"""One process fails: all others end, soon, with a line that says what happened and an exit code that is not 0."""

import signal
import subprocess
import sys
import time

import pytest

from mercury_jax.training import distributed
from tests.training import jobs


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The recipe."""
    return jobs.write_recipe(tmp_path_factory.mktemp("failures"))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_process_that_dies_or_freezes_ends_the_others_within_the_heartbeat(root, how):
    job = ("--mesh.data", "3", "--batch", "3", "--steps", "100000", "--heartbeat", "4")
    out = f"by{how.value}"
    workers = jobs.begin(root, 3, out, *job)
    jobs.wait_until(lambda: jobs.reached(root / out) >= 3, workers)
    first, victim, last = workers
    victim.send_signal(how)
    begin = time.monotonic()
    assert jobs.codes([first, last], 60) == [5, 5]
    assert time.monotonic() - begin < 4 + distributed.BACKSTOP / 2  # it was our heartbeat, not JAX's
    victim.kill()
    assert victim.wait() == -signal.SIGKILL
    for log in (jobs.said(root, out)[0], jobs.said(root, out)[2]):
        assert f"process 1 of 3 (host {jobs.socket.gethostname()}, pid {victim.pid})" in log
        assert "gave no sign of life for 4 s" in log


def test_the_death_of_process_0_ends_the_others_at_once(root):
    """The store of messages dies with it, so that JAX's own words say it."""
    workers = jobs.begin(root, 2, "first", "--mesh.data", "2", "--steps", "100000", "--heartbeat", "60")
    jobs.wait_until(lambda: jobs.reached(root / "first") >= 3, workers)
    workers[0].kill()
    begin = time.monotonic()
    found = jobs.codes(workers, 60)
    assert found[0] == -9 and found[1] != 0 and time.monotonic() - begin < 20
    assert "the leader task was preempted/died" in jobs.said(root, "first")[1]


def test_an_error_of_process_0_ends_the_other_with_its_message_and_its_code(root):
    """The model cannot be written at the end: something that is no folder stands where it is made."""
    (root / "export").mkdir()
    (root / "export" / "model.tmp").write_text("in the way")
    workers = jobs.begin(root, 2, "export", "--mesh.fsdp", "2", "--mesh.data", "1", "--steps", "10")
    assert jobs.codes(workers, 60) == [4, 4]
    for log in jobs.said(root, "export"):
        assert f"{root / 'export' / 'model'} could not be written: File exists" in log


def test_an_error_in_one_process_alone_ends_the_other(root):
    """Process 1 has another recipe, which it refuses once it has joined."""
    text = (root / "recipe.py").read_text()
    (root / "other").mkdir()
    other = jobs.write_recipe(root / "other")
    (other / "recipe.py").write_text(text.replace("text.txt", "missing.txt"))
    address, workers = jobs.free_address(), []
    for place, index in ((root, 0), (other, 1)):
        job = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(index)}
        argv = [
            "train", str(place / "recipe.py"), "--out", str(root / "apart"), "--distributed", "--mesh.data",
            "2",
        ]  # fmt: skip
        workers.append(
            subprocess.Popen(
                [sys.executable, "-m", "mercury_jax", *argv],
                stderr=(root / f"apart.{index}.log").open("a"), env=jobs.environment(root) | job,
            )
        )  # fmt: skip
    assert jobs.codes(workers, 60) == [2, 2]
    first, second = jobs.said(root, "apart")
    assert "missing.txt" in second and "process 1 of 2" in first and "missing.txt" in first


def test_a_process_that_does_not_come_is_said(root):
    for index in (0, 1):
        begin = time.monotonic()
        (alone,) = jobs.begin(root, 2, f"late{index}", "--join_timeout", "3", only=[index])
        assert jobs.codes([alone], 60) == [5] and time.monotonic() - begin < 30
        assert (
            f"process {index} of 2 waited 3 s for the others at localhost:"
            in jobs.said(root, f"late{index}")[0]
        )


# The limit on a file's size stands for a full disk. It lets the first two of four arrays through.
EXPORT = """
import resource, signal, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
from mercury_jax import checkpoint
mesh = jax.make_mesh((2,), ("x",))
split = NamedSharding(mesh, PartitionSpec("x"))
local = np.ones((64, 256), np.float32)
params = {f"w{i}": jax.make_array_from_process_local_data(split, local) for i in range(4)}
if jax.process_index() == 0:
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
try:
    checkpoint.export(sys.argv[3], params, {})
except checkpoint.SaveFailed as error:
    print("failed:", error)
checkpoint.export(sys.argv[3] + "2", {"w": params["w0"]}, {})
print("wrote")
"""


def test_a_full_disk_half_way_in_an_export_fails_on_all_processes_and_none_waits(root):
    address = jobs.free_address()
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", EXPORT, address, str(index), str(root / "full")],
            stdout=(root / f"full.{index}.log").open("w"), stderr=subprocess.STDOUT, env=jobs.environment(root),
        )
        for index in (0, 1)
    ]  # fmt: skip
    assert jobs.codes(workers, 60) == [0, 0], jobs.said(root, "full")
    texts = jobs.said(root, "full")
    assert all("failed:" in text and "could not be written: File too large" in text for text in texts)
    assert "process 0 has not written" in texts[1]
    assert all("wrote\n" in text for text in texts)
    assert not (root / "full").exists()
