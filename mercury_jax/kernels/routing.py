"""`route`: the choice of the k most probable experts of each token, as one kernel on Hopper.

XLA for GPUs makes four kernels of it: softmax, a sort, a gather of the experts' factors, and the sum of the chosen
probabilities with what is divided by it. The kernel is `hopper.rows`; `models.ops` calls it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mercury_jax.config import refuse
from mercury_jax.kernels import device as kernel_device
from mercury_jax.kernels.device import HOPPER
from mercury_jax.types import Device

THREADS = 128  # of a program; it holds the scores of a token, as many in each thread
MOST_EXPERTS, MOST_ACTIVE = 1024, 16


def route(
    logits: Float[Array, "*s E"], factors: Float[Array, "E"], active: int, scale: float = 1.0
) -> tuple[Int[Array, "*s k"], Float[Array, "*s k"]]:
    """Chooses the k most probable experts, and their weights: probability / sum of the k probabilities * factor."""
    weights, ids = jax.lax.top_k(jax.nn.softmax(logits * scale, axis=-1), active)
    weights = weights / weights.sum(axis=-1, keepdims=True)
    return ids, weights * factors[ids].astype(weights.dtype)


def refuses(logits: Array | jax.ShapeDtypeStruct, active: int, device: Device | None = None) -> str | None:
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
    if (why := refuses(logits, active, device)) is not None:
        raise refuse("logits", f"{logits.dtype}{list(logits.shape)}", f"others: {why}")
    from mercury_jax.kernels.hopper import rows  # here, because importing Mosaic takes time

    flat = logits.reshape(-1, logits.shape[-1])
    found = rows.route(flat, factors, active, scale, device)
    ids, weights = (a.reshape(*logits.shape[:-1], active) for a in found)
    return ids, weights
