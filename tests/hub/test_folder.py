"""Checkpoint folders: tensors are found in any number of files, and nothing outside of the folder is read."""

import json
import os
import sys

import numpy as np
import pytest
from safetensors import safe_open

from mercury_jax.checkpoint import CheckpointError, tensors
from mercury_jax.hub import folder as folders
from mercury_jax.hub.export import SHARD, write_folder

ARRAYS = {f"model.layers.{i}.w": np.arange(12, dtype=np.float32).reshape(4, 3) + i for i in range(5)}
CONFIG = {"architectures": ["LlamaForCausalLM"], "rope_theta": 1e4}


def sources(arrays=ARRAYS):
    return [tensors.LazyTensor(name, a.shape, a.dtype, lambda a=a: a) for name, a in arrays.items()]


def whole(folder, shard=SHARD):
    return write_folder(folder, CONFIG, sources(), shard=shard)


@pytest.fixture
def sharded(tmp_path):
    """Five tensors of 48 bytes in three folders."""
    return whole(tmp_path / "model", shard=100)


def index(folder, **change):
    """Rewrite entries of the index's weight_map; `...` removes one."""
    path = folder / folders.INDEX
    about = json.loads(path.read_text())
    where = about["weight_map"] | {k.replace("_", ".", 3): v for k, v in change.items()}
    path.write_text(json.dumps(about | {"weight_map": {k: v for k, v in where.items() if v is not ...}}))


def check(folder):
    found = folders.scan(folder)
    assert found.config == CONFIG and found.tensors.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(found.read(name), array)
        np.testing.assert_array_equal(found.read(name, slice(1, 3)), array[1:3])


@pytest.mark.parametrize(
    "shard, names",
    [(SHARD, ["model.safetensors"]), (5 * 48, ["model.safetensors"]),
     (100, [*(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)), "model.safetensors.index.json"]),
     (1, [*(f"model-0000{i}-of-00005.safetensors" for i in range(1, 6)), "model.safetensors.index.json"])],
)  # fmt: skip
def test_a_written_folder_is_read_back_from_any_number_of_files(tmp_path, shard, names):
    folder = whole(tmp_path / "model", shard)
    assert sorted(os.listdir(folder)) == ["config.json", *names] and os.listdir(tmp_path) == ["model"]
    check(folder)


def test_the_index_equals_that_of_transformers(sharded):
    about = json.loads((sharded / folders.INDEX).read_text())
    assert about["metadata"] == {"total_size": 5 * 48, "total_parameters": 60}
    assert about["weight_map"] == {
        name: f"model-0000{1 + i // 2}-of-00003.safetensors" for i, name in enumerate(ARRAYS)
    }
    assert safe_open(sharded / "model-00003-of-00003.safetensors", "numpy").metadata() == {"format": "pt"}


def test_a_folder_is_written_completely_or_not_at_all(tmp_path):
    lies = [*sources(), tensors.LazyTensor("last", (2,), np.float32, lambda: np.ones(3, np.float32))]
    twice = [*sources(), *sources()]
    for bad, words in ((lies, "tensor 'last'"), (twice, "name of a tensor is 'model.layers.0.w'")):
        for shard in (SHARD, 100):
            with pytest.raises(ValueError, match=words):
                write_folder(tmp_path / "model", CONFIG, bad, shard=shard)
            assert os.listdir(tmp_path) == []
    folder = write_folder(tmp_path / "model", CONFIG, sources(), extra={"tokenizer.json": b"{}"})
    assert folders.read_json(folder, "tokenizer.json") == {}
    with pytest.raises(ValueError, match="folder is .*model'; allowed: a new or empty folder"):
        whole(folder)


def test_code_that_a_config_names_is_noted_and_not_run(tmp_path):
    folder = write_folder(
        tmp_path / "m",
        CONFIG | {"auto_map": {"AutoModel": "evil.Model"}},
        sources(),
        extra={"evil.py": b"raise SystemExit('executed')"},
    )
    (note,) = folders.scan(folder).notes
    assert "evil.Model" in note and "ignored" in note and "evil" not in sys.modules
    assert folders.scan(whole(tmp_path / "plain")).notes == []


OUTSIDE = [
    "../secret.safetensors", "/etc/passwd", "..\\secret.safetensors", "sub/a.safetensors", "a\0.safetensors",
]  # fmt: skip
OUTSIDE += ["..", "", "config.json", ".safetensors", 3, None, ["model.safetensors"], "C:a.safetensors"]


@pytest.mark.parametrize("name", OUTSIDE, ids=repr)
def test_an_index_may_only_name_files_of_its_folder(sharded, name):
    (sharded.parent / "secret.safetensors").write_bytes(b"")
    index(sharded, model_layers_1_w=name)
    with pytest.raises(
        CheckpointError, match=r"file of tensor 'model.layers.1.w' is .*; allowed: the bare name"
    ):
        folders.scan(sharded)


def test_an_index_that_contradicts_its_files_is_refused(sharded):
    last = "model-00003-of-00003.safetensors"
    index(sharded, model_layers_9_w=last)
    with pytest.raises(CheckpointError, match=last + " has no tensor 'model.layers.9.w'"):
        folders.scan(sharded)
    index(sharded, model_layers_9_w=..., model_layers_0_w=last)
    with pytest.raises(
        CheckpointError, match=r"tensor is 'model.layers.0.w'; allowed: this one in .*00003-of"
    ):
        folders.scan(sharded)
    index(sharded, model_layers_0_w="model-00001-of-00003.safetensors", model_layers_8_w="none.safetensors")
    with pytest.raises(
        CheckpointError, match="none.safetensors is missing: model.safetensors.index.json names it"
    ):
        folders.scan(sharded)
    index(sharded, model_layers_8_w=...)
    tensors.write(sharded / last, sources({k: ARRAYS[k] for k in ("model.layers.4.w", "model.layers.1.w")}))
    with pytest.raises(CheckpointError, match=r"tensor is 'model.layers.1.w'.*"):
        folders.scan(sharded)
    for broken in ('{"weight_map": []}', "{}", "[]", '{"weight_map": {"a": 1, "a": 2}}', "{", '{"a": NaN}'):
        (sharded / folders.INDEX).write_text(broken)
        with pytest.raises(CheckpointError, match="index.json"):
            folders.scan(sharded)


def test_a_tensor_in_two_files_is_refused_even_if_the_index_omits_it(sharded):
    index(sharded, model_layers_1_w=...)
    last = sharded / "model-00003-of-00003.safetensors"
    tensors.write(last, sources({k: ARRAYS[k] for k in ("model.layers.4.w", "model.layers.1.w")}))
    with pytest.raises(CheckpointError, match="tensor is 'model.layers.1.w'; allowed: each tensor once"):
        folders.scan(sharded)


def linked(folder, name, to):
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(to)


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", folders.INDEX, "model-00002-of-00003.safetensors"]
)
@pytest.mark.parametrize("how", ["../other/{}", "/{}", "hop"])
def test_a_symbolic_link_out_of_the_folder_is_refused(tmp_path, name, how):
    folder, other = (whole(tmp_path / n, 100 if "-" in name or "index" in name else SHARD) for n in "fo")
    other.rename(tmp_path / "other")
    (folder / "hop").symlink_to(tmp_path / "other" / name)  # a link to a link is no way out
    linked(folder, name, how.format(name if ".." in how else str(tmp_path / "other" / name)[1:]))
    with pytest.raises(
        CheckpointError, match=f"{name} is a symbolic link to '.*other/.*'; allowed: a file of the"
    ):
        folders.scan(folder)


def test_a_link_within_the_folder_or_to_the_folder_is_followed(tmp_path):
    folder = whole(tmp_path / "model")
    (folder / folders.SINGLE).rename(folder / "weights")
    linked(folder, folders.SINGLE, "weights")
    (tmp_path / "alias").symlink_to(folder)
    check(folder)
    check(tmp_path / "alias")


def test_a_link_that_leads_nowhere_is_refused(tmp_path):
    folder = whole(tmp_path / "model")
    for to in (folders.SINGLE, "gone", "a" * 300):  # itself; nothing; a name too long
        linked(folder, folders.SINGLE, to)
        with pytest.raises(CheckpointError, match="model.safetensors is a symbolic link that leads nowhere"):
            folders.scan(folder)
    (folder / folders.SINGLE).unlink()
    os.mkfifo(folder / folders.SINGLE)
    with pytest.raises(CheckpointError, match="model.safetensors is no file"):
        folders.scan(folder)


def cached(root, shard=SHARD, sub=""):
    """A folder moved into Hugging Face's cache: links in snapshots/, contents in blobs/."""
    blobs, snapshot = root / "blobs", root / "snapshots" / "0a1b2c" / sub
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for i, path in enumerate(sorted(whole(root / "plain", shard).iterdir())):
        path.rename(blobs / f"hash{i}")
        (snapshot / path.name).symlink_to(os.path.relpath(blobs / f"hash{i}", snapshot))
    return snapshot


@pytest.mark.parametrize("sub", ["", "text"])
def test_a_snapshot_of_hugging_faces_cache_is_read(tmp_path, sub):
    check(cached(tmp_path / "models--org--name", 100, sub))
    (tmp_path / "cache").symlink_to(tmp_path / "models--org--name")
    check(tmp_path / "cache" / "snapshots" / "0a1b2c" / sub)


def test_a_snapshot_may_only_link_to_its_own_blobs(tmp_path):
    other = cached(tmp_path / "models--org--other")
    snapshot = cached(tmp_path / "models--org--name")
    secret = tmp_path / "models--org--name" / "refs"
    secret.write_bytes((snapshot / folders.SINGLE).read_bytes())
    for out in (other / folders.SINGLE, secret, tmp_path / "models--org--other" / "blobs" / "hash1"):
        linked(snapshot, folders.SINGLE, out)
        with pytest.raises(CheckpointError, match="model.safetensors is a symbolic link to"):
            folders.scan(snapshot)


def test_links_to_blobs_are_only_allowed_in_the_snapshots_of_a_repository(tmp_path):
    def copied(snapshot):
        snapshot.parent.rename(snapshot.parents[1] / "copies")
        return snapshot.parents[1] / "copies" / snapshot.name

    def relinked(snapshot):
        blobs = snapshot.parents[1] / "blobs"
        blobs.rename(tmp_path / "outside")
        blobs.symlink_to(tmp_path / "outside")
        return snapshot

    for root, move in (
        ("elsewhere", None), ("models--a--b/elsewhere", None), ("models--a--c", copied), ("models--a--d", relinked),
    ):  # fmt: skip
        snapshot = cached(tmp_path / root)
        with pytest.raises(CheckpointError, match="config.json is a symbolic link to"):
            folders.scan(snapshot if move is None else move(snapshot))


def test_pickles_and_empty_folders_are_refused(tmp_path):
    folder = whole(tmp_path / "model")
    (folder / folders.SINGLE).unlink()
    with pytest.raises(CheckpointError, match="model has no weights; allowed: model.safetensors, or"):
        folders.scan(folder)
    (folder / "weights.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="it has weights.safetensors"):
        folders.scan(folder)
    for name in ("pytorch_model.bin", "a.pt", "b.PTH", "c.ckpt"):
        (folder / name).write_bytes(b"\x80\x02")
        with pytest.raises(CheckpointError, match=f"pickle files only .*{name}.*convert to safetensors"):
            folders.scan(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match="config.json is missing"):
        folders.scan(folder)
    with pytest.raises(CheckpointError, match="this one does not exist"):
        folders.scan(tmp_path / "nothing")


@pytest.mark.parametrize(
    "text, words",
    [(b"[1]", r"its value is \[1\]; allowed: a JSON object"), (b"\xff{}", "not readable as JSON"),
     (b'{"a": ' * 100_000, "nested too deeply"), (b'{"a": 1, "a": 2}', "a key stands twice"),
     (b'{"a": NaN}', "NaN is no JSON"), (b'{"a": "\\ud800"}', "surrogates"),
     (b"9" * 5000, "not readable as JSON"), (b" " * 1001, "size of the file is 1001; allowed: 1000 bytes")],
    ids=range(8),
)  # fmt: skip
def test_a_config_that_is_not_a_strict_json_object_is_refused(tmp_path, text, words, monkeypatch):
    folder = whole(tmp_path / "model")
    (folder / "config.json").write_bytes(text)
    if len(text) < 5000:
        monkeypatch.setattr(folders, "MAX_JSON", 1000)
    with pytest.raises(CheckpointError, match="config.json.*" + words):
        folders.scan(folder)


def test_a_shard_with_a_malformed_header_is_refused_by_name(sharded):
    path = sharded / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="00002-of-00003.safetensors is no valid safetensors file"):
        folders.scan(sharded)
