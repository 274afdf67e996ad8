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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mercury_jax.config import refuse
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


def _maker(fn: Callable[..., Any], **fields: Any) -> Callable[..., Part]:
    names = [p for p in inspect.signature(fn).parameters.values() if p.kind is p.KEYWORD_ONLY]
    ranges = ranges_of(fn)
    title = fn.__name__.lstrip("_")

    @functools.wraps(fn)
    def make(*args: Any, **knobs: Any) -> Part:
        if len(args) > len(names):
            raise refuse(f"{title}() arguments", args, f"at most {len(names)}")
        given = dict(zip((p.name for p in names), args, strict=False)) | knobs
        unknown = set(given) - {p.name for p in names}
        if unknown:
            raise refuse(
                f"{title}() argument", sorted(unknown)[0], ", ".join(p.name for p in names) or "none"
            )
        values = {p.name: given.get(p.name, p.default) for p in names}
        values = {name: _value(title, name, value, ranges.get(name)) for name, value in values.items()}
        return Part(step=fn, knobs=values, name=fn.__name__, **fields)

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
    """Make a decoding rule of `fn(key, view, memory, *, knobs) -> (Proposal, memory)`.

    init(canvas [L], vocabulary size) -> the memory at the start of each block. The other arguments
    are those of `Part`; whole=False promises that it reads `view.reading` and not `view.logits`.
    """
    kind = dict(
        init=init, temperature=temperature, stop=stop, fits=fits, blind=blind, grows=grows, whole=whole
    )
    if fn is None:
        return lambda f: _maker(f, **kind)
    return _maker(fn, **kind)


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


class Sampler(NamedTuple):
    """How an answer is decoded. A bare rule is accepted wherever a sampler is.

    temperature draws the tokens (0: argmax); what a rule reads as confidence is `shape`'s
    business: dividing by a temperature near 0 would make every entropy 0.
    allow: shapers that run first and last, so that nothing revives what they forbid (`shape.allow`).
    verify: draft up to so many tokens, then check them by the causal pass of the same weights, so that
    the answer is the autoregressive one (0: no draft, plain autoregressive decoding); only for models
    whose encoding pass was trained to predict the next token.
    """

    rule: Part
    shape: tuple[Part, ...] = ()
    stop: Part | None = None
    temperature: Any = None  # None: the rule's own
    allow: tuple[Part, ...] = ()
    verify: int | None = None


def settle(view: View, accept: jax.Array, answer: jax.Array | None = None) -> Proposal:
    """Accept the drawn token where told; what else is still noise is refilled with noise.

    Masked decoding refills with the mask (nothing changes), uniform diffusion with fresh tokens. The
    answer is the chain where it is settled and the argmax where it is not.
    """
    drawn = view.reading.sample
    rest = jnp.where(view.masked, view.noise, view.canvas)
    canvas = jnp.where(accept, drawn, rest)
    if answer is None:
        answer = jnp.where(accept, drawn, jnp.where(view.masked, view.reading.argmax, view.canvas))
    return propose(view, canvas, answer)


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
    if not isinstance(sampler, Sampler):
        allowed = "a rule such as rules.threshold(0.9), or a Sampler"
        return checked_sampler(Sampler(_part("sampler", sampler, "rule", allowed)))
    rule = _part("sampler.rule", sampler.rule, "rule", "a rule such as rules.threshold(0.9)")
    stop = sampler.stop
    if stop is not None:
        stop = _part("sampler.stop", stop, "stop", "a stop such as stop.steady(), or None")
    shapers = {}
    for name in ("shape", "allow"):
        found = getattr(sampler, name)
        allowed = "a tuple of shapers such as (shape.top_p(0.9),)"
        if not isinstance(found, tuple | list):
            raise refuse(f"sampler.{name}", getattr(found, "name", found), allowed)
        shapers[name] = tuple(
            _part(f"sampler.{name}[{i}]", x, "shaper", allowed) for i, x in enumerate(found)
        )
    return sampler._replace(rule=rule, stop=stop, **shapers)


def _part(field: str, part: Any, kind: str, allowed: str) -> Part:
    """The part, if it is of this kind; a plain function that decides as a rule does is taken as a rule."""
    if isinstance(part, Part):
        if part.kind != kind:
            raise refuse(field, f"the {part.kind} {part.name}", allowed)
        return part
    if hasattr(part, "knobs"):  # a maker
        raise refuse(field, f"{part.__name__} without its call", f"{part.__name__}()")
    if kind == "rule" and callable(part) and not isinstance(part, type):
        return Part(part, no_memory, {}, getattr(part, "__name__", "rule"))
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
