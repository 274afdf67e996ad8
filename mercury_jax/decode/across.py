"""A vocabulary whose tables lie along `tensor`: every device reads its own ids, then all learn what the others found.

What a piece of the vocabulary tells is a few numbers for each position, so that it takes one gathering of those, and
one sum for the mean embeddings. To hand the tables around instead would take gigabytes a pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P
from jaxtyping import Array

from mercury_jax.sharding import dividing_axes
from mercury_jax.types import Params

AXIS = "tensor"
TABLES = {"embed": P(AXIS), "head": P(None, AXIS)}  # as the rules of all our models lay them
Walk = Callable[..., tuple[Any, Any]]


def divides(on: Mesh | None, vocab: int) -> bool:
    """Whether each device of the mesh has a part of the ids alone."""
    return on is not None and bool(dividing_axes((AXIS,), vocab, on))


def walk(on: Mesh, local: Walk, params: Params, vocab: int, *rows: Any) -> tuple[Any, Any]:
    """(soft, pieces) of all ids in their order, from local(params, first, count, *rows), which gives those of `count`
    ids from `first` on, whose tables `params` holds alone. Leaves of `rows` have the batch axis first.
    """
    tables = {name: params[name] for name in TABLES if name in params}
    count = vocab // on.shape[AXIS]
    row = dividing_axes(("data",), jax.tree.leaves(rows)[0].shape[0], on) or None

    def own(tables: Params, *rows: Any) -> tuple[Any, Any]:
        soft, pieces = local(tables, jax.lax.axis_index(AXIS) * count, count, *rows)
        pieces = gathered(pieces)
        return (None if soft is None else summed(soft, pieces.most.max(axis=0)[..., None])), pieces

    lies = ({name: TABLES[name] for name in tables}, *[P(row)] * len(rows))
    spread = jax.shard_map(own, mesh=on, in_specs=lies, out_specs=(P(row), P(None, row)), check_vma=False)
    return spread(tables, *rows)


def gathered(pieces: Any) -> Any:
    """Pieces [P, B, L] of all devices, one behind the other: by one all-gather, of their bits."""
    wide = pieces.most.dtype
    bits = jnp.int32 if wide.itemsize == 4 else jnp.int64

    def pack(x: Array) -> Array:
        if jnp.issubdtype(x.dtype, jnp.integer):
            return x.astype(bits)
        return jax.lax.bitcast_convert_type(x.astype(wide), bits)

    def unpack(x: Array, like: Array) -> Array:
        if jnp.issubdtype(like.dtype, jnp.integer):
            return x.astype(like.dtype)
        return jax.lax.bitcast_convert_type(x, wide).astype(like.dtype)

    leaves, tree = jax.tree.flatten(pieces)
    packed = jax.lax.all_gather(jnp.stack([pack(x) for x in leaves]), AXIS, axis=1, tiled=True)
    return tree.unflatten([unpack(x, like) for x, like in zip(packed, leaves)])


def summed(soft: Any, most: Array) -> Any:
    """The mean embedding of all ids, from each device's own relative to exp(soft.most); most: the largest logit."""
    shares = jnp.concatenate([soft.total, soft.sum], axis=-1) * jnp.exp(soft.most - most)
    every = jax.lax.psum(shares, AXIS)
    return soft._replace(most=most, total=every[..., :1], sum=every[..., 1:])
