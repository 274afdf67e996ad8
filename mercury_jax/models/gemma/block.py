"""One layer of Gemma 4: attention, the dense and the expert branch, each normed before and after."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.models.cache import KV
from mercury_jax.models.gemma.attention import Attention
from mercury_jax.models.gemma.config import GemmaConfig
from mercury_jax.models.gemma.layers import Gated, Norm, PerLayerInput, Rotation
from mercury_jax.models.gemma.mixture import Mixture
from mercury_jax.models.ops import Ops


class Block(nn.Module):
    """x + norm(attention(norm(x))), then the same of the branches' sum, then all times a learned scalar."""

    config: GemmaConfig
    layer: int
    ops: Ops = Ops()

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        rotate: Rotation,
        ranges: Int[Array, "B T R 2"],
        kv: KV | None,
        slots: Int[Array, "B T"] | None,
        shared: KV | None,
        clean: Bool[Array, "B T"],
        own: Float[Array, "B T P"] | None,
    ) -> tuple[Float[Array, "B T D"], KV]:
        c = self.config
        norm = functools.partial(Norm, c.norm_eps)
        y, kv = Attention(c, self.layer, self.ops, name="attention")(
            norm(name="attention_norm")(x), rotate, ranges, kv, slots, shared
        )
        x = x + norm(name="attention_post_norm")(y)
        branches = [Gated(c, c.ffn_of(self.layer), self.ops, name="mlp").part(norm(name="mlp_norm")(x))]
        if c.experts is not None:
            # The router reads what no norm has touched; the experts have a norm of their own.
            branches.append(Mixture(c, self.ops, name="moe").part(x, norm(name="moe_norm")(x)))
        y, *mixed = self.ops.total(*([part] for part in branches))
        if mixed:
            y = norm(name="mlp_branch_norm")(y) + norm(name="moe_branch_norm")(mixed[0])
        x = x + norm(name="mlp_post_norm")(y)
        if own is not None:
            x = PerLayerInput(c, self.ops, name="per_layer")(x, own)
        return x * self._scalar(clean).astype(x.dtype), kv

    def _scalar(self, clean: Bool[Array, "B T"]) -> Array:
        """The layer's factor [1], or one for each token where clean tokens have another."""
        scalar = self.param("scalar", nn.initializers.ones, (1,))
        if not self.config.encoder_scalars:
            return scalar
        encoder = self.param("encoder_scalar", nn.initializers.ones, (1,))
        return jnp.where(clean[..., None], encoder, scalar)
