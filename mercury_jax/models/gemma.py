"""Gemma 4 text models and DiffusionGemma: one backbone that encodes causally and denoises canvases.

Written from the configurations and checkpoints of transformers 5.23 (`gemma4`, `diffusion_gemma`). Sliding-window and
global attention layers alternate; a dense and an expert feed-forward run side by side; logits are soft-capped. The same
weights encode the prompt and denoise the canvas; self-conditioning is added to canvas tokens only. `build` turns a
`GemmaConfig` into a `Model` of pure functions.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.config import (
    Experts,
    ModelConfig,
    NonNegativeInt,
    Pattern,
    PositiveFloat,
    PositiveInt,
    RematPolicy,
    Share,
    refuse_if,
)
from mercury_jax.images import VisionConfig
from mercury_jax.models import cache as kv_cache, masks, vision
from mercury_jax.models.layers import (
    ACTIVATIONS,
    GatedMLP,
    Linear,
    OutputProjection,
    RMSNorm,
    fan_in,
    weight,
)
from mercury_jax.models.masks import NetworkInputs
from mercury_jax.models.network import embed_mixture, lm_head, model_of, rematerialised
from mercury_jax.models.norms import rms_normalise
from mercury_jax.models.ops import Ops, ResidualStream, Term, Weight
from mercury_jax.models.rope import rope_table, rotate
from mercury_jax.ops.norms.op import HeadFactors, Residual
from mercury_jax.ops.quantised_rows import Rows, dense
from mercury_jax.types import (
    Cache,
    ImageTokens,
    Model,
    PackedPass,
    Params,
    Pass,
    Routing,
    SelfCond,
    accumulation_dtype,
)

GemmaActivation = Literal["gelu_tanh", "gelu", "silu"]

# Mesh axes of each parameter, by path; see `mercury_jax.sharding`.
SHARDINGS = (
    (r"(^|/)vision/", ()),  # small, and read once per image
    (r"per_layer/embed$", ("tensor", None, "fsdp")),
    (r"embed$", ("tensor", "fsdp")),
    (r"(q|k|v)/w$", ("fsdp", "tensor", None)),
    (r"o/w$", ("tensor", None, "fsdp")),
    (r"block_\d+/per_layer/gate/w$", ("fsdp", None)),
    (r"block_\d+/per_layer/projection/w$", (None, "fsdp")),
    (r"per_layer/projection/w$", ("fsdp", "tensor", None)),
    (r"(gate|up)/w$", ("fsdp", "tensor")),
    (r"down/w$", ("tensor", "fsdp")),
    (r"gate_up$", (("expert", "tensor"), "fsdp", None)),
    (r"moe/down$", (("expert", "tensor"), None, "fsdp")),
    (r"router/w$", ("fsdp", None)),
    (r"head$", ("fsdp", "tensor")),
)

# Fields of `ModelConfig` that this architecture does not support, with the only value that it accepts.
_FIXED = dict(
    rope_fraction=1.0, rope_scaling=None, qk_norm=True, qkv_bias=False, out_bias=False, mlp_bias=False,
    zero_centred=False, scale_embed=True, alignment="same_position", timed=False,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GemmaConfig(ModelConfig):
    """Sizes of a Gemma 4 text model or of DiffusionGemma.

    `heads` holds for all layers; `head_dim`, `kv_heads` and `rope_theta` are the sizes of the sliding-window layers.
    `experts` adds an expert branch to the dense feed-forward (only count, active and width may be set). Diffusion
    models have the pattern "causal_encoder", autoregressive models "block_causal" with block 1.

    Attributes:
        window: Tokens that a clean token attends to in a sliding layer, itself included.
        context_tail: Number of clean tokens before its canvas that a canvas token attends to in a sliding layer, in
            addition to its canvas; None: window - 1, which is what the dynamic cache of transformers keeps.
        global_layers: Indices of the layers without a window. The fields below are their sizes.
        global_head_dim: Head size of global layers.
        global_kv_heads: Key heads of global layers.
        global_rope_theta: Base of the RoPE frequencies of global layers.
        global_rope_fraction: Fraction of the pairs that global layers rotate: the pairs of the highest frequencies.
        global_rope_factor: Divisor of the frequencies of global layers.
        keys_as_values: Whether the values of global layers are the projected keys (before key norm and RoPE),
            normalised, instead of a projection of their own.
        activation: Activation of the gates.
        softcap: Logits become softcap * tanh(logits / softcap); None: unchanged.
        self_conditioning: Whether a pass reads the expected embeddings of the previous pass.
        encoder_scalars: Whether each layer multiplies clean tokens by a separate learned scalar.
        per_layer_width: Size P of the per-layer embeddings, an additional embedding of each token for each layer; 0:
            none.
        per_layer_vocab: Number of rows in the table of per-layer embeddings.
        shared_kv: Number of last layers without keys and values of their own. Such a layer reads those of the last
            earlier layer of the same kind (sliding or global) that has them.
        shared_ffn: Width of the dense branch in these last layers; None: `ffn`.
        vision: Sizes of the vision tower; None: text only.
    """

    pattern: Pattern = "causal_encoder"
    zero_centred: bool = False
    mask: int | None = None
    window: PositiveInt = 512  # pyright: ignore[reportIncompatibleVariableOverride]  # never None here
    context_tail: NonNegativeInt | None = None
    global_head_dim: PositiveInt = 64
    global_kv_heads: PositiveInt = 2
    global_rope_theta: float = 1e6
    global_rope_fraction: Share = 0.25
    global_rope_factor: PositiveFloat = 1.0
    keys_as_values: bool = False
    activation: GemmaActivation = "gelu_tanh"
    softcap: PositiveFloat | None = 30.0
    self_conditioning: bool = False
    encoder_scalars: bool = False
    per_layer_width: NonNegativeInt = 0
    per_layer_vocab: int = 0
    shared_kv: NonNegativeInt = 0
    shared_ffn: int | None = None
    vision: VisionConfig | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        e = self.experts
        plain = None if e is None else Experts(count=e.count, active=e.active, width=e.width)
        kinds = {self.is_global(i) for i in range(self.layers - self.shared_kv)}
        refuse_if(
            self,
            *((getattr(self, x) != value, x, f"{value!r} in a Gemma model") for x, value in _FIXED.items()),
            (not self.causal, "pattern", "causal_encoder, or block_causal with block 1, in a Gemma model"),
            (self.heads % self.global_kv_heads, "global_kv_heads", f"a divisor of heads = {self.heads}"),
            (self.global_head_dim % 2, "global_head_dim", "an even number, for RoPE"),
            (
                self.per_layer_width and self.per_layer_vocab < self.vocab, "per_layer_vocab",
                f"vocab = {self.vocab} or more",
            ),
            (
                any(self.is_global(i) not in kinds for i in range(self.layers)), "shared_kv",
                "a number that leaves a layer of each kind with keys of its own",
            ),
            (e != plain, "experts", f"{plain} in a Gemma model"),
            prefix="model.",
        )  # fmt: skip

    @property
    def tail(self) -> int:
        """Number of clean tokens before its canvas that a canvas token attends to in a sliding layer."""
        return self.window - 1 if self.context_tail is None else self.context_tail

    @property
    def windowed(self) -> bool:
        """Whether sliding windows are defined for this pattern."""
        return self.causal

    @property
    def lookback(self) -> int:
        """Positions before its own pass that a token attends to at most in a sliding layer."""
        return max(self.window - 1, self.tail)

    def source(self, layer: int) -> int:
        """Finds the layer whose keys and values a layer reads: itself, or the last layer of its kind that has them."""
        own = range(self.layers - self.shared_kv)
        return layer if layer in own else max(i for i in own if self.is_global(i) == self.is_global(layer))

    def kv_shape(self, layer: int) -> tuple[int, int]:
        """Returns (key heads, head size) of a layer."""
        if self.is_global(layer):
            return self.global_kv_heads, self.global_head_dim
        return self.kv_heads, self.head_dim


# --- layers


def rotary_frequencies(config: GemmaConfig, is_global: bool) -> Float[np.ndarray, "C"]:
    """Computes proportional RoPE: pair i rotates by theta**(-2i / K) / factor; the last pairs of a global layer by 0.

    With a fraction, `layers.rope_frequencies` would divide the exponent by the number of rotated dimensions. Here it is
    divided by the whole head size K, so that the fraction does not change the frequencies of the rotated pairs.
    """
    c = config
    width, theta, fraction, factor = c.head_dim, c.rope_theta, 1.0, 1.0
    if is_global:
        width, theta = c.global_head_dim, c.global_rope_theta
        fraction, factor = c.global_rope_fraction, c.global_rope_factor
    pairs = int(fraction * width // 2)
    frequencies = np.zeros(width // 2)
    frequencies[:pairs] = theta ** (-2.0 * np.arange(pairs) / width) / factor
    return frequencies


class GemmaAttention(nn.Module):
    """Attention with normalised queries, keys and values, and scale 1.

    Global layers may use keys as values, and the last layers may read the keys and values of an earlier layer.
    """

    config: GemmaConfig
    layer: int
    ops: Ops = Ops()

    @nn.compact
    def __call__(
        self,
        x: Rows,
        inputs: NetworkInputs,
        kv: kv_cache.KV | None,
        shared: kv_cache.KV | None,
    ) -> tuple[Float[Array, "B T D"], kv_cache.KV]:
        """Computes the output, and the keys and values for the layers that share them.

        Returns:
            The output [B, T, D], and the keys and values: with a cache all of the row, otherwise those of this pass.
        """
        c = self.config
        groups, width = c.kv_shape(self.layer)
        norm = functools.partial(RMSNorm, c.norm_eps, False)
        linear = lambda heads, name: Linear((c.width,), (heads, width), ops=self.ops, name=name)
        frequencies = rotary_frequencies(c, c.is_global(self.layer))
        table = rope_table(
            inputs.positions, frequencies, context=c.context, dtype=accumulation_dtype(jnp.dtype(c.dtype))
        )
        query, q_norm = linear(c.heads, "q"), norm(name="q_norm")
        if shared is not None:
            q = rotate(q_norm(query(x)), table)  # [B, T, H, K]
        else:
            key, k_norm = linear(groups, "k"), norm(name="k_norm")
            # Values are the keys before their norm and RoPE, or have a projection of their own.
            value = None if c.keys_as_values and c.is_global(self.layer) else linear(groups, "v")
            if kv is not None and inputs.slots is not None and self.ops.whole_heads:
                matrices = [None if y is None else y.parameters()[0] for y in (query, key, value)]
                factors = HeadFactors(q_norm.factors(width), k_norm.factors(width))
                heads = self.ops.project_heads(x, matrices), factors, table
                q, shared = self.ops.norm_rope_write(*heads, kv, inputs.slots, eps=c.norm_eps)
            else:
                q, k = query(x), key(x)  # [B, T, H or G, K]
                v = rms_normalise(k if value is None else value(x), c.norm_eps).astype(k.dtype)
                q, k = rotate(q_norm(q), table), rotate(k_norm(k), table)
                cached = kv is not None and inputs.slots is not None
                shared = self.ops.write(kv, k, v, inputs.slots) if cached else kv_cache.KV(k, v)
        out = self.ops.attend(q, *shared, inputs.ranges, scale=1.0, cached=inputs.slots is not None)
        scale = 1.0 / (2 * c.layers)
        return OutputProjection((c.heads, width), (c.width,), scale, ops=self.ops, name="o")(out), shared


class GemmaRouter(nn.Module):
    """Chooses the k most probable experts of each token: ids and weights [B, T, k].

    The weights are the probabilities of the chosen experts divided by their sum, times a learned scale of each expert.
    """

    config: GemmaConfig
    ops: Ops = Ops()

    @nn.compact
    def _parameters(self) -> tuple[Array, Weight, Array]:
        c = self.config
        assert c.experts is not None
        scale = self.param("scale", nn.initializers.ones, (c.width,))
        w = weight(self, "w", fan_in(), (c.width, c.experts.count))
        return scale, w, self.param("expert_scale", nn.initializers.ones, (c.experts.count,))

    def factors(self) -> Float[Array, "D"]:
        """Returns what normalised hidden states are multiplied by."""
        return self._parameters()[0]

    def __call__(self, x: Float[Array, "B T D"]) -> tuple[Int[Array, "B T k"], Float[Array, "B T k"]]:
        """Chooses the experts.

        Returns:
            Ids and weights [B, T, k].
        """
        c = self.config
        assert c.experts is not None
        _, w, expert_scale = self._parameters()
        logits = self.ops.exact_dot(x, w)  # [B, T, E]
        # 1 / sqrt(D) multiplies the logits instead of the input, where it would need an array of its own.
        scale = c.width**-0.5
        choose = functools.partial(self.ops.route, active=c.experts.active, scale=scale)
        ids, weights = self.ops.map_rows(choose, logits, expert_scale)
        self.sow("routing", "routed", Routing(jax.nn.softmax(logits * scale, axis=-1), ids))
        return ids, weights


class GemmaExperts(nn.Module):
    """The expert branch, including its router."""

    config: GemmaConfig
    ops: Ops = Ops()

    def setup(self) -> None:
        """Creates the router."""
        self.router = GemmaRouter(self.config, self.ops)

    @nn.compact
    def term(self, routed: Float[Array, "B T D"], x: Rows) -> Term:
        """Returns the output of the branch as a term of a sum."""
        c = self.config
        assert c.experts is not None
        e = c.experts
        ids, weights = self.router(routed)
        init = lambda scale: (
            lambda key, shape, dtype=jnp.float32: (
                jax.random.normal(key, shape, dtype) * (scale / shape[1]) ** 0.5
            )
        )
        gate_up = weight(self, "gate_up", init(1.0), (e.count, c.width, 2 * e.width))
        down = weight(self, "down", init(1.0 / (2 * c.layers)), (e.count, e.width, c.width))
        # Not combined: the kernel of `residual_norms` also computes the weighted sum.
        return self.ops.experts(x, ids, weights, (gate_up, down), ACTIVATIONS[c.activation], combined=False)


class SelfConditioning(nn.Module):
    """Maps the previous pass's prediction of each canvas position to a term that is added to its embedding."""

    config: GemmaConfig
    ops: Ops = Ops()

    @nn.compact
    def term(self, self_cond: SelfCond, shape: tuple[int, int], dtype: DTypeLike) -> Term:
        """Returns the term, not yet summed over devices (`Ops.sum_terms`).

        Args:
            self_cond: Expected embeddings [B, T, D] of the previous pass. () means zeros, so that the first
                pass also normalises the embeddings of the canvas.
        """
        c = self.config
        signal = (
            jnp.zeros((*shape, c.width), dtype) if isinstance(self_cond, tuple) else self_cond.astype(dtype)
        )
        mlp = _gated_mlp(c, c.ffn, self.ops, "mlp")
        return mlp.term(RMSNorm(c.norm_eps, False, name="norm")(signal))


class PerLayerEmbeddings(nn.Module):
    """Computes the per-layer embeddings [B, T, N, P] of each token: a table row plus a projection of its embedding."""

    config: GemmaConfig
    ops: Ops = Ops()

    @nn.compact
    def __call__(self, tokens: Int[Array, "B T"], x: Float[Array, "B T D"]) -> Float[Array, "B T N P"]:
        c = self.config
        sizes = (c.layers, c.per_layer_width)
        table = self.param(
            "embed", nn.initializers.normal(c.per_layer_width**-0.5), (c.per_layer_vocab, *sizes)
        )
        scaled = lambda rows: (rows * c.per_layer_width**0.5).astype(x.dtype)
        embedded = self.ops.sum_terms([self.ops.embed(table, tokens, scaled)])[0]
        projected = Linear((c.width,), sizes, ops=self.ops, name="projection")(x) * c.width**-0.5
        return self.ops.replicate((RMSNorm(c.norm_eps, False, name="norm")(projected) + embedded) * 2.0**-0.5)


class PerLayerInput(nn.Module):
    """Computes what the per-layer embedding of this layer adds to the hidden states, after gating and projection."""

    config: GemmaConfig
    ops: Ops = Ops()

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], embedding: Float[Array, "B T P"]) -> Residual:
        c = self.config
        gate = ACTIVATIONS[c.activation](
            Linear((c.width,), (c.per_layer_width,), ops=self.ops, name="gate")(x)
        )
        out = Linear((c.per_layer_width,), (c.width,), ops=self.ops, name="projection")(gate * embedding)
        return Residual((out,), (RMSNorm(c.norm_eps, False, name="norm").factors(c.width),))


class GemmaBlock(nn.Module):
    """One layer: attention, then the feed-forward branches, each with a norm before and after and a residual.

    x = x + norm(attention(norm(x))), then x = x + norm(sum of the branches), then x times a learned scalar.
    """

    config: GemmaConfig
    layer: int
    ops: Ops = Ops()

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"] | ResidualStream,
        inputs: NetworkInputs,
        kv: kv_cache.KV | None,
        shared: kv_cache.KV | None,
        clean: Bool[Array, "B T"],
        embedding: Float[Array, "B T P"] | None,
    ) -> tuple[Float[Array, "B T D"] | ResidualStream, kv_cache.KV]:
        """Computes the hidden states, and the keys and values of the layer."""
        c, ops = self.config, self.ops
        factors = lambda name: RMSNorm(c.norm_eps, False, name=name).factors(c.width)
        # 1. Attention.
        rounded = [self._row_dtype(*(f"attention/{name}/w" for name in "qkv"))]
        x, (read,) = ops.norms(x, [factors("attention_norm")], c.norm_eps, rounded)
        y, kv = GemmaAttention(c, self.layer, ops, name="attention")(read, inputs, kv, shared)
        x = ops.add(x, Residual((y,), (factors("attention_post_norm"),)), c.norm_eps)
        # 2. The dense feed-forward and the experts beside it. They and the router read x with a norm each.
        own_keys = c.source(self.layer) == self.layer
        mlp = _gated_mlp(c, c.ffn if own_keys or c.shared_ffn is None else c.shared_ffn, ops, "mlp")
        before, rounded = [factors("mlp_norm")], [self._row_dtype("mlp/gate/w", "mlp/up/w")]
        if c.experts is not None:
            experts = GemmaExperts(c, ops, name="moe")
            before += [experts.router.factors(), factors("moe_norm")]
            rounded += [None, self._row_dtype("moe/gate_up")]
        x, (read, *routed) = ops.norms(x, before, c.norm_eps, rounded)
        if c.experts is None:
            branches = ops.sum_terms([mlp.term(read)])
        else:
            term = experts.term(dense(routed[0]), routed[1])
            if ops.feed_forwards is not None:
                branches = ops.feed_forwards(read, mlp.matrices(), term, ACTIVATIONS[c.activation])
            else:  # each is normalised before they are added: two sums, in one all-reduce
                branches = ops.sum_terms([mlp.term(read)], [term])
        names = ("mlp_branch_norm", "moe_branch_norm") if len(branches) > 1 else ()
        after = tuple(factors(name) for name in names) or (None,)
        residual = Residual(tuple(branches), after, factors("mlp_post_norm"))
        # 3. The per-layer embedding of each token.
        if embedding is not None:
            x, _ = ops.norms(ops.add(x, residual, c.norm_eps), [], c.norm_eps)
            residual = PerLayerInput(c, ops, name="per_layer")(x, embedding)
        # 4. The learned scalar, or one for clean tokens and one for those of a canvas.
        scales = (self.param("scalar", nn.initializers.ones, (1,)),)
        if c.encoder_scalars:
            scales += (self.param("encoder_scalar", nn.initializers.ones, (1,)),)
        residual = residual._replace(scales=scales, choice=clean if c.encoder_scalars else None)
        return ops.add(x, residual, c.norm_eps), kv

    def _row_dtype(self, *paths: str) -> Any:
        """The dtype to which the rows of products with some of the layer's matrices are rounded, or None."""
        params = flatten_dict(self.variables.get("params", {}), sep="/")
        return self.ops.row_dtype(*(params[path] for path in paths if path in params))


def _gated_mlp(c: GemmaConfig, hidden: int, ops: Ops, name: str) -> GatedMLP:
    return GatedMLP(c.width, hidden, 1.0 / (2 * c.layers), ops=ops, act=ACTIVATIONS[c.activation], name=name)


class Gemma(nn.Module):
    """Embedding, blocks and final norm. The head is applied separately (`network.lm_head`)."""

    config: GemmaConfig
    ops: Ops = Ops()
    remat: RematPolicy = "none"

    def setup(self) -> None:
        """Creates the parameters and blocks."""
        c = self.config
        self.embed = weight(self, "embed", nn.initializers.normal(c.width**-0.5), (c.vocab, c.width))
        block = rematerialised(GemmaBlock, self.remat)
        self.blocks = [block(c, i, self.ops, name=f"block_{i}") for i in range(c.layers)]
        self.norm = RMSNorm(c.norm_eps, False, name="norm")
        if c.per_layer_width:
            self.per_layer = PerLayerEmbeddings(c, self.ops, name="per_layer")
        if c.self_conditioning:
            self.conditioned = SelfConditioning(c, self.ops, name="self_conditioning")
        if not c.tied:
            weight(self, "head", nn.initializers.normal(c.width**-0.5), (c.width, c.vocab))

    def __call__(
        self,
        inputs: NetworkInputs,
        clean: Bool[Array, "B T"],
        lowest: Int[Array, "B T"],
        self_cond: SelfCond = (),
        cache: tuple[kv_cache.KV, ...] | None = None,
        images: ImageTokens | None = None,
    ) -> tuple[Float[Array, "B T D"], tuple[kv_cache.KV, ...]]:
        """Computes hidden states, and updates the cache.

        Args:
            cache: One `KV` per layer that has keys; None: a pass without a cache.
            images: Soft tokens of images; they replace the embeddings of their positions. None: no images.

        Returns:
            Hidden states after the final norm, and one `KV` per layer that has keys.
        """
        c, dtype, tokens = self.config, jnp.dtype(self.config.dtype), inputs.tokens
        terms = [[self.ops.embed(self.embed, tokens, lambda x: (x * c.width**0.5).astype(dtype))]]
        if c.self_conditioning:
            shape = (tokens.shape[0], tokens.shape[1])
            terms.append([self.conditioned.term(self_cond, shape, dtype)])
        embedded, *signal = self.ops.sum_terms(*terms)
        if images is not None:
            soft = images.embeddings.astype(dtype)
            embedded = jnp.where((images.end > 0)[..., None], soft, embedded)
        x = embedded
        if signal:  # self-conditioning changes canvas tokens only
            conditioned = rms_normalise(embedded + signal[0], c.norm_eps).astype(dtype)
            x = jnp.where(clean[..., None], embedded, conditioned)
        per_layer = self.per_layer(tokens, embedded) if c.per_layer_width else None
        sliding = inputs._replace(ranges=masks.clip_ranges(inputs.ranges, lowest))
        if cache is not None and (size := kv_cache.ring_slots(c, cache, tokens.shape[1])) is not None:
            sliding = masks.in_ring(sliding, size)
        kvs: list[kv_cache.KV] = []
        for i, block in enumerate(self.blocks):
            shared = kvs[c.source(i)] if c.source(i) != i else None
            kv = cache[i] if cache is not None and shared is None else None
            embedding = None if per_layer is None else per_layer[:, :, i]
            x, kv = block(x, inputs if c.is_global(i) else sliding, kv, shared, clean, embedding)
            kvs.append(kv)
        _, (normed,) = self.ops.norms(x, [self.norm.factors(c.width)], c.norm_eps)
        return dense(normed), tuple(kvs[: c.layers - c.shared_kv])


# --- the model as pure functions


def build(config: GemmaConfig, remat: RematPolicy = "none") -> Model:
    """Builds the Gemma model of a config as pure functions."""
    shapes = [config.kv_shape(i) for i in range(config.layers - config.shared_kv)]
    head = functools.partial(lm_head, softcap=config.softcap)
    model = model_of(
        config,
        Gemma(config, remat=remat),
        init=lambda net, key, inputs: net.init(key, inputs, jnp.zeros((1, 1), bool), inputs.tokens),
        apply=_apply,
        forward=_forward,
        empty_cache=functools.partial(kv_cache.empty_cache, config, shapes=shapes),
        shardings=SHARDINGS,
        head=head,
        head_chunk=head,
        condition=functools.partial(_condition, config),
        embed_mixture=(
            functools.partial(embed_mixture, dtype=config.dtype, scale=config.width**0.5)
            if config.self_conditioning
            else None
        ),
    )
    if config.vision is None:
        return model
    tower = vision.build(config.vision, config.width, config.dtype)
    init = lambda key: {**model.init(key), "vision": tower.init(jax.random.fold_in(key, 1))}
    return model._replace(init=init, vision=tower)


def _condition(config: GemmaConfig, params: Params | None, logits: Float[Array, "B L V"]) -> SelfCond:
    """Computes expected embeddings [B, L, D] from processed logits, in at least fp32; zeros if params is None."""
    dtype = accumulation_dtype(jnp.dtype(config.dtype))
    if not config.self_conditioning:
        return ()
    if params is None:
        return jnp.zeros((*logits.shape[:-1], config.width), dtype)
    weights = jax.nn.softmax(logits.astype(dtype), axis=-1)
    return embed_mixture(params, weights, 0, config.dtype, scale=config.width**0.5)


def _apply(net: Gemma, given: PackedPass) -> Array:
    inputs = NetworkInputs(given.tokens, given.positions, given.ranges)
    # `clean` and `lowest` follow from the key ranges of `masks.layout`. A clean token has an empty second range, and
    # its first range ends with the token itself. A canvas token has its canvas as the second range, and its first range
    # ends with the last clean token before the canvas. A row holds several documents, so slots are not positions; but
    # within a range, differences of slots are differences of positions, so the window can be subtracted from the end.
    ranges, c = given.ranges, net.config
    clean = ranges[:, :, 1, 1] <= ranges[:, :, 1, 0]
    lowest = ranges[:, :, 0, 1] - jnp.where(clean, c.window, c.tail)
    return net(inputs, clean, lowest, given.self_cond)[0]


def _forward(net: Gemma, params: Params, given: Pass) -> tuple[Array, Cache]:
    c = net.config
    inputs = masks.cache_pass_inputs(c, given)
    clean, self_cond = masks.encoded_tokens(given), given.self_cond
    before = (clean & (jnp.arange(clean.shape[1]) < given.used[:, None])).sum(axis=1)  # [B] committed tokens
    if given.leave_one_out is not None:  # zeros: they must not see an earlier prediction
        more = [(0, 0), (0, given.leave_one_out.columns.shape[1])]
        clean = jnp.pad(clean, more)
        self_cond = jax.tree.map(lambda x: jnp.pad(x, [*more, (0, 0)]), self_cond)
    # Here slots are positions. The window of a clean token ends with the token; the tail of a canvas token ends where
    # the canvas starts.
    lowest = jnp.where(clean, inputs.positions + 1 - c.window, (given.start + before)[:, None] - c.tail)
    if given.images is not None and c.vision is not None and c.vision.bidirectional:
        inputs = masks.with_images(inputs, given.images)
        lowest = jnp.where(given.images.end > 0, jnp.minimum(lowest, given.images.start), lowest)
    return net.apply({"params": params}, inputs, clean, lowest, self_cond, given.cache, given.images)
