"""Routing in a mixture of experts: their choice, copies of tokens sorted by expert, and the sum of the results.

`route` chooses the most probable experts of each token. `dispatch` gives each expert the hidden states of its tokens as
consecutive rows. Each is one kernel on Hopper (`hopper.rows`), where XLA for GPUs makes four of the choice alone.
`combine` is the plain sum; `fused_norms` computes the same sum in its kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.config import refuse
from mercury_jax.kernels import device as kernel_device
from mercury_jax.kernels.device import HOPPER
from mercury_jax.kernels.grouped_matmul import offsets_of
from mercury_jax.kernels.quantised_rows import QuantisedRows, Rows, refuse_gradient
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


def refuses_route(
    logits: Array | jax.ShapeDtypeStruct, active: int, device: Device | None = None
) -> str | None:
    """Gives the reason why the kernel does not compute `route`."""
    if kernel_device.present(device) != HOPPER:
        return f"the kernel is for {HOPPER}"
    if logits.dtype != jnp.float32:
        return f"logits are {logits.dtype}, not float32"
    experts = logits.shape[-1]
    if experts % THREADS or experts > MOST_EXPERTS or active > MOST_ACTIVE or 0 in logits.shape:
        limits = f"a multiple of {THREADS} up to {MOST_EXPERTS}, of which up to {MOST_ACTIVE}"
        return f"there are {experts} experts, of which {active} are chosen; it takes {limits}"
    return kernel_device.why_off(kernel_device.ROUTING_FORM, device)


def kernel_route(
    logits: Float[Array, "*s E"],
    factors: Float[Array, "E"],
    active: int,
    scale: float = 1.0,
    device: Device | None = None,
) -> tuple[Int[Array, "*s k"], Float[Array, "*s k"]]:
    """Computes `route` with the kernel. There is no gradient.

    Returns:
        As `route`; a token with NaN among its logits has ids E and weights NaN.
    """
    if (why := refuses_route(logits, active, device)) is not None:
        raise refuse("logits", f"{logits.dtype}{list(logits.shape)}", f"others: {why}")
    from mercury_jax.kernels.hopper import rows  # here, because importing Mosaic takes time

    flat = logits.reshape(-1, logits.shape[-1])
    found = rows.route(flat, factors, active, scale, device)
    ids, weights = (a.reshape(*logits.shape[:-1], active) for a in found)
    return ids, weights


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


def refuses_dispatch(
    x: Array | jax.ShapeDtypeStruct,
    expert: Array | jax.ShapeDtypeStruct,
    count: int,
    device: Device | None = None,
) -> str | None:
    """Gives the reason why the kernel does not compute `dispatch`."""
    if kernel_device.present(device) != HOPPER:
        return f"the kernel is for {HOPPER}"
    if x.dtype not in (jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn) or expert.dtype != jnp.int32:
        return f"hidden states are {x.dtype} and ids {expert.dtype}, not bfloat16 or of 8 bits, and int32"
    if x.shape[-1] % WIDTH_QUANTUM or x.shape[-1] > WIDEST or 0 in x.shape:
        return f"the width is {x.shape[-1]}, no multiple of {WIDTH_QUANTUM} up to {WIDEST}"
    if expert.size % THREADS or not 0 < expert.size <= COUNTED_ROWS:
        return f"there are {expert.size} rows, no multiple of {THREADS} up to {COUNTED_ROWS}"
    tokens, active = expert.shape
    if active + offsets_each(tokens, count) > MOST_COUNTS:
        return f"{tokens} programs cannot count {count} experts and {active} rows of each token"
    return kernel_device.why_off(kernel_device.DISPATCH_FORM, device)


def offsets_each(tokens: int, count: int) -> int:
    """Divides the E + 1 offsets among the programs of the kernel."""
    return -(-(count + 1) // tokens)


def kernel_dispatch(
    x: Rows, expert: Int[Array, "N k"], count: int, device: Device | None = None
) -> Dispatched:
    """Computes `dispatch` with the kernel. Differentiable in x if it is an array."""
    values = x.values if isinstance(x, QuantisedRows) else x
    if (why := refuses_dispatch(values, expert, count, device)) is not None:
        raise refuse("x", f"{values.dtype}{list(values.shape)}", f"others: {why}")

    @jax.custom_vjp
    def run(x: Rows, expert: Array) -> Dispatched:
        from mercury_jax.kernels.hopper import rows  # here, because importing Mosaic takes time

        return Dispatched(*rows.dispatch(x, expert, count, device))

    def forward(x: Rows, expert: Array) -> tuple[Dispatched, Array]:
        found = run(x, expert)
        return found, found.rank

    def backward(rank: Array, dy: Dispatched) -> tuple[Array, None]:
        refuse_gradient(isinstance(x, QuantisedRows))
        exact = accumulation_dtype(values.dtype)
        return dy.rows[rank].astype(exact).sum(axis=1).astype(values.dtype), None

    run.defvjp(forward, backward)
    return run(x, expert)
