"""What an answer is held to: a schema, or the tools that it may or must call; and the check that it was."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jsonschema.exceptions import SchemaError
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

from mercury_jax.decode import grammar as grammars
from mercury_jax.serve.api import errors
from mercury_jax.serve.api.errors import ApiError
from mercury_jax.serve.chat.output_parser import ParsedMessage
from mercury_jax.serve.chat.tool_prompt import ToolFormat, tool_format
from mercury_jax.types import LM

# What a schema may refer to beside itself: nothing. jsonschema's own registry asks the network for what it lacks.
NOTHING: Registry[Any] = Registry()
Tools = Sequence[Mapping[str, Any]]
Valid = Callable[[Any], bool]


class Constraint(NamedTuple):
    """grammar: what the engine enforces (None: nothing). check: whether an answer obeys it. json: its content is
    JSON as a whole, so that no stop text may cut it."""

    grammar: Any = None
    check: Callable[[ParsedMessage], bool] | None = None
    json: bool = False


class Calls(NamedTuple):
    """The tools that an answer may call: at least so many calls of them, and at most (None: any number)."""

    tools: Tools
    least: int
    most: int | None


def calls(ask: Mapping[str, Any], tools: Tools) -> Calls:
    """What `tool_choice` makes of the tools. ApiError where it asks for one that is not there."""
    choice, named = ask["tool_choice"] or "auto", None
    if choice == "none":
        return Calls((), 0, 0)
    if isinstance(choice, dict) and choice["type"] == "allowed_tools":
        named = {t["function"]["name"] for t in choice["allowed_tools"]["tools"]}
        choice = choice["allowed_tools"]["mode"]
    elif isinstance(choice, dict):
        named = {choice["function"]["name"]}
    have = [t["function"]["name"] for t in tools]
    missing = next((name for name in sorted(named or ()) if name not in have), None)
    if missing is not None or (not tools and choice != "auto"):
        there = ", ".join(have) or "none: there are no tools"
        raise errors.refused(
            "tool_choice", missing or choice, f"auto, none, or a call of these tools: {there}"
        )
    chosen = [t for t in tools if named is None or t["function"]["name"] in named]
    most = 1 if isinstance(choice, dict) or not ask["parallel_tool_calls"] else None
    return Calls(chosen, int(choice != "auto"), most)


def constraint(lm: LM, ask: Mapping[str, Any], offered: Calls) -> Constraint:
    """The grammar of a request, compiled.

    With tools and a format, an answer that need not call may do either: agent frameworks send both in every turn.

    Args:
        lm: Whose tokenizer and form of calls count.
        ask: The request, read by its table.
        offered: What `tool_choice` leaves of the tools.

    Raises:
        ApiError: 400, with the reason, for what cannot be guaranteed.
    """
    wanted: Mapping[str, Any] = ask["response_format"] or {"type": "text"}
    formatted = wanted["type"] != "text"
    if offered.tools and (not formatted or offered.least):
        return _of_calls(lm, offered)
    if not formatted:
        return Constraint()
    schema = wanted["json_schema"]["schema"] if wanted["type"] == "json_schema" else None
    where = "response_format" if schema is None else "response_format.json_schema.schema"
    answer = grammars.JSONObject() if schema is None else grammars.JSONSchema(schema)
    if not offered.tools:
        made, valid = compiled(lm, answer, where), _validator(schema)
        return Constraint(made, lambda message: _obeys(message.content, valid), json=True)
    form = tool_format(lm.tokenizer)
    if form.quote is not None:
        told = (
            f"{lm.name} cannot be held to a format and to calls at once; allowed with tools: tool_choice none"
        )
        raise errors.invalid("response_format", told)
    made = compiled(lm, grammars.CallsOr(_spec(form, offered), answer), where)
    called, valid = _called(offered), _validator(schema)
    check = lambda message: called(message) if message.tool_calls else _obeys(message.content, valid)
    return Constraint(made, check, json=True)


def _of_calls(lm: LM, offered: Calls) -> Constraint:
    form = tool_format(lm.tokenizer)
    if form.quote is not None:  # its calls are no JSON
        if offered.least:
            raise errors.invalid("tool_choice", f"{lm.name} cannot be held to calls; allowed: auto, none")
        return Constraint()
    spec = _spec(form, offered)
    return Constraint(
        compiled(lm, spec if offered.least else grammars.FreeOr(spec), "tools"), _called(offered)
    )


def _called(offered: Calls) -> Callable[[ParsedMessage], bool]:
    """Whether the calls of a message are those that were offered, and as many as may be."""
    valid = {
        t["function"]["name"]: _validator(t["function"].get("parameters") or None) for t in offered.tools
    }

    def check(message: ParsedMessage) -> bool:
        obeyed = all(c.name in valid and _obeys(c.arguments, valid[c.name]) for c in message.tool_calls)
        return obeyed and offered.least <= len(message.tool_calls) <= (
            offered.most or len(message.tool_calls)
        )

    return check


def _spec(form: ToolFormat, offered: Calls) -> grammars.ToolCalls:
    functions = [t["function"] for t in offered.tools]
    return grammars.ToolCalls(
        [{"name": f["name"], "parameters": f.get("parameters")} for f in functions],
        open=(form.open, form.lead),
        close=(form.lead, form.close),
        at_least=offered.least or 1,
        at_most=offered.most,
        separator=form.lead,
    )


def compiled(lm: LM, spec: Any, param: str) -> Any:
    """The grammar, or ApiError 400 saying what of it is not offered."""
    try:
        return grammars.compile(lm.tokenizer, spec)
    except grammars.GrammarError as error:
        raise ApiError(400, str(error)[:1000], param=param, code="invalid_json_schema") from None


def _validator(schema: Any) -> Valid:
    """Whether a value is valid, by another implementation than the one that made it; nothing is ever fetched.

    None: any object. Only for schemas that were compiled, which bounds them.
    """
    schema = {"type": "object"} if schema is None else schema
    kind = validator_for(schema)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise ApiError(
            400, f"schema: {error.message[:500]}", param="schema", code="invalid_json_schema"
        ) from None
    return kind(schema, registry=NOTHING).is_valid


def _obeys(text: str, valid: Valid) -> bool:
    try:
        return valid(json.loads(text))
    except (ValueError, RecursionError, Unresolvable):
        return False
