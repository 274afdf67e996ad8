"""The operations of a network that may be divided among devices: a record that is the field `ops` of each network.

Model files say what is computed, this record says where. `Ops()` runs everything on one device, `device_ops` also keeps
the rows of a training step sharded, and `tensor_parallel.cache_ops` runs a pass over a KV cache with tensor and expert
parallelism.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from mercury_jax.models import cache as kv_cache, kv_quant, moe, norms as plain_norms, rope
from mercury_jax.models.weight_quant import (
    QuantisedWeight,
    RowQuantisedWeight,
    lookup,
    multiply,
)
from mercury_jax.ops.attention.op import ATTENTION, CACHED_ATTENTION
from mercury_jax.ops.device import HOPPER, present
from mercury_jax.ops.experts.grouped_matmul import (
    FEW_ROWS,
    GROUPED,
    Prepared,
    grouped_matmuls,
    prepare as prepare_product,
)
from mercury_jax.ops.experts.op import DISPATCH, ROUTE, ExpertOutputs
from mercury_jax.ops.norms.op import ROUND_ROWS, Projections, Residual
from mercury_jax.ops.quantised_rows import QuantisedRows, Rows, dense
from mercury_jax.sharding import constrain_rows
from mercury_jax.types import Device, LoraWeight, accumulation_dtype

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

    run: Callable[..., Any]
    args: tuple[Any, ...]
    specs: tuple[Any, ...] = ()
    axes: tuple[str, ...] = ()


def dot(x: Rows, w: Weight, count: int, mesh: Mesh | None = None) -> Float[Array, "*o"]:
    """Contracts the last `count` axes of x with the first `count` axes of w.

    Args:
        mesh: Mesh of a training step, on which the rows of x and of the result stay sharded
            (`sharding.constrain_rows`); None: no constraint.
    """
    if isinstance(w, LoraWeight):
        low_rank = dot(dot(x, w.a, count, mesh), w.b, 1, mesh)
        return dot(x, w.base, count, mesh) + jnp.asarray(w.scale, low_rank.dtype) * low_rank
    x = x if mesh is None else constrain_rows(dense(x), mesh)
    if isinstance(w, QuantisedWeight):
        y = multiply(x, w, count)
    else:
        x = dense(x)
        axes = (tuple(range(x.ndim - count, x.ndim)), tuple(range(count)))
        y = jax.lax.dot_general(x, w.astype(x.dtype), (axes, ((), ())))
    return y if mesh is None else constrain_rows(y, mesh)


def dot_term(x: Float[Array, "B T *s"], w: Weight, count: int, product: Callable[..., Array] = dot) -> Term:
    """Makes a term of `dot`.

    Args:
        product: Computes the product: `dot` or `local_dot` with some of their arguments.
    """
    return Term(functools.partial(product, count=count), (x, w))


def gated_dot(
    x: Rows,
    gate: Weight,
    up: Weight,
    act: Activation,
    product: Callable[..., Array] = dot,
) -> Float[Array, "*s F"]:
    """Computes act(x gate) * (x up).

    Args:
        product: Computes the products: `dot` with some of its arguments.
    """
    return act(product(x, gate, 1)) * product(x, up, 1)


def exact_dot(x: Float[Array, "*s D"], w: Weight) -> Float[Array, "*s F"]:
    """Computes x w in at least fp32 from `dot`, for the logits of a router."""
    return dot(x, w, 1).astype(accumulation_dtype(x.dtype))


def of_few_rows(
    plain: Callable[..., Any],
    x: Rows,
    *products: tuple[Weight, ...],
    count: int = 1,
    act: Activation | None = None,
    dtype: Any = None,
    device: Device | None = None,
) -> Any:
    """Computes plain(x, *matrices), products of x on one device, in one launch of the grouped kernel if x has few rows.

    For so few rows XLA divides the inputs and writes several partial sums in fp32; the kernel applies the scales of an
    8-bit matrix, and a gate, to the sums before anything is written.

    Args:
        plain: Computes one result, or a tuple of one for each product.
        products: The matrix of each product, or gate and up with `act`.
        dtype: Of the results; None: that of x.
    """
    prepared = [_few_rows(x, matrices, count, act, device, dtype) for matrices in products]
    matrices = tuple(w for product in products for w in product)
    if not all(prepared):
        return plain(x, *matrices)
    like, structure = jax.tree.flatten(jax.eval_shape(plain, x, *matrices))
    width = len(products[0])

    def kernel(x: Rows, *matrices: Weight) -> Any:
        each = [prepare(x, *matrices[i * width :][:width]) for i, prepare in enumerate(prepared) if prepare]
        (y,) = grouped_matmuls(*each, joined=len(each) > 1)
        widths = [one.size // y.shape[0] for one in like]
        parts = jnp.split(y, np.cumsum(widths)[:-1], axis=1) if len(like) > 1 else [y]
        return structure.unflatten([part.reshape(one.shape) for part, one in zip(parts, like, strict=True)])

    return jax.lax.platform_dependent(x, *matrices, cuda=kernel, default=plain)


def local_dot(x: Rows, w: Weight, count: int, device: Device | None = None) -> Float[Array, "*o"]:
    """Computes `dot` on one device."""
    return of_few_rows(functools.partial(dot, count=count), x, (w,), count=count, device=device)


def local_exact_dot(x: Float[Array, "*s D"], w: Weight, device: Device | None = None) -> Float[Array, "*s F"]:
    """Computes `exact_dot` on one device; the sums of the kernel are fp32."""
    if not isinstance(w, jax.Array):
        return exact_dot(x, w)
    return of_few_rows(exact_dot, x, (w,), dtype=jnp.float32, device=device)


def local_gated_dot(
    x: Rows, gate: Weight, up: Weight, act: Activation, device: Device | None = None
) -> Float[Array, "*s F"]:
    """Computes `gated_dot` on one device."""
    return of_few_rows(functools.partial(gated_dot, act=act), x, (gate, up), act=act, device=device)


def _few_rows(
    x: Rows | jax.ShapeDtypeStruct,
    matrices: tuple[Weight, ...],
    count: int,
    act: Activation | None,
    device: Device | None,
    result: Any = None,
) -> Callable[..., Prepared] | None:
    """Makes a function of x and the matrices that prepares their product by the kernel; None if the kernel refuses."""
    if not all(w.plain if isinstance(w, QuantisedWeight) else isinstance(w, jax.Array) for w in matrices):
        return None  # low-rank additions, and matrices with a scale for each group of inputs
    if len({type(w) if isinstance(w, QuantisedWeight) else None for w in matrices}) > 1:
        return None
    first, like = matrices[0], jax.eval_shape(dense, x)
    if isinstance(x, QuantisedRows) and not isinstance(first, RowQuantisedWeight):
        return None
    inputs, dtype = math.prod(like.shape[like.ndim - count :]), like.dtype
    rows = like.size // inputs
    unpacked = lambda f: f if act is not None else f[0]  # one matrix or a pair

    def operands(*matrices: Any) -> tuple[Any, Any]:
        """The matrices of one expert in the dtype of x; or in 8 bits, and their scales."""
        if not isinstance(first, QuantisedWeight):
            return unpacked(tuple(w.astype(dtype).reshape(1, inputs, -1) for w in matrices)), None
        values = tuple(w.values.reshape(1, -1, inputs) for w in matrices)
        return unpacked(values), unpacked(tuple(w.scale.reshape(1, -1) for w in matrices))

    shapes = jax.eval_shape(operands, *matrices)
    flat = jax.ShapeDtypeStruct((rows, inputs), dtype)
    # XLA's products of more rows are as fast.
    w, scale = shapes
    if rows > FEW_ROWS or GROUPED.refuses(flat, w, None, scale, act=act, dtype=result, device=device):
        return None

    def prepare(x: Rows, *matrices: Array | QuantisedWeight) -> Prepared:
        how: Any = dict(act=act, dtype=result or dtype, device=device)
        if isinstance(first, RowQuantisedWeight):
            if not isinstance(x, QuantisedRows):
                flat = x.reshape(rows, inputs)
                x = QuantisedRows(*ROUND_ROWS.run(flat, dtype=first.values.dtype, device=device))
            x, how["row_scale"] = x.values, x.scale.reshape(rows)
        assert not isinstance(x, QuantisedRows)
        w, scale = operands(*matrices)
        return prepare_product(x.reshape(rows, inputs), w, jnp.asarray([0, rows], jnp.int32), scale, **how)

    return prepare


def embed(table: Array | QuantisedWeight, tokens: Int[Array, "B T"], then: Activation) -> Term:
    """Makes a term that looks up embeddings."""
    return Term(lambda tokens, table: then(lookup(table, tokens)), (tokens, table))


def row_dtype(*weights: Weight, device: Device | None = None) -> Any:
    """The dtype of 8 bits to which the norm that some products read is rounded by the kernel that computes it."""
    found = {w.values.dtype if isinstance(w, RowQuantisedWeight) and w.plain else None for w in weights}
    return found.pop() if len(found) == 1 and present(device) == HOPPER else None


def experts(
    x: Rows,
    ids: Int[Array, "B T k"],
    weights: Float[Array, "B T k"],
    stacks: tuple[Weight, Weight],
    act: Activation,
    combined: bool = True,
    device: Device | None = None,
) -> Term:
    """Makes a term of `moe.apply_experts`.

    Args:
        stacks: Matrices of all experts: gate and up [E, D, 2F], and down [E, F, D].
    """
    run = moe.apply_experts if combined else moe.expert_outputs
    return Term(functools.partial(run, act=act, device=device), (x, ids, weights, *stacks))


def local_feed_forwards(
    x: Rows,
    matrices: tuple[Weight, Weight, Weight],
    routed: Term,
    act: Activation,
    device: Device | None = None,
) -> list[Float[Array, "B T D"] | ExpertOutputs]:
    """Computes a gated feed-forward and that of experts beside it on one device, their products in shared launches."""
    states, ids, weights, *stacks = routed.args
    gate, up, down = matrices

    def plain(x: Rows, matrices: Any, args: Any) -> tuple[Array, Array, Array]:
        gate, up, down = matrices
        outputs = routed.run(*args)
        return dot(gated_dot(x, gate, up, act), down, 1), outputs.rows, outputs.rank

    like = jax.eval_shape(plain, x, matrices, routed.args)[0]
    hidden = jax.eval_shape(functools.partial(gated_dot, act=act), x, gate, up)
    first, second = _few_rows(x, (gate, up), 1, act, device), _few_rows(hidden, (down,), 1, None, device)
    flat = lambda ids, states: (
        ids.reshape(-1, ids.shape[-1]), jax.tree.map(lambda y: y.reshape(-1, *y.shape[ids.ndim - 1 :]), states)
    )  # fmt: skip
    expert, rows = jax.eval_shape(flat, ids, states)
    if first is None or second is None or moe.kernels_refuse(rows, expert, stacks, device, act):
        units = local_gated_dot(x, gate, up, act, device)
        return sum_terms([dot_term(units, down, 1, functools.partial(local_dot, device=device))], [routed])

    def kernel(x: Rows, matrices: Any, args: Any) -> tuple[Array, Array, Array]:
        states, ids, _, gate_up, down = args
        expert, rows = flat(ids, states)
        found = DISPATCH.run(rows, expert, count=gate_up.shape[0], backend="hopper", device=device)
        multiply = functools.partial(moe.expert_product, offsets=found.offsets, device=device)
        wide, narrow = grouped_matmuls(first(x, *matrices[:2]), multiply(found.rows, gate_up, act=act))
        y, out = grouped_matmuls(second(wide.reshape(hidden.shape), matrices[2]), multiply(narrow, down))
        return y.reshape(like.shape), out, found.rank.reshape(ids.shape)

    y, out, rank = jax.lax.platform_dependent(x, matrices, routed.args, cuda=kernel, default=plain)
    return [y, ExpertOutputs(out, rank, weights)]


def sum_terms(*sums: Sequence[Term]) -> list[Float[Array, "B T *w"] | ExpertOutputs]:
    """Computes sums of terms."""
    return [functools.reduce(operator.add, (term.run(*term.args) for term in terms)) for terms in sums]


class ResidualStream(NamedTuple):
    """Hidden states, and what a layer adds to them: one kernel computes the sum and the norms that read it."""

    x: Float[Array, "*s D"]
    added: Residual


def add(x: Float[Array, "*s D"], residual: Residual, eps: float) -> Float[Array, "*s D"]:
    """Adds what a layer computed to hidden states."""
    return plain_norms.residual_norms(x, residual, [], eps)[0]


def norms(
    x: Float[Array, "*s D"] | ResidualStream,
    factors: Sequence[Float[Array, "D"]],
    eps: float,
    rounded: Sequence[Any] = (),
    device: Device | None = None,
) -> tuple[Float[Array, "*s D"], list[Rows]]:
    """Computes RMS norms of hidden states with some factors; of a `ResidualStream` in the kernel, if there is one.

    Args:
        rounded: Dtypes of 8 bits to which the kernel rounds the norms of a stream, from `row_dtype`, or None. What no
            kernel computes stays as it is: the products round it.
    """
    if not isinstance(x, ResidualStream):
        return x, [(plain_norms.rms_normalise(x, eps) * factor).astype(x.dtype) for factor in factors]
    op = plain_norms.RESIDUAL_NORMS
    rounded = () if op.refuses(x.x, device=device) else tuple(rounded)
    return op.run(*x, list(factors), eps=eps, rounded=rounded, device=device)


def project_heads(x: Rows, matrices: Sequence[Weight | None]) -> Projections:
    """Projects hidden states to queries, keys and values on one device."""
    q, k, *v = (dot(x, w, 1) for w in matrices if w is not None)
    return Projections(q, k, v[0] if v else None)


def local_project_heads(
    x: Rows, matrices: Sequence[Weight | None], device: Device | None = None
) -> Projections:
    """Computes `project_heads`, of few rows in one launch, whose result the next kernel reads where it is."""
    products = [(w,) for w in matrices if w is not None]
    q, k, *v = of_few_rows(lambda x, *own: tuple(dot(x, w, 1) for w in own), x, *products, device=device)
    return Projections(q, k, v[0] if v else None)


# The operations that have kernels, those that a pass needs first before the others.
OPERATIONS = (
    CACHED_ATTENTION,
    GROUPED,
    plain_norms.RESIDUAL_NORMS,
    ROUND_ROWS,
    ROUTE,
    DISPATCH,
    rope.NORM_ROPE_WRITE,
    ATTENTION,
)


class Ops(NamedTuple):
    """The operations that a network calls. The defaults run on one device.

    Attributes:
        dot: dot(x, w, count) -> array.
        attend: attend(q, k, v, ranges, **options) as `kv_quant.attend`.
        write: write(kv, k, v, slots) as `cache.write`.
        project_heads: project_heads(x, matrices) -> projections for `norm_rope_write`.
        norm_rope_write: norm_rope_write(x, factors, table, kv, slots, eps=) -> queries and cache. Only if
            `whole_heads`.
        dot_term: dot_term(x, w, count) -> Term.
        gated_dot: gated_dot(x, gate, up, act) -> array.
        exact_dot: exact_dot(x, w) -> array in fp32.
        add: add(x, residual, eps) -> the sum, or a `ResidualStream` whose sum is computed with the next norms.
        norms: norms(x or stream, factors, eps, rounded) -> x and its norms.
        row_dtype: row_dtype(*weights) -> dtype to which `norms` rounds the rows of their products, or None.
        embed: embed(table, tokens, then) -> Term.
        experts: experts(x, ids, weights, stacks, act, combined) -> Term.
        feed_forwards: feed_forwards(x, matrices, term of experts, act) -> outputs of a gated feed-forward and of
            experts beside it; None: they are two terms.
        sum_terms: sum_terms(*sequences of terms) -> their sums. Sums that are needed at the same time are passed
            together, so that on a mesh they share one all-reduce.
        route: route(logits, factors, active, scale) as `ops.experts.op.route`.
        map_rows: map_rows(f, x, *shared) -> f(x, *shared), for an f that treats the rows of x independently.
        replicate: replicate(x) -> x; on a mesh, gathers all columns of each row on the devices of that row.
        whole_heads: Whether a device has all heads, so that queries and keys may be concatenated.
    """

    dot: Callable[..., Array] = dot
    attend: Callable[..., Any] = kv_quant.attend
    write: Callable[..., kv_cache.KV] = kv_cache.write
    project_heads: Callable[..., Projections] = project_heads
    norm_rope_write: Callable[..., tuple[Array, kv_cache.KV]] = rope.norm_rope_write
    dot_term: Callable[..., Term] = dot_term
    gated_dot: Callable[..., Array] = gated_dot
    exact_dot: Callable[..., Array] = exact_dot
    add: Callable[..., Array | ResidualStream] = add
    norms: Callable[..., tuple[Array, list[Rows]]] = norms
    row_dtype: Callable[..., Any] = lambda *weights: None
    embed: Callable[..., Term] = embed
    experts: Callable[..., Term] = experts
    feed_forwards: Callable[..., list[Any]] | None = None
    sum_terms: Callable[..., list[Any]] = sum_terms
    route: Callable[..., tuple[Array, Array]] = ROUTE.plain
    map_rows: Callable[..., Any] = lambda f, x, *shared: f(x, *shared)
    replicate: Callable[[Array], Array] = lambda x: x
    whole_heads: bool = True


# Initialisation runs the network once to create the parameters. Their shapes and values do not depend on the results of
# attention and experts, so both only return an array of the right shape, and no kernel is chosen or traced.
INIT_OPS = Ops(
    attend=lambda q, k, v, ranges, **options: q,
    experts=lambda x, ids, weights, stacks, act, **options: Term(lambda x: x, (x,)),
)


def device_ops(device: Device | None, mesh: Mesh | None = None) -> Ops:
    """Makes the operations of a pass that runs on one device, or that XLA's partitioner divides among devices.

    Args:
        mesh: Mesh of a training step, in which products keep their rows sharded over `data` and `fsdp`; None: no
            constraint.
    """
    ops = Ops()
    if device is not None:
        ops = ops._replace(
            attend=functools.partial(kv_quant.attend, device=device),
            experts=functools.partial(experts, device=device),
        )
    if mesh is not None:
        product = functools.partial(dot, mesh=mesh)
        ops = ops._replace(
            dot=product,
            dot_term=functools.partial(dot_term, product=product),
            gated_dot=functools.partial(gated_dot, product=product),
        )
    return ops
