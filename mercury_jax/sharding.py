"""The device mesh, and path rules that shard each array of a tree over it.

Every mesh has the same four axes, so that a recipe runs on one device or on many hosts by changing only their sizes:
`data` and `fsdp` split the rows of a batch, `fsdp` also splits parameters, `tensor` splits heads and hidden units,
`expert` splits experts.

In training, XLA's partitioner divides the computation. For a pass over a KV cache its choices are too slow: it gathers
whole stacks of experts, and runs each Pallas kernel in full on every device. `with_mesh` therefore returns a model
whose passes are divided explicitly (`models.tensor_parallel`).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import numpy as np
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, auto_axes

from mercury_jax.config import AxisSize, checked, refuse

if TYPE_CHECKING:
    from mercury_jax.types import Cache, Device, Model, Params

AXES = ("data", "fsdp", "tensor", "expert")
ROWS = ("data", "fsdp")  # mesh axes that split the rows of a batch

# The parameters of all models by their last name: a new parameter is declared with one of these names, or entered here.
MATRICES = ("w", "gate_up", "down")  # multiply activations
TABLES = ("embed", "head", "router")  # one row or column per id or expert
# Added, or multiplied elementwise.
VECTORS = ("b", "scale", "correction", "scalar", "encoder_scalar", "expert_scale")
Role = Literal["matrix", "table", "vector"]
ShardedAxis = str | tuple[str, ...] | None  # mesh axes of one dimension of an array
ShardingRule = tuple[str, tuple[ShardedAxis, ...]]  # (regular expression of a path, axes of each dimension)


# --- the mesh


@checked
def mesh(
    data: AxisSize = -1,
    fsdp: AxisSize = 1,
    tensor: AxisSize = 1,
    expert: AxisSize = 1,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """Makes a mesh of devices.

    Axis types are Auto: XLA chooses intermediate shardings, so that the same code runs under every layout.

    Args:
        data: Devices along `data`. One of the four sizes may be -1: all devices that the others leave.
        fsdp: Devices along `fsdp`.
        tensor: Devices along `tensor`.
        expert: Devices along `expert`.
        devices: The devices; None: all devices of the job.

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
    rest = [name for name, size in sizes.items() if size == -1]
    if len(rest) > 1:
        raise refuse(f"mesh.{rest[1]}", -1, f"a number: mesh.{rest[0]} already takes what is left")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if len(devices) % fixed or (not rest and fixed != len(devices)):
        given = ", ".join(f"{name}={size}" for name, size in sizes.items() if size != 1) or "data=1"
        product = f"a multiple of {fixed}" if rest else f"{fixed}, the product of the sizes"
        raise ValueError(f"mesh is {given}: the number of devices must be {product}, and is {len(devices)}")
    sizes |= dict.fromkeys(rest, len(devices) // fixed)
    shape, kinds = tuple(sizes.values()), (AxisType.Auto,) * len(AXES)
    try:
        return jax.make_mesh(shape, AXES, axis_types=kinds, devices=devices)
    except NotImplementedError:  # a TPU torus whose physical axes must be split among ours
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        return Mesh(grid, AXES, axis_types=kinds)


def dividing_axes(axes: Sequence[str], size: int, mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Finds the mesh axes along which a dimension can be split evenly.

    Returns:
        The candidates that have more than one device and divide the size. Each axis must divide the part of the
        dimension that remains after splitting along the axes before it.
    """
    found: tuple[str, ...] = ()
    for axis in axes:
        if mesh.shape[axis] > 1 and size % mesh.shape[axis] == 0:
            found, size = (*found, axis), size // mesh.shape[axis]
    return found


def model_parallel_mesh(params: Params) -> Mesh | None:
    """Finds the mesh of a tree of parameters, if its `tensor` or `expert` axis has more than one device."""
    for leaf in jax.tree.leaves(params):
        found = getattr(getattr(leaf, "sharding", None), "mesh", None)
        if isinstance(found, Mesh) and set(AXES) <= set(found.shape):
            return found if found.shape["tensor"] * found.shape["expert"] > 1 else None
    return None


# --- shardings of parameters


def path_name(path: Sequence[Any]) -> str:
    """Writes the path of a leaf as names joined by "/": `block_0/attention/q/w`, `opt/1/mu/embed`."""
    return "/".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)


class MatrixAxes(NamedTuple):
    """The meaning of the axes [batch..., inputs..., outputs...] of a parameter that multiplies activations.

    Attributes:
        inputs: Number of contracted axes.
        batch: Number of axes before the contracted ones: 1 for stacked experts, otherwise 0.
    """

    inputs: int
    batch: int


def matrix_axes(name: str) -> MatrixAxes | None:
    """Tells which axes of an attention, feed-forward or expert matrix are contracted.

    LoRA applies to these matrices. Weight quantisation applies to the tables as well, see `quantised_axes`.

    Args:
        name: `path_name` of a parameter.

    Returns:
        The axes. None for embeddings, output heads and vectors, for routers, which are sensitive to rounding, and for
        a vision tower.
    """
    *stems, last = name.split("/")
    if last not in MATRICES or "router" in stems or "vision" in stems:
        return None
    return MatrixAxes(1, 1) if last != "w" else MatrixAxes(2 if stems[-1:] == ["o"] else 1, 0)


def role(name: str, ndim: int) -> Role:
    """Tells what a parameter is, which decides how the optimizer treats it.

    Args:
        name: `path_name` of a parameter, or of a factor of an adapter (`attention/q/w/b`).
        ndim: Number of its axes, which decides for a model of the user's own (`from_function`).

    Returns:
        "matrix": a matrix of a layer, or a factor of its adapter. "table": an embedding, head or router. "vector": a
        bias, a scale or a scalar, even if layers or heads are stacked.
    """
    *stems, last = name.split("/")
    if last in ("a", "b") and stems and matrix_axes("/".join(stems)) is not None:
        return "matrix"
    if last in VECTORS or last.endswith(("scale", "bias")) or ndim < 2:
        return "vector"
    return "table" if matrix_axes(name) is None or "head" in stems else "matrix"


def quantised_axes(name: str) -> MatrixAxes | None:
    """Tells which axes of a parameter share a scale under weight quantisation.

    Returns:
        The axes of a matrix (`matrix_axes`); of the embedding table [V, D], whose scales are one per id, as if each id
        were an expert with D inputs; and of the output head [D, V]. None for parameters that are never quantised.
    """
    return {"embed": MatrixAxes(1, 1), "head": MatrixAxes(1, 0)}.get(name) or matrix_axes(name)


def partition_spec(
    name: str, shape: Sequence[int], rules: Sequence[ShardingRule], mesh: Mesh | AbstractMesh
) -> PartitionSpec:
    """Chooses the PartitionSpec of an array by its path.

    Args:
        rules: The first rule whose pattern is found in `name` applies. Scalars, and arrays that no rule matches, are
            replicated, as are those whose rule names no axes.
    """
    rule = next((rule for rule in rules if re.search(rule[0], name)), None)
    if not shape or rule is None or not rule[1]:
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
    """Chooses the sharding of every leaf of a tree.

    Patterns are searched in the whole path, so that rules for parameters also match the moments that an optimiser keeps
    under the same names.

    Args:
        tree: Arrays, or the result of `jax.eval_shape`.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(mesh, partition_spec(path_name(path), leaf.shape, rules, mesh)), tree
    )


# --- rows of a batch


def row_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of a batch: rows over (data, fsdp), other dimensions not split."""
    return NamedSharding(mesh, PartitionSpec(ROWS))


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of an array with a full copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def row_shards(mesh: Mesh | AbstractMesh) -> int:
    """Counts the parts into which the rows of a batch are split."""
    return math.prod(mesh.shape[axis] for axis in ROWS)


def process_share(mesh: Mesh) -> tuple[int, int]:
    """Finds the part of a batch's rows that this process loads.

    Processes whose devices differ only along `tensor` or `expert` load the same rows.

    Returns:
        (index, count): part `index` of `count` equal parts.
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
    """Moves this process's part of a batch to the devices.

    Args:
        batch: A tree of numpy arrays; the first axis holds the rows of this process (`process_share`).
    """
    if jax.process_count() == 1:
        return jax.device_put(batch, row_sharding(mesh))
    sharding = row_sharding(mesh)
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, np.asarray(x)), batch)


def constrain_rows(x: jax.Array, mesh: Mesh | None) -> jax.Array:
    """Constrains the rows of an activation to be sharded over `data` and `fsdp` in a training step.

    XLA can multiply sharded rows by a matrix that is sharded over `fsdp` in two ways: gather the rows or gather the
    matrix. By default it gathers the rows, so that every device holds the activations of the whole batch. With this
    constraint it gathers the matrix.

    Args:
        x: An activation [B, ...].
        mesh: The mesh of the step. x is returned unchanged if this is None, if `fsdp` has one device, or if the rows
            cannot be split evenly.
    """
    if mesh is None or mesh.shape["fsdp"] == 1 or x.shape[0] % row_shards(mesh):
        return x
    free = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 1)
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(ROWS, *free)))


def varying_axes(tree: Any) -> tuple[str, ...]:
    """Returns the mesh axes over which any array of a tree varies inside a `shard_map`; () elsewhere."""
    axes: set[str] = set()
    for x in jax.tree.leaves(tree):
        kind = jax.typeof(x)
        found = getattr(kind, "vma", None)
        axes |= kind.manual_axis_type.varying if found is None else found
    return tuple(sorted(axes))


def varying(tree: Any, axes: tuple[str, ...]) -> Any:
    """Marks arrays as varying over mesh axes, which `shard_map` requires for the initial carry of a loop.

    Args:
        tree: Arrays, some of which may be the same on all devices.
        axes: From `varying_axes`; () changes nothing.
    """

    def mark(x: Any) -> Any:
        missing = tuple(axis for axis in axes if axis not in varying_axes(x))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(mark, tree) if axes else tree


def in_auto_axes(
    f: Callable[..., Any], rows: jax.Array, *args: Any, out: Callable[[Any], Any] = PartitionSpec
) -> Any:
    """Calls a function in which the Explicit mesh axes of its arguments are Auto axes.

    `jax.make_mesh` makes Explicit axes by default, under which every gather must name the sharding of its result.
    Inside the function XLA chooses the shardings, as on a mesh of `sharding.mesh`.

    Args:
        f: A function of `args`.
        out: Maps the mesh axes of the rows to the PartitionSpecs of the results (a prefix of their tree). Default: the
            first axis of each result holds the rows.

    Returns:
        f(*args), sharded as `out` says if an argument has Explicit axes.
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
    """Computes f(params, *args) with a `shard_map`: each device computes its own rows.

    Each device gets the whole parameters that f uses, and their gradient is summed over devices once, after f. If f
    contains a loop, XLA's partitioner would sum the gradient in every iteration.

    Args:
        f: A function of arrays [B, ...] that treats rows independently.
        mesh: The mesh of the training step. f is called directly if this is None, or if the mesh does not split the
            rows, or not evenly.
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
    """Tells whether any array of the tree is partly on devices of other processes."""
    return any(isinstance(x, jax.Array) and not x.is_fully_addressable for x in jax.tree.leaves(tree))


def gather(x: Any) -> np.ndarray:
    """Copies a whole array to host memory.

    If the array spans processes this is a collective: all processes must call it for the same arrays, in the same
    order. Each device then temporarily holds this one array in full, but never the whole tree.

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

    For parameters that span processes this is a collective, which moves one array at a time. Other parameters are
    returned unchanged.
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
    """Returns a model whose KV caches, and passes over them, are divided explicitly over a mesh.

    The mesh is bound into the functions of the model. Programs take the model as a static argument of `jit`, so that
    each mesh gets its own compilation.
    """
    if mesh is None:
        return model
    forward = functools.partial(model.forward, mesh=mesh)
    empty_cache = functools.partial(_empty_sharded_cache, model.empty_cache, mesh)
    return model._replace(forward=forward, empty_cache=empty_cache, mesh=mesh)


@functools.cache
def with_training_mesh(model: Model, mesh: Mesh | None) -> Model:
    """Returns a model for training on a mesh: rows of activations stay sharded over `data` and `fsdp`.

    The constraint is `constrain_rows`.
    """
    return (
        model if mesh is None else model._replace(apply=functools.partial(model.apply, mesh=mesh), mesh=mesh)
    )


@functools.cache
def with_device(model: Model, device: Device | None) -> Model:
    """Returns a model whose passes are compiled for another device than this machine's (ahead-of-time compilation)."""
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
    """Chooses the sharding of every leaf of a KV cache: rows over `data`, heads of keys and values over `tensor`."""

    leaves, structure = jax.tree_util.tree_flatten_with_path(cache)
    found = []
    for path, leaf in leaves:
        spec: list[ShardedAxis] = [dividing_axes(("data",), leaf.shape[0], mesh) or None]
        if leaf.ndim > 2 and any(getattr(part, "name", None) in ("k", "v") for part in path):
            spec += [None, dividing_axes(("tensor",), leaf.shape[2], mesh) or None]
        found.append(NamedSharding(mesh, PartitionSpec(*spec)))
    return structure.unflatten(found)
