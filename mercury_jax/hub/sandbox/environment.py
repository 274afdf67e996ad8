"""jinja2's compiler and environment around what `functions.py` allows and `meter.py` counts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from mercury_jax.hub.sandbox.functions import COST, FILTERS, GLOBALS, METHODS, OPERATORS
from mercury_jax.hub.sandbox.meter import concat, each, held, light, metered, spend, text, weigh
from mercury_jax.hub.sandbox.traced import own


class _Writer(CodeGenerator):
    """jinja2's compiler, which calls back before what may be long, and marks the template's own texts."""

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return f"environment.own({''.join(map(str, group))!r})"

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> Any:
        if not isinstance(node, nodes.TemplateData):  # nothing is computed while compiling
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write("environment.text(")

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        if isinstance(node.value, str):
            self.write(f"environment.own({node.value!r})")
        else:
            super().visit_Const(node, frame)

    def visit_TemplateData(self, node: nodes.TemplateData, frame: Frame) -> None:
        self.write(f"environment.own({node.data!r})")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self._called("concat", frame, nodes.List(node.nodes))

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        self.write("(")
        self._called("light", frame, node.expr)
        for operand in node.ops:
            self.visit(operand, frame)
        self.write(")")

    def visit_Operand(self, node: nodes.Operand, frame: Frame) -> None:
        self.write(f" {_SPELLED[node.op]} ")
        self._called("light", frame, node.expr)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if isinstance(node.arg, nodes.Slice):
            self.write("environment.held(")
            super().visit_Getitem(node, frame)
            self.write(")")
        else:
            super().visit_Getitem(node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self.write("{")
        for pair in node.items:
            self._called("light", frame, pair.key)  # a key is hashed
            self.write(": ")
            self.visit(pair.value, frame)
            self.write(", ")
        self.write("}")

    def _called(self, name: str, frame: Frame, node: nodes.Node) -> None:
        self.write(f"environment.{name}(")
        self.visit(node, frame)
        self.write(")")


_SPELLED = {
    "eq": "==",
    "ne": "!=",
    "gt": ">",
    "gteq": ">=",
    "lt": "<",
    "lteq": "<=",
    "in": "in",
    "notin": "not in",
}


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}`: marks what a model says, for training; to us, its contents."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(
            line
        )


class _Narrow(NodeTransformer):
    """Refuses what a chat template has no use for, and counts the turns of loops."""

    REFUSED = (
        nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport, nodes.Block, nodes.EvalContextModifier,
        nodes.ScopedEvalContextModifier,
    )  # fmt: skip

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        if isinstance(node, self.REFUSED):
            raise SecurityError(
                f"line {node.lineno}: {type(node).__name__.lower()} has no place in a chat template"
            )
        return super().generic_visit(node, *args, **kwargs)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.recursive:
            raise SecurityError(f"line {node.lineno}: a recursive loop has no place in a chat template")
        node.iter = nodes.Filter(node.iter, _EACH, [], [], None, None, lineno=node.lineno)
        return self.generic_visit(node)


_EACH = " each"  # no template can spell it


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of all chat templates; `from_string` refuses with a `SecurityError`."""

    code_generator_class = _Writer
    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)
    concat = staticmethod(concat)
    own = staticmethod(own)
    text, held, light = staticmethod(text), staticmethod(held), staticmethod(light)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, cache_size=0,
            extensions=[_Generation, loopcontrols],
        )  # fmt: skip
        self.filters = {name: metered(f) for name, f in FILTERS.items()} | {_EACH: each}
        self.tests = {name: metered(f) for name, f in self.tests.items()}
        self.globals = dict(GLOBALS)
        self.binop_table.update(OPERATORS)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Narrow().visit(source), *args, **kwargs)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kind, names in METHODS:
            if isinstance(obj, kind):
                return attr in names
        return isinstance(obj, LoopContext | Namespace | Macro) and super().is_safe_attribute(
            obj, attr, value
        )

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        raise SecurityError(f"reaches for {attribute!r} of a {type(obj).__name__}")

    def wrap_str_format(self, value: Any) -> None:
        """Nothing is special about `str.format`: it is refused as any method that is not named above."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        if attribute.startswith("_") and not (isinstance(obj, dict) and attribute in obj):
            return self.unsafe_undefined(obj, attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        return super().getitem(obj, light(argument))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        spend()
        weigh(left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        spend()
        named = {k: v for k, v in kwargs.items() if k not in ("_loop_vars", "_block_vars")}  # jinja2's own
        weigh(*args, *named.values())
        target = getattr(__obj, "__self__", None)
        if isinstance(target, str) and __obj.__name__ in COST:
            args = tuple(list(each(a)) if isinstance(a, Iterator) else a for a in args)
            spend(COST[__obj.__name__](target, *args, **named))
        elif isinstance(target, list | tuple):
            weigh(target)
        return held(super().call(__context, __obj, *args, **kwargs))
