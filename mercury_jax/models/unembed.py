"""The vocabulary's end of a model: logits of all ids or of some, and mean embeddings of such a part."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mercury_jax.types import Params, wide


def logits(
    params: Params,
    hidden: Float[Array, "B T D"],
    *,
    softcap: float | None = None,
    first: Any = 0,
    size: int | None = None,
) -> Float[Array, "B T V"]:
    """Logits, at least fp32, of ids first..first + size (None: of all), capped to softcap * tanh(x / softcap).

    params: with `head` [D, V], or without one and tied to `embed` [V, D].
    """
    if "head" in params:
        w = _part(params["head"], first, size, 1).astype(hidden.dtype)
        how = "btd,dv->btv"
    else:
        w = _part(params["embed"], first, size, 0).astype(hidden.dtype)
        how = "btd,vd->btv"
    out = jnp.einsum(how, hidden, w, preferred_element_type=wide(hidden.dtype))
    return out if softcap is None else softcap * jnp.tanh(out / softcap)


def mixed(params: Params, weights: Float[Array, "B T V"], first: Any, dtype: Any) -> Float[Array, "B T D"]:
    """sum over v of weights[.., v] * embed[first + v]: products in `dtype`, sums in fp32 at least."""
    table = _part(params["embed"], first, weights.shape[-1], 0).astype(dtype)
    return jnp.einsum("btv,vd->btd", weights.astype(dtype), table, preferred_element_type=wide(dtype))


def _part(x: Array, first: Any, size: int | None, axis: int) -> Array:
    if size is None or size == x.shape[axis]:
        return x
    return jax.lax.dynamic_slice_in_dim(x, first, size, axis)
