"""Weight-only quantisation: matrices are stored in 8 or 4 bits with scales per output or per group of inputs.

The arithmetic stays in the model's dtype; only memory use and memory traffic shrink. `hub` quantises to int8 or fp8
while it loads a checkpoint (one scale per output), or reads a published quantised checkpoint as it is stored
(`hub.quantised`). `ops.dot` and `moe` multiply by quantised matrices with `multiply`, `network` by a
quantised embedding table or head.

Values of 4 bits are arrays of `int4` or `float4_e2m1fn`, which XLA packs into half a byte on GPUs and TPUs and converts
in the kernel that reads them; on CPUs a value takes a byte. Packing them ourselves into uint8 would take as much memory
there, and would need shifts and an interleaving reshape in every product.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from mercury_jax.config import refuse
from mercury_jax.ops.quantised_rows import QuantisedRows, Rows, dense, largest, quantise_rows
from mercury_jax.types import LoraWeight, Params, accumulation_dtype

FP8 = jnp.float8_e4m3fn  # 4 bits of exponent, 3 of mantissa, no infinity
FP4 = jnp.float4_e2m1fn  # 2 bits of exponent, 1 of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives


class QuantisedWeight(NamedTuple):
    """A matrix w = (values - zero) * group_scale * scale; group_scale and zero only if groups of inputs have their own.

    The inputs are the last axes, as in checkpoints: tensor cores multiply 8-bit numbers in this order only, and XLA for
    GPUs, which reads values of 4 bits in no other, would keep a second, transposed copy of every matrix. The inputs,
    flattened to I, form G groups. Input i is in group i * G // I, or in `group[i]` if that is given.

    Attributes:
        values: int8, float8_e4m3fn, int4 or float4_e2m1fn, [batch..., outputs..., inputs...]; the batch axes are the
            experts, if any.
        scale: fp32, [batch..., outputs...].
        group_scale: Scales of the groups [batch..., outputs..., G], in the dtype of the checkpoint; None: no groups.
        zero: Value of each group that stands for 0 [batch..., outputs..., G], in the dtype of `values`; None: 0.
        group: Group of each input, int32 [batch..., I], where the groups are not contiguous; None: they are.
    """

    values: Int[Array, "*outputs *inputs"] | Float[Array, "*outputs *inputs"]
    scale: Float[Array, "*outputs"]
    group_scale: Float[Array, "*outputs G"] | None = None
    zero: Int[Array, "*outputs G"] | None = None
    group: Int[Array, "*batch I"] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of `values`."""
        return self.values.shape

    @property
    def plain(self) -> bool:
        """Whether the values have 8 bits, and only their outputs have scales."""
        return self.group_scale is None and self.values.dtype in (jnp.int8, FP8)


class RowQuantisedWeight(QuantisedWeight):
    """A matrix whose products also round the rows that it multiplies: to its own dtype, with a scale for each row.

    Tensor cores multiply such numbers twice as fast as those of 16 bits, and read half as much. A row is what is
    contracted, for example the hidden state of a token; its scale is max |x| / 448 in fp8 and / 127 in int8.
    """

    __slots__ = ()


class WeightFormat(NamedTuple):
    """How a matrix is stored: the dtypes and sizes of a `QuantisedWeight`.

    Attributes:
        values: Dtype of the values.
        groups: Number of groups of inputs; 0: no groups.
        group_scale: Dtype of the scales of the groups.
        zeros: Whether the groups have zero points.
        permuted: Whether the groups are not contiguous.
        rows: Whether products round their rows too; see `RowQuantisedWeight`.
    """

    values: Any
    groups: int = 0
    group_scale: Any = np.dtype(np.float32)
    zeros: bool = False
    permuted: bool = False
    rows: bool = False

    def divisible(self, parts: int) -> WeightFormat:
        """Returns the format with equal parts of its groups, so that `parts` divides their number."""
        if not self.groups or self.permuted:
            return self
        return self._replace(groups=math.lcm(self.groups, parts))

    def shapes(self, shape: tuple[int, ...], inputs: int, batch: int) -> QuantisedWeight:
        """Computes the arrays of a matrix in this format.

        Args:
            shape: Shape of the matrix [batch..., inputs..., outputs...].
        """
        like: Any = jax.ShapeDtypeStruct
        lead, contracted, outputs = shape[:batch], shape[batch : batch + inputs], shape[batch + inputs :]
        each = (*lead, *outputs, self.groups)
        return (RowQuantisedWeight if self.rows else QuantisedWeight)(
            like((*lead, *outputs, *contracted), self.values),
            like((*lead, *outputs), np.float32),
            like(each, self.group_scale) if self.groups else None,
            like(each, self.values) if self.zeros else None,
            like((*lead, math.prod(contracted)), np.int32) if self.permuted else None,
        )


def stored_bytes(like: Any, packed: bool = True) -> int:
    """Computes the bytes of an array in the memory of a device.

    Args:
        like: An array or a `jax.ShapeDtypeStruct`.
    """
    dtype = jnp.dtype(like.dtype)
    bits = 8 * dtype.itemsize
    if packed and dtype in (jnp.int4, FP4):
        bits = 4
    return math.ceil(math.prod(like.shape) * bits / 8)


FORMATS = {  # values of `quantise=`
    "int8": WeightFormat(jnp.int8),
    "fp8": WeightFormat(FP8),
    "int8_dynamic": WeightFormat(jnp.int8, rows=True),
    "fp8_dynamic": WeightFormat(FP8, rows=True),
}


def quantise(w: Any, kind: WeightFormat, inputs: int, batch: int = 0) -> QuantisedWeight:
    """Rounds a matrix to 8 bits, with a scale for each output.

    int8 has 255 evenly spaced levels; float8_e4m3fn is scaled so that max |w| of each output becomes 448, its largest
    number, and its relative error is at most 1/16, except for very small numbers. Compared with int8, small numbers are
    more precise and large numbers less precise. fp8 is therefore better for outputs whose weights differ much in
    magnitude, and int8 for outputs whose weights have similar magnitudes.

    Args:
        w: Matrix [batch..., inputs..., outputs...], a numpy array or a JAX array on the host.
    """
    w = np.asarray(w, np.float32)
    axes, most = tuple(range(batch, batch + inputs)), largest(kind.values)
    scale = np.maximum(np.abs(w).max(axis=axes), 1e-12) / most
    values = np.moveaxis(w / np.expand_dims(scale, axes), axes, range(-inputs, 0))
    values = (np.rint(values) if kind.values == jnp.int8 else values).astype(kind.values)
    found: Any = (np.ascontiguousarray(values), scale.astype(np.float32))
    return (RowQuantisedWeight if kind.rows else QuantisedWeight)(*found)


def lookup(table: Array | QuantisedWeight, ids: Int[Array, "*s"]) -> Float[Array, "*s *w"]:
    """Looks up rows of a table; rows of a quantised one are multiplied by their scales."""
    if not isinstance(table, QuantisedWeight):
        return table[ids]
    rows, scale = table.values[ids].astype(jnp.float32), table.scale[ids]
    return rows * scale.reshape(*ids.shape, *[1] * (rows.ndim - ids.ndim))


def check_not_quantised(params: Params) -> None:
    """Checks that parameters can be saved: none may be quantised or have a low-rank addition."""
    for x in jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, QuantisedWeight | LoraWeight)):
        if isinstance(x, LoraWeight):
            allowed = "merged parameters: save the adapter, and load(base, adapter=FOLDER) merges it"
            raise refuse("params", "base and adapter", allowed)
        if isinstance(x, QuantisedWeight):
            allowed = "floating parameters: load the model without quantise, from an unquantised checkpoint"
            kind = "fp8" if x.values.dtype == FP8 else jnp.dtype(x.values.dtype).name
            raise refuse("params", kind, allowed)


# --- products


# A gradient converts the values again: kept from the forward pass, the converted matrices of all layers would take the
# memory that quantisation saves.
@functools.partial(jax.checkpoint, static_argnums=2)
def multiply(x: Rows, w: QuantisedWeight, count: int) -> Float[Array, "*o"]:
    """Contracts the last `count` axes of x with the inputs of a quantised matrix without batch axes.

    Without groups, the values are converted inside of the product and the scales multiply its result: nothing of the
    size of the matrix is written to memory. With groups, one kernel writes the matrix in the dtype of x, which the
    product reads; its memory is free again after the product. Differentiable in x.
    """
    values, inputs = ungrouped(w), tuple(range(w.values.ndim - count, w.values.ndim))
    if isinstance(w, RowQuantisedWeight) and not isinstance(x, QuantisedRows):
        x = _rounded(x, w.values.dtype, count)
    x = dense(x)
    last = tuple(range(x.ndim - count, x.ndim))
    # Unscaled values of up to 448 could exceed the range of fp16.
    exact = accumulation_dtype(x.dtype)
    total = exact if x.dtype == jnp.float16 else x.dtype
    y = jax.lax.dot_general(
        x, values.astype(x.dtype), ((last, inputs), ((), ())), preferred_element_type=total
    )
    return (y.astype(exact) * w.scale.astype(exact)).astype(x.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _rounded(x: Float[Array, "*s"], dtype: Any, count: int) -> Float[Array, "*s"]:
    """The rows that `quantise_rows` stands for, in the dtype of x; the gradient passes as if they were not rounded."""
    values, scale = quantise_rows(x, dtype, count)
    scale = jnp.expand_dims(scale, tuple(range(x.ndim - count, x.ndim)))
    return (values.astype(jnp.float32) * scale).astype(x.dtype)


@_rounded.defjvp
def _rounded_jvp(dtype: Any, count: int, primals: Any, tangents: Any) -> tuple[Array, Array]:
    return _rounded(*primals, dtype, count), tangents[0]


def ungrouped(w: QuantisedWeight) -> Array:
    """Computes (values - zero) * group_scale in fp32, which is w without the scale of each output.

    Returns:
        An array of the shape of `w.values`; the values themselves if there are no groups.
    """
    if w.group_scale is None:
        return jnp.asarray(w.values)
    shape, lead = w.values.shape, w.scale.shape
    exact = lambda a: a.astype(jnp.float32)
    if w.group is None:  # [..., G, I / G] with scales [..., G, 1]
        values = exact(w.values.reshape(*lead, w.group_scale.shape[-1], -1))
        each = lambda a: exact(a)[..., None]
    else:  # [..., I] with the scales of each input
        values = exact(w.values.reshape(*lead, -1))
        index = w.group.reshape(*w.group.shape[:-1], *[1] * (len(lead) - w.group.ndim + 1), w.group.shape[-1])
        each = lambda a: jnp.take_along_axis(exact(a), index, axis=-1)
    values = values if w.zero is None else values - each(w.zero)
    return (values * each(w.group_scale)).reshape(shape)


def with_divisible_groups(w: QuantisedWeight, parts: int) -> QuantisedWeight:
    """Splits groups into equal ones until `parts` divides their number, so that inputs can be sharded with them."""
    if w.group_scale is None or w.group is not None:
        return w
    groups = w.group_scale.shape[-1]
    times = math.lcm(groups, parts) // groups
    repeat: Any = lambda a: None if a is None else np.repeat(a, times, axis=-1)
    return w if times == 1 else w._replace(group_scale=repeat(w.group_scale), zero=repeat(w.zero))


def dequantise(w: Array | QuantisedWeight, batch: int = 0) -> Array:
    """Computes the fp32 matrix that a quantised one represents; returns other arrays unchanged.

    Returns:
        The matrix [batch..., inputs..., outputs...].
    """
    if not isinstance(w, QuantisedWeight):
        return w
    inputs = w.values.ndim - w.scale.ndim
    axes, last = tuple(range(batch, batch + inputs)), tuple(range(-inputs, 0))
    return jnp.moveaxis(ungrouped(w).astype(jnp.float32) * jnp.expand_dims(w.scale, last), last, axes)
