"""One mesh for everything, and path rules that say how each array of a tree lies on it.

The axes are always the same four, so that a recipe that runs on one device runs on many hosts by
numbers alone: `data` and `fsdp` split the rows of a batch, `fsdp` also splits parameters,
`tensor` splits heads and hidden units, `expert` splits experts.

Training leaves it to XLA's partitioner what is computed where. Of a pass over a cache that is too little: it gathers
whole stacks of experts, and runs a Pallas kernel in full on every device. `over` gives the model whose passes are
spread by hand (`models.parallel`).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from mercury_jax.config import refuse

if TYPE_CHECKING:
    from mercury_jax.types import Cache, Device, Model

AXES = ("data", "fsdp", "tensor", "expert")
ROWS = ("data", "fsdp")  # the axes that split the rows of a batch

Axis = str | tuple[str, ...] | None  # of a dimension: several, where it lies along all of them
Rule = tuple[str, tuple[Axis, ...]]


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
    shape, kinds = tuple(sizes.values()), (AxisType.Auto,) * len(AXES)
    # On one device make_mesh has no topology to look at; with several it orders them by it.
    try:
        return jax.make_mesh(shape, AXES, axis_types=kinds, devices=devices)
    except (
        NotImplementedError
    ):  # a TPU's torus whose axes have other sizes: an axis of ours takes a part of one
        laid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        return Mesh(laid, AXES, axis_types=kinds)


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


def spec(name: str, shape: Sequence[int], rules: Sequence[Rule], on: Mesh | AbstractMesh) -> PartitionSpec:
    """The first rule whose pattern is found in `name`; no rule, or a scalar: replicated.

    A dimension that the axis does not divide stays whole; of several axes it takes those that do (see `along`). A
    rule of another rank is refused: it was written for another array.
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


def _fits(axis: Axis, size: int, pattern: str, on: Mesh | AbstractMesh) -> Axis:
    for name in axis if isinstance(axis, tuple) else (axis,):
        if name is not None and name not in on.shape:
            raise refuse(f"axis of sharding rule {pattern!r}", name, f"{', '.join(on.shape)}, or None")
    if isinstance(axis, tuple):
        found = along(axis, size, on)
        return found if len(found) > 1 else next(iter(found), None)
    return None if axis is None or size % on.shape[axis] else axis


def along(axes: Sequence[str], size: int, on: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Those of the axes, one after the other, that divide what those before left of a dimension of `size`."""
    found: tuple[str, ...] = ()
    for axis in axes:
        if on.shape[axis] > 1 and size % on.shape[axis] == 0:
            found, size = (*found, axis), size // on.shape[axis]
    return found


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


def by_rows(x: Any, on: Mesh | None) -> Any:
    """Shards an activation's rows over `data` and `fsdp` in a training step.

    A product of sharded rows and a matrix that is sharded over `fsdp` can be computed in two ways. XLA by itself
    gathers the rows, so that every device holds the activations of all of them; with this constraint it gathers the
    matrix.

    Args:
        x: An activation [B, ...].
        on: The mesh of the step; None, or a mesh without `fsdp`, leaves x as it is.
    """
    if on is None or on.shape["fsdp"] == 1 or x.shape[0] % ways(on):
        return x
    free = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 1)
    return jax.lax.with_sharding_constraint(x, NamedSharding(on, PartitionSpec(ROWS, *free)))


def rowwise(f: Callable[..., Any], on: Mesh | None, params: Any, *args: Any) -> Any:
    """Computes f(params, *args) on every device for its own rows.

    Each device gets the parameters that f uses whole, and their gradient is summed once, after f: for a product in a
    loop XLA's partitioner would sum it in every iteration.

    Args:
        f: A function of arrays [B, ...] that treats rows independently.
        on: The mesh of the training step; None, or one that does not divide the rows: f is called as it is.
        params: Parameters, the same for all rows.
        args: Arrays [B, ...].
    """
    if on is None or ways(on) == 1 or any(x.shape[0] % ways(on) for x in jax.tree.leaves(args)):
        return f(params, *args)
    row = PartitionSpec(ROWS)
    specs = (PartitionSpec(), *[row] * len(args))
    return jax.shard_map(f, mesh=on, in_specs=specs, out_specs=row, axis_names=set(ROWS))(params, *args)


def ways(on: Mesh | AbstractMesh) -> int:
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


def gather(x: Any) -> np.ndarray:
    """A whole array in host memory.

    A collective where the array is split over several processes: all of them must call it, in the same order. Each
    device then holds this one array whole for a moment, never the tree that it belongs to.
    """
    if not isinstance(x, jax.Array) or x.is_fully_addressable:
        return np.asarray(jax.device_get(x))
    if x.is_fully_replicated:
        return np.asarray(x.addressable_data(0))
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def spans(tree: Any) -> bool:
    """Whether any array of the tree lies on devices of other processes too."""
    return any(isinstance(x, jax.Array) and not x.is_fully_addressable for x in jax.tree.leaves(tree))


def local(params: Any, rules: Sequence[Rule]) -> Any | None:
    """Parameters on the devices of process 0 alone, split along `fsdp`; None on the other processes.

    A collective for parameters that lie on several processes, one array at a time; others are returned as they are.
    """
    if not spans(params):
        return params
    here = mesh(data=1, fsdp=-1, devices=jax.local_devices()) if jax.process_index() == 0 else None

    def one(path: Any, leaf: Any) -> Any:
        found = gather(leaf)
        if here is None:
            return None
        return jax.device_put(found, NamedSharding(here, spec(name_of(path), found.shape, rules, here)))

    held = jax.tree_util.tree_map_with_path(one, params)
    return None if here is None else held


def apart(params: Any) -> Mesh | None:
    """The mesh that parameters (arrays, or shapes with shardings) lie on, where its `tensor` or `expert` axis has
    more than one device; else None."""
    for leaf in jax.tree.leaves(params):
        on = getattr(getattr(leaf, "sharding", None), "mesh", None)
        if isinstance(on, Mesh) and set(AXES) <= set(on.shape):
            return on if on.shape["tensor"] * on.shape["expert"] > 1 else None
    return None


@functools.cache
def over(model: Model, on: Mesh | None) -> Model:
    """The model whose passes over a cache are divided by hand over a mesh (`models.parallel`); so are its caches.

    The mesh is part of the functions, so that programs for several meshes do not share jit's cache where the model is a
    static argument. Equal arguments give the same model. None: the model itself.
    """
    if on is None:
        return model
    forward = functools.partial(model.forward, mesh=on)
    empty = functools.partial(_empty, model.empty_cache, on)
    return model._replace(forward=forward, empty_cache=empty, mesh=on)


@functools.cache
def train_on(model: Model, on: Mesh | None) -> Model:
    """The model for training steps on a mesh: activations keep their rows over `data` and `fsdp` (`by_rows`)."""
    return model if on is None else model._replace(apply=functools.partial(model.apply, mesh=on), mesh=on)


@functools.cache
def compiled_for(model: Model, device: Device | None) -> Model:
    """The model whose passes are traced for another device than this machine's (ahead-of-time compilation)."""
    if device is None:
        return model
    forward, apply = (functools.partial(f, device=device) for f in (model.forward, model.apply))
    return model._replace(forward=forward, apply=apply)


def _empty(empty: Any, on: Mesh, batch: int, slots: int) -> Cache:
    cache = empty(batch, slots)
    return jax.lax.with_sharding_constraint(cache, caches(cache, on))


def caches(cache: Any, on: Mesh) -> Any:
    """How a cache lies: rows over `data`, the heads of keys and values (leaves of a `k` or a `v`) over `tensor`."""

    def one(path: Any, leaf: Any) -> NamedSharding:
        heads = any(getattr(part, "name", None) in ("k", "v") for part in path) and leaf.ndim > 2
        rows, held = (
            along(("data",), leaf.shape[0], on),
            along(("tensor",), leaf.shape[2], on) if heads else (),
        )
        return NamedSharding(
            on, PartitionSpec(rows or None, None, held or None) if heads else PartitionSpec(rows or None)
        )

    return jax.tree_util.tree_map_with_path(one, cache)
