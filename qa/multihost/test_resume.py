"""Runs that are stopped or killed, and continued by another number of processes: the same batches, nothing twice."""

import random
import signal

import pytest

from mercury_jax import checkpoint
from tests.training import jobs

STEPS = ("--steps", "150")  # SIGTERM must arrive before the last one


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The recipe, and its run in one process."""
    root = jobs.write_recipe(tmp_path_factory.mktemp("resumes"))
    jobs.finish(root, "one", jobs.begin(root, 1, "one", *STEPS))
    return root


def stop_at(root, out, workers, step, who=-1):
    """SIGTERM to one process once the run has reached a step: all save, and all exit with 143."""
    jobs.wait_until(lambda: jobs.reached(root / out) >= step, workers)
    workers[who].send_signal(signal.SIGTERM)
    assert jobs.codes(workers) == [128 + signal.SIGTERM] * len(workers), jobs.said(root, out)
    saved = checkpoint.latest(root / out / "checkpoints")
    assert saved is not None and step <= saved < int(STEPS[1])
    return saved


def test_from_one_process_to_two_and_back_the_data_are_exact(root):
    """SIGTERM stops each leg: of two processes it goes to one, and both save and exit with 143."""
    first = stop_at(root, "legs", jobs.begin(root, 1, "legs", *STEPS), 8)
    second = stop_at(
        root, "legs", jobs.begin(root, 2, "legs", *STEPS, "--resume", "--mesh.data", "2"), first + 8
    )
    jobs.finish(root, "legs", jobs.begin(root, 1, "legs", *STEPS, "--resume"))
    assert first < second
    found, want = jobs.rows(root / "legs"), jobs.rows(root / "one")
    assert [(row["step"], row["kind"], row["digest"]) for row in found] == [
        (row["step"], row["kind"], row["digest"]) for row in want
    ]
    assert [row["loss"] for row in found] == pytest.approx([row["loss"] for row in want], abs=1e-5, rel=0)
    states = [checkpoint.inspect(root / out / "checkpoints")[1]["extra"]["data"] for out in ("legs", "one")]
    assert states[0] == states[1]


def test_one_of_two_killed_and_resumed_ends_equal_bit_for_bit(root):
    """The killed process is one or the other; the one that is left ends by itself."""
    job = ("--mesh.data", "1", "--mesh.fsdp", "2", "--heartbeat", "3")
    jobs.finish(root, "two", jobs.begin(root, 2, "two", *job))
    draw = random.Random(5)
    for who in (0, 1):
        workers = jobs.begin(root, 2, "killed", *job, "--resume")
        at = jobs.reached(root / "killed") + draw.randint(9, 14)
        jobs.wait_until(lambda at=at: jobs.reached(root / "killed") >= at, workers)
        workers[who].kill()
        found = jobs.codes(workers, 60)
        assert found[who] == -9 and found[1 - who] != 0
    jobs.finish(root, "killed", jobs.begin(root, 2, "killed", *job, "--resume"))
    assert jobs.rows(root / "killed") == jobs.rows(root / "two")
    for part in ("model/params.safetensors", "model/config.json", "model/manifest.json", "samples.txt"):
        assert (root / "killed" / part).read_bytes() == (root / "two" / part).read_bytes(), part
