"""Reading the steps that `save.py` wrote: the checksums first, then the arrays into the structure of a target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils

from mercury_jax.checkpoint import manifest
from mercury_jax.checkpoint.manifest import CheckpointError
from mercury_jax.checkpoint.save import ABOUT, FORMAT, STATE, flatten, is_key, path_of, shapes, steps
from mercury_jax.config import refuse
from mercury_jax.sharding import path_name


@dataclass(frozen=True)
class Restored:
    """A step that was read: its arrays in the structure of the target, and what was saved beside them."""

    step: int
    tree: Any
    config: Mapping[str, Any]
    extra: Mapping[str, Any]


def restore(folder: str | Path, target: Any, step: int | None = None) -> Restored:
    """Reads a step into the structure, dtypes and shardings of `target`.

    Every file is checked against the manifest before Orbax opens any.

    Args:
        folder: The folder of the run.
        target: Pytree of arrays or `jax.ShapeDtypeStruct`s; a part of what was saved is enough.
        step: Default: the newest.

    Returns:
        The restored step.

    Raises:
        CheckpointError: The step does not exist or is damaged, or `target` has an array that was not saved or was
            saved with another dtype or shape.
    """
    path, about = inspect(folder, step)
    _verify_on_one_process(path)
    wanted = flatten(target, abstract=True)
    saved = about["arrays"]
    for name, shape in shapes(wanted).items():
        if name not in saved:
            raise CheckpointError(f"{path} has no array {name!r}: it was saved by another model or optimizer")
        if list(saved[name]) != shape:
            error = refuse(f"array {name}", saved[name], f"{shape}, as this model has it")
            raise CheckpointError(f"{path}: {error}")
    arrays = _read_arrays(path / STATE, wanted)

    def pick(path: Any, leaf: Any) -> Any:
        array = arrays[path_name(path)]
        if not is_key(leaf):
            return array
        # A ShapeDtypeStruct does not know the implementation of its keys: the default one then.
        return jax.random.wrap_key_data(
            array, impl=jax.random.key_impl(leaf) if isinstance(leaf, jax.Array) else None
        )

    tree = jax.tree_util.tree_map_with_path(pick, target)
    return Restored(about["step"], tree, about["config"], about["extra"])


def inspect(folder: str | Path, step: int | None = None) -> tuple[Path, dict[str, Any]]:
    """Reads the checkpoint.json of a step; no array is read.

    Args:
        folder: The folder of the run.
        step: Default: the newest.

    Returns:
        (path of the step, contents of its checkpoint.json).

    Raises:
        CheckpointError: There is no such step, its checkpoint.json is damaged, or its format is another version's.
    """
    have = steps(folder)
    step = max(have, default=None) if step is None else step
    if step is None or step not in have:
        allowed = f"one of {have} in {folder}" if have else f"none: {folder} has no checkpoint"
        raise CheckpointError(str(refuse("step", step, allowed)))
    path = path_of(folder, step)
    # This file alone first: its contents are used before the arrays are verified.
    manifest.verify(path, only=ABOUT)
    about = manifest.read_json(path / ABOUT)
    if about.get("format") != FORMAT:
        raise CheckpointError(
            f"{path}: {refuse('format', about.get('format'), f'{FORMAT}, by this version')}"
        )
    return path, about


def _verify_on_one_process(path: Path) -> None:
    """Verifies the checksums on process 0 only, because all processes see the same files."""
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
        others = [step for step in steps(path.parent) if path_of(path.parent, step) != path]
        hint = f". To continue from step {others[-1]} instead, move {path} away" if others else ""
        raise CheckpointError(f"{error}{hint}")


def _read_arrays(state: Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
    import orbax.checkpoint as ocp  # takes 2 s to import, and sampling needs none of it

    args = ocp.args.PyTreeRestore(
        dict(wanted),
        restore_args=ocp.checkpoint_utils.construct_restore_args(dict(wanted)),
        partial_restore=True,
    )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        return reader.restore(state.absolute(), args=args)
