"""Grouped-query attention over key ranges: the only caller of the kernels."""

from __future__ import annotations

import flax.linen as nn
from jaxtyping import Array, Float, Int

from mercury_jax.config import ModelConfig
from mercury_jax.models import cache as kv_cache
from mercury_jax.models.layers import Linear, Matrix, RMSNorm
from mercury_jax.models.ops import Ops
from mercury_jax.models.rotary import rope


class Attention(nn.Module):
    """q, k, v projections, RoPE, `attend`, output projection; the cache goes in and comes out."""

    config: ModelConfig
    ops: Ops = Ops()

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
        project = lambda heads, name: Linear(
            (c.width,), (heads, c.head_dim), bias=c.qkv_bias, ops=self.ops, name=name
        )(x)
        q, k, v = project(c.heads, "q"), project(c.kv_heads, "k"), project(c.kv_heads, "v")
        if c.qk_norm:
            q = RMSNorm(c.norm_eps, c.zero_centred, name="q_norm")(q)
            k = RMSNorm(c.norm_eps, c.zero_centred, name="k_norm")(k)
        turn = lambda y: rope(y, positions, c.rope_theta, c.rope_fraction, c.rope_scaling)
        q, k = turn(q), turn(k)
        if kv is not None and slots is not None:
            kv = self.ops.write(kv, k, v, slots)
            k, v = kv
        out = self.ops.attend(q, k, v, ranges, cached=kv is not None)
        scale = 1.0 / (2 * c.layers)
        return Matrix((c.heads, c.head_dim), (c.width,), scale, c.out_bias, self.ops, name="o").whole(out), kv
