"""Registration: the decorators that make rules, logits processors and stopping criteria of functions.

Registration makes a part known by name to `mj.rules` (`mj.processors`, `mj.stopping`), `mercury info`, the command line
and the server. A parameter may state its range, once, in its annotation:

    def threshold(key, view, memory, p: Annotated[Param, Between(0, 1)] = 0.9): ...

The check of each value, a line of the docstring and the output of `mercury info` all come from there.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Concatenate, ParamSpec, Protocol, TypeAlias, TypeVar, overload

import jax
import numpy as np
from jax.core import Tracer

from mercury_jax.config import AtLeast, Between, Range, nearest, refuse
from mercury_jax.decode.sampler import (
    CAPABILITIES,
    KINDS,
    NOISE,
    HiddenHead,
    LeaveOneOutMasks,
    LogitsProcessor,
    Memory,
    Param,
    Rule,
    Sampler,
    Static,
    StoppingCriterion,
    function_parameters,
    function_title,
    no_memory,
)
from mercury_jax.types import Key, Proposal, View

# Parameters of the most frequent ranges.
Probability: TypeAlias = Annotated[Param, Between(0, 1)]
NonNegative: TypeAlias = Annotated[Param, AtLeast(0)]
Count: TypeAlias = Annotated[Param, AtLeast(1, integer=True)]
TokenId: TypeAlias = Annotated[Param, Range(-1, open_high=True, integer=True, token_id=True)]


def ranges_of(function: Callable[..., Any], names: Iterable[str]) -> dict[str, Range]:
    """Reads the ranges from a function's annotations.

    Args:
        function: Parameters annotated `Annotated[..., Range]`, or by an alias of that, state a range.
        names: Of the parameters to read.

    Returns:
        The range of each parameter that states one.

    Raises:
        ValueError: An annotation uses a name that the function's module does not define.
    """
    function = inspect.unwrap(function)  # a type checker may wrap it, with other globals
    annotations, found = getattr(function, "__annotations__", {}), {}
    for name in filter(annotations.__contains__, names):
        holder = types.SimpleNamespace(__annotations__={name: annotations[name]})
        space = getattr(function, "__globals__", {})
        try:
            hint = typing.get_type_hints(holder, globalns=space, include_extras=True)[name]
        except Exception as error:
            if "Annotated" not in str(annotations[name]):
                continue  # the name of a local scope, which states no range
            allowed = "names that its module defines"
            raise refuse(f"annotations of {function.__name__}", str(error), allowed) from None
        ranges = [item for item in getattr(hint, "__metadata__", ()) if isinstance(item, Range)]
        found |= {name: ranges[0]} if ranges else {}
    return found


def check_number(name: str, value: Any, allowed: Range | None) -> Any:
    """Checks a parameter and converts it to the type of its range.

    Args:
        name: What the error message calls it, such as "threshold(p=)".
        value: A number, or an array or list with one number per row. A value that is traced under `jit` passes
            unchecked.
        allowed: None for a parameter without a range: any number, infinity included.

    Returns:
        A float (an int where only whole numbers are allowed), or the array as it was.

    Raises:
        ValueError: Names the parameter, its value and its range.
    """
    description = str(allowed or Range())
    if value is inspect.Parameter.empty:
        raise refuse(name, None, f"{description}: it has no default")
    if isinstance(value, Tracer):
        return value
    if isinstance(value, list | tuple) and all(
        isinstance(v, int | float | np.integer | np.floating) and not isinstance(v, bool) for v in value
    ):
        value = np.asarray(value)
    # numpy, because jnp would turn a constant into a tracer inside of jit.
    kind = getattr(np.asarray(value), "dtype", np.dtype(object)).kind
    if kind not in "iuf" and str(getattr(value, "dtype", "")) != "bfloat16":
        raise refuse(name, value, f"{description}, or an array with one for each row")
    numbers = np.asarray(value, float)
    if numbers.ndim > 1 or not numbers.size:
        raise refuse(name, value, f"{description}, or an array with one for each row")
    wrong = np.isnan(numbers) if allowed is None else ~np.asarray(allowed.contains(numbers))
    if wrong.any():
        raise refuse(name, float(numbers[wrong].flat[0]) if numbers.ndim else value, description)
    if allowed is None or numbers.ndim:
        return value
    return int(numbers) if allowed.integer and np.isfinite(numbers) else float(numbers)


def check_token_ids(rule: Rule, vocab: int) -> None:
    """Checks the parameters of a rule that are ids: those of a registered rule, and a table called `ids`.

    Args:
        rule: With its parameters.
        vocab: Of the model.

    Raises:
        ValueError: An id is outside of the vocabulary.
    """
    ranges = RULES[rule.name].ranges if rule.name in RULES else {}
    for name, value in rule.params.items():
        is_id = ranges[name].token_id if name in ranges else name == "ids"
        value = value.value if isinstance(value, Static) else value
        if is_id and not isinstance(value, Tracer) and (most := int(np.max(value))) >= vocab:
            raise refuse(f"{rule.name}({name}=)", most, f"an id in 0..{vocab - 1}, or -1 for none")


def no_such_part(kind: str, name: str, names: Iterable[str]) -> AttributeError:
    """Makes the error of a module such as `mj.rules` for a name that it does not have.

    Args:
        kind: What the module has, such as "decoding rule".
        name: The name.
        names: The names that it has.

    Returns:
        The error, which suggests the nearest name.
    """
    return AttributeError(f"no {kind} is called {name!r}: {nearest(name, sorted(names))}")


P = ParamSpec("P")
F_co = TypeVar("F_co", covariant=True)


@typing.runtime_checkable
class Factory(Protocol[P, F_co]):
    """What the decorators return: call it with parameters to get a rule, processor or stopping criterion.

    Attributes:
        params: The default of each parameter.
        ranges: The allowed values of each parameter that states a range.
        source: The paper or reference implementation.
    """

    __name__: str
    params: dict[str, Any]
    ranges: dict[str, Range]
    source: str

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> F_co:
        """Checks the parameters and returns the value."""
        ...


# Everything registered by name. `mj.rules`, the command line, `mercury info` and the server read these.
RULES: dict[str, Factory[..., Any]] = {}
PROCESSORS: dict[str, Factory[..., LogitsProcessor]] = {}
STOPPING: dict[str, Factory[..., StoppingCriterion]] = {}


def part_decorator(
    part: type,
    registry: dict[str, Any],
    name: str | None,
    source: str,
    fields: dict[str, Any],
    kind: str = "",
) -> Callable[[Callable[..., Any]], Any]:
    """Makes the decorator of one kind of part: it turns a function into a factory of parts, and registers that.

    Args:
        part: `Rule`, `LogitsProcessor`, `StoppingCriterion` or `CachePolicy`.
        registry: Where to register.
        name: Under which it is registered; None: the function's, unless another function or an expression made it.
        source: Paper or reference implementation.
        fields: Of the part, beside its function, parameters and name.
        kind: A key of `sampler.ARGUMENTS`; "": that of the part.

    Returns:
        A decorator.

    Raises:
        ValueError: From the decorator, where the function has other arguments or its name is taken; from the factory,
            for wrong parameters.
    """

    kind = kind or KINDS[part]
    for label, value in (("name", name or ""), ("source", source)):
        if not isinstance(value, str):
            raise refuse(f"{label} of a {kind}", value, "a text")
    known = [f.name for f in dataclasses.fields(part) if f.name not in ("function", "params", "name")]
    for label, value in fields.items():
        default = part.__dataclass_fields__[label].default if label in known else None
        if label not in known:
            raise refuse(f"argument of a {kind}", label, nearest(label, ["name", "source", *known]))
        if (
            isinstance(default, bool)
            and label not in ("leave_one_out", "needs_hidden")
            and not isinstance(value, bool)
        ):
            raise refuse(f"{label} of a {kind}", value, "True or False")
        if label in ("init", "limit") and not callable(value):
            raise refuse(f"{label} of a {kind}", value, "a function")
        if label == "temperature":
            check_number(f"temperature of a {kind}", value, AtLeast(0))

    def decorate(function: Callable[..., Any]) -> Any:
        parameters = function_parameters(function, kind)
        names = [p.name for p in parameters]
        ranges, title = ranges_of(function, names), name or function_title(function)

        @functools.wraps(function)
        def factory(*args: Any, **values: Any) -> Any:
            if len(args) > len(names):
                raise refuse(f"{title}() arguments", args, f"at most {len(names)}")
            by_position = dict(zip(names, args, strict=False))
            for twice in sorted(set(by_position) & set(values)):
                raise refuse(f"{title}() argument {twice}", [by_position[twice], values[twice]], "one value")
            values = by_position | values
            for unknown in sorted(set(values) - set(names)):
                raise refuse(f"{title}() argument", unknown, nearest(unknown, names) or "none")
            checked = {p.name: values.get(p.name, p.default) for p in parameters}
            for key, value in checked.items():
                if not isinstance(value, Static):
                    checked[key] = check_number(f"{title}({key}=)", value, ranges.get(key))
            return part(function, checked, title, **fields)

        factory.__name__ = title
        # "<lambda>", or "outer.<locals>.inner": two of these may differ, and nobody can name them in a command.
        registered = name is not None or "<" not in getattr(function, "__qualname__", "<")
        defaults = {p.name: p.default for p in parameters}
        where = registry if registered else {}
        return _register(factory, defaults, ranges, source, where, per_row=kind != "cache policy")

    return decorate


def _register(
    factory: Any,
    params: dict[str, Any],
    ranges: dict[str, Range],
    source: str,
    registry: dict[str, Any],
    per_row: bool = True,
) -> Any:
    """Attaches parameters, ranges and source to a factory and its docstring, and registers it under its name.

    A function of the same name replaces that of the same module or file: a notebook's cell may run twice, and a module
    may be imported under two names.
    """
    name = factory.__name__
    factory.params, factory.ranges, factory.source = params, ranges, source
    values = "every parameter may be one number, or one per row" if per_row else "one number for all rows"
    lines = [f"Ranges of {name}; {values}:"] if params else []
    for key, value in params.items():
        default = "" if value is inspect.Parameter.empty else f"; default {value}"
        lines.append(f"    {key}: {ranges.get(key, Range())}{default}.")
    sections = (inspect.cleandoc(factory.__doc__ or ""), source and f"Source: {source}.", "\n".join(lines))
    factory.__doc__ = "\n\n".join(x for x in sections if x)
    old = registry.get(name, factory)
    file = lambda made: getattr(getattr(inspect.unwrap(made), "__code__", None), "co_filename", made)
    same_home = old.__module__ == factory.__module__ or file(old) == file(factory)
    if not same_home or old.__qualname__ != factory.__qualname__:
        raise refuse("name", name, f"a name that is not taken: {old.__module__} defines {name}")
    registry[name] = factory
    return factory


@overload
def rule(function: Callable[Concatenate[Key, View, Any, P], tuple[Proposal, Any]], /) -> Factory[P, Rule]: ...
@overload
def rule(
    *,
    name: str | None = None,
    noise: str | None = None,
    source: str = "",
    init: Callable[[jax.Array, int], Memory] = no_memory,
    temperature: float = 0.0,
    stopping: Callable[[], StoppingCriterion] | None = None,
    leave_one_out: LeaveOneOutMasks = False,
    needs_hidden: bool | HiddenHead = False,
    variable_length: bool = False,
    needs_logits: bool = True,
    needs: tuple[str, ...] = (),
) -> Callable[[Callable[Concatenate[Key, View, Any, P], tuple[Proposal, Any]]], Factory[P, Rule]]: ...
def rule(
    function: Any = None,
    /,
    *,
    name: str | None = None,
    noise: str | None = None,
    source: str = "",
    **fields: Any,
) -> Any:
    """Makes a decoding rule of `function(key, view, memory, <parameters>) -> (Proposal, memory)`.

    Args:
        function: See `RuleFunction`. Annotate parameters with a range to have them checked.
        name: Registers the rule under this name. None: under the function's own name; one that is defined inside
            another function is not registered.
        noise: "absorbing" or "uniform", the kind of noise that it is made for; None for both.
        source: Paper and equation, or reference implementation.
        fields: `init`, `temperature`, `stopping`, `leave_one_out`, `needs_hidden`, `variable_length`, `needs_logits`
            and `needs` of `Rule`.

    Returns:
        A factory: call it with parameters to get a `Rule`.

    Raises:
        ValueError: The name is taken by another rule, or `noise`, `leave_one_out` or a name in `needs` is
            unknown.

    Example:
        >>> @mj.rule(noise="absorbing", needs_logits=False)
        ... def leftmost(key, view, memory, count: Annotated[Param, AtLeast(1, integer=True)] = 1):
        ...     return mj.rules.accept(view, view.masked & (jnp.cumsum(view.masked) <= count)), memory
    """
    if noise is not None and noise not in NOISE:
        raise refuse("noise of a rule", noise, ", ".join(NOISE) + ", or None for both")
    stopping = fields.get("stopping")
    if stopping is not None and (isinstance(stopping, StoppingCriterion) or not callable(stopping)):
        allowed = "what makes a stopping criterion, such as mj.stopping.never"
        raise refuse("stopping of a rule", stopping, allowed)
    if fields.get("leave_one_out", False) not in (False, True, "joint"):
        raise refuse("leave_one_out of a rule", fields["leave_one_out"], "True, False or 'joint'")
    head = fields.get("needs_hidden", False)
    if not isinstance(head, bool) and not callable(head):
        raise refuse(
            "needs_hidden of a rule", head, "True, False or a function of (params, hidden [B, L, ...])"
        )
    for need in fields.get("needs", ()):
        if need not in CAPABILITIES:
            raise refuse("needs of a rule", need, ", ".join(CAPABILITIES))
    fields["noise"] = NOISE if noise is None else (noise,)

    decorate = part_decorator(Rule, RULES, name, source, fields)
    return decorate if function is None else decorate(function)


@overload
def logits_processor(
    function: Callable[Concatenate[Any, View, P], Any], /
) -> Factory[P, LogitsProcessor]: ...
@overload
def logits_processor(
    *, name: str | None = None, source: str = "", needs_logits: bool = True, draws_only: bool = False
) -> Callable[[Callable[Concatenate[Any, View, P], Any]], Factory[P, LogitsProcessor]]: ...
def logits_processor(
    function: Any = None, /, *, name: str | None = None, source: str = "", **fields: Any
) -> Any:
    """Makes a logits processor of `function(logits [L, V], view, <parameters>) -> logits`.

    Args:
        function: See `LogitsProcessorFunction`.
        name: Registers the processor under this name. None: under the function's own name; one that is defined inside
            another function is not registered.
        source: Paper and equation, or reference implementation.
        fields: `needs_logits=False` promises that each id's new logit depends on its own old one and the view alone.
            With `draws_only=True` the processor changes which tokens are drawn, but not the confidence of a rule.

    Returns:
        A factory: call it with parameters to get a `LogitsProcessor`.

    Raises:
        ValueError: The name is taken by another processor.
    """
    decorate = part_decorator(LogitsProcessor, PROCESSORS, name, source, fields)
    return decorate if function is None else decorate(function)


@overload
def stopping_criterion(
    function: Callable[Concatenate[View, Proposal, Any, P], Any], /
) -> Factory[P, StoppingCriterion]: ...
@overload
def stopping_criterion(
    *,
    name: str | None = None,
    source: str = "",
    init: Callable[[jax.Array, int], Memory] = no_memory,
    needs_logits: bool = True,
    keeps_decided: bool = False,
) -> Callable[[Callable[Concatenate[View, Proposal, Any, P], Any]], Factory[P, StoppingCriterion]]: ...
def stopping_criterion(
    function: Any = None, /, *, name: str | None = None, source: str = "", **fields: Any
) -> Any:
    """Makes a stopping criterion of `function(view, proposal, memory, <parameters>) -> (done, memory)`.

    Args:
        function: See `StoppingFunction`.
        name: Registers the criterion under this name. None: under the function's own name; one that is defined inside
            another function is not registered.
        source: Paper and equation, or reference implementation.
        fields: `init(canvas [L], vocab)` makes the memory at the start of each block; `needs_logits=False` promises
            that the function does not read `view.logits`; `keeps_decided=True` promises that no decided token changes.

    Returns:
        A factory: call it with parameters to get a `StoppingCriterion`.

    Raises:
        ValueError: The name is taken by another criterion.
    """
    decorate = part_decorator(StoppingCriterion, STOPPING, name, source, fields)
    return decorate if function is None else decorate(function)


Made = TypeVar("Made", Sampler, Rule)


def sampler_preset(source: str = "") -> Callable[[Callable[P, Made]], Factory[P, Made]]:
    """Registers a function that returns a whole `Sampler`, or a rule with a table, under its name beside the rules.

    Args:
        source: Paper and equation, or reference implementation.

    Returns:
        A decorator. The function's parameters that state a range are those of the factory.

    Raises:
        ValueError: The name is taken.
    """

    def decorate(function: Callable[P, Made]) -> Factory[P, Made]:
        parameters = inspect.signature(function).parameters
        ranges = ranges_of(function, parameters)
        params = {name: p.default for name, p in parameters.items() if name in ranges}
        return typing.cast(Any, _register(function, params, ranges, source, RULES))

    return decorate
