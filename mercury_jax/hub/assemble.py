"""Parameters from tensors: one leaf at a time, laid out as ours, straight onto the devices that hold it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mercury_jax.checkpoint import CheckpointError
from mercury_jax.config import ModelConfig, refuse
from mercury_jax.hub.family import Family, Leaf
from mercury_jax.models.weight_quant import WEIGHT_KINDS, QuantisedWeight
from mercury_jax.sharding import ShardingRule, partition_spec, path_name
from mercury_jax.types import Model, Params

Shapes = Mapping[str, tuple[int, ...]]
QUANTISED = ("w", "gate_up", "down")  # last names of the matrices that int8 and fp8 apply to


def shapes_of(model: Model) -> dict[str, jax.ShapeDtypeStruct]:
    """Our parameters by path, abstractly."""
    tree = jax.eval_shape(model.init, jax.random.key(0))
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def check(
    where: str, family: Family, config: ModelConfig, names: Mapping[str, Leaf], ours: Shapes, theirs: Shapes
) -> None:
    """Refuse missing, surplus and misshapen tensors by name, before any is read."""
    if set(names) != set(ours):
        odd = sorted(set(names) ^ set(ours))[0]
        raise refuse(f"{family.name}: parameter", odd, "a name in both the model and the family's table")
    wanted = {name: shape for path, leaf in names.items() for name, shape in files_shapes(leaf, ours[path])}
    missing = sorted(set(wanted) - set(theirs))
    if missing:
        raise CheckpointError(f"{where}: tensor {missing[0]!r} is missing" + _more(missing))
    surplus = sorted(name for name in theirs if name not in wanted and family.uses(name, config))
    if surplus:
        raise CheckpointError(
            f"{where}: tensor {surplus[0]!r} has no place in {family.name}" + _more(surplus)
        )
    for name, shape in wanted.items():
        if tuple(theirs[name]) != shape:
            raise CheckpointError(
                f"{where}: "
                + str(refuse(f"shape of {name}", tuple(theirs[name]), f"{shape}, by config.json"))
            )


def _more(names: list[str]) -> str:
    return f", and {len(names) - 1} more" if len(names) > 1 else ""


def files_shapes(leaf: Leaf, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """(name, shape) of the tensors in the files that a leaf of ours of `shape` is made from."""
    lead, rest = (shape[:1], shape[1:]) if leaf.experts else ((), shape)
    parts = 1 if isinstance(leaf.name, str) else len(leaf.name)
    if leaf.inputs:
        inputs, outputs = rest[: leaf.inputs], rest[leaf.inputs :]
        theirs = (math.prod(outputs) // parts, math.prod(inputs))
    else:
        theirs = leaf.flat(rest)
    if leaf.rows is not None:
        theirs = (leaf.rows[2], *theirs[1:])
    each = len(leaf.names) > parts
    return [(name, theirs if each or not lead else (*lead, *theirs)) for name in leaf.names]


def ours_of(leaf: Leaf, shape: tuple[int, ...], read: Callable[[str], np.ndarray]) -> np.ndarray:
    """The leaf as numpy, from the tensors that `read` gives by name. Views where the layout allows."""
    stacked = len(leaf.names) > (1 if isinstance(leaf.name, str) else len(leaf.name))
    if not stacked:
        return _joined(leaf, shape, [read(name) for name in leaf.names])
    count = leaf.experts
    parts = len(leaf.names) // count
    out: np.ndarray | None = None
    for e in range(count):
        one = _joined(
            leaf._replace(experts=0), shape[1:], [read(leaf.names[p * count + e]) for p in range(parts)]
        )
        out = np.empty(shape, one.dtype) if out is None else out
        out[e] = one
    assert out is not None
    return out


def _joined(leaf: Leaf, shape: tuple[int, ...], parts: list[np.ndarray]) -> np.ndarray:
    if leaf.rows is not None:
        parts = [part[leaf.rows[0] : leaf.rows[1]] for part in parts]
    if leaf.inputs:
        parts = [np.swapaxes(part, -1, -2) for part in parts]
    whole = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)
    return whole.reshape(shape)


def theirs_of(leaf: Leaf, ours: np.ndarray) -> dict[str, np.ndarray]:
    """The tensors of the files, or the rows of them, from a leaf of ours: `ours_of` backwards."""
    parts = 1 if isinstance(leaf.name, str) else len(leaf.name)
    lead = ours.shape[:1] if leaf.experts else ()
    rest = ours.shape[len(lead) :]
    if leaf.inputs:
        flat = ours.reshape(*lead, math.prod(rest[: leaf.inputs]), math.prod(rest[leaf.inputs :]))
        pieces = [np.swapaxes(p, -1, -2) for p in np.split(flat, parts, axis=-1)]
    else:
        pieces = [ours.reshape(*lead, *leaf.flat(rest))]
    if len(leaf.names) == parts:
        return dict(zip(leaf.names, pieces, strict=True))
    each = [piece[e] for piece in pieces for e in range(leaf.experts)]
    return dict(zip(leaf.names, each, strict=True))


def params(
    model: Model,
    names: Mapping[str, Leaf],
    read: Callable[[str], np.ndarray],
    *,
    dtype: Any = None,
    quantise: str | None = None,
    mesh: Mesh | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Params:
    """The parameters on their devices, from a family's tensors; at most one leaf stands in host memory at a time.

    dtype: of floating arrays (None: the files'). quantise: matrices as "int8" or "fp8", a scale for each output.
    """
    shapes = {path: like.shape for path, like in shapes_of(model).items()}
    return own(
        model, lambda path: ours_of(names[path], shapes[path], read),
        dtype=dtype, quantise=quantise, mesh=mesh, progress=progress,
    )  # fmt: skip


def own(
    model: Model,
    read: Callable[[str], np.ndarray],
    *,
    dtype: Any = None,
    quantise: str | None = None,
    mesh: Mesh | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Params:
    """The parameters on their devices, from arrays that `read` gives by our own paths; else as `params`."""
    tree: dict[str, Any] = {}
    for path in shapes_of(model):
        host = read(path)
        put = lambda x, path=path: place(x, path, model.shardings, mesh)
        matrix = inputs_of(path)
        if quantise is not None and matrix is not None:
            small = WEIGHT_KINDS[quantise](host, *matrix)
            value: Any = QuantisedWeight(put(small.values), _whole(small.scale, mesh))
        else:
            value = put(host if dtype is None else host.astype(dtype, copy=False))
        # Wait: a copy under way keeps the host's array alive.
        insert(tree, path, jax.block_until_ready(value))
        del host
        progress(sum(x.nbytes for x in jax.tree.leaves(value)))
    return tree


def check_kind(quantise: str | None) -> None:
    """Refuse what matrices cannot be kept as."""
    if quantise is not None and quantise not in WEIGHT_KINDS:
        raise refuse("quantise", quantise, f"{', '.join(map(repr, WEIGHT_KINDS))}, or None")


def inputs_of(path: str) -> tuple[int, int] | None:
    """(axes that are contracted, axes of experts before them) of a matrix that may be 8 bits; None for others."""
    *stems, last = path.split("/")
    if last not in QUANTISED or "router" in stems:  # which expert a token goes to is decided exactly
        return None
    return (1, 1) if last != "w" else (2 if stems[-1] == "o" else 1, 0)


def _whole(scale: Any, mesh: Mesh | None) -> jax.Array:
    """Scales are small: whole on every device."""
    return jnp.asarray(scale) if mesh is None else jax.device_put(scale, NamedSharding(mesh, PartitionSpec()))


def place(host: np.ndarray, path: str, rules: tuple[ShardingRule, ...], mesh: Mesh | None) -> jax.Array:
    """One array on the devices of the mesh, each given its own part."""
    if mesh is None:
        return jnp.array(host)
    where = NamedSharding(mesh, partition_spec(path, host.shape, rules, mesh))
    return jax.make_array_from_callback(host.shape, where, lambda index: np.ascontiguousarray(host[index]))


def insert(tree: dict[str, Any], path: str, value: Any) -> None:
    """tree["a"]["b"] = value for the path "a/b"."""
    *stems, last = path.split("/")
    for stem in stems:
        tree = tree.setdefault(stem, {})
    tree[last] = value
