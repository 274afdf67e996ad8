"""The environment in which chat templates of checkpoints run: jinja2's immutable sandbox with resource limits.

A chat template is a program from an untrusted source. jinja2's `ImmutableSandboxedEnvironment` prevents access to
Python's internals and changes to the input, but limits neither time nor memory: `'a' * 10**10`, `{% set x = x ~ x %}`
in a loop, `x | center(10**9)` and `[x, x]` nested forty times all run until memory is exhausted. This module adds, in
the same thread:

- An allowlist of methods, filters and functions (those that chat templates use), with a size check before operations
  whose result may be much larger than their arguments (`*`, `**`, `%`, replace, join, split, indent, round).
- A budget of steps, characters and seconds for each render. Every iteration of a loop and every value that the template
  makes is charged to it. The size and depth of values are limited, so that every single operation is short.
- A mask of the characters that the template wrote (`TracedText`).

The charges are filters, which `_Rewriter` inserts into the syntax tree. Each render has its own `Sandbox` with its own
budget; the compiled template is shared. `chat_template.py` is the only user of this module.
"""

from __future__ import annotations

import json
import re
import string
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

from jinja2 import filters as library, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

MAX_WEIGHT = 32_000_000  # characters and items in one value, at all depths
MAX_ITEMS = 200_000  # items in one value, at all depths
MAX_DEPTH = 64  # nesting depth: printing and comparing nested lists recurse in C
MAX_UNITS = 64_000_000  # characters, or bytes of a list, that one operation may make
MAX_BITS = 4096  # bits of an integer
POINTER, OBJECT = 8, 64  # bytes of one slot of a list, and of a short string

STR_METHODS = """
    strip lstrip rstrip split rsplit splitlines partition rpartition replace join startswith endswith
    removeprefix removesuffix upper lower title capitalize swapcase casefold find rfind index rindex count format
    isdigit isalpha isalnum isspace isupper islower isnumeric isdecimal istitle
"""
METHODS: tuple[tuple[type, frozenset[str]], ...] = (
    (str, frozenset(STR_METHODS.split())),
    (dict, frozenset({"get", "items", "keys", "values"})),
    (list, frozenset({"index", "count"})),
    (tuple, frozenset({"index", "count"})),
)
FILTERS = """
    abs capitalize count d default dictsort e escape first float int items last length list lower map max min
    reject rejectattr reverse select selectattr sort string title trim truncate unique upper
"""
CONTAINERS = list | tuple | dict | type({}.keys()) | type({}.values()) | type({}.items())
# Filters that `_Rewriter` inserts. A template cannot name them: its filters have no leading space.
OWN, EACH, MADE, CONCAT = " own", " each", " made", " concat"


# --- text with a mask of who wrote it

# A conversion such as %s or %5d, or an escaped percent sign.
_PERCENT = re.compile(r"%(?:%|[-+ #0]*\d*(?:\.\d+)?[a-zA-Z])")


class TracedText(str):
    """A `str` with a mask of the characters that the template wrote.

    The string operations that templates use propagate the mask. All others return a plain `str`, whose characters
    count as user text. An untraced operation can therefore lose a special token, but never forge one.

    Attributes:
        mask: Bytes of the same length, 1 where the template wrote the character.
    """

    mask: bytes

    def __new__(cls, text: str, mask: bytes) -> TracedText:
        traced = super().__new__(cls, text)
        traced.mask = mask
        return traced

    def __str__(self) -> TracedText:  # so that `str(x)` keeps the mask
        return self

    def __add__(self, other: str) -> Any:
        return joined((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> Any:
        return joined((other, self)) if isinstance(other, str) else NotImplemented

    def __getitem__(self, key: Any) -> TracedText:
        mask = self.mask[key]
        return TracedText(super().__getitem__(key), mask if isinstance(mask, bytes) else bytes([mask]))

    def __mod__(self, values: Any) -> Any:
        """Formats with %. The text around the conversions, and strings inserted by a plain %s, keep their masks."""
        queue = list(values) if isinstance(values, tuple) else [values]
        parts: list[str] = []
        at = 0
        for found in _PERCENT.finditer(self):
            parts.append(self[at : found.start()])
            at = found.end()
            if found.group() == "%%":
                parts.append(own("%"))
                continue
            if not queue:
                raise TypeError("not enough arguments for format string")
            value = queue.pop(0)
            whole = found.group() == "%s" and isinstance(value, str)
            parts.append(value if whole else str(found.group()) % (value,))
        if queue:
            raise TypeError("not all arguments converted during string formatting")
        return joined([*parts, self[at:]])

    def strip(self, chars: str | None = None) -> TracedText:
        """As in `str`; keeps the mask."""
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None) -> TracedText:
        """As in `str`; keeps the mask."""
        return self[len(self) - len(super().lstrip(chars)) :]

    def rstrip(self, chars: str | None = None) -> TracedText:
        """As in `str`; keeps the mask."""
        return self[: len(super().rstrip(chars))]

    def replace(self, old: str, new: str, count: int = -1, /) -> Any:
        """As in `str`.

        Args:
            old: Text to replace; if it is empty, the result is untraced.
            new: Its replacement.
            count: Largest number of replacements. Default: all.

        Returns:
            The text.
        """
        return joined(self.split(old, count), new) if old else super().replace(old, new, count)

    def join(self, parts: Iterable[str], /) -> Any:
        """As in `str`; keeps the masks of all parts and of the separator."""
        return joined(parts, self)

    def removeprefix(self, prefix: str, /) -> TracedText:
        """As in `str`; keeps the mask."""
        return self[len(self) - len(super().removeprefix(prefix)) :]

    def removesuffix(self, suffix: str, /) -> TracedText:
        """As in `str`; keeps the mask."""
        return self[: len(super().removesuffix(suffix))]


def _traced(name: str) -> Callable[..., Any]:
    """Makes a method of `TracedText`: that of `str` with this name, whose result keeps the mask."""
    plain = getattr(str, name)

    @wraps(plain)
    def method(self: TracedText, *args: Any, **named: Any) -> Any:
        found = plain(self, *args, **named)
        if isinstance(
            found, str
        ):  # the same characters in another case; untraced if there are more (ß becomes SS)
            return TracedText(found, self.mask) if len(found) == len(self) else found
        sep = named.get("sep", args[0] if args and "split" in name else None)
        lines = [len(line) for line in str.splitlines(self, True)] if name == "splitlines" else []
        parts, at = [], 0
        for part in found:
            if "split" in name and sep is None:  # only whitespace stands before the part
                at = self.find(part, at)
            parts.append(self[at : at + len(part)])
            at += lines[len(parts) - 1] if lines else len(part) + (len(sep) if isinstance(sep, str) else 0)
        return type(found)(parts)

    return method


_CASES = ("lower", "upper", "title", "capitalize", "swapcase", "casefold")
_PARTS = ("split", "rsplit", "splitlines", "partition", "rpartition")
for _name in (*_CASES, *_PARTS):
    setattr(TracedText, _name, _traced(_name))


def formatted(text: str, args: Sequence[Any], named: Mapping[str, Any]) -> str:
    """Formats as `str.format`, and keeps the masks of the text and of strings that plain fields insert.

    Args:
        text: The format. Its fields have a number, a name, or neither.
        args: Values of the numbered fields.
        named: Values of the named fields.

    Returns:
        The text.

    Raises:
        SecurityError: A field reads an attribute or an item, or has a width above 999.
    """
    mark, parts, count = (str if 0 in mask_of(text) else own), list[str](), 0
    for before, field, spec, conversion in string.Formatter().parse(str.__str__(text)):
        parts.append(mark(before))
        if field is None:
            continue
        if not re.fullmatch(r"\w*", field) or "{" in (spec or "") or re.search(r"\d{4}", spec or ""):
            raise SecurityError(f"the field {field!r} of a format with {spec!r} is not allowed")
        value = named[field] if field in named else args[int(field or count)]
        count += not field
        plain = isinstance(value, str) and not spec and conversion in (None, "s")
        convert = {"s": str, "r": repr, "a": ascii}.get(conversion or "", lambda x: x)
        parts.append(value if plain else format(convert(value), spec or ""))
    return joined(parts)


def own(text: str) -> TracedText:
    """Marks all characters of a text as written by the template."""
    return TracedText(text, b"\1" * len(text))


def mask_of(text: str) -> bytes:
    """Returns, for each character of a `str`, 1 if the template wrote it and 0 otherwise."""
    return text.mask if isinstance(text, TracedText) else bytes(len(text))


def joined(parts: Iterable[str], between: str = "") -> str:
    """Joins texts and their masks.

    Args:
        parts: The texts.
        between: The separator.

    Returns:
        `between.join(parts)`; a `TracedText` if a part or `between` is one.
    """
    parts = list(parts)
    text = str.join(between, parts)
    if not any(isinstance(part, TracedText) for part in (*parts, between)):
        return text
    return TracedText(text, mask_of(between).join(map(mask_of, parts)))


# --- the sandbox


class LimitExceeded(Exception):
    """A render exceeded its budget, or made a value that is too large."""


class _Rewriter(NodeTransformer):
    """Inserts filters that mark the template's texts and charge loops and new values; refuses unneeded statements."""

    REFUSED = (
        nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport, nodes.Block, nodes.EvalContextModifier,
        nodes.ScopedEvalContextModifier,
    )  # fmt: skip

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        if isinstance(node, self.REFUSED):
            what = type(node).__name__.lower()
            raise SecurityError(f"line {node.lineno}: {what} is not allowed in a chat template")
        if isinstance(node, nodes.For) and node.recursive:
            raise SecurityError(f"line {node.lineno}: a recursive loop is not allowed in a chat template")
        super().generic_visit(node, *args, **kwargs)
        through: Callable[[Any, str], nodes.Filter] = lambda value, name: nodes.Filter(
            value, name, [], [], None, None, lineno=node.lineno
        )
        if isinstance(node, nodes.For):
            node.iter = through(node.iter, EACH)
        elif isinstance(node, nodes.TemplateData) or (
            isinstance(node, nodes.Const) and isinstance(node.value, str)
        ):
            return through(node, OWN)
        elif isinstance(node, nodes.Concat):
            return through(nodes.List(node.nodes, lineno=node.lineno), CONCAT)
        elif (
            isinstance(node, nodes.List | nodes.Dict)
            or (isinstance(node, nodes.Tuple) and node.ctx == "load")
            or (isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice))
        ):
            return through(node, MADE)
        return node


class _Generation(Extension):
    """Replaces `{% generation %}...{% endgeneration %}`, which marks text to train on, by its contents."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        inside = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(inside).set_lineno(line)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one render, with its budget. Compiling a template uses no budget.

    A failing template raises `LimitExceeded`, or an exception of jinja2 or Python.

    Attributes:
        steps: Remaining iterations of loops plus operations.
        units: Remaining characters, and bytes of lists, that may be made.
        until: Deadline, in seconds of `time.monotonic`.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})  # the other operators cannot make large values

    def __init__(self, steps: int = 0, units: int = 0, seconds: float = 0.0) -> None:
        self.steps, self.units, self.until = steps, units, time.monotonic() + seconds
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, cache_size=0, finalize=self._text,
            extensions=[_Generation, loopcontrols],
        )  # fmt: skip
        checked: dict[str, Callable[..., Any]] = {name: library.FILTERS[name] for name in FILTERS.split()} | {
            "format": lambda text, *args, **kwargs: self.call_binop(
                None, "%", self._text(None, text), kwargs or args
            ),
            "indent": self._indent,
            "join": self.concat,
            "replace": self._replace,
            "round": _round,
            "safe": lambda value: value,  # there is no HTML escaping to switch off
            "sum": self._sum,
            "title": _title,
            "tojson": _tojson,
        }
        self.filters = {name: self._checked(f) for name, f in checked.items()}
        self.tests = self.tests | {
            "divisibleby": lambda value, num: self.call_binop(None, "%", value, num) == 0
        }
        self.filters |= {OWN: own, EACH: self._each, MADE: self._made, CONCAT: self.concat}
        self.globals = {
            "range": safe_range,
            "dict": lambda *args, **kwargs: dict(*args, **kwargs),
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Rewriter().visit(source), *args, **kwargs)

    # --- the budget

    def _spend(self, units: int = 0) -> None:
        """Takes one step and `units` from the budget; raises `LimitExceeded` if it is used up."""
        self.steps -= 1
        self.units -= units
        if self.steps < 0:
            raise LimitExceeded("takes too many steps: a loop that does not end?")
        if self.units < 0 or units > MAX_UNITS:
            raise LimitExceeded("writes too much text")
        if time.monotonic() > self.until:
            raise LimitExceeded("takes too long")

    def _weigh(self, *values: Any) -> int:
        """Counts characters and items of nested values; raises `LimitExceeded` beyond the limits."""
        total, items = 0, len(values)
        stack = [(value, 0) for value in values]
        while stack:
            value, depth = stack.pop()
            total += 1 + (len(value) if isinstance(value, str) else 0)
            if isinstance(value, CONTAINERS):
                items += len(value)
                if items <= MAX_ITEMS:
                    inside = [*value.keys(), *value.values()] if isinstance(value, dict) else value
                    stack.extend((v, depth + 1) for v in inside)
            if items > MAX_ITEMS or total > MAX_WEIGHT or depth > MAX_DEPTH:
                raise LimitExceeded("makes lists too large or too deep")
        return total

    def _made(self, value: Any) -> Any:
        """Charges for a new value, and returns it. A lazy iterator is charged for each item instead."""
        if isinstance(value, Iterator):
            return self._each(value)
        if isinstance(value, str):
            self._spend(len(value))
        elif isinstance(value, CONTAINERS):
            self._weigh(value)
            self._spend(POINTER * len(value))
        elif isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise LimitExceeded("computes with huge numbers")
        else:
            self._spend()
        return value

    def _each(self, values: Iterable[Any]) -> Iterator[Any]:
        """Yields the items, and charges one step for each."""
        for value in values:
            self._spend()
            yield value

    def concat(self, value: Iterable[Any], d: Any = "", attribute: str | int | None = None) -> str:
        """Joins values as text, for the operator `~`, the filter `join`, and the output of macros and blocks.

        Args:
            value: The values.
            d: The separator; `d` is the name of this argument in jinja2.
            attribute: Join this attribute of each value. Default: the value itself.

        Returns:
            The text.
        """
        pick = (lambda x: x) if attribute is None else library.make_attrgetter(self, attribute)
        parts, between = [self._text(None, pick(x)) for x in self._each(value)], self._text(None, d)
        self._spend(sum(map(len, parts)) + len(between) * len(parts))
        return joined(parts, between)

    @pass_context  # jinja2 does not evaluate such a function while compiling
    def _text(self, context: Context | None, value: Any) -> str:
        return value if isinstance(value, str) else self._made(str(value))

    # --- operators, attributes and calls

    def call_binop(self, context: Context | None, operator: str, left: Any, right: Any) -> Any:
        """Applies a binary operator, after checking the size of its result.

        Args:
            context: Unused.
            operator: The operator, "+", "*", "**" or "%".
            left: First operand.
            right: Second operand.

        Returns:
            The result.

        Raises:
            LimitExceeded: The result would be too large.
            SecurityError: A format would pad to a large width.
        """
        numbers = isinstance(left, int) + isinstance(right, int)
        if operator == "*" and numbers == 2 and left.bit_length() + right.bit_length() > MAX_BITS:
            raise LimitExceeded("computes with huge numbers")
        if operator == "**" and numbers == 2 and left.bit_length() * abs(right) > MAX_BITS:
            raise LimitExceeded("computes with huge numbers")
        if operator == "*" and numbers == 1:
            count, what = (left, right) if isinstance(left, int) else (right, left)
            self._spend(0 if isinstance(what, float) else POINTER * self._weigh(what) * max(count, 0))
        if operator == "%" and isinstance(left, str):
            if re.search(r"%[^a-zA-Z%]*(\d{4}|\*)", left):
                raise SecurityError("a format of such a width is not allowed")
            # "%(name)s" can insert the same value many times, so charge all of `right` for each conversion.
            self._spend(left.count("%") * self._weigh(right))
        return self._made(self.binop_table[operator](left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Says whether a template may read an attribute.

        Args:
            obj: The object.
            attr: Name of the attribute.
            value: Value of the attribute.

        Returns:
            True for the methods in `METHODS`, and for attributes of loops, macros and namespaces that jinja2 allows.
        """
        for kind, names in METHODS:
            if isinstance(obj, kind):
                return attr in names
        known = isinstance(obj, LoopContext | Namespace | Macro)
        return known and super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: object, attribute: str) -> NoReturn:
        """Refuses an unsafe attribute immediately; jinja2 would raise only when its value is used.

        Args:
            obj: The object.
            attribute: Name of the attribute.

        Raises:
            SecurityError: Always.
        """
        kinds = {str: "text", dict: "mapping", list: "list", tuple: "list"}
        kind = next((words for kind, words in kinds.items() if isinstance(obj, kind)), type(obj).__name__)
        raise SecurityError(f"reaches for {attribute!r} of a {kind}, which is not supported")

    def wrap_str_format(self, value: Any) -> None:
        """Returns None, so that jinja2 offers no sandboxed `str.format`, which could pad to any width."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Reads an attribute, or an entry of a dict. Names with a leading underscore are allowed for entries only.

        Args:
            obj: The object.
            attribute: The name.

        Returns:
            The value, or jinja2's undefined value.
        """
        if attribute.startswith("_") and not (isinstance(obj, dict) and attribute in obj):
            return self.unsafe_undefined(obj, attribute)
        return super().getattr(obj, attribute)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls a macro, a method or a function, after checking the size of its result.

        Args:
            __context: The variables of the template.
            __obj: The callable.
            *args: Its arguments.
            **kwargs: Its keyword arguments.

        Returns:
            The result, which is charged to the budget.
        """
        target, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(target, str) and name == "format":
            named = {k: v for k, v in kwargs.items() if k not in ("_loop_vars", "_block_vars")}
            __self._spend(len(target) + target.count("{") * __self._weigh(*args, *named.values()))
            return __self._made(formatted(target, args, named))
        if isinstance(__obj, Macro):  # a macro may collect its arguments in `varargs`
            __self._weigh(*args, *(v for k, v in kwargs.items() if k not in ("_loop_vars", "_block_vars")))
        elif isinstance(target, str) and name in _METHOD_SIZES:
            args = tuple(list(__self._each(a)) if isinstance(a, Iterator) else a for a in args)
            named = {k: v for k, v in kwargs.items() if k not in ("_loop_vars", "_block_vars")}
            __self._spend(_METHOD_SIZES[name](target, *args, **named))
        return __self._made(super().call(__context, __obj, *args, **kwargs))

    # --- filters

    def _checked(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)  # keeps the attribute by which jinja2 passes the context to some filters
        def run(*args: Any, **kwargs: Any) -> Any:
            for text in (a for a in args if isinstance(a, str)):
                self._spend(OBJECT * len(text) if function in (library.do_list, library.do_sort) else 0)
            return self._made(function(*args, **kwargs))

        return run

    def _replace(self, value: Any, old: Any, new: Any, count: int | None = None) -> str:
        value, old, new = (self._text(None, x) for x in (value, old, new))
        self._spend(_METHOD_SIZES["replace"](value, old, new))
        return value.replace(old, new, -1 if count is None else count)

    def _indent(self, value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        if (len(width) if isinstance(width, str) else width) > 64:
            raise SecurityError("indent takes a width of at most 64")
        text = self._text(None, value)
        self._spend(64 * text.count("\n"))
        return library.do_indent(text, width, first, blank)

    def _sum(self, values: Iterable[Any], start: Any = 0) -> Any:
        for value in self._each(values):
            start = self.call_binop(None, "+", start, value)
        return start


def _joined_size(between: str, parts: Iterable[Any]) -> int:
    if isinstance(parts, str):
        return (OBJECT + len(between)) * len(parts)
    parts = list(parts)
    return sum(len(p) for p in parts if isinstance(p, str)) + (POINTER + len(between)) * len(parts)


_METHOD_SIZES: dict[str, Callable[..., int]] = {  # upper bounds of the bytes that a method returns
    "replace": lambda text, old, new, count=-1: len(text) + text.count(old) * len(new),
    "split": lambda text, sep=None, maxsplit=-1: (
        len(text) + OBJECT * (text.count(sep) if sep else len(text) // 2)
    ),
    "rsplit": lambda text, sep=None, maxsplit=-1: (
        len(text) + OBJECT * (text.count(sep) if sep else len(text) // 2)
    ),
    "splitlines": lambda text, keepends=False: len(text) + OBJECT * (len(text) // 2),
    "join": _joined_size,
}


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:  # fmt: skip
    """Writes JSON like the `tojson` of transformers, without jinja2's HTML escapes."""
    if isinstance(indent, int) and not 0 <= indent <= 16:
        raise SecurityError("tojson takes an indent of 0..16")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _title(value: Any) -> str:
    """As in jinja2, where the letter after an apostrophe stays small; keeps the mask."""
    text = library.do_title(value)
    return TracedText(text, value.mask) if isinstance(value, TracedText) and len(text) == len(value) else text


def _round(value: Any, precision: int = 0, method: Any = "common") -> Any:
    if not isinstance(value, int | float) or abs(precision) > 16:
        raise SecurityError("round takes a number and a precision of at most 16")
    return library.do_round(value, precision, method)


class _Namespace(Namespace):
    """jinja2's namespace, without private names. Printing omits its contents, because it may contain itself."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        Namespace.__init__(self)
        for name, value in dict(*rest, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if not isinstance(name, str) or name.startswith("_"):
            raise SecurityError(f"a namespace cannot hold {name!r}")
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def _raise_exception(message: str = "") -> None:
    raise TemplateError(str(message))


def _strftime_now(format: str) -> str:
    if len(format) > 100 or re.search(r"%[^a-zA-Z%]*\d", format):
        raise SecurityError(f"strftime_now({format[:20]!r}) is not allowed")
    return datetime.now().strftime(str(format))
