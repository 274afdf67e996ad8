"""Saves and restores the steps of a run: any pytree with its configuration, with checksums of all files.

Each step is a folder, which appears only when it is complete:

    00000100/state/           the arrays, written by Orbax
             checkpoint.json  format, step, configuration, small state, names and shapes of the arrays
             manifest.json    size and SHA-256 of every file, written last, checked first

The manifest is needed because Orbax restores flipped bits as wrong numbers without an error. A step is written as
`00000100.tmp` and renamed when its manifest is complete; a killed process leaves at most a `.tmp` folder, which `clean`
removes. `restore` verifies the checksums first, and then reads the arrays into the structure of a target.
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
from mercury_jax.checkpoint.manifest import CheckpointError, SaveFailed, unfit
from mercury_jax.config import refuse
from mercury_jax.sharding import path_name

FORMAT = 1
STATE, ABOUT = "state", "checkpoint.json"
# Texts in the errors of Orbax and of the system for a full disk.
DISK_FULL = ("RESOURCE_EXHAUSTED", "OUT_OF_RANGE", "No space", "File too large")


def steps(folder: str | Path) -> list[int]:
    """Lists the complete steps of a run, oldest first."""
    folder = Path(folder)
    return sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit()) if folder.is_dir() else []


def latest(folder: str | Path) -> int | None:
    """Returns the newest complete step of a run, or None."""
    return max(steps(folder), default=None)


def path_of(folder: str | Path, step: int) -> Path:
    """Names the folder of a step."""
    return Path(folder) / f"{step:08d}"


def clean(folder: str | Path) -> list[str]:
    """Removes the temporary folders of interrupted saves and removals.

    Call it when a run starts, before its first save: it would also remove a save in progress.
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

    An error in the background is raised as `SaveFailed` by the next `save`, `check` or `wait`.

    Attributes:
        folder: The folder of the run.
        keep: Number of newest steps that are kept.
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
        """Starts to save a step, after waiting for the one before.

        Returns when the arrays are copied off the devices; from then on they may be donated.

        Args:
            tree: Pytree of arrays and typed PRNG keys.
        """
        self.wait()
        arrays = _flatten(tree)
        about = {
            "format": FORMAT, "step": step, "config": config, "extra": extra or {}, "arrays": _shapes(arrays)
        }  # fmt: skip
        work = self.folder / f"{step:08d}.tmp"
        try:
            import orbax.checkpoint as ocp  # takes 2 s to import, and sampling needs none of it

            if self._orbax is None:
                self._orbax = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(use_compression=False))
            if jax.process_index() == 0:
                shutil.rmtree(work, ignore_errors=True)
                work.mkdir(parents=True)
                manifest.write_json(work / ABOUT, about)
            # The folder exists on process 0 only; Orbax synchronises all processes before any of them writes.
            self._orbax.save(work / STATE, args=ocp.args.PyTreeSave(dict(arrays)))
        except Exception as error:
            raise self._failed(step, error) from error
        self._thread = threading.Thread(
            target=self._finish, args=(step, work), name=f"save-{step}", daemon=True
        )
        self._thread.start()

    def check(self) -> None:
        """Raises an error of the background work, if there is one. Does not wait."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wait(self) -> None:
        """Waits until no process is saving any more. All processes must call it."""
        if self._thread is not None:
            self.join()
            self._thread = None
            if jax.process_count() > 1:
                multihost_utils.sync_global_devices("mercury_jax.checkpoint")
        self.check()

    def join(self) -> None:
        """Waits until this process is not saving any more, without the others. For cleaning up after an error."""
        if self._thread is not None:
            self._thread.join()
        self.check()

    def _finish(self, step: int, work: Path) -> None:
        """The thread: waits for the arrays, writes the manifest, publishes the step, and removes old ones."""
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
        """Makes the error that the user sees, with the earlier steps that can still be used."""
        earlier = steps(self.folder)
        full = any(words in str(error) for words in DISK_FULL)
        return SaveFailed(
            f"step {step} could not be saved in {self.folder}"
            + (": the disk is full or a file-size limit is reached" if full else "")
            + (f"; steps {earlier} are unchanged" if earlier else "; no earlier step exists")
            + f". {type(error).__name__}: {str(error)[:300]}"
        )


def _remove(path: Path) -> None:
    """Deletes a step. It is renamed first, so that a killed process leaves no partly deleted step under its name."""
    if path.exists():
        doomed = path.with_name(path.name + ".old.tmp")
        os.rename(path, doomed)
        shutil.rmtree(doomed)


@dataclass(frozen=True)
class Restored:
    """A step that was read.

    Attributes:
        step: Number of the step.
        tree: The arrays, in the structure of the target.
        config: The configuration that was saved with them.
        extra: The small state that was saved with them.
    """

    step: int
    tree: Any
    config: Mapping[str, Any]
    extra: Mapping[str, Any]


def restore(folder: str | Path, target: Any, step: int | None = None) -> Restored:
    """Reads a step into the structure, dtypes and shardings of `target`.

    Every file is verified against the manifest before Orbax opens any of them.

    Args:
        target: Pytree of arrays or `jax.ShapeDtypeStruct`s; a part of what was saved is enough.
    """
    path, about = inspect(folder, step)
    # All processes see the same files, so only process 0 verifies the checksums, and broadcasts the result.
    error = None
    if jax.process_index() == 0:
        try:
            manifest.verify(path)
        except CheckpointError as found:
            error = found
    if jax.process_count() > 1:
        bad = multihost_utils.broadcast_one_to_all(jnp.int32(error is not None))
        if int(bad) and error is None:
            error = CheckpointError(f"{path} is damaged; process 0 reports how")
    if error is not None:
        raise _with_hint(error, folder, path)
    wanted = _flatten(target, abstract=True)
    saved = about["arrays"]
    for name, shape in _shapes(wanted).items():
        if name not in saved:
            raise CheckpointError(f"{path} has no array {name!r}: it was saved by another model or optimizer")
        if list(saved[name]) != shape:
            raise unfit(f"array {name}", saved[name], f"{shape}, as this model has it", path)
    arrays = _read_arrays(path / STATE, wanted)

    leaves, structure = jax.tree_util.tree_flatten_with_path(target)
    restored = []
    for place, leaf in leaves:
        array = arrays[path_name(place)]
        if _is_key(leaf):
            # A ShapeDtypeStruct does not have the implementation of its keys; assume the default one.
            kind = jax.random.key_impl(leaf) if isinstance(leaf, jax.Array) else None
            array = jax.random.wrap_key_data(array, impl=kind)
        restored.append(array)
    return Restored(about["step"], structure.unflatten(restored), about["config"], about["extra"])


def inspect(folder: str | Path, step: int | None = None) -> tuple[Path, dict[str, Any]]:
    """Reads the checkpoint.json of a step, without its arrays.

    Returns:
        (path of the step, contents of its checkpoint.json).
    """
    have = steps(folder)
    step = max(have, default=None) if step is None else step
    if step is None or step not in have:
        allowed = f"one of {have} in {folder}" if have else f"none: {folder} has no checkpoint"
        raise unfit("step", step, allowed)
    path = path_of(folder, step)
    # Verify this file first, because its contents are used before the arrays are verified.
    try:
        manifest.verify(path, only=ABOUT)
        about = manifest.read_json(path / ABOUT)
    except CheckpointError as error:
        raise _with_hint(error, folder, path) from None
    if about.get("format") != FORMAT:
        raise unfit("format", about.get("format"), f"{FORMAT}, by this version", path)
    return path, about


def _with_hint(error: CheckpointError, folder: str | Path, path: Path) -> CheckpointError:
    """Says how to continue from an earlier step than the damaged one at `path`, if there is one."""
    others = [other for other in steps(folder) if path_of(folder, other) < path]
    hint = f". To continue from step {others[-1]} instead, move {path} away" if others else ""
    return CheckpointError(f"{error}{hint}")


def _read_arrays(state: Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
    import orbax.checkpoint as ocp  # takes 2 s to import, and sampling needs none of it

    shardings = ocp.checkpoint_utils.construct_restore_args(dict(wanted))
    args = ocp.args.PyTreeRestore(dict(wanted), restore_args=shardings, partial_restore=True)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        return reader.restore(state.absolute(), args=args)


# --- pytrees as arrays by name


def _flatten(tree: Any, abstract: bool = False) -> dict[str, Any]:
    """Flattens a pytree into arrays by name, such as "params/block_0/attention/q/w".

    Args:
        tree: Pytree of arrays. Typed PRNG keys become their key data, which does not depend on the version of JAX.
    """

    found: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        plain = leaf
        if _is_key(leaf):
            plain = jax.eval_shape(jax.random.key_data, leaf) if abstract else jax.random.key_data(leaf)
        if abstract:
            sharding = getattr(leaf, "sharding", None)
            plain = jax.ShapeDtypeStruct(plain.shape, plain.dtype, sharding=sharding)
        found[path_name(path)] = plain
    return found


def _is_key(leaf: Any) -> bool:
    """Says whether a leaf is an array of typed PRNG keys."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _shapes(arrays: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Returns [dtype, *shape] of each array by name, JSON-ready."""
    return {name: [str(x.dtype), *x.shape] for name, x in arrays.items()}
