"""Types of the objects and events of the Responses API and of the Messages API, for the OpenAPI document.

Names and fields are those of the clients of OpenAI and of Anthropic. Every field is present unless it has a default.
"""

from __future__ import annotations

import functools
import operator
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, RootModel, create_model

from mercury_jax.serve.responses import Count, JsonDict, TokenLogprobs

Role, ItemStatus = Literal["assistant"], Literal["in_progress", "completed", "incomplete"]


def _object(title: str, /, **fields: Any) -> Any:
    """Makes the type of an object with these fields and no others; a pair of a type and a default may be missing."""
    pairs: Any = {name: field if isinstance(field, tuple) else (field, ...) for name, field in fields.items()}
    return create_model(title, __config__=ConfigDict(extra="forbid"), **pairs)


def _tagged(kind: str, title: str = "", /, **fields: Any) -> Any:
    """Makes the type of an object that its `type` tells from others; the title is made of it unless it is given."""
    words = kind.replace("_", ".").split(".")
    return _object(title or "".join(map(str.capitalize, words)), type=Literal[kind], **fields)


def _one_of(title: str, *kinds: Any) -> Any:
    """Makes the type of an object that is one of several kinds."""
    union: Any = Annotated[functools.reduce(operator.or_, kinds), Field(discriminator="type")]
    return create_model(title, __base__=RootModel[union])


# Responses API

OutputText: Any = _tagged("output_text", text=str, annotations=list[JsonDict], logprobs=list[TokenLogprobs])
SummaryText: Any = _tagged("summary_text", text=str)
OutputItem: Any = _one_of(
    "OutputItem",
    _tagged("message", "OutputMessage", id=str, role=Role, status=ItemStatus, content=list[OutputText]),
    _tagged("reasoning", "OutputReasoning", id=str, summary=list[SummaryText]),
    _tagged("function_call", "OutputCall", id=str, status=ItemStatus, call_id=str, name=str, arguments=str),
)
ResponseUsage: Any = _object(
    "ResponseUsage", input_tokens=Count, output_tokens=Count, total_tokens=Count,
    input_tokens_details=_object("InputTokens", cached_tokens=Count, cache_write_tokens=Count),
    output_tokens_details=_object("OutputTokens", reasoning_tokens=Count),
)  # fmt: skip
ResponseObject: Any = _object(
    "ResponseObject", id=str, object=Literal["response"], created_at=Count, completed_at=Count | None,
    status=Literal["in_progress", "completed", "incomplete", "failed"], background=Literal[False],
    error=_object("FailedResponse", code=str, message=str) | None,
    incomplete_details=_object("IncompleteDetails", reason=Literal["max_output_tokens"]) | None,
    instructions=str | None, max_output_tokens=int | None, model=str, output=list[OutputItem],
    parallel_tool_calls=bool, previous_response_id=str | None, reasoning=JsonDict, store=bool,
    temperature=float | None, text=JsonDict, tool_choice=str | JsonDict, tools=list[JsonDict], top_p=float,
    truncation=Literal["disabled"], usage=ResponseUsage | None, metadata=dict[str, str], warning=(str | None, None),
)  # fmt: skip
ResponseItemList: Any = _object(
    "ResponseItemList", object=Literal["list"], data=list[JsonDict], first_id=str | None, last_id=str | None,
    has_more=bool,
)  # fmt: skip
DeletedResponse: Any = _object("DeletedResponse", id=str, object=Literal["response"], deleted=Literal[True])

_WHOLE = {"sequence_number": Count, "response": ResponseObject}
_ITEM = {"sequence_number": Count, "output_index": Count, "item": OutputItem}
_CALL = {"sequence_number": Count, "output_index": Count, "item_id": str}
_TEXT, _SUMMARY = _CALL | {"content_index": Count}, _CALL | {"summary_index": Count}
ResponseStreamEvent: Any = _one_of(
    "ResponseStreamEvent",
    *(_tagged(f"response.{at}", **_WHOLE) for at in ("created", "in_progress", "completed", "incomplete", "failed")),
    *(_tagged(f"response.output_item.{at}", **_ITEM) for at in ("added", "done")),
    *(_tagged(f"response.content_part.{at}", **_TEXT, part=OutputText) for at in ("added", "done")),
    _tagged("response.output_text.delta", **_TEXT, delta=str, logprobs=list[TokenLogprobs]),
    _tagged("response.output_text.done", **_TEXT, text=str, logprobs=list[TokenLogprobs]),
    *(_tagged(f"response.reasoning_summary_part.{at}", **_SUMMARY, part=SummaryText) for at in ("added", "done")),
    _tagged("response.reasoning_summary_text.delta", **_SUMMARY, delta=str),
    _tagged("response.reasoning_summary_text.done", **_SUMMARY, text=str),
    _tagged("response.function_call_arguments.delta", **_CALL, delta=str),
    _tagged("response.function_call_arguments.done", **_CALL, arguments=str),
)  # fmt: skip

# Messages API

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
AnswerBlock: Any = _one_of(
    "AnswerBlock",
    _tagged("text", "AnswerTextBlock", text=str),
    _tagged("thinking", "AnswerThinking", thinking=str, signature=str),
    _tagged("tool_use", "AnswerToolUse", id=str, name=str, input=JsonDict),
)
MessageUsage: Any = _object(
    "MessageUsage", input_tokens=Count, cached_input_tokens=Count, cache_creation_input_tokens=Count,
    cache_read_input_tokens=Count, output_tokens=Count,
    output_tokens_details=_object("ThinkingTokens", thinking_tokens=Count),
)  # fmt: skip
MessageObject: Any = _tagged(
    "message", "MessageObject", id=str, role=Role, model=str, content=list[AnswerBlock], usage=MessageUsage,
    stop_reason=StopReason | None, stop_sequence=str | None, warning=(str | None, None),
)  # fmt: skip
TokenCount: Any = _object("TokenCount", input_tokens=Count)
MessagesErrorBody: Any = _object("MessagesErrorBody", type=str, message=str, details=(JsonDict | None, None))
MessagesError: Any = _tagged("error", "MessagesError", error=MessagesErrorBody, request_id=str)
BlockDelta: Any = _one_of(
    "BlockDelta",
    _tagged("text_delta", text=str),
    _tagged("thinking_delta", thinking=str),
    _tagged("signature_delta", signature=str),
    _tagged("input_json_delta", partial_json=str),
)
MessageStreamEvent: Any = _one_of(
    "MessageStreamEvent",
    _tagged("message_start", message=MessageObject),
    _tagged("ping"),
    _tagged("content_block_start", index=Count, content_block=AnswerBlock),
    _tagged("content_block_delta", index=Count, delta=BlockDelta),
    _tagged("content_block_stop", index=Count),
    _tagged("message_delta", usage=MessageUsage,
            delta=_object("StopDelta", stop_reason=StopReason, stop_sequence=str | None)),
    _tagged("message_stop"),
)  # fmt: skip
