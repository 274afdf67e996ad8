"""Constraints on an answer: its JSON Schema, or the tools that it may or must call.

A constraint is a grammar, which the engine enforces while it samples, and a check of the finished answer by another
implementation of JSON Schema.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jsonschema.exceptions import SchemaError
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

from mercury_jax.decode import grammar as grammars
from mercury_jax.serve import errors
from mercury_jax.serve.chat.output_parser import ParsedMessage
from mercury_jax.serve.chat.tool_prompt import ToolFormat, tool_format
from mercury_jax.serve.errors import ApiError
from mercury_jax.serve.protocol import (
    AllowedTools,
    ChatCompletionsRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedTool,
)
from mercury_jax.types import LM

# What a schema may refer to outside of itself: nothing. jsonschema's default registry fetches over the network.
NO_REFERENCES: Registry[Any] = Registry()
Tools = Sequence[Mapping[str, Any]]


class OutputConstraint(NamedTuple):
    """What an answer must obey.

    Attributes:
        grammar: What the engine enforces; None for nothing.
        check: Whether a finished answer obeys it; None for no check.
        json: Whether the content is JSON as a whole, so that no stop sequence may cut it.
    """

    grammar: grammars.Grammar | None = None
    check: Callable[[ParsedMessage], bool] | None = None
    json: bool = False


class ToolPolicy(NamedTuple):
    """The tools that an answer may call, and how many calls there may be (`max_calls` None: no limit)."""

    tools: Tools = ()
    min_calls: int = 0
    max_calls: int | None = 0


def tool_policy(request: ChatCompletionsRequest, tools: Tools) -> ToolPolicy:
    """Applies `tool_choice` to the tools.

    Args:
        request: The request.
        tools: Its tools, as `chat.messages` returns them.

    Returns:
        The tools that may be called, and how often.

    Raises:
        ApiError: 400 where `tool_choice` names a tool that is not there, or needs tools and there are none.
    """
    choice, named = request.tool_choice or "auto", None
    if choice == "none":
        return ToolPolicy()
    if isinstance(choice, AllowedTools):
        named = {tool.function.name for tool in choice.allowed_tools.tools}
        mode = choice.allowed_tools.mode
    elif isinstance(choice, NamedTool):
        named, mode = {choice.function.name}, "required"
    else:
        mode = choice
    known = [tool["function"]["name"] for tool in tools]
    missing = next((name for name in sorted(named or ()) if name not in known), None)
    if missing is not None or (not tools and mode != "auto"):
        allowed = f"auto, none, or a call of these tools: {', '.join(known) or 'none: there are no tools'}"
        raise errors.invalid_value("tool_choice", missing or choice, allowed)
    chosen = [tool for tool in tools if named is None or tool["function"]["name"] in named]
    single = isinstance(choice, NamedTool) or not request.parallel_tool_calls
    return ToolPolicy(chosen, int(mode != "auto"), 1 if single else None)


def output_constraint(lm: LM, request: ChatCompletionsRequest, policy: ToolPolicy) -> OutputConstraint:
    """Compiles the grammar of a request. That may take seconds.

    With tools and a format, an answer that need not call may do either: agent frameworks send both in every turn.

    Args:
        lm: The model; its tokenizer has the tokens and the form of tool calls.
        request: The request.
        policy: What `tool_choice` leaves of the tools.

    Returns:
        The grammar and the check; empty where nothing is constrained.

    Raises:
        ApiError: 400, with the reason, for what cannot be guaranteed.
    """
    wanted = request.response_format
    if isinstance(wanted, JsonSchemaFormat) and wanted.json_schema.schema_ is not None:
        schema: Any = wanted.json_schema.schema_
        param, content = "response_format.json_schema.schema", grammars.JSONSchema(schema)
    elif isinstance(wanted, JsonSchemaFormat | JsonObjectFormat):
        schema, param, content = {"type": "object"}, "response_format", grammars.JSONObject()
    else:
        return _constraint_of_calls(lm, policy) if policy.tools else OutputConstraint()
    if policy.min_calls:
        return _constraint_of_calls(lm, policy)
    if not policy.tools:
        grammar, valid = compile_grammar(lm, content, param), _validator(schema)
        return OutputConstraint(grammar, lambda message: _is_valid(message.content, valid), json=True)
    form = tool_format(lm.tokenizer)
    if form.quote is not None:
        message = f"{lm.name} cannot combine a format with tools; allowed with tools: tool_choice none"
        raise errors.invalid_request("response_format", message)
    grammar = compile_grammar(lm, grammars.CallsOr(_call_grammar(form, policy), content), param)
    calls_are_valid, valid = _call_check(policy), _validator(schema)

    def check(message: ParsedMessage) -> bool:
        return calls_are_valid(message) if message.tool_calls else _is_valid(message.content, valid)

    return OutputConstraint(grammar, check, json=True)


def compile_grammar(lm: LM, spec: grammars.Spec, param: str) -> grammars.Grammar:
    """Compiles a grammar.

    Args:
        lm: The model, whose tokenizer has the tokens.
        spec: What the grammar describes.
        param: Field that an error names.

    Returns:
        The compiled grammar.

    Raises:
        ApiError: 400, with the part of the grammar that is not supported.
    """
    try:
        return grammars.compile(lm.tokenizer, spec)
    except grammars.GrammarError as error:
        raise ApiError(400, str(error)[:1000], param=param, code="invalid_json_schema") from None


def _constraint_of_calls(lm: LM, policy: ToolPolicy) -> OutputConstraint:
    form = tool_format(lm.tokenizer)
    if form.quote is not None:  # this model's tool calls are not JSON
        if policy.min_calls:
            message = f"{lm.name} cannot be required to call a tool; allowed: auto, none"
            raise errors.invalid_request("tool_choice", message)
        return OutputConstraint()
    calls = _call_grammar(form, policy)
    spec = calls if policy.min_calls else grammars.FreeOr(calls)
    return OutputConstraint(compile_grammar(lm, spec, "tools"), _call_check(policy))


def _call_grammar(form: ToolFormat, policy: ToolPolicy) -> grammars.ToolCalls:
    functions = [tool["function"] for tool in policy.tools]
    return grammars.ToolCalls(
        [{"name": f["name"], "parameters": f.get("parameters")} for f in functions],
        open=(form.open, form.lead),
        close=(form.lead, form.close),
        at_least=policy.min_calls or 1,
        at_most=policy.max_calls,
        separator=form.lead,
    )


def _call_check(policy: ToolPolicy) -> Callable[[ParsedMessage], bool]:
    """Returns the check that all calls of a message are allowed, valid, and neither too few nor too many."""
    functions = [tool["function"] for tool in policy.tools]
    valid = {f["name"]: _validator(f.get("parameters") or {"type": "object"}) for f in functions}

    def check(message: ParsedMessage) -> bool:
        count = len(message.tool_calls)
        obeyed = all(c.name in valid and _is_valid(c.arguments, valid[c.name]) for c in message.tool_calls)
        return obeyed and policy.min_calls <= count <= (policy.max_calls or count)

    return check


def _validator(schema: Any) -> Callable[[Any], bool]:
    """Returns a validator that fetches nothing. Only for schemas that were compiled, which bounds them."""
    kind = validator_for(schema)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        message = f"schema: {error.message[:500]}"
        raise ApiError(400, message, param="schema", code="invalid_json_schema") from None
    return kind(schema, registry=NO_REFERENCES).is_valid


def _is_valid(text: str, valid: Callable[[Any], bool]) -> bool:
    try:
        return valid(json.loads(text))
    except (ValueError, RecursionError, Unresolvable):
        return False
