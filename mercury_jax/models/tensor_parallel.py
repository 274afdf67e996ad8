"""Passes over a KV cache with explicit tensor and expert parallelism (`sharding.with_mesh`).

Each device computes with the parameters that it holds: some heads and their keys, some hidden units, and some whole
experts. Every device computes all norms, residuals and routers. Partial results are summed by two all-reduces per
layer, after the attention and after the feed-forward (Megatron-LM, arXiv 1909.08053).

`cache_ops` passes these functions to a network as its `ops`. In a training step XLA's partitioner divides everything
but the attention kernels (`training_ops`).
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import Array, Float, Int

from mercury_jax.models import cache as kv_cache, kv_quant, moe, ops
from mercury_jax.models.ops import Activation, Ops, Term, Weight, device_ops, local_dot
from mercury_jax.models.rope import NORM_ROPE_WRITE
from mercury_jax.models.weight_quant import QuantisedWeight, lookup
from mercury_jax.ops import attention_kernel
from mercury_jax.ops.attention.inputs import KVArray
from mercury_jax.ops.experts.op import ROUTE
from mercury_jax.sharding import ROWS, constrain_rows, dividing_axes
from mercury_jax.types import Device, LoraWeight

SUMMED = ("tensor", "expert")  # mesh axes along which devices may hold partial sums
_on_each_device = functools.partial(jax.shard_map, check_vma=False)


def cache_ops(mesh: Mesh | None, device: Device | None) -> Ops:
    """Makes the operations of a pass over a cache that is divided over a mesh."""
    product = functools.partial(local_dot, device=device)
    if mesh is None:
        # Not `dot`: XLA merges the projections to queries, keys and values into one product.
        return device_ops(device)._replace(
            dot_term=functools.partial(ops.dot_term, product=product),
            gated_dot=functools.partial(ops.local_gated_dot, device=device),
            exact_dot=functools.partial(ops.local_exact_dot, device=device),
            project_heads=functools.partial(ops.local_project_heads, device=device),
            norm_rope_write=functools.partial(NORM_ROPE_WRITE.run, device=device),
            feed_forwards=functools.partial(ops.local_feed_forwards, device=device),
            add=lambda x, residual, eps: ops.ResidualStream(x, residual),
            norms=functools.partial(ops.norms, device=device),
            row_dtype=functools.partial(ops.row_dtype, device=device),
            route=functools.partial(ROUTE.run, device=device),
        )
    return Ops(
        attend=functools.partial(attend, mesh, device=device),
        write=functools.partial(write, mesh),
        dot_term=functools.partial(dot_term, mesh, device=device),
        embed=functools.partial(embed, mesh),
        experts=functools.partial(experts, mesh, device=device),
        sum_terms=functools.partial(sum_terms, mesh),
        map_rows=functools.partial(map_rows, mesh),
        replicate=functools.partial(replicate, mesh),
        whole_heads=False,
    )


def training_ops(mesh: Mesh | None, device: Device | None) -> Ops:
    """Makes the operations of a training step, which XLA's partitioner divides over a mesh.

    It cannot divide an attention kernel: the kernel runs in a `shard_map`, on the rows and heads of each device.
    """
    own = device_ops(device, mesh)
    if mesh is None or mesh.size == 1:
        return own

    def attend_in_training(q: Array, k: Any, v: Any, ranges: Array, **options: Any) -> Any:
        kernel = attention_kernel(q, k, v, ranges, device=device, **options)
        local = functools.partial(attend, mesh, device=device, row_axes=ROWS) if kernel else own.attend
        return local(q, k, v, ranges, **options)

    def embed_in_training(table: Array | QuantisedWeight, tokens: Array, then: Activation) -> Term:
        # The width of the table is sharded over `fsdp`, as the rows of its result are. Like other matrices it is
        # gathered first: XLA cannot turn the gradient of sharded rows into one of a sharded width without a full copy.
        if isinstance(table, jax.Array) and mesh.shape["fsdp"] > 1:
            ids = dividing_axes(("tensor",), table.shape[0], mesh) or None
            table = jax.lax.with_sharding_constraint(table, NamedSharding(mesh, P(ids)))
        return own.embed(table, tokens, lambda x: constrain_rows(then(x), mesh))

    return own._replace(attend=attend_in_training, embed=embed_in_training)


def _row_axes(mesh: Mesh, x: Array) -> tuple[str, ...] | None:
    """Returns the PartitionSpec entry for the rows of an array [B, ...]: `data` if it divides them, else None."""
    return dividing_axes(("data",), x.shape[0], mesh) or None


def _weight_spec(w: Weight, axes: tuple[str, ...], count: int | None = None) -> Any:
    """Builds the spec of a matrix that is sharded along its experts, or along its first contracted axis.

    Returns:
        A tree of specs with the structure of w. Scales of outputs are sharded with the experts only, and so is the LoRA
        factor `b`. Scales of groups are sharded like the inputs (`weight_quant.with_divisible_groups`), unless the
        groups are not contiguous.
    """
    spec, scale = P(axes or None), P() if count is not None else P(axes or None)
    if isinstance(w, LoraWeight):
        return dataclasses.replace(w, base=_weight_spec(w.base, axes, count), a=spec, b=scale)
    if not isinstance(w, QuantisedWeight):
        return spec
    inputs = spec if count is None else P(*[None] * (w.values.ndim - count), axes or None)
    groups = inputs if w.group is None else scale
    found: Any = (
        None if x is None else one for x, one in zip(w, (inputs, scale, groups, groups, spec), strict=True)
    )
    return type(w)(*found)


def sum_terms(mesh: Mesh, *sums: Sequence[Term]) -> list[Float[Array, "B T *w"]]:
    """Computes sums of terms with one all-reduce for all of them."""
    terms = [term for sequence in sums for term in sequence]
    axes = tuple(axis for axis in SUMMED if any(axis in term.axes for term in terms))

    def local(*args: tuple[Any, ...]) -> Array:
        values = []
        for term, own in zip(terms, args, strict=True):
            found = term.run(*own)
            # Along an axis where all devices have the same value, only the first device may add it to the psum.
            first = [jax.lax.axis_index(axis) == 0 for axis in axes if axis not in term.axes]
            values.append(jnp.where(functools.reduce(operator.and_, first), found, 0) if first else found)
        each = iter(values)
        local_sums = [functools.reduce(operator.add, (next(each) for _ in sequence)) for sequence in sums]
        stacked = jnp.stack(local_sums)  # [sums, B, T, ...]
        return jax.lax.psum(stacked, axes) if axes else stacked

    rows = _row_axes(mesh, terms[0].args[0])
    in_specs = tuple(term.specs for term in terms)
    reduced = _on_each_device(local, mesh=mesh, in_specs=in_specs, out_specs=P(None, rows))(
        *(term.args for term in terms)
    )
    return [reduced[i] for i in range(len(sums))]


def dot_term(
    mesh: Mesh, x: Float[Array, "B T *s"], w: Weight, count: int, device: Device | None = None
) -> Term:
    """Makes a term of `ops.dot` with the first contracted axis (third of x, first of w) sharded over `tensor`.

    x is the output of `attend`, or of matrices sharded over `tensor`, so it is already sharded in this way: no data
    moves before the all-reduce.
    """
    axes = dividing_axes(("tensor",), x.shape[2], mesh)
    specs = (P(_row_axes(mesh, x), None, axes or None), _weight_spec(w, axes, count))
    return Term(functools.partial(local_dot, count=count, device=device), (x, w), specs, axes)


def embed(mesh: Mesh, table: Array | QuantisedWeight, tokens: Int[Array, "B T"], then: Activation) -> Term:
    """Makes a term that looks up embeddings in a table whose rows are sharded over `tensor`.

    Each device looks up the ids whose rows it holds, and has zeros for all other ids.
    """
    axes = dividing_axes(("tensor",), table.shape[0], mesh)

    def run(tokens: Array, table: Array | QuantisedWeight) -> Array:
        if not axes:
            return then(lookup(table, tokens))
        row = tokens - jax.lax.axis_index(axes) * table.shape[0]
        held = (row >= 0) & (row < table.shape[0])
        found = then(lookup(table, jnp.where(held, row, 0)))
        return jnp.where(held.reshape(*held.shape, *[1] * (found.ndim - 2)), found, 0)

    return Term(run, (tokens, table), (P(_row_axes(mesh, tokens)), _weight_spec(table, axes)), axes)


def map_rows(mesh: Mesh, f: Callable[..., Any], x: Float[Array, "B *s"], *shared: Array) -> Any:
    """Computes f on each device for the rows of that device.

    For a function that sorts, such as top-k, XLA's partitioner would gather all rows on every device.
    """
    spec = P(_row_axes(mesh, x))
    in_specs = (spec, *[P()] * len(shared))
    return _on_each_device(f, mesh=mesh, in_specs=in_specs, out_specs=spec)(x, *shared)


def replicate(mesh: Mesh, x: Float[Array, "B *s"]) -> Float[Array, "B *s"]:
    """Gathers all columns of each row on the devices that compute this row."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(_row_axes(mesh, x))))


def experts(
    mesh: Mesh,
    x: Float[Array, "B T D"],
    ids: Int[Array, "B T k"],
    weights: Float[Array, "B T k"],
    stacks: tuple[Weight, Weight],
    act: Activation,
    combined: bool = True,
    device: Device | None = None,
) -> Term:
    """Makes a term of `ops.experts` with the experts sharded over `expert` and `tensor`, each whole on one device.

    Each device computes the experts that it holds, and adds zeros for the others.

    Args:
        stacks: Matrices of all experts: gate and up [E, D, 2F], and down [E, F, D].
    """
    del combined
    count = stacks[0].shape[0]
    axes = dividing_axes(("expert", "tensor"), count, mesh)

    def run(x: Array, ids: Array, weights: Array, gate_up: Weight, down: Weight) -> Array:
        first = jax.lax.axis_index(axes) * gate_up.shape[0] if axes else None
        total = count if axes else None
        return moe.apply_experts(x, ids, weights, gate_up, down, act, first, total, device)

    specs = (*[P(_row_axes(mesh, x))] * 3, *(_weight_spec(w, axes) for w in stacks))
    return Term(run, (x, ids, weights, *stacks), specs, axes)


def write(
    mesh: Mesh,
    kv: kv_cache.KV,
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T G K"],
    slots: Int[Array, "B T"],
) -> kv_cache.KV:
    """Runs `cache.write` on each device for the key heads that it holds."""
    rows = _row_axes(mesh, k)
    heads = P(rows, None, dividing_axes(("tensor",), k.shape[2], mesh) or None)
    in_specs = (heads, heads, heads, P(rows))
    return _on_each_device(kv_cache.write, mesh=mesh, in_specs=in_specs, out_specs=heads)(kv, k, v, slots)


def attend(
    mesh: Mesh,
    q: Float[Array, "B T H K"],
    k: KVArray | kv_quant.RotatedVectors,
    v: KVArray | kv_quant.RotatedVectors,
    ranges: Int[Array, "B T R 2"],
    row_axes: Sequence[str] = ("data",),
    **options: Any,
) -> Float[Array, "B T H K"]:
    """Runs `kv_quant.attend` on each device for the query heads of that device.

    If `tensor` does not divide the number of key heads, every device holds all key heads and selects the ones that its
    query heads read.

    Args:
        **options: Keyword arguments of `ops.attend`, except `residual`.
    """
    rows = dividing_axes(row_axes, q.shape[0], mesh) or None
    heads, group = q.shape[2], q.shape[2] // k.shape[2]
    axes = dividing_axes(("tensor",), heads, mesh)
    key_axes = dividing_axes(("tensor",), k.shape[2], mesh) if axes else ()

    def local(q: Array, k: Any, v: Any, ranges: Array) -> Any:
        if axes and not key_axes:
            index = jax.lax.axis_index(axes)
            k, v = (_select_key_heads(x, q.shape[2], group, index) for x in (k, v))
        return kv_quant.attend(q, k, v, ranges, **options)

    query_spec, key_spec = P(rows, None, axes or None), P(rows, None, key_axes or None)
    in_specs = (query_spec, key_spec, key_spec, P(rows))
    return _on_each_device(local, mesh=mesh, in_specs=in_specs, out_specs=query_spec)(q, k, v, ranges)


def _select_key_heads(x: Any, heads: int, group: int, index: Array) -> Any:
    """Selects the key heads that device `index` reads for its `heads` query heads; `group` query heads share one."""
    first = index * heads
    if group % heads == 0:
        select = lambda y: jax.lax.dynamic_slice_in_dim(y, first // group, 1, axis=2)
    else:  # its query heads begin or end inside a group: copy one key head for each of them
        select = lambda y: jnp.take(y, (first + jnp.arange(heads)) // group, axis=2)
    return jax.tree.map(select, x)
