"""A pass over a cache, spread by hand over the `tensor` and `expert` axes of a mesh (`sharding.over`).

Every device computes with what lies on it: its heads and their keys, its hidden units, its experts, each of them
whole. Norms, residuals and routers it does for itself. What the devices find then are parts of sums, and those are
added up twice in a layer, behind the attention and behind the feed-forward (Shoeybi et al., arXiv 1909.08053).

`ops_over` gives these functions to a network as its `ops`.
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

from mercury_jax.models import cache as kv_cache, moe, turbo
from mercury_jax.models.ops import Act, Ops, Term, dot, on_device
from mercury_jax.models.quantise import Scaled
from mercury_jax.sharding import along
from mercury_jax.types import Device

SUMMED = ("tensor", "expert")  # the axes whose devices may hold parts of a sum


def ops_over(mesh: Mesh | None, device: Device | None) -> Ops:
    """The operations of a pass over a cache that is divided over a mesh; None: those of one device."""
    if mesh is None:
        return on_device(device)
    bound = {
        f.__name__: functools.partial(f, mesh) for f in (write, product, lookup, total, map_rows, replicate)
    }
    return Ops(
        attend=functools.partial(attend, mesh, device=device),
        mixture=functools.partial(mixture, mesh, device=device),
        **bound,
    )


def total(on: Mesh, *sums: Sequence[Term]) -> list[Float[Array, "B T *w"]]:
    """The sum of each sequence of terms, by one all-reduce for all of them."""
    parts = [part for terms in sums for part in terms]
    axes = tuple(axis for axis in SUMMED if any(axis in part.axes for part in parts))

    def local(*args: tuple[Any, ...]) -> Array:
        found = iter([_once(part, axes, part.run(*own)) for part, own in zip(parts, args)])
        share = jnp.stack([functools.reduce(operator.add, (next(found) for _ in terms)) for terms in sums])
        return jax.lax.psum(share, axes) if axes else share

    row = rows(on, parts[0].args[0].shape[0])
    specs = tuple(part.specs for part in parts)
    whole = _local(on, local, specs, P(None, row))(*(part.args for part in parts))
    return [whole[i] for i in range(len(sums))]


def _once(part: Term, axes: tuple[str, ...], value: Array) -> Array:
    """The value on the first device of each axis along which all have the same, zeros on the others."""
    same = [jax.lax.axis_index(axis) == 0 for axis in axes if axis not in part.axes]
    return jnp.where(functools.reduce(operator.and_, same), value, 0) if same else value


def _local(on: Mesh, f: Callable[..., Any], specs: Any, out: Any) -> Callable[..., Any]:
    """f of every device's own parts of the arguments."""
    return jax.shard_map(f, mesh=on, in_specs=specs, out_specs=out, check_vma=False)


def rows(on: Mesh, count: int) -> Any:
    """The entry of a spec for `count` rows of a batch."""
    return along(("data",), count, on) or None


def product(on: Mesh, x: Float[Array, "B T *s"], w: Array | Scaled, count: int) -> Term:
    """dot(x, w, count), where the first axis that is contracted, x's third and w's first, lies along `tensor`.

    What x's third axis holds was made by matrices that lie along `tensor` too, or by `attend`: nothing moves.
    """
    split = along(("tensor",), x.shape[2], on)
    specs = (P(rows(on, x.shape[0]), None, split or None), _matrix(w, P(split or None)))
    return Term(functools.partial(dot, count=count), (x, w), specs, split)


def _matrix(w: Array | Scaled, spec: P, scale: P = P()) -> Any:
    """The spec of a matrix; scales lie whole on every device, a part of them costs nothing."""
    return Scaled(spec, scale) if isinstance(w, Scaled) else spec  # pyright: ignore[reportArgumentType]


def lookup(on: Mesh, table: Float[Array, "V *w"], tokens: Int[Array, "B T"], then: Act) -> Term:
    """then(table[tokens]), of a table whose rows lie along `tensor`; `then` leaves zeros zeros."""
    split = along(("tensor",), table.shape[0], on)

    def run(tokens: Array, table: Array) -> Array:
        if not split:
            return then(table[tokens])
        at = tokens - jax.lax.axis_index(split) * table.shape[0]
        here = (at >= 0) & (at < table.shape[0])
        found = then(table[jnp.where(here, at, 0)])
        return jnp.where(here.reshape(*here.shape, *[1] * (found.ndim - 2)), found, 0)

    return Term(run, (tokens, table), (_row(on, tokens), P(split or None)), split)


def map_rows(on: Mesh, f: Callable[..., Any], x: Float[Array, "B *s"], *shared: Any) -> Any:
    """f(x, *shared), which every device makes of its own rows: XLA's partitioner gathers all to sort some of them."""
    return _local(on, f, (_row(on, x), *[P()] * len(shared)), _row(on, x))(x, *shared)


def replicate(on: Mesh, x: Float[Array, "B *s"]) -> Float[Array, "B *s"]:
    """x, of which every device has all but the rows of others."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(on, _row(on, x)))


def _row(on: Mesh, x: Array) -> P:
    return P(rows(on, x.shape[0]))


def mixture(
    on: Mesh,
    x: Float[Array, "B T D"],
    ids: Int[Array, "B T k"],
    weights: Float[Array, "B T k"],
    stacks: tuple[Array | Scaled, Array | Scaled],
    act: Act,
    device: Device | None = None,
) -> Term:
    """`moe.experts` over flattened rows. Experts lie along `expert` and `tensor`, each whole on one device."""
    count = (stacks[0].values if isinstance(stacks[0], Scaled) else stacks[0]).shape[0]
    split = along(("expert", "tensor"), count, on)

    def run(x: Array, ids: Array, weights: Array, *own: Array | Scaled) -> Array:
        flat = (y.reshape(-1, y.shape[-1]) for y in (x, ids, weights))
        size = (own[0].values if isinstance(own[0], Scaled) else own[0]).shape[0]
        some = {"first": jax.lax.axis_index(split) * size, "of": count} if split else {}
        return moe.experts(*flat, *own, act, device=device, **some).reshape(x.shape)

    apart = P(split or None)
    specs = (*[_row(on, x)] * 3, *(_matrix(w, apart, apart) for w in stacks))
    return Term(run, (x, ids, weights, *stacks), specs, split)


def write(
    on: Mesh,
    kv: kv_cache.KV,
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T G K"],
    slots: Int[Array, "B T"],
) -> kv_cache.KV:
    """`cache.write`, by every device to the heads that it has."""
    row = rows(on, k.shape[0])
    heads = P(row, None, along(("tensor",), k.shape[2], on) or None)
    return _local(on, kv_cache.write, (heads, heads, heads, P(row)), heads)(kv, k, v, slots)


def attend(
    on: Mesh, q: Float[Array, "B T H K"], k: Any, v: Any, ranges: Int[Array, "B T R 2"], **how: Any
) -> Float[Array, "B T H K"]:
    """`turbo.attend`, by every device for its query heads. Too few key heads to divide lie on every device whole."""
    row, heads, groups = rows(on, q.shape[0]), q.shape[2], k.shape[2]
    split = along(("tensor",), heads, on)
    held = along(("tensor",), groups, on) if split else ()

    def local(q: Array, k: Any, v: Any, ranges: Array) -> Array:
        if split and not held:
            k, v = (_read(x, q.shape[2], heads // groups, jax.lax.axis_index(split)) for x in (k, v))
        return turbo.attend(q, k, v, ranges, **how)

    mine, keys = P(row, None, split or None), P(row, None, held or None)
    return _local(on, local, (mine, keys, keys, P(row)), mine)(q, k, v, ranges)


def _read(x: Any, heads: int, group: int, index: Array) -> Any:
    """Of all key heads those that the device's `heads` query heads read, `group` of which share one in all."""
    first = index * heads
    if group % heads == 0:
        one = lambda y: jax.lax.dynamic_slice_in_dim(y, first // group, 1, axis=2)
    else:  # they begin or end within a group: each gets keys of its own
        one = lambda y: jnp.take(y, (first + jnp.arange(heads)) // group, axis=2)
    return jax.tree.map(one, x)
