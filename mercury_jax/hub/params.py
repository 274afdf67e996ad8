"""Parameters of a model: their shapes, their place in the files of a checkpoint, the memory they need, and reading them
onto the devices that hold them.

Parameters are named by their path in the tree, such as "block_0/attention/q/w". They are read, quantised and placed one
at a time, so host memory holds one of them.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from numpy.typing import DTypeLike

from mercury_jax.config import refuse
from mercury_jax.models.weight_quant import WEIGHT_KINDS, QuantisedWeight
from mercury_jax.sharding import AXES, matrix_axes, partition_spec
from mercury_jax.types import Model, Params


@functools.lru_cache(maxsize=4)  # a trace of the whole model, which loading it needs more than once
def shapes_of(model: Model) -> Mapping[str, jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes of a model's parameters by path; nothing is computed."""
    tree = jax.eval_shape(model.init, jax.random.key(0))
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
    return MappingProxyType({name(path): leaf for path, leaf in leaves})


# --- from the tensors of a checkpoint to ours, and back


class TensorSource(NamedTuple):
    """Where one of our parameters is in the files of a family.

    Attributes:
        name: The tensor's name; with "{e}" where each expert has a tensor of its own. Several names are concatenated
            along our last axis (gate and up).
        inputs: 0 for the same order of axes. k > 0 for the weight [out, in] of a torch Linear, whose inputs are our
            first k axes (after that of the experts).
        experts: Ours is stacked from this many experts; without "{e}" in the name the file's tensor is stacked, too.
        fold: The file has this many of our last axes as one (biases of heads).
        rows: (a, b, c) where ours are rows [a, b) of a tensor of c rows (fused queries, keys and values).
    """

    name: str | tuple[str, ...]
    inputs: int = 0
    experts: int = 0
    fold: int = 0
    rows: tuple[int, int, int] | None = None

    @property
    def parts(self) -> int:
        """How many tensors, or stacks of experts, are concatenated."""
        return 1 if isinstance(self.name, str) else len(self.name)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors that this parameter is made from; experts vary fastest."""
        parts = (self.name,) if isinstance(self.name, str) else self.name
        each = range(self.experts) if any("{e}" in p for p in parts) else range(1)
        return tuple(p.replace("{e}", str(e)) for p in parts for e in each)

    @property
    def per_expert(self) -> bool:
        """Whether each expert has tensors of its own."""
        return bool(self.experts) and "{e}" in "".join(self.name)

    def shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the file's tensors by name, for a parameter of `shape`."""
        lead, rest = (shape[:1], shape[1:]) if self.experts else ((), shape)
        if self.inputs:
            inputs, outputs = rest[: self.inputs], rest[self.inputs :]
            theirs = (math.prod(outputs) // self.parts, math.prod(inputs))
        else:
            theirs = (*rest[: -self.fold], math.prod(rest[-self.fold :])) if self.fold else rest
        if self.rows is not None:
            theirs = (self.rows[2], *theirs[1:])
        stacked = lead and not self.per_expert
        return dict.fromkeys(self.names, (*lead, *theirs) if stacked else theirs)


def to_ours(source: TensorSource, shape: tuple[int, ...], read: Callable[[str], np.ndarray]) -> np.ndarray:
    """Makes one of our parameters from the tensors of a checkpoint.

    Args:
        source: Where it is.
        shape: Our shape.
        read: Returns a tensor by name.

    Returns:
        The array; a view of what was read where the layout allows.
    """
    if source.per_expert:
        # One expert at a time: [experts, ...] is filled without a second copy of all experts.
        count, stacked = source.experts, None
        for e in range(count):
            one = source._replace(name=source.names[e::count], experts=0)
            expert = to_ours(one, shape[1:], read)
            stacked = np.empty(shape, expert.dtype) if stacked is None else stacked
            stacked[e] = expert
        assert stacked is not None
        return stacked
    parts = [read(name) for name in source.names]
    if source.rows is not None:
        parts = [part[source.rows[0] : source.rows[1]] for part in parts]
    if source.inputs:
        parts = [np.swapaxes(part, -1, -2) for part in parts]  # [out, in] -> [in, out]
    return (parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)).reshape(shape)


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
    params: dict[str, Any] = {}
    for path in shapes_of(model):
        host, matrix = read(path), matrix_axes(path)
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
        params[path] = jax.block_until_ready(value)
        del host
        progress(sum(x.nbytes for x in jax.tree.leaves(value)))
    return unflatten_dict(params, sep="/")


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
    axis: str


def param_bytes(
    model: Model, mesh: Mesh | AbstractMesh | None, dtype: DTypeLike, quantise: str | None = None
) -> int:
    """Computes the bytes that the parameters need on each device.

    Args:
        model: The model.
        mesh: Only its shape is used; None: one device.
        dtype: Of parameters that are not quantised.
        quantise: "int8", "fp8" or None.

    Returns:
        Bytes.
    """
    total = 0
    for path, like in shapes_of(model).items():
        size = math.prod(like.shape)
        if mesh is not None:  # a dimension may be split along several axes
            spec = partition_spec(path, like.shape, model.shardings, mesh)
            size //= math.prod(mesh.shape[axis] for axis in jax.tree.leaves(tuple(spec)))
        matrix = None if quantise is None else matrix_axes(path)
        if matrix is None:
            total += size * jnp.dtype(dtype).itemsize
        else:  # one byte each, and fp32 scales, all of them on every device
            inputs, batch = matrix
            total += size + 4 * math.prod(like.shape[:batch]) * math.prod(like.shape[batch + inputs :])
    return total


def memory_plan(model: Model, dtype: DTypeLike, quantise: str | None = None) -> dict[int, MemoryNeed]:
    """Computes the memory that 1, 2, 4 and 8 devices need.

    Args:
        model: The model.
        dtype: Of parameters that are not quantised.
        quantise: "int8", "fp8" or None.

    Returns:
        Bytes per device by number of devices, along the axis that splits the parameters best.
    """
    leaves = jax.tree.leaves(jax.eval_shape(lambda: model.empty_cache(1, model.config.context)))
    cache = sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)
    axes = ("tensor",) if model.config.experts is None else ("tensor", "expert")
    plan = {}
    for n in (1, 2, 4, 8):
        meshes = {axis: AbstractMesh(tuple(n if name == axis else 1 for name in AXES), AXES) for axis in axes}
        needs = [
            MemoryNeed(param_bytes(model, mesh, dtype, quantise), cache, axis)
            for axis, mesh in meshes.items()
        ]
        plan[n] = min(needs, key=lambda need: need.params)
    return plan


def free_memory(devices: Sequence[Any]) -> int | None:
    """Returns the bytes that each of the devices can still allocate; None if the backend does not say."""
    free = []
    for device in devices:
        try:
            stats = device.memory_stats() or {}
        except Exception:  # a backend without it may raise anything
            continue
        if "bytes_limit" in stats:
            free.append(stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    if free:
        return min(free)
    return _host_memory() // len(devices) if devices[0].platform == "cpu" else None


def _host_memory() -> int:
    """Bytes of host memory that are free or can be freed."""
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


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
    need, have = param_bytes(model, mesh, dtype, quantise), free_memory(local or devices)
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
    experts, total, active = model.config.experts, 0, 0
    for path, like in shapes_of(model).items():
        size = math.prod(like.shape)
        total += size
        if experts is not None and len(like.shape) == 3 and path.rsplit("/", 1)[-1] in ("gate_up", "down"):
            size = size * experts.active // experts.count
        active += size
    return total, active
