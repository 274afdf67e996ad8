"""The body of POST /v1/responses, and the chat request that it means.

The conversation is a list of items: messages, function calls and their outputs. Field names are those of OpenAI's
client. The sampling fields of a chat (`seed`, `top_k`, `rule`, ...) may stand beside them.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from mercury_jax.serve import protocol
from mercury_jax.serve.dialects.translation import ChatTurns, chat_request
from mercury_jax.serve.protocol import JsonObject, RequestModel

MAX_PAGE = 100  # items of an answer of /v1/responses/{id}/input_items
MAX_ITEMS = 2 * protocol.MAX_MESSAGES  # a message of a chat with a call is two items

# Fields of a chat by their names here, for errors (`translation.naming`).
CHAT_NAMES = {
    r"^messages\b": "input",
    r"response_format(\.json_schema)?": "text.format",
    r"(tools\[\d+\])\.function\b": r"\1",
    r"\btool_call(_id|s)\b": "call_id",
}

REFUSED = {
    **{name: why for name, why in protocol.SAMPLED_CONSTRAINTS.items() if name not in ("functions", "function_call")},
    "response_format": "Use text.format.",
    "max_tokens": "Use max_output_tokens.",
    "max_completion_tokens": "Use max_output_tokens.",
    "messages": "Use input.",
    "background": "A response is made while the client waits for it.",
    "conversation": "Use previous_response_id.",
    "prompt": "Prompt templates are not kept here; use instructions and input.",
    "context_management": "The input is read as it is.",
}  # fmt: skip
# Fields that a response repeats.
REPEATED = {
    "instructions", "max_output_tokens", "metadata", "model", "parallel_tool_calls", "previous_response_id", "store",
    "temperature", "text", "tool_choice", "tools", "top_p", "truncation",
}  # fmt: skip


class TextItemPart(RequestModel):
    """A part of a message or of the output of a call. Text is the only kind: images and files are refused."""

    type: Literal["input_text", "output_text"]
    text: str
    """The text."""


TextParts = Annotated[list[TextItemPart], Field(max_length=protocol.MAX_PARTS, fail_fast=True)]
MessagePart = Annotated[TextItemPart | protocol.RefusalPart, Field(discriminator="type")]


class _Item(RequestModel):
    id: protocol.ShortText | None = None
    """Id of the item."""


class MessageItem(_Item):
    """A message. The type may be left out."""

    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    """Who speaks; developer counts as system."""
    content: str | Annotated[list[MessagePart], Field(max_length=protocol.MAX_PARTS, fail_fast=True)]
    """A string, or a list of parts of type input_text, output_text or refusal."""


class FunctionCallItem(_Item):
    """A call of the model."""

    type: Literal["function_call"]
    call_id: protocol.CallId
    """The id to which the output refers."""
    name: protocol.Name
    """Name of the function."""
    arguments: str
    """The arguments as JSON."""


class FunctionOutputItem(_Item):
    """What a called function returned."""

    type: Literal["function_call_output"]
    call_id: protocol.CallId
    """Id of the earlier call."""
    output: str | TextParts
    """A string, or a list of parts of type input_text."""


class ReasoningInputItem(_Item):
    """Thinking of an earlier response. It is accepted and not read."""

    type: Literal["reasoning"]


InputItem = Annotated[
    MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningInputItem, Field(discriminator="type")
]


class _FunctionType(RequestModel):
    # The last base of the classes below, so that it is their first field: another type is refused before what it lacks.
    type: Literal["function"]


class FlatFunctionTool(protocol.FunctionDefinition, _FunctionType):
    """A function that the model may call. Tools that OpenAI hosts are refused."""


class FunctionChoice(protocol.FunctionName, _FunctionType):
    """Requires a call of one function."""


class FunctionSubset(RequestModel):
    """Restricts calls to some of the functions."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    """Whether one of them must be called."""
    tools: list[FunctionChoice] = Field(min_length=1, max_length=protocol.MAX_TOOLS, fail_fast=True)
    """The functions that may be called."""


class FlatSchemaFormat(protocol.NamedSchema):
    """JSON that obeys a schema."""

    type: Literal["json_schema"]


TextForm = protocol.TextFormat | protocol.JsonObjectFormat | FlatSchemaFormat


class TextConfig(RequestModel):
    """The form of the text."""

    format: Annotated[TextForm, Field(discriminator="type")] | None = None
    """What the text obeys: nothing, any JSON object, or a schema."""


class ReasoningConfig(RequestModel):
    """How long to think, and whether the thinking is reported."""

    effort: protocol.ReasoningEffort | None = None
    """As `reasoning_effort` of a chat."""
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Report the thinking, the whole text of it."""
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    """Older name of `summary`."""


Mode = Literal["auto", "required", "none"]
Included = Literal["reasoning.encrypted_content", "message.output_text.logprobs"]
Metadata = dict[Annotated[str, Field(pattern="^.{1,64}$")], Annotated[str, Field(max_length=512)]]


class ResponsesRequest(protocol.SampledRequest):
    """Body of POST /v1/responses."""

    refused_fields = REFUSED

    input: str | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]
    """The user's message, or the items of the conversation."""
    instructions: str | None = None
    """A system message in front of the conversation, for this response only."""
    previous_response_id: protocol.ShortText | None = None
    """A stored response, whose conversation goes on."""
    store: bool = True
    """Whether the response can be found later. The server keeps the newest ones in memory."""
    max_output_tokens: protocol.MaxTokens | None = None
    """Most tokens of the text and the calls; thinking does not count."""
    tools: list[FlatFunctionTool] | None = Field(None, max_length=protocol.MAX_TOOLS, fail_fast=True)
    """Functions that the model may call."""
    tool_choice: Mode | Annotated[FunctionChoice | FunctionSubset, Field(discriminator="type")] | None = None
    """Whether a function is called: as the model decides, always, never, this one, or one of these."""
    parallel_tool_calls: bool = True
    """Whether one response may hold several calls."""
    text: TextConfig | None = None
    """The form of the text."""
    reasoning: ReasoningConfig | None = None
    """How long to think."""
    include: Annotated[list[Included], Field(max_length=16)] | None = None
    """`message.output_text.logprobs`: report log-probabilities. `reasoning.encrypted_content` is accepted; thinking is
    not sent in this form."""
    top_logprobs: int | None = Field(None, ge=0, le=protocol.MAX_TOP_LOGPROBS)
    """Number of alternatives per token, with log-probabilities."""
    metadata: Metadata | None = Field(None, max_length=16)
    """Repeated in the response."""
    truncation: Literal["disabled"] = "disabled"
    """Not supported otherwise: a conversation that is too long is refused."""
    n: int = Field(1, ge=1, le=1)
    """Not supported: a response has one answer."""

    @classmethod
    def prepared(cls, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Makes a message of each item with a role and no type."""
        if not isinstance(items := data.get("input"), list):
            return data
        untyped = lambda item: isinstance(item, dict) and "role" in item and item.get("type") is None
        return {**data, "input": [{**i, "type": "message"} if untyped(i) else i for i in items]}

    @property
    def summarised(self) -> bool:
        """Whether the thinking is reported."""
        reasoning = self.reasoning
        return reasoning is not None and (reasoning.summary or reasoning.generate_summary) is not None

    def echoed(self) -> JsonObject:
        """Returns the fields that the response repeats."""
        fields = self.model_dump(include=REPEATED, by_alias=True)
        form, effort = (fields["text"] or {}).get("format"), self.reasoning and self.reasoning.effort
        fields["text"] = {"format": form or {"type": "text"}}
        fields["reasoning"] = {"effort": effort, "summary": "detailed" if self.summarised else None}
        absent = {"tools": [], "tool_choice": "auto", "metadata": {}}
        return fields | {name: value for name, value in absent.items() if not fields[name]}


def input_items(body: ResponsesRequest) -> list[JsonObject]:
    """Returns the items of the input as they are stored and listed: each with an id, every content a list of parts."""
    if isinstance(body.input, str):
        items: list[JsonObject] = [{"type": "message", "role": "user", "content": body.input}]
    else:
        items = [item.model_dump(exclude_unset=True) for item in body.input]
    for item in items:
        item.setdefault("id", f"item_{secrets.token_hex(12)}")
        item["status"] = "completed"
        if isinstance(item.get("content"), str):
            kind = "output_text" if item["role"] == "assistant" else "input_text"
            item["content"] = [{"type": kind, "text": item["content"]}]
    return items


def chat_turns(body: ResponsesRequest, before: list[JsonObject], items: list[JsonObject]) -> ChatTurns:
    """Makes the messages of a chat: instructions, the items of earlier responses, and those of the input."""
    turns = ChatTurns()
    if body.instructions is not None:
        turns.add("instructions", "system", content=body.instructions)
    placed = [("previous_response_id", item) for item in before]
    placed += [(f"input[{i}]", item) for i, item in enumerate(items)]
    for place, item in placed:
        match item["type"]:
            case "message":
                turns.add(place, item["role"], content=_chat_parts(item["content"]))
            case "function_call":
                turns.add_call(place, item["call_id"], item["name"], item["arguments"])
            case "function_call_output":
                turns.add(place, "tool", tool_call_id=item["call_id"], content=_chat_parts(item["output"]))
    return turns


def responses_chat(body: ResponsesRequest, turns: ChatTurns) -> protocol.ChatCompletionsRequest:
    """Makes the chat request of a body."""
    choice: Any = body.tool_choice
    named = lambda tool: {"type": "function", "function": {"name": tool.name}}
    if isinstance(choice, FunctionChoice):
        choice = named(choice)
    elif isinstance(choice, FunctionSubset):
        subset = {"mode": choice.mode, "tools": list(map(named, choice.tools))}
        choice = {"type": "allowed_tools", "allowed_tools": subset}
    form: Any = body.text and body.text.format
    if form is not None:
        schema = form.model_dump(exclude_unset=True, by_alias=True)
        form = {"type": form.type, "json_schema": schema} if isinstance(form, FlatSchemaFormat) else schema
    tools = [tool.model_dump(exclude={"type"}, exclude_unset=True) for tool in body.tools or ()]
    fields = {
        "max_completion_tokens": body.max_output_tokens,
        "tools": [{"type": "function", "function": function} for function in tools] or None,
        "tool_choice": choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": form,
        "reasoning_effort": body.reasoning and body.reasoning.effort,
        "logprobs": "message.output_text.logprobs" in (body.include or ()) or bool(body.top_logprobs),
        "top_logprobs": body.top_logprobs,
    }
    return chat_request(body, turns, fields)


def _chat_parts(content: str | list[JsonObject]) -> str | list[JsonObject]:
    """The text of an item as the content of a chat message."""
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part["text"] if "text" in part else part["refusal"]} for part in content]
