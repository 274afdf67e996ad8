"""Diffusion transformers (DiT), whose norms are modulated by the noise level (MDLM, BD3-LM, DUO, GIDD).

Every block gets an embedding of the noise level. Models with `timed` get the time as an input: one per row [B], or one
per position [B, T] for packed rows, whose canvases have different times. For all other models the noise level is 0.
`build` turns a `DiTConfig` into a `Model` of pure functions.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Annotated, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mercury_jax.config import ModelConfig, Pattern, PositiveInt, Range, RematPolicy, refuse, refuse_if
from mercury_jax.models import cache as kv_cache, masks
from mercury_jax.models.layers import Linear, weight
from mercury_jax.models.masks import NetworkInputs
from mercury_jax.models.network import model_of, rematerialised
from mercury_jax.models.ops import Ops
from mercury_jax.models.rope import rope, rope_frequencies
from mercury_jax.types import Cache, Model, PackedPass, Params, Pass, accumulation_dtype

NoiseLevel = Literal["log_linear", "clipped", "time"]

# Mesh axes of each parameter, by path; see `mercury_jax.sharding`.
SHARDINGS = (
    (r"embed$", ("tensor", "fsdp")),
    (r"qkv/w$", ("fsdp", None, "tensor", None)),
    (r"/o/w$", ("tensor", None, "fsdp")),
    (r"up/w$", ("fsdp", "tensor")),
    (r"up/b$", ("tensor",)),
    (r"down/w$", ("tensor", "fsdp")),
    (r"proj/w$", (None, None, "fsdp")),
    (r"head/w$", ("fsdp", "tensor")),
    (r"head/b$", ("tensor",)),
)

# Fields of `ModelConfig` that a DiT does not support, with the only value that it accepts.
_FIXED = {
    "rope_fraction": 1.0, "rope_scaling": None, "qk_norm": False, "qkv_bias": False, "out_bias": False,
    "mlp_bias": False, "window": None, "experts": None, "tied": False,
    "zero_centred": False, "scale_embed": False, "alignment": "same_position", "predicts_next": False,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DiTConfig(ModelConfig):
    """Sizes of a diffusion transformer for masked diffusion (arXiv 2212.09748; MDLM, arXiv 2406.07524).

    LayerNorm has no bias; a function of the noise level shifts, scales and gates each branch. The activation is GELU,
    and one matrix projects to q, k and v. The pattern is bidirectional, or block_causal (BD3-LM, arXiv 2503.09573).
    Models with timed=False always get noise level 0, as in the training of the published models of this kind.

    Attributes:
        cond: Width C of the embedded noise level.
        frequencies: Number of cosines and sines of the noise level that the embedding reads.
        level: The noise level at time t, with e = level_eps:
            log_linear  -log(1 - (1 - e) t)             (MDLM, DUO)
            clipped     min(-log(1 - t), -log(e))       (BD3-LM)
            time        e + (1 - 2 e) t                 (GIDD)
        level_eps: e, which bounds the level.
    """

    pattern: Pattern = "bidirectional"
    qk_norm: bool = False
    tied: bool = False
    zero_centred: bool = False
    scale_embed: bool = False
    norm_eps: float = 1e-5
    cond: PositiveInt = 128
    frequencies: PositiveInt = 256
    level: NoiseLevel = "log_linear"
    level_eps: Annotated[float, Range(0, 0.5, open_low=True, open_high=True)] = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_if(
            self,
            *((getattr(self, x) != v, x, f"{v!r}: a DiT supports no other") for x, v in _FIXED.items()),
            (self.pattern == "causal_encoder", "pattern", "bidirectional or block_causal, for a DiT"),
            (self.kv_heads != self.heads, "kv_heads", f"heads = {self.heads}: q, k and v are one matrix"),
            (self.frequencies % 2, "frequencies", "an even number: a cosine and a sine of each"),
            prefix="model.",
        )


def noise_level(config: DiTConfig, time: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """Computes the noise level at time t; see `DiTConfig.level`."""
    e = config.level_eps
    if config.level == "time":
        return e + (1.0 - 2.0 * e) * time
    if config.level == "log_linear":
        return -jnp.log1p(-(1.0 - e) * time)
    # log1p(-1) is -inf at t = 1; clipping the argument also keeps the derivative finite.
    return jnp.minimum(-jnp.log1p(-jnp.minimum(time, 1.0 - e)), -math.log(e))


class NoiseLevelEmbedding(nn.Module):
    """Embeds the noise level: SiLU of a two-layer MLP over cosines and sines of the level.

    The frequencies are 10000**(-i / half), as in sinusoidal position embeddings (arXiv 1706.03762).
    """

    config: DiTConfig
    ops: Ops = Ops()

    @nn.compact
    def __call__(self, sigma: Float[Array, "B S"]) -> Float[Array, "B S C"]:
        c = self.config
        half = c.frequencies // 2
        angle = sigma[..., None] * jnp.exp(-math.log(10_000.0) * jnp.arange(half, dtype=sigma.dtype) / half)
        features = jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=-1)
        dense = lambda inputs, name: Linear((inputs,), (c.cond,), bias=True, ops=self.ops, name=name)
        hidden = jax.nn.silu(dense(c.frequencies, "first")(features))
        return jax.nn.silu(dense(c.cond, "second")(hidden)).astype(c.dtype)


class AdaLNModulation(nn.Module):
    """Maps the embedded noise level to `count` vectors of width D: shifts, scales and gates (adaLN)."""

    config: DiTConfig
    count: int
    ops: Ops = Ops()

    @nn.compact
    def __call__(self, condition: Float[Array, "B S C"]) -> list[Float[Array, "B S D"]]:
        c = self.config
        # adaLN-zero: the weight starts at 0, so all gates start at 0 and each block of a new model is the identity.
        project = Linear((c.cond,), (self.count, c.width), 0.0, bias=True, ops=self.ops, name="proj")
        vectors = project(condition)
        return [vectors[..., i, :] for i in range(self.count)]


class ModulatedLayerNorm(nn.Module):
    """Computes LayerNorm without a bias in at least fp32, then multiplies by 1 + scale_by and adds shift."""

    eps: float

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], shift: Array, scale_by: Array) -> Float[Array, "B T D"]:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        y = x.astype(accumulation_dtype(x.dtype))
        y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y**2, axis=-1, keepdims=True) + self.eps) * scale
        return (y * (1.0 + scale_by) + shift).astype(x.dtype)


class DiTBlock(nn.Module):
    """Attention and MLP with residuals; a modulated norm precedes each branch, and a gate multiplies its output."""

    config: DiTConfig
    ops: Ops = Ops()

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        inputs: NetworkInputs,
        kv: kv_cache.KV | None,
        condition: Float[Array, "#B #T C"],
    ) -> tuple[Float[Array, "B T D"], kv_cache.KV | None]:
        c = self.config
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = AdaLNModulation(
            c, 6, self.ops, name="modulation"
        )(condition)
        y = ModulatedLayerNorm(c.norm_eps, name="attention_norm")(x, shift, scale)
        qkv = Linear((c.width,), (3, c.heads, c.head_dim), ops=self.ops, name="qkv")(y)  # [B, T, 3, H, K]
        q, k, v = jnp.moveaxis(qkv, 2, 0)
        frequencies = rope_frequencies(c.rope_theta, c.head_dim // 2)
        q, k = (rope(y, inputs.positions, frequencies, context=c.context) for y in (q, k))
        if kv is not None and inputs.slots is not None:
            kv = self.ops.write(kv, k, v, inputs.slots)
            k, v = kv  # [B, S, G, K]: all keys of the row so far
        out = self.ops.attend(q, k, v, inputs.ranges, cached=kv is not None)  # [B, T, H, K]
        x = x + gate * Linear((c.heads, c.head_dim), (c.width,), ops=self.ops, name="o")(out)
        y = ModulatedLayerNorm(c.norm_eps, name="mlp_norm")(x, mlp_shift, mlp_scale)
        y = jax.nn.gelu(Linear((c.width,), (c.ffn,), bias=True, ops=self.ops, name="up")(y), approximate=True)
        return x + mlp_gate * Linear((c.ffn,), (c.width,), bias=True, ops=self.ops, name="down")(y), kv


class DiT(nn.Module):
    """Embedding, blocks and a modulated final norm; `head` computes logits and does not depend on the time."""

    config: DiTConfig
    ops: Ops = Ops()
    remat: RematPolicy = "none"

    def setup(self) -> None:
        """Creates the parameters and blocks."""
        c = self.config
        self.embed = weight(self, "embed", nn.initializers.normal(c.width**-0.5), (c.vocab, c.width))
        self.condition = NoiseLevelEmbedding(c, self.ops, name="condition")
        block = rematerialised(DiTBlock, self.remat)
        self.blocks = [block(c, self.ops, name=f"block_{i}") for i in range(c.layers)]
        self.modulation = AdaLNModulation(c, 2, self.ops, name="modulation")
        self.norm = ModulatedLayerNorm(c.norm_eps, name="norm")
        self.last = Linear((c.width,), (c.vocab,), bias=True, ops=self.ops, name="head")

    def __call__(
        self,
        inputs: NetworkInputs,
        time: Float[Array, "#B #T"],
        cache: tuple[kv_cache.KV, ...] | None = None,
    ) -> tuple[Float[Array, "B T D"], tuple[kv_cache.KV | None, ...]]:
        """Computes hidden states, and updates the cache.

        Args:
            cache: One `KV` per layer; None: a pass without a cache.

        Returns:
            Hidden states after the final norm, and one `KV` (or None) per layer.
        """
        c = self.config
        condition = self.condition(noise_level(c, time) if c.timed else time)
        table = self.ops.embed(self.embed, inputs.tokens, lambda x: x.astype(c.dtype))
        x = self.ops.sum_terms([table])[0]
        new_cache = []
        for i, block in enumerate(self.blocks):
            x, kv = block(x, inputs, None if cache is None else cache[i], condition)
            new_cache.append(kv)
        return self.norm(x, *self.modulation(condition)), tuple(new_cache)

    def head(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Computes logits."""
        return self.last(hidden).astype(accumulation_dtype(hidden.dtype))


def build(config: DiTConfig, remat: RematPolicy = "none") -> Model:
    """Builds the DiT of a config as pure functions."""
    net = DiT(config, remat=remat)
    # Flax creates only the parameters that a pass uses: initialise with a pass that includes the head.
    whole = lambda net, inputs: net.head(net(inputs, jnp.zeros((1, 1)))[0])
    return model_of(
        config,
        net,
        init=lambda net, key, inputs: net.init(key, inputs, method=whole),
        apply=_apply,
        forward=_forward,
        empty_cache=functools.partial(kv_cache.empty_cache, config),
        shardings=SHARDINGS,
        explicit=False,
        head=lambda params, hidden: net.apply({"params": params}, hidden, method="head"),
    )


def _times(config: DiTConfig, time: Array | None) -> Float[Array, "#B #T"]:
    """Reshapes times to [B, 1] or [B, T]; zeros [1, 1] for a model without `timed`."""
    if config.timed != (time is not None):
        raise refuse("time", time, "a time of each row" if config.timed else "None: this model is not timed")
    dtype = accumulation_dtype(jnp.dtype(config.dtype))
    if time is None:
        return jnp.zeros((1, 1), dtype)
    time = jnp.asarray(time, dtype)
    return time[:, None] if time.ndim == 1 else time


def _apply(net: DiT, given: PackedPass) -> Array:
    inputs = NetworkInputs(given.tokens, given.positions, given.ranges)
    return net(inputs, _times(net.config, given.time))[0]


def _forward(net: DiT, params: Params, given: Pass) -> tuple[Array, Cache]:
    inputs = masks.cache_pass_inputs(net.config, given)
    return net.apply({"params": params}, inputs, _times(net.config, given.time), given.cache)
