"""A checkpoint's folder may come from an attacker: no file or link in it leads out of it."""

import hashlib
import json
import re
import sys

import jax.numpy as jnp
import pytest

from mercury_jax import checkpoint
from mercury_jax.checkpoint import CheckpointError


def listed(folder, name):
    """Let the manifest list a file, with its right size and sum."""
    path = folder / "manifest.json"
    about = json.loads(path.read_text())
    data = (folder / name).read_bytes()
    about["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    path.write_text(json.dumps(about))


def relinked(folder, name, to):
    (folder / name).rename(to)
    (folder / name).symlink_to(to)


def test_files_outside_of_a_checkpoints_folder_are_refused(tmp_path, monkeypatch):
    """By a name in the manifest, or by a link, whether the manifest knows it or not; the sums may all be right."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    for i, name in enumerate((str(secret), "../secret", "x/../../secret")):
        folder = checkpoint.export(tmp_path / f"m{i}", {"w": jnp.ones(2)}, {})
        (folder / "x").mkdir()
        listed(folder, name)
        with pytest.raises(
            CheckpointError, match=re.escape(repr(name)) + " leads to .*; allowed: a file of the"
        ):
            checkpoint.load_exported(folder)
    for i, name in enumerate(("params.safetensors", "config.json", "manifest.json")):
        folder = checkpoint.export(tmp_path / f"l{i}", {"w": jnp.ones(2)}, {})
        relinked(folder, name, tmp_path / f"outside{i}")
        with pytest.raises(CheckpointError, match=f"{name}' leads to .*outside{i}"):
            checkpoint.load_exported(folder)
    (folder := checkpoint.export(tmp_path / "t", {"w": jnp.ones(2)}, {})).joinpath(
        "tokenizer.model"
    ).symlink_to(secret)
    with pytest.raises(CheckpointError, match="tokenizer.model' leads to"):
        checkpoint.load_exported(folder)
    monkeypatch.setattr(
        sys.modules["mercury_jax.checkpoint.saver"],
        "_read_arrays",
        lambda *a: pytest.fail("Orbax was asked"),
    )
    saver = checkpoint.Saver(tmp_path / "run")
    saver.save(3, {"w": jnp.ones(2)}, {})
    saver.wait()
    (checkpoint.path_of(tmp_path / "run", 3) / "state" / "more").symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match="state/more' leads to"):
        checkpoint.restore(tmp_path / "run", {"w": jnp.ones(2)})


def test_a_link_within_a_checkpoint_is_followed(tmp_path):
    folder = checkpoint.export(tmp_path / "m", {"w": jnp.ones(2)}, {})
    relinked(folder, "params.safetensors", folder / "weights")
    (tmp_path / "alias").symlink_to(folder)
    for path in (folder, tmp_path / "alias"):
        assert checkpoint.load_exported(path).params["w"].tolist() == [1, 1]
    root = tmp_path / "models--org--name"  # as the hub's cache keeps it
    (root / "blobs").mkdir(parents=True)
    snapshot = checkpoint.export(root / "snapshots" / "0a1b", {"w": jnp.ones(2)}, {})
    relinked(snapshot, "params.safetensors", root / "blobs" / "hash")
    assert checkpoint.load_exported(snapshot).params["w"].tolist() == [1, 1]
