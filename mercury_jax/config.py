"""Frozen, keyword-only configurations; each checks itself when it is built."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

Pattern = Literal["bidirectional", "block_causal", "causal_encoder"]
NoiseKind = Literal["absorbing", "uniform", "hybrid"]
ComputeType = Literal["float32", "bfloat16", "float16", "float64"]
ScheduleName = Literal["linear", "cosine", "polynomial"]

T = TypeVar("T")


def refuse(field: str, value: object, allowed: str) -> ValueError:
    """The one form of our errors: the field, the value, what is allowed."""
    return ValueError(f"{field} is {value!r}; allowed: {allowed}")


def at_least(least: float, **fields: float) -> None:
    """Raise unless every field is at least `least`."""
    for name, value in fields.items():
        if not value >= least:
            raise refuse(name, value, f"{least} or more")


def one_of(choices: object, **fields: str) -> None:
    """Raise unless every field is one of a Literal's values."""
    allowed = get_args(choices)
    for name, value in fields.items():
        if value not in allowed:
            raise refuse(name, value, ", ".join(allowed))


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A transformer denoiser: RMSNorm, RoPE, grouped queries, SwiGLU.

    pattern says who sees whom:
        bidirectional    every token of the sequence sees every other (LLaDA, Dream, MDLM)
        block_causal     blocks of `block` tokens at multiples of it, each sees itself and the blocks
                         before (BD3-LM, LLaDA2, SDAR); with block 1 the model is autoregressive
        causal_encoder   known tokens are encoded causally, the canvas of `block` tokens behind them
                         sees all of them and itself (DiffusionGemma)
    predicts_next: the encoding pass is trained as well: its hidden state at a token predicts the next
    one, so the same weights decode autoregressively and can verify a drafted canvas. For patterns
    whose clean tokens see none behind them: causal_encoder, or block_causal with block 1.
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
    qk_norm: bool = True
    tied: bool = True
    norm_eps: float = 1e-6
    context: int = 2048  # most positions of a sequence, prompt and answer together
    dtype: ComputeType = "float32"  # of the arithmetic; parameters are kept in fp32
    mask: int = 4
    pad: int = 0
    eos: int = 3
    predicts_next: bool = False  # a checkpoint without this key never learned it

    def __post_init__(self) -> None:
        at_least(1, vocab=self.vocab, width=self.width, layers=self.layers, heads=self.heads)
        at_least(1, kv_heads=self.kv_heads, ffn=self.ffn, block=self.block, context=self.context)
        one_of(Pattern, pattern=self.pattern)
        one_of(ComputeType, dtype=self.dtype)
        if self.heads % self.kv_heads:
            raise refuse("kv_heads", self.kv_heads, f"a divisor of heads = {self.heads}")
        if self.head_dim < 2 or self.head_dim % 2:
            raise refuse("head_dim", self.head_dim, "an even number, for RoPE")
        for name in ("mask", "pad", "eos"):
            if not 0 <= getattr(self, name) < self.vocab:
                raise refuse(name, getattr(self, name), f"an id in 0..{self.vocab - 1}")
        causal = self.pattern == "causal_encoder" or (self.pattern == "block_causal" and self.block == 1)
        if self.predicts_next and not causal:
            raise refuse(
                "predicts_next", True,
                f"False for {self.pattern} with block {self.block}: its clean tokens see what they would "
                "predict; True for causal_encoder, or block_causal with block 1",
            )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class NoiseConfig:
    """The corruption process that a model is trained with; `mercury_jax.noise.build` makes it."""

    kind: NoiseKind = "absorbing"
    schedule: ScheduleName = "linear"
    power: float = 2.0  # of the polynomial schedule
    uniform: float = 0.2  # hybrid: share of uniform noise at t = 1/2 (GIDD's p_u)

    def __post_init__(self) -> None:
        one_of(NoiseKind, kind=self.kind)
        one_of(ScheduleName, schedule=self.schedule)
        if not self.power > 0:
            raise refuse("power", self.power, "more than 0")
        if not 0 <= self.uniform < 1:
            raise refuse("uniform", self.uniform, "0 <= uniform < 1")


@dataclass(frozen=True, kw_only=True)
class Refresh:
    """When a bidirectional model may reuse keys and values that are no longer exact.

    The whole canvas runs at the start of each block and, where `every` is a number, each `every`
    steps; the passes between run over the active block with `before` positions before it and
    `after` behind it (None: all), and read the rest from the cache.
    """

    before: int = 0
    after: int | None = 0
    every: int | None = None

    def __post_init__(self) -> None:
        at_least(0, before=self.before, after=0 if self.after is None else self.after)
        at_least(1, every=1 if self.every is None else self.every)

    @classmethod
    def prefix(cls, every: int | None = None) -> Refresh:
        """Fast-dLLM's prefix cache (arXiv 2505.22618): what stands before the block is reused."""
        return cls(after=None, every=every)

    @classmethod
    def dual(cls, every: int | None = None) -> Refresh:
        """Fast-dLLM's dual cache: what stands behind the block is reused too."""
        return cls(every=every)

    @classmethod
    def vicinity(cls, look: int = 16, every: int | None = None) -> Refresh:
        """dInfer's vicinity refresh: `look` positions on either side of the block are recomputed."""
        return cls(before=look, after=look, every=every)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How an answer is cut into blocks, how many passes each may take, and what is reused between them.

    block: tokens of an active block (None: the model's own). steps: passes a block may take
    (None: as many as it has tokens; 1 where drafts are verified). refresh: reuse of keys in a
    bidirectional model (None: every pass computes the whole sequence; the other patterns need none,
    their cache is exact). revise: settled blocks before the active one that stay editable
    (bidirectional models; LLaDA2.1's multi-block editing).
    """

    block: int | None = None
    steps: int | None = None
    refresh: Refresh | None = None
    revise: int = 0

    def __post_init__(self) -> None:
        for name in ("block", "steps"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or value != int(value) or value < 1):
                raise refuse(name, value, "a whole number from 1 on, or None")
        if isinstance(self.revise, bool) or self.revise != int(self.revise) or self.revise < 0:
            raise refuse("revise", self.revise, "a whole number from 0 on")


def to_dict(config: Any) -> dict[str, Any]:
    """A dataclass of plain values as JSON-ready data."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def from_dict(kind: type[T], data: Mapping[str, Any]) -> T:
    """Build a flat config from data; an unknown or missing key is refused by name."""
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(set(data) - set(fields))
    if unknown:
        raise refuse(f"{kind.__name__} key", unknown[0], ", ".join(sorted(fields)))
    missing = [n for n, f in fields.items() if f.default is f.default_factory and n not in data]
    if missing:
        raise refuse(f"{kind.__name__} key {missing[0]}", None, "a value: it has no default")
    return kind(**dict(data))
