"""Configurations: frozen, keyword-only dataclasses that check their fields at construction, and these checks.

`ModelConfig` describes a denoiser, `NoiseConfig` its corruption process, `Plan` and `Refresh` how an answer is
decoded. A field states its type and its range in its annotation, `steps: Annotated[int, AtLeast(1)]`; `check_fields`
checks all of them, and `refuse_if` what fields must satisfy together. All errors have the form of `refuse`: field,
value, allowed values. `to_dict` and `from_dict` convert configs to JSON and back.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import itertools
import json
import math
import numbers
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypeVar,
    get_args,
    get_origin,
    runtime_checkable,
)

T = TypeVar("T")
P = ParamSpec("P")

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


def nearest(name: str, names: Sequence[str], most: int = MANY) -> str:
    """Describes the allowed names after an unknown name, for the argument `allowed` of `refuse`.

    Args:
        name: The unknown name. `lr` also matches `optim.lr`.
        names: Names that exist.
        most: Number of names up to which all of them are listed.

    Returns:
        The most similar name first, if one is similar, then all names if there are at most `most`. A name that begins
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
    if len(names) <= most:
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


class Range(NamedTuple):
    """The numbers that a field or parameter may be, stated in its annotation.

    Attributes:
        low: Lower end.
        high: Upper end.
        open_low: Whether `low` itself is excluded.
        open_high: Whether `high` itself is excluded.
        integer: Whether only whole numbers are allowed; an `int` implies it.
        token_id: Whether it is an id of the model's vocabulary, or -1 for none.
    """

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False
    integer: bool = False
    token_id: bool = False

    def contains(self, value: Any) -> Any:
        """Returns whether a number, or each number of an array, is in the range."""
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        if not self.integer or isinstance(value, int):
            return above & below
        import numpy as np  # here, because the help of a command starts without it

        return above & below & (value == np.floor(value))

    def __str__(self) -> str:
        kind = "a whole number" if self.integer else "a number"
        if math.isinf(self.low) and math.isinf(self.high):
            return f"{kind}, finite" if self.open_high else kind
        if math.isinf(self.high):
            start = f"above {self.low:g}" if self.open_low else f"{self.low:g} or more"
            return f"{kind}, {start}" if self.open_high else f"{kind}, {start}, or infinity"
        left, right = "(" if self.open_low else "[", ")" if self.open_high else "]"
        return f"{kind} in {left}{self.low:g}, {self.high:g}{right}"


def Between(low: float, high: float, *, integer: bool = False) -> Range:
    """Returns the range [low, high], both ends included.

    Args:
        low: Lower end.
        high: Upper end.
        integer: Whether only whole numbers are allowed.

    Returns:
        The range.

    Raises:
        ValueError: An end is no number, or they are in the wrong order.
    """
    if not _number("low of Between", low) <= _number("high of Between", high):
        raise refuse("high of Between", high, f"{low:g} or more, its low")
    return Range(low, high, integer=integer)


def AtLeast(low: float, *, integer: bool = False, infinite: bool = False) -> Range:
    """Returns the range [low, inf); `infinite` includes infinity itself.

    Args:
        low: Lower end, included.
        integer: Whether only whole numbers are allowed.
        infinite: Whether infinity is included.

    Returns:
        The range.
    """
    return Range(_number("low of AtLeast", low), open_high=not infinite, integer=integer)


def Above(low: float) -> Range:
    """Returns the range (low, inf)."""
    return Range(_number("low of Above", low), open_low=True, open_high=True)


def Finite() -> Range:
    """Returns the range of all finite numbers."""
    return Range(open_low=True, open_high=True)


def _number(name: str, value: Any) -> float:
    """Returns a bound of a range; refuses anything but a number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise refuse(name, value, "a number")
    return value


# The most frequent ranges of fields.
AxisSize: TypeAlias = Annotated[
    Annotated[int, AtLeast(1)] | Literal[-1], "1 or more, or -1 for the devices that are left"
]
PositiveInt: TypeAlias = Annotated[int, AtLeast(1)]
NonNegativeInt: TypeAlias = Annotated[int, AtLeast(0)]
PositiveFloat: TypeAlias = Annotated[float, Above(0)]
NonNegativeFloat: TypeAlias = Annotated[float, AtLeast(0)]
Share: TypeAlias = Annotated[float, Between(0, 1)]
ShareBelowOne: TypeAlias = Annotated[float, Range(0, 1, open_high=True)]


def check_fields(config: Any, prefix: str = "") -> None:
    """Checks that every field of a dataclass holds a value that its annotation allows.

    An annotation states types (numbers, strings, booleans, None, classes, `Literal`s, tuples and unions of these) and,
    as `Annotated[type, range]`, a `Range`. A string in `Annotated` replaces the description of what is allowed.

    Args:
        config: A dataclass instance.
        prefix: Prefix of field names in errors, such as "model.".

    Raises:
        ValueError: For the first field with a value that is not allowed.
    """
    hints = _type_hints(type(config))
    for f in dataclasses.fields(config):
        _check(f"{prefix}{f.name}", getattr(config, f.name), hints[f.name])


def check_pattern(name: str, pattern: str) -> None:
    """Checks that the value of a field is a regular expression.

    Args:
        name: Name of the field, for the message.
        pattern: Value of the field.

    Raises:
        ValueError: The value is no regular expression.
    """
    try:
        re.compile(pattern)
    except re.error as error:
        raise refuse(name, pattern, f"a regular expression over paths of parameters: {error}") from None


def refuse_if(config: Any, *cases: tuple[object, str, str], prefix: str = "") -> None:
    """Checks fields against each other.

    Args:
        config: A record whose fields have passed `check_fields`.
        *cases: (whether a field is refused, name of the field, what is allowed instead), in the order of importance.
        prefix: Prefix of field names in errors.

    Raises:
        ValueError: For the first case that holds.
    """
    for refused, field, allowed in cases:
        if refused:
            raise refuse(f"{prefix}{field}", getattr(config, field), allowed)


def checked(function: Callable[P, T]) -> Callable[P, T]:
    """Decorates a function whose arguments are checked at each call, as `check_fields` checks fields.

    Args:
        function: Its annotations say what is allowed.

    Returns:
        The function. A call raises ValueError for the first argument with a value that is not allowed.
    """
    names = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        hints = _type_hints(function)
        for name, value in [*zip(names, args), *kwargs.items()]:
            _check(name, value, hints.get(name, Any))
        return function(*args, **kwargs)

    return call


_type_hints = functools.cache(functools.partial(typing.get_type_hints, include_extras=True))
_UNIONS = (types.UnionType, typing.Union)
_PLAIN_TYPES = {
    int: (numbers.Integral, "a whole number"),
    float: (numbers.Real, "a number"),
    str: (str, "a text"),
    bool: (bool, "True or False"),
    type(None): (type(None), "None"),
}


def _check(name: str, value: Any, hint: Any) -> None:
    if not _fits(value, hint):
        raise refuse(name, value, _in_words(hint))


def _fits(value: Any, hint: Any) -> bool:
    kind, choices = get_origin(hint) or hint, get_args(hint)
    if kind is Annotated:
        ranges = [x for x in choices[1:] if isinstance(x, Range)]
        return _fits(value, choices[0]) and all(x.contains(value) for x in ranges)
    if kind in _UNIONS:
        return any(_fits(value, choice) for choice in choices)
    if kind is Literal:
        return any(type(value) is type(choice) and value == choice for choice in choices)
    if kind is tuple and choices:
        each = [choices[0]] * len(value) if choices[1:] == (...,) and isinstance(value, tuple) else choices
        return isinstance(value, tuple) and len(value) == len(each) and all(map(_fits, value, each))
    if kind in _PLAIN_TYPES:  # bool is a subclass of int
        return isinstance(value, _PLAIN_TYPES[kind][0]) and (kind is bool or not isinstance(value, bool))
    try:
        return not isinstance(kind, type) or isinstance(value, kind)
    except TypeError:  # `Any`, or a Protocol that Python cannot check
        return True


def _in_words(hint: Any) -> str:
    kind, choices = get_origin(hint) or hint, get_args(hint)
    if kind is Annotated:
        ranges = [str(x._replace(integer=choices[0] is int)) for x in choices if isinstance(x, Range)]
        texts = [x for x in choices if isinstance(x, str)]
        return [*texts, *ranges, _in_words(choices[0])][0]
    if kind in _UNIONS:
        return ", or ".join(map(_in_words, choices))
    if kind is Literal:
        return ", ".join(map(str, choices))
    if kind is tuple:
        each = choices[:1] if choices[1:] == (...,) else choices
        return f"a tuple of {', '.join(map(_in_words, each))}"
    return _PLAIN_TYPES[kind][1] if kind in _PLAIN_TYPES else f"a {kind.__name__}"


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
    factor: PositiveFloat
    original: int = 8192
    low: float = 1.0
    high: float = 4.0
    fast: float = 32.0
    slow: float = 1.0
    attention: float = 1.0
    truncate: bool = True
    short: tuple[PositiveFloat, ...] = ()
    long: tuple[PositiveFloat, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, "rope_scaling.")
        numbers_of = "numbers above 0 for longrope, nothing for other kinds"
        refuse_if(
            self,
            (
                self.kind == "llama3" and self.low == self.high,
                "high",
                f"a number other than low = {self.low}",
            ),
            *(
                (bool(getattr(self, x)) != (self.kind == "longrope"), x, numbers_of)
                for x in ("short", "long")
            ),
            prefix="rope_scaling.",
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

    count: PositiveInt
    active: PositiveInt
    width: PositiveInt
    score: RouterScore = "softmax"
    renormalise: bool = True
    scale: float = 1.0
    groups: PositiveInt = 1
    active_groups: PositiveInt = 1
    correction: bool = False
    shared: int = 0
    dense: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, "experts.")
        in_groups = self.count // self.groups * self.active_groups
        divided = self.count % self.groups == 0 and self.active_groups <= self.groups
        refuse_if(
            self,
            (self.active > self.count, "active", f"at most experts.count = {self.count}"),
            (not divided, "groups", f"a divisor of {self.count}, active_groups of them used"),
            (self.active > in_groups, "active", "at most the experts of the active groups"),
            prefix="experts.",
        )


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

    vocab: PositiveInt
    width: PositiveInt = 256
    layers: PositiveInt = 6
    heads: PositiveInt = 8
    kv_heads: PositiveInt = 4
    head_dim: PositiveInt = 32
    ffn: PositiveInt = 704
    pattern: Pattern = "causal_encoder"
    block: PositiveInt = 32
    rope_theta: float = 10_000.0
    rope_fraction: float = 1.0
    rope_scaling: RopeScaling | None = None
    qk_norm: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    window: PositiveInt | None = None
    global_layers: tuple[int, ...] = ()
    experts: Experts | None = None
    tied: bool = True
    zero_centred: bool = True
    scale_embed: bool = True
    norm_eps: float = 1e-6
    alignment: Alignment = "same_position"
    timed: bool = False
    context: PositiveInt = 2048
    dtype: ComputeType = "float32"
    mask: int | None = 4
    pad: int = 0
    eos: int = 3
    ends: tuple[int, ...] = ()
    predicts_next: bool = False  # checkpoints without this key were not trained for it

    def __post_init__(self) -> None:
        check_fields(self, "model.")
        outside = lambda *ids: any(not 0 <= i < self.vocab for i in ids)
        an_id = f"an id in 0..{self.vocab - 1}"
        layers = [i for i in range(self.layers) if self.window is not None and i in self.global_layers]
        refuse_if(
            self,
            (self.heads % self.kv_heads, "kv_heads", f"a divisor of heads = {self.heads}"),
            (self.head_dim % 2, "head_dim", "an even number, for RoPE"),
            (self.mask is not None and outside(self.mask), "mask", an_id),
            (outside(self.pad), "pad", an_id),
            (self.eos != -1 and outside(self.eos), "eos", an_id),
            (outside(*self.ends), "ends", f"ids in 0..{self.vocab - 1}"),
            (
                list(self.global_layers) != layers, "global_layers",
                "() where window is None" if self.window is None else f"rising indices in 0..{self.layers - 1}",
            ),
            (
                self.window is not None and not self.windowed, "window",
                "None for this pattern: only block_causal with block 1 and same_position has sliding windows",
            ),
            (self.mlp_bias and self.experts, "mlp_bias", "False beside experts, which have no biases"),
            (
                self.predicts_next and not self.causal, "predicts_next",
                f"False for {self.pattern} with block {self.block}: its clean tokens see what they would predict; "
                "True for causal_encoder, or block_causal with block 1",
            ),
            prefix="model.",
        )  # fmt: skip
        if self.rope_scaling is not None:
            self._check_rope(self.rope_scaling)

    def _check_rope(self, scaling: RopeScaling) -> None:
        """Checks that the scaling fits the context and the head size."""
        longest = round(scaling.original * max(scaling.factor, 1.0))
        if scaling.bounded and self.context > longest:
            allowed = f"at most {longest}, {scaling.factor:g} times the original"
            raise refuse("model.context", self.context, allowed)
        pairs = int(self.head_dim * self.rope_fraction) // 2
        for name in ("short", "long"):
            if (count := len(getattr(scaling, name))) not in (0, pairs):
                raise refuse(f"rope_scaling.{name}", f"{count} numbers", f"{pairs}, one per frequency")

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


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Sizes of a block drafter, which reads hidden states of its target (`models.drafter`).

    The width, the vocabulary, the embedding and the head are those of the target.

    Attributes:
        features: Indices of the target's blocks whose outputs the drafter reads, rising.
        block: Positions of a block: the last committed token, and one for each drafted token.
        layers: Number of blocks of the drafter.
        heads: Query heads.
        kv_heads: Key and value heads; a divisor of `heads`.
        head_dim: Size of a head.
        ffn: Hidden units of the feed-forward.
        ids: The ids that are drafted, in ascending order; (): all. Training sets those of its texts: logits of a large
            vocabulary cost more than the rest of the drafter, and most ids are never drafted (2502.14856).
        lookup: If the last `lookup` tokens have occurred in the text before, the draft is what followed them there
            (`decode.methods.prompt_lookup`); 0: never.
    """

    features: tuple[NonNegativeInt, ...]
    block: Annotated[int, AtLeast(2)] = 8
    layers: PositiveInt = 2
    heads: PositiveInt = 8
    kv_heads: PositiveInt = 4
    head_dim: PositiveInt = 64
    ffn: PositiveInt = 1024
    ids: tuple[NonNegativeInt, ...] = dataclasses.field(default=(), repr=False)
    lookup: NonNegativeInt = 3

    def __post_init__(self) -> None:
        check_fields(self, "drafter.")
        rising = bool(self.features) and list(self.features) == sorted(set(self.features))
        refuse_if(
            self,
            (not rising, "features", "indices of blocks of the target, rising"),
            (list(self.ids) != sorted(set(self.ids)), "ids", "rising, or () for all"),
            (self.heads % self.kv_heads, "kv_heads", f"a divisor of heads = {self.heads}"),
            (self.head_dim % 2, "head_dim", "an even number, for RoPE"),
            prefix="drafter.",
        )


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
    schedule: Annotated[
        ScheduleValue, "linear, cosine, polynomial, a function alpha(t), or a tuple of its values"
    ] = "linear"
    power: PositiveFloat = 2.0
    uniform: ShareBelowOne = 0.2

    def __post_init__(self) -> None:
        check_fields(self, "noise.")
        if isinstance(self.schedule, tuple):
            _check_alpha(self.schedule)
        elif callable(self.schedule):
            # Its values wait for a device: `jax.distributed` may start after this.
            _check_traceable(self.schedule)


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
    if len(values) < 2:
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

    before: NonNegativeInt = 0
    after: NonNegativeInt | None = 0
    every: PositiveInt | None = None

    def __post_init__(self) -> None:
        check_fields(self)

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

    block: PositiveInt | None = None
    steps: PositiveInt | None = None
    refresh: Annotated[
        Refresh | CachePolicyLike | None,
        "a Refresh, such as Refresh.dual(), a policy such as mj.cache_refresh.dkv_decode(), or None",
    ] = None
    revise: NonNegativeInt = 0
    lookahead: NonNegativeInt = 0
    fuse_commit: NonNegativeInt | None = None
    times: tuple[float, ...] | None = None
    whole_blocks: bool = False
    method: Annotated[MethodLike | None, "an mj.Method(name, step), or None"] = None

    def __new__(cls, *args: object, **fields: object) -> Plan:
        if args:
            named = ", ".join(f"{field.name}=" for field in dataclasses.fields(cls))
            raise refuse("Plan() argument", args[0], f"named ones: Plan({named})")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if self.times is not None:
            self._check_times()
        check_fields(self)

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
