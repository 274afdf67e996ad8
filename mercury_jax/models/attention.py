"""Grouped-query attention over key ranges: the only caller of the kernels."""

from __future__ import annotations

import flax.linen as nn
from jaxtyping import Array, Float, Int

from mercury_jax.config import ModelConfig
from mercury_jax.kernels import attend
from mercury_jax.models import cache as kv_cache
from mercury_jax.models.layers import Linear, RMSNorm, rope


class Attention(nn.Module):
    """q, k, v projections, RoPE, `attend`, output projection; the cache goes in and comes out."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        ranges: Int[Array, "B T R 2"],
        kv: kv_cache.KV | None,
        slots: Int[Array, "B T"] | None,
    ) -> tuple[Float[Array, "B T D"], kv_cache.KV | None]:
        c = self.config
        q = Linear((c.width,), (c.heads, c.head_dim), name="q")(x)
        k = Linear((c.width,), (c.kv_heads, c.head_dim), name="k")(x)
        v = Linear((c.width,), (c.kv_heads, c.head_dim), name="v")(x)
        if c.qk_norm:
            q, k = RMSNorm(c.norm_eps, name="q_norm")(q), RMSNorm(c.norm_eps, name="k_norm")(k)
        q, k = rope(q, positions, c.rope_theta), rope(k, positions, c.rope_theta)
        if kv is not None and slots is not None:
            kv = kv_cache.write(kv, k, v, slots)
            k, v = kv.k, kv.v
        out = attend(q, k.astype(q.dtype), v.astype(q.dtype), ranges)
        scale = 1.0 / (2 * c.layers)
        return Linear((c.heads, c.head_dim), (c.width,), scale, name="o")(out), kv
