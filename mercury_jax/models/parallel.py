"""A pass over a cache, spread by hand over the `tensor` and `expert` axes of a mesh (`sharding.over`).

Every device computes with what lies on it: its heads and their keys, its hidden units, its experts, each of them
whole. Norms, residuals and routers it does for itself. What the devices find then are parts of sums, and those are
added up twice in a layer, behind the attention and behind the feed-forward (Shoeybi et al., arXiv 1909.08053).

Where no mesh is being passed over (`sharding.passing`), as in training, all of this is the plain function.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import Array, Float, Int

from mercury_jax.models import cache as kv_cache, turbo
from mercury_jax.models.quantise import Scaled
from mercury_jax.sharding import along, passing

SUMMED = ("tensor", "expert")  # the axes whose devices may hold parts of a sum


class Part(NamedTuple):
    """A term of a sum: run(*args). On a mesh its value is the sum over `axes` of what run gives for local args."""

    run: Callable[..., Array]
    args: tuple[Any, ...]  # the first one has the batch axis first
    specs: tuple[Any, ...] = ()  # how each of `args` lies on the mesh
    axes: tuple[str, ...] = ()


def total(*sums: Sequence[Part]) -> list[Float[Array, "B T *w"]]:
    """The sum of each sequence of parts; on a mesh by one all-reduce for all of them."""
    on, parts = passing(), [part for terms in sums for part in terms]
    if on is None:
        return [functools.reduce(operator.add, (part.run(*part.args) for part in terms)) for terms in sums]
    axes = tuple(axis for axis in SUMMED if any(axis in part.axes for part in parts))

    def local(*args: tuple[Any, ...]) -> Array:
        found = iter([_once(part, axes, part.run(*own)) for part, own in zip(parts, args)])
        share = jnp.stack([functools.reduce(operator.add, (next(found) for _ in terms)) for terms in sums])
        return jax.lax.psum(share, axes) if axes else share

    row = rows(on, parts[0].args[0].shape[0])
    specs = tuple(part.specs for part in parts)
    whole = _local(on, local, specs, P(None, row))(*(part.args for part in parts))
    return [whole[i] for i in range(len(sums))]


def _once(part: Part, axes: tuple[str, ...], value: Array) -> Array:
    """The value on the first device of each axis along which all have the same, zeros on the others."""
    same = [jax.lax.axis_index(axis) == 0 for axis in axes if axis not in part.axes]
    return jnp.where(functools.reduce(operator.and_, same), value, 0) if same else value


def _local(on: Mesh, f: Callable[..., Any], specs: Any, out: Any) -> Callable[..., Any]:
    """f of every device's own parts of the arguments."""
    return jax.shard_map(f, mesh=on, in_specs=specs, out_specs=out, check_vma=False)


def rows(on: Mesh, count: int) -> Any:
    """The entry of a spec for `count` rows of a batch."""
    return along(("data",), count, on) or None


def product(x: Float[Array, "B T *s"], w: Array | Scaled, dot: Callable[..., Array]) -> Part:
    """dot(x, w), where the first axis that is contracted, x's third and w's first, lies along `tensor`.

    What x's third axis holds was made by matrices that lie along `tensor` too, or by `attend`: nothing moves.
    """
    on = passing()
    if on is None:
        return Part(dot, (x, w))
    split = along(("tensor",), x.shape[2], on)
    specs = (P(rows(on, x.shape[0]), None, split or None), _matrix(w, P(split or None)))
    return Part(dot, (x, w), specs, split)


def _matrix(w: Array | Scaled, spec: P, scale: P = P()) -> Any:
    """The spec of a matrix; scales lie whole on every device, a part of them costs nothing."""
    return Scaled(spec, scale) if isinstance(w, Scaled) else spec  # pyright: ignore[reportArgumentType]


def lookup(table: Float[Array, "V *w"], tokens: Int[Array, "B T"], then: Callable[[Array], Array]) -> Part:
    """then(table[tokens]), of a table whose rows lie along `tensor`; `then` leaves zeros zeros."""
    on = passing()
    split = () if on is None else along(("tensor",), table.shape[0], on)

    def run(tokens: Array, table: Array) -> Array:
        if not split:
            return then(table[tokens])
        at = tokens - jax.lax.axis_index(split) * table.shape[0]
        here = (at >= 0) & (at < table.shape[0])
        found = then(table[jnp.where(here, at, 0)])
        return jnp.where(here.reshape(*here.shape, *[1] * (found.ndim - 2)), found, 0)

    return Part(run, (tokens, table), (_row(on, tokens), P(split or None)), split)


def by_rows(f: Callable[..., Any], x: Float[Array, "B *s"], *shared: Any) -> Any:
    """f(x, *shared), which every device makes of its own rows: XLA's partitioner gathers all to sort some of them."""
    on = passing()
    if on is None:
        return f(x, *shared)
    return _local(on, f, (_row(on, x), *[P()] * len(shared)), _row(on, x))(x, *shared)


def whole(x: Float[Array, "B *s"]) -> Float[Array, "B *s"]:
    """x, of which every device has all but the rows of others."""
    on = passing()
    return x if on is None else jax.lax.with_sharding_constraint(x, NamedSharding(on, _row(on, x)))


def _row(on: Mesh | None, x: Array) -> P:
    return P() if on is None else P(rows(on, x.shape[0]))


def mixture(
    x: Float[Array, "B T D"],
    ids: Int[Array, "B T k"],
    weights: Float[Array, "B T k"],
    stacks: tuple[Array | Scaled, Array | Scaled],
    experts: Callable[..., Float[Array, "N D"]],
) -> Part:
    """experts(x, ids, weights, *stacks) over flattened rows, stacks [E, in, out]; on a mesh with first= and of=.

    Experts lie along `expert` and `tensor`, each whole on one device, which gets `first`, the id of its first one,
    and `of`, how many there are in all.
    """
    on, count = passing(), (stacks[0].values if isinstance(stacks[0], Scaled) else stacks[0]).shape[0]
    split = () if on is None else along(("expert", "tensor"), count, on)

    def run(x: Array, ids: Array, weights: Array, *own: Array | Scaled) -> Array:
        flat = (y.reshape(-1, y.shape[-1]) for y in (x, ids, weights))
        size = (own[0].values if isinstance(own[0], Scaled) else own[0]).shape[0]
        some = {"first": jax.lax.axis_index(split) * size, "of": count} if split else {}
        return experts(*flat, *own, **some).reshape(x.shape)

    apart = P(split or None)
    specs = (*[_row(on, x)] * 3, *(_matrix(w, apart, apart) for w in stacks))
    return Part(run, (x, ids, weights, *stacks), specs, split)


def write(
    kv: kv_cache.KV, k: Float[Array, "B T G K"], v: Float[Array, "B T G K"], slots: Int[Array, "B T"]
) -> kv_cache.KV:
    """`cache.write`, by every device to the heads that it has."""
    on = passing()
    if on is None:
        return kv_cache.write(kv, k, v, slots)
    row = rows(on, k.shape[0])
    heads = P(row, None, along(("tensor",), k.shape[2], on) or None)
    return _local(on, kv_cache.write, (heads, heads, heads, P(row)), heads)(kv, k, v, slots)


def attend(
    q: Float[Array, "B T H K"], k: Any, v: Any, ranges: Int[Array, "B T R 2"], **how: Any
) -> Float[Array, "B T H K"]:
    """`turbo.attend`, by every device for its query heads. Too few key heads to divide lie on every device whole."""
    on = passing()
    if on is None:
        return turbo.attend(q, k, v, ranges, **how)
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
