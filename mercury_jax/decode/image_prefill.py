"""The prefill of prompts with images, whose soft tokens replace the embeddings of their placeholders.

`image_prompts` computes the soft tokens; `passes.prefill` asks `soft_tokens_of_pass` for those of each pass. After the
prefill a row with images decodes like any other row.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from mercury_jax.decode.passes import prefill
from mercury_jax.decode.session import Fork, forked_prefill
from mercury_jax.decode.state import DecodeConfig, State
from mercury_jax.types import ImageTokens, Params


def encode_images(
    config: DecodeConfig,
    params: Params,
    state: State,
    width: int,
    limit: Int[Array, ""],
    images: ImageTokens,
    fork: Fork | None = None,
) -> State:
    """Encodes prompts with images.

    Args:
        width: Tokens of a pass, at least those of the longest image, since its soft tokens attend to each other.
        limit: Encode the tokens before this position; of a fork all tokens.
        images: Soft tokens of the rows, or of the prompts of a fork: their embeddings [B, P, D] in the order of their
            positions, and for each slot [B, S] the first and the last position of the image there.
    """
    soft = functools.partial(soft_tokens_of_pass, images)
    if fork is not None:
        return forked_prefill(config, params, state, fork, width, soft)
    return prefill(config, params, state, width, limit, soft=soft)


def soft_tokens_of_pass(
    images: ImageTokens, start: Int[Array, "B"], used: Int[Array, "B"], slots: Int[Array, "B T"]
) -> tuple[Int[Array, "B"], ImageTokens]:
    """Selects the soft tokens of a pass, and ends it before an image that it does not hold whole."""
    stop = (start + used)[:, None]
    following = _tokens_at(images, stop)
    cut = (following.end > 0) & (following.start < stop)
    return jnp.where(cut, following.start - start[:, None], used[:, None])[:, 0], _tokens_at(images, slots)


def _tokens_at(images: ImageTokens, slots: Int[Array, "B T"]) -> ImageTokens:
    """Selects the soft tokens at some slots from those of whole rows."""
    at = lambda x: jnp.take_along_axis(x, jnp.minimum(slots, x.shape[1] - 1), axis=1)
    number = jnp.maximum(at(jnp.cumsum(images.end > 0, axis=1) - 1), 0)  # [B, T] in the embeddings of the row
    embeddings = jnp.take_along_axis(images.embeddings, number[..., None], axis=1)
    return ImageTokens(embeddings, at(images.start), at(images.end))


# (config, params, state, width, limit, images, fork) -> the state with its prompts encoded. The state is donated.
encode_images_program = jax.jit(encode_images, static_argnums=(0, 3), donate_argnums=2)
