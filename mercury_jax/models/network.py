"""From a network to a `types.Model`: the output head, and the record of pure functions that the architectures share.

A network is a Flax module over `masks.NetworkInputs` with a field `ops`. The files of the architectures state what it
computes; `model_of` gives it the operations of the mesh and the device that a pass runs on (`ops`, `tensor_parallel`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from mercury_jax.config import ModelConfig, RematPolicy
from mercury_jax.models import masks
from mercury_jax.models.ops import INIT_OPS, device_ops, product
from mercury_jax.models.row_layout import DocumentLayout
from mercury_jax.models.tensor_parallel import cache_ops
from mercury_jax.sharding import ShardingRule
from mercury_jax.types import Cache, Device, Hidden, Key, Model, PackedPass, Params, Pass, accumulation_dtype

Net = TypeVar("Net", bound=nn.Module)


BLOCK_POLICIES: dict[RematPolicy, Callable[..., bool]] = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


def rematerialised(block: type[Net], policy: RematPolicy) -> type[Net]:
    """A block whose intermediate values are computed again in the backward pass.

    Args:
        block: A module; its parameters keep their names.
        policy: What is kept beside the block's input; "none" keeps everything.

    Returns:
        The module to build in its place.
    """
    return block if policy == "none" else nn.remat(block, policy=BLOCK_POLICIES[policy])


def model_of(
    config: ModelConfig,
    net: Net,
    *,
    init: Callable[[Net, Key, masks.NetworkInputs], Any],
    apply: Callable[[Net, Params, PackedPass], Hidden],
    forward: Callable[[Net, Params, Pass], tuple[Hidden, Cache]],
    empty_cache: Callable[[int, int], Cache],
    shardings: tuple[ShardingRule, ...],
    explicit: bool = True,
    **fields: Any,
) -> Model:
    """The model of a network.

    Args:
        config: Sizes and attention pattern.
        net: The network. For each pass a copy of it gets the operations of that pass.
        init: init(net, key, inputs of one token) -> Flax variables.
        apply: A pass without a cache.
        forward: A pass over a KV cache.
        empty_cache: empty_cache(batch, slots) -> cache.
        shardings: Path rules of the parameters.
        explicit: Passes over a cache are divided among devices by `tensor_parallel`. False: by XLA's partitioner.
        **fields: Of `Model`: `head`, and those of the features that the architecture has.

    Returns:
        The model. Its functions are those of `types.Model`.
    """

    def init_params(key: Key) -> Params:
        tokens = jnp.zeros((1, 1), jnp.int32)
        one_token = masks.NetworkInputs(tokens, tokens, jnp.zeros((1, 1, 2, 2), jnp.int32))
        return init(net.clone(ops=INIT_OPS), key, one_token)["params"]

    def apply_on(
        params: Params, given: PackedPass, *, mesh: Mesh | None = None, device: Device | None = None
    ) -> Hidden:
        return apply(net.clone(ops=device_ops(device, mesh)), params, given)

    def forward_on(
        params: Params, given: Pass, *, mesh: Mesh | None = None, device: Device | None = None
    ) -> tuple[Hidden, Cache]:
        ops = cache_ops(mesh if explicit else None, device)
        return forward(net.clone(ops=ops), params, given)

    fields.setdefault("condition", lambda params, logits: ())
    return Model(
        config=config,
        init=init_params,
        apply=apply_on,
        forward=forward_on,
        empty_cache=empty_cache,
        encodable=functools.partial(masks.encodable, config),
        layout=DocumentLayout(config),
        shardings=shardings,
        **fields,
    )


# --- the head


def lm_head(
    params: Params,
    hidden: Float[Array, "B T D"],
    first: int | Int[Array, ""] = 0,
    size: int | None = None,
    *,
    softcap: float | None = None,
) -> Float[Array, "B T V"]:
    """Logits of the ids first .. first + size, so that `decode.chunked_vocab` never holds those of a large vocabulary.

    Args:
        params: With `head` [D, V], or without one; then the head is tied to `embed` [V, D].
        hidden: Final hidden states.
        first: The first id; may be traced.
        size: Number of ids; None: all.
        softcap: Logits become softcap * tanh(logits / softcap); None: unchanged.

    Returns:
        Logits [B, T, size], products in the dtype of `hidden`, sums in at least fp32.
    """
    tied = "head" not in params
    w = _slice(params["embed"], first, size, 0).T if tied else _slice(params["head"], first, size, 1)
    out = product(hidden, w.astype(hidden.dtype), 1, accumulation_dtype(hidden.dtype))
    return out if softcap is None else softcap * jnp.tanh(out / softcap)


def embed_mixture(
    params: Params,
    weights: Float[Array, "B T V"],
    first: int | Int[Array, ""],
    dtype: DTypeLike,
    scale: float = 1.0,
) -> Float[Array, "B T D"]:
    """Weighted sum of embeddings: scale * sum over v of weights[..., v] * embed[first + v].

    Args:
        params: With `embed` [V, D].
        weights: Weight of each id of the chunk.
        first: The chunk's first id; may be traced.
        dtype: Of the products; sums are in at least fp32.
        scale: Factor that the network applies to embeddings of tokens too.

    Returns:
        Embeddings [B, T, D].
    """
    table = _slice(params["embed"], first, weights.shape[-1], 0).astype(dtype)
    summed = accumulation_dtype(dtype)
    return scale * jnp.einsum("btv,vd->btd", weights.astype(dtype), table, preferred_element_type=summed)


def _slice(x: Array, first: int | Int[Array, ""], size: int | None, axis: int) -> Array:
    if size is None or size == x.shape[axis]:
        return x
    return jax.lax.dynamic_slice_in_dim(x, first, size, axis)
