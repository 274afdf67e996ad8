"""Checkpoints: any pytree beside its configuration, with a checksum of every byte.

A step is a folder that appears whole or not at all:

    00000100/state/           the arrays, written by Orbax
             checkpoint.json  format, step, configuration, small state, names and shapes of the arrays
             manifest.json    size and SHA-256 of every file, written last, checked first

Orbax restores flipped bits as silently wrong numbers; the manifest is what notices them. A step
is written under `00000100.tmp` and renamed when its manifest stands, so a process that is killed
leaves at most a folder that `clean` removes.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils

from mercury_jax.checkpoint import arrays as arrays_of, manifest
from mercury_jax.checkpoint.manifest import CheckpointError
from mercury_jax.config import refuse

FORMAT = 1
STATE, ABOUT = "state", "checkpoint.json"


class SaveFailed(CheckpointError):
    """A checkpoint could not be written; the ones before it stand as they were."""

    exit_code = 4


@dataclass(frozen=True)
class Restored:
    """A step read back: the arrays in the target's structure, and what was saved beside them."""

    step: int
    tree: Any
    config: Mapping[str, Any]
    extra: Mapping[str, Any]


def steps(folder: str | Path) -> list[int]:
    """The steps that `folder` holds, oldest first. Unfinished ones do not count."""
    folder = Path(folder)
    return sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit()) if folder.is_dir() else []


def latest(folder: str | Path) -> int | None:
    """The newest step, or None."""
    return max(steps(folder), default=None)


def path_of(folder: str | Path, step: int) -> Path:
    return Path(folder) / f"{step:08d}"


def clean(folder: str | Path) -> list[str]:
    """Remove what interrupted saves and removals left behind; the names of what went.

    Only for a run that has started and not yet saved: it does not ask who is writing.
    """
    folder = Path(folder)
    if jax.process_index() or not folder.is_dir():
        return []
    stale = sorted(p for p in folder.iterdir() if p.is_dir() and p.name.endswith(".tmp"))
    for path in stale:
        shutil.rmtree(path)
    return [p.name for p in stale]


@dataclass
class Saver:
    """Saves steps of one run in the background, one at a time, and keeps the newest `keep`.

    `save` returns when the arrays are copied off the devices (they may be donated then). An error
    of the background work is raised by the next `save`, `check` or `wait` as `SaveFailed`.
    """

    folder: Path
    keep: int = 2
    _orbax: Any = field(default=None, repr=False)
    _thread: threading.Thread | None = field(default=None, repr=False)
    _error: BaseException | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise refuse("keep", self.keep, "1 or more")
        self.folder = Path(self.folder).absolute()

    def save(
        self, step: int, tree: Any, config: Mapping[str, Any], extra: Mapping[str, Any] | None = None
    ) -> None:
        """Start to save `tree` as `step`, beside JSON-ready `config` and `extra`."""
        self.wait()
        arrays = arrays_of.flatten(tree)
        about = {
            "format": FORMAT,
            "step": step,
            "config": config,
            "extra": extra or {},
            "arrays": arrays_of.shapes(arrays),
        }
        work = self.folder / f"{step:08d}.tmp"
        try:
            self._begin(work, about, arrays)
        except Exception as error:
            raise self._failed(step, error) from error
        self._thread = threading.Thread(
            target=self._finish, args=(step, work), name=f"save-{step}", daemon=True
        )
        self._thread.start()

    def check(self) -> None:
        """Raise if a save in the background has failed; never waits."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def wait(self) -> None:
        """Return when nothing is being saved any more, on any process."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            if jax.process_count() > 1:
                multihost_utils.sync_global_devices("mercury_jax.checkpoint")
        self.check()

    def _begin(self, work: Path, about: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        import orbax.checkpoint as ocp

        if self._orbax is None:
            self._orbax = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(use_compression=False))
        if jax.process_index() == 0:
            if work.exists():
                shutil.rmtree(work)
            work.mkdir(parents=True)
            manifest.write_json(work / ABOUT, about)
        # The other processes meet process 0 inside Orbax, before any of them writes.
        self._orbax.save(work / STATE, args=ocp.args.PyTreeSave(dict(arrays)))

    def _finish(self, step: int, work: Path) -> None:
        try:
            self._orbax.wait_until_finished()  # on process 0 that means: all processes have written
            if jax.process_index() == 0:
                manifest.write(work)
                final = path_of(self.folder, step)
                _remove(final)
                work.rename(final)
                manifest.sync_folder(self.folder)
                for old in steps(self.folder)[: -self.keep]:
                    _remove(path_of(self.folder, old))
        except Exception as error:
            self._error = self._failed(step, error)
            self._error.__cause__ = error

    def _failed(self, step: int, error: Exception) -> SaveFailed:
        standing = steps(self.folder)
        full = any(
            s in str(error) for s in ("RESOURCE_EXHAUSTED", "OUT_OF_RANGE", "No space", "File too large")
        )
        return SaveFailed(
            f"step {step} could not be saved in {self.folder}"
            + (": the disk is full or a file-size limit is reached" if full else "")
            + (f"; steps {standing} stand" if standing else "; no earlier step exists")
            + f". {type(error).__name__}: {str(error)[:300]}"
        )


def restore(folder: str | Path, target: Any, step: int | None = None) -> Restored:
    """Read `step` (the newest by default) into the structure, dtypes and shardings of `target`.

    target: a tree of arrays or ShapeDtypeStructs; it may be a part of what was saved. Every file is
    checked against the manifest before Orbax opens any. Raises CheckpointError in words.
    """
    path, about = inspect(folder, step)
    _verify_once(path)
    wanted = arrays_of.flatten(target, abstract=True)
    arrays_of.compare(path, about["arrays"], arrays_of.shapes(wanted))
    arrays = _read(path / STATE, wanted)
    return Restored(about["step"], arrays_of.unflatten(target, arrays), about["config"], about["extra"])


def inspect(folder: str | Path, step: int | None = None) -> tuple[Path, dict[str, Any]]:
    """(path, what checkpoint.json says) of a step, its format checked; no array is read."""
    have = steps(folder)
    step = max(have, default=None) if step is None else step
    if step is None or step not in have:
        raise CheckpointError(
            str(
                refuse(
                    "step",
                    step,
                    f"one of {have} in {folder}" if have else f"none: {folder} has no checkpoint",
                )
            )
        )
    path = path_of(folder, step)
    # Checked alone, so that a damaged file is named before its contents are trusted.
    manifest.verify(path, only=ABOUT)
    about = manifest.read_json(path / ABOUT)
    if about.get("format") != FORMAT:
        raise CheckpointError(
            f"{path}: " + str(refuse("format", about.get("format"), f"{FORMAT}, by this version"))
        )
    return path, about


def _verify_once(path: Path) -> None:
    """Checksums by process 0 alone: the files are the same for all."""
    error = None
    if jax.process_index() == 0:
        try:
            manifest.verify(path)
        except CheckpointError as found:
            error = found
    if jax.process_count() > 1:
        bad = multihost_utils.broadcast_one_to_all(jnp.int32(error is not None))
        if int(bad) and error is None:
            error = CheckpointError(f"{path} is damaged; process 0 says how")
    if error is not None:
        others = [step for step in steps(path.parent) if path_of(path.parent, step) != path]
        hint = f". To go on from step {others[-1]} instead, move {path} away" if others else ""
        raise CheckpointError(f"{error}{hint}")


def _read(state: Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
    import orbax.checkpoint as ocp

    args = ocp.args.PyTreeRestore(
        dict(wanted),
        restore_args=ocp.checkpoint_utils.construct_restore_args(dict(wanted)),
        partial_restore=True,
    )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        return reader.restore(state.absolute(), args=args)


def _remove(path: Path) -> None:
    """Delete a step so that being killed half-way leaves nothing that looks whole."""
    if path.exists():
        doomed = path.with_name(path.name + ".old.tmp")
        os.rename(path, doomed)
        shutil.rmtree(doomed)
