"""The configuration of a Gemma 4 text model or of DiffusionGemma: every size that differs between its files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mercury_jax.config import Experts, ModelConfig, at_least, one_of, refuse
from mercury_jax.config.model import Pattern

Activation = Literal["gelu_tanh", "gelu", "silu"]

# What `ModelConfig` offers and this architecture does not have, with the one value that it takes.
_FIXED = dict(
    rope_fraction=1.0, rope_scaling=None, qk_norm=True, qkv_bias=False, out_bias=False, mlp_bias=False,
    zero_centred=False, scale_embed=True, alignment="same_position", timed=False,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GemmaConfig(ModelConfig):
    """Sliding and global attention layers, a dense and an expert branch side by side, soft-capped logits.

    heads, head_dim, kv_heads and rope_theta are those of the sliding layers; `global_layers` are the indices of
    the layers that see everything, with sizes of their own. A sliding layer's clean token sees `window` tokens,
    itself among them; its canvas tokens see the canvas and the `context_tail` tokens before it (None: window - 1,
    which is what transformers' dynamic cache keeps). As the pattern of a diffusion model "causal_encoder", of an
    autoregressive one "block_causal" with block 1.

    `experts` adds an expert branch beside the dense one of width `ffn` (count, active and width are read).
    per_layer_width > 0: each layer adds an embedding of its own for each token. The last `shared_kv` layers have
    no keys: they read those of the last layer of their kind before them, and their dense branch is `shared_ffn`
    wide (None: ffn). encoder_scalars: clean tokens have a layer scalar of their own.
    """

    pattern: Pattern = "causal_encoder"
    zero_centred: bool = False
    mask: int | None = None
    window: int = 512  # pyright: ignore[reportIncompatibleVariableOverride]  # never None here
    context_tail: int | None = None
    global_head_dim: int = 64
    global_kv_heads: int = 2
    global_rope_theta: float = 1e6
    global_rope_fraction: float = 0.25  # share of the pairs that are rotated, the fastest ones
    global_rope_factor: float = 1.0  # divides the global layers' frequencies
    keys_as_values: bool = (
        False  # of global layers: v = norm(k before its norm and RoPE), no projection of its own
    )
    activation: Activation = "gelu_tanh"
    softcap: float | None = 30.0
    self_conditioning: bool = False
    encoder_scalars: bool = False
    per_layer_width: int = 0
    per_layer_vocab: int = 0
    shared_kv: int = 0
    shared_ffn: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in _FIXED.items():
            if getattr(self, name) != value:
                raise refuse(name, getattr(self, name), f"{value!r} in a Gemma model")
        if not self.causal:
            raise refuse(
                "pattern", self.pattern, "causal_encoder, or block_causal with block 1, in a Gemma model"
            )
        one_of(Activation, activation=self.activation)
        at_least(1, global_kv_heads=self.global_kv_heads)
        at_least(0, per_layer_width=self.per_layer_width, shared_kv=self.shared_kv, context_tail=self.tail)
        if self.heads % self.global_kv_heads:
            raise refuse("global_kv_heads", self.global_kv_heads, f"a divisor of heads = {self.heads}")
        if self.global_head_dim < 2 or self.global_head_dim % 2:
            raise refuse("global_head_dim", self.global_head_dim, "an even number, for RoPE")
        if not 0 <= self.global_rope_fraction <= 1 or not self.global_rope_factor > 0:
            value = (self.global_rope_fraction, self.global_rope_factor)
            raise refuse("global_rope_fraction and factor", value, "0 <= fraction <= 1, factor > 0")
        if self.softcap is not None and not self.softcap > 0:
            raise refuse("softcap", self.softcap, "more than 0, or None")
        if self.per_layer_width:
            at_least(self.vocab, per_layer_vocab=self.per_layer_vocab)
        self._check_layers()
        if self.experts is not None:
            _check_experts(self.experts)

    def _check_layers(self) -> None:
        own = range(self.layers - self.shared_kv)
        kinds = {self.is_global(i) for i in own}
        if any(self.is_global(i) not in kinds for i in range(self.layers)):
            allowed = "a number that leaves a layer of each kind with keys of its own"
            raise refuse("shared_kv", self.shared_kv, allowed)

    @property
    def tail(self) -> int:
        """How many clean tokens before its canvas a canvas token sees in a sliding layer."""
        return self.window - 1 if self.context_tail is None else self.context_tail

    @property
    def windowed(self) -> bool:
        """Sliding layers are part of every pattern that this architecture has."""
        return self.causal

    def source(self, layer: int) -> int:
        """The layer whose keys and values a layer reads: itself, or the last of its kind that has some."""
        own = range(self.layers - self.shared_kv)
        return layer if layer in own else max(i for i in own if self.is_global(i) == self.is_global(layer))

    def kv_shape(self, layer: int) -> tuple[int, int]:
        """(key heads, width of a head) of a layer."""
        if self.is_global(layer):
            return self.global_kv_heads, self.global_head_dim
        return self.kv_heads, self.head_dim

    def ffn_of(self, layer: int) -> int:
        """Width of a layer's dense branch."""
        return self.ffn if self.source(layer) == layer or self.shared_ffn is None else self.shared_ffn


def _check_experts(experts: Experts) -> None:
    plain = Experts(count=experts.count, active=experts.active, width=experts.width)
    if experts != plain:
        raise refuse("experts", experts, f"{plain} in a Gemma model")
