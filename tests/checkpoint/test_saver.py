"""Steps of a run and exported models: what is saved is restored, damage is named, a failed save keeps older steps."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from mercury_jax import checkpoint, sharding
from mercury_jax.checkpoint import CheckpointError, manifest


def tree():
    return {
        "params": {"layer/0": {"w": jnp.arange(12.0).reshape(3, 4)}, "b": jnp.ones(3, jnp.bfloat16)},
        "opt": (jnp.int32(7), (), None, [jnp.zeros((2, 2))]),
        "key": jax.random.key(3),
    }


def same(a, b):
    plain = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(x.dtype == y.dtype and bool((plain(x) == plain(y)).all()) for x, y in pairs)


@pytest.fixture
def saved(tmp_path):
    saver = checkpoint.Saver(tmp_path / "run", keep=2)
    for step in (1, 2, 3):
        saver.save(step, tree(), {"width": 4}, {"data": [step]})
    saver.wait()
    return tmp_path / "run"


def test_a_step_is_restored_with_its_config_and_only_the_newest_are_kept(saved):
    assert checkpoint.steps(saved) == [2, 3] and checkpoint.latest(saved) == 3
    back = checkpoint.restore(saved, jax.eval_shape(tree))
    assert (back.step, back.config, back.extra) == (3, {"width": 4}, {"data": [3]})
    assert jax.tree.structure(back.tree) == jax.tree.structure(tree()) and same(back.tree, tree())
    assert checkpoint.restore(saved, tree(), step=2).extra == {"data": [2]}


def test_a_part_can_be_restored_alone(saved):
    part = {"params": tree()["params"]}
    assert same(checkpoint.restore(saved, part).tree, part)


def test_arrays_are_restored_onto_another_mesh(tmp_path):
    before, after = sharding.mesh(data=1, fsdp=4), sharding.mesh(data=2, tensor=2)
    rules = ((r"w$", ("fsdp", "tensor")),)
    value = {"w": jnp.arange(32.0).reshape(8, 4)}
    saver = checkpoint.Saver(tmp_path)
    saver.save(1, jax.device_put(value, sharding.shardings(value, rules, before)), {})
    saver.wait()
    where = sharding.shardings(value, rules, after)
    target = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), value, where)
    back = checkpoint.restore(tmp_path, target).tree
    assert same(back, value) and back["w"].sharding == where["w"]


def test_donating_arrays_that_are_being_saved_is_safe(tmp_path):
    value = {"w": jnp.arange(200_000.0)}
    saver = checkpoint.Saver(tmp_path)
    saver.save(1, value, {})
    jax.jit(lambda x: jax.tree.map(lambda v: v * 0 - 1, x), donate_argnums=0)(value)
    saver.wait()
    assert same(checkpoint.restore(tmp_path, {"w": jnp.zeros(200_000)}).tree, {"w": jnp.arange(200_000.0)})


def missing(path):
    path.unlink()


def truncated(path):
    path.write_bytes(path.read_bytes()[:-1])


def flipped(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def files(folder):
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.stat().st_size)


@pytest.mark.long
@pytest.mark.parametrize("harm", [missing, truncated, flipped])
def test_every_damaged_file_is_refused_by_name_before_orbax_opens_any(saved, harm, monkeypatch):
    monkeypatch.setattr(
        sys.modules["mercury_jax.checkpoint.saver"],
        "_read_arrays",
        lambda *a: pytest.fail("Orbax was asked"),
    )
    victims = files(checkpoint.path_of(saved, 3))
    assert len(victims) > 6
    for path in victims:
        whole = path.read_bytes()
        harm(path)
        with pytest.raises(CheckpointError) as error:
            checkpoint.restore(saved, tree())
        if path.name != "manifest.json":  # a flip there may accuse the file that it describes
            assert str(path) in str(error.value)
        if path.name not in ("manifest.json", "checkpoint.json"):
            assert "To continue from step 2 instead, move" in str(error.value)
        path.write_bytes(whole)


def test_another_models_arrays_are_refused_by_name(saved):
    with pytest.raises(CheckpointError, match="'params/new'"):
        checkpoint.restore(saved, {"params": {"new": jnp.ones(2)}})
    with pytest.raises(CheckpointError, match=r"array params/b is \['bfloat16', 3\]"):
        checkpoint.restore(saved, {"params": {"b": jnp.ones(4, jnp.bfloat16)}})


def test_a_missing_step_is_refused(saved, tmp_path):
    with pytest.raises(CheckpointError, match=r"step is 9; allowed: one of \[2, 3\]"):
        checkpoint.restore(saved, tree(), step=9)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        checkpoint.restore(tmp_path / "nowhere", tree())


def test_a_newer_format_is_refused(saved):
    about = checkpoint.path_of(saved, 3) / "checkpoint.json"
    about.write_text(about.read_text().replace('"format": 1', '"format": 2'))
    manifest.write(about.parent)
    with pytest.raises(CheckpointError, match="format is 2; allowed: 1"):
        checkpoint.restore(saved, tree())


def test_stale_folders_are_removed_and_steps_are_not(saved):
    (saved / "00000004.tmp" / "state.orbax-checkpoint-tmp").mkdir(parents=True)
    assert checkpoint.clean(saved) == ["00000004.tmp"]
    assert sorted(os.listdir(saved)) == ["00000002", "00000003"]
    assert checkpoint.steps(saved) == [2, 3]


FULL = """
import resource, sys, jax.numpy as jnp
from mercury_jax import checkpoint
saver = checkpoint.Saver(sys.argv[1])
saver.save(1, {"w": jnp.arange(1000.0)}, {})
saver.wait()
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    saver.save(2, {"w": jnp.arange(1_000_000.0)}, {})
    saver.wait()
except checkpoint.SaveFailed as error:
    print("REFUSED", error)
"""


@pytest.mark.long
def test_a_full_disk_fails_the_save_and_keeps_the_older_step(tmp_path):
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    run = subprocess.run([sys.executable, "-c", FULL, tmp_path], capture_output=True, text=True, env=env)
    said = [line for line in run.stdout.splitlines() if line.startswith("REFUSED")]
    assert said and "disk is full" in said[0] and "steps [1] are unchanged" in said[0], run.stderr[-2000:]
    assert checkpoint.steps(tmp_path) == [1]
    checkpoint.clean(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["00000001"]
    assert same(checkpoint.restore(tmp_path, {"w": jnp.zeros(1000)}).tree, {"w": jnp.arange(1000.0)})


KILLED = """
import os, signal, sys, threading, time, jax.numpy as jnp
from mercury_jax import checkpoint
saver = checkpoint.Saver(sys.argv[1], keep=3)
for step in range(1, 100):
    saver.save(step, {"w": jnp.full(300_000, float(step))}, {})
    print(step, flush=True)
"""


@pytest.mark.long
def test_a_process_killed_while_saving_leaves_complete_steps(tmp_path):
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, tmp_path], stdout=subprocess.PIPE, text=True, env=env
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            if int(line) == 5:
                run.send_signal(signal.SIGKILL)
                break
    checkpoint.clean(tmp_path)
    newest = checkpoint.latest(tmp_path)
    assert newest is not None and newest >= 4
    back = checkpoint.restore(tmp_path, {"w": jnp.zeros(300_000)}).tree
    assert same(back, {"w": jnp.full(300_000, float(newest))})
