"""The default architecture: a transformer denoiser with RoPE, grouped queries, and SwiGLU or a mixture of experts.

LLaDA, Dream, SDAR, LLaDA2, Qwen and Llama checkpoints use this architecture with different configs. `build` turns a
config into a `Model` of pure functions. The attention pattern appears only in the key ranges of `masks`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mercury_jax.config import Experts, ModelConfig, RematPolicy, refuse
from mercury_jax.models import cache as kv_cache, masks, shifted_logits
from mercury_jax.models.layers import (
    GatedMLP,
    Linear,
    OutputProjection,
    RMSNorm,
    fan_in,
    weight,
)
from mercury_jax.models.masks import NetworkInputs
from mercury_jax.models.moe import route
from mercury_jax.models.network import lm_head, model_of, rematerialised
from mercury_jax.models.norms import inverse_rms
from mercury_jax.models.ops import Ops
from mercury_jax.models.rope import rope, rope_frequencies
from mercury_jax.models.weight_quant import lookup
from mercury_jax.types import (
    LM,
    Cache,
    Features,
    Hidden,
    Model,
    PackedPass,
    Params,
    Pass,
    Routing,
    SoftMasking,
    accumulation_dtype,
)

# Mesh axes of each parameter, by path; see `mercury_jax.sharding`. Heads and hidden units are sharded over `tensor`,
# the model width over `fsdp`, experts over `expert` and `tensor`.
SHARDINGS = (
    (r"embed$", ("tensor", "fsdp")),
    (r"(q|k|v)/w$", ("fsdp", "tensor", None)),
    (r"o/w$", ("tensor", None, "fsdp")),
    (r"(gate|up)/w$", ("fsdp", "tensor")),
    (r"down/w$", ("tensor", "fsdp")),
    (r"(q|k|v)/b$", ("tensor", None)),
    (r"(gate|up)/b$", ("tensor",)),
    (r"moe/gate_up$", (("expert", "tensor"), "fsdp", None)),
    (r"moe/down$", (("expert", "tensor"), None, "fsdp")),
    (r"head$", ("fsdp", "tensor")),
)


class SoftInput(NamedTuple):
    """The self-conditioning input of a model with soft masking.

    Attributes:
        mixture: Embedding that is mixed into the embedding of each mask.
        weight: Its share w; the mask's embedding has the share 1 - w.
    """

    mixture: Float[Array, "B T D"]
    weight: Float[Array, "B T 1"]


class Attention(nn.Module):
    """Grouped-query attention over key ranges: projections, RoPE, `attend`, output projection."""

    config: ModelConfig
    ops: Ops = Ops()

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], inputs: NetworkInputs, kv: kv_cache.KV | None
    ) -> tuple[Float[Array, "B T D"], kv_cache.KV | None]:
        """Returns the output, and the cache updated with the keys and values of this pass (None without a cache)."""
        c = self.config
        project = lambda heads, name: Linear(
            (c.width,), (heads, c.head_dim), bias=c.qkv_bias, ops=self.ops, name=name
        )(x)
        q, k, v = (
            project(c.heads, "q"),
            project(c.kv_heads, "k"),
            project(c.kv_heads, "v"),
        )  # [B, T, H or G, K]
        if c.qk_norm:
            joint = kv is not None and self.ops.whole_heads
            inverse = inverse_rms([q, k], c.norm_eps) if joint else [None] * 2
            q = RMSNorm(c.norm_eps, c.zero_centred, name="q_norm")(q, inverse[0])
            k = RMSNorm(c.norm_eps, c.zero_centred, name="k_norm")(k, inverse[1])
        half = int(c.head_dim * c.rope_fraction) // 2
        frequencies = rope_frequencies(
            c.rope_theta, half, c.rope_scaling, inputs.length if c.stretched else None
        )
        amplitude = 1.0 if c.rope_scaling is None else c.rope_scaling.attention
        q, k = (rope(y, inputs.positions, frequencies, amplitude, c.context) for y in (q, k))
        if kv is not None and inputs.slots is not None:
            kv = self.ops.write(kv, k, v, inputs.slots)
            k, v = kv  # [B, S, G, K]: all keys of the row so far
        out = self.ops.attend(q, k, v, inputs.ranges, cached=kv is not None)  # [B, T, H, K]
        scale = 1.0 / (2 * c.layers)
        project_out = OutputProjection(
            (c.heads, c.head_dim), (c.width,), scale, c.out_bias, self.ops, name="o"
        )
        return project_out(out), kv


class MoELayer(nn.Module):
    """A mixture of experts: routed experts, each a SwiGLU, and optionally one shared expert that all tokens use.

    Attributes:
        config: Number, width and routing of the experts.
        width: D.
        scale: Factor of the initial variance of the last projection.
        ops: The operations that may be divided among devices.
    """

    config: Experts
    width: int
    scale: float
    ops: Ops = Ops()

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        c, dtype = self.config, accumulation_dtype(x.dtype)
        router = self.param("router", fan_in(), (self.width, c.count))
        logits = x.astype(dtype) @ router.astype(dtype)  # [B, T, E]
        scores = jax.nn.softmax(logits, axis=-1) if c.score == "softmax" else jax.nn.sigmoid(logits)
        correction = [self.param("correction", nn.initializers.zeros, (c.count,))] if c.correction else []
        ids, weights = self.ops.map_rows(functools.partial(route, c), scores, *correction)
        self.sow("routing", "routed", Routing(scores, ids))
        each = lambda init: (
            lambda key, shape: jax.vmap(lambda k: init(k, shape[1:]))(jax.random.split(key, shape[0]))
        )
        gate_up = weight(self, "gate_up", each(fan_in()), (c.count, self.width, 2 * c.width))
        down = weight(self, "down", each(fan_in(1, self.scale)), (c.count, c.width, self.width))
        terms = [self.ops.experts(x, ids, weights.astype(x.dtype), (gate_up, down), jax.nn.silu)]
        if c.shared:
            terms.append(GatedMLP(self.width, c.shared, self.scale, ops=self.ops, name="shared").term(x))
        return self.ops.sum_terms(terms)[0]


class TransformerBlock(nn.Module):
    """Pre-norm attention and feed-forward (SwiGLU or experts) with residuals."""

    config: ModelConfig
    layer: int
    ops: Ops = Ops()

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], inputs: NetworkInputs, kv: kv_cache.KV | None
    ) -> tuple[Float[Array, "B T D"], kv_cache.KV | None]:
        c = self.config
        norm = lambda name: RMSNorm(c.norm_eps, c.zero_centred, name=name)
        y, kv = Attention(c, self.ops, name="attention")(norm("attention_norm")(x), inputs, kv)
        x = x + y
        scale = 1.0 / (2 * c.layers)
        if c.experts is None or self.layer in c.experts.dense:
            mlp: nn.Module = GatedMLP(c.width, c.ffn, scale, c.mlp_bias, self.ops, name="mlp")
        else:
            mlp = MoELayer(c.experts, c.width, scale, self.ops, name="moe")
        return x + mlp(norm("mlp_norm")(x)), kv


class Transformer(nn.Module):
    """Embedding, blocks and final norm. The head is applied separately (`network.lm_head`)."""

    config: ModelConfig
    ops: Ops = Ops()
    remat: RematPolicy = "none"
    features: tuple[int, ...] = ()  # blocks whose outputs are returned too, in `types.Features`

    def setup(self) -> None:
        """Creates the parameters and blocks."""
        c = self.config
        self.embed = weight(self, "embed", nn.initializers.normal(c.width**-0.5), (c.vocab, c.width))
        block = rematerialised(TransformerBlock, self.remat)
        self.blocks = [block(c, i, self.ops, name=f"block_{i}") for i in range(c.layers)]
        self.norm = RMSNorm(c.norm_eps, c.zero_centred, name="norm")
        if not c.tied:
            weight(self, "head", nn.initializers.normal(c.width**-0.5), (c.width, c.vocab))

    def __call__(
        self,
        inputs: NetworkInputs,
        cache: tuple[kv_cache.KV, ...] | None = None,
        soft: SoftInput | None = None,
    ) -> tuple[Hidden, tuple[kv_cache.KV | None, ...]]:
        """Computes hidden states, and updates the cache.

        Args:
            cache: One `KV` per layer; None: a pass without a cache.
            soft: Mixtures for the first L <= T tokens, used only for masks. Other tokens, and masks after the first L,
                keep their plain embeddings.

        Returns:
            Hidden states after the final norm, with `features` in a `Features`, and one `KV` (or None) per layer.
        """
        c, ranges = self.config, inputs.ranges
        scale_embedding = lambda x: (x * c.width**0.5 if c.scale_embed else x).astype(c.dtype)
        x = self.ops.sum_terms([self.ops.embed(self.embed, inputs.tokens, scale_embedding)])[0]
        if soft is not None:
            rest = [(0, 0), (0, inputs.tokens.shape[1] - soft.weight.shape[1]), (0, 0)]
            weight = jnp.where((inputs.tokens == c.mask)[..., None], jnp.pad(soft.weight, rest), 0.0)
            x = ((1.0 - weight) * x + weight * jnp.pad(soft.mixture, rest)).astype(c.dtype)
        sliding = inputs
        if c.window is not None:
            sliding = inputs._replace(ranges=masks.sliding_window_ranges(ranges, c.window))
            size = None if cache is None else kv_cache.ring_slots(c, cache, inputs.tokens.shape[1])
            sliding = sliding if size is None else masks.in_ring(sliding, size)
        new_cache, kept = [], []
        for i, block in enumerate(self.blocks):
            x, kv = block(x, inputs if c.is_global(i) else sliding, None if cache is None else cache[i])
            new_cache.append(kv)
            if i in self.features:
                kept.append(x)
        last = self.norm(x)
        return (Features(last, jnp.concatenate(kept, axis=-1)) if kept else last), tuple(new_cache)


def build(config: ModelConfig, remat: RematPolicy = "none", features: tuple[int, ...] = ()) -> Model:
    """Builds the transformer of a config as pure functions; with `features`, its hidden states are `Features`."""
    shifted = config.alignment == "shifted"
    head = _head_of_last if features else lm_head
    return model_of(
        config,
        Transformer(config, remat=remat, features=features),
        init=lambda net, key, inputs: net.init(key, inputs),
        apply=shifted_logits.apply if shifted else _apply,
        forward=shifted_logits.forward if shifted else _forward,
        empty_cache=functools.partial(
            shifted_logits.empty_cache if shifted else kv_cache.empty_cache, config
        ),
        shardings=SHARDINGS,
        head=head,
        head_chunk=head,
        soft_masked=None if features else functools.partial(_soft_masked, config),
        features=None if features or shifted else functools.partial(build, config, remat),
    )


def _head_of_last(params: Params, hidden: Features, *chunk: Any) -> Float[Array, "B T V"]:
    return lm_head(params, hidden.last, *chunk)


def soft_masking(
    lm: LM, *, scale: float, steepness: float = 10 / 1.5, centre: float = -0.75, top_k: int = 3
) -> LM:
    """Returns the language model with soft masking: positions that stay masked are fed as mixtures of embeddings.

    A position that is a mask in this pass and was already predicted in the previous pass gets the embedding

        (1 - w) E[mask] + w sum_k p_k E[v_k],    w = scale * sigmoid(steepness * (-H - centre)),

    where v_1 .. v_k are the ids of the k largest logits, p is the softmax over these k logits, and H is the entropy of
    the whole distribution in nats (arXiv 2510.17206; `TransparencyHead` with "mixinputs_with_topk" in the authors'
    code). Tokens other than masks are not changed. In the first pass of a block, and after the active block, there is
    no earlier prediction, and masks are plain. Decoding computes all logits, never chunks of a vocabulary.

    Models must be trained with soft masking, which the recipes here do not do: training gives a model no predictions of
    a pass before. For a model that was not, only a small `scale` does no harm.

    Args:
        lm: A transformer with a mask: LLaDA, Dream, SDAR, LLaDA2, or your own. Scale 0 does not change its results.
        scale: Largest share of the mixture, in [0, 1]; a learned value.
        steepness: Slope of the sigmoid, above 0; a learned value. The default is the initial value of training.
        centre: Negative entropy at which the share is half of `scale`; a learned value.
        top_k: k, number of ids in the mixture.

    Returns:
        The language model; its parameters are shared with `lm`.

    Raises:
        ValueError: The model does not support it, or a number is out of range.

    Departs from the reference: the reference also mixes masks after the active block, with predictions of the same
    pass; and its schedules of the scale over time ("linear", "stepwise") are not supported here.
    """
    if not isinstance(lm, LM):
        raise refuse("soft_masking(lm=)", lm, "a model as mj.load() returns it")
    mask = lm.corruption.mask
    if lm.model.soft_masked is None or mask is None or mask != lm.model.config.mask:
        allowed = "a transformer of mercury_jax.models.transformer with a mask, without soft masking"
        raise refuse("soft_masking(lm=)", lm.name, allowed)
    numbers = {
        "scale": (scale, lambda x: 0 <= x <= 1, "a number in [0, 1]"),
        "steepness": (steepness, lambda x: 0 < x < math.inf, "a number, above 0"),
        "centre": (centre, math.isfinite, "a number, finite"),
    }
    for name, (value, fits, allowed) in numbers.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not fits(value):
            raise refuse(f"soft_masking({name}=)", value, allowed)
    if not isinstance(top_k, int) or not 1 <= top_k <= lm.model.config.vocab:
        raise refuse("soft_masking(top_k=)", top_k, f"a whole number in [1, {lm.model.config.vocab}]")
    settings = SoftMasking(float(scale), float(steepness), float(centre), top_k)
    return dataclasses.replace(lm, model=_with_soft_masking(lm.model, settings))


@functools.cache
def _with_soft_masking(model: Model, settings: SoftMasking) -> Model:
    """Builds the model once for equal arguments: equal model objects share compiled programs."""
    assert model.soft_masked is not None
    return model.soft_masked(settings)._replace(mesh=model.mesh)


def _soft_masked(config: ModelConfig, settings: SoftMasking) -> Model:
    condition = functools.partial(_soft_input, config, settings)
    return build(config)._replace(condition=condition, head_chunk=None, soft_masked=None, features=None)


def _soft_input(
    config: ModelConfig, settings: SoftMasking, params: Params | None, logits: Float[Array, "B L V"]
) -> SoftInput:
    """Computes the mixture and its share from logits: `Model.condition` of a model with soft masking."""
    dtype = accumulation_dtype(jnp.dtype(config.dtype))
    if params is None:
        shape = logits.shape[:2]
        return SoftInput(jnp.zeros((*shape, config.width), config.dtype), jnp.zeros((*shape, 1), dtype))
    log_p = jax.nn.log_softmax(logits.astype(dtype), axis=-1)
    negative_entropy = jnp.sum(jnp.exp(log_p) * log_p, axis=-1, keepdims=True)
    weight = settings.scale * jax.nn.sigmoid(settings.steepness * (negative_entropy - settings.centre))
    best, ids = jax.lax.top_k(logits.astype(dtype), settings.top_k)  # [B, L, k]
    embeddings = lookup(params["embed"], ids).astype(dtype)  # [B, L, k, D]
    mixture = jnp.einsum("blk,blkd->bld", jax.nn.softmax(best, axis=-1), embeddings)
    scale = config.width**0.5 if config.scale_embed else 1.0
    return SoftInput((scale * mixture).astype(config.dtype), weight)


def _apply(net: Transformer, given: PackedPass) -> Hidden:
    return net(NetworkInputs(*given[:3], length=given.positions.max(axis=1) + 1))[0]


def _forward(net: Transformer, params: Params, given: Pass) -> tuple[Hidden, Cache]:
    inputs = masks.cache_pass_inputs(net.config, given)
    soft = given.self_cond if isinstance(given.self_cond, SoftInput) else None
    return net.apply({"params": params}, inputs, given.cache, soft)
