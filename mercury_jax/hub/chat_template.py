"""Chat templates of checkpoints: renders messages to text, and records which characters the template wrote.

`ChatTemplate` renders a jinja2 template like transformers' `apply_chat_template`
(https://huggingface.co/docs/transformers/chat_templating). Its result is a `TracedText`; `tokenizer.HFTokenizer`
encodes it. This module needs jinja2, so the tokenizer imports it only when it renders for the first time.

A chat template is a program from an untrusted source. jinja2's `ImmutableSandboxedEnvironment` prevents access to
Python's internals and changes to the input, but limits neither time nor memory: `'a' * 10**10`, `{% set x = x ~ x %}`
in a loop, and `[x, x]` nested forty times all run until memory is exhausted. `Sandbox` adds, in the same thread:

- A budget of units for each render, and a deadline. Every iteration of a loop and every value that the template makes
  is charged: a unit for each character, and `ITEM` for each value, at all depths. A single operation on values within
  the budget is not interrupted; it may pass the deadline, by seconds.
- An allowlist of the filters and text methods that chat templates use. Those that can make much more than they are
  given, or that take longer than in proportion to it, are charged before they run.

The charges are filters, which `_Rewriter` inserts into the syntax tree. Each render has its own `Sandbox`; the
compiled template is shared. Any failure of a template becomes a ValueError with an explanation.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, wraps
from types import CodeType
from typing import Any, NoReturn, TypeVar

from jinja2 import filters as library, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter, safe_range
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

from mercury_jax.chat import check_message
from mercury_jax.config import refuse
from mercury_jax.tokenizer import Messages, valid

T = TypeVar("T")

ITEM = 64  # units of a value, of an item of a list and of an iteration: about its bytes
MAX_BITS = 4096  # bits of an integer
MAX_DEPTH = 48  # nesting depth of the data that a template receives
# Keys under which a message may have its thinking.
THINKING_KEYS = ("reasoning_content", "thinking", "reasoning")

METHODS = """
    strip lstrip rstrip split rsplit splitlines partition rpartition replace join startswith endswith
    removeprefix removesuffix upper lower title capitalize swapcase casefold find rfind index rindex count format
    isdigit isalpha isalnum isspace isupper islower isnumeric isdecimal istitle
"""  # of texts; those of lists and mappings are limited by jinja2
FILTERS = """
    abs capitalize count d default dictsort e escape first float indent int items last length list lower map max min
    reject rejectattr replace reverse select selectattr sort string title trim truncate unique upper
"""
CUTS = ("split", "rsplit", "splitlines", "list", "sort")  # methods and filters that make many parts of a text
# Those whose result, or time, can be as large as the product of their arguments.
MULTIPLY = ("replace", "indent", "rfind", "rindex", "rpartition", "strip", "lstrip", "rstrip", "trim")
CONTAINERS = list | tuple | dict | type({}.keys()) | type({}.values()) | type({}.items())
# Filters that `_Rewriter` inserts. A template cannot name them: its filters have no leading space.
OWN, EACH, MADE, CONCAT = " own", " each", " made", " concat"


# --- text with a mask of who wrote it


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
        text = super().__mod__(values)
        arguments = values if isinstance(values, tuple) else (values,)
        known = not re.search(r"%(?!-?\d*s)", self.replace("%%", ""))
        return _filled(self, text, lambda masks, _: str.__mod__(self, masks), arguments) if known else text

    def strip(self, chars: str | None = None) -> Any:
        """As in `str`; keeps the mask."""
        return self.lstrip(chars).rstrip(chars)

    def replace(self, old: str, new: str, count: int = -1, /) -> Any:
        """As in `str`."""
        return joined(self.split(old, count), new) if old else super().replace(old, new, count)

    def join(self, parts: Iterable[str], /) -> Any:
        """As in `str`; keeps the masks of all parts and of the separator."""
        return joined(parts, self)


def _traced(name: str) -> Callable[..., Any]:
    """Makes a method of `TracedText`: that of `str` with this name, whose result keeps the mask."""
    plain = getattr(str, name)

    @wraps(plain)
    def method(self: TracedText, *args: Any, **named: Any) -> Any:
        found = plain(self, *args, **named)
        if name in ("lstrip", "removeprefix"):
            return self[len(self) - len(found) :]
        if name in ("rstrip", "removesuffix"):
            return self[: len(found)]
        if isinstance(found, str):  # in another case; untraced if there are more characters (ß becomes SS)
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
_ENDS = ("lstrip", "rstrip", "removeprefix", "removesuffix")
for _name in (*_CASES, *_PARTS, *_ENDS):
    setattr(TracedText, _name, _traced(_name))


def _filled(
    form: str, text: str, fill: Callable[..., str], values: Sequence[Any], named: Mapping[str, Any] = {}
) -> str:
    """Traces a format of the template, by filling in the masks of the values, which have the values' lengths."""
    if 0 in mask_of(form):
        return text
    mask: Callable[[Any], str] = lambda value: mask_of(str(value)).decode("latin-1")
    marks = fill(tuple(map(mask, values)), {name: mask(value) for name, value in named.items()})
    return TracedText(text, bytes(mark != "\0" for mark in marks))


def own(text: str) -> TracedText:
    """Marks all characters of a text as written by the template."""
    return TracedText(text, b"\1" * len(text))


def mask_of(text: str) -> bytes:
    """Returns, for each character of a `str`, 1 if the template wrote it and 0 otherwise."""
    return text.mask if isinstance(text, TracedText) else bytes(len(text))


def joined(parts: Iterable[str], between: str = "") -> str:
    """Joins texts and their masks."""
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
        super().generic_visit(node, *args, **kwargs)
        through: Callable[[Any, str], nodes.Filter] = lambda value, name: nodes.Filter(
            value, name, [], [], None, None, lineno=node.lineno
        )
        made = (nodes.List, nodes.Dict, nodes.Compare)
        if isinstance(node, nodes.For):
            node.iter = through(node.iter, EACH)
        elif isinstance(node, nodes.TemplateData) or (
            isinstance(node, nodes.Const) and isinstance(node.value, str)
        ):
            return through(node, OWN)
        elif isinstance(node, nodes.Concat):
            return through(nodes.List(node.nodes, lineno=node.lineno), CONCAT)
        elif (
            isinstance(node, made)
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
        units: Remaining units; see the top of this module.
        until: Deadline, in seconds of `time.monotonic`.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})  # the other operators cannot make large values

    def __init__(self, units: int = 0, seconds: float = 0.0) -> None:
        self.units, self.until = units, time.monotonic() + seconds
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, cache_size=0, finalize=self._text,
            extensions=[_Generation, loopcontrols],
        )  # fmt: skip
        remainder = lambda value, by: self.call_binop(None, "%", value, by)
        allowed: dict[str, Callable[..., Any]] = {name: library.FILTERS[name] for name in FILTERS.split()} | {
            "format": lambda text, *args, **kwargs: remainder(self._text(None, text), kwargs or args),
            "round": _round,
            "safe": lambda value: value,  # there is no HTML escaping to switch off
            "sum": self._sum,
            "tojson": _tojson,
        }
        self.filters = {name: self._charged(name, function) for name, function in allowed.items()}
        self.filters |= {
            OWN: own,
            EACH: self._each,
            MADE: self._made,
            CONCAT: self.concat,
            "join": self.concat,
        }
        self.tests = self.tests | {"divisibleby": lambda value, num: remainder(value, num) == 0}
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

    def _spend(self, units: int) -> None:
        """Takes units from the budget; raises `LimitExceeded` if it is used up, or the time is."""
        self.units -= max(units, 0)
        if self.units < 0:
            raise LimitExceeded("makes too much text, or takes too many steps: a loop that does not end?")
        if time.monotonic() > self.until:
            raise LimitExceeded("takes too long")

    def _weigh(self, *values: Any) -> int:
        """Units of values, at all depths; raises `LimitExceeded` as soon as they are more than the budget has."""
        total, stack = 0, list(values)
        while stack:
            value = stack.pop()
            total += ITEM + (len(value) if isinstance(value, str) else 0)
            if isinstance(value, dict):
                stack += [*value.keys(), *value.values()]
            elif isinstance(value, CONTAINERS):
                stack += value
            if total > self.units:
                raise LimitExceeded("makes too much text, or lists too large or too deep")
        return total

    def _made(self, value: Any) -> Any:
        """Charges for a new value, and returns it. A lazy iterator is charged for each item instead."""
        if isinstance(value, Iterator):
            return self._each(value)
        if isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise LimitExceeded("computes with huge numbers")
        self._spend(self._weigh(value))
        return value

    def _each(self, values: Iterable[Any]) -> Iterator[Any]:
        """Yields the items, and charges for each iteration."""
        for value in values:
            self._spend(ITEM)
            yield value

    def _foresee(self, name: str, text: Any, *args: Any) -> None:
        """Charges a method of a text, or a filter, before it runs; see `CUTS` and `MULTIPLY`."""
        if name in CUTS and isinstance(text, str):
            sep = next((x for x in args if isinstance(x, str)), "") if "split" in name else ""
            self._spend(ITEM * (text.count(sep) if sep else len(text) // 2) + len(text) * len(sep))
        elif name in MULTIPLY:
            sizes = (abs(x) if isinstance(x, int) else len(str(x)) for x in (text, *args))
            self._spend(math.prod(1 + size for size in sizes))

    def concat(self, value: Iterable[Any], d: Any = "", attribute: str | int | None = None) -> str:
        """Joins values as text, for the operator `~`, the filter `join`, and the output of macros and blocks.

        Args:
            d: The separator; `d` is the name of this argument in jinja2.
        """
        pick = (lambda x: x) if attribute is None else library.make_attrgetter(self, attribute)
        parts, between = [self._text(None, pick(x)) for x in self._each(value)], self._text(None, d)
        self._spend(sum(map(len, parts)) + len(between) * len(parts))
        return joined(parts, between)

    @pass_context  # jinja2 does not evaluate such a function while compiling
    def _text(self, context: Context | None, value: Any) -> str:
        """The text of a value, which is charged: also one that is only written again takes memory in the output."""
        return self._made(value if isinstance(value, str) else str(value))

    # --- operators, attributes and calls

    def call_binop(self, context: Context | None, operator: str, left: Any, right: Any) -> Any:
        """Applies +, *, ** or %, after charging for a result that may be much larger than the operands."""
        numbers = isinstance(left, int) + isinstance(right, int)
        if operator == "**" and numbers == 2 and left.bit_length() * abs(right) > MAX_BITS:
            raise LimitExceeded("computes with huge numbers")
        if operator == "*" and numbers == 1:
            count, what = (left, right) if isinstance(left, int) else (right, left)
            self._spend(count * (len(what) if isinstance(what, str) else self._weigh(what)))
        if operator == "%" and isinstance(left, str):
            if re.search(r"%[^a-zA-Z%]*(\d{4}|\*)", left):
                raise SecurityError("a format of such a width is not allowed")
            # "%(name)s" can insert the same value many times, so charge all of `right` for each conversion.
            self._spend(left.count("%") * self._weigh(right))
        return self._made(self.binop_table[operator](left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Says whether a template may read an attribute."""
        if isinstance(obj, str):
            return attr in METHODS.split()
        known = isinstance(obj, list | tuple | dict | LoopContext | Namespace | Macro)
        return known and super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: object, attribute: str) -> NoReturn:
        """Refuses an unsafe attribute immediately; jinja2 would raise only when its value is used."""
        kind = "text" if isinstance(obj, str) else type(obj).__name__
        raise SecurityError(f"reaches for {attribute!r} of a {kind}, which is not supported")

    def wrap_str_format(self, value: Any) -> None:
        """Returns None, so that `call` sees `str.format`: jinja2's own form of it could pad to any width."""

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls a macro, a method or a function, after charging for what it costs."""
        target, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        args = tuple(list(__self._each(a)) if isinstance(a, Iterator) else a for a in args)
        named = {k: v for k, v in kwargs.items() if k not in ("_loop_vars", "_block_vars")}
        weight = __self._weigh(*args, *named.values())  # a macro may collect its arguments in `varargs`
        if isinstance(target, str) and name == "format":
            bare = target.replace("{{", "").replace("}}", "")
            if re.search(r"\{[^}]*(\{|\d{4})", bare):
                raise SecurityError("a format of such a width is not allowed")
            __self._spend(len(target) + bare.count("{") * weight)
            fill = lambda values, names: SandboxedFormatter(__self).vformat(
                str.__str__(target), values, names
            )
            text, known = fill(args, named), not re.search(r"\{\w*[^}\w]", bare)
            return __self._made(_filled(target, text, fill, args, named) if known else text)
        if isinstance(target, str):
            __self._foresee(name, target, *args, *named.values())
        return __self._made(super().call(__context, __obj, *args, **kwargs))

    # --- filters

    def _charged(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The filter, whose costs and result are charged."""
        passed = int(hasattr(function, "jinja_pass_arg"))  # whether jinja2 puts an argument of its own first

        @wraps(function)  # keeps the attribute
        def run(*args: Any, **kwargs: Any) -> Any:
            self._foresee(name, *args[passed:], *kwargs.values())
            return self._made(function(*args, **kwargs))

        return run

    def _sum(self, values: Iterable[Any], start: Any = 0) -> Any:
        for value in self._each(values):
            start = self.call_binop(None, "+", start, value)
        return start


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:  # fmt: skip
    """Writes JSON like the `tojson` of transformers, without jinja2's HTML escapes."""
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
    """jinja2's namespace. Printing omits its contents: it may hold others many times, and no budget sees them."""

    def __repr__(self) -> str:
        return "<Namespace>"


def _raise_exception(message: str = "") -> None:
    raise TemplateError(str(message))


def _strftime_now(format: str) -> str:
    if len(format) > 100 or re.search(r"%[^a-zA-Z%]*\d", format):
        raise SecurityError(f"strftime_now({format[:20]!r}) is not allowed")
    return datetime.now().strftime(str(format))


# --- the template


@dataclass(frozen=True, kw_only=True)
class RenderLimits:
    """Limits of the size of a template, and of the resources of one rendering.

    Attributes:
        source: Characters of the template; the longest known templates have 20,000.
        data: Characters and items of the messages.
        output: Characters of the rendered text.
        units: Characters of all values that the template makes, and 64 for each value and iteration of a loop.
        seconds: Wall-clock time.
    """

    source: int = 100_000
    data: int = 8_000_000
    output: int = 16_000_000
    units: int = 128_000_000
    seconds: float = 5.0


@dataclass(frozen=True)
class ChatTemplate:
    """A compiled chat template.

    Attributes:
        source: The jinja2 template.
        limits: Limits of a rendering.
    """

    source: str
    limits: RenderLimits = RenderLimits()

    def __post_init__(self) -> None:
        if not isinstance(self.source, str):
            raise refuse("chat_template", type(self.source).__name__, "a text")
        if len(self.source) > self.limits.source:
            allowed = f"at most {self.limits.source} characters"
            raise refuse("chat_template", f"{len(self.source)} characters", allowed)
        _ = self._code

    @cached_property
    def _code(self) -> CodeType:
        return _explained(lambda: Sandbox().compile(self.source))

    def render(
        self, messages: Messages, names: Mapping[str, str] | None = None, **variables: Any
    ) -> TracedText:
        """Renders a conversation.

        Args:
            names: Texts of special tokens by name (`bos_token`), as variables of the template. They are marked as the
                template's text.
            **variables: Other variables of the template, JSON-like data (`tools`, `add_generation_prompt`).
        """
        if isinstance(messages, str | Mapping) or not messages:
            raise ValueError(f"messages: {messages!r}; must be a list of at least one message")
        for i, message in enumerate(messages):
            check_message(message, f"messages[{i}]", parts=True)
        copied: dict[str, Any] = _plain({"messages": list(messages), **variables}, self.limits.data)
        for message in copied["messages"]:
            message["role"] = own(message["role"])
            thinking = next((message[k] for k in THINKING_KEYS if message.get(k) is not None), None)
            if thinking is not None:  # as in transformers: templates differ in the key they read
                message |= {"thinking": thinking} | message | {"reasoning_content": thinking}
        copied |= {name: own(value) for name, value in (names or {}).items()}

        def run() -> TracedText:
            sandbox = Sandbox(self.limits.units, self.limits.seconds)
            template = sandbox.template_class.from_code(sandbox, self._code, sandbox.globals)
            text = joined(template.root_render_func(template.new_context(copied)))
            if len(text) > self.limits.output:
                raise ValueError(f"writes more than {self.limits.output} characters")
            valid(text, "its text")
            return text if isinstance(text, TracedText) else TracedText(text, bytes(len(text)))

        return _explained(run)


_EXPLANATIONS = {
    "SecurityError": "reaches beyond its sandbox: ",
    "TemplateSyntaxError": "is not a jinja2 template: ",
    "TemplateAssertionError": "is not a jinja2 template of the allowed kind: ",
    "UndefinedError": "needs what it was not given: ",
    "RecursionError": "calls itself too deeply: ",
    "OverflowError": "computes with huge numbers: ",
    "MemoryError": "needs too much memory: ",
}


def _explained(run: Callable[[], T]) -> T:
    """Returns `run()`; converts any exception, which a template can cause, to a ValueError with an explanation."""
    try:
        return run()
    except Exception as error:
        kind = type(error).__name__
        words = " ".join(str(error).split())[:300] or kind
        if kind == "TemplateError":  # the template's own `raise_exception`
            raise ValueError(f"messages: the chat template refuses them: {words}") from error
        raise ValueError(f"chat_template: {_EXPLANATIONS.get(kind, '')}{words}") from error


def _plain(data: Mapping[str, Any], limit: int) -> dict[str, Any]:
    """Copies JSON-like data, so that a template receives no other object."""
    total = 0

    def copy(value: Any, name: str, depth: int) -> Any:
        nonlocal total
        total += 1 + (len(value) if isinstance(value, str) else 0)
        if total > limit:
            raise refuse("messages", f"more than {limit} characters", "fewer, for a chat template")
        if depth > MAX_DEPTH:
            raise refuse(name, "lists within lists", f"at most {MAX_DEPTH} levels")
        if value is None or type(value) in (bool, int, float):
            return value
        if isinstance(value, str):
            return str.__str__(valid(value, name))
        if isinstance(value, Mapping):
            return {copy(k, name, depth + 1): copy(v, f"{name}.{k}", depth + 1) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [copy(v, f"{name}[{i}]", depth + 1) for i, v in enumerate(value)]
        raise refuse(name, type(value).__name__, "plain data, as in JSON")

    return {name: copy(value, name, 0) for name, value in data.items()}
