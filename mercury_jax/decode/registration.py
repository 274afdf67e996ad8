"""Registration: the decorators that make rules, logits processors and stopping criteria of functions.

A part with `name=` is registered, which makes it known to `mj.rules` (`mj.processors`, `mj.stopping`), `mercury info`,
command line and the server. The annotation of a parameter may state its range (`ranges.py`), which is then enforced.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, overload, runtime_checkable

import jax

from mercury_jax.config import nearest, refuse
from mercury_jax.decode.ranges import Range, check_number, describe_params, ranges_of
from mercury_jax.decode.sampler import (
    NOISE,
    LogitsProcessor,
    Memory,
    Rule,
    Sampler,
    Static,
    StoppingCriterion,
    function_parameters,
    function_title,
    no_memory,
)
from mercury_jax.types import Key, Proposal, View

P = ParamSpec("P")
F_co = TypeVar("F_co", covariant=True)


@runtime_checkable
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


def _factory(
    function: Callable[..., Any],
    kind: str,
    make: Callable[[dict[str, Any], str], Any],
    registry: dict[str, Any],
    name: str | None,
    source: str,
) -> Any:
    """Makes a factory of a decorated function, and registers it where a name is given.

    Args:
        function: Takes the arguments of its kind, then parameters.
        kind: A key of `ARGUMENTS`.
        make: Makes the value from the checked parameters and the name.
        registry: Where to register.
        name: Under which it is registered; None: it is not.
        source: Paper or reference implementation.
    """
    parameters = function_parameters(function, kind)
    names, ranges = [p.name for p in parameters], ranges_of(function)
    title = name or function_title(function)

    @functools.wraps(function)
    def factory(*args: Any, **given: Any) -> Any:
        if len(args) > len(names):
            raise refuse(f"{title}() arguments", args, f"at most {len(names)}")
        given = dict(zip(names, args, strict=False)) | given
        for unknown in sorted(set(given) - set(names)):
            raise refuse(f"{title}() argument", unknown, nearest(unknown, names) or "none")
        values = {p.name: given.get(p.name, p.default) for p in parameters}
        for key, value in values.items():
            if not isinstance(value, Static):
                values[key] = check_number(f"{title}({key}=)", value, ranges.get(key))
        return make(values, title)

    factory.__name__ = title
    defaults = {p.name: p.default for p in parameters}
    return _register(factory, defaults, ranges, registry, name, source)


def _register(
    factory: Any,
    params: dict[str, Any],
    ranges: dict[str, Range],
    registry: dict[str, Any],
    name: str | None,
    source: str,
) -> Any:
    """Attaches parameters, ranges and source to a factory and its docstring, and registers it under its name."""
    factory.params, factory.ranges, factory.source = params, ranges, source
    lines = describe_params(factory.__name__, params, ranges)
    text = "\n\n".join(
        x for x in (inspect.cleandoc(factory.__doc__ or ""), source and f"Source: {source}.", lines) if x
    )
    factory.__doc__ = text
    if name is not None:
        old = registry.get(name)
        if old is not None and (old.__module__, old.__qualname__) != (
            factory.__module__,
            factory.__qualname__,
        ):
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
    leave_one_out: bool = False,
    variable_length: bool = False,
    needs_logits: bool = True,
) -> Callable[[Callable[Concatenate[Key, View, Any, P], tuple[Proposal, Any]]], Factory[P, Rule]]: ...
def rule(
    function: Callable[..., Any] | None = None,
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
        name: Registers the rule under this name. None: it is used as a value only.
        noise: "absorbing" or "uniform", the kind of noise that it is made for; None for both.
        source: Paper and equation, or reference implementation.
        fields: `init`, `temperature`, `stopping`, `leave_one_out`, `variable_length` and `needs_logits` of `Rule`.

    Returns:
        A factory: call it with parameters to get a `Rule`.

    Raises:
        ValueError: The name is taken by another rule, or `noise` is unknown.

    Example:
        >>> @mj.rule(name="leftmost", noise="absorbing", needs_logits=False)
        ... def leftmost(key, view, memory, count: Annotated[Param, AtLeast(1, integer=True)] = 1):
        ...     return mj.accept(view, view.masked & (jnp.cumsum(view.masked) <= count)), memory
    """
    if noise is not None and noise not in NOISE:
        raise refuse("noise of a rule", noise, ", ".join(NOISE) + ", or None for both")
    stopping = fields.get("stopping")
    if stopping is not None and (isinstance(stopping, StoppingCriterion) or not callable(stopping)):
        allowed = "what makes a stopping criterion, such as mj.stopping.never"
        raise refuse("stopping of a rule", stopping, allowed)
    fields["noise"] = NOISE if noise is None else (noise,)

    def decorate(function: Callable[..., Any]) -> Any:
        make = lambda params, title: Rule(function, params, title, **fields)
        return _factory(function, "rule", make, RULES, name, source)

    return decorate if function is None else decorate(function)


@overload
def logits_processor(
    function: Callable[Concatenate[Any, View, P], Any], /
) -> Factory[P, LogitsProcessor]: ...
@overload
def logits_processor(
    *, name: str | None = None, source: str = "", needs_logits: bool = True
) -> Callable[[Callable[Concatenate[Any, View, P], Any]], Factory[P, LogitsProcessor]]: ...
def logits_processor(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    source: str = "",
    needs_logits: bool = True,
) -> Any:
    """Makes a logits processor of `function(logits [L, V], view, <parameters>) -> logits`.

    Args:
        function: See `LogitsProcessorFunction`.
        name: Registers the processor under this name. None: it is used as a value only.
        source: Paper and equation, or reference implementation.
        needs_logits: False promises that each id's new logit depends on its own old one and the view alone.

    Returns:
        A factory: call it with parameters to get a `LogitsProcessor`.

    Raises:
        ValueError: The name is taken by another processor.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        make = lambda params, title: LogitsProcessor(function, params, title, needs_logits)
        return _factory(function, "logits processor", make, PROCESSORS, name, source)

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
) -> Callable[[Callable[Concatenate[View, Proposal, Any, P], Any]], Factory[P, StoppingCriterion]]: ...
def stopping_criterion(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    source: str = "",
    init: Callable[[jax.Array, int], Memory] = no_memory,
    needs_logits: bool = True,
) -> Any:
    """Makes a stopping criterion of `function(view, proposal, memory, <parameters>) -> (done, memory)`.

    Args:
        function: See `StoppingFunction`.
        name: Registers the criterion under this name. None: it is used as a value only.
        source: Paper and equation, or reference implementation.
        init: Makes the memory at the start of each block from the canvas [L] and the vocabulary size.
        needs_logits: False promises that it does not read `view.logits`.

    Returns:
        A factory: call it with parameters to get a `StoppingCriterion`.

    Raises:
        ValueError: The name is taken by another criterion.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        make = lambda params, title: StoppingCriterion(function, params, title, init, needs_logits)
        return _factory(function, "stopping criterion", make, STOPPING, name, source)

    return decorate if function is None else decorate(function)


def sampler_preset(*, name: str, source: str = "") -> Callable[[Callable[P, Sampler]], Factory[P, Sampler]]:
    """Registers a function that returns a whole `Sampler` beside the rules, under `mj.rules`.

    Args:
        name: Under which it is registered.
        source: Paper and equation, or reference implementation.

    Returns:
        A decorator. The parameters that state a range, or have a number as default, are its parameters.

    Raises:
        ValueError: The name is taken.
    """

    def decorate(function: Callable[P, Sampler]) -> Factory[P, Sampler]:
        ranges = ranges_of(function)
        params = {
            p.name: p.default for p in inspect.signature(function).parameters.values() if p.name in ranges
        }
        return cast(Any, _register(function, params, ranges, RULES, name, source))

    return decorate
