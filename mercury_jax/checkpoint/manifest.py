"""The manifest of a folder: size and SHA-256 of every file, written last and verified first.

A downloaded folder and its manifest may both come from an attacker. A file name or a symbolic link that leads out of
the folder is therefore refused, even if the checksums match.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mercury_jax.config import refuse

NAME = "manifest.json"
FORMAT = 1


class CheckpointError(ValueError):
    """A checkpoint or a saved model is incomplete, damaged, or does not match the model that it is read into."""


class SaveFailed(CheckpointError):
    """A checkpoint or a model could not be written; earlier ones are unchanged."""

    exit_code = 4


def unfit(field: str, value: object, allowed: str, where: object = None) -> CheckpointError:
    """Makes the error for a value in a file, in the words of `config.refuse`; `where`: the file."""
    return CheckpointError(("" if where is None else f"{where}: ") + str(refuse(field, value, allowed)))


def write(folder: Path) -> None:
    """Writes the manifest of all files below `folder` and flushes them to the disk."""
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / NAME):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        files[str(path.relative_to(folder))] = {"size": path.stat().st_size, "sha256": sha256(path)}
    write_json(folder / NAME, {"format": FORMAT, "files": files})
    sync_folder(folder)


def verify(folder: str | Path, only: str | None = None) -> None:
    """Checks the files of a folder against its manifest. Files that the manifest does not list are ignored."""
    folder = Path(folder)
    path = folder / NAME
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: the folder is incomplete or not a checkpoint")
    about = read_json(path)
    files = about.get("files")
    if about.get("format") != FORMAT or not isinstance(files, dict):
        raise unfit("format", about.get("format"), f"{FORMAT}, by this version", path)
    # Check where all names and links lead before any file is opened.
    roots = allowed_roots(folder.resolve())
    for name in (*files, *(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_symlink())):
        try:
            real = (folder / name).resolve()
        except (OSError, RuntimeError, ValueError) as error:
            # A cycle of links (a RuntimeError before Python 3.13), or a name with a NUL byte.
            raise CheckpointError(f"{folder}: {name[:200]!r} leads nowhere: {error}") from None
        if not any(real.is_relative_to(place) for place in roots):
            where = f"{folder}: {name[:200]!r} leads to {str(real)!r}"
            raise CheckpointError(f"{where}; allowed: a file of the folder")
    if only is not None and only not in files:
        raise CheckpointError(f"{path} does not list {only}: the folder is damaged or not ours")
    for name in files if only is None else [only]:
        file, entry = folder / name, files[name]
        size, digest = (entry.get("size"), entry.get("sha256")) if isinstance(entry, dict) else (None, None)
        if not file.is_file():
            raise CheckpointError(f"{file} is missing: the manifest lists it with {size} bytes")
        actual = file.stat().st_size
        if actual != size:
            how = "truncated" if isinstance(size, int) and actual < size else "of the wrong size"
            raise CheckpointError(f"{file} is {how}: {actual} bytes, the manifest says {size}")
        if sha256(file) != digest:
            raise CheckpointError(
                f"{file} is damaged: its SHA-256 differs from the manifest; it changed after saving"
            )


def allowed_roots(root: Path) -> list[Path]:
    """Lists the folders in which the files of a checkpoint folder may lie.

    Returns:
        The folder itself. For a snapshot in the cache of `huggingface_hub` (`models--org--name/snapshots/x`, or a
        folder in it) also `blobs` of the repository, because the files of a snapshot are links into it.
    """
    for place in (root, *root.parents):
        repository = place.parent.parent
        if place.parent.name == "snapshots" and repository.name.startswith("models--"):
            return [root, repository / "blobs"]
    return [root]


def sha256(path: Path) -> str:
    """Returns the file's SHA-256 in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object."""
    try:
        about = json.loads(path.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: not JSON ({error})") from None
    if not isinstance(about, dict):
        raise CheckpointError(f"{path} is damaged: not a JSON object")
    return about


def write_json(path: Path, about: Mapping[str, Any]) -> None:
    """Writes a JSON object and flushes it to the disk."""
    write_synced(path, json.dumps(about, indent=1).encode())


def write_synced(path: Path, data: bytes) -> None:
    """Writes a file and flushes it to the disk, so that a later rename cannot become durable before the contents."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace(path: Path, data: bytes) -> None:
    """Replaces a file atomically: a killed process leaves either the old or the new file."""
    work = path.with_name(path.name + ".tmp")
    write_synced(work, data)
    work.replace(path)


@contextlib.contextmanager
def complete_folder(folder: Path) -> Iterator[Path]:
    """Yields an empty folder to write, which takes the place of `folder` when it is complete.

    An earlier folder is moved aside first and removed last, so that a complete one always exists.
    """
    work, old = (folder.with_name(folder.name + end) for end in (".tmp", ".old.tmp"))
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        yield work
        sync_folder(work)
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        work.rename(folder)
        sync_folder(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def sync_folder(folder: Path) -> None:
    """Flushes the directory entries of a folder, so that a rename in it survives a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
