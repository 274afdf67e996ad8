"""A pass over a KV cache with explicit tensor and expert parallelism (`sharding.with_mesh`).

Every device computes with the parameters it holds: its heads and their keys, its hidden units, its experts, each
whole. Norms, residuals and routers are computed on every device. The results are partial sums, which are added by two
all-reduces per layer, after the attention and after the feed-forward (Megatron-LM: Shoeybi et al., arXiv 1909.08053).

`cache_ops` passes these functions to a network as its `ops`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import Array, Float, Int

from mercury_jax.models import cache as kv_cache, kv_quant, moe
from mercury_jax.models.ops import Activation, Ops, PartialSum, Weight, device_ops, dot
from mercury_jax.models.weight_quant import QuantisedWeight
from mercury_jax.sharding import dividing_axes
from mercury_jax.types import Device

SUMMED = ("tensor", "expert")  # the axes whose devices may hold parts of a sum


def cache_ops(mesh: Mesh | None, device: Device | None) -> Ops:
    """The operations of a pass over a cache that is divided over a mesh.

    Args:
        mesh: With the axes of `sharding.AXES`; None: one device.
        device: To compile kernels for; None: the device of this machine.

    Returns:
        Operations that communicate explicitly, by `shard_map`.
    """
    if mesh is None:
        return device_ops(device)
    return Ops(
        attend=functools.partial(attend, mesh, device=device),
        write=functools.partial(write, mesh),
        partial_dot=functools.partial(partial_dot, mesh),
        embed=functools.partial(embed, mesh),
        experts=functools.partial(experts, mesh, device=device),
        reduce_sums=functools.partial(reduce_sums, mesh),
        map_rows=functools.partial(map_rows, mesh),
        replicate=functools.partial(replicate, mesh),
    )


def _row_axes(mesh: Mesh, count: int) -> tuple[str, ...] | None:
    """The PartitionSpec entry of `count` rows of a batch."""
    return dividing_axes(("data",), count, mesh) or None


def _row_spec(mesh: Mesh, x: Array) -> P:
    return P(_row_axes(mesh, x.shape[0]))


def _on_each_device(mesh: Mesh, f: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """f of every device's own parts of the arguments."""
    return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _weight_spec(w: Weight, spec: P, scale: P = P()) -> Any:
    """The spec of a matrix. Scales are small and replicated by default."""
    specs: Any = (spec, scale)
    return QuantisedWeight(*specs) if isinstance(w, QuantisedWeight) else spec


def reduce_sums(mesh: Mesh, *sums: Sequence[PartialSum]) -> list[Float[Array, "B T *w"]]:
    """Computes each sequence of partial sums and adds its values, with one all-reduce for all of them."""
    terms = [term for sequence in sums for term in sequence]
    axes = tuple(axis for axis in SUMMED if any(axis in term.axes for term in terms))

    def value(term: PartialSum, args: tuple[Any, ...]) -> Array:
        # Along the axes where all devices have the same value, only the first device adds it.
        found = term.run(*args)
        first = [jax.lax.axis_index(axis) == 0 for axis in axes if axis not in term.axes]
        return jnp.where(functools.reduce(operator.and_, first), found, 0) if first else found

    def local(*args: tuple[Any, ...]) -> Array:
        values = iter([value(term, own) for term, own in zip(terms, args)])
        local_sums = [functools.reduce(operator.add, (next(values) for _ in sequence)) for sequence in sums]
        stacked = jnp.stack(local_sums)  # [sums, B, T, ...]
        return jax.lax.psum(stacked, axes) if axes else stacked

    rows = _row_axes(mesh, terms[0].args[0].shape[0])
    in_specs = tuple(term.specs for term in terms)
    reduced = _on_each_device(mesh, local, in_specs, P(None, rows))(*(term.args for term in terms))
    return [reduced[i] for i in range(len(sums))]


def partial_dot(mesh: Mesh, x: Float[Array, "B T *s"], w: Weight, count: int) -> PartialSum:
    """dot(x, w, count), with the first contracted axis (x's third, w's first) sharded over `tensor`.

    x was made by matrices sharded over `tensor` or by `attend`, so no data moves before the all-reduce.
    """
    axes = dividing_axes(("tensor",), x.shape[2], mesh)
    specs = (P(_row_axes(mesh, x.shape[0]), None, axes or None), _weight_spec(w, P(axes or None)))
    return PartialSum(functools.partial(dot, count=count), (x, w), specs, axes)


def embed(mesh: Mesh, table: Float[Array, "V *w"], tokens: Int[Array, "B T"], then: Activation) -> PartialSum:
    """then(table[tokens]) for a table whose rows are sharded over `tensor`; `then` must map zeros to zeros."""
    axes = dividing_axes(("tensor",), table.shape[0], mesh)

    def run(tokens: Array, table: Array) -> Array:
        if not axes:
            return then(table[tokens])
        row = tokens - jax.lax.axis_index(axes) * table.shape[0]
        held = (row >= 0) & (row < table.shape[0])
        found = then(table[jnp.where(held, row, 0)])
        return jnp.where(held.reshape(*held.shape, *[1] * (found.ndim - 2)), found, 0)

    return PartialSum(run, (tokens, table), (_row_spec(mesh, tokens), P(axes or None)), axes)


def map_rows(mesh: Mesh, f: Callable[..., Any], x: Float[Array, "B *s"], *shared: Any) -> Any:
    """f(x, *shared) on every device for its own rows; XLA's partitioner would gather all rows to sort some of them."""
    spec = _row_spec(mesh, x)
    return _on_each_device(mesh, f, (spec, *[P()] * len(shared)), spec)(x, *shared)


def replicate(mesh: Mesh, x: Float[Array, "B *s"]) -> Float[Array, "B *s"]:
    """x with all columns of a row on the devices that compute it."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, _row_spec(mesh, x)))


def experts(
    mesh: Mesh,
    x: Float[Array, "B T D"],
    ids: Int[Array, "B T k"],
    weights: Float[Array, "B T k"],
    stacks: tuple[Weight, Weight],
    act: Activation,
    device: Device | None = None,
) -> PartialSum:
    """`moe.apply_experts` with experts sharded over `expert` and `tensor`, each whole on one device."""
    count = stacks[0].shape[0]
    axes = dividing_axes(("expert", "tensor"), count, mesh)

    def run(x: Array, ids: Array, weights: Array, gate_up: Weight, down: Weight) -> Array:
        first = jax.lax.axis_index(axes) * gate_up.shape[0] if axes else None
        flat_x, flat_ids, flat_weights = (y.reshape(-1, y.shape[-1]) for y in (x, ids, weights))
        out = moe.apply_experts(
            flat_x, flat_ids, flat_weights, gate_up, down, act, first, count if axes else None, device
        )
        return out.reshape(x.shape)

    sharded = P(axes or None)
    specs = (*[_row_spec(mesh, x)] * 3, *(_weight_spec(w, sharded, sharded) for w in stacks))
    return PartialSum(run, (x, ids, weights, *stacks), specs, axes)


def write(
    mesh: Mesh,
    kv: kv_cache.KV,
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T G K"],
    slots: Int[Array, "B T"],
) -> kv_cache.KV:
    """`cache.write` on every device for the key heads that it holds."""
    rows = _row_axes(mesh, k.shape[0])
    heads = P(rows, None, dividing_axes(("tensor",), k.shape[2], mesh) or None)
    return _on_each_device(mesh, kv_cache.write, (heads, heads, heads, P(rows)), heads)(kv, k, v, slots)


def attend(
    mesh: Mesh, q: Float[Array, "B T H K"], k: Any, v: Any, ranges: Int[Array, "B T R 2"], **options: Any
) -> Float[Array, "B T H K"]:
    """`kv_quant.attend` on every device for its query heads.

    If `tensor` does not divide the key heads, every device holds all of them and reads those of its query heads.
    """
    rows, heads, key_heads = _row_axes(mesh, q.shape[0]), q.shape[2], k.shape[2]
    axes = dividing_axes(("tensor",), heads, mesh)
    key_axes = dividing_axes(("tensor",), key_heads, mesh) if axes else ()

    def local(q: Array, k: Any, v: Any, ranges: Array) -> Array:
        if axes and not key_axes:
            index = jax.lax.axis_index(axes)
            k, v = (_select_key_heads(x, q.shape[2], heads // key_heads, index) for x in (k, v))
        return kv_quant.attend(q, k, v, ranges, **options)

    query_spec, key_spec = P(rows, None, axes or None), P(rows, None, key_axes or None)
    in_specs = (query_spec, key_spec, key_spec, P(rows))
    return _on_each_device(mesh, local, in_specs, query_spec)(q, k, v, ranges)


def _select_key_heads(x: Any, heads: int, group: int, index: Array) -> Any:
    """The key heads that device `index` reads for its `heads` query heads; `group` query heads share one."""
    first = index * heads
    if group % heads == 0:
        select = lambda y: jax.lax.dynamic_slice_in_dim(y, first // group, 1, axis=2)
    else:  # its query heads begin or end within a group: each gets a key head of its own
        select = lambda y: jnp.take(y, (first + jnp.arange(heads)) // group, axis=2)
    return jax.tree.map(select, x)
