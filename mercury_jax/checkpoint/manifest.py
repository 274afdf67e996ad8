"""A manifest of a folder: size and SHA-256 of every file. Written last, verified first.

A stranger may have written folder and manifest alike: what leads out of the folder, by a name or by a link, is
refused.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NAME = "manifest.json"
FORMAT = 1


class CheckpointError(ValueError):
    """A checkpoint or a saved model is incomplete, damaged, or not the one that was asked for."""


def write(folder: Path) -> None:
    """Sum up every file below `folder` and put the manifest there, on the disk for good."""
    files = {str(p.relative_to(folder)): _entry(p) for p in _files(folder)}
    write_json(folder / NAME, {"format": FORMAT, "files": files})
    sync_folder(folder)


def verify(folder: str | Path, only: str | None = None) -> None:
    """Raise CheckpointError, naming the file, unless all is as the manifest says.

    only: check this one file. Files that the manifest does not know are nobody's business.
    """
    folder = Path(folder)
    files = _read(folder)
    links = (str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_symlink())
    for name in (*files, *links):
        _check_inside(folder, name)
    if only is not None and only not in files:
        raise CheckpointError(f"{folder / NAME} does not list {only}: the folder is damaged or not ours")
    for name in files if only is None else [only]:
        _check(folder / name, files[name])


def places(root: Path) -> list[Path]:
    """Where the files of a folder may lie: in it, or, of a snapshot in Hugging Face's cache, among its blobs.

    root: resolved. The blobs are `models--org--name/blobs`, if it is, or lies in, `models--org--name/snapshots/x`.
    """
    for place in (root, *root.parents):
        repository = place.parent.parent
        if place.parent.name == "snapshots" and repository.name.startswith("models--"):
            return [root, repository / "blobs"]
    return [root]


def _check_inside(folder: Path, name: str) -> None:
    root, path = folder.resolve(), folder / name
    try:
        real = path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop was a RuntimeError until Python 3.13; a NUL
        raise CheckpointError(f"{folder}: {name[:200]!r} leads nowhere: {error}") from None
    if not any(real.is_relative_to(place) for place in places(root)):
        raise CheckpointError(
            f"{folder}: {name[:200]!r} leads to {str(real)!r}; allowed: a file of the folder"
        )


def _read(folder: Path) -> Mapping[str, Any]:
    path = folder / NAME
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: the folder is incomplete or not a checkpoint")
    about = read_json(path)
    if about.get("format") != FORMAT or not isinstance(about.get("files"), dict):
        raise CheckpointError(
            f"{path}: format is {about.get('format')!r}; allowed: {FORMAT}, by this version"
        )
    return about["files"]


def _check(path: Path, entry: Any) -> None:
    size, digest = (entry.get("size"), entry.get("sha256")) if isinstance(entry, dict) else (None, None)
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: the manifest lists it with {size} bytes")
    actual = path.stat().st_size
    if actual != size:
        how = "truncated" if isinstance(size, int) and actual < size else "of the wrong size"
        raise CheckpointError(f"{path} is {how}: {actual} bytes, the manifest says {size}")
    if sha256(path) != digest:
        raise CheckpointError(
            f"{path} is damaged: its SHA-256 is not the manifest's; its bytes changed after saving"
        )


def sha256(path: Path) -> str:
    """The file's SHA-256, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """The object that `path` holds; a file that is no JSON object is refused as damaged."""
    try:
        about = json.loads(path.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: not JSON ({error})") from None
    if not isinstance(about, dict):
        raise CheckpointError(f"{path} is damaged: not a JSON object")
    return about


def write_json(path: Path, about: Mapping[str, Any]) -> None:
    """Write and flush to the disk: a rename must never overtake the contents."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(about, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries, so that a rename in it survives a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / NAME)


def _entry(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return {"size": path.stat().st_size, "sha256": sha256(path)}
