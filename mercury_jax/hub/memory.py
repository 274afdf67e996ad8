"""What a model needs on each device, before any of it is loaded, and whether there is room."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from mercury_jax.config import refuse
from mercury_jax.hub.assemble import inputs_of, shapes_of
from mercury_jax.sharding import AXES, ShardingRule, partition_spec
from mercury_jax.types import Model


class Need(NamedTuple):
    """Bytes on each device."""

    params: int
    cache: int  # keys and values of one row of the model's whole context
    axis: str = ""  # of the mesh, along which the devices stand


def per_device(model: Model, mesh: Any, dtype: Any, quantise: str | None = None, rows: int = 1) -> Need:
    """What the parameters and the cache of `rows` rows take on each device of a mesh (its shape is enough)."""
    sizes = shapes_of(model)
    total = sum(
        _bytes(path, like.shape, model.shardings, mesh, dtype, quantise) for path, like in sizes.items()
    )
    cache = jax.eval_shape(lambda: model.empty_cache(rows, model.config.context))
    return Need(total, sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(cache)))


def _bytes(
    path: str,
    shape: Sequence[int],
    rules: Sequence[ShardingRule],
    mesh: Any,
    dtype: Any,
    quantise: str | None,
) -> int:
    axes = jax.tree.leaves(
        tuple(partition_spec(path, shape, rules, mesh))
    )  # a dimension may lie along several
    ways = math.prod(mesh.shape[axis] for axis in axes)
    matrix = None if quantise is None else inputs_of(path)
    if matrix is None:
        return math.prod(shape) // ways * jnp.dtype(dtype).itemsize
    inputs, batch = matrix
    scales = math.prod(shape[:batch]) * math.prod(shape[batch + inputs :])
    return math.prod(shape) // ways + 4 * scales  # these lie whole on every device


def mesh_shape(devices: int, axis: str = "tensor") -> AbstractMesh:
    """A mesh of so many devices, all along one axis; no device is needed for it."""
    return AbstractMesh(tuple(devices if name == axis else 1 for name in AXES), AXES)


def plan(model: Model, dtype: Any, quantise: str | None = None) -> dict[int, Need]:
    """Bytes per device on 1, 2, 4 and 8 devices, along the axis that spreads the parameters best."""
    axes = ("tensor",) if model.config.experts is None else ("tensor", "expert")
    each = lambda n, axis: per_device(model, mesh_shape(n, axis), dtype, quantise)._replace(axis=axis)
    return {n: min((each(n, axis) for axis in axes), key=lambda need: need.params) for n in (1, 2, 4, 8)}


def room(devices: Sequence[Any]) -> int | None:
    """Bytes that each of the devices can still take; None where nobody tells."""
    found = [stats for d in devices if (stats := _stats(d))]
    if found:
        return min(s["bytes_limit"] - s.get("bytes_in_use", 0) for s in found)
    if devices[0].platform != "cpu":
        return None
    return _host() // len(devices)


def room_here() -> dict[str, Any]:
    """How many devices this machine has, and the bytes that each can still take."""
    devices = jax.local_devices()
    return {"devices": len(devices), "kind": devices[0].device_kind, "bytes": room(devices)}


def _stats(device: Any) -> dict[str, int] | None:
    try:
        stats = device.memory_stats()
    except Exception:  # a backend without it raises what it likes
        return None
    return stats if stats and "bytes_limit" in stats else None


def _host() -> int:
    """Memory of this machine that is free, or could be."""
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check(model: Model, mesh: Mesh | None, dtype: Any, quantise: str | None, name: str) -> None:
    """Refuse, with the numbers, a model whose parameters no device has room for."""
    devices = list(mesh.devices.flat) if mesh is not None else jax.devices()[:1]
    local = [d for d in devices if d.process_index == jax.process_index()]
    on = mesh if mesh is not None else mesh_shape(1)
    need, have = per_device(model, on, dtype, quantise).params, room(local or devices)
    if have is None or need <= have:
        return
    count = parameters(model)
    raise refuse(
        f"memory for {name}",
        f"{need / 1e9:.1f} GB on each of {len(devices)} device(s), for {count / 1e9:.2f}B parameters as "
        f"{quantise or jnp.dtype(dtype).name}",
        f"up to {have / 1e9:.1f} GB, which is free: more devices (mesh=), dtype='bfloat16', or quantise='int8'",
    )


def parameters(model: Model) -> int:
    """Scalars of all parameters."""
    return sum(math.prod(x.shape) for x in shapes_of(model).values())


def active(model: Model) -> int:
    """Parameters that one token meets: of the experts only those that it is sent to."""
    e = model.config.experts
    total = 0
    for path, like in shapes_of(model).items():
        size = int(np.prod(like.shape))
        routed = e is not None and len(like.shape) == 3 and path.rsplit("/", 1)[-1] in ("gate_up", "down")
        total += size * e.active // e.count if routed and e is not None else size
    return total
