"""The device mesh, and path rules that place each array of a tree on it.

The axes are always the same four, so that a recipe for one device runs on many hosts with other numbers: `data` and
`fsdp` split the rows of a batch, `fsdp` also splits parameters, `tensor` splits heads and hidden units, `expert`
splits experts.

Training leaves the division of the computation to XLA's partitioner. For a pass over a KV cache that is not enough:
the partitioner gathers whole stacks of experts and runs a Pallas kernel in full on every device. `with_mesh` returns
a model whose passes are divided explicitly (`models.tensor_parallel`).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, auto_axes

from mercury_jax.config import refuse

if TYPE_CHECKING:
    from mercury_jax.types import Cache, Device, Model, Params

AXES = ("data", "fsdp", "tensor", "expert")
ROWS = ("data", "fsdp")  # the axes that split the rows of a batch

MATRICES = ("w", "gate_up", "down")  # last names of the parameters that multiply activations
ShardedAxis = str | tuple[str, ...] | None  # mesh axes of one dimension of an array
ShardingRule = tuple[str, tuple[ShardedAxis, ...]]  # (regular expression of a path, axes of each dimension)


# --- the mesh


def mesh(
    data: int = -1,
    fsdp: int = 1,
    tensor: int = 1,
    expert: int = 1,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """Makes the mesh of a set of devices.

    Axis types are Auto: XLA chooses intermediate shardings, and one program serves every layout.

    Args:
        data: Size of the axis; here and below, one size may be -1 for the devices that are left.
        fsdp: Likewise.
        tensor: Likewise.
        expert: Likewise.
        devices: The devices; None: all.

    Returns:
        A mesh with the axes `AXES`.

    Raises:
        ValueError: If the product of the sizes is not the number of devices.
    """
    if devices is None:
        devices = jax.devices()
    listed = isinstance(devices, Sequence | np.ndarray) and not isinstance(devices, str)
    if not listed or not len(devices) or not all(hasattr(device, "device_kind") for device in devices):
        raise refuse("devices", devices, "a list of devices, as of jax.devices(), or None for all")
    devices = list(devices)
    sizes = dict(zip(AXES, (data, fsdp, tensor, expert)))
    for name, size in sizes.items():
        whole = isinstance(size, int | np.integer) and not isinstance(size, bool)
        if not whole or (size != -1 and size < 1):
            raise refuse(f"mesh.{name}", size, "1 or more, or -1 for the devices that are left")
    rest = [name for name, size in sizes.items() if size == -1]
    if len(rest) > 1:
        raise refuse(f"mesh.{rest[1]}", -1, f"a number: mesh.{rest[0]} already takes what is left")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if len(devices) % fixed or (not rest and fixed != len(devices)):
        raise refuse("mesh", sizes, f"sizes whose product is the number of devices, {len(devices)}")
    sizes |= dict.fromkeys(rest, len(devices) // fixed)
    shape, kinds = tuple(sizes.values()), (AxisType.Auto,) * len(AXES)
    try:
        return jax.make_mesh(shape, AXES, axis_types=kinds, devices=devices)
    except NotImplementedError:  # a TPU torus with axes of other sizes: an axis of ours takes a part of one
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        return Mesh(grid, AXES, axis_types=kinds)


def dividing_axes(axes: Sequence[str], size: int, mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """The mesh axes along which a dimension can be split.

    Args:
        axes: Candidates, in order.
        size: Of the dimension.
        mesh: The mesh.

    Returns:
        Each axis with more than one device that divides what the axes before it leave of `size`.
    """
    found: tuple[str, ...] = ()
    for axis in axes:
        if mesh.shape[axis] > 1 and size % mesh.shape[axis] == 0:
            found, size = (*found, axis), size // mesh.shape[axis]
    return found


def model_parallel_mesh(params: Params) -> Mesh | None:
    """The mesh of a tree of parameters, if its `tensor` or `expert` axis has more than one device.

    Args:
        params: Arrays, or shapes with shardings.

    Returns:
        The mesh; None otherwise, and for parameters that are on no mesh with our axes.
    """
    for leaf in jax.tree.leaves(params):
        found = getattr(getattr(leaf, "sharding", None), "mesh", None)
        if isinstance(found, Mesh) and set(AXES) <= set(found.shape):
            return found if found.shape["tensor"] * found.shape["expert"] > 1 else None
    return None


# --- shardings of parameters


def path_name(path: Sequence[Any]) -> str:
    """A leaf's path as names joined by "/": `block_0/attention/q/w`, `opt/1/mu/embed`."""
    return "/".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)


class MatrixAxes(NamedTuple):
    """How the axes [batch..., inputs..., outputs...] of a parameter that multiplies activations are divided.

    Attributes:
        inputs: Number of contracted axes.
        batch: Number of axes before them: 1 for stacked experts.
    """

    inputs: int
    batch: int


def matrix_axes(name: str) -> MatrixAxes | None:
    """The axes of an attention, feed-forward or expert matrix.

    Args:
        name: `path_name` of a parameter.

    Returns:
        Its axes; None for embeddings, heads, vectors, and routers, which are sensitive to rounding.
    """
    *stems, last = name.split("/")
    if last not in MATRICES or "router" in stems:
        return None
    return MatrixAxes(1, 1) if last != "w" else MatrixAxes(2 if stems[-1] == "o" else 1, 0)


def partition_spec(
    name: str, shape: Sequence[int], rules: Sequence[ShardingRule], mesh: Mesh | AbstractMesh
) -> PartitionSpec:
    """The PartitionSpec of an array by its path.

    Args:
        name: `path_name` of the array.
        shape: Of the array.
        rules: The first rule whose pattern is found in `name` applies; without one, and for scalars, the array is
            replicated.
        mesh: A dimension that an axis of the mesh does not divide is not split along that axis.

    Returns:
        The spec.

    Raises:
        ValueError: If the rule is for an array of another rank, or names an axis that the mesh does not have.
    """
    rule = next((rule for rule in rules if re.search(rule[0], name)), None)
    if not shape or rule is None:
        return PartitionSpec()
    pattern, axes = rule
    if len(axes) != len(shape):
        allowed = f"{len(shape)} entries, the array {name} has shape {tuple(shape)}"
        raise refuse(f"sharding rule {pattern!r}", axes, allowed)
    spec: list[ShardedAxis] = []
    for axis, size in zip(axes, shape):
        for one in axis if isinstance(axis, tuple) else (axis,):
            if one is not None and one not in mesh.shape:
                raise refuse(f"axis of sharding rule {pattern!r}", one, f"{', '.join(mesh.shape)}, or None")
        if isinstance(axis, tuple):
            found = dividing_axes(axis, size, mesh)
            spec.append(found if len(found) > 1 else next(iter(found), None))
        else:
            spec.append(None if axis is None or size % mesh.shape[axis] else axis)
    return PartitionSpec(*spec)


def shardings(tree: Any, rules: Sequence[ShardingRule], mesh: Mesh) -> Any:
    """The sharding of every leaf of a tree.

    Rules search the whole path, so rules of the parameters also apply to the moments that an optimiser keeps under
    the same names.

    Args:
        tree: Arrays, or what `jax.eval_shape` returns.
        rules: See `partition_spec`.
        mesh: The mesh.

    Returns:
        A tree of NamedSharding.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(mesh, partition_spec(path_name(path), leaf.shape, rules, mesh)), tree
    )


# --- rows of a batch


def row_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of a batch: rows over (data, fsdp), other dimensions whole."""
    return NamedSharding(mesh, PartitionSpec(ROWS))


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of an array with a copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def row_shards(mesh: Mesh | AbstractMesh) -> int:
    """Number of parts into which the rows of a batch are split."""
    return math.prod(mesh.shape[axis] for axis in ROWS)


def process_share(mesh: Mesh) -> tuple[int, int]:
    """Which part of a batch's rows this process loads. Processes that differ in `tensor` or `expert` load the same.

    Args:
        mesh: The mesh.

    Returns:
        (index, count): part `index` of `count` equal parts.

    Raises:
        ValueError: If the rows of a process are not adjacent.
    """
    held = row_sharding(mesh).devices_indices_map((row_shards(mesh),))
    own = sorted(
        {at[0].start or 0 for device, at in held.items() if device.process_index == jax.process_index()}
    )
    count, index = row_shards(mesh) // len(own), own[0] // len(own)
    if own != list(range(index * len(own), (index + 1) * len(own))):
        raise refuse("mesh", dict(mesh.shape), "sizes that give each process neighbouring rows")
    return index, count


def shard_batch(batch: Any, mesh: Mesh) -> Any:
    """Puts this process's part of a batch onto the devices.

    Args:
        batch: A tree of numpy arrays whose first axis is this process's rows (`process_share`).
        mesh: The mesh.

    Returns:
        A tree of global arrays, sharded over (data, fsdp).
    """
    if jax.process_count() == 1:
        return jax.device_put(batch, row_sharding(mesh))
    sharding = row_sharding(mesh)
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, np.asarray(x)), batch)


def constrain_rows(x: jax.Array, mesh: Mesh | None) -> jax.Array:
    """Shards an activation's rows over `data` and `fsdp` in a training step.

    A product of sharded rows and a matrix that is sharded over `fsdp` can be computed in two ways. By itself XLA
    gathers the rows, so that every device holds the activations of all of them; with this constraint it gathers the
    matrix.

    Args:
        x: An activation [B, ...].
        mesh: The mesh of the step; None, or a mesh without `fsdp`, leaves x unchanged.

    Returns:
        x with the constraint.
    """
    if mesh is None or mesh.shape["fsdp"] == 1 or x.shape[0] % row_shards(mesh):
        return x
    free = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 1)
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(ROWS, *free)))


def varying_axes(tree: Any) -> tuple[str, ...]:
    """Returns the mesh axes over which any array of a tree varies, inside of a `shard_map`; () elsewhere.

    Args:
        tree: Arrays.

    Returns:
        Names of axes.
    """
    axes: set[str] = set()
    for x in jax.tree.leaves(tree):
        kind = jax.typeof(x)
        found = getattr(kind, "vma", None)
        axes |= kind.manual_axis_type.varying if found is None else found
    return tuple(sorted(axes))


def varying(tree: Any, axes: tuple[str, ...]) -> Any:
    """Marks arrays as varying over mesh axes, as `shard_map` demands of the carry of a loop.

    Args:
        tree: Arrays, some of which may be the same on all devices.
        axes: From `varying_axes`; () changes nothing.

    Returns:
        The same arrays.
    """

    def mark(x: Any) -> Any:
        missing = tuple(axis for axis in axes if axis not in varying_axes(x))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(mark, tree) if axes else tree


def in_auto_axes(
    f: Callable[..., Any], rows: jax.Array, *args: Any, out: Callable[[Any], Any] = PartitionSpec
) -> Any:
    """Calls a function with the Explicit axes of its arguments' mesh as Auto axes.

    `jax.make_mesh` makes Explicit axes, under which every gather must name the sharding of its result. Inside of the
    function XLA chooses the shardings, as on a mesh of `sharding.mesh`.

    Args:
        f: A function of `args`.
        rows: An array whose first axis is sharded as the results' rows shall be.
        args: Trees of arrays.
        out: From the mesh axes of the rows to the shardings of the results, or of a prefix of their tree. Default:
            the first axis of each result holds the rows.

    Returns:
        f(*args); sharded where an argument has Explicit axes.
    """
    shardings = [jax.typeof(x).sharding for x in jax.tree.leaves((rows, args))]
    explicit = [s.mesh for s in shardings if AxisType.Explicit in s.mesh.axis_types]
    if not explicit:
        return f(*args)
    named = lambda spec: NamedSharding(explicit[0], spec)
    spec = shardings[0].spec
    result = jax.tree.map(
        named, out(spec[0] if spec else None), is_leaf=lambda x: isinstance(x, PartitionSpec)
    )
    return auto_axes(f, axes=explicit[0].axis_names, out_sharding=result)(*args)


def rowwise(f: Callable[..., Any], mesh: Mesh | None, params: Params, *args: Any) -> Any:
    """Computes f(params, *args) on every device for its own rows.

    Each device gets the parameters that f uses whole, and their gradient is summed once, after f: for a product in a
    loop XLA's partitioner would sum it in every iteration.

    Args:
        f: A function of arrays [B, ...] that treats rows independently.
        mesh: The mesh of the training step; None, or one that does not divide the rows, calls f directly.
        params: Parameters, the same for all rows.
        args: Arrays [B, ...].

    Returns:
        The result of f [B, ...].
    """
    if mesh is None or row_shards(mesh) == 1:
        return f(params, *args)
    if any(x.shape[0] % row_shards(mesh) for x in jax.tree.leaves(args)):
        return f(params, *args)
    rows = PartitionSpec(ROWS)
    specs = (PartitionSpec(), *[rows] * len(args))
    return jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=rows, axis_names=set(ROWS))(params, *args)


# --- arrays on several processes


def spans_processes(tree: Any) -> bool:
    """Whether any array of the tree is also on devices of other processes."""
    return any(isinstance(x, jax.Array) and not x.is_fully_addressable for x in jax.tree.leaves(tree))


def gather(x: Any) -> np.ndarray:
    """Copies a whole array to host memory.

    A collective if the array spans processes: all of them must call it, in the same order. Each device then holds this
    one array whole for a moment, never the tree that it belongs to.

    Args:
        x: An array.

    Returns:
        The array in numpy.
    """
    if not isinstance(x, jax.Array) or x.is_fully_addressable:
        return np.asarray(jax.device_get(x))
    if x.is_fully_replicated:
        return np.asarray(x.addressable_data(0))
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def to_first_process(params: Params, rules: Sequence[ShardingRule]) -> Params | None:
    """Moves parameters to the devices of process 0, split along `fsdp`.

    A collective for parameters that span processes, one array at a time; others are returned unchanged.

    Args:
        params: Parameters.
        rules: Their sharding rules.

    Returns:
        The parameters on process 0, None on the other processes.
    """
    if not spans_processes(params):
        return params
    here = mesh(data=1, fsdp=-1, devices=jax.local_devices()) if jax.process_index() == 0 else None

    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    moved = []
    for path, leaf in leaves:
        array = gather(leaf)  # on every process, because it is a collective
        if here is not None:
            spec = partition_spec(path_name(path), array.shape, rules, here)
            moved.append(jax.device_put(array, NamedSharding(here, spec)))
    return None if here is None else structure.unflatten(moved)


# --- models on a mesh


@functools.cache
def with_mesh(model: Model, mesh: Mesh | None) -> Model:
    """The model with passes over a KV cache, and caches, that are divided explicitly over a mesh.

    The mesh is part of the functions, so that jit compiles one program per mesh where the model is a static argument.

    Args:
        model: A model.
        mesh: The mesh; None: the model itself.

    Returns:
        The model; equal arguments give the same object.
    """
    if mesh is None:
        return model
    forward = functools.partial(model.forward, mesh=mesh)
    empty_cache = functools.partial(_empty_sharded_cache, model.empty_cache, mesh)
    return model._replace(forward=forward, empty_cache=empty_cache, mesh=mesh)


@functools.cache
def with_training_mesh(model: Model, mesh: Mesh | None) -> Model:
    """The model for training steps on a mesh: activations keep their rows over `data` and `fsdp` (`constrain_rows`).

    Args:
        model: A model.
        mesh: The mesh; None: the model itself.

    Returns:
        The model; equal arguments give the same object.
    """
    return (
        model if mesh is None else model._replace(apply=functools.partial(model.apply, mesh=mesh), mesh=mesh)
    )


@functools.cache
def with_device(model: Model, device: Device | None) -> Model:
    """The model with passes that are compiled for another device than this machine's (ahead-of-time compilation).

    Args:
        model: A model.
        device: The device; None: the model itself.

    Returns:
        The model; equal arguments give the same object.
    """
    if device is None:
        return model
    forward, apply = (functools.partial(f, device=device) for f in (model.forward, model.apply))
    return model._replace(forward=forward, apply=apply)


def _empty_sharded_cache(
    empty_cache: Callable[[int, int], Cache], mesh: Mesh, batch: int, slots: int
) -> Cache:
    cache = empty_cache(batch, slots)
    return jax.lax.with_sharding_constraint(cache, cache_shardings(cache, mesh))


def cache_shardings(cache: Cache, mesh: Mesh) -> Any:
    """The sharding of every leaf of a KV cache: rows over `data`, heads of keys and values over `tensor`.

    Args:
        cache: A cache, or its shapes. The leaves below a field `k` or `v` have heads in their third dimension.
        mesh: The mesh.

    Returns:
        A tree of NamedSharding.
    """

    leaves, structure = jax.tree_util.tree_flatten_with_path(cache)
    found = []
    for path, leaf in leaves:
        spec: list[ShardedAxis] = [dividing_axes(("data",), leaf.shape[0], mesh) or None]
        if leaf.ndim > 2 and any(getattr(part, "name", None) in ("k", "v") for part in path):
            spec += [None, dividing_axes(("tensor",), leaf.shape[2], mesh) or None]
        found.append(NamedSharding(mesh, PartitionSpec(*spec)))
    return structure.unflatten(found)
