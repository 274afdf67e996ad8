"""Norms on Hopper: of residual sums, of heads with RoPE and the write into the KV cache; and rows rounded to 8 bits.

A program of residual norms or of rounding holds one row, or a few, in registers. Head norms have a program for each
token and key head: it holds the queries of the key head, its key and its value, each head as its two halves, whose
numbers RoPE pairs.
"""

from __future__ import annotations

import functools
import itertools
import operator
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mercury_jax.ops import registers
from mercury_jax.ops.attention.hopper_tile_loop import query_block
from mercury_jax.ops.experts.op import ExpertOutputs
from mercury_jax.ops.norms.op import HeadFactors, KVArrays, Projections, Residual, Table
from mercury_jax.ops.operation import traced_once
from mercury_jax.ops.quantised_rows import QuantisedRows, Rows, quantised, row_scale
from mercury_jax.types import Device

Ref = Any  # a reference to global memory inside a kernel
Value = Any  # an array in registers


@traced_once
def residual_norms(
    x: Float[Array, "M D"],
    residual: Residual,
    factors: list[Float[Array, "D"]],
    eps: float,
    rounded: tuple[Any, ...] = (),
    device: Device | None = None,
) -> tuple[Float[Array, "M D"], list[Rows]]:
    """Computes `models.norms.residual_norms`."""
    interpret = None if device is None else device.interpret
    inputs, structure = jax.tree.flatten((x, residual, factors))
    like: Any = lambda dtype: jax.ShapeDtypeStruct(x.shape, dtype)
    scale: Any = jax.ShapeDtypeStruct(x.shape[:1], jnp.float32)
    pairs = list(itertools.zip_longest(factors, rounded))
    norms = [like(x.dtype) if dtype is None else QuantisedRows(like(dtype), scale) for _, dtype in pairs]
    outputs, results = jax.tree.flatten((like(x.dtype), norms))

    def residual_norms(*refs: Ref) -> None:  # the kernel's name in a profile
        given = jax.tree.unflatten(structure, refs[: len(inputs)])
        _one_row(eps, interpret is not None, *given, *jax.tree.unflatten(results, refs[len(inputs) :]))

    found = registers.kernel(residual_norms, outputs, device, row=x.shape[0])(*inputs)
    return jax.tree.unflatten(results, found)


def _one_row(
    eps: float, interpreted: bool, x: Ref, residual: Any, factors: list[Ref], out: Ref, normed: list[Any]
) -> None:
    """One row; each value is rounded where the plain computation rounds it."""
    row, width, dtype = jax.lax.axis_index("row"), x.shape[1], x.dtype

    def load(ref: Ref) -> Value:
        """A row [D] in fp32; every array has the same layout, two numbers a thread at a time."""
        layout = plgpu.Layout.WG_STRIDED((width,), vec_size=2)
        return registers.load(ref, layout, interpreted).astype(jnp.float32)

    rounded = lambda y: y.astype(dtype).astype(jnp.float32)
    normalise = lambda y: y * jax.lax.rsqrt(jnp.sum(y * y) / width + eps)
    norm = lambda y, factor: y if factor is None else rounded(normalise(y) * load(factor))

    def branch(y: Any) -> Value:
        if not isinstance(y, ExpertOutputs):
            return load(y.at[row])
        weighted = [  # one row of each expert of the token
            load(y.rows.at[y.rank[row, i]]) * y.weights[row, i].astype(jnp.float32)
            for i in range(y.rank.shape[1])
        ]
        return rounded(functools.reduce(operator.add, weighted))

    added, *more = [
        norm(branch(y), factor) for y, factor in zip(residual.branches, residual.factors, strict=True)
    ]
    for y in more:
        added = rounded(added + y)
    total = rounded(load(x.at[row]) + norm(added, residual.post))
    if residual.scales:
        scale, *other = [scale[0].astype(dtype).astype(jnp.float32) for scale in residual.scales]
        if other:
            scale = jnp.where(residual.choice[row] != 0, other[0], scale)
        total = rounded(total * scale)
    out[row] = total.astype(dtype)
    if factors:
        base = normalise(total)
        for factor, to in zip(factors, normed, strict=True):
            y = (base * load(factor)).astype(dtype)
            if isinstance(to, QuantisedRows):
                y = y.astype(jnp.float32)
                scale = row_scale(jnp.max(jnp.abs(y)), to.values.dtype)
                to.scale[row] = scale
                to.values[row] = quantised(y, scale, to.values.dtype)
            else:
                to[row] = y


@traced_once
def quantise_rows(
    x: Float[Array, "M W"], count: int, dtype: Any, device: Device | None = None
) -> QuantisedRows:
    """Computes `ops.quantised_rows.quantise_rows`."""
    (rows, width), interpret = x.shape, None if device is None else device.interpret
    programs, numbers = rows // count, count * width
    layout = plgpu.Layout.WG_STRIDED((numbers,), vec_size=2 if numbers % 256 == 0 else 1)

    def quantise_rows(x: Ref, values: Ref, scale: Ref) -> None:  # the kernel's name in a profile
        program = jax.lax.axis_index("program")
        y = registers.load(x.at[program], layout, interpret is not None).astype(jnp.float32)
        place = plgpu.broadcasted_iota(jnp.int32, (numbers,), 0, layout=layout)
        scales = jnp.ones_like(y)
        for i in range(count):
            own = (place >= i * width) & (place < (i + 1) * width)
            one = row_scale(jnp.max(jnp.where(own, jnp.abs(y), 0.0)), dtype)
            scales = jnp.where(own, one, scales)
            scale[program, i] = one
        values[program] = quantised(y, scales, dtype)

    values, scale = registers.kernel(
        quantise_rows,
        [
            jax.ShapeDtypeStruct((programs, numbers), dtype),
            jax.ShapeDtypeStruct((programs, count), jnp.float32),
        ],
        device,
        program=programs,
    )(x.reshape(programs, numbers))
    return QuantisedRows(values.reshape(x.shape), scale.reshape(rows))


# --- head norms, RoPE and the cache write

THREADS = 128  # of a program


@traced_once
def norm_rope_write(
    x: Projections,
    factors: HeadFactors,
    table: Table,
    kv: KVArrays,
    slots: Int[Array, "B T"],
    eps: float,
    device: Device | None = None,
) -> tuple[Float[Array, "B T H K"], KVArrays]:
    """Computes `models.rope.norm_rope_write`."""
    (batch, tokens, heads, width), groups = x.q.shape, x.k.shape[2]
    per_group, count = heads // groups, batch * tokens
    # XLA computes the projections as one product, of which this concatenation is the whole: it reads no copies.
    joined = jnp.concatenate([y.reshape(count, -1) for y in x[:3] if y is not None], axis=-1)
    cos, sin = (y.reshape(count, -1) for y in table)
    # The order in which the attention kernel reads queries (`tiling.fold_queries`), if it pads none.
    block = query_block(heads, groups)
    block = 1 if tokens % block else block
    folded = (batch, groups, tokens // block, per_group, block, width)
    interpret = False if device is None or device.interpret is None else device.interpret

    def qk_norm_rope(
        joined: Ref, factors: Any, cos: Ref, sin: Ref, slots: Ref, keys: Ref, values: Ref, out: Ref
    ) -> None:  # the kernel's name in a profile
        row, group = jax.lax.axis_index("row"), jax.lax.axis_index("group")
        token, at = jax.lax.rem(row, jnp.int32(tokens)), jax.lax.div(row, jnp.int32(tokens))
        place = jax.lax.div(token, jnp.int32(block)), jax.lax.rem(token, jnp.int32(block))
        halves = _Halves(width, eps, interpret is not False)

        # 1. All loads, so that their latencies overlap.
        def head(i: int, number: Value) -> tuple[Value, Value]:
            """Head `number` of q, k or v (i = 0, 1, 2)."""
            first = (0, heads, heads + groups)[i]
            return halves.load(joined.at[row], (first + number) * width)

        queries = [head(0, group * per_group + i) for i in range(per_group)]
        key = head(1, group)
        value = key if x.v is None else head(2, group)
        q_factors, k_factors = halves.load(factors.q, 0), halves.load(factors.k, 0)
        angles = halves.load_half(cos.at[row], 0), halves.load_half(sin.at[row], 0)
        slot = slots[row]
        # 2. The queries.
        for i, query in enumerate(queries):
            rotated = halves.rotated(halves.normed(query, q_factors), *angles)
            halves.store(out.at[at, group, place[0], i, place[1]], rotated)

        # 3. Key and value, into the cache.
        @pl.when(jnp.logical_and(slot >= 0, slot < keys.shape[1]))
        def _() -> None:
            halves.store(keys.at[at, slot, group], halves.rotated(halves.normed(key, k_factors), *angles))
            halves.store(values.at[at, slot, group], halves.normed(value, None))

    # The kernel writes into the memory of references: their values are inputs and outputs that share it.
    keys, values = (jax.new_ref(y, memory_space=plgpu.GMEM) for y in kv)
    kernel: Any = pl.kernel(  # `plgpu.kernel` takes no references
        qk_norm_rope,
        out_type=jax.ShapeDtypeStruct(folded, x.q.dtype),
        mesh=plgpu.Mesh(grid=(count, groups), grid_names=("row", "group")),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        name="qk_norm_rope",
    )
    q = kernel(joined, factors, cos, sin, slots.reshape(count).astype(jnp.int32), keys, values)
    q = q.transpose(0, 2, 4, 1, 3, 5).reshape(x.q.shape)  # XLA removes it together with that of the attention
    return q, (jax.freeze(keys), jax.freeze(values))


class _Halves:
    """Heads [K] in registers, as pairs of halves [K / 2] in fp32."""

    def __init__(self, width: int, eps: float, interpreted: bool) -> None:
        self.width, self.half, self.eps, self.interpreted = width, width // 2, eps, interpreted

    def load_half(self, ref: Ref, start: Value) -> Value:
        part = ref.at[pl.ds(start, self.half)]
        layout = plgpu.Layout.WG_STRIDED((self.half,), vec_size=1 + (self.half % (2 * THREADS) == 0))
        return registers.load(part, layout, self.interpreted).astype(jnp.float32)

    def load(self, ref: Ref, start: Value) -> tuple[Value, Value]:
        return self.load_half(ref, start), self.load_half(ref, start + self.half)

    def store(self, ref: Ref, halves: tuple[Value, Value]) -> None:
        for i, y in enumerate(halves):
            ref[pl.ds(i * self.half, self.half)] = y.astype(ref.dtype)

    def normed(self, halves: tuple[Value, Value], factors: tuple[Value, Value] | None) -> tuple[Value, Value]:
        """The head divided by its rms, times the factors, rounded as the plain computation rounds it."""
        a, b = halves
        inverse = jax.lax.rsqrt(jnp.sum(a * a + b * b) / self.width + self.eps)
        a, b = a * inverse, b * inverse
        if factors is not None:
            a, b = a * factors[0], b * factors[1]
        return _rounded(a), _rounded(b)

    def rotated(self, halves: tuple[Value, Value], cos: Value, sin: Value) -> tuple[Value, Value]:
        a, b = halves
        return a * cos - b * sin, b * cos + a * sin


def _rounded(x: Value) -> Value:
    return x.astype(jnp.bfloat16).astype(jnp.float32)
