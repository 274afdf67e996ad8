"""The vision tower of Gemma 4 and DiffusionGemma: patches of an image in, soft tokens of the text model out.

Written from the configurations and checkpoints of transformers 5.24 (`gemma4_vision`). A transformer with bidirectional
attention encodes the patches. Positions are learned embeddings of x and y, and RoPE, which rotates one half of each
head by x and the other by y. Squares of patches are averaged to soft tokens, and projected to the width of the text
model. `mercury_jax.images` makes the patches; `Pass.images` brings the soft tokens into a pass.
"""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from mercury_jax.images import VisionConfig
from mercury_jax.models.layers import ACTIVATIONS, GatedMLP, Linear, OutputProjection, RMSNorm
from mercury_jax.models.norms import rms_normalise
from mercury_jax.models.ops import INIT_OPS, Ops
from mercury_jax.models.rope import rope_frequencies, rope_table, rotate
from mercury_jax.ops.norms.op import Table
from mercury_jax.types import Key, Params, Vision, accumulation_dtype


class VisionBlock(nn.Module):
    """One layer: attention and a gated feed-forward, each with a norm before and after and a residual."""

    config: VisionConfig
    ops: Ops = Ops()

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], tables: tuple[Table, Table], ranges: Int[Array, "B T R 2"]
    ) -> Float[Array, "B T D"]:
        c, ops = self.config, self.ops
        norm = functools.partial(RMSNorm, c.norm_eps, False)
        scale = 1.0 / (2 * c.layers)
        x = x + norm(name="attention_post_norm")(
            VisionAttention(c, ops, name="attention")(norm(name="attention_norm")(x), tables, ranges)
        )
        mlp = GatedMLP(c.width, c.ffn, scale, ops=ops, act=ACTIVATIONS[c.activation], name="mlp")
        return x + norm(name="mlp_post_norm")(mlp(norm(name="mlp_norm")(x)))


class VisionAttention(nn.Module):
    """Attention between all patches of an image, with normalised queries, keys and values, and scale 1."""

    config: VisionConfig
    ops: Ops = Ops()

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], tables: tuple[Table, Table], ranges: Int[Array, "B T R 2"]
    ) -> Float[Array, "B T D"]:
        c, ops = self.config, self.ops
        half = c.head_dim // 2
        project = lambda heads, name: Linear((c.width,), (heads, c.head_dim), ops=ops, name=name)(x)
        norm = lambda name: RMSNorm(c.norm_eps, False, name=f"{name}_norm")
        # The first half of a head is rotated by x, the second by y.
        turn = lambda y: jnp.concatenate(
            [rotate(y[..., :half], tables[0]), rotate(y[..., half:], tables[1])], axis=-1
        )
        q = turn(norm("q")(project(c.heads, "q")))  # [B, T, H, K]
        k = turn(norm("k")(project(c.kv_heads, "k")))
        v = project(c.kv_heads, "v")
        v = rms_normalise(v, c.norm_eps).astype(v.dtype)
        out = ops.attend(q, k, v, ranges, scale=1.0, cached=False)
        scale = 1.0 / (2 * c.layers)
        return OutputProjection((c.heads, c.head_dim), (c.width,), scale, ops=ops, name="o")(out)


class VisionTower(nn.Module):
    """Embedding of the patches, blocks, pooling, and the projection to the width of the text model."""

    config: VisionConfig
    width: int
    dtype: DTypeLike
    ops: Ops = Ops()

    @nn.compact
    def __call__(
        self, patches: Float[Array, "B T C"], positions: Int[Array, "B T 2"]
    ) -> Float[Array, "B P D"]:
        """Computes the soft tokens of each image. Those that an image does not have come last and are arbitrary."""
        c, ops = self.config, self.ops
        exact = accumulation_dtype(jnp.dtype(self.dtype))
        used = positions[..., 0] >= 0  # [B, T]; padding comes last
        at = jnp.maximum(positions, 0)
        embed = Linear((3 * c.patch**2,), (c.width,), ops=ops, name="patch")
        table = self.param("positions", nn.initializers.normal(0.02), (2, c.positions, c.width))
        learned = jnp.where(used[..., None], table[0][at[..., 0]] + table[1][at[..., 1]], 0.0)
        x = (embed((2 * (patches - 0.5)).astype(self.dtype)) + learned).astype(self.dtype)
        # RoPE has a quarter of a head's size of frequencies, for pairs within each half.
        frequencies = rope_frequencies(c.rope_theta, c.head_dim // 4)
        angles = functools.partial(rope_table, frequencies=frequencies, dtype=exact)
        tables = angles(at[..., 0]), angles(at[..., 1])
        stop = jnp.broadcast_to(used.sum(axis=1, keepdims=True), used.shape)
        first = jnp.stack([jnp.zeros_like(stop), stop], axis=-1)
        ranges = jnp.stack([first, jnp.zeros_like(first)], axis=2)  # [B, T, 2, 2]; the second range is empty
        for i in range(c.layers):
            x = VisionBlock(c, ops, name=f"block_{i}")(x, tables, ranges)
        # Average each square of patches: soft tokens by row, then by column.
        columns = (at[..., 0].max(axis=1, keepdims=True) + 1) // c.pool
        index = at[..., 0] // c.pool + columns * (at[..., 1] // c.pool)
        x = jnp.where(used[..., None], x.astype(exact), 0.0) / c.pool**2
        pooled = jax.vmap(functools.partial(jax.ops.segment_sum, num_segments=x.shape[1] // c.pool**2))
        x = pooled(x, index).astype(self.dtype).astype(exact) * c.width**0.5
        if c.standardise:
            bias = self.param("std_bias", nn.initializers.zeros, (c.width,))
            x = (x - bias) * self.param("std_scale", nn.initializers.ones, (c.width,))
        x = rms_normalise(x.astype(self.dtype), c.norm_eps).astype(self.dtype)
        return Linear((c.width,), (self.width,), ops=ops, name="projection")(x)


def build(config: VisionConfig, width: int, dtype: DTypeLike) -> Vision:
    """Builds the vision tower of a text model of this width as pure functions, for `Model.vision`."""
    net = VisionTower(config, width, dtype)

    def init(key: Key) -> Params:
        patches = jnp.zeros((1, config.pool**2, 3 * config.patch**2))
        at = jnp.zeros((*patches.shape[:2], 2), jnp.int32)
        return net.clone(ops=INIT_OPS).init(key, patches, at)["params"]

    def encode(
        params: Params, patches: Float[Array, "B T C"], positions: Int[Array, "B T 2"]
    ) -> Float[Array, "B P D"]:
        return net.apply({"params": params["vision"]}, patches, positions)  # type: ignore[return-value]

    return Vision(config, init, encode)
