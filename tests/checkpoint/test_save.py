"""Laws of checkpoints: what is saved comes back, damage is named, an older step survives a failure."""

import os
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mercury_jax import checkpoint, sharding
from mercury_jax.checkpoint import CheckpointError, manifest, tensors


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


def test_a_step_comes_back_with_its_config_and_only_the_newest_stay(saved):
    assert checkpoint.steps(saved) == [2, 3] and checkpoint.latest(saved) == 3
    back = checkpoint.restore(saved, jax.eval_shape(tree))
    assert (back.step, back.config, back.extra) == (3, {"width": 4}, {"data": [3]})
    assert jax.tree.structure(back.tree) == jax.tree.structure(tree()) and same(back.tree, tree())
    assert checkpoint.restore(saved, tree(), step=2).extra == {"data": [2]}


def test_a_part_can_be_restored_alone(saved):
    part = {"params": tree()["params"]}
    assert same(checkpoint.restore(saved, part).tree, part)


def test_arrays_come_back_onto_another_mesh(tmp_path):
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


def test_donating_what_is_being_saved_changes_nothing(tmp_path):
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


@pytest.mark.parametrize("harm", [missing, truncated, flipped])
def test_every_damaged_file_is_refused_by_name_before_orbax_opens_any(saved, harm, monkeypatch):
    monkeypatch.setattr(
        sys.modules["mercury_jax.checkpoint.restore"],
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


def test_a_step_that_is_not_there_is_refused(saved, tmp_path):
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


def test_a_full_disk_stops_the_save_and_the_older_step_stands(tmp_path):
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    run = subprocess.run([sys.executable, "-c", FULL, tmp_path], capture_output=True, text=True, env=env)
    said = [line for line in run.stdout.splitlines() if line.startswith("REFUSED")]
    assert said and "disk is full" in said[0] and "steps [1] are unchanged" in said[0], run.stderr[-2000:]
    assert checkpoint.steps(tmp_path) == [1]
    checkpoint.clean(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["00000001"]
    assert same(checkpoint.restore(tmp_path, {"w": jnp.zeros(1000)}).tree, {"w": jnp.arange(1000.0)})


def test_an_exported_model_comes_back(tmp_path):
    params = {"block_0": {"q": {"w": jnp.arange(6.0).reshape(2, 3)}}, "ids": jnp.arange(3)}
    for dtype in (None, jnp.bfloat16, jnp.float16):
        folder = checkpoint.export(tmp_path / str(dtype), params, {"width": 3}, dtype, tokenizer=b"\0bytes")
        back = checkpoint.load_exported(folder)
        assert (back.config, back.tokenizer) == ({"width": 3}, b"\0bytes")
        stored = back.tensors["block_0/q/w"]
        assert (stored.dtype, stored.shape) == (dtype or jnp.float32, (2, 3))
        assert back.params["block_0"]["q"]["w"].dtype == stored.dtype and back.read("ids").dtype == np.int32
        again = checkpoint.load_exported(folder, jnp.float32)
        assert same(again.params, params) and again.read("block_0/q/w", slice(1, 2)).tolist() == [[3, 4, 5]]
        with pytest.raises(CheckpointError, match="has no array 'block_0/k/w'"):
            back.read("block_0/k/w")


def test_an_export_holds_one_array_at_a_time(tmp_path):
    million, on = 1_000_000, sharding.mesh(data=1, fsdp=4)
    split = sharding.shardings({"w": jnp.zeros((8, 4))}, ((r"w$", ("fsdp", None)),), on)["w"]
    params = {f"{i}": {"w": jax.device_put(jnp.full((million // 4, 4), float(i)), split)} for i in range(8)}
    jax.block_until_ready(params)
    tracemalloc.start()  # numpy tells it what it allocates
    folder = checkpoint.export(tmp_path / "m", params, {}, jnp.bfloat16)
    kept, most = tracemalloc.get_traced_memory()
    assert most < 4 * million * 2.5 and kept < million  # of 32 million: one as fp32 and as bfloat16
    tracemalloc.reset_peak()
    found = checkpoint.load_exported(folder)
    assert all((found.read(name) == int(name[0])).all() for name in found.tensors)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 2 * million * 2.5  # of 16 million


def test_arrays_named_inside_each_other_are_refused(tmp_path):
    folder = checkpoint.export(tmp_path / "m", {"w": jnp.ones(2)}, {})
    one = np.ones(1, np.float32)
    for names in (("a", "a/b"), ("a/b/c", "a/b"), ("a", "a/b/c")):
        tensors.write(
            folder / "params.safetensors",
            [tensors.LazyTensor(n, (1,), np.float32, lambda: one) for n in names],
        )
        manifest.write(folder)
        with pytest.raises(CheckpointError, match="params.safetensors: the array 'a/b.* inside another"):
            checkpoint.load_exported(folder).params  # noqa: B018
    with pytest.raises(ValueError, match="name of a tensor is 'a/b'"):
        checkpoint.export(tmp_path / "n", {"a": {"b": jnp.ones(2)}, "a/b": jnp.ones(2)}, {})


@pytest.mark.parametrize("harm", [missing, truncated, flipped])
def test_a_damaged_export_is_refused_by_name(tmp_path, harm):
    folder = checkpoint.export(tmp_path / "m", {"w": jnp.ones((40, 40))}, {}, tokenizer=b"abc")
    for path in files(folder):
        whole = path.read_bytes()
        harm(path)
        with pytest.raises(CheckpointError) as error:
            checkpoint.load_exported(folder)
        assert path.name == "manifest.json" or str(path) in str(error.value)
        path.write_bytes(whole)


def test_an_export_replaces_only_an_export_and_only_when_asked(tmp_path):
    folder = checkpoint.export(tmp_path / "m", {"w": jnp.ones(2)}, {})
    with pytest.raises(ValueError, match="overwrite=True"):
        checkpoint.export(folder, {"w": jnp.zeros(2)}, {})
    checkpoint.export(folder, {"w": jnp.zeros(2)}, {}, overwrite=True)
    assert not checkpoint.load_exported(folder).params["w"].any()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("...")
    with pytest.raises(ValueError, match="earlier export"):
        checkpoint.export(tmp_path / "mine", {"w": jnp.zeros(2)}, {}, overwrite=True)


KILLED = """
import os, signal, sys, threading, time, jax.numpy as jnp
from mercury_jax import checkpoint
saver = checkpoint.Saver(sys.argv[1], keep=3)
for step in range(1, 100):
    saver.save(step, {"w": jnp.full(300_000, float(step))}, {})
    print(step, flush=True)
"""


def test_being_killed_while_saving_leaves_whole_steps(tmp_path):
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
