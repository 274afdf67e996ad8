"""Saving the steps of a run: any pytree beside its configuration, with a checksum of every byte.

A step is a folder that appears complete or not at all:

    00000100/state/           the arrays, written by Orbax
             checkpoint.json  format, step, configuration, small state, names and shapes of the arrays
             manifest.json    size and SHA-256 of every file, written last, checked first

Orbax restores flipped bits as wrong numbers without an error; the manifest detects them. A step is written under
`00000100.tmp` and renamed when its manifest is complete, so a process that is killed leaves at most a folder that
`clean` removes. `restore.py` reads the steps.
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

from mercury_jax.checkpoint import manifest
from mercury_jax.checkpoint.manifest import CheckpointError
from mercury_jax.config import refuse
from mercury_jax.sharding import path_name

FORMAT = 1
STATE, ABOUT = "state", "checkpoint.json"
# How Orbax and the system say that the disk is full.
DISK_FULL = ("RESOURCE_EXHAUSTED", "OUT_OF_RANGE", "No space", "File too large")


class SaveFailed(CheckpointError):
    """A checkpoint could not be written; earlier ones are unchanged."""

    exit_code = 4


def steps(folder: str | Path) -> list[int]:
    """Lists the complete steps of a run, oldest first.

    Args:
        folder: The folder of the run; it need not exist.

    Returns:
        Step numbers.
    """
    folder = Path(folder)
    return sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit()) if folder.is_dir() else []


def latest(folder: str | Path) -> int | None:
    """Returns the newest complete step of a run, or None."""
    return max(steps(folder), default=None)


def path_of(folder: str | Path, step: int) -> Path:
    """Names the folder of a step.

    Args:
        folder: The folder of the run.
        step: The step's number.

    Returns:
        The step's folder, whether it exists or not.
    """
    return Path(folder) / f"{step:08d}"


def clean(folder: str | Path) -> list[str]:
    """Removes what interrupted saves and removals left behind.

    Only for a run that has started and not yet saved: a save that is being written would be removed, too.

    Args:
        folder: The folder of the run; it need not exist.

    Returns:
        Names of the removed folders.
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
    """Saves the steps of one run in the background, one at a time.

    An error of the background work is raised as `SaveFailed` by the next `save`, `check` or `wait`.

    Attributes:
        folder: The folder of the run.
        keep: How many of the newest steps remain.
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
        """Starts to save a step. Returns when the arrays are copied off the devices; they may be donated then.

        Args:
            step: Its number.
            tree: Pytree of arrays and typed PRNG keys.
            config: JSON-ready configuration.
            extra: JSON-ready small state, such as the position in the data.

        Raises:
            SaveFailed: This save could not start, or the one before it failed.
        """
        self.wait()
        arrays = flatten(tree)
        about = {
            "format": FORMAT,
            "step": step,
            "config": config,
            "extra": extra or {},
            "arrays": shapes(arrays),
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
        """Reports an error of the background work; never waits.

        Raises:
            SaveFailed: A save has failed since the last call.
        """
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def wait(self) -> None:
        """Returns when no process is saving any more; raises as `check`."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            if jax.process_count() > 1:
                multihost_utils.sync_global_devices("mercury_jax.checkpoint")
        self.check()

    def _begin(self, work: Path, about: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        import orbax.checkpoint as ocp  # takes 2 s to import, and sampling needs none of it

        if self._orbax is None:
            self._orbax = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(use_compression=False))
        if jax.process_index() == 0:
            if work.exists():
                shutil.rmtree(work)
            work.mkdir(parents=True)
            manifest.write_json(work / ABOUT, about)
        # Orbax synchronises all processes with process 0 before any of them writes.
        self._orbax.save(work / STATE, args=ocp.args.PyTreeSave(dict(arrays)))

    def _finish(self, step: int, work: Path) -> None:
        try:
            self._orbax.wait_until_finished()  # on process 0 this waits for the writes of all processes
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
        earlier = steps(self.folder)
        full = any(words in str(error) for words in DISK_FULL)
        return SaveFailed(
            f"step {step} could not be saved in {self.folder}"
            + (": the disk is full or a file-size limit is reached" if full else "")
            + (f"; steps {earlier} are unchanged" if earlier else "; no earlier step exists")
            + f". {type(error).__name__}: {str(error)[:300]}"
        )


def _remove(path: Path) -> None:
    """Deletes a step; it is renamed first, so that a process that is killed leaves nothing that looks complete."""
    if path.exists():
        doomed = path.with_name(path.name + ".old.tmp")
        os.rename(path, doomed)
        shutil.rmtree(doomed)


# --- pytrees as arrays by name


def flatten(tree: Any, abstract: bool = False) -> dict[str, Any]:
    """Flattens a pytree into arrays by name, such as "params/block_0/attention/q/w".

    Args:
        tree: Pytree of arrays. A typed PRNG key is replaced by its key data, which every version of JAX can read.
        abstract: Return `jax.ShapeDtypeStruct`s with the leaves' shardings instead of arrays.

    Returns:
        Leaves by name.
    """

    def plain(leaf: Any) -> Any:
        if not abstract:
            return jax.random.key_data(leaf) if is_key(leaf) else leaf
        like = jax.eval_shape(jax.random.key_data, leaf) if is_key(leaf) else leaf
        return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=getattr(leaf, "sharding", None))

    return {path_name(path): plain(leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of typed PRNG keys."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def shapes(arrays: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Returns [dtype, *shape] of each array by name, JSON-ready."""
    return {name: [str(x.dtype), *x.shape] for name, x in arrays.items()}
