"""Routing in a mixture of experts: their choice, copies of tokens sorted by expert, and the sum of the results.

`route` chooses the most probable experts of each token. `dispatch` gives each expert the hidden states of its tokens as
consecutive rows. Each is one kernel on Hopper (`hopper`), where XLA for GPUs makes four of the choice alone.
`combine` is the plain sum; the kernel of `ops.norms.op` computes the same sum.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.ops.experts.grouped_matmul import offsets_of
from mercury_jax.ops.operation import Kernel, Op, device_code
from mercury_jax.ops.quantised_rows import QuantisedRows, Rows, refuse_gradient
from mercury_jax.types import Device, accumulation_dtype

COUNTED_ROWS = 4096  # rows up to which the kernel sorts them by counting
THREADS = 128  # of a program; it holds the keys of all rows, as many in each thread
WIDTH_QUANTUM = 256  # numbers that the threads of a program load at once, two each
WIDEST = 6144  # as registers allow
MOST_COUNTS = 64  # numbers of smaller keys that a program computes
MOST_EXPERTS, MOST_ACTIVE = 1024, 16  # of the choice


def route(
    logits: Float[Array, "*s E"], factors: Float[Array, "E"], active: int, scale: float = 1.0
) -> tuple[Int[Array, "*s k"], Float[Array, "*s k"]]:
    """Chooses the k most probable experts, and their weights: probability / sum of the k probabilities * factor."""
    weights, ids = jax.lax.top_k(jax.nn.softmax(logits * scale, axis=-1), active)
    weights = weights / weights.sum(axis=-1, keepdims=True)
    return ids, weights * factors[ids].astype(weights.dtype)


def _refuses_route(logits: Array | jax.ShapeDtypeStruct, factors: Any, active: int, **how: Any) -> str | None:
    if logits.dtype != jnp.float32:
        return f"logits are {logits.dtype}, not float32"
    experts = logits.shape[-1]
    if experts % THREADS or experts > MOST_EXPERTS or active > MOST_ACTIVE or 0 in logits.shape:
        limits = f"a multiple of {THREADS} up to {MOST_EXPERTS}, of which up to {MOST_ACTIVE}"
        return f"there are {experts} experts, of which {active} are chosen; it takes {limits}"
    return None


def _route(
    logits: Float[Array, "*s E"],
    factors: Float[Array, "E"],
    active: int,
    scale: float = 1.0,
    device: Device | None = None,
) -> tuple[Int[Array, "*s k"], Float[Array, "*s k"]]:
    """Computes `route`; a token with NaN among its logits has ids E and weights NaN."""
    flat = logits.reshape(-1, logits.shape[-1])
    found = device_code("mercury_jax.ops.experts.hopper", "route")(flat, factors, active, scale, device)
    ids, weights = (a.reshape(*logits.shape[:-1], active) for a in found)
    return ids, weights


ROUTE = Op(
    "routing", route, {"hopper": Kernel(_refuses_route, _route)},
    fallback="softmax, a sort and a gather, by XLA", cases="mercury_jax.ops.experts.cases",
)  # fmt: skip


class Dispatched(NamedTuple):
    """Hidden states for each expert.

    Attributes:
        rows: Sorted by expert, M = N * k.
        rank: For each token the places of its rows.
        offsets: The rows of expert e are offsets[e] .. offsets[e + 1] - 1. More numbers may follow: without a slice the
            kernels read the array in which they were computed.
    """

    rows: Rows
    rank: Int[Array, "N k"]
    offsets: Int[Array, "offsets"]


class ExpertOutputs(NamedTuple):
    """Outputs of the experts, which `combine` sums for each token.

    Attributes:
        rows: Outputs, sorted by expert.
        rank: For each token the places of its rows.
        weights: Weight of each of these rows.
    """

    rows: Float[Array, "M D"]
    rank: Int[Array, "*s k"]
    weights: Float[Array, "*s k"]


def dispatch(x: Rows, expert: Int[Array, "N k"], count: int) -> Dispatched:
    """Copies the hidden states of each token to the rows of its experts."""
    flat = expert.reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    rank = jnp.zeros_like(order).at[order].set(jnp.arange(flat.size, dtype=jnp.int32), unique_indices=True)
    rows = jax.tree.map(lambda y: y[order // expert.shape[1]], x)
    return Dispatched(rows, rank.reshape(expert.shape), offsets_of(jnp.bincount(flat, length=count)))


def combine(outputs: ExpertOutputs, held: Bool[Array, "*s k"] | None = None) -> Float[Array, "*s D"]:
    """Computes the weighted sum of the outputs of each token's experts."""
    found, exact = outputs.rows[outputs.rank], accumulation_dtype(outputs.rows.dtype)  # [*s, k, D]
    if held is not None:
        found = jnp.where(held[..., None], found, 0)
    # A sum and not a product of matrices: XLA for GPUs computes it in the kernel that gathers the rows.
    weights = outputs.weights[..., None].astype(exact)
    return (weights * found.astype(exact)).sum(axis=-2).astype(outputs.rows.dtype)


def _refuses_dispatch(
    x: Rows | jax.ShapeDtypeStruct, expert: Array | jax.ShapeDtypeStruct, count: int, **how: Any
) -> str | None:
    x = x.values if isinstance(x, QuantisedRows) else x
    if x.dtype not in (jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn) or expert.dtype != jnp.int32:
        return f"hidden states are {x.dtype} and ids {expert.dtype}, not bfloat16 or of 8 bits, and int32"
    if x.shape[-1] % WIDTH_QUANTUM or x.shape[-1] > WIDEST or 0 in x.shape:
        return f"the width is {x.shape[-1]}, no multiple of {WIDTH_QUANTUM} up to {WIDEST}"
    if expert.size % THREADS or not 0 < expert.size <= COUNTED_ROWS:
        return f"there are {expert.size} rows, no multiple of {THREADS} up to {COUNTED_ROWS}"
    tokens, active = expert.shape
    if active + offsets_each(tokens, count) > MOST_COUNTS:
        return f"{tokens} programs cannot count {count} experts and {active} rows of each token"
    return None


def offsets_each(tokens: int, count: int) -> int:
    """Divides the E + 1 offsets among the programs of the kernel."""
    return -(-(count + 1) // tokens)


def _dispatch(x: Rows, expert: Int[Array, "N k"], count: int, device: Device | None = None) -> Dispatched:
    """Computes `dispatch`, with a gradient in x that is gathered and summed in fp32: the plain one scatters."""

    launch = device_code("mercury_jax.ops.experts.hopper", "dispatch")

    @jax.custom_vjp
    def run(x: Rows, expert: Array) -> Dispatched:
        return Dispatched(*launch(x, expert, count, device))

    def forward(x: Rows, expert: Array) -> tuple[Dispatched, Array]:
        found = run(x, expert)
        return found, found.rank

    def backward(rank: Array, dy: Dispatched) -> tuple[Array, None]:
        refuse_gradient(isinstance(x, QuantisedRows))
        assert not isinstance(dy.rows, QuantisedRows)
        return dy.rows[rank].astype(jnp.float32).sum(axis=1).astype(dy.rows.dtype), None

    run.defvjp(forward, backward)
    return run(x, expert)


DISPATCH = Op(
    "dispatch", dispatch, {"hopper": Kernel(_refuses_dispatch, _dispatch, plain_gradient=False)},
    fallback="a sort and a gather, by XLA", cases="mercury_jax.ops.experts.cases",
)  # fmt: skip
