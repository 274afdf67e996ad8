"""The environment in which the chat templates of checkpoints run: jinja2's immutable sandbox with limits.

A chat template is a program from the internet. jinja2's `ImmutableSandboxedEnvironment` keeps it away from Python's
internals and from changing its input, but limits neither time nor memory: `'a' * 10**10`, `{% set x = x ~ x %}` in a
loop, `x | center(10**9)` and `[x, x]` nested forty times all run until memory ends. Added here, in the same thread:

- Only the methods, filters and functions that chat templates use, and a size check before those whose result may be
  much larger than their arguments (`*`, `**`, `%`, replace, join, split, indent, round).
- A budget of steps, characters and seconds for each render. Every turn of a loop and every value that the template
  makes is charged. Values have a limited size and depth, so each single operation is short.
- Text that the template wrote is marked as such (`special_tokens.TracedText`).

A rewrite of the syntax tree inserts the charges, as filters. Each render has an environment of its own, which holds its
budget; the compiled template is shared. `chat_template.py` imports this module, and with it jinja2, when there is a
template to compile.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import wraps
from types import CodeType
from typing import Any

from jinja2 import filters as library, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

from mercury_jax.hub.special_tokens import joined, own

MAX_WEIGHT = 32_000_000  # characters and items in one value, as deep as it goes
MAX_ITEMS = 200_000  # items in one value, as deep as it goes
MAX_DEPTH = 64  # lists within lists; printing and comparing recurse in C
MAX_UNITS = 64_000_000  # characters, or bytes of a list, that one operation may make
MAX_BITS = 4096  # of an integer
POINTER, OBJECT = 8, 64  # bytes of a list's slot, and of a short text

STR_METHODS = """
    strip lstrip rstrip split rsplit splitlines partition rpartition replace join startswith endswith
    removeprefix removesuffix upper lower title capitalize swapcase casefold find rfind index rindex count
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
OWN, EACH, MADE, CONCAT = " own", " each", " made", " concat"  # filters of the rewritten tree


class LimitExceeded(Exception):
    """A render used up its budget, or made a value that is too large."""


class _Rewriter(NodeTransformer):
    """Marks the template's own texts, charges for loops and new values, and refuses what chat templates do not need."""

    REFUSED = (
        nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport, nodes.Block, nodes.EvalContextModifier,
        nodes.ScopedEvalContextModifier,
    )  # fmt: skip

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        if isinstance(node, self.REFUSED):
            what = type(node).__name__.lower()
            raise SecurityError(f"line {node.lineno}: {what} is not allowed in a chat template")
        return super().generic_visit(node, *args, **kwargs)

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        return _filtered(node, OWN) if isinstance(node.value, str) else node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return _filtered(node, OWN)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), CONCAT)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return _filtered(self.generic_visit(node), MADE)

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, MADE) if node.ctx == "load" else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, MADE) if isinstance(node.arg, nodes.Slice) else node

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.recursive:
            raise SecurityError(f"line {node.lineno}: a recursive loop is not allowed in a chat template")
        self.generic_visit(node)
        node.iter = _filtered(node.iter, EACH)
        return node


def _filtered(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks an assistant's text for training; here it is just its contents."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        inside = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(inside).set_lineno(line)


def compile_template(source: str) -> CodeType:
    """Compiles a template.

    Args:
        source: Its text.

    Returns:
        The compiled template, for `render_template`.

    Raises:
        Exception: Of jinja2 or of Python, for what is not a template of the allowed kind.
    """
    return _Sandbox().compile(source)


def render_template(
    code: CodeType, variables: Mapping[str, Any], *, steps: int, units: int, seconds: float
) -> Iterator[str]:
    """Renders a template within a budget.

    Args:
        code: From `compile_template`.
        variables: What the template may read.
        steps: Turns of loops and operations that it may take.
        units: Characters, and bytes of lists, that it may make.
        seconds: Time that it may take, from now on.

    Yields:
        Its text, piece by piece.

    Raises:
        LimitExceeded: The budget is used up, or a value is too large.
        Exception: Whatever the template causes.
    """
    sandbox = _Sandbox(steps, units, seconds)
    template = sandbox.template_class.from_code(sandbox, code, sandbox.globals)
    yield from template.root_render_func(template.new_context(dict(variables)))


class _Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one render; arguments as of `render_template`."""

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
            "join": self._join,
            "replace": self._replace,
            "round": _round,
            "safe": lambda value: value,  # nothing is escaped, so all is safe
            "sum": self._sum,
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
        """Takes one step and `units` from the budget; raises `LimitExceeded` where it is used up."""
        self.steps -= 1
        self.units -= units
        if self.steps < 0:
            raise LimitExceeded("takes too many steps: a loop that does not end?")
        if self.units < 0 or units > MAX_UNITS:
            raise LimitExceeded("writes too much text")
        if time.monotonic() > self.until:
            raise LimitExceeded("takes too long")

    def _weigh(self, *values: Any) -> int:
        """Counts characters and items of values, as deep as they go; raises `LimitExceeded` beyond the limits."""
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
        """Charges for a value that the template has made, and returns it."""
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
        """Yields the items, one step each."""
        for value in values:
            self._spend()
            yield value

    def concat(self, parts: Iterable[Any]) -> str:
        """Joins the texts of values: the operator `~`, and the output of macros and blocks."""
        texts = [self._text(None, part) for part in parts]
        self._spend(sum(map(len, texts)))
        return joined(texts)

    @pass_context  # so that jinja2 does not try to compute outputs while compiling
    def _text(self, context: Context | None, value: Any) -> str:
        return value if isinstance(value, str) else self._made(str(value))

    # --- operators, attributes and calls

    def call_binop(self, context: Context | None, operator: str, left: Any, right: Any) -> Any:
        """Applies an operator, after a check of its size where the result may be large."""
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
            # "%(name)s" may write the same value many times.
            self._spend(left.count("%") * self._weigh(right))
        return self._made(self.binop_table[operator](left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may read an attribute."""
        for kind, names in METHODS:
            if isinstance(obj, kind):
                return attr in names
        known = isinstance(obj, LoopContext | Namespace | Macro)
        return known and super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        """Refuses an attribute at once; jinja2 would wait until its value is used."""
        raise SecurityError(f"reaches for {attribute!r} of a {type(obj).__name__}")

    def wrap_str_format(self, value: Any) -> None:
        """`str.format` has no sandboxed form here: it is refused, because it can pad to any width."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Reads an attribute or an entry; names with an underscore only as entries of a dict."""
        if attribute.startswith("_") and not (isinstance(obj, dict) and attribute in obj):
            return self.unsafe_undefined(obj, attribute)
        return super().getattr(obj, attribute)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls a macro, a method or a function."""
        target = getattr(__obj, "__self__", None)
        if isinstance(__obj, Macro):  # which may put its arguments into a tuple, `varargs`
            __self._weigh(*args, *(v for k, v in kwargs.items() if k not in ("_loop_vars", "_block_vars")))
        elif isinstance(target, str) and __obj.__name__ in _METHOD_SIZES:
            args = tuple(list(__self._each(a)) if isinstance(a, Iterator) else a for a in args)
            named = {k: v for k, v in kwargs.items() if k not in ("_loop_vars", "_block_vars")}
            __self._spend(_METHOD_SIZES[__obj.__name__](target, *args, **named))
        return __self._made(super().call(__context, __obj, *args, **kwargs))

    # --- filters

    def _checked(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)  # keeps jinja2's mark of filters whose first argument is the context
        def run(*args: Any, **kwargs: Any) -> Any:
            for text in (a for a in args if isinstance(a, str)):
                self._spend(OBJECT * len(text) if function in (library.do_list, library.do_sort) else 0)
            return self._made(function(*args, **kwargs))

        return run

    def _join(self, value: Iterable[Any], d: Any = "", attribute: Any = None) -> str:
        pick = (lambda x: x) if attribute is None else library.make_attrgetter(self, attribute)
        parts, between = [self._text(None, pick(x)) for x in self._each(value)], self._text(None, d)
        self._spend(sum(map(len, parts)) + len(between) * len(parts))
        return joined(parts, between)

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


def _pieces_size(text: str, sep: str | None = None, maxsplit: int = -1) -> int:
    return len(text) + OBJECT * (text.count(sep) if sep else len(text) // 2)


def _joined_size(between: str, parts: Iterable[Any]) -> int:
    if isinstance(parts, str):
        return (OBJECT + len(between)) * len(parts)
    parts = list(parts)
    return sum(len(p) for p in parts if isinstance(p, str)) + (POINTER + len(between)) * len(parts)


_METHOD_SIZES: dict[str, Callable[..., int]] = {  # upper bounds of the bytes that a method of str makes
    "replace": lambda text, old, new, count=-1: len(text) + text.count(old) * len(new),
    "split": _pieces_size,
    "rsplit": _pieces_size,
    "splitlines": lambda text, keepends=False: _pieces_size(text),
    "join": _joined_size,
}


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:  # fmt: skip
    """JSON as transformers writes it, without jinja2's escapes for HTML."""
    if isinstance(indent, int) and not 0 <= indent <= 16:
        raise SecurityError("tojson takes an indent of 0..16")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _round(value: Any, precision: int = 0, method: Any = "common") -> Any:
    if not isinstance(value, int | float) or abs(precision) > 16:
        raise SecurityError("round takes a number and a precision of at most 16")
    return library.do_round(value, precision, method)


class _Namespace(Namespace):
    """jinja2's namespace without private names, printed without its contents: it may contain itself."""

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
