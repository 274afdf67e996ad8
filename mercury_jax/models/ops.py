"""The operations of a network that are divided among devices: on one device here, over a mesh in `parallel`.

A network gets them as its field `ops`, so that the model files say what is computed and not where. `Ops()` is one
device; `sharded_rows` is a training step on a mesh, `parallel.ops_over` a pass over a cache with tensor and expert
parallelism.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from mercury_jax.models import cache as kv_cache, moe, turbo
from mercury_jax.models.quantise import Scaled
from mercury_jax.sharding import by_rows
from mercury_jax.types import Device

Act = Callable[[Array], Array]


class Term(NamedTuple):
    """A term of a sum, computed by run(*args). Over a mesh its value is the sum over `axes` of run(*local args)."""

    run: Callable[..., Array]
    args: tuple[Any, ...]  # the first one has the batch axis first
    specs: tuple[Any, ...] = ()  # PartitionSpec of each of `args`
    axes: tuple[str, ...] = ()


def dot(x: Float[Array, "*s"], w: Array | Scaled, count: int, mesh: Mesh | None = None) -> Float[Array, "*o"]:
    """x @ w, contracting x's last `count` axes with w's first. mesh: of a training step (`sharding.by_rows`)."""
    axes = (tuple(range(x.ndim - count, x.ndim)), tuple(range(count)))
    values = w.values if isinstance(w, Scaled) else w
    y = jax.lax.dot_general(by_rows(x, mesh), values.astype(x.dtype), (axes, ((), ())))
    y = by_rows(y, mesh)
    return y * w.scale.astype(x.dtype) if isinstance(w, Scaled) else y


def product(x: Float[Array, "B T *s"], w: Array | Scaled, count: int, mesh: Mesh | None = None) -> Term:
    """dot(x, w, count) as a term."""
    return Term(functools.partial(dot, count=count, mesh=mesh), (x, w))


def lookup(table: Float[Array, "V *w"], tokens: Int[Array, "B T"], then: Act) -> Term:
    """then(table[tokens]) as a term; `then` maps zeros to zeros."""
    return Term(lambda tokens, table: then(table[tokens]), (tokens, table))


def mixture(
    x: Float[Array, "B T D"],
    ids: Int[Array, "B T k"],
    weights: Float[Array, "B T k"],
    stacks: tuple[Array | Scaled, Array | Scaled],
    act: Act,
    device: Device | None = None,
) -> Term:
    """`moe.experts` of every token as a term; stacks are [E, D, 2F] and [E, F, D]."""

    def run(x: Array, ids: Array, weights: Array, *own: Any) -> Array:
        flat = (y.reshape(-1, y.shape[-1]) for y in (x, ids, weights))
        return moe.experts(*flat, *own, act, device=device).reshape(x.shape)

    return Term(run, (x, ids, weights, *stacks))


def total(*sums: Sequence[Term]) -> list[Float[Array, "B T *w"]]:
    """The sum of each sequence of terms."""
    return [functools.reduce(operator.add, (term.run(*term.args) for term in terms)) for terms in sums]


class Ops(NamedTuple):
    """What a network calls instead of the functions themselves. The defaults are those of one device.

    dot(x, w, count) -> array; attend(q, k, v, ranges, **) as `turbo.attend`; write(kv, k, v, slots) as `cache.write`.
    product, lookup, mixture -> Term, and total(*sums of terms) -> their values: terms that are summed, or only needed,
        at the same time share one all-reduce over a mesh.
    map_rows(f, x, *shared) -> f(x, *shared), for an f that treats the rows of x independently.
    replicate(x) -> x, of which over a mesh every device has all columns.
    """

    dot: Callable[..., Array] = dot
    attend: Callable[..., Any] = turbo.attend
    write: Callable[..., kv_cache.KV] = kv_cache.write
    product: Callable[..., Term] = product
    lookup: Callable[..., Term] = lookup
    mixture: Callable[..., Term] = mixture
    total: Callable[..., list[Array]] = total
    map_rows: Callable[..., Any] = lambda f, x, *shared: f(x, *shared)
    replicate: Callable[[Array], Array] = lambda x: x


def on_device(device: Device | None) -> Ops:
    """The operations of one device, whose kernels are compiled for `device` (None: for this machine's)."""
    if device is None:
        return Ops()
    attend, experts = (functools.partial(f, device=device) for f in (turbo.attend, mixture))
    return Ops(attend=attend, mixture=experts)


def sharded_rows(mesh: Mesh | None, device: Device | None) -> Ops:
    """The operations of a training step on a mesh: products keep their rows over `data` and `fsdp`."""
    own = on_device(device)
    if mesh is None:
        return own
    return own._replace(dot=functools.partial(dot, mesh=mesh), product=functools.partial(product, mesh=mesh))
