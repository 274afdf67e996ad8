"""Rows rounded to 8 bits on Hopper: one program for as many rows as its threads divide evenly."""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxtyping import Array, Float

from mercury_jax.kernels.hopper import registers
from mercury_jax.kernels.quantised_rows import QuantisedRows, quantised, row_scale
from mercury_jax.kernels.tracing import traced_once
from mercury_jax.types import Device

Ref = Any  # a reference to global memory inside a kernel


@traced_once
def run(x: Float[Array, "M W"], count: int, dtype: Any, device: Device | None = None) -> QuantisedRows:
    """Computes `kernels.quantised_rows.quantise_rows`.

    Args:
        x: Rows, bfloat16.
        count: Rows of a program, a divisor of M; count * W is a multiple of 128.
        dtype: int8 or float8_e4m3fn.
        device: To compile for.

    Returns:
        The rows.
    """
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
