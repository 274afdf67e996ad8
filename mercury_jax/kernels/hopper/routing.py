"""The choice of experts on Hopper: one program for each token, whose threads hold the probabilities."""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mercury_jax.kernels.hopper import registers
from mercury_jax.kernels.tracing import traced_once
from mercury_jax.types import Device

Ref = Any  # a reference to global memory inside a kernel


@traced_once
def run(
    logits: Float[Array, "M E"],
    factors: Float[Array, "E"],
    active: int,
    scale: float,
    device: Device | None = None,
) -> tuple[Int[Array, "M k"], Float[Array, "M k"]]:
    """Computes `kernels.routing.route`.

    Args:
        logits: Logits of the router; E is a multiple of 128.
        factors: Factor of each expert, bfloat16 or float32.
        active: k.
        scale: Positive factor of the logits.
        device: To compile for.

    Returns:
        Ids and weights.
    """
    rows, experts = logits.shape
    interpret = None if device is None else device.interpret
    layout = plgpu.Layout.WG_STRIDED((experts,), vec_size=1)

    def load(ref: Ref) -> Array:
        return registers.load(ref, layout, interpret is not None).astype(jnp.float32)

    def routing(logits: Ref, factors: Ref, ids: Ref, weights: Ref) -> None:
        row = jax.lax.axis_index("row")
        scores = load(logits.at[row])
        # The weights are relative to the sum of the chosen ones: the sum of all probabilities is not needed.
        left = jnp.exp((scores - jnp.max(scores)) * scale)
        # Counts down, so that the first of equal experts has the largest number.
        number = experts - plgpu.broadcasted_iota(jnp.int32, (experts,), 0, layout=layout)
        own, chosen = load(factors), []
        for _ in range(active):  # the largest one that is left, k times
            best = jnp.max(left)
            at = jnp.max(jnp.where(left == best, number, 0))
            here = number == at
            chosen.append((experts - at, best, jnp.sum(jnp.where(here, own, 0.0))))
            left = jnp.where(here, -1.0, left)
        total = sum(best for _, best, _ in chosen)
        for i, (at, best, factor) in enumerate(chosen):
            ids[row, i] = at
            weights[row, i] = best / total * factor

    out = (rows, active)
    results = [jax.ShapeDtypeStruct(out, jnp.int32), jax.ShapeDtypeStruct(out, logits.dtype)]
    ids, weights = registers.kernel(routing, results, device, row=rows)(logits, factors)
    return ids, weights
