"""The operations of a network that may be divided among devices: a record that is the field `ops` of each network.

Model files say what is computed, this record says where. `Ops()` runs everything on one device, `device_ops` also keeps
the rows of a training step sharded, and `tensor_parallel.cache_ops` runs a pass over a KV cache with tensor and expert
parallelism.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from mercury_jax.models import cache as kv_cache, kv_quant, moe
from mercury_jax.models.weight_quant import QuantisedWeight
from mercury_jax.sharding import constrain_rows
from mercury_jax.types import Device, LoraWeight

Activation = Callable[[Array], Array]
Weight = Array | QuantisedWeight | LoraWeight


class Term(NamedTuple):
    """One summand of a layer's output, not computed yet.

    If heads, hidden units or experts are divided among devices, each device computes a partial value, and the summand
    is the sum of these over the devices. A layer creates terms, and `Ops.sum_terms` computes and adds all terms that
    are needed at the same time, with one all-reduce.

    Attributes:
        run: Computes the term from `args`.
        args: Arrays; the first one has the batch axis first.
        specs: PartitionSpec of each of `args`; () on one device.
        axes: Mesh axes over which the values of the devices must be summed.
    """

    run: Callable[..., Array]
    args: tuple[Any, ...]
    specs: tuple[Any, ...] = ()
    axes: tuple[str, ...] = ()


def dot(x: Float[Array, "*s"], w: Weight, count: int, mesh: Mesh | None = None) -> Float[Array, "*o"]:
    """Contracts the last `count` axes of x with the first `count` axes of w.

    Args:
        x: Activations.
        w: A matrix. If it is quantised, its scales multiply the result; a low-rank addition (LoRA) is added.
        count: Number of contracted axes.
        mesh: Mesh of a training step, on which the rows of x and of the result stay sharded
            (`sharding.constrain_rows`); None: no constraint.

    Returns:
        The product, in the dtype of x.
    """
    if isinstance(w, LoraWeight):
        low_rank = dot(dot(x, w.a, count, mesh), w.b, 1, mesh)
        return dot(x, w.base, count, mesh) + jnp.asarray(w.scale, x.dtype) * low_rank
    axes = (tuple(range(x.ndim - count, x.ndim)), tuple(range(count)))
    values = w.values if isinstance(w, QuantisedWeight) else w
    x = x if mesh is None else constrain_rows(x, mesh)
    y = jax.lax.dot_general(x, values.astype(x.dtype), (axes, ((), ())))
    y = y if mesh is None else constrain_rows(y, mesh)
    return y * w.scale.astype(x.dtype) if isinstance(w, QuantisedWeight) else y


def dot_term(x: Float[Array, "B T *s"], w: Weight, count: int, mesh: Mesh | None = None) -> Term:
    """Makes a term of `dot`.

    Args:
        x: Activations.
        w: A matrix, possibly quantised.
        count: Number of contracted axes.
        mesh: Mesh of a training step, or None.

    Returns:
        The product [B, T, *o] as a term.
    """
    return Term(functools.partial(dot, count=count, mesh=mesh), (x, w))


def embed(table: Float[Array, "V *w"], tokens: Int[Array, "B T"], then: Activation) -> Term:
    """Makes a term that looks up embeddings.

    Args:
        table: Embeddings.
        tokens: Ids.
        then: Function applied to the embeddings; it must map zeros to zeros.

    Returns:
        then(table[tokens]) [B, T, *w] as a term.
    """
    return Term(lambda tokens, table: then(table[tokens]), (tokens, table))


def experts(
    x: Float[Array, "B T D"],
    ids: Int[Array, "B T k"],
    weights: Float[Array, "B T k"],
    stacks: tuple[Weight, Weight],
    act: Activation,
    device: Device | None = None,
) -> Term:
    """Makes a term of `moe.apply_experts`.

    Args:
        x: Hidden states.
        ids: Experts of each token.
        weights: Weight of each of these experts.
        stacks: Matrices of all experts: gate and up [E, D, 2F], and down [E, F, D].
        act: Activation of the gate.
        device: Device to compile kernels for; None: the device of this machine.

    Returns:
        The weighted sum of the experts' outputs [B, T, D] as a term.
    """
    return Term(functools.partial(moe.apply_experts, act=act, device=device), (x, ids, weights, *stacks))


def sum_terms(*sums: Sequence[Term]) -> list[Float[Array, "B T *w"]]:
    """Computes sums of terms.

    Args:
        *sums: The terms of each sum.

    Returns:
        The sums.
    """
    return [functools.reduce(operator.add, (term.run(*term.args) for term in terms)) for terms in sums]


class Ops(NamedTuple):
    """The operations that a network calls. The defaults run on one device.

    Attributes:
        dot: dot(x, w, count) -> array.
        attend: attend(q, k, v, ranges, **options) as `kv_quant.attend`.
        write: write(kv, k, v, slots) as `cache.write`.
        dot_term: dot_term(x, w, count) -> Term.
        embed: embed(table, tokens, then) -> Term.
        experts: experts(x, ids, weights, stacks, act) -> Term.
        sum_terms: sum_terms(*sequences of terms) -> their sums. Sums that are needed at the same time are passed
            together, so that on a mesh they share one all-reduce.
        map_rows: map_rows(f, x, *shared) -> f(x, *shared), for an f that treats the rows of x independently.
        replicate: replicate(x) -> x; on a mesh, gathers all columns of each row on the devices of that row.
    """

    dot: Callable[..., Array] = dot
    attend: Callable[..., Any] = kv_quant.attend
    write: Callable[..., kv_cache.KV] = kv_cache.write
    dot_term: Callable[..., Term] = dot_term
    embed: Callable[..., Term] = embed
    experts: Callable[..., Term] = experts
    sum_terms: Callable[..., list[Array]] = sum_terms
    map_rows: Callable[..., Any] = lambda f, x, *shared: f(x, *shared)
    replicate: Callable[[Array], Array] = lambda x: x


# Initialisation runs the network once to create the parameters. Their shapes and values do not depend on the results of
# attention and experts, so both only return an array of the right shape, and no kernel is chosen or traced.
INIT_OPS = Ops(
    attend=lambda q, k, v, ranges, **options: q,
    experts=lambda x, ids, weights, stacks, act: Term(lambda x: x, (x,)),
)


def device_ops(device: Device | None, mesh: Mesh | None = None) -> Ops:
    """Makes the operations of a pass that runs on one device, or that XLA's partitioner divides among devices.

    Args:
        device: Device to compile kernels for; None: the device of this machine.
        mesh: Mesh of a training step, in which products keep their rows sharded over `data` and `fsdp`; None: no
            constraint.

    Returns:
        Operations without explicit communication.
    """
    ops = Ops()
    if device is not None:
        ops = ops._replace(
            attend=functools.partial(kv_quant.attend, device=device),
            experts=functools.partial(experts, device=device),
        )
    if mesh is not None:
        ops = ops._replace(
            dot=functools.partial(dot, mesh=mesh), dot_term=functools.partial(dot_term, mesh=mesh)
        )
    return ops
