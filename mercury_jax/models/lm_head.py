"""The language-model head: logits of all ids or of a chunk of them, and expected embeddings of a chunk.

`decode.chunked_vocab` calls both through `Model.head_chunk` and `Model.embed_mixture`, so that logits of a large
vocabulary are never in memory at once.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mercury_jax.types import Params, accumulation_dtype


def logits(
    params: Params,
    hidden: Float[Array, "B T D"],
    *,
    softcap: float | None = None,
    first: int | Int[Array, ""] = 0,
    size: int | None = None,
) -> Float[Array, "B T V"]:
    """Logits of the ids first .. first + size.

    Args:
        params: With `head` [D, V], or without one; then the head is tied to `embed` [V, D].
        hidden: Final hidden states.
        softcap: Logits become softcap * tanh(logits / softcap); None: unchanged.
        first: The first id; may be traced.
        size: Number of ids; None: all.

    Returns:
        Logits [B, T, size], products in the dtype of `hidden`, sums in at least fp32.
    """
    if "head" in params:
        w = _slice(params["head"], first, size, 1).astype(hidden.dtype)
        equation = "btd,dv->btv"
    else:
        w = _slice(params["embed"], first, size, 0).astype(hidden.dtype)
        equation = "btd,vd->btv"
    out = jnp.einsum(equation, hidden, w, preferred_element_type=accumulation_dtype(hidden.dtype))
    return out if softcap is None else softcap * jnp.tanh(out / softcap)


def embed_mixture(
    params: Params, weights: Float[Array, "B T V"], first: int | Int[Array, ""], dtype: jnp.dtype
) -> Float[Array, "B T D"]:
    """Weighted sum of embeddings: sum over v of weights[..., v] * embed[first + v].

    Args:
        params: With `embed` [V, D].
        weights: Weight of each id of the chunk.
        first: The chunk's first id; may be traced.
        dtype: Of the products; sums are in at least fp32.

    Returns:
        Embeddings [B, T, D].
    """
    table = _slice(params["embed"], first, weights.shape[-1], 0).astype(dtype)
    return jnp.einsum(
        "btv,vd->btd", weights.astype(dtype), table, preferred_element_type=accumulation_dtype(dtype)
    )


def _slice(x: Array, first: int | Int[Array, ""], size: int | None, axis: int) -> Array:
    if size is None or size == x.shape[axis]:
        return x
    return jax.lax.dynamic_slice_in_dim(x, first, size, axis)
