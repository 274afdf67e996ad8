"""A block drafter: a small network that drafts a block of tokens from hidden states of its target (DFlash, 2602.06036).

The positions of a block are its first token, which is decided, and masks. They attend to each other and to keys and
values that the drafter computes from the target: the outputs of several blocks of the target are normalised,
concatenated, projected to the width and normalised, and each layer of the drafter projects the result to its keys and
values. The embedding and the head are those of the target.

`join` makes one `Model` of target and drafter. Its passes over a cache also write the drafter's keys of the tokens that
they feed: prefill, verification and frozen rows need no code of their own. Departs from the reference: the mask is a
learnt vector, since an autoregressive target has no mask token; and the outputs of the blocks have the same size
before they are projected, since those of late blocks are many times those of early ones.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from mercury_jax.config import DrafterConfig, ModelConfig, refuse
from mercury_jax.models import cache as kv_cache, masks
from mercury_jax.models.cache import KV
from mercury_jax.models.layers import GatedMLP, Linear, OutputProjection, RMSNorm, fan_in
from mercury_jax.models.masks import NetworkInputs
from mercury_jax.models.norms import inverse_rms
from mercury_jax.models.ops import INIT_OPS, Ops
from mercury_jax.models.rope import rope, rope_frequencies
from mercury_jax.models.tensor_parallel import cache_ops, training_ops
from mercury_jax.models.weight_quant import lookup
from mercury_jax.types import Cache, DrafterPasses, Features, Hidden, Key, Model, PackedPass, Params, Pass


class DrafterAttention(nn.Module):
    """Attention of the positions of a block to keys of the target's positions, and to each other."""

    config: DrafterConfig
    target: ModelConfig
    ops: Ops

    def setup(self) -> None:
        """Creates the projections and the norms of queries and keys."""
        c, width = self.config, self.target.width
        project = lambda heads: Linear((width,), (heads, c.head_dim), ops=self.ops)
        self.q, self.k, self.v = project(c.heads), project(c.kv_heads), project(c.kv_heads)
        self.q_norm, self.k_norm = RMSNorm(self.target.norm_eps), RMSNorm(self.target.norm_eps)
        self.o = OutputProjection((c.heads, c.head_dim), (width,), 1 / (2 * c.layers), ops=self.ops)

    def keys(self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]) -> KV:
        """Computes keys and values, of positions of the target or of a block."""
        return KV(self._rotate(self.k_norm(self.k(x)), positions), self.v(x))

    def __call__(
        self, x: Float[Array, "B T D"], inputs: NetworkInputs, kv: KV
    ) -> tuple[Float[Array, "B T D"], KV]:
        q, own = self._rotate(self.q_norm(self.q(x)), inputs.positions), self.keys(x, inputs.positions)
        if inputs.slots is None:  # training: the keys of all blocks come after those of the target
            kv = jax.tree.map(lambda old, new: jnp.concatenate([old, new], axis=1), kv, own)
        else:
            kv = self.ops.write(kv, *own, inputs.slots)
        out = self.ops.attend(q, *kv, inputs.ranges, cached=inputs.slots is not None)
        return self.o(out), kv

    def _rotate(self, x: Float[Array, "B T H K"], positions: Int[Array, "B T"]) -> Float[Array, "B T H K"]:
        frequencies = rope_frequencies(self.target.rope_theta, self.config.head_dim // 2)
        return rope(x, positions, frequencies, context=self.target.context)


class DrafterBlock(nn.Module):
    """Pre-norm attention and SwiGLU with residuals."""

    config: DrafterConfig
    target: ModelConfig
    ops: Ops

    def setup(self) -> None:
        """Creates the two layers and their norms."""
        c, width, eps = self.config, self.target.width, self.target.norm_eps
        self.attention = DrafterAttention(c, self.target, self.ops)
        self.mlp = GatedMLP(width, c.ffn, 1 / (2 * c.layers), ops=self.ops)
        self.attention_norm, self.mlp_norm = RMSNorm(eps), RMSNorm(eps)

    def __call__(
        self, x: Float[Array, "B T D"], inputs: NetworkInputs, kv: KV
    ) -> tuple[Float[Array, "B T D"], KV]:
        y, kv = self.attention(self.attention_norm(x), inputs, kv)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), kv


class DrafterNetwork(nn.Module):
    """The drafter between the embedding and the head of its target."""

    config: DrafterConfig
    target: ModelConfig
    ops: Ops = Ops()

    def setup(self) -> None:
        """Creates the projection of the target's hidden states, the mask, and the blocks."""
        c, width, eps = self.config, self.target.width, self.target.norm_eps
        self.project = Linear((len(c.features) * width,), (width,), ops=self.ops)
        self.feature_norm, self.norm = RMSNorm(eps), RMSNorm(eps)
        self.mask = self.param("mask", fan_in(), (width,))
        self.blocks = [DrafterBlock(c, self.target, self.ops, name=f"block_{i}") for i in range(c.layers)]

    def context(self, features: Float[Array, "B T nD"], positions: Int[Array, "B T"]) -> list[KV]:
        """Computes each layer's keys and values of positions of the target."""
        each = features.reshape(*features.shape[:-1], -1, self.target.width)  # [B, T, n, D]
        each = each * inverse_rms([each], self.target.norm_eps)[0].astype(each.dtype)
        x = self.feature_norm(self.project(each.reshape(features.shape)))  # [B, T, D]
        return [block.attention.keys(x, positions) for block in self.blocks]

    def denoise(
        self, table: Any, inputs: NetworkInputs, cache: Any
    ) -> tuple[Float[Array, "B T D"], tuple[KV, ...]]:
        """Computes hidden states of blocks, whose negative tokens are masks, from the keys of each layer."""
        c, new = self.target, []
        x = lookup(table, jnp.maximum(inputs.tokens, 0)) * (c.width**0.5 if c.scale_embed else 1.0)
        x = jnp.where((inputs.tokens < 0)[..., None], self.mask, x).astype(c.dtype)
        for block, kv in zip(self.blocks, cache, strict=True):
            x, kv = block(x, inputs, kv)
            new.append(kv)
        return self.norm(x), tuple(new)

    def __call__(
        self,
        table: Any,
        features: Float[Array, "B S nD"],
        positions: Int[Array, "B S"],
        inputs: NetworkInputs,
    ) -> Float[Array, "B T D"]:
        """Runs a pass without a cache: keys of the target at `positions`, then the blocks of `inputs`."""
        return self.denoise(table, inputs, self.context(features, positions))[0]


class JoinedCache(NamedTuple):
    """The KV caches of a target and of its drafter; in both, slot s holds absolute position s."""

    target: Cache
    drafter: tuple[KV, ...]


@functools.cache
def join(config: DrafterConfig, target: Model) -> Model:
    """Joins a drafter to its target. Equal arguments give the same object, so that compiled programs are shared.

    Returns:
        The target with `Model.drafter`. Parameters are {"target": ..., "drafter": ...}; hidden states are `Features`.
    """
    if target.features is None or not target.config.autoregressive:
        allowed = (
            "an autoregressive transformer of mercury_jax.models.transformer, whose hidden states are read"
        )
        raise refuse("lm", type(target.config).__name__, allowed)
    if config.features[-1] >= target.config.layers:
        allowed = f"indices below {target.config.layers}, the blocks of the target"
        raise refuse("drafter.features", config.features, allowed)
    if config.ids and config.ids[-1] >= target.config.vocab:
        raise refuse("drafter.ids", config.ids[-1], f"ids below {target.config.vocab}, those of the target")
    c, reader = target.config, target.features(config.features)
    net = DrafterNetwork(config, c)
    decoding, training = net.clone(ops=cache_ops(None, None)), net.clone(ops=training_ops(None, None))
    shapes = [(config.kv_heads, config.head_dim)] * config.layers

    def init(key: Key) -> Params:
        keys, one = jax.random.split(key), jnp.zeros((1, 1), jnp.int32)
        features = jnp.zeros((1, 1, len(config.features) * c.width))
        inputs = NetworkInputs(one, one, jnp.zeros((1, 1, 2, 2), jnp.int32))
        table = jnp.zeros((1, c.width))
        made = net.clone(ops=INIT_OPS).init(keys[1], table, features, one, inputs)
        return {"target": target.init(keys[0]), "drafter": made["params"]}

    def apply(params: Params, given: PackedPass, **options: Any) -> Hidden:
        return reader.apply(params["target"], given, **options)

    def forward(params: Params, given: Pass, **options: Any) -> tuple[Hidden, Cache]:
        hidden, cache = reader.forward(params["target"], given._replace(cache=given.cache.target), **options)
        # The drafter's keys of the same tokens, at the same slots: of a draft that is rejected they are overwritten.
        inputs, own = masks.cache_pass_inputs(c, given), {"params": params["drafter"]}
        assert inputs.slots is not None
        keys: Any = decoding.apply(own, hidden.blocks, inputs.positions, method="context")
        pairs = zip(given.cache.drafter, keys, strict=True)
        written = tuple(kv_cache.write(kv, k, v, inputs.slots) for kv, (k, v) in pairs)
        return hidden, JoinedCache(cache, written)

    def propose(params: Params, given: Pass) -> tuple[Hidden, Cache]:
        own, table = {"params": params["drafter"]}, params["target"]["embed"]
        inputs = masks.cache_pass_inputs(c, given)
        found: Any = decoding.apply(own, table, inputs, given.cache.drafter, method="denoise")
        return Features(found[0], ()), given.cache._replace(drafter=found[1])

    def apply_drafter(params: Params, blocks: Array, positions: Array, given: PackedPass) -> Hidden:
        inputs = NetworkInputs(*given[:3])
        table = params["target"]["embed"]
        hidden: Any = training.apply({"params": params["drafter"]}, table, blocks, positions, inputs)
        return Features(hidden, ())

    def empty_cache(batch: int, slots: int) -> JoinedCache:
        return JoinedCache(target.empty_cache(batch, slots), kv_cache.empty_cache(c, batch, slots, shapes))

    head, head_chunk = lambda params, hidden: reader.head(params["target"], hidden), reader.head_chunk
    assert head_chunk is not None
    chunk = lambda params, hidden, *ids: head_chunk(params["target"], hidden, *ids)
    ids = np.asarray(config.ids, np.int32)
    drafted = (lambda params, hidden: chunk(params, hidden, ids, len(ids))) if config.ids else head
    return target._replace(
        init=init,
        apply=apply,
        forward=forward,
        head=head,
        head_chunk=chunk,
        empty_cache=empty_cache,
        soft_masked=None,
        rings=None,
        features=None,
        drafter=DrafterPasses(config, propose, apply_drafter, drafted, target),
    )
