"""Norms as one kernel with what stands around them, on Hopper: a residual sum, or RoPE and the cache write.

Between two products of a layer XLA for GPUs makes four or five kernels of a residual sum and the norms that read it,
each of which reads every hidden state again. Between the projections and attention it makes five: the sums of squares
of the heads, 1 / rms, the queries in the order in which the attention kernel reads them, and a scatter each for keys
and values. vLLM calls its own kernel of this kind `fused_qk_norm_rope`. `models.norms` and `models.rope` have the plain
forms, with which they make an operation of these kernels. Rows that no such kernel holds are rounded by one of their
own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.ops.experts.op import ExpertOutputs
from mercury_jax.ops.operation import Kernel, Op, device_code
from mercury_jax.ops.quantised_rows import QuantisedRows, Rows, quantise_rows
from mercury_jax.types import Device

HIDDEN_QUANTUM = 256  # numbers of hidden states that the 128 threads of a program load at once, two each
WIDEST = 6144  # as registers allow: 48 numbers a thread of each array


class Residual(NamedTuple):
    """What a layer adds to its hidden states.

    Attributes:
        branches: Outputs of the layer [..., D], one or two. Outputs of experts are combined first.
        factors: For each branch the factors [D] of its norm; None: the branch is added as it is.
        post: Factors of a norm of the sum of the branches; None: no norm.
        scales: Numbers [1] that multiply the new hidden states: none, one, or two among which `choice` selects.
        choice: For each vector [...] whether the second of `scales` multiplies it; None if there are not two.
    """

    branches: tuple[Float[Array, "*s D"] | ExpertOutputs, ...]
    factors: tuple[Float[Array, "D"] | None, ...]
    post: Float[Array, "D"] | None = None
    scales: tuple[Float[Array, "1"], ...] = ()
    choice: Bool[Array, "*s"] | None = None


def _refuses_residual(x: Array | jax.ShapeDtypeStruct, *more: Any, **how: Any) -> str | None:
    if x.dtype != jnp.bfloat16:
        return f"hidden states are {x.dtype}, not bfloat16"
    if x.shape[-1] % HIDDEN_QUANTUM or x.shape[-1] > WIDEST or 0 in x.shape:
        return f"the width is {x.shape[-1]}, no multiple of {HIDDEN_QUANTUM} up to {WIDEST}"
    return None


def _residual_norms(
    x: Float[Array, "*s D"],
    residual: Residual,
    factors: Sequence[Float[Array, "D"]],
    eps: float,
    rounded: Sequence[Any] = (),
    device: Device | None = None,
) -> tuple[Float[Array, "*s D"], list[Rows]]:
    flat = lambda y: y.reshape(-1, y.shape[-1])
    choice = None if residual.choice is None else residual.choice.reshape(-1).astype(jnp.int32)
    branches = tuple(
        y._replace(rank=flat(y.rank), weights=flat(y.weights)) if isinstance(y, ExpertOutputs) else flat(y)
        for y in residual.branches
    )
    flattened = residual._replace(branches=branches, choice=choice)
    launch = device_code("mercury_jax.ops.norms.hopper", "residual_norms")
    found = launch(flat(x), flattened, list(factors), eps, tuple(rounded), device)
    return jax.tree.map(lambda y: y.reshape(*x.shape[:-1], *y.shape[1:]), found)


RESIDUAL_NORMS = {"hopper": Kernel(_refuses_residual, _residual_norms)}

HEAD_QUANTUM = 256  # of the head size: the 128 threads of a program load half a head at once
# Numbers of the heads of a key head, queries included, that fit in the registers of a program.
LARGEST_GROUP = 8192

KVArrays = tuple[Float[Array, "B S G K"], Float[Array, "B S G K"]]  # keys and values of a layer's cache
Table = tuple[Float[Array, "B T 1 C"], Float[Array, "B T 1 C"]]  # cosines and sines of RoPE


class Projections(NamedTuple):
    """Projected hidden states of a layer.

    Attributes:
        q: Queries.
        k: Keys.
        v: Values; None: the keys before their norm and RoPE.
    """

    q: Float[Array, "B T H K"]
    k: Float[Array, "B T G K"]
    v: Float[Array, "B T G K"] | None


class HeadFactors(NamedTuple):
    """Factors of the norms of queries and keys; values are normalised without factors."""

    q: Float[Array, "K"]
    k: Float[Array, "K"]


def _refuses_heads(
    x: Projections, factors: Any, table: tuple[Any, Any], kv: tuple[object, object], *more: Any, **how: Any
) -> str | None:
    cached = [getattr(y, "dtype", type(y).__name__) for y in kv]
    if (other := [str(d) for d in cached if d != jnp.bfloat16]) != []:
        return f"the cache holds {other[0]}, not bfloat16"
    if x.q.dtype != jnp.bfloat16:
        return f"queries are {x.q.dtype}, not bfloat16"
    heads, groups, width = x.q.shape[2], x.k.shape[2], x.q.shape[3]
    if width % HEAD_QUANTUM or 0 in x.q.shape:
        return f"the head size is {width}, no multiple of {HEAD_QUANTUM}"
    if heads % groups or (heads // groups + 2) * width > LARGEST_GROUP:
        return f"{heads} query heads and {groups} key heads of {width} do not fit in its registers"
    if (pairs := table[0].shape[-1]) * 2 != width:
        return f"RoPE has {pairs} pairs, not {width // 2}"
    return None


def _norm_rope_write(
    x: Projections,
    factors: HeadFactors,
    table: Table,
    kv: KVArrays,
    slots: Int[Array, "B T"],
    eps: float,
    device: Device | None = None,
) -> tuple[Float[Array, "B T H K"], KVArrays]:
    launch = device_code("mercury_jax.ops.norms.hopper", "norm_rope_write")
    q, written = launch(x, factors, table, tuple(kv), slots, eps, device)
    return q, jax.tree.unflatten(jax.tree.structure(kv), written)


NORM_ROPE_WRITE = {"hopper": Kernel(_refuses_heads, _norm_rope_write)}

THREADS = 128  # of a program that rounds rows; it holds as many numbers in each thread
MOST_NUMBERS = 12288  # of such a program, as registers allow


def _rows_of_a_program(x: Float[Any, "M W"]) -> int:
    return math.lcm(x.shape[1], THREADS) // x.shape[1]


def _refuses_rows(x: Float[Any, "M W"], **how: Any) -> str | None:
    if x.dtype != jnp.bfloat16:
        return f"rows are {x.dtype}, not bfloat16"
    count = _rows_of_a_program(x)
    if len(x) % count or not 0 < count * x.shape[1] <= MOST_NUMBERS:
        return (
            f"there are {len(x)} rows of {x.shape[1]}; a program takes {count}, up to {MOST_NUMBERS} numbers"
        )
    return None


def _round_rows(x: Float[Array, "M W"], dtype: Any, device: Device | None = None) -> QuantisedRows:
    launch = device_code("mercury_jax.ops.norms.hopper", "quantise_rows")
    return launch(x, _rows_of_a_program(x), dtype, device)


ROUND_ROWS = Op(  # it passes the check of the norms, which round rows with the same arithmetic
    "rows", quantise_rows, {"hopper": Kernel(_refuses_rows, _round_rows)}, form=lambda x, dtype: "norm",
    fallback="three kernels, by XLA", cases="mercury_jax.ops.norms.cases",
)  # fmt: skip
