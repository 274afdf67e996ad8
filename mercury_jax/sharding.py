"""One mesh for everything, and path rules that say how each array of a tree lies on it.

The axes are always the same four, so that a recipe that runs on one device runs on many hosts by
numbers alone: `data` and `fsdp` split the rows of a batch, `fsdp` also splits parameters,
`tensor` splits heads and hidden units, `expert` splits experts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from mercury_jax.config import refuse

AXES = ("data", "fsdp", "tensor", "expert")
ROWS = ("data", "fsdp")  # the axes that split the rows of a batch

Rule = tuple[str, tuple[str | None, ...]]


def mesh(
    data: int = -1,
    fsdp: int = 1,
    tensor: int = 1,
    expert: int = 1,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """The mesh of `devices` (all of them by default); one size may be -1, "what is left".

    Auto axis types: XLA chooses intermediate shardings, and one program serves every layout.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = _fill(dict(zip(AXES, (data, fsdp, tensor, expert))), len(devices))
    # On one device make_mesh has no topology to look at; with several it orders them by it.
    return jax.make_mesh(
        tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices
    )


def _fill(sizes: dict[str, int], count: int) -> dict[str, int]:
    """Replace the one -1 by what the other axes leave of `count` devices."""
    for name, size in sizes.items():
        if size != -1 and size < 1:
            raise refuse(f"mesh.{name}", size, "1 or more, or -1 for the devices that are left")
    rest = [name for name, size in sizes.items() if size == -1]
    if len(rest) > 1:
        raise refuse(f"mesh.{rest[1]}", -1, f"a number: mesh.{rest[0]} already takes what is left")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if count % fixed or (not rest and fixed != count):
        raise refuse("mesh", sizes, f"sizes whose product is the number of devices, {count}")
    return sizes | dict.fromkeys(rest, count // fixed)


def name_of(path: Sequence[Any]) -> str:
    """A leaf's path as `/`-joined names: `block_0/attention/q/w`, `opt/1/mu/embed`."""
    return "/".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)


def spec(name: str, shape: Sequence[int], rules: Sequence[Rule], on: Mesh) -> PartitionSpec:
    """The first rule whose pattern is found in `name`; no rule, or a scalar: replicated.

    A dimension that the axis does not divide stays whole. A rule of another rank is refused:
    it was written for another array.
    """
    if not shape:
        return PartitionSpec()
    for pattern, axes in rules:
        if re.search(pattern, name):
            if len(axes) != len(shape):
                allowed = f"{len(shape)} entries, the array {name} has shape {tuple(shape)}"
                raise refuse(f"sharding rule {pattern!r}", axes, allowed)
            return PartitionSpec(*(_fits(axis, size, pattern, on) for axis, size in zip(axes, shape)))
    return PartitionSpec()


def _fits(axis: str | None, size: int, pattern: str, on: Mesh) -> str | None:
    if axis is not None and axis not in on.shape:
        raise refuse(f"axis of sharding rule {pattern!r}", axis, f"{', '.join(on.shape)}, or None")
    return None if axis is None or size % on.shape[axis] else axis


def shardings(tree: Any, rules: Sequence[Rule], on: Mesh) -> Any:
    """A NamedSharding for every leaf of `tree` (arrays, or what `jax.eval_shape` returns).

    Rules search the whole path, so those of the parameters also hold for the moments that an
    optimizer keeps under the same names.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(on, spec(name_of(path), leaf.shape, rules, on)), tree
    )


def rows(on: Mesh) -> NamedSharding:
    """How a batch lies on the mesh: its rows over (data, fsdp), all else whole."""
    return NamedSharding(on, PartitionSpec(ROWS))


def whole(on: Mesh) -> NamedSharding:
    """A copy on every device."""
    return NamedSharding(on, PartitionSpec())


def ways(on: Mesh) -> int:
    """Into how many parts the rows of a batch are split."""
    return math.prod(on.shape[axis] for axis in ROWS)


def share(on: Mesh) -> tuple[int, int]:
    """(index, count): which of `count` equal parts of a batch's rows this process feeds.

    Processes that differ only in `tensor` or `expert` feed the same part.
    """
    held = rows(on).devices_indices_map((ways(on),))
    mine = sorted(
        {at[0].start or 0 for device, at in held.items() if device.process_index == jax.process_index()}
    )
    count, index = ways(on) // len(mine), mine[0] // len(mine)
    if mine != list(range(index * len(mine), (index + 1) * len(mine))):
        raise refuse("mesh", dict(on.shape), "sizes that give each process neighbouring rows")
    return index, count


def place(batch: Any, on: Mesh) -> Any:
    """Put a tree of numpy arrays, this process's part of the rows, onto the devices."""
    if jax.process_count() == 1:
        return jax.device_put(batch, rows(on))
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(rows(on), np.asarray(x)), batch)
