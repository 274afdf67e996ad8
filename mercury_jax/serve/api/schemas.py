"""JSON Schemas of the answers, as the vendor's document names them and `wire` writes them."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

TEXT: Json = {"type": "string"}
COUNT: Json = {"type": "integer", "minimum": 0}
FINISH: Json = {"enum": ["stop", "length", "tool_calls", None]}


def record(required: Json, optional: Json | None = None) -> Json:
    """An object with exactly these properties."""
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        "additionalProperties": False,
    }


def ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def many(items: Json) -> Json:
    return {"type": "array", "items": items}


def maybe(schema: Json) -> Json:
    return {"anyOf": [schema, {"type": "null"}]}


def _whole(kind: str, choice: Json) -> Json:
    head = {"id": TEXT, "object": {"const": kind}, "created": COUNT, "model": TEXT}
    beside = {"warning": TEXT, "reasoning_summary": ref("ReasoningSummary")}
    return record({**head, "choices": many(choice), "usage": ref("Usage")}, beside)


def _chunk(kind: str, choice: Json) -> Json:
    head = {"id": TEXT, "object": {"const": kind}, "created": COUNT, "model": TEXT}
    progress = record({"diffusion_progress": {"type": "number", "minimum": 0, "maximum": 1}})
    beside = {"warning": TEXT, "reasoning_summary": ref("ReasoningSummary"), "diffusion_meta": progress}
    return record({**head, "choices": many(choice)}, {**beside, "usage": ref("Usage")})


def _message(calls: bool) -> Json:
    own = {"tool_calls": many(ref("ToolCall"))} if calls else {}
    return record({"role": {"const": "assistant"}, "content": maybe(TEXT)}, own)


def _delta(calls: bool) -> Json:
    own = {"tool_calls": many(ref("ToolCallDelta"))} if calls else {}
    return record({}, {"role": {"const": "assistant"}, "content": TEXT, **own})


def _choice(body: Json, logprobs: Json | None = None) -> Json:
    more = {"logprobs": logprobs} if logprobs else {}
    return record({"index": COUNT, "finish_reason": FINISH, **body}, more)


TOKEN: Json = {"token": TEXT, "logprob": {"type": "number"}, "bytes": many(COUNT)}
CHAT_NATS = record({"content": many(record({**TOKEN, "top_logprobs": many(record(TOKEN))}))})
TEXT_NATS = record(
    {
        "tokens": many(TEXT),
        "token_logprobs": many({"type": "number"}),
        "top_logprobs": many({"type": "object", "additionalProperties": {"type": "number"}}),
        "text_offset": many(COUNT),
    }
)
FUNCTION = record({"name": TEXT, "arguments": TEXT})

ANSWERS: Json = {
    "ChatCompletion": _whole("chat.completion", _choice({"message": _message(True)}, CHAT_NATS)),
    "ChatCompletionChunk": _chunk("chat.completion.chunk", _choice({"delta": _delta(True)}, CHAT_NATS)),
    "TextCompletion": _whole("text_completion", _choice({"text": TEXT}, TEXT_NATS)),
    "TextChunk": _chunk("text_completion", _choice({"text": TEXT}, TEXT_NATS)),
    "EditCompletion": _whole("edit.completion", _choice({"message": _message(False)})),
    "EditChunk": _chunk("edit.completion.chunk", _choice({"delta": _delta(False)})),
    "ToolCall": record({"index": COUNT, "id": TEXT, "type": {"const": "function"}, "function": FUNCTION}),
    "ToolCallDelta": record(
        {"index": COUNT, "function": record({"arguments": TEXT}, {"name": TEXT})},
        {"id": TEXT, "type": {"const": "function"}},
    ),
    "ReasoningSummary": record(
        {"content": maybe(TEXT), "status": {"enum": ["complete", "unavailable", "skipped"]}}
    ),
    "Usage": record(
        {
            "prompt_tokens": COUNT,
            "completion_tokens": COUNT,
            "total_tokens": COUNT,
            "reasoning_tokens": COUNT,
            "cached_input_tokens": COUNT,
            "prompt_tokens_details": record({"cached_tokens": COUNT}),
            "completion_tokens_details": record({"reasoning_tokens": COUNT}),
        }
    ),
    "ModelList": record({"object": {"const": "list"}, "data": many(ref("Model"))}),
    "Model": record(
        {
            "id": TEXT,
            "object": {"const": "model"},
            "owned_by": TEXT,
            "name": TEXT,
            "created": COUNT,
            "description": TEXT,
            "input_modalities": many(TEXT),
            "output_modalities": many(TEXT),
            "context_length": COUNT,
            "max_output_length": COUNT,
            "pricing": record(
                dict.fromkeys(("prompt", "completion", "input_cache_reads", "input_cache_writes"), TEXT)
            ),
            "supported_sampling_parameters": many(TEXT),
            "supported_features": many(TEXT),
            "supported_endpoints": many(TEXT),
        }
    ),
    "Status": record({"status": TEXT}),
    "Document": {"type": "object", "required": ["openapi", "paths"]},
    "Error": record(
        {
            "error": record(
                {"message": TEXT, "type": TEXT, "param": maybe(TEXT), "code": maybe(TEXT)},
            )
        }
    ),
}
