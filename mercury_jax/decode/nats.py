"""Log-probabilities of emitted tokens, of the model before any shaper."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.decode.state import Nats
from mercury_jax.decode.window import cut, paste


def keep(
    nats: Nats,
    logits: Float[Array, "L V"],
    answer: Int[Array, "L"],
    changed: Bool[Array, "L"],
    start: Int[Array, ""],
    source: Int[Array, "L"] | None = None,
) -> Nats:
    """One row's log-probabilities with those of `answer` where a token was written in this pass.

    logits are unshaped; position i of the window stands at start + i of the text. source moves what is
    already there (of a rule that inserts or deletes).
    """
    size, k = answer.shape[0], nats.ids.shape[-1]
    log_p = jax.nn.log_softmax(logits, axis=-1)
    top, ids = jax.lax.top_k(log_p, max(k, 1))
    chosen = jnp.take_along_axis(log_p, answer[:, None], axis=-1)[:, 0]
    new = Nats(chosen, ids[:, :k].astype(jnp.int32), top[:, :k])

    def write(old: Array, fresh: Array) -> Array:
        here = cut(old, start, size)
        here = here if source is None else here[jnp.maximum(source, 0)]
        which = changed.reshape(-1, *[1] * (fresh.ndim - 1))
        return paste(old, jnp.where(which, fresh.astype(old.dtype), here), start)

    return jax.tree.map(write, nats, new)
