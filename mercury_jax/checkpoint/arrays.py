"""A tree as arrays by name, which is what is stored, and back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from mercury_jax.checkpoint.manifest import CheckpointError
from mercury_jax.config import refuse
from mercury_jax.sharding import path_name


def flatten(tree: Any, abstract: bool = False) -> dict[str, Any]:
    """Leaves by name; a typed PRNG key becomes its key data, which any version can read."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {path_name(path): _plain(leaf, abstract) for path, leaf in leaves}


def unflatten(target: Any, arrays: Mapping[str, Any]) -> Any:
    """`arrays` by name in the structure of `target`, keys wrapped again."""

    def pick(path: Any, leaf: Any) -> Any:
        array = arrays[path_name(path)]
        return jax.random.wrap_key_data(array, impl=_impl(leaf)) if _is_key(leaf) else array

    return jax.tree_util.tree_map_with_path(pick, target)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _impl(leaf: Any) -> Any:
    """A ShapeDtypeStruct does not tell its implementation: then it is the default one."""
    return jax.random.key_impl(leaf) if isinstance(leaf, jax.Array) else None


def _plain(leaf: Any, abstract: bool) -> Any:
    data = jax.random.key_data
    if not abstract:
        return data(leaf) if _is_key(leaf) else leaf
    shape = jax.eval_shape(data, leaf) if _is_key(leaf) else leaf
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=getattr(leaf, "sharding", None))


def shapes(arrays: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {name: [str(x.dtype), *x.shape] for name, x in arrays.items()}


def compare(path: Path, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for name, shape in wanted.items():
        if name not in saved:
            raise CheckpointError(f"{path} has no array {name!r}: it was saved by another model or optimizer")
        if list(saved[name]) != shape:
            raise CheckpointError(
                f"{path}: " + str(refuse(f"array {name}", saved[name], f"{shape}, as this model has it"))
            )
