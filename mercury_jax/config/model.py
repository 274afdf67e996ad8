"""The configuration of a denoiser."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mercury_jax.config.checks import at_least, check_types, one_of, refuse

Pattern = Literal["bidirectional", "block_causal", "causal_encoder"]
ComputeType = Literal["float32", "bfloat16", "float16", "float64"]
Alignment = Literal["same_position", "shifted"]
RopeKind = Literal["linear", "llama3", "yarn", "dynamic", "longrope"]
Score = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are scaled for contexts longer than the one that a model was first trained with.

    linear    divides every frequency by `factor`.
    llama3    divides only the slow ones, and blends between wavelengths original / low and original / high (Llama
              3.1's report).
    yarn      blends between `fast` and `slow` rotations over `original` positions, and multiplies cos and sin by
              `attention` (arXiv 2309.00071). truncate: the two bounds of the blend are rounded to whole dimensions.
    dynamic   plain RoPE up to `original` positions ("dynamic NTK").
    longrope  divides frequency i by `short[i]` up to `original` positions, and multiplies cos and sin by `attention`
              (arXiv 2402.13753).

    Beyond `original` positions, dynamic and longrope change the frequencies of the whole sequence, including those of
    tokens that are already in the KV cache. Keys are cached after rotation and cannot be rotated again, so a model with
    one of these two kinds has a context of at most `original` (`ModelConfig` checks it), where both are exact. There
    `factor` and `long` are unused; they are kept for the export.
    """

    kind: RopeKind
    factor: float
    original: int = 8192  # positions trained with at first
    low: float = 1.0
    high: float = 4.0
    fast: float = 32.0
    slow: float = 1.0
    attention: float = 1.0
    truncate: bool = True
    short: tuple[float, ...] = ()  # one divisor per frequency
    long: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        one_of(RopeKind, **{"rope_scaling.kind": self.kind})
        if not self.factor > 0:
            raise refuse("rope_scaling.factor", self.factor, "more than 0")
        if self.kind == "llama3" and self.low == self.high:
            raise refuse("rope_scaling.high", self.high, f"a number other than rope_scaling.low = {self.low}")
        for name in ("short", "long"):
            value = getattr(self, name)
            if bool(value) != (self.kind == "longrope") or any(not x > 0 for x in value):
                raise refuse(
                    f"rope_scaling.{name}", value, "numbers above 0 for longrope, nothing for other kinds"
                )

    @property
    def bounded(self) -> bool:
        """Whether the frequencies hold for sequences of at most `original` positions only."""
        return self.kind in ("dynamic", "longrope")


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts in place of the feed-forward layer.

    A token's `active` experts of `count` are those of the highest scores; with `correction` a learned bias is
    added for the choice alone. With `groups` > 1 only the `active_groups` best groups take part, by the sum
    of their two best scores (DeepSeek-V3, arXiv 2412.19437). Scores are divided by their sum where
    `renormalise`, and multiplied by `scale`. `shared`: width of an expert that sees every token, 0 for none.
    """

    count: int
    active: int
    width: int
    score: Score = "softmax"
    renormalise: bool = True
    scale: float = 1.0
    groups: int = 1
    active_groups: int = 1
    correction: bool = False
    shared: int = 0
    dense: tuple[int, ...] = ()  # layers that keep a plain feed-forward

    def __post_init__(self) -> None:
        at_least(
            1, **{"experts.count": self.count, "experts.active": self.active, "experts.width": self.width}
        )
        one_of(Score, **{"experts.score": self.score})
        if self.active > self.count:
            raise refuse("experts.active", self.active, f"at most experts.count = {self.count}")
        if self.count % self.groups or not 1 <= self.active_groups <= self.groups:
            raise refuse(
                "experts.groups", self.groups, f"a divisor of {self.count}, active_groups of them used"
            )
        if self.active > self.count // self.groups * self.active_groups:
            raise refuse("experts.active", self.active, "at most the experts of the active groups")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A transformer denoiser: RMSNorm, RoPE, grouped queries, SwiGLU, or experts in its place.

    pattern says who sees whom:
        bidirectional    every token of the sequence sees every other (LLaDA, Dream, MDLM)
        block_causal     blocks of `block` tokens at multiples of it, each sees itself and the blocks
                         before (BD3-LM, LLaDA2, SDAR); with block 1 the model is autoregressive
        causal_encoder   known tokens are encoded causally, the canvas of `block` tokens behind them
                         sees all of them and itself (DiffusionGemma)
    predicts_next: the encoding pass is trained as well: its hidden state at a token predicts the next
    one, so the same weights decode autoregressively and can verify a drafted canvas. For patterns
    whose clean tokens see none behind them: causal_encoder, or block_causal with block 1.
    alignment: "shifted" where the denoiser says position i at position i - 1 (Dream, made of an
    autoregressive model). timed: it is told the time of the noise.
    window: sliding-window attention, a token sees the last `window` tokens, itself included; layers listed in
    `global_layers` see everything. For block_causal with block 1 only. None: every layer sees everything.
    """

    vocab: int
    width: int = 256
    layers: int = 6
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    ffn: int = 704
    pattern: Pattern = "causal_encoder"
    block: int = 32
    rope_theta: float = 10_000.0
    rope_fraction: float = 1.0  # share of a head's width that is rotated
    rope_scaling: RopeScaling | None = None
    qk_norm: bool = True
    qkv_bias: bool = False  # of the projections to queries, keys and values
    out_bias: bool = False  # of the projection behind the attention
    mlp_bias: bool = False  # of gate, up and down
    window: int | None = None
    global_layers: tuple[int, ...] = ()
    experts: Experts | None = None
    tied: bool = True
    zero_centred: bool = True  # a norm multiplies by 1 + its scale, not by the scale itself
    scale_embed: bool = True  # embeddings are multiplied by sqrt(width)
    norm_eps: float = 1e-6
    alignment: Alignment = "same_position"
    timed: bool = False
    context: int = 2048  # most positions of a sequence, prompt and answer together
    dtype: ComputeType = "float32"  # of the arithmetic; parameters are kept in fp32
    mask: int | None = 4  # None: the noise has no mask
    pad: int = 0
    eos: int = 3
    ends: tuple[int, ...] = ()  # further ids that end an answer
    predicts_next: bool = False  # a checkpoint without this key never learned it

    def __post_init__(self) -> None:
        check_types(self, "model.")
        at_least(1, vocab=self.vocab, width=self.width, layers=self.layers, heads=self.heads)
        at_least(1, kv_heads=self.kv_heads, ffn=self.ffn, block=self.block, context=self.context)
        one_of(Pattern, pattern=self.pattern)
        one_of(ComputeType, dtype=self.dtype)
        one_of(Alignment, alignment=self.alignment)
        if self.heads % self.kv_heads:
            raise refuse("kv_heads", self.kv_heads, f"a divisor of heads = {self.heads}")
        if self.head_dim < 2 or self.head_dim % 2:
            raise refuse("head_dim", self.head_dim, "an even number, for RoPE")
        for name, value in (("mask", self.mask), ("pad", self.pad), ("eos", self.eos), *self._ends()):
            if value is not None and not 0 <= value < self.vocab:
                raise refuse(name, value, f"an id in 0..{self.vocab - 1}")
        self._check_window()
        self._check_scaling()
        if self.mlp_bias and self.experts is not None:
            raise refuse("mlp_bias", True, "False beside experts, which have no biases")
        if self.predicts_next and not self.causal:
            raise refuse(
                "predicts_next", True,
                f"False for {self.pattern} with block {self.block}: its clean tokens see what they would "
                "predict; True for causal_encoder, or block_causal with block 1",
            )  # fmt: skip

    def _check_window(self) -> None:
        if self.window is None:
            if self.global_layers:
                raise refuse("global_layers", self.global_layers, "() where window is None")
            return
        at_least(1, window=self.window)
        if sorted(set(self.global_layers) & set(range(self.layers))) != list(self.global_layers):
            raise refuse("global_layers", self.global_layers, f"rising indices in 0..{self.layers - 1}")
        if not self.windowed:
            allowed = (
                "None for this pattern: only block_causal with block 1 and same_position has sliding windows"
            )
            raise refuse("window", self.window, allowed)

    @property
    def windowed(self) -> bool:
        """Whether the architecture knows what a sliding window means for its pattern."""
        return self.pattern == "block_causal" and self.block == 1 and self.alignment == "same_position"

    def _check_scaling(self) -> None:
        scaling = self.rope_scaling
        if scaling is None:
            return
        if scaling.bounded and self.context > scaling.original:
            allowed = f"at most {scaling.original}: beyond it {scaling.kind} RoPE changes the keys already in the cache"
            raise refuse("context", self.context, allowed)
        pairs = int(self.head_dim * self.rope_fraction) // 2
        for name in ("short", "long"):
            if getattr(scaling, name) and len(getattr(scaling, name)) != pairs:
                have = f"{len(getattr(scaling, name))} numbers"
                raise refuse(f"rope_scaling.{name}", have, f"{pairs}, one per frequency")

    def is_global(self, layer: int) -> bool:
        """Whether a layer sees everything that the pattern allows."""
        return self.window is None or layer in self.global_layers

    def _ends(self) -> list[tuple[str, int]]:
        return [("ends", x) for x in self.ends]

    @property
    def causal(self) -> bool:
        """Whether its clean tokens see none behind them."""
        return self.pattern == "causal_encoder" or (self.pattern == "block_causal" and self.block == 1)

    @property
    def autoregressive(self) -> bool:
        """Whether it can do nothing but predict the next token."""
        return self.pattern == "block_causal" and self.block == 1 and self.mask is None
