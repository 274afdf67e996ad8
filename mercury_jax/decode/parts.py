"""The grammar of decoding: rules, shapers and stops as values made of a function and its knobs.

    @rule
    def threshold(key, view, memory, *, p=0.9):
        accept = view.masked & (view.reading.p_sample > p)
        return settle(view, accept), memory

    sampler = threshold(0.95)

Keyword-only arguments of the function are knobs. They are leaves of the pytree, so the machine
traces them: another threshold compiles nothing new, and each row of a batch may have its own (pass
an array [B]). Everything is written for ONE row; the machine vmaps it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer

from mercury_jax.config import refuse
from mercury_jax.noise import Corruption
from mercury_jax.types import Proposal, View

Memory = Any
Knob = float | jax.Array  # a number, traced by the machine


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["knobs"],
    meta_fields=["step", "init", "name", "temperature"],
)
@dataclass(frozen=True)
class Part:
    """A pure function, the start of its memory, and the numbers it runs with.

    temperature: for a rule, the temperature at which it wants its tokens drawn.
    """

    step: Callable[..., Any]
    init: Callable[[jax.Array], Memory]
    knobs: dict[str, Any]
    name: str
    temperature: float = 0.0

    def __call__(self, *args: Any) -> Any:
        return self.step(*args, **self.knobs)


def no_memory(canvas: jax.Array) -> Memory:
    """For parts that remember nothing."""
    del canvas
    return ()


def _maker(fn: Callable[..., Any], init: Callable[..., Memory], temperature: float) -> Callable[..., Part]:
    names = [p for p in inspect.signature(fn).parameters.values() if p.kind is p.KEYWORD_ONLY]

    @functools.wraps(fn)
    def make(*args: Any, **knobs: Any) -> Part:
        if len(args) > len(names):
            raise refuse(f"{fn.__name__}() arguments", args, f"at most {len(names)}")
        given = dict(zip((p.name for p in names), args, strict=False)) | knobs
        unknown = set(given) - {p.name for p in names}
        if unknown:
            raise refuse(f"{fn.__name__}() argument", sorted(unknown)[0], ", ".join(p.name for p in names))
        values = {p.name: given.get(p.name, p.default) for p in names}
        for name, value in values.items():
            _check_number(fn.__name__, name, value)
        return Part(fn, init, values, fn.__name__, temperature)

    make.knobs = {p.name: p.default for p in names}  # type: ignore[attr-defined]
    return make


def _check_number(part: str, name: str, value: Any) -> None:
    if value is inspect.Parameter.empty or isinstance(value, str | bytes):
        shown = None if value is inspect.Parameter.empty else value
        raise refuse(f"{part}({name}=)", shown, "a number, or an array with one number a row")
    if not isinstance(value, Tracer) and bool(jnp.any(jnp.isnan(jnp.asarray(value)))):
        raise refuse(f"{part}({name}=)", value, "a number")


def rule(
    fn: Callable[..., Any] | None = None,
    *,
    init: Callable[..., Memory] = no_memory,
    temperature: float = 0.0,
) -> Any:
    """Make a decoding rule of `fn(key, view, memory, *, knobs) -> (Proposal, memory)`."""
    if fn is None:
        return lambda f: _maker(f, init, temperature)
    return _maker(fn, init, temperature)


def shaper(fn: Callable[..., Any]) -> Callable[..., Part]:
    """Make a shaper of `fn(logits[L, V], view, *, knobs) -> logits`; `view.reading` is None there."""
    return _maker(fn, no_memory, 0.0)


def stop(fn: Callable[..., Any] | None = None, *, init: Callable[..., Memory] = no_memory) -> Any:
    """Make a stop of `fn(view, proposal, memory, *, knobs) -> (done, memory)`."""
    if fn is None:
        return lambda f: _maker(f, init, 0.0)
    return _maker(fn, init, 0.0)


class Sampler(NamedTuple):
    """How an answer is decoded. A bare rule is accepted wherever a sampler is.

    temperature draws the tokens (0: argmax); what a rule reads as confidence is `shape`'s
    business: dividing by a temperature near 0 would make every entropy 0.
    verify is the seam for checking a draft by a causal pass; None takes drafts as they are.
    """

    rule: Part
    shape: tuple[Part, ...] = ()
    stop: Part | None = None
    temperature: Any = None  # None: the rule's own
    verify: Part | None = None


def settle(view: View, accept: jax.Array, answer: jax.Array | None = None) -> Proposal:
    """Accept the drawn token where told; what else is still noise is refilled with noise.

    Masked decoding refills with the mask (nothing changes), uniform diffusion with fresh tokens.
    """
    drawn = view.reading.sample
    rest = jnp.where(view.masked, view.noise, view.canvas)
    canvas = jnp.where(accept, drawn, rest)
    if answer is None:
        answer = jnp.where(accept, drawn, jnp.where(view.masked, view.reading.argmax, view.canvas))
    return Proposal(canvas, answer, view.n, jnp.arange(canvas.shape[0]))


def complete(sampler: Sampler | Part | Callable[..., Any], corruption: Corruption) -> Sampler:
    """Fill a sampler's defaults: the stop follows the corruption, the temperature the rule."""
    from mercury_jax.decode import stop as stops

    if callable(sampler) and not isinstance(sampler, Part | Sampler):
        sampler = Part(sampler, no_memory, {}, getattr(sampler, "__name__", "rule"))
    if isinstance(sampler, Part):
        sampler = Sampler(sampler)
    if not isinstance(sampler, Sampler):
        raise refuse("sampler", sampler, "a rule such as rules.threshold(0.9), or a Sampler")
    if sampler.verify is not None:
        raise refuse("sampler.verify", sampler.verify, "None: drafts are not checked by a causal pass yet")
    ending = sampler.stop or (stops.filled() if corruption.mask is not None else stops.steady())
    warmth = sampler.rule.temperature if sampler.temperature is None else sampler.temperature
    return sampler._replace(stop=ending, temperature=warmth, shape=tuple(sampler.shape))


def spread(tree: Any, rows: int) -> Any:
    """Every knob as an array [rows]: numbers are repeated, arrays must have one entry a row."""

    def widen(x: Any) -> jax.Array:
        x = jnp.asarray(x)
        if x.ndim and x.shape[0] != rows:
            raise refuse("knob", x.shape, f"a number, or an array whose first axis is the {rows} rows")
        return x if x.ndim else jnp.broadcast_to(x, (rows,))

    return jax.tree.map(widen, tree)
