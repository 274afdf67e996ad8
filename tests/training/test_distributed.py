"""Laws of a job of several processes that need no other process; qa/multihost has the real ones."""

import json
import threading
import time

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

import mercury_jax as mj
from mercury_jax.config import ModelConfig
from mercury_jax.training import data, distributed
from mercury_jax.training.distributed import ENDED, Watch
from mercury_jax.training.objectives import llada
from mercury_jax.training.recipe import MeshConfig, TrainConfig


class Store:
    """JAX's key-value store, as a dict."""

    def __init__(self):
        self.held: dict[str, str] = {}
        self.lock = threading.Lock()

    def key_value_set(self, key, value, allow_overwrite=False):
        with self.lock:
            if key in self.held and not allow_overwrite:
                raise RuntimeError("ALREADY_EXISTS")
            self.held[key] = value

    def key_value_dir_get(self, key):
        with self.lock:
            return [(name, value) for name, value in self.held.items() if name.startswith(key)]

    def blocking_key_value_get(self, key, timeout_in_ms):
        until = time.monotonic() + timeout_in_ms / 1000
        while time.monotonic() < until:
            if key in self.held:
                return self.held[key]
            time.sleep(0.001)
        raise RuntimeError("DEADLINE_EXCEEDED")


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(distributed, "POLL", 0.02)
    return Store()


@pytest.fixture
def ended(monkeypatch):
    """What `_end` would have printed, instead of the end of this process."""
    found: list[tuple[str, int]] = []
    monkeypatch.setattr(distributed, "_end", lambda text, code: found.append((text, code)))
    return found


def wait_for(found, count):
    until = time.monotonic() + 10
    while len(found) < count and time.monotonic() < until:
        time.sleep(0.01)
    assert len(found) == count


def test_a_silent_process_ends_all_that_live_and_is_named(store, ended):
    watches = [Watch(store, index, 4, heartbeat=1.5) for index in range(4)]
    for watch in watches[:3]:  # 3 never says anything
        watch.start()
    wait_for(ended, 3)
    assert {code for _, code in ended} == {5}
    assert all("process 3 of 4 (never heard of) gave no sign of life for 1.5 s" in text for text, _ in ended)


def test_a_process_that_has_finished_is_not_missed(store, ended):
    watches = [Watch(store, index, 2, heartbeat=0.1) for index in range(2)]
    for watch in watches:
        watch.start()
    watches[1].leave()
    time.sleep(0.5)
    watches[0].leave()
    assert ended == [] and ENDED not in store.held


@pytest.mark.parametrize("who", [0, 1])
def test_an_error_ends_the_others_with_its_words_and_its_code(store, ended, who):
    class Full(ValueError):
        exit_code = 4

    watches = [Watch(store, index, 3, heartbeat=60) for index in range(3)]
    for watch in watches:
        watch.start()
    watches[who].fail(Full("the disk is full"))
    wait_for(ended, 2)
    assert all(f"process {who} of 3" in text and "the disk is full" in text for text, _ in ended)
    assert {code for _, code in ended} == {4}
    later = (RuntimeError("a consequence"), KeyboardInterrupt())
    for error in later:
        watches[1 - who].fail(error)
    assert json.loads(store.held[ENDED])["message"].endswith("the disk is full")


def test_a_failed_collective_waits_for_the_name_of_the_dead(store, ended, capsys):
    """Gloo and NCCL report a closed connection before anybody knows whose it was."""
    watch = Watch(store, 0, 2, heartbeat=0.2)
    watch.start()
    failing = threading.Thread(
        target=watch.fail, args=(jax.errors.JaxRuntimeError("connection closed by peer"),)
    )
    failing.start()
    wait_for(ended, 1)
    failing.join()
    assert "process 1 of 2" in ended[0][0] and "gave no sign of life" in ended[0][0]
    assert "connection closed by peer" in capsys.readouterr().err


def test_without_other_processes_distributed_is_refused_in_words(monkeypatch):
    def alone(**given):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", alone)
    allowed = "distributed is True; allowed: a job of SLURM.*JAX_COORDINATOR_ADDRESS"
    with pytest.raises(ValueError, match=allowed), distributed.joined():
        pass


@pytest.mark.long
def test_no_activation_is_copied_to_all_devices_on_a_mesh_of_data_and_fsdp(tmp_path, capfd, request):
    def use_cache(on):
        jax.config.update("jax_enable_compilation_cache", on)
        compilation_cache.reset_cache()  # JAX asks once in a process whether it has one

    use_cache(False)  # XLA warns when it compiles
    request.addfinalizer(lambda: use_cache(True))
    model = ModelConfig(
        vocab=298, width=32, layers=1, heads=4, kv_heads=2, head_dim=8, ffn=48, block=8, context=128,
        pattern="bidirectional",
    )  # fmt: skip
    recipe = TrainConfig(
        name="four", model=model, objective=llada(), data=data.generated("add2"), steps=1, batch=8, row=64,
        eval_every=0, sample_every=0, mesh=MeshConfig(data=2, fsdp=2), out=str(tmp_path),
    )  # fmt: skip
    mj.train(recipe)
    assert "Involuntary full rematerialization" not in capfd.readouterr().err
