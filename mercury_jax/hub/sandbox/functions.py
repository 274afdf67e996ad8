"""The operators, methods, filters and functions that a template may use, each with what it costs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

from jinja2 import filters as library
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.sandbox import safe_range
from jinja2.utils import Namespace, pass_environment

from mercury_jax.hub.sandbox.meter import OBJECT, POINTER, Spent, each, held, spend, text, weigh
from mercury_jax.hub.sandbox.traced import joined

MOST_BITS = 4096  # of a whole number

# --- operators


def _whole(value: Any) -> bool:
    return isinstance(value, int)


def _times(a: Any, b: Any) -> Any:
    if _whole(a) and _whole(b):
        if a.bit_length() + b.bit_length() > MOST_BITS:
            raise Spent("computes with huge numbers")
    elif _whole(a) or _whole(b):
        count, what = (a, b) if _whole(a) else (b, a)
        if not isinstance(what, float):
            spend(POINTER * weigh(what) * max(count, 0))
    return a * b


def _power(a: Any, b: Any) -> Any:
    if _whole(a) and _whole(b) and a.bit_length() * abs(b) > MOST_BITS:
        raise Spent("computes with huge numbers")
    return a**b


def _plus(a: Any, b: Any) -> Any:
    return held(a + b)


def _percent(a: Any, b: Any) -> Any:
    if not isinstance(a, str):
        return a % b
    if re.search(r"%[^a-zA-Z%]*(\d{4}|\*)", a):
        raise SecurityError("a format of such a width is refused")
    weigh(b)
    return held(a % b)


OPERATORS: dict[str, Callable[[Any, Any], Any]] = {"*": _times, "**": _power, "+": _plus, "%": _percent}


# --- methods

TEXT = """
    strip lstrip rstrip split rsplit splitlines partition rpartition replace join startswith endswith
    removeprefix removesuffix upper lower title capitalize swapcase casefold find rfind index rindex count
    isdigit isalpha isalnum isspace isupper islower isnumeric isdecimal istitle
"""
METHODS: tuple[tuple[type, frozenset[str]], ...] = (
    (str, frozenset(TEXT.split())),
    (dict, frozenset({"get", "items", "keys", "values"})),
    (list, frozenset({"index", "count"})),
    (tuple, frozenset({"index", "count"})),
)


def _pieces(text: str, sep: str | None = None, maxsplit: int = -1) -> int:
    return len(text) + OBJECT * (text.count(sep) if sep else len(text) // 2)


def _joining(between: str, parts: Iterable[Any]) -> int:
    return weigh(list(parts)) + len(between) * len(list(parts))


# What a method may write, at most, from its arguments.
COST: dict[str, Callable[..., int]] = {
    "replace": lambda text, old, new, count=-1: len(text) + text.count(old) * len(new),
    "split": _pieces,
    "rsplit": _pieces,
    "splitlines": lambda text, keepends=False: _pieces(text),
    "join": _joining,
}


# --- filters and globals


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it: without jinja2's escapes for HTML."""
    if _whole(indent) and not 0 <= indent <= 16:
        raise SecurityError("tojson takes an indent of 0..16")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _replace(value: Any, old: Any, new: Any, count: int | None = None) -> str:
    value, old, new = text(value), text(old), text(new)
    spend(COST["replace"](value, old, new))
    return value.replace(old, new, -1 if count is None else count)


@pass_environment
def _join(environment: Any, value: Iterable[Any], d: Any = "", attribute: Any = None) -> str:
    pick = (lambda x: x) if attribute is None else library.make_attrgetter(environment, attribute)
    parts = [text(pick(x)) for x in each(value)]
    spend(sum(map(len, parts)) + len(text(d)) * len(parts))
    return joined(parts, text(d))


def _indent(value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    if (len(width) if isinstance(width, str) else width) > 64:
        raise SecurityError("indent takes a width of at most 64")
    spend(64 * text(value).count("\n"))
    return library.do_indent(text(value), width, first, blank)


def _int(value: Any, default: Any = 0, base: int = 10) -> Any:
    return default if isinstance(value, str) and len(value) > 1000 else library.do_int(value, default, base)


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    return _percent(text(value), kwargs or args)


def _sum(values: Iterable[Any], start: Any = 0) -> Any:
    for value in each(values):
        start = _plus(start, value)
    return start


def _round(value: Any, precision: int = 0, method: Any = "common") -> Any:
    if abs(precision) > 16:
        raise SecurityError("round takes a precision of at most 16")
    return library.do_round(value, precision, method)


PLAIN = """
    abs capitalize count d default dictsort e escape first float items last length list lower map max min
    reject rejectattr reverse select selectattr sort string title trim truncate unique upper
"""
FILTERS: dict[str, Callable[..., Any]] = {name: library.FILTERS[name] for name in PLAIN.split()} | {
    "format": _format,
    "indent": _indent,
    "int": _int,
    "join": _join,
    "replace": _replace,
    "round": _round,
    "safe": text,  # nothing is escaped, so all is safe
    "sum": _sum,
    "tojson": _tojson,
}


class Box(Namespace):
    """jinja2's namespace without private names."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        made = dict(*rest, **kwargs)
        for name in made:
            _public(name)
        Namespace.__init__(self, made)

    def __setitem__(self, name: str, value: Any) -> None:
        _public(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def _public(name: Any) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}")


def _raise(message: str = "") -> None:
    raise TemplateError(str(message))


def _now(format: str) -> str:
    if len(format) > 100 or re.search(r"%[^a-zA-Z%]*\d", format):
        raise SecurityError(f"strftime_now({format[:20]!r}) is refused")
    return datetime.now().strftime(str(format))


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


GLOBALS: dict[str, Any] = {
    "range": safe_range,
    "dict": _dict,
    "namespace": Box,
    "raise_exception": _raise,
    "strftime_now": _now,
}
