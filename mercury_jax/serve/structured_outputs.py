"""Constraints by the fields of vLLM and SGLang: what `guided_regex` and its like ask of an answer.

`output_spec` reads them from a request as a spec of `decode.grammar`. `chat_completions.spec_constraint` compiles it,
for chats and for plain text.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from mercury_jax.decode import grammar as grammars
from mercury_jax.serve.errors import invalid_request
from mercury_jax.serve.http import check_json, refuse_constant
from mercury_jax.serve.protocol import GUIDED_FIELDS, SampledRequest, StructuredOutputs

# What each field, or field of `structured_outputs`, asks for.
KINDS = {
    "guided_json": "json", "json": "json", "json_object": "json_object",
    "guided_regex": "regex", "regex": "regex",
    "guided_choice": "choice", "choice": "choice",
    "guided_grammar": "grammar", "grammar": "grammar", "ebnf": "grammar",
}  # fmt: skip
MAX_DEPTH = 64  # nesting limit of a schema that is sent as a text


class OutputSpec(NamedTuple):
    """What an answer obeys, and the field that says so."""

    spec: grammars.JSONSchema | grammars.JSONObject | grammars.Regex | grammars.Choice | grammars.Lark
    param: str


def output_spec(body: SampledRequest) -> OutputSpec | None:
    """Reads the constraint of a request; None if these fields are not used."""
    fields = {name: getattr(body, name) for name in GUIDED_FIELDS}
    inner = fields.pop("structured_outputs")
    if isinstance(inner, StructuredOutputs):
        names = inner.field_names().items()
        fields |= {f"structured_outputs.{name}": getattr(inner, field) for name, field in names}
    used = [name for name, value in fields.items() if value is not None and value is not False]
    if not used:
        if inner is not None:
            kinds = ", ".join(StructuredOutputs.field_names())
            raise invalid_request(
                "structured_outputs", f"structured_outputs is empty; allowed: one of {kinds}"
            )
        return None
    param = used[0]
    wanted = getattr(body, "response_format", None)
    others = {
        **dict.fromkeys(used[1:], True),
        "tools": getattr(body, "tools", None) and getattr(body, "tool_choice", None) != "none",
        "response_format": wanted is not None and wanted.type != "text",
        "bad_words": any(body.bad_words or ()),
        "suffix": getattr(body, "suffix", None),
    }
    for other, value in others.items():
        if value:
            raise invalid_request(param, f"{param} cannot be combined with {other}")
    return OutputSpec(_spec(KINDS[param.removeprefix("structured_outputs.")], fields[param], param), param)


def _spec(kind: str, value: Any, param: str) -> Any:
    """Makes the spec of a value."""
    match kind:
        case "json":
            return grammars.JSONSchema(_read_schema(value, param) if isinstance(value, str) else value, param)
        case "json_object":
            return grammars.JSONObject()
        case "regex":
            return grammars.Regex(_not_empty(value, param))
        case "choice":
            return grammars.Choice(_not_empty(value, param))
    return grammars.Lark(_not_empty(value, param))


def _not_empty(value: Any, param: str) -> Any:
    """Refuses an expression, a grammar or a list of choices without content."""
    if not value:
        raise invalid_request(param, f"{param} is empty; allowed: a constraint, or null for none")
    return value


def _read_schema(text: str, param: str) -> Any:
    """Reads a schema that is sent as a text."""
    try:
        schema = json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        raise invalid_request(param, f"{param} is no JSON; allowed: a JSON Schema, or its text") from None
    if isinstance(schema, dict):
        check_json(schema, param, MAX_DEPTH, param)
    return schema
