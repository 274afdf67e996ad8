"""Parameters of a model: their shapes, the memory they need, and reading them onto the devices that hold them.

Parameters are named by their path in the tree, such as "block_0/attention/q/w". They are read, quantised if asked for,
and placed one at a time, so host memory holds one of them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from numpy.typing import DTypeLike

from mercury_jax.checkpoint import CheckpointError
from mercury_jax.config import ModelConfig, refuse
from mercury_jax.hub.family import Family, TensorSource
from mercury_jax.models.weight_quant import WEIGHT_KINDS, QuantisedWeight
from mercury_jax.sharding import AXES, partition_spec, path_name
from mercury_jax.types import Model, Params

Shapes = Mapping[str, tuple[int, ...]]
QUANTISED = ("w", "gate_up", "down")  # last names of the matrices that int8 and fp8 apply to


def shapes_of(model: Model) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes of a model's parameters by path; nothing is computed."""
    tree = jax.eval_shape(model.init, jax.random.key(0))
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def insert(tree: dict[str, Any], path: str, value: Any) -> None:
    """Sets tree["a"]["b"] = value for the path "a/b".

    Args:
        tree: Nested dict; missing levels are added.
        path: The parameter's path.
        value: What to put there.
    """
    *stems, last = path.split("/")
    for stem in stems:
        tree = tree.setdefault(stem, {})
    tree[last] = value


# --- from the tensors of a checkpoint to ours, and back


def check_tensors(where: str, family: Family, config: ModelConfig, ours: Shapes, theirs: Shapes) -> None:
    """Checks names and shapes of a checkpoint's tensors before any is read.

    Args:
        where: The checkpoint's path, for messages.
        family: Its family.
        config: Our config of it.
        ours: Shapes of our parameters by path.
        theirs: Shapes of its tensors by name.

    Raises:
        CheckpointError: Names a tensor that is missing, has another shape, or that the family does not have.
        ValueError: The family's table of names does not fit the model.
    """
    names = family.names(config)
    if set(names) != set(ours):
        odd = sorted(set(names) ^ set(ours))[0]
        allowed = "a name in both the model and the family's table"
        raise refuse(f"{family.name}: parameter", odd, allowed)
    more = lambda found: f", and {len(found) - 1} more" if len(found) > 1 else ""
    wanted = {
        name: shape for path, source in names.items() for name, shape in source.shapes(ours[path]).items()
    }
    if missing := sorted(set(wanted) - set(theirs)):
        raise CheckpointError(f"{where}: tensor {missing[0]!r} is missing" + more(missing))
    if surplus := sorted(name for name in theirs if name not in wanted and family.uses(name, config)):
        raise CheckpointError(f"{where}: tensor {surplus[0]!r} has no place in {family.name}" + more(surplus))
    for name, shape in wanted.items():
        if tuple(theirs[name]) != shape:
            error = refuse(f"shape of {name}", tuple(theirs[name]), f"{shape}, by config.json")
            raise CheckpointError(f"{where}: {error}")


def to_ours(source: TensorSource, shape: tuple[int, ...], read: Callable[[str], np.ndarray]) -> np.ndarray:
    """Makes one of our parameters from the tensors of a checkpoint.

    Args:
        source: Where it is.
        shape: Our shape.
        read: Returns a tensor by name.

    Returns:
        The array; a view of what was read where the layout allows.
    """
    if not source.per_expert:
        return _combined(source, shape, [read(name) for name in source.names])
    # One expert at a time: [experts, ...] is filled without a second copy of all experts.
    count, out = source.experts, None
    one = source._replace(experts=0)
    for e in range(count):
        parts = [read(source.names[p * count + e]) for p in range(source.parts)]
        expert = _combined(one, shape[1:], parts)
        out = np.empty(shape, expert.dtype) if out is None else out
        out[e] = expert
    assert out is not None
    return out


def _combined(source: TensorSource, shape: tuple[int, ...], parts: list[np.ndarray]) -> np.ndarray:
    if source.rows is not None:
        parts = [part[source.rows[0] : source.rows[1]] for part in parts]
    if source.inputs:
        parts = [np.swapaxes(part, -1, -2) for part in parts]  # [out, in] -> [in, out]
    whole = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)
    return whole.reshape(shape)


def to_theirs(source: TensorSource, ours: np.ndarray) -> dict[str, np.ndarray]:
    """Makes the tensors of a checkpoint, or the rows of them, from one of our parameters: `to_ours` backwards.

    Args:
        source: Where it is.
        ours: Our array.

    Returns:
        Tensors by name.
    """
    lead = ours.shape[:1] if source.experts else ()
    rest = ours.shape[len(lead) :]
    if source.inputs:
        flat = ours.reshape(*lead, math.prod(rest[: source.inputs]), math.prod(rest[source.inputs :]))
        pieces = [np.swapaxes(p, -1, -2) for p in np.split(flat, source.parts, axis=-1)]
    else:
        folded = (*rest[: -source.fold], math.prod(rest[-source.fold :])) if source.fold else rest
        pieces = [ours.reshape(*lead, *folded)]
    if not source.per_expert:
        return dict(zip(source.names, pieces, strict=True))
    each = [piece[e] for piece in pieces for e in range(source.experts)]
    return dict(zip(source.names, each, strict=True))


# --- onto the devices


def load_params(
    model: Model,
    read: Callable[[str], np.ndarray],
    *,
    dtype: DTypeLike | None = None,
    quantise: str | None = None,
    mesh: Mesh | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Params:
    """Reads all parameters onto their devices; at most one is in host memory at a time.

    Args:
        model: The model.
        read: Returns a parameter by its path.
        dtype: Of parameters that are not quantised. Default: as read.
        quantise: "int8" or "fp8" stores each matrix so, with one scale per output. Default: not quantised.
        mesh: The devices. Default: the first device.
        progress: Called with the number of bytes of each parameter.

    Returns:
        The tree of parameters.
    """
    tree: dict[str, Any] = {}
    for path in shapes_of(model):
        host, matrix = read(path), quantised_axes(path)
        if quantise is not None and matrix is not None:
            small = WEIGHT_KINDS[quantise](host, *matrix)
            # Scales are small: every device holds all of them.
            whole = None if mesh is None else NamedSharding(mesh, PartitionSpec())
            value: Any = QuantisedWeight(
                _placed(small.values, path, model, mesh), jax.device_put(small.scale, whole)
            )
        else:
            value = _placed(host if dtype is None else host.astype(dtype, copy=False), path, model, mesh)
        # Wait for the copy: while it is in progress it keeps the host's array alive.
        insert(tree, path, jax.block_until_ready(value))
        del host
        progress(sum(x.nbytes for x in jax.tree.leaves(value)))
    return tree


def check_quantise(quantise: str | None) -> None:
    """Checks the argument `quantise`.

    Raises:
        ValueError: It is neither a kind of quantisation nor None.
    """
    if quantise is not None and quantise not in WEIGHT_KINDS:
        raise refuse("quantise", quantise, f"{', '.join(map(repr, WEIGHT_KINDS))}, or None")


def quantised_axes(path: str) -> tuple[int, int] | None:
    """Returns (contracted axes, axes of experts before them) of a matrix that may be quantised; None for others."""
    *stems, last = path.split("/")
    if last not in QUANTISED or "router" in stems:  # routing is sensitive to rounding
        return None
    return (1, 1) if last != "w" else (2 if stems[-1] == "o" else 1, 0)


def _placed(host: np.ndarray | jax.Array, path: str, model: Model, mesh: Mesh | None) -> jax.Array:
    if mesh is None:
        return jnp.array(host)
    where = NamedSharding(mesh, partition_spec(path, host.shape, model.shardings, mesh))
    return jax.make_array_from_callback(host.shape, where, lambda index: np.ascontiguousarray(host[index]))


# --- memory


class MemoryNeed(NamedTuple):
    """Bytes on each device.

    Attributes:
        params: Of the parameters.
        cache: Of the KV cache of one row with the model's whole context.
        axis: The mesh axis along which the devices lie.
    """

    params: int
    cache: int
    axis: str = ""


def per_device(
    model: Model, mesh: Mesh | AbstractMesh, dtype: DTypeLike, quantise: str | None = None, rows: int = 1
) -> MemoryNeed:
    """Computes what parameters and KV cache need on each device.

    Args:
        model: The model.
        mesh: Only its shape is used.
        dtype: Of parameters that are not quantised.
        quantise: "int8", "fp8" or None.
        rows: Rows of the cache, each with the model's whole context.

    Returns:
        Bytes.
    """
    total = 0
    for path, like in shapes_of(model).items():
        # A dimension may be split along several axes.
        axes = jax.tree.leaves(tuple(partition_spec(path, like.shape, model.shardings, mesh)))
        size = math.prod(like.shape) // math.prod(mesh.shape[axis] for axis in axes)
        matrix = None if quantise is None else quantised_axes(path)
        if matrix is None:
            total += size * jnp.dtype(dtype).itemsize
        else:  # one byte each, and fp32 scales, all of them on every device
            inputs, batch = matrix
            total += size + 4 * math.prod(like.shape[:batch]) * math.prod(like.shape[batch + inputs :])
    cache = jax.eval_shape(lambda: model.empty_cache(rows, model.config.context))
    return MemoryNeed(total, sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(cache)))


def abstract_mesh(devices: int, axis: str = "tensor") -> AbstractMesh:
    """Makes a mesh without devices, for computing sizes.

    Args:
        devices: How many it stands for.
        axis: The axis along which they lie.

    Returns:
        The mesh.
    """
    return AbstractMesh(tuple(devices if name == axis else 1 for name in AXES), AXES)


def memory_plan(model: Model, dtype: DTypeLike, quantise: str | None = None) -> dict[int, MemoryNeed]:
    """Computes the memory that 1, 2, 4 and 8 devices need.

    Args:
        model: The model.
        dtype: Of parameters that are not quantised.
        quantise: "int8", "fp8" or None.

    Returns:
        Bytes per device by number of devices, along the axis that splits the parameters best.
    """
    axes = ("tensor",) if model.config.experts is None else ("tensor", "expert")
    each = lambda n, axis: per_device(model, abstract_mesh(n, axis), dtype, quantise)._replace(axis=axis)
    return {n: min((each(n, axis) for axis in axes), key=lambda need: need.params) for n in (1, 2, 4, 8)}


def free_memory(devices: Sequence[Any]) -> int | None:
    """Returns the bytes that each of the devices can still allocate; None if the backend does not say."""
    stats = [found for device in devices if (found := _memory_stats(device))]
    if stats:
        return min(s["bytes_limit"] - s.get("bytes_in_use", 0) for s in stats)
    if devices[0].platform != "cpu":
        return None
    return _host_memory() // len(devices)


def _host_memory() -> int:
    """Bytes of host memory that are free or can be freed."""
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _memory_stats(device: Any) -> dict[str, int] | None:
    try:
        stats = device.memory_stats()
    except Exception:  # a backend without it may raise anything
        return None
    return stats if stats and "bytes_limit" in stats else None


def check_memory(model: Model, mesh: Mesh | None, dtype: DTypeLike, quantise: str | None, name: str) -> None:
    """Refuses a model whose parameters do not fit into the devices' free memory.

    Args:
        model: The model.
        mesh: The devices. Default: the first device.
        dtype: Of parameters that are not quantised.
        quantise: "int8", "fp8" or None.
        name: The model's name, for the message.

    Raises:
        ValueError: Says how much is needed and how much is free.
    """
    devices = list(mesh.devices.flat) if mesh is not None else jax.devices()[:1]
    local = [d for d in devices if d.process_index == jax.process_index()]
    on = mesh if mesh is not None else abstract_mesh(1)
    need, have = per_device(model, on, dtype, quantise).params, free_memory(local or devices)
    if have is None or need <= have:
        return
    count = sum(math.prod(x.shape) for x in shapes_of(model).values())
    raise refuse(
        f"memory for {name}",
        f"{need / 1e9:.1f} GB on each of {len(devices)} device(s), for {count / 1e9:.2f}B parameters as "
        f"{quantise or jnp.dtype(dtype).name}",
        f"up to {have / 1e9:.1f} GB, which is free: more devices (mesh=), dtype='bfloat16', or quantise='int8'",
    )


def count_parameters(model: Model) -> tuple[int, int]:
    """Returns (scalars of all parameters, scalars that one token uses): of the experts only the active ones."""
    e, total, active = model.config.experts, 0, 0
    for path, like in shapes_of(model).items():
        size = math.prod(like.shape)
        routed = e is not None and len(like.shape) == 3 and path.rsplit("/", 1)[-1] in ("gate_up", "down")
        total += size
        active += size * e.active // e.count if routed and e is not None else size
    return total, active
