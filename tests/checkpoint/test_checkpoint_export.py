"""Exported models: they are read back, one array at a time, and damage is named."""

import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mercury_jax import checkpoint, sharding
from mercury_jax.checkpoint import CheckpointError, manifest, tensors
from tests.checkpoint.test_saver import files, flipped, missing, same, truncated


def test_an_exported_model_is_read_back(tmp_path):
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


def test_an_export_keeps_one_array_in_memory_at_a_time(tmp_path):
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
