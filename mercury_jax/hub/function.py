"""`from_function` makes an `LM` from the user's own denoiser, for sampling, infilling, editing and scoring.

The denoiser is any pure function `apply(params, tokens [B, L]) -> logits [B, L, V]`: a Flax Linen or NNX module, an
Equinox module, or plain JAX. Every forward pass runs over the whole canvas without a KV cache, so the function becomes
a `types.Model` with bidirectional attention and an empty cache. `check_function` runs it on a small canvas and refuses
functions that would give wrong text without an error: visible padding, causal attention, randomness.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Protocol, get_args, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from mercury_jax import noise as noises
from mercury_jax.config import Alignment, ModelConfig, NoiseConfig, NoiseKind, Pattern, one_of, refuse
from mercury_jax.hub.tokenizer import IdTokenizer
from mercury_jax.models import masks
from mercury_jax.models.row_layout import DocumentLayout
from mercury_jax.types import LM, Cache, Device, Key, Model, PackedPass, Params, Pass, accumulation_dtype

OPTIONAL = ("lengths", "attention_mask", "positions", "time")  # optional arguments of `apply`
PROBE = 8  # positions of the canvas in `check_function`
MOST = 1_000_000_000  # upper bound of `vocab` and `context`

# What JAX raises if a function needs the value of a traced array, and what the message says about it.
_NOT_JITTABLE = {
    jax.errors.TracerBoolConversionError: "decides by the value of an array in Python (if, while, and, or, not)",
    jax.errors.TracerIntegerConversionError: "uses an array as a Python int",
    jax.errors.TracerArrayConversionError: "gives an array to numpy; jax.numpy has the same function",
    jax.errors.NonConcreteBooleanIndexError: "selects by a mask, which gives an unknown shape; jnp.where does not",
    jax.errors.ConcretizationTypeError: "needs the value of an array",
    jax.errors.UnexpectedTracerError: "keeps an array of an earlier trace",
}
# What Flax and Equinox say where a module is still in training mode, and what to do about it.
_TRAINING_ERRORS = ("Cannot mutate", "needs PRNG", "Cannot update variable", "Dropout requires a key")
_TRAINING_MODE = (
    "A module must not be in training mode: of Flax NNX call module.eval() before nnx.split, of Linen pass "
    "deterministic=True and use_running_average=True, of Equinox use eqx.nn.inference_mode(module)"
)


@runtime_checkable
class TextTokenizer(Protocol):
    """The methods that `from_function` needs of a user's tokenizer."""

    def encode(self, text: str) -> Any:
        """Encodes a text. Returns ids as a list, as an array, or as the attribute `ids` of an object."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Decodes ids to text."""
        ...


@dataclass(frozen=True, kw_only=True)
class FunctionConfig(ModelConfig):
    """Config of a function as a model. Fields that describe an architecture, such as `width`, are unused.

    Attributes:
        takes: The arguments of `OPTIONAL` that the function takes.
    """

    pattern: Pattern = "bidirectional"
    takes: tuple[str, ...] = ()


def from_function(
    apply: Callable[..., jax.Array],
    params: Params,
    *,
    vocab: int,
    context: int,
    mask: int | None = None,
    noise: NoiseKind | NoiseConfig | None = None,
    eos: int | Sequence[int] | None = None,
    forbidden: Sequence[int] = (),
    tokenizer: TextTokenizer | None = None,
    alignment: Alignment = "same_position",
    block: int | None = None,
    name: str = "own model",
    check: bool = True,
) -> LM:
    """Makes an `LM` from the user's own denoiser.

    Args:
        apply: A pure function `apply(params, tokens) -> logits`, from ids int32 [B, L] to logits [B, L, V] of the token
            at each position, with bidirectional attention. L varies between calls. If it has parameters with these
            names, it also receives

            - `lengths`, int32 [B]: the first `lengths` positions of a row hold tokens, the rest is padding;
            - `attention_mask`, bool [B, L, L]: whether query i may attend to key j;
            - `positions`, int32 [B, L], only with `attention_mask`: the position of each token, for rules that append
              masks which no token attends to (`wino`, `blind_editing`);
            - `time`, float32 [B] in [0, 1]: the noise level of each row; 1 is all noise.

            Without `lengths` and `attention_mask` a function cannot tell padding from tokens. It is then called without
            padding: all rows of a batch must have the same length, and each length is compiled separately.
        params: Parameters of the function, a pytree of arrays.
        vocab: Size V of the vocabulary.
        context: Largest number of positions of a canvas, prompt and answer together.
        mask: The mask id, for absorbing and hybrid noise.
        noise: "absorbing", "uniform", "hybrid", or a `NoiseConfig` with the schedule of the training. None: absorbing,
            which needs `mask`.
        eos: The id or ids that end an answer. None: no id does, and every answer has `max_tokens` tokens.
        forbidden: Ids that are never emitted, besides the mask.
        tokenizer: An object with `encode(text)` and `decode(ids)`, such as `mj.Tokenizer` or a tokenizer of the
            `tokenizers` package. None: prompts are given as ids, and texts are ids as decimal numbers.
        alignment: "shifted" if the logits at position i - 1 predict position i, as in models initialised from an
            autoregressive one.
        block: Block size if the plan has none. Default: the whole answer is one block.
        name: The model's name in messages and reports.
        check: Run `check_function` (up to five passes over a small canvas). False: only trace the function.

    Returns:
        The model. Equal arguments give equal models, which share compiled programs.

    Raises:
        ValueError: An argument is not allowed, or the function fails a check; the message says which.

    Example:
        >>> net = Denoiser()  # a Flax module
        >>> lm = mj.from_function(net.apply, net.init(key, tokens), vocab=12, context=64, mask=10)
        >>> mj.sample(lm, [3, 4, 5], max_tokens=8).tokens[0]
    """
    takes = _optional_arguments(apply)
    vocab, context = _whole("vocab", vocab, 2, MOST), _whole("context", context, 1, MOST)
    noise_config = _noise_config(noise, mask)
    if mask is not None:
        [mask] = _ids("mask", [mask], vocab)
    ends = _ids("eos", () if eos is None else [eos] if isinstance(eos, int | np.integer) else eos, vocab)
    never = _ids("forbidden", forbidden, vocab)
    for i in ends:
        if i in (mask, *never):
            raise refuse("eos", i, "an id that may be emitted: it is the mask, or in forbidden")
    one_of(Alignment, alignment=alignment)
    if not isinstance(name, str) or not name:
        raise refuse("name", name, "a text")
    if not isinstance(check, bool):
        raise refuse("check", check, "True or False")
    check_arrays("params", params)
    config = FunctionConfig(
        vocab=vocab, context=context, mask=mask, eos=ends[0] if ends else -1, ends=tuple(ends[1:]),
        block=context if block is None else _whole("block", block, 1, context),
        alignment=alignment, timed="time" in takes, takes=takes,
    )  # fmt: skip
    own = _own_tokenizer(tokenizer, config)
    # Our tokenizers have special tokens, which are never emitted. For other tokenizers no id counts as special.
    special = () if isinstance(own, IdTokenizer) else noises.specials(own, vocab)
    never = tuple(i for i in dict.fromkeys((*never, *special)) if i not in (mask, *ends))
    corruption = _corruption(noise_config, vocab, mask, never)
    try:
        hash(apply)
    except TypeError:  # for example a method of a module that has a list as a field
        function = apply
        apply = lambda params, tokens, **given: function(params, tokens, **given)
    example = _example(config, 2, min(PROBE, context))
    traced = jax.eval_shape(functools.partial(_logits, apply, config), params, example)
    config = dataclasses.replace(config, dtype=traced.dtype.name)
    lm = LM(_model_of(apply, config), params, own, corruption, name, {"source": "mj.from_function"})
    if check and all(isinstance(leaf, jax.Array | np.ndarray) for leaf in jax.tree.leaves(params)):
        check_function(lm)
    return lm


# jit compares these objects by identity, as static arguments: equal arguments must give the same object, or every call
# of `from_function` would compile its programs again.
_corruption = functools.lru_cache(maxsize=64)(noises.build)
_id_tokenizer = functools.lru_cache(maxsize=64)(IdTokenizer)


# --- the arguments


def _optional_arguments(apply: Any) -> tuple[str, ...]:
    """Finds the arguments of `OPTIONAL` that a function takes; refuses one that (params, tokens) cannot call."""
    allowed = "a function apply(params, tokens) -> logits"
    if isinstance(apply, type) or not callable(apply):
        hint = "; of a Flax module its method: module.apply" if hasattr(apply, "apply") else ""
        raise refuse("apply", apply, allowed + hint)
    try:
        parameters = inspect.signature(apply).parameters.values()
    except (TypeError, ValueError):
        raise refuse("apply", apply, f"{allowed} whose signature Python can read") from None
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) < 2 and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        hint = f". Of a module with its own parameters: {_MODULE_HINT}"
        raise refuse("arguments of apply", str(inspect.signature(apply)), allowed + hint)
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    further = [p for p in named if p not in positional[:2]]
    takes = tuple(name for name in OPTIONAL if name in [p.name for p in further])
    for p in (*positional[2:], *further):
        if p.name not in takes and p.default is p.empty:
            known = f"{', '.join(OPTIONAL)}, or a default"
            raise refuse(f"argument {p.name} of apply", "without a default", known)
    if "positions" in takes and "attention_mask" not in takes:
        raise refuse("argument positions of apply", "alone", "beside attention_mask")
    if {"lengths", "attention_mask"} <= set(takes):
        both = "lengths and attention_mask"
        raise refuse("arguments of apply", both, "one of them, which both hide padding")
    return takes


_MODULE_HINT = (
    "graph, params = nnx.split(module) and lambda params, tokens: nnx.merge(graph, params)(tokens); or "
    "params, static = eqx.partition(module, eqx.is_array) and "
    "lambda params, tokens: jax.vmap(eqx.combine(params, static))(tokens)"
)


def _noise_config(noise: Any, mask: Any) -> NoiseConfig:
    """Converts the argument `noise` to a config; refuses noise that contradicts `mask`."""
    if noise is None:
        if mask is None:
            unmasked = "noise='uniform' for a model that was trained without one"
            raise refuse("mask", None, f"the id of the mask, or {unmasked}")
        noise = "absorbing"
    if isinstance(noise, str) and noise in get_args(NoiseKind):
        noise = NoiseConfig(kind=noise)  # pyright: ignore[reportArgumentType]
    if not isinstance(noise, NoiseConfig):
        raise refuse("noise", noise, f"{', '.join(get_args(NoiseKind))}, a NoiseConfig, or None")
    if noise.kind == "uniform" and mask is not None:
        raise refuse("mask", mask, "None for uniform noise; an id that it never draws belongs into forbidden")
    if noise.kind != "uniform" and mask is None:
        raise refuse("mask", None, f"an id: {noise.kind} noise needs one")
    return noise


def _whole(name: str, value: Any, low: int, high: int, what: str = "a whole number") -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not low <= value <= high:
        raise refuse(name, value, f"{what} in {low}..{high}")
    return int(value)


def _ids(name: str, values: Any, vocab: int) -> list[int]:
    """Checks a sequence of ids."""
    if isinstance(values, str) or not isinstance(values, Sequence | np.ndarray):
        raise refuse(name, values, f"ids in 0..{vocab - 1}")
    return [_whole(name, i, 0, vocab - 1, "an id") for i in values]


def check_arrays(name: str, params: Any) -> None:
    """Checks that parameters are a pytree of arrays.

    Args:
        params: A pytree of arrays, or of `jax.ShapeDtypeStruct`s.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            where = f"{name}{jax.tree_util.keystr(path)}"
            raise refuse(
                where, leaf, "an array. Of an Equinox module, eqx.partition(module, eqx.is_array) has them"
            )


# --- the tokenizer


@dataclass(frozen=True)
class PlainTokenizer(IdTokenizer):
    """Adapts a user's tokenizer to our protocol. It has no special tokens and no chat template.

    Attributes:
        text: The user's tokenizer, with `encode` and `decode`.
    """

    text: Any = None

    def encode(self, *texts: Any, **options: object) -> list[int]:
        """Encodes a text without special tokens (`add_special_tokens=False` where the tokenizer has that option)."""
        found = _encode(self.text)(texts[0])
        ids = np.asarray(getattr(found, "ids", found))
        if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
            raise refuse("what tokenizer.encode returned", found, "a list of ids")
        if ids.size and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            allowed = f"ids in 0..{self.vocab_size - 1}, the vocabulary of the model"
            raise refuse("what tokenizer.encode returned", [int(ids.min()), int(ids.max())], allowed)
        return [int(i) for i in ids]

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Decodes ids."""
        hidden = {self.mask, *self.ends} if skip_special else set()
        shown = [i for i in map(int, ids) if i not in hidden]
        try:
            found = self.text.decode(shown)
        except Exception as error:  # whatever the user's code raises for an id that it does not know
            allowed = "ids that it can decode: those without a text belong into forbidden"
            raise refuse("ids of tokenizer.decode", sorted(set(shown)), f"{allowed} ({error})") from error
        if not isinstance(found, str):
            raise refuse("what tokenizer.decode returned", found, "a text")
        return found

    def render(self, *messages: object, **options: object) -> NoReturn:
        """Raises ValueError, because there is no chat template. `follow` and `example` are the same function."""
        raise refuse("prompt", messages[0], "a text or ids: this tokenizer has no chat template")

    follow = example = render


@functools.lru_cache(maxsize=16)
def _encode(tokenizer: Any) -> Callable[[str], Any]:
    try:
        special = "add_special_tokens" in inspect.signature(tokenizer.encode).parameters
    except (TypeError, ValueError):
        special = False
    return functools.partial(tokenizer.encode, add_special_tokens=False) if special else tokenizer.encode


def _own_tokenizer(tokenizer: Any, config: FunctionConfig) -> Any:
    """Adapts the argument `tokenizer` to our protocol; an `IdTokenizer` for None."""
    ends = (config.eos, *config.ends)
    if tokenizer is None:
        return _id_tokenizer(config.vocab, config.mask, config.pad, ends)
    if isinstance(tokenizer, type) or not isinstance(tokenizer, TextTokenizer):
        raise refuse("tokenizer", tokenizer, "an object with encode(text) and decode(ids), or None")
    size = getattr(tokenizer, "vocab_size", 0)
    if isinstance(size, int) and size > config.vocab:
        raise refuse("vocab", config.vocab, f"{size} or more, as many ids as the tokenizer has")
    if hasattr(tokenizer, "split_answer"):  # one of ours
        return tokenizer
    return PlainTokenizer(config.vocab, config.mask, config.pad, ends, tokenizer)


# --- the function as a model


class Canvas(NamedTuple):
    """The arguments that a function may take in a forward pass; see `from_function`."""

    tokens: Int[Array, "B T"]
    lengths: Int[Array, "B"]
    attention_mask: Bool[Array, "B T T"] | None
    positions: Int[Array, "B T"]
    time: Float[Array, "B"] | None


def _example(config: FunctionConfig, rows: int, size: int) -> Canvas:
    """Makes a full canvas of zeros at time 0.5, for tracing."""
    at = jnp.broadcast_to(jnp.arange(size), (rows, size))
    attends, time = jnp.ones((rows, size, size), bool), jnp.full((rows,), 0.5)
    return Canvas(0 * at, jnp.full((rows,), size), attends, at, time if config.timed else None)


def _logits(
    apply: Callable[..., Any], config: FunctionConfig, params: Params, canvas: Canvas
) -> Float[Array, "B T V"]:
    """Calls the function under tracing, checks the result, and aligns the logits with the tokens they predict."""
    given = {name: getattr(canvas, name) for name in config.takes}
    rows, size = canvas.tokens.shape
    call = f"apply(params, tokens int32[{rows}, {size}])"
    try:
        found = apply(params, canvas.tokens, **given)
    except Exception as error:  # whatever the user's code and its library raise
        if reason := next((why for kind, why in _NOT_JITTABLE.items() if isinstance(error, kind)), None):
            raise ValueError(f"apply cannot be compiled: it {reason}; allowed: jax.numpy alone") from error
        lines = [type(error).__name__, *str(error).strip().splitlines()[:1]]
        training = any(words in lines[-1] for words in _TRAINING_ERRORS)
        reason = re.sub(r" \(https?://\S+\)$", "", ": ".join(lines)).rstrip(".")
        raise ValueError(f"{call} fails: {reason}{'. ' + _TRAINING_MODE if training else ''}") from error
    shape, kind = getattr(found, "shape", None), getattr(found, "dtype", None)
    if shape is None or kind is None:
        raise refuse(f"what {call} returned", type(found).__name__, "one array of logits")
    if shape != (rows, size, config.vocab) or not jnp.issubdtype(kind, jnp.floating):
        allowed = f"floating-point logits [{rows}, {size}, {config.vocab}]: [B, L, vocab]"
        raise refuse(f"what {call} returned", f"{kind}{list(shape)}", allowed)
    found = jnp.asarray(found)
    if config.alignment == "shifted":  # position 0 has no predecessor and keeps its own logits
        found = jnp.concatenate([found[:, :1], found[:, :-1]], axis=1)
    return found.astype(accumulation_dtype(kind))


@functools.lru_cache(maxsize=64)
def _model_of(apply: Callable[..., Any], config: FunctionConfig) -> Model:
    """Wraps the function as a `Model`. Cached, so that equal arguments share compiled programs."""
    masked = "attention_mask" in config.takes

    def padded(params: Params, canvas: Canvas) -> Float[Array, "B T V"]:
        # A bucket may be wider than the context, for which the function may have no position embeddings. Positions
        # beyond the context are never used: the function runs without them, and their logits are zeros.
        size = canvas.tokens.shape[1]
        if size <= config.context:
            return _logits(apply, config, params, canvas)
        attends = canvas.attention_mask
        cut = lambda x: x[:, : config.context]
        canvas = canvas._replace(
            tokens=cut(canvas.tokens),
            positions=cut(canvas.positions),
            attention_mask=None if attends is None else cut(attends)[:, :, : config.context],
        )
        behind = ((0, 0), (0, size - config.context), (0, 0))
        return jnp.pad(_logits(apply, config, params, canvas), behind)

    def forward(
        params: Params, given: Pass, *, mesh: Mesh | None = None, device: Device | None = None
    ) -> tuple[Array, Cache]:
        rows, size = given.tokens.shape
        # A frozen row contributes no tokens. Treat its canvas as full, so that no softmax has an empty set of keys.
        lengths = jnp.where(given.used > 0, given.used, size)
        if not masked:
            at = jnp.broadcast_to(jnp.arange(size), given.tokens.shape)
            return padded(params, Canvas(given.tokens, lengths, None, at, given.time)), given.cache
        inputs = masks.cache_pass_inputs(config, given)
        assert inputs.slots is not None
        attends = _attends(inputs.ranges, jnp.broadcast_to(inputs.slots, inputs.tokens.shape), lengths)
        canvas = Canvas(inputs.tokens, lengths, attends, inputs.positions, given.time)
        call = padded if given.leave_one_out is None else functools.partial(_logits, apply, config)
        return call(params, canvas), given.cache

    def apply_packed(
        params: Params,
        given: PackedPass,
        *,
        mesh: Mesh | None = None,
        device: Device | None = None,
        routing: bool = False,
    ) -> Array:
        if routing:
            raise refuse("routing", True, "False: this function has no experts that mercury_jax knows")
        size = given.tokens.shape[1]
        ranges = jnp.broadcast_to(given.ranges, (*given.tokens.shape, *given.ranges.shape[2:]))
        lengths = jnp.max(ranges[..., 1], axis=(1, 2))
        slots = jnp.broadcast_to(jnp.arange(size), given.tokens.shape)
        attends = _attends(ranges, slots, lengths) if masked else None
        positions = jnp.broadcast_to(given.positions, given.tokens.shape)
        # Clean tokens have time 0, so the maximum is the time of the row's canvas. [B, T] -> [B]
        time = given.time if given.time is None or given.time.ndim == 1 else given.time.max(axis=1)
        return padded(params, Canvas(given.tokens, lengths, attends, positions, time))

    def no_init(key: Key) -> NoReturn:
        raise refuse("lm.model.init", "called", "the parameters that from_function was given")

    return Model(
        config=config,
        init=no_init,
        apply=apply_packed,
        forward=forward,
        head=lambda params, hidden: hidden,
        condition=lambda params, logits: (),
        empty_cache=lambda batch, slots: (),
        encodable=functools.partial(masks.encodable, config),
        layout=DocumentLayout(config),
        shardings=(),
        hides_padding=masked or "lengths" in config.takes,
        reuses_keys=False,
        leave_one_out="positions" in config.takes,
    )


def _attends(
    ranges: Int[Array, "B T R 2"], slots: Int[Array, "B T"], lengths: Int[Array, "B"]
) -> Bool[Array, "B T T"]:
    """Converts key ranges over cache slots to an attention mask over the tokens of the pass.

    A query without keys (padding) attends to all tokens of its row: some implementations return NaN for a softmax over
    no keys, and a NaN value spreads through the next layer even with attention weight 0.
    """
    key = slots[:, None, :, None]  # [B, 1, T, 1]
    inside = (key >= ranges[:, :, None, :, 0]) & (key < ranges[:, :, None, :, 1])  # [B, T, T, R]
    attends = inside.any(axis=-1) & (slots < masks.OUT_OF_CACHE)[:, None]
    row = (jnp.arange(slots.shape[1]) < lengths[:, None])[:, None]
    return jnp.where(attends.any(axis=-1, keepdims=True), attends, row)


# --- checks of the function


def check_function(lm: LM) -> None:
    """Runs the function of an `LM` on a small canvas, and refuses it if it would give wrong text without an error.

    The model runs as in decoding on two rows of random ids, and the logits are compared bit for bit:

    - Purity: two traces must give the same program. They differ if the function uses numpy's random numbers or a
      counter. The program may draw no random numbers, and must run inside a loop, where Flax refuses a module that
      counts its random keys.
    - Independent rows: a changed token in the second row must not change the logits of the first.
    - Bidirectional attention: a changed last token must change earlier logits, if a changed first token changes later
      ones. (A function without attention passes.)
    - Padding: other ids in the padding must change no logits, if the function takes `lengths` or `attention_mask`.
    """
    model, config = lm.model, lm.model.config
    size = min(PROBE, config.context)
    ids = np.random.default_rng(0).integers(0, config.vocab, (2, size)).astype(np.int32)

    def passes(params: Params, tokens: Array, used: Array) -> Array:
        zero = jnp.zeros((2,), jnp.int32)
        time = jnp.full((2,), 0.5) if config.timed else None
        given = Pass(tokens, (), zero, used, used, jnp.zeros((2,), bool), time=time)
        return model.forward(params, given)[0]

    def looped(params: Params, tokens: Array, used: Array) -> Array:
        # Decoding calls the function in a loop, where Flax refuses a module that counts its random keys.
        return jax.lax.scan(lambda _, x: ((), passes(params, x, used)), (), tokens[None])[1][0]

    whole = np.full(2, size, np.int32)
    traces = [jax.jit(lambda *given: looped(*given)).trace(lm.params, ids, whole) for _ in range(2)]
    if "random_bits" in str(traces[0].jaxpr):
        raise ValueError(
            f"apply draws random numbers, as dropout does, the same ones in each pass. {_TRAINING_MODE}; "
            "check=False takes the function as it is"
        )
    programs = [trace.lower() for trace in traces]
    if programs[0].as_text() != programs[1].as_text():
        raise ValueError(
            "apply is not pure: it gives another program each time it is traced. It draws random numbers outside of "
            "JAX, or keeps state from call to call"
        )
    run = programs[0].compile()
    logits = lambda tokens, used=whole: np.asarray(run(lm.params, tokens, used))

    def changed(row: int, at: int) -> np.ndarray:
        """Returns the ids with one token replaced."""
        other = ids.copy()
        other[row, at] = (other[row, at] + 1) % config.vocab
        return other

    differs = lambda a, b: ~np.isclose(a, b, rtol=0, atol=0, equal_nan=True).all(axis=-1)  # [B, L]
    try:
        first = logits(ids)
    except TypeError as error:  # the program has an input more: an array of the first trace
        raise ValueError("apply is not pure: it keeps an array from call to call") from error
    last, begun = differs(first, logits(changed(1, -1))), differs(first, logits(changed(1, 0)))
    if last[0].any() or begun[0].any():
        raise ValueError(
            "apply mixes rows: a token of one row changes the logits of another, as statistics over the batch do. "
            + _TRAINING_MODE
        )
    if begun[1, 2:].any() and not last[1, :-1].any():
        raise ValueError(
            "apply is causal: no logits depend on a later token, and a diffusion model attends in both directions. "
            "check=False takes it as it is"
        )
    if model.hides_padding and size > 2:
        short = np.array([size, size - 2], np.int32)
        padding = differs(logits(ids, short), logits(changed(1, -1), short))
        if padding[1, : size - 2].any():
            raise ValueError(
                "apply does not hide padding: its logits depend on ids behind lengths, or outside of attention_mask"
            )
