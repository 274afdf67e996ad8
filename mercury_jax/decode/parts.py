"""The grammar of decoding: rules, shapers and stops as values made of a function and its knobs.

    @rule
    def threshold(key, view, memory, *, p: Annotated[Knob, Between(0, 1)] = 0.9):
        accept = view.masked & (view.reading.p_sample > p)
        return settle(view, accept), memory

    sampler = threshold(0.95)

Keyword-only arguments of the function are knobs. They are leaves of the pytree, so the machine
traces them: another threshold compiles nothing new, and each row of a batch may have its own (pass
an array [B]). What a knob may be stands in its annotation (`ranges`). Everything is written for ONE row; the
machine vmaps it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mercury_jax.config import nearest, refuse
from mercury_jax.decode.ranges import Range, checked, described, ranges_of
from mercury_jax.noise import Corruption
from mercury_jax.types import Proposal, View

Memory = Any
Knob = float | jax.Array  # a number, traced by the machine
FITS = ("masked", "uniform")  # kinds of noise: with a mask id, or without one


class Whole(NamedTuple):
    """A knob that is one array for every row (a table of ids), where an array would be one number a row."""

    value: jax.Array


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["knobs"],
    meta_fields=["step", "init", "name", "temperature", "stop", "fits", "blind", "grows", "whole", "kind"],
)
@dataclass(frozen=True)
class Part:
    """A pure function, the start of its memory, the numbers it runs with, and what it needs.

    Of a rule: `temperature` at which it wants its tokens drawn; `stop`, a function that makes the
    stop it wants; `fits`, the kinds of noise it is made for; `blind`: it looks at `View.blind`,
    which costs a pass twice as wide; `grows`: it inserts or deletes.
    Of any part: `whole`: it looks at `View.logits`, or, as a shaper, at logits of different ids beside each
    other. Where no part does, a large vocabulary is read piece by piece, and its logits are never all there.
    """

    step: Callable[..., Any]
    init: Callable[[jax.Array, int], Memory]
    knobs: dict[str, Any]
    name: str
    temperature: float = 0.0
    stop: Callable[[], Part] | None = None
    fits: tuple[str, ...] = FITS
    blind: bool = False
    grows: bool = False
    whole: bool = True
    kind: str = "rule"  # or "shaper", "stop"

    def __call__(self, *args: Any) -> Any:
        return self.step(*args, **{k: v.value if isinstance(v, Whole) else v for k, v in self.knobs.items()})


def no_memory(canvas: jax.Array, vocab: int) -> Memory:
    """For parts that remember nothing."""
    del canvas, vocab
    return ()


# What each kind of part is called with, by position; its parameters follow as keyword-only arguments.
ARGUMENTS = {
    "rule": ("key", "view", "memory"),
    "shaper": ("logits", "view"),
    "stop": ("view", "proposal", "memory"),
}


def _check_signature(fn: Any, kind: str) -> None:
    """Raises ValueError unless a function takes the arguments of its kind, and every further one by keyword."""
    names = ARGUMENTS[kind]
    if isinstance(fn, Part) or hasattr(fn, "knobs"):
        raise refuse(
            f"function of a {kind}", f"the {kind} {_title(fn)}", f"a function of ({', '.join(names)})"
        )
    try:
        found = inspect.signature(fn)
    except (TypeError, ValueError):  # no function, or one that Python cannot look into
        raise refuse(f"function of a {kind}", fn, f"a function of ({', '.join(names)})") from None
    of = lambda kinds: [p.name for p in found.parameters.values() if p.kind in kinds]
    given = of((inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD))
    enough = len(given) == len(names) or (len(given) < len(names) and of((inspect.Parameter.VAR_POSITIONAL,)))
    swapped = any(name in names and names.index(name) != i for i, name in enumerate(given))
    if not enough or swapped or of((inspect.Parameter.VAR_KEYWORD,)):
        allowed = f"({', '.join(names)}), then parameters by keyword: ({', '.join(names)}, *, p=0.9)"
        raise refuse(f"arguments of the {kind} {_title(fn)}", str(found), allowed)


def _title(fn: Any) -> str:
    return getattr(fn, "name", None) or getattr(fn, "__name__", type(fn).__name__)


def _maker(fn: Callable[..., Any], **fields: Any) -> Callable[..., Part]:
    _check_signature(fn, fields["kind"])
    names = [p for p in inspect.signature(fn).parameters.values() if p.kind is p.KEYWORD_ONLY]
    ranges = ranges_of(fn)
    title = _title(fn).lstrip("_")

    @functools.wraps(fn)
    def make(*args: Any, **knobs: Any) -> Part:
        if len(args) > len(names):
            raise refuse(f"{title}() arguments", args, f"at most {len(names)}")
        given = dict(zip((p.name for p in names), args, strict=False)) | knobs
        unknown = sorted(set(given) - {p.name for p in names})
        if unknown:
            raise refuse(
                f"{title}() argument", unknown[0], nearest(unknown[0], [p.name for p in names]) or "none"
            )
        values = {p.name: given.get(p.name, p.default) for p in names}
        values = {name: _value(title, name, value, ranges.get(name)) for name, value in values.items()}
        return Part(step=fn, knobs=values, name=_title(fn), **fields)

    tell(make, {p.name: p.default for p in names}, ranges)
    return make


def tell(make: Any, defaults: Mapping[str, Any], ranges: Mapping[str, Range]) -> None:
    """Lets a maker of parts say what parameters it takes: `knobs` (defaults), `ranges`, and its docstring."""
    make.knobs, make.ranges = dict(defaults), dict(ranges)
    lines = described(make.__name__, defaults, ranges)
    make.__doc__ = f"{inspect.cleandoc(make.__doc__ or '')}\n\n{lines}".strip()


def _value(part: str, name: str, value: Any, allowed: Range | None) -> Any:
    return value if isinstance(value, Whole) else checked(f"{part}({name}=)", value, allowed)


def rule(
    fn: Callable[..., Any] | None = None,
    *,
    init: Callable[..., Memory] = no_memory,
    temperature: float = 0.0,
    stop: Callable[[], Part] | None = None,
    fits: tuple[str, ...] = FITS,
    blind: bool = False,
    grows: bool = False,
    whole: bool = True,
) -> Any:
    """Makes a decoding rule of `fn(key, view, memory, *, parameters) -> (Proposal, memory)`.

    Args:
        fn: The rule, for one row. Its keyword-only arguments are the rule's parameters; it is traced by JAX, so that
            what depends on an array is written with `jnp.where` or `lax.cond`, not with `if`.
        init: (canvas [L], vocabulary size) -> the memory at the start of each block.
        temperature, stop, fits, blind, grows: Those of `Part`.
        whole: False promises that it reads `view.reading` and not `view.logits`.

    Returns:
        What makes the rule with values for its parameters: `mine(0.9)`.

    Raises:
        ValueError: The function does not take (key, view, memory), or a parameter of it states no sound range.
    """
    if stop is not None and (isinstance(stop, Part) or not callable(stop)):
        raise refuse("stop of a rule", stop, "what makes a stopping criterion, such as mj.stop.never")
    if not fits or not set(fits) <= set(FITS):
        raise refuse("fits of a rule", fits, f"some of {FITS}")
    fields = dict(
        init=init, temperature=temperature, stop=stop, fits=fits, blind=blind, grows=grows, whole=whole,
        kind="rule",
    )  # fmt: skip
    if fn is None:
        return lambda f: _maker(f, **fields)
    return _maker(fn, **fields)


def shaper(fn: Callable[..., Any] | None = None, *, whole: bool = True) -> Any:
    """Make a shaper of `fn(logits[L, V], view, *, knobs) -> logits`; the view has no readings there.

    whole=False promises that each id's new logit depends on its own old one and the view alone. Such a shaper
    may be given a part of the vocabulary: the first column is the id `view.first`.
    """
    if fn is None:
        return lambda f: _maker(f, init=no_memory, whole=whole, kind="shaper")
    return _maker(fn, init=no_memory, whole=whole, kind="shaper")


def stop(
    fn: Callable[..., Any] | None = None,
    *,
    init: Callable[..., Memory] = no_memory,
    whole: bool = True,
) -> Any:
    """Make a stop of `fn(view, proposal, memory, *, knobs) -> (done, memory)`; whole: as of a `rule`."""
    if fn is None:
        return lambda f: _maker(f, init=init, whole=whole, kind="stop")
    return _maker(fn, init=init, whole=whole, kind="stop")


class _Sampler(NamedTuple):
    rule: Part
    shape: tuple[Part, ...] = ()
    stop: Part | None = None
    temperature: Any = None
    allow: tuple[Part, ...] = ()
    verify: int | None = None


class Sampler(_Sampler):
    """How an answer is decoded. A bare rule is accepted wherever a sampler is.

    A named tuple, so that JAX sees its parameters; a class of its own, since a named tuple cannot check its fields.

    Args:
        rule: Which positions a step accepts, such as `rules.threshold(0.9)`.
        shape: Logits processors, in their order.
        stop: The stopping criterion (None: the rule's own, or the one that the noise suggests).
        temperature: Draws the tokens (None: the rule's own; 0: argmax). What a rule reads as confidence is `shape`'s
            business: dividing by a temperature near 0 would make every entropy 0.
        allow: Processors that run first and last, so that nothing revives what they forbid (`shape.allow`).
        verify: Draft up to so many tokens, then check them by the causal pass of the same weights, so that the answer
            is the autoregressive one (0: no draft, plain autoregressive decoding); only for models whose encoding
            pass was trained to predict the next token.

    Raises:
        ValueError: Naming the field that holds something else.
    """

    __slots__ = ()

    def __new__(
        cls,
        rule: Part | Callable[..., Any],
        shape: Sequence[Part] = (),
        stop: Part | None = None,
        temperature: Any = None,
        allow: Sequence[Part] = (),
        verify: int | None = None,
    ) -> Sampler:
        return super().__new__(
            cls,
            _part("sampler.rule", rule, "rule", "a rule such as rules.threshold(0.9)"),
            _shapers("shape", shape),
            None
            if stop is None
            else _part("sampler.stop", stop, "stop", "a stop such as stop.steady(), or None"),
            temperature,
            _shapers("allow", allow),
            verify,
        )


def settle(view: View, accept: jax.Array, answer: jax.Array | None = None) -> Proposal:
    """Accept the drawn token where told; what else is still noise is refilled with noise.

    Masked decoding refills with the mask (nothing changes), uniform diffusion with fresh tokens. The
    answer is the chain where it is settled and the argmax where it is not.
    """
    if getattr(accept, "shape", None) != view.canvas.shape or getattr(accept, "dtype", None) != jnp.bool_:
        raise refuse("accept of mj.settle", shown(accept), f"bool{list(view.canvas.shape)}, as view.masked")
    drawn = view.reading.sample
    rest = jnp.where(view.masked, view.noise, view.canvas)
    canvas = jnp.where(accept, drawn, rest)
    if answer is None:
        answer = jnp.where(accept, drawn, jnp.where(view.masked, view.reading.argmax, view.canvas))
    return propose(view, canvas, answer)


def shown(value: Any) -> str:
    """A value by the shapes and dtypes of its arrays: their numbers are not known while tracing."""
    if isinstance(value, jax.Array):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, tuple | list):
        inner = ", ".join(shown(x) for x in value)
        return f"{type(value).__name__}({inner})" if hasattr(value, "_fields") else f"({inner})"
    return repr(value)


def propose(view: View, canvas: jax.Array, answer: jax.Array | None = None) -> Proposal:
    """A proposal that keeps every position where it is. answer: what would be emitted (None: the canvas)."""
    return Proposal(
        canvas, canvas if answer is None else answer, view.n, jnp.arange(canvas.shape[0], dtype=jnp.int32)
    )


def complete(
    sampler: Sampler | Part | Callable[..., Any], corruption: Corruption, autoregressive: bool = False
) -> Sampler:
    """Fill a sampler's defaults: the stop follows the rule or the corruption, the temperature the rule.

    autoregressive: the model can do nothing else, so nothing is drafted and the rule has nothing to do.
    """
    from mercury_jax.decode import stop as stops

    sampler = checked_sampler(sampler)
    if autoregressive and sampler.verify is None:
        sampler = sampler._replace(verify=0)
    kind = "uniform" if corruption.mask is None else "masked"
    if kind not in sampler.rule.fits and sampler.verify != 0:
        raise refuse(
            "sampler.rule",
            sampler.rule.name,
            f"a rule for {kind} noise; this one is for {sampler.rule.fits[0]}",
        )
    ending = sampler.stop or (sampler.rule.stop or (stops.filled if kind == "masked" else stops.steady))()
    warmth = sampler.rule.temperature if sampler.temperature is None else sampler.temperature
    return sampler._replace(stop=ending, temperature=warmth)


def checked_sampler(sampler: Any) -> Sampler:
    """A sampler whose fields hold parts of the right kind; a bare rule becomes one.

    Raises:
        ValueError: Naming the field that holds something else.
    """
    if isinstance(sampler, Sampler):
        return Sampler(*sampler)  # `_replace` does not check
    return Sampler(_part("sampler", sampler, "rule", "a rule such as rules.threshold(0.9), or a Sampler"))


def _shapers(field: str, found: Any) -> tuple[Part, ...]:
    allowed = "a tuple of shapers such as (shape.top_p(0.9),)"
    if not isinstance(found, tuple | list):
        raise refuse(f"sampler.{field}", getattr(found, "name", found), allowed)
    return tuple(_part(f"sampler.{field}[{i}]", x, "shaper", allowed) for i, x in enumerate(found))


def _part(field: str, part: Any, kind: str, allowed: str) -> Part:
    """The part, if it is of this kind; a plain function that decides as a rule does is taken as a rule."""
    if isinstance(part, Part):
        if part.kind != kind:
            raise refuse(field, f"the {part.kind} {part.name}", allowed)
        return part
    if hasattr(part, "knobs"):  # a maker
        raise refuse(field, f"{part.__name__} without its call", f"{part.__name__}()")
    if kind == "rule" and callable(part) and not isinstance(part, type):
        _check_signature(part, "rule")
        return Part(part, no_memory, {}, _title(part))
    raise refuse(field, part, allowed)


def spread(tree: Any, rows: int) -> Any:
    """Every knob as an array [rows, ...]: numbers are repeated, arrays must have one entry a row."""

    def widen(path: Any, x: Any) -> Any:
        if isinstance(x, Whole):
            value = jnp.asarray(x.value)
            return Whole(jnp.broadcast_to(value, (rows, *value.shape)))
        x = jnp.asarray(x)
        if x.ndim and x.shape[0] != rows:
            name = str(getattr(path[-1], "key", getattr(path[-1], "name", path[-1])))
            raise refuse(f"shape of {name}", list(x.shape), f"a number, or one for each of the {rows} rows")
        return x if x.ndim else jnp.broadcast_to(x, (rows,))

    return jax.tree_util.tree_map_with_path(widen, tree, is_leaf=lambda x: isinstance(x, Whole))
