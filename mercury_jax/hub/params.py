"""Parameters of a model: layout conversion from and to checkpoints, placement on devices, and memory estimates.

Parameters are named by their path in the tree, such as "block_0/attention/q/w". A `TensorSource` says which tensors of
a checkpoint make up a parameter. Parameters are read, quantised and placed one at a time, so that host memory holds
only one of them.
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
from mercury_jax.models.weight_quant import (
    FORMATS,
    QuantisedWeight,
    WeightFormat,
    quantise as quantise_matrix,
    stored_bytes,
    with_divisible_groups,
)
from mercury_jax.sharding import AXES, matrix_axes, partition_spec, quantised_axes
from mercury_jax.types import Model, Params


@functools.lru_cache(maxsize=4)  # this traces the whole model, and loading asks for it several times
def shapes_of(model: Model) -> Mapping[str, jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes of a model's parameters, without computing them."""
    tree = jax.eval_shape(model.init, jax.random.key(0))
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
    return MappingProxyType({name(path): leaf for path, leaf in leaves})


# --- layout conversion between checkpoints and our parameters


class TensorSource(NamedTuple):
    """Says which tensors of a checkpoint make up one parameter, and how their layout differs.

    Attributes:
        name: Name of the tensor, with "{e}" for the number of the expert if each expert has its own tensor. Several
            tensors (gate and up) are concatenated along the last axis of our parameter.
        inputs: 0 if the axes have the same order. k > 0 for the weight [out, in] of a torch Linear; its input axis is
            the first k axes of our parameter (after the expert axis), flattened.
        experts: Number of experts if our parameter is stacked, [experts, ...]; otherwise 0. Without "{e}" in `name`
            the tensor is stacked as well.
        fold: The tensor has the last `fold` axes of our parameter flattened into one (a bias [heads * head_dim]).
        rows: (a, b, c) if our parameter is rows [a, b) of a tensor with c rows (fused queries, keys and values).

    Example:
        The output projection [heads, head_dim, width], stored as [width, heads * head_dim]:

        >>> TensorSource("model.layers.0.self_attn.o_proj.weight", inputs=2)
    """

    name: str | tuple[str, ...]
    inputs: int = 0
    experts: int = 0
    fold: int = 0
    rows: tuple[int, int, int] | None = None

    @property
    def parts(self) -> int:
        """Number of tensors, or of stacks of expert tensors, that are concatenated along the last axis."""
        return 1 if isinstance(self.name, str) else len(self.name)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors of this parameter: all experts of the first part, then of the second."""
        parts = (self.name,) if isinstance(self.name, str) else self.name
        each = range(self.experts) if any("{e}" in p for p in parts) else range(1)
        return tuple(p.replace("{e}", str(e)) for p in parts for e in each)

    @property
    def per_expert(self) -> bool:
        """Whether each expert has its own tensors, so that loading must stack them."""
        return bool(self.experts) and "{e}" in "".join(self.name)

    def shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Computes the shapes of the checkpoint's tensors."""
        # [experts, *inputs, *outputs] -> [out / parts, in] per tensor, with a leading expert axis if it is stacked.
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
    """Converts tensors of a checkpoint to one of our parameters.

    Returns:
        The array, with `shape`; a view of a single tensor where its layout allows.
    """
    if source.per_expert:
        # Fill [experts, ...] one expert at a time; stacking a list would hold all experts twice.
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
    """Converts one of our parameters to tensors of a checkpoint, the inverse of `to_ours`."""
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


# --- loading onto devices


def load_params(
    model: Model,
    read: Callable[[str], np.ndarray | QuantisedWeight],
    *,
    dtype: DTypeLike | None = None,
    quantise: str | None = None,
    mesh: Mesh | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Params:
    """Reads all parameters onto their devices, with at most one in host memory at a time.

    Args:
        quantise: Format in which matrices, the embedding table and the output head are stored, "int8" or "fp8", with
            one scale per output, in a table per id. Default: not quantised.
    """
    params: dict[str, Any] = {}
    for path in shapes_of(model):
        host, matrix = read(path), quantised_axes(path)
        if quantise is not None and matrix is not None and not isinstance(host, QuantisedWeight):
            host = quantise_matrix(host, _format_of(path, quantise), *matrix)
        if isinstance(host, QuantisedWeight):
            value: Any = _placed_quantised(host, path, model, mesh)
        else:
            host = host if dtype is None else host.astype(dtype, copy=False)
            if mesh is None:
                value = jnp.array(host)
            else:  # each device receives only its shard
                where = partition_spec(path, host.shape, model.shardings, mesh)
                value = _on_mesh(host, NamedSharding(mesh, where))
        # Wait for the copy before reading on: an unfinished copy keeps its host array alive.
        params[path] = jax.block_until_ready(value)
        del host
        progress(sum(x.nbytes for x in jax.tree.leaves(value)))
    return unflatten_dict(params, sep="/")


def quantised_specs(
    like: QuantisedWeight, shape: tuple[int, ...], path: str, model: Model, mesh: Mesh | AbstractMesh
) -> list[PartitionSpec | None]:
    """Chooses the PartitionSpec of each array of a quantised matrix.

    Scales of outputs are small, so they are replicated on all devices. Scales and zero points of groups are split like
    the values, along the outputs and the first input axis.

    Args:
        shape: Shape of the matrix [batch..., inputs..., outputs...].
    """
    spec = partition_spec(path, shape, model.shardings, mesh)
    lead, inputs, outputs = _split_spec(spec, path, len(shape))
    grouped = PartitionSpec(*lead, *outputs, None if like.group is not None else inputs[0])
    values = PartitionSpec(*lead, *outputs, *inputs)
    specs = (values, PartitionSpec(), grouped, grouped, PartitionSpec(*lead, inputs[0]))
    return [None if x is None else one for x, one in zip(like, specs, strict=True)]


def _split_spec(spec: PartitionSpec, path: str, ndim: int) -> tuple[list[Any], list[Any], list[Any]]:
    """Divides the entries of a matrix's spec into those of its batch, inputs and outputs."""
    axes = quantised_axes(path)
    assert axes is not None
    each = [*spec, *[None] * (ndim - len(spec))]
    middle = axes.batch + axes.inputs
    return each[: axes.batch], each[axes.batch : middle], each[middle:]


def input_shards(shape: tuple[int, ...], path: str, model: Model, mesh: Mesh | AbstractMesh) -> int:
    """Counts the parts into which a mesh divides the inputs of a matrix."""
    spec = partition_spec(path, shape, model.shardings, mesh)
    _, inputs, _ = _split_spec(spec, path, len(shape))
    return math.prod(mesh.shape[axis] for axis in jax.tree.leaves(inputs[0]))


def _placed_quantised(host: QuantisedWeight, path: str, model: Model, mesh: Mesh | None) -> QuantisedWeight:
    """Copies a quantised matrix to the devices."""
    if mesh is None:
        return jax.tree.map(jnp.array, host)
    shape = shapes_of(model)[path].shape
    host = with_divisible_groups(host, input_shards(shape, path, model, mesh))
    found: Any = (
        None if x is None or one is None else _on_mesh(x, NamedSharding(mesh, one))
        for x, one in zip(host, quantised_specs(host, shape, path, model, mesh), strict=True)
    )
    return type(host)(*found)


def _on_mesh(host: np.ndarray | jax.Array, where: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(host.shape, where, lambda index: np.ascontiguousarray(host[index]))


# --- memory


Formats = Mapping[str, WeightFormat]  # of the matrices that are quantised, by path


def formats_of(model: Model, quantise: str | Formats | None) -> Formats:
    """Lists the formats of quantised matrices."""
    if not isinstance(quantise, str):
        return quantise or {}
    return {path: _format_of(path, quantise) for path in shapes_of(model) if quantised_axes(path) is not None}


def _format_of(path: str, quantise: str) -> WeightFormat:
    """The format of a matrix; rows of an embedding table and of the head's input are never rounded."""
    return FORMATS[quantise]._replace(rows=FORMATS[quantise].rows and matrix_axes(path) is not None)


class MemoryNeed(NamedTuple):
    """Memory that a model needs on each device.

    Attributes:
        params: Bytes of the parameters.
        cache: Bytes of the KV cache of one row with the full context of the model. The cache is not split here.
        axis: The mesh axis along which the parameters are split, "tensor" or "expert".
    """

    params: int
    cache: int
    axis: str


def param_bytes(
    model: Model,
    mesh: Mesh | AbstractMesh | None,
    dtype: DTypeLike,
    quantise: str | Formats | None = None,
    packed: bool = True,
) -> int:
    """Computes the bytes of the parameters on each device."""
    total, formats = 0, formats_of(model, quantise)
    for path, like in shapes_of(model).items():
        axes, kind = quantised_axes(path), formats.get(path)
        if kind is not None and axes is not None:
            kind = kind if mesh is None else kind.divisible(input_shards(like.shape, path, model, mesh))
            arrays = kind.shapes(like.shape, *axes)
            specs = None if mesh is None else quantised_specs(arrays, like.shape, path, model, mesh)
        else:
            arrays = [jax.ShapeDtypeStruct(like.shape, dtype)]
            specs = None if mesh is None else [partition_spec(path, like.shape, model.shardings, mesh)]
        for i, array in enumerate(arrays):
            if array is not None:  # one dimension may be split along several mesh axes
                split = jax.tree.leaves(tuple((specs[i] if specs is not None else None) or ()))
                parts = math.prod(mesh.shape[axis] for axis in split) if mesh is not None else 1
                total += stored_bytes(array, packed) // parts
    return total


def memory_plan(
    model: Model, dtype: DTypeLike, quantise: str | Formats | None = None
) -> dict[int, MemoryNeed]:
    """Estimates the memory per device when a model is split over 1, 2, 4 or 8 devices."""
    decoding = model if model.rings is None else model.rings(model, 0)
    leaves = jax.tree.leaves(jax.eval_shape(lambda: decoding.empty_cache(1, model.config.context)))
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
    """Returns the bytes that can still be allocated on every one of the devices.

    Returns:
        The least free memory of a device; on CPU, the free host memory divided by the number of devices. None if the
        backend does not report it.
    """
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
    """Returns the bytes of host memory that are free or can be freed; the total where the system does not say."""
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_memory(
    model: Model, mesh: Mesh | None, dtype: DTypeLike, quantise: str | Formats | None, name: str
) -> None:
    """Refuses a model whose parameters do not fit into the free memory of the devices."""
    devices = list(mesh.devices.flat) if mesh is not None else jax.devices()[:1]
    local = [d for d in devices if d.process_index == jax.process_index()]
    packed = devices[0].platform != "cpu"
    need, have = param_bytes(model, mesh, dtype, quantise, packed), free_memory(local or devices)
    if have is None or need <= have:
        return
    count = sum(math.prod(x.shape) for x in shapes_of(model).values())
    formats = quantise if not isinstance(quantise, str) else None
    raise refuse(
        f"memory for {name}",
        f"{need / 1e9:.1f} GB on each of {len(devices)} device(s), for {count / 1e9:.2f}B parameters as "
        f"{quantise if isinstance(quantise, str) else jnp.dtype(dtype).name}{' and as stored' if formats else ''}",
        f"up to {have / 1e9:.1f} GB, which is free: more devices (mesh=), dtype='bfloat16', or quantise='int8'",
    )


def count_parameters(model: Model) -> tuple[int, int]:
    """Counts parameters, in total and active per token.

    Returns:
        (all parameters, parameters that one token uses). The latter counts only the active experts.
    """
    experts, total, active = model.config.experts, 0, 0
    for path, like in shapes_of(model).items():
        size = math.prod(like.shape)
        total += size
        if experts is not None and len(like.shape) == 3 and path.rsplit("/", 1)[-1] in ("gate_up", "down"):
            size = size * experts.active // experts.count
        active += size
    return total, active
