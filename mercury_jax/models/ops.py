"""The operations of a network that are divided among devices, as a record that the networks get as their field `ops`.

Model files state what is computed; this record decides where. `Ops()` runs everything on one device, `device_ops`
also keeps the rows of a training step sharded, and `tensor_parallel.cache_ops` runs a pass over a KV cache with tensor
and expert parallelism.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from mercury_jax.models import cache as kv_cache, kv_quant, moe
from mercury_jax.models.weight_quant import QuantisedWeight
from mercury_jax.sharding import constrain_rows, varying, varying_axes
from mercury_jax.types import Device, LoraWeight

Activation = Callable[[Array], Array]
Weight = Array | QuantisedWeight | LoraWeight


class Term(NamedTuple):
    """One summand of a layer's output, not computed yet.

    Where heads, hidden units or experts are divided among devices, each of them has a part of the value. A layer
    states its terms, and `Ops.sum_terms` computes and adds those that are needed at the same time.

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
        w: A matrix, possibly quantised, whose scales multiply the result, or one with a low-rank addition.
        count: Number of contracted axes.
        mesh: Of a training step: keeps the rows of x and of the result sharded (`sharding.constrain_rows`).

    Returns:
        The product, in the dtype of x.
    """
    if isinstance(w, LoraWeight):
        low_rank = dot(dot(x, w.a, count, mesh), w.b, 1, mesh)
        return dot(x, w.base, count, mesh) + jnp.asarray(w.scale, x.dtype) * low_rank
    values = w.values if isinstance(w, QuantisedWeight) else w
    y = product(constrain_rows(x, mesh), values.astype(x.dtype), count)
    y = constrain_rows(y, mesh)
    return y * w.scale.astype(x.dtype) if isinstance(w, QuantisedWeight) else y


def product(
    x: Float[Array, "*s"], w: Array, count: int, dtype: DTypeLike | None = None
) -> Float[Array, "*o"]:
    """Contracts the last `count` axes of x with the first `count` of w; on a CPU its gradient in w is faster.

    That gradient contracts the rows of x with those of the cotangent. A CPU's product wants the contracted axis of its
    first operand last, so XLA writes a transposed copy of it, and JAX puts the cotangent there: of the logits that copy
    takes longer than the product. Here the narrower of the two is copied. Reverse mode only.

    Args:
        x: Activations.
        w: A matrix, in the dtype of x.
        count: Number of contracted axes.
        dtype: Of the product; None: that of x.

    Returns:
        The product.
    """
    # Inside of a shard_map both factors vary over the same axes: gradients have the types of their arguments.
    x, w = varying((x, w), varying_axes((x, w)))
    return _product(x, w, count, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _product(x: Array, w: Array, count: int, dtype: DTypeLike | None) -> Any:
    return _contract(x, w, count, dtype)


def _contract(x: Array, w: Array, count: int, dtype: DTypeLike | None) -> Array:
    axes = (tuple(range(x.ndim - count, x.ndim)), tuple(range(count)))
    return jax.lax.dot_general(x, w, (axes, ((), ())), preferred_element_type=dtype)


def _product_forward(x: Any, w: Any, count: int, dtype: DTypeLike | None) -> tuple[Array, tuple[Any, ...]]:
    """The product, and each factor where the gradient in the other one is wanted: frozen matrices have none."""
    saved = (x.value if w.perturbed else None, w.value if x.perturbed else None)
    return _contract(x.value, w.value, count, dtype), saved


def _product_backward(
    count: int, dtype: DTypeLike | None, saved: tuple[Any, ...], cotangent: Any
) -> tuple[Array | None, Array | None]:
    x, w = saved
    if isinstance(cotangent, SymbolicZero):
        return None, None
    dx = dw = None
    if w is not None:
        outputs = w.ndim - count
        axes = (tuple(range(cotangent.ndim - outputs, cotangent.ndim)), tuple(range(count, w.ndim)))
        dx = jax.lax.dot_general(cotangent, w, (axes, ((), ())), preferred_element_type=w.dtype)
    if x is not None:
        dw = _matrix_gradient(x, cotangent, count)
    return dx, dw


def _matrix_gradient(x: Array, cotangent: Array, count: int) -> Array:
    """The gradient in w of `_product`."""
    rows = x.ndim - count
    leading = tuple(range(rows))
    axes = ((leading, leading), ((), ()))

    def cotangent_first(x: Array, cotangent: Array) -> Array:
        dw = jax.lax.dot_general(cotangent, x, axes, preferred_element_type=x.dtype)
        outputs = cotangent.ndim - rows
        return dw.transpose(*range(outputs, dw.ndim), *range(outputs))

    def activations_first(x: Array, cotangent: Array) -> Array:
        return jax.lax.dot_general(x, cotangent, axes, preferred_element_type=x.dtype)

    if math.prod(x.shape[rows:]) > math.prod(cotangent.shape[rows:]):
        return cotangent_first(x, cotangent)
    return jax.lax.platform_dependent(x, cotangent, cpu=activations_first, default=cotangent_first)


_product.defvjp(_product_forward, _product_backward, symbolic_zeros=True)


def dot_term(x: Float[Array, "B T *s"], w: Weight, count: int, mesh: Mesh | None = None) -> Term:
    """`dot` as a term.

    Args:
        x: Activations.
        w: A matrix, possibly quantised.
        count: Number of contracted axes.
        mesh: Of a training step.

    Returns:
        The product [B, T, *o].
    """
    return Term(functools.partial(dot, count=count, mesh=mesh), (x, w))


def embed(table: Float[Array, "V *w"], tokens: Int[Array, "B T"], then: Activation) -> Term:
    """Looks up embeddings.

    Args:
        table: Embeddings.
        tokens: Ids.
        then: Applied to the embeddings; maps zeros to zeros.

    Returns:
        then(table[tokens]) [B, T, *w].
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
    """`moe.apply_experts` as a term.

    Args:
        x: Hidden states.
        ids: Experts of each token.
        weights: Weight of each of them.
        stacks: [E, D, 2F] and [E, F, D].
        act: Activation of the gate.
        device: To compile kernels for; None: the device of this machine.

    Returns:
        The weighted sum of the experts' outputs [B, T, D].
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
    """What a network calls instead of the functions themselves. The defaults run on one device.

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
        replicate: replicate(x) -> x; on a mesh every device then holds all columns of its rows.
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


# Initialising runs the network once to create its parameters, whose shapes and values do not depend on what attention
# and experts compute. So both only return an array of the right shape, and no kernel is chosen or traced.
INIT_OPS = Ops(
    attend=lambda q, k, v, ranges, **options: q,
    experts=lambda x, ids, weights, stacks, act: Term(lambda x: x, (x,)),
)


def device_ops(device: Device | None, mesh: Mesh | None = None) -> Ops:
    """The operations of a pass that XLA's partitioner divides among devices, if there are several.

    Args:
        device: To compile kernels for; None: the device of this machine.
        mesh: Of a training step, whose products keep their rows sharded over `data` and `fsdp`; None: otherwise.

    Returns:
        Operations that do not communicate themselves.
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
