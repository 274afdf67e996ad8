"""Turns a network into a `types.Model`, and computes logits and embedding mixtures; shared by the architectures.

A network is a Flax module over `masks.NetworkInputs` with a field `ops`. The file of an architecture says what the
network computes; `model_of` sets `ops` for the mesh and the device that a pass runs on (`ops`, `tensor_parallel`).
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
from mercury_jax.models import cache as kv_cache, masks
from mercury_jax.models.ops import INIT_OPS
from mercury_jax.models.row_layout import DocumentLayout
from mercury_jax.models.tensor_parallel import cache_ops, training_ops
from mercury_jax.models.weight_quant import QuantisedWeight
from mercury_jax.sharding import ShardingRule
from mercury_jax.types import (
    Cache,
    Device,
    Hidden,
    Key,
    Model,
    PackedPass,
    Params,
    Pass,
    Routing,
    accumulation_dtype,
)

Net = TypeVar("Net", bound=nn.Module)


BLOCK_POLICIES: dict[RematPolicy, Callable[..., bool]] = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


def rematerialised(block: type[Net], policy: RematPolicy) -> type[Net]:
    """Wraps a block so that the backward pass computes its intermediate values again."""
    return block if policy == "none" else nn.remat(block, policy=BLOCK_POLICIES[policy])


def model_of(
    config: ModelConfig,
    net: Net,
    *,
    init: Callable[[Net, Key, masks.NetworkInputs], Any],
    apply: Callable[[Net, PackedPass], Hidden],
    forward: Callable[[Net, Params, Pass], tuple[Hidden, Cache]],
    empty_cache: Callable[[int, int], Cache],
    shardings: tuple[ShardingRule, ...],
    explicit: bool = True,
    **fields: Any,
) -> Model:
    """Builds the model of a network.

    Args:
        **fields: Further fields of `Model`: `head`, and the optional features of the architecture.
    """

    def init_params(key: Key) -> Params:
        tokens = jnp.zeros((1, 1), jnp.int32)
        one_token = masks.NetworkInputs(tokens, tokens, jnp.zeros((1, 1, 2, 2), jnp.int32))
        return init(net.clone(ops=INIT_OPS), key, one_token)["params"]

    def apply_on(
        params: Params,
        given: PackedPass,
        *,
        mesh: Mesh | None = None,
        device: Device | None = None,
        routing: bool = False,
    ) -> Hidden:
        # Routers write their outputs to the Flax collection "routing", which is only written if it is mutable. It
        # also carries values out of rematerialised layers.
        run = nn.apply(
            apply, net.clone(ops=training_ops(mesh, device)), mutable=["routing"] if routing else False
        )
        if not routing:
            return run({"params": params}, given)
        hidden, written = run({"params": params}, given)
        is_routing = lambda x: isinstance(x, Routing)
        return hidden, tuple(filter(is_routing, jax.tree.leaves(written, is_leaf=is_routing)))

    def forward_on(
        params: Params, given: Pass, *, mesh: Mesh | None = None, device: Device | None = None
    ) -> tuple[Hidden, Cache]:
        ops = cache_ops(mesh if explicit else None, device)
        return forward(net.clone(ops=ops), params, given)

    fields.setdefault("condition", lambda params, logits: ())
    fields.setdefault("rings", kv_cache.with_rings)
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
    first: int | Int[Array, "*n"] = 0,
    size: int | None = None,
    *,
    softcap: float | None = None,
) -> Float[Array, "B T V"]:
    """Computes logits of the ids first .. first + size - 1, or of the ids in an array `first` [size].

    `decode.chunked_vocab` calls it for chunks of ids, so that it never stores all logits of a large vocabulary.
    """
    w = params["head" if "head" in params else "embed"]
    by_id = "head" not in params or isinstance(w, QuantisedWeight)  # a quantised head is [V, D] too
    axis, equation = (0, "btd,vd->btv") if by_id else (1, "btd,dv->btv")
    w, scale = _slice(w, first, size, axis)
    dtype = accumulation_dtype(hidden.dtype)
    out = jnp.einsum(equation, hidden, w.astype(hidden.dtype), preferred_element_type=dtype)
    out = out if scale is None else out * scale.astype(dtype)
    return out if softcap is None else softcap * jnp.tanh(out / softcap)


def embed_mixture(
    params: Params,
    weights: Float[Array, "B T V"],
    first: int | Int[Array, ""],
    dtype: DTypeLike,
    scale: float = 1.0,
) -> Float[Array, "B T D"]:
    """Computes a weighted sum of embeddings: scale * sum over v of weights[..., v] * embed[first + v]."""
    table, per_id = _slice(params["embed"], first, weights.shape[-1], 0)
    # The scales of a quantised table multiply the weights, which are fewer than the entries of the table.
    weights = weights if per_id is None else weights * per_id.astype(weights.dtype)
    summed = accumulation_dtype(dtype)
    products = (weights.astype(dtype), table.astype(dtype))
    return scale * jnp.einsum("btv,vd->btd", *products, preferred_element_type=summed)


def _slice(
    table: Array | QuantisedWeight, first: int | Int[Array, "*n"], size: int | None, axis: int
) -> tuple[Array, Array | None]:
    """Takes the ids first .. first + size - 1, or those in an array, of a table whose ids are along `axis`."""
    values, scale = table[:2] if isinstance(table, QuantisedWeight) else (table, None)
    if jnp.ndim(first):
        return jnp.take(values, first, axis), None if scale is None else jnp.take(scale, first, 0)
    if size is None or size == values.shape[axis]:
        return values, scale
    cut = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=first, slice_size=size)
    return cut(values, axis=axis), None if scale is None else cut(scale, axis=0)
