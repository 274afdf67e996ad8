"""Configurations: frozen, keyword-only dataclasses that check their fields at construction, and these checks.

`ModelConfig` describes a denoiser, `NoiseConfig` its corruption process, `Plan` and `Refresh` how an answer is
decoded. All errors have the form of `refuse`: field, value, allowed values. `to_dict` and `from_dict` convert configs
to JSON and back.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import itertools
import json
import numbers
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar, get_args, runtime_checkable

T = TypeVar("T")

Pattern = Literal["bidirectional", "block_causal", "causal_encoder"]
ComputeType = Literal["float32", "bfloat16", "float16", "float64"]
Alignment = Literal["same_position", "shifted"]
RopeKind = Literal["linear", "llama3", "yarn", "dynamic", "longrope"]
RouterScore = Literal["softmax", "sigmoid"]
NoiseKind = Literal["absorbing", "uniform", "hybrid"]
ScheduleName = Literal["linear", "cosine", "polynomial"]
# The alpha(t) of `NoiseConfig`: its name, a function, or its values at evenly spaced times from 0 to 1.
ScheduleValue = ScheduleName | Callable[[Any], Any] | tuple[float, ...]
# What a training step keeps of each layer for the backward pass: "none" all intermediate values; "dots" the outputs of
# matrix products; "full" only the layer's input. The backward pass computes the rest again.
RematPolicy = Literal["none", "dots", "full"]


# --- checks


def refuse(field: str, value: object, allowed: str) -> ValueError:
    """Makes the error for a value that is not allowed.

    Args:
        field: Name of the argument or field, as the user writes it.
        value: The value.
        allowed: What is allowed instead.

    Returns:
        A ValueError to raise: "FIELD is VALUE; allowed: ALLOWED".
    """
    return ValueError(f"{field} is {brief(value)}; allowed: {allowed}")


def brief(value: object) -> str:
    """The `repr` of a value for a message; of an array or a long list only the beginning."""
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]}... ({type(value).__name__})"


LONGEST = 400  # characters of a value in an error
MANY = 16  # above this number of names, only the most similar one is listed


def count(number: int, noun: str) -> str:
    """A number with its noun.

    Args:
        number: How many.
        noun: In the singular.

    Returns:
        Such as "1 token" or "2 forward passes".
    """
    plural = "es" if noun.endswith("s") else "s"
    return f"{number} {noun}{'' if number == 1 else plural}"


def nearest(name: str, names: Sequence[str]) -> str:
    """Describes the allowed names after an unknown name, for the argument `allowed` of `refuse`.

    Args:
        name: The unknown name. `lr` also matches `optim.lr`.
        names: Names that exist.

    Returns:
        The most similar name first, if one is similar, then all names if there are at most `MANY`. A name that begins
        with the unknown one comes before others. Of many names without a similar one, the three most similar.
    """
    bare, name = {n.lstrip("-"): n for n in names}, name.lstrip("-")
    similar = functools.partial(difflib.get_close_matches, n=1, cutoff=0.65)
    last = lambda dotted: dotted.rpartition(".")[2]
    close = [n for n in bare if len(name) > 1 and n.startswith(name)][:3] or similar(name, bare)
    close = close or [n for n in bare if len(name) > 1 and name.startswith(n)][:1]
    if not close:  # `widht` means `model.width`; of several with the same last part the first
        ends = {last(n): n for n in reversed(bare)}
        close = [ends[n] for n in similar(last(name), ends)]
    if len(names) <= MANY:
        every = ", ".join(names)
        return f"{bare[close[0]]} is the nearest; all: {every}" if close else every
    close = [bare[n] for n in close or difflib.get_close_matches(name, bare, n=3, cutoff=0)]
    return f"{', '.join(close)} {'is' if len(close) == 1 else 'are'} the nearest of {len(names)}"


def at_least(least: float, **fields: float) -> None:
    """Checks that every field is at least `least`.

    Args:
        least: The smallest allowed value.
        **fields: Values by name.

    Raises:
        ValueError: For the first field below `least`, or NaN.
    """
    for name, value in fields.items():
        if not value >= least:
            raise refuse(name, value, f"{least} or more")


def one_of(choices: object, **fields: str) -> None:
    """Checks that every field is one of a Literal's values.

    Args:
        choices: A `Literal` type.
        **fields: Values by name.

    Raises:
        ValueError: For the first field with another value.
    """
    allowed = get_args(choices)
    for name, value in fields.items():
        if value not in allowed:
            raise refuse(name, value, ", ".join(allowed))


def check_types(config: Any, prefix: str = "", skip: tuple[str, ...] = ()) -> None:
    """Checks that every field of a dataclass holds a value of its type.

    Covers numbers, strings, booleans, None, tuples of these, and dataclasses. The class itself checks fields of other
    types.

    Args:
        config: A dataclass instance.
        prefix: Prefix of field names in errors, such as "model.".
        skip: Names of fields that are not checked.

    Raises:
        ValueError: For the first field of a wrong type.
    """
    hints = _type_hints(type(config))
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if f.name not in skip and not _has_type(value, hints[f.name]):
            raise refuse(f"{prefix}{f.name}", value, _type_in_words(hints[f.name]))


_type_hints = functools.cache(typing.get_type_hints)
_PLAIN_TYPES = {
    int: (numbers.Integral, "a whole number"),
    float: (numbers.Real, "a number"),
    str: (str, "a text"),
    bool: (bool, "True or False"),
    type(None): (type(None), "None"),
}


_UNIONS = (types.UnionType, typing.Union)


def _has_type(value: Any, hint: Any) -> bool:
    if typing.get_origin(hint) in _UNIONS:
        return any(_has_type(value, choice) for choice in get_args(hint))
    if typing.get_origin(hint) is tuple and get_args(hint)[1:] == (...,):
        return isinstance(value, tuple) and all(_has_type(x, get_args(hint)[0]) for x in value)
    if hint in _PLAIN_TYPES:  # bool is a subclass of int
        return isinstance(value, _PLAIN_TYPES[hint][0]) and (hint is bool or not isinstance(value, bool))
    return not dataclasses.is_dataclass(hint) or isinstance(value, typing.cast(type, hint))


def _type_in_words(hint: Any) -> str:
    if typing.get_origin(hint) in _UNIONS:
        return " or ".join(_type_in_words(choice) for choice in get_args(hint))
    if typing.get_origin(hint) is tuple:
        return f"a tuple, each of its values {_type_in_words(get_args(hint)[0])}"
    return _PLAIN_TYPES[hint][1] if hint in _PLAIN_TYPES else f"a {hint.__name__}"


def to_dict(config: Any) -> dict[str, Any]:
    """Converts a dataclass to data for JSON: tuples become lists, nested configs dicts, a schedule its values."""
    # Not `asdict`, which would take a schedule that is a dataclass apart.
    fields = lambda x: {f.name: getattr(x, f.name) for f in dataclasses.fields(x)}
    return json.loads(json.dumps(config, default=lambda x: schedule_values(x) if callable(x) else fields(x)))


def from_dict(kind: type[T], data: Mapping[str, Any]) -> T:
    """Builds a config from JSON data; the inverse of `to_dict`.

    Args:
        kind: The dataclass.
        data: Values by field; nested configs are mappings.

    Returns:
        The config.

    Raises:
        ValueError: For an unknown key, a missing key, or a value that the config refuses.
    """
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(set(data) - set(fields))
    if unknown:
        raise refuse(f"{kind.__name__} key", unknown[0], ", ".join(sorted(fields)))
    missing = [n for n, f in fields.items() if f.default is f.default_factory and n not in data]
    if missing:
        raise refuse(f"{kind.__name__} key {missing[0]}", None, "a value: it has no default")
    hints = typing.get_type_hints(kind)
    return kind(**{name: _from_json(hints[name], value) for name, value in data.items()})


def _from_json(hint: Any, value: Any) -> Any:
    """Converts JSON lists to tuples, and JSON objects to the dataclass in the field's type."""
    if isinstance(value, list):
        return tuple(_from_json(None, x) for x in value)
    if isinstance(value, Mapping):
        choices = get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        for choice in choices:
            if dataclasses.is_dataclass(choice):
                return from_dict(choice, value)  # pyright: ignore[reportArgumentType]
    return value


# --- the denoiser


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How RoPE frequencies are scaled for contexts longer than the one a model was first trained with.

    Beyond `original` positions, dynamic and longrope change the frequencies of the whole sequence, including the tokens
    that are already in the KV cache. Keys are cached after rotation and cannot be rotated again. A row therefore has
    the frequencies of its largest length, prompt and `max_tokens` together, from its first pass on; without a cache,
    those of its tokens. transformers takes the length of the longest row at each pass instead, so that the keys cached
    before `original` keep the frequencies of the shorter length.

    Attributes:
        kind: One of
            linear    divides every frequency by `factor`;
            llama3    divides only low frequencies, and blends between the wavelengths original / low and
                      original / high (report of Llama 3.1);
            yarn      blends between `fast` and `slow` rotations over `original` positions, and multiplies cos and sin
                      by `attention` (arXiv 2309.00071);
            dynamic   plain RoPE up to `original` positions; beyond, a base that grows with the length ("dynamic NTK");
            longrope  divides frequency i by short[i] up to `original` positions and by long[i] beyond, and multiplies
                      cos and sin by `attention` (arXiv 2402.13753).
        factor: Ratio of the long to the original context.
        original: Positions of the original context.
        low: Ratio of `original` to the longest blended wavelength, for llama3.
        high: Ratio of `original` to the shortest blended wavelength, for llama3.
        fast: Number of rotations over `original` positions above which frequencies are unchanged, for yarn.
        slow: Number of rotations below which frequencies are divided by `factor`, for yarn.
        attention: Factor of cos and sin (1 in checkpoints of kinds other than yarn and longrope).
        truncate: Whether the two bounds of yarn's blend are rounded to whole dimensions.
        short: One divisor per frequency, for longrope.
        long: One divisor per frequency for longer contexts, for longrope.
    """

    kind: RopeKind
    factor: float
    original: int = 8192
    low: float = 1.0
    high: float = 4.0
    fast: float = 32.0
    slow: float = 1.0
    attention: float = 1.0
    truncate: bool = True
    short: tuple[float, ...] = ()
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
        """Whether the frequencies depend on the length of the sequence."""
        return self.kind in ("dynamic", "longrope")


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts that replaces the feed-forward layer (routing of DeepSeek-V3, arXiv 2412.19437).

    Attributes:
        count: Number of routed experts.
        active: Number of experts per token, chosen by the highest scores.
        width: Hidden units of an expert.
        score: Function that turns the router's logits into scores.
        renormalise: Whether the scores of a token's chosen experts are divided by their sum.
        scale: Factor of the weights.
        groups: Number of groups of experts. With more than one, a token's experts are chosen from its
            `active_groups` best groups only; a group is rated by the sum of its two highest scores.
        active_groups: Number of groups from which a token's experts are chosen.
        correction: Whether a learned bias is added to the scores for the choice of experts. The weights do not
            include it.
        shared: Hidden units of an additional expert that every token uses; 0: no such expert.
        dense: Indices of layers that keep a plain feed-forward.
    """

    count: int
    active: int
    width: int
    score: RouterScore = "softmax"
    renormalise: bool = True
    scale: float = 1.0
    groups: int = 1
    active_groups: int = 1
    correction: bool = False
    shared: int = 0
    dense: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        at_least(
            1, **{"experts.count": self.count, "experts.active": self.active, "experts.width": self.width}
        )
        one_of(RouterScore, **{"experts.score": self.score})
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
    """Sizes and attention pattern of a transformer denoiser: RMSNorm, RoPE, grouped queries, SwiGLU or experts.

    Attributes:
        vocab: Size of the vocabulary.
        width: Size of the hidden states.
        layers: Number of blocks.
        heads: Query heads.
        kv_heads: Key and value heads; a divisor of `heads`.
        head_dim: Size of a head.
        ffn: Hidden units of the feed-forward.
        pattern: Which tokens each token attends to:

            - "bidirectional": all tokens of the sequence (LLaDA, Dream, MDLM).
            - "block_causal": blocks of `block` tokens, its own block and the blocks before it (BD3-LM, LLaDA2, SDAR);
              with block 1 the model is autoregressive.
            - "causal_encoder": known tokens are encoded causally; the canvas of `block` tokens after them attends to
              all known tokens and to itself (DiffusionGemma).
        block: Tokens of a block or canvas.
        rope_theta: Base of the RoPE frequencies.
        rope_fraction: Fraction of the head dimensions that RoPE rotates.
        rope_scaling: Scaling of the RoPE frequencies for longer contexts; None: unscaled.
        qk_norm: Whether queries and keys are normalised (RMSNorm per head).
        qkv_bias: Whether the projections to queries, keys and values have biases.
        out_bias: Whether the projection after the attention has a bias.
        mlp_bias: Whether the gate, up and down projections have biases.
        window: Sliding-window attention: a token attends to the last `window` tokens, itself included. For
            block_causal with block 1 only. None: every layer attends to everything.
        global_layers: Indices of layers without the window.
        experts: Mixture of experts that replaces the feed-forward; None: SwiGLU in every layer.
        tied: Whether the head is the transposed embedding.
        zero_centred: Whether norms multiply by 1 + scale instead of scale.
        scale_embed: Whether embeddings are multiplied by sqrt(width).
        norm_eps: Epsilon of the norms.
        alignment: "shifted" if the hidden state at position i - 1 predicts position i (Dream, which was made from an
            autoregressive model).
        timed: Whether the time of the noise is an input of the model.
        context: Maximum number of positions, prompt and answer together.
        dtype: Dtype of the arithmetic; parameters are stored in fp32.
        mask: Mask id; None: the noise has no mask token.
        pad: Padding id.
        eos: Id that ends an answer; -1: no id does.
        ends: Further ids that end an answer.
        predicts_next: Whether the encoding pass is trained too: its hidden state at a token predicts the next token, so
            that the same weights decode autoregressively and can verify a drafted canvas. Only for patterns in which
            no clean token attends to later tokens: causal_encoder, or block_causal with block 1.
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
    rope_fraction: float = 1.0
    rope_scaling: RopeScaling | None = None
    qk_norm: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    window: int | None = None
    global_layers: tuple[int, ...] = ()
    experts: Experts | None = None
    tied: bool = True
    zero_centred: bool = True
    scale_embed: bool = True
    norm_eps: float = 1e-6
    alignment: Alignment = "same_position"
    timed: bool = False
    context: int = 2048
    dtype: ComputeType = "float32"
    mask: int | None = 4
    pad: int = 0
    eos: int = 3
    ends: tuple[int, ...] = ()
    predicts_next: bool = False  # checkpoints without this key were not trained for it

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
        eos = None if self.eos == -1 else self.eos
        ids = [("mask", self.mask), ("pad", self.pad), ("eos", eos), *(("ends", x) for x in self.ends)]
        for name, value in ids:
            if value is not None and not 0 <= value < self.vocab:
                raise refuse(name, value, f"an id in 0..{self.vocab - 1}")
        if self.window is None:
            if self.global_layers:
                raise refuse("global_layers", self.global_layers, "() where window is None")
        else:
            at_least(1, window=self.window)
            if sorted(set(self.global_layers) & set(range(self.layers))) != list(self.global_layers):
                raise refuse("global_layers", self.global_layers, f"rising indices in 0..{self.layers - 1}")
            if not self.windowed:
                allowed = "None for this pattern: only block_causal with block 1 and same_position has sliding windows"
                raise refuse("window", self.window, allowed)
        if (scaling := self.rope_scaling) is not None:
            most = round(scaling.original * max(scaling.factor, 1.0))
            if scaling.bounded and self.context > most:
                raise refuse(
                    "context", self.context, f"at most {most}, {scaling.factor:g} times the original"
                )
            pairs = int(self.head_dim * self.rope_fraction) // 2
            for name in ("short", "long"):
                count = len(getattr(scaling, name))
                if count not in (0, pairs):
                    raise refuse(f"rope_scaling.{name}", f"{count} numbers", f"{pairs}, one per frequency")
        if self.mlp_bias and self.experts is not None:
            raise refuse("mlp_bias", True, "False beside experts, which have no biases")
        if self.predicts_next and not self.causal:
            raise refuse(
                "predicts_next", True,
                f"False for {self.pattern} with block {self.block}: its clean tokens see what they would "
                "predict; True for causal_encoder, or block_causal with block 1",
            )  # fmt: skip

    @property
    def stretched(self) -> bool:
        """Whether the RoPE frequencies of a row depend on its length: those of a long one differ from a short one's."""
        scaling = self.rope_scaling
        return scaling is not None and scaling.bounded and self.context > scaling.original

    def rope_of(self, length: Any) -> Any:
        """A number for the RoPE frequencies of a row of this length, or of each row; 0 within the original context."""
        if not self.stretched or self.rope_scaling is None:
            return length * 0
        return (length > self.rope_scaling.original) * (length if self.rope_scaling.kind == "dynamic" else 1)

    @property
    def windowed(self) -> bool:
        """Whether sliding windows are defined for this pattern."""
        return self.pattern == "block_causal" and self.block == 1 and self.alignment == "same_position"

    @property
    def lookback(self) -> int:
        """Positions before its own pass that a token attends to at most in a layer with a sliding window."""
        return (self.window or 1) - 1

    def is_global(self, layer: int) -> bool:
        """Whether a layer has no sliding window."""
        return self.window is None or layer in self.global_layers

    @property
    def causal(self) -> bool:
        """Whether clean tokens attend to no token after them."""
        return self.pattern == "causal_encoder" or (self.pattern == "block_causal" and self.block == 1)

    @property
    def autoregressive(self) -> bool:
        """Whether the model can only predict the next token."""
        return self.pattern == "block_causal" and self.block == 1 and self.mask is None

    @property
    def predicts_block_start(self) -> bool:
        """Whether the pass over a finished block also predicts the first token of the next one."""
        return self.pattern == "block_causal" and self.alignment == "shifted"


# --- noise


@dataclass(frozen=True, kw_only=True)
class NoiseConfig:
    """The corruption process that a model is trained with; `mercury_jax.noise.build` makes it.

    Attributes:
        kind: What replaces a noised token: "absorbing" the mask id, "uniform" a uniformly drawn id, "hybrid" either
            of them (GIDD).
        schedule: alpha(t), the probability that a token is not noised at time t: a name, or a function of `jax.numpy`,
            elementwise, which falls from alpha(0) = 1 to alpha(1) = 0. A saved model holds 1025 values of a function,
            at evenly spaced times; loaded, it is linear between them (a tuple of such values is accepted too). Hybrid
            noise has a schedule of its own.
        power: Exponent of the polynomial schedule.
        uniform: For hybrid noise, the share of uniform noise at t = 1/2 (GIDD's p_u).
    """

    kind: NoiseKind = "absorbing"
    schedule: ScheduleValue = "linear"
    power: float = 2.0
    uniform: float = 0.2

    def __post_init__(self) -> None:
        one_of(NoiseKind, kind=self.kind)
        if isinstance(self.schedule, tuple):
            _check_alpha(self.schedule)
        elif callable(self.schedule):
            _check_traceable(
                self.schedule
            )  # its values wait for a device: `jax.distributed` may start after this
        elif not isinstance(self.schedule, str) or self.schedule not in get_args(ScheduleName):
            names = ", ".join(get_args(ScheduleName))
            raise refuse("schedule", self.schedule, f"{names}, a function alpha(t), or a tuple of its values")
        check_types(self, "noise.", skip=("schedule",))
        if not self.power > 0:
            raise refuse("power", self.power, "more than 0")
        if not 0 <= self.uniform < 1:
            raise refuse("uniform", self.uniform, "0 <= uniform < 1")


@functools.lru_cache(64)
def schedule_values(alpha: Callable[[Any], Any]) -> tuple[float, ...]:
    """Computes a schedule at 1025 evenly spaced times, the form in which a checkpoint holds a function.

    Args:
        alpha: The schedule, a function of `NoiseConfig.schedule`.

    Returns:
        alpha(0), alpha(1 / 1024), ..., alpha(1).

    Raises:
        ValueError: The function does not fall from 1 to 0.
    """
    import jax
    import jax.numpy as jnp

    with jax.ensure_compile_time_eval():
        values = tuple(float(x) for x in alpha(jnp.linspace(0.0, 1.0, 1025)))
    _check_alpha(values)
    return values


def _check_traceable(alpha: Callable[[Any], Any]) -> None:
    """Refuses a schedule that JAX cannot trace and differentiate, or that is not elementwise."""
    import jax  # the other configs need no JAX
    import jax.numpy as jnp

    try:
        hash(alpha)
    except TypeError:
        raise ValueError(
            f"schedule is a {type(alpha).__name__} that has no hash: make it immutable, "
            "for example with @dataclass(frozen=True)"
        ) from None
    for shape in ((), (2, 3)):  # an objective passes the times of a batch, a decoding rule one time
        try:
            time = jax.ShapeDtypeStruct(shape, jnp.float32)
            found = jax.eval_shape(lambda t: jax.jvp(alpha, (t,), (jnp.ones_like(t),))[0], time)
        except Exception as error:  # whatever the user's function raises
            first = (str(error).splitlines() or [""])[0]
            raise ValueError(
                f"schedule is no function alpha(t) that JAX can trace and differentiate: {type(error).__name__}: "
                f"{first}. Write it with operators and jax.numpy"
            ) from error
        if getattr(found, "shape", None) != shape or not jnp.issubdtype(found.dtype, jnp.floating):
            raise ValueError(
                f"schedule is not elementwise: for times of shape {shape} alpha(t) returned {found}. It must return "
                "one floating-point number for each time"
            )


def _check_alpha(values: tuple[float, ...]) -> None:
    """Checks that values of a schedule at evenly spaced times fall from 1 to 0."""
    if len(values) < 2 or not all(isinstance(x, numbers.Real) for x in values):
        raise refuse("schedule", values, "at least two numbers: alpha(t) at evenly spaced times from 0 to 1")
    for at, end in ((0, 1.0), (-1, 0.0)):
        if not abs(values[at] - end) <= 1e-5:
            raise ValueError(f"schedule: alpha({1.0 - end:g}) is {values[at]:g} and must be {end:g}")
    for i, (before, after) in enumerate(itertools.pairwise(values)):
        if not after <= before + 1e-6:
            at = i / (len(values) - 1)
            raise ValueError(
                f"schedule: alpha rises from {before:g} to {after:g} after t = {at:.4g}; it must fall"
            )


# --- decoding


@dataclass(frozen=True, kw_only=True)
class Refresh:
    """When a bidirectional model may reuse cached keys and values that are no longer exact.

    A full pass over the whole canvas runs at the start of each block and, with `every`, after each `every` steps. The
    passes in between compute only the active block and its surroundings, and read all other keys from the cache.

    Attributes:
        before: Number of positions before the active block that these passes also compute.
        after: Number of positions after the active block that they also compute; None: all.
        every: Number of steps between two full passes; None: one full pass per block.
    """

    before: int = 0
    after: int | None = 0
    every: int | None = None

    def __post_init__(self) -> None:
        check_types(self)
        at_least(0, before=self.before, after=0 if self.after is None else self.after)
        at_least(1, every=1 if self.every is None else self.every)

    @classmethod
    def prefix(cls, every: int | None = None) -> Refresh:
        """The prefix cache of Fast-dLLM (arXiv 2505.22618): reuses the keys and values before the block.

        Args:
            every: See `Refresh`.

        Returns:
            The schedule.
        """
        return cls(after=None, every=every)

    @classmethod
    def dual(cls, every: int | None = None) -> Refresh:
        """The dual cache of Fast-dLLM (arXiv 2505.22618): reuses the keys and values before and after the block.

        Args:
            every: See `Refresh`.

        Returns:
            The schedule.
        """
        return cls(every=every)

    @classmethod
    def vicinity(cls, look: int = 16, every: int | None = None) -> Refresh:
        """The vicinity refresh of dInfer: also computes the positions next to the block.

        Args:
            look: Positions on either side of the block.
            every: See `Refresh`.

        Returns:
            The schedule.
        """
        return cls(before=look, after=look, every=every)


@runtime_checkable
class CachePolicyLike(Protocol):
    """The part of `decode.methods.cache_refresh.CachePolicy` that a `Plan` can check without importing `decode`."""

    @property
    def limit(self) -> Callable[[int, dict[str, float]], int | None]:
        """Gives the number of positions that a pass rarely exceeds, for which a program is compiled; None: unknown."""
        ...

    @property
    def drift(self) -> bool:
        """Whether the policy reads how far keys have moved since they were cached."""
        ...


@runtime_checkable
class MethodLike(Protocol):
    """The part of `decode.state.Method` that a `Plan` can check without importing `decode`."""

    @property
    def name(self) -> str:
        """Name for messages."""
        ...

    @property
    def step(self) -> Callable[..., tuple[tuple, tuple]]:
        """Makes one forward pass: step(config, params, state) -> (state, frame)."""
        ...


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How an answer is divided into blocks, how many steps each block may take, and what each pass computes.

    Attributes:
        block: Tokens of an active block; None: the block size of the model.
        steps: Denoising steps of a block; None: one per token of the block (1 step if drafts are verified).
        refresh: Reuse of cached keys within a canvas: a cache policy of `mj.cache_refresh`, for any pattern, or a
            `Refresh`, for bidirectional models (their canvas is the whole sequence). None: every pass computes the
            whole canvas.
        revise: Number of finished blocks before the active one that stay editable, in bidirectional models
            (multi-block editing of LLaDA2.1).
        lookahead: Number of drafted future canvases that each pass verifies beside the current one (FreeDave). The
            decoded tokens are the same as without it, in fewer passes. Each pass computes up to 1 + lookahead canvases
            per row and holds as many copies of the row's KV cache; reverse-mode gradients are not supported. 0: none.
        fuse_commit: Largest batch in which the pass that writes a finished block to the KV cache also takes the first
            step of the next block, so that a block of n steps takes n passes and not n + 1, for the same tokens. The
            pass is twice as wide. That costs little where a pass waits for the weights, so None means 1 on a GPU or
            TPU and 0 on a CPU. With more than 1, the rounding of a row may depend on the other rows. 0: never.
        times: Times of a block's steps, falling from at most 1 to at least 0, one more than there are steps: step i
            goes from times[i] to times[i + 1]. None: evenly spaced from 1 to 0. Rules that use a noise schedule read
            them, and models with `timed` get times[i].
        whole_blocks: Whether the last block is always decoded at full size, so that an answer may exceed `max_tokens`
            by less than a block. For block_causal models, which were trained on full blocks only.
        method: A `Method` of your own, which decodes instead of those of this package. None: chosen by the other
            fields, the sampler and the model.
    """

    block: int | None = None
    steps: int | None = None
    refresh: Refresh | CachePolicyLike | None = None
    revise: int = 0
    lookahead: int = 0
    fuse_commit: int | None = None
    times: tuple[float, ...] | None = None
    whole_blocks: bool = False
    method: MethodLike | None = None

    def __new__(cls, *args: object, **fields: object) -> Plan:
        if args:
            named = (
                "block=, steps=, refresh=, revise=, lookahead=, fuse_commit=, times=, whole_blocks=, method="
            )
            allowed = f"named ones: Plan({named})"
            raise refuse("Plan() argument", args[0], allowed)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, least in {"block": 1, "steps": 1, "revise": 0, "lookahead": 0, "fuse_commit": 0}.items():
            value, optional = getattr(self, name), getattr(type(self), name) is None
            if optional and value is None:
                continue
            number = value if isinstance(value, numbers.Real) and not isinstance(value, bool) else -1
            if number != number // 1 or number < least:
                raise refuse(name, value, f"a whole number from {least} on{', or None' if optional else ''}")
        if not isinstance(self.refresh, Refresh | CachePolicyLike | None):
            allowed = (
                "a Refresh, such as Refresh.dual(), a policy such as mj.cache_refresh.dkv_decode(), or None"
            )
            raise refuse("refresh", self.refresh, allowed)
        if not isinstance(self.whole_blocks, bool):
            raise refuse("whole_blocks", self.whole_blocks, "True or False")
        if not isinstance(self.method, MethodLike | None):
            raise refuse("method", self.method, "an mj.Method(name, step), or None")
        if self.times is not None:
            self._check_times()

    def _check_times(self) -> None:
        """Checks `times`, converts it to a tuple of floats, and sets `steps` to its length - 1."""
        allowed = "at least two numbers that fall, or stay, within 0..1: one more than there are steps"
        try:
            times = tuple(float(t) for t in self.times or ())
        except (TypeError, ValueError):
            raise refuse("times", self.times, allowed) from None
        inside = all(0.0 <= t <= 1.0 for t in times)
        if len(times) < 2 or not inside or list(times) != sorted(times, reverse=True):
            raise refuse("times", self.times, allowed)
        if self.steps not in (None, len(times) - 1):
            raise refuse("steps", self.steps, f"{len(times) - 1}, one less than times, or None")
        object.__setattr__(self, "times", times)
        object.__setattr__(self, "steps", len(times) - 1)
