"""The body of POST /v1/messages, and the chat request that it means.

A message is a text or a list of blocks: text, thinking, tool calls, and in the user's messages their results. Field
names are those of Anthropic's client. The sampling fields of a chat (`seed`, `min_p`, ...) may stand beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from mercury_jax.decode.defaults import EFFORTS
from mercury_jax.serve import protocol
from mercury_jax.serve.dialects.translation import ChatTurns, chat_request
from mercury_jax.serve.errors import ApiError
from mercury_jax.serve.protocol import JsonObject, RequestModel

# Fields of a chat by their names here, for errors (`translation.naming`).
CHAT_NAMES = {
    r"response_format(\.json_schema)?": "output_config.format",
    r"(tools\[\d+\])\.function\.parameters": r"\1.input_schema",
    r"(tools\[\d+\])\.function\b": r"\1",
    r"\btool_call_id\b": "tool_use_id",
    r"\.tool_calls\b": ".id",
}
REFUSED = {
    **{name: why for name, why in protocol.SAMPLED_CONSTRAINTS.items() if name not in ("functions", "function_call")},
    "stop": "Use stop_sequences.",
    "response_format": "Use output_config.format.",
    "max_completion_tokens": "Use max_tokens.",
    "container": "Code is not run here.",
    "mcp_servers": "Other servers are not called; list their functions in tools.",
    "context_management": "The messages are read as they are.",
}  # fmt: skip


class TextBlock(RequestModel):
    """Text."""

    type: Literal["text"]
    text: str
    """The text."""


TextBlocks = Annotated[list[TextBlock], Field(max_length=protocol.MAX_PARTS, fail_fast=True)]


class ToolUseBlock(RequestModel):
    """A call of the model."""

    type: Literal["tool_use"]
    id: protocol.CallId
    """The id to which the result refers."""
    name: protocol.Name
    """Name of the tool."""
    input: JsonObject
    """The arguments."""


class ToolResultBlock(RequestModel):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: protocol.CallId
    """Id of the earlier call."""
    content: str | TextBlocks = ""
    """A string, or a list of text blocks."""
    is_error: bool = False
    """Whether the call failed; the result is then marked as an error."""


class ThinkingBlock(RequestModel):
    """Thinking of an earlier answer. It is accepted and not read."""

    type: Literal["thinking", "redacted_thinking"]


UserBlock = Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[TextBlock | ToolUseBlock | ThinkingBlock, Field(discriminator="type")]


class UserTurn(RequestModel):
    """What the user says, and the results of calls."""

    role: Literal["user"]
    content: str | Annotated[list[UserBlock], Field(max_length=protocol.MAX_PARTS, fail_fast=True)]
    """A string, or a list of blocks of type text or tool_result."""


class AssistantTurn(RequestModel):
    """An answer of the model. As the last message, a text that the answer continues."""

    role: Literal["assistant"]
    content: str | Annotated[list[AssistantBlock], Field(max_length=protocol.MAX_PARTS, fail_fast=True)]
    """A string, or a list of blocks of type text, tool_use, thinking or redacted_thinking."""


class SystemTurn(RequestModel):
    """Instructions in the middle of a conversation."""

    role: Literal["system"]
    content: str | TextBlocks
    """A string, or a list of text blocks."""


class InputSchemaTool(RequestModel):
    """A tool that the model may call. Tools that Anthropic defines are refused."""

    type: Literal["custom"] = "custom"
    name: protocol.Name
    """Name of the tool."""
    description: str | None = None
    """What the tool does."""
    parameters: JsonObject = Field(alias="input_schema")
    """JSON Schema of the arguments."""
    strict: bool = False
    """Whether to refuse a schema that cannot be enforced as a whole."""


class _ToolChoice(RequestModel):
    disable_parallel_tool_use: bool = False
    """Whether one answer has at most one call."""


class AutoChoice(_ToolChoice):
    """A tool is called as the model decides (auto), always (any), or never (none)."""

    type: Literal["auto", "any", "none"]


class ToolChoiceByName(_ToolChoice):
    """Requires a call of one tool."""

    type: Literal["tool"]
    name: protocol.Name
    """One of the tools."""


class _ThinkingDisplay(RequestModel):
    display: Literal["summarized", "omitted"] = "summarized"
    """Whether the text of the thinking is sent."""


class ThinkingEnabled(_ThinkingDisplay):
    """Think before the answer, up to a number of tokens."""

    type: Literal["enabled"]
    budget_tokens: int = Field(ge=1, le=protocol.MAX_TOKENS)
    """The effort with the largest budget up to this many tokens is taken; below all of them, the least one."""


class ThinkingAdaptive(_ThinkingDisplay):
    """Think as the server does by default, or as `output_config.effort` says."""

    type: Literal["adaptive"]


class ThinkingDisabled(RequestModel):
    """Do not think."""

    type: Literal["disabled"]


class SchemaOutput(RequestModel):
    """JSON that obeys a schema."""

    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")
    """The JSON Schema."""


class OutputConfig(RequestModel):
    """The form of the answer, and its effort."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """How long to think and how strictly to accept tokens; xhigh and max are high."""
    format: SchemaOutput | None = None
    """What the text obeys."""


Turn = Annotated[UserTurn | AssistantTurn | SystemTurn, Field(discriminator="role")]
Thinking = ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled
Stops = Annotated[list[protocol.ShortText], Field(max_length=32, fail_fast=True)]


class CountTokensRequest(protocol.SampledRequest):
    """Body of POST /v1/messages/count_tokens."""

    refused_fields = REFUSED

    messages: list[Turn] = Field(min_length=1, max_length=protocol.MAX_MESSAGES, fail_fast=True)
    """The conversation so far."""
    system: str | TextBlocks | None = None
    """Instructions in front of the conversation."""
    max_tokens: protocol.MaxTokens | None = None
    """Most tokens of the text and the calls; thinking does not count."""
    tools: list[InputSchemaTool] | None = Field(None, max_length=protocol.MAX_TOOLS, fail_fast=True)
    """Tools that the model may call."""
    tool_choice: Annotated[AutoChoice | ToolChoiceByName, Field(discriminator="type")] | None = None
    """Whether a tool is called."""
    thinking: Annotated[Thinking, Field(discriminator="type")] | None = None
    """Whether to think, and whether the thinking is sent. Left out, the server's default, and it is not sent."""
    output_config: OutputConfig | None = None
    """The form of the answer, and its effort."""
    stop: Stops | None = Field(None, alias="stop_sequences", description=protocol.ABOUT_STOP)  # type: ignore[assignment]
    n: int = Field(1, ge=1, le=1)
    """Not supported: a request has one answer."""

    @classmethod
    def prepared(cls, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Refuses a thread, with the code at which Anthropic's client sends the whole conversation instead."""
        if data.get("thread") not in protocol.UNUSED:
            message = "thread is not supported; send all messages of the conversation with every request"
            raise ApiError(400, message, param="thread", code="thread_unsupported_request")
        return data


class MessagesRequest(CountTokensRequest):
    """Body of POST /v1/messages."""

    max_tokens: protocol.MaxTokens  # type: ignore[assignment]
    """Most tokens of the text and the calls; thinking does not count."""


def message_turns(body: CountTokensRequest) -> ChatTurns:
    """Makes the messages of a chat. Each result of a call is a message of its own, in front of the user's text."""
    turns = ChatTurns()
    if body.system is not None:
        turns.add("system", "system", content=_parts(body.system))
    for i, turn in enumerate(body.messages):
        place = f"messages[{i}]"
        blocks = [] if isinstance(turn.content, str) else turn.content
        texts = [block for block in blocks if isinstance(block, TextBlock)]
        for j, block in enumerate(blocks):
            if isinstance(block, ToolResultBlock):
                result = _parts("Error:" if block.is_error else []) + _parts(block.content)
                turns.add(f"{place}.content[{j}]", "tool", tool_call_id=block.tool_use_id, content=result)
        if not blocks or texts or turn.role == "assistant":
            turns.add(place, turn.role, content=_parts(texts if blocks else turn.content) or None)
        for j, block in enumerate(blocks):
            if isinstance(block, ToolUseBlock):
                turns.add_call(f"{place}.content[{j}]", block.id, block.name, block.input)
    last = turns.messages[-1]
    if last["role"] == "assistant" and last["content"] and "tool_calls" not in last:
        last["prefix"] = True
    return turns


def messages_chat(body: CountTokensRequest, turns: ChatTurns) -> protocol.ChatCompletionsRequest:
    """Makes the chat request of a body."""
    named, choice = body.tool_choice, None
    if isinstance(named, ToolChoiceByName):
        choice = {"type": "function", "function": {"name": named.name}}
    elif named is not None:
        choice = {"any": "required"}.get(named.type, named.type)
    functions = [tool.model_dump(exclude={"type"}, exclude_unset=True) for tool in body.tools or ()]
    config, form = body.output_config or OutputConfig(), None
    if config.format is not None:
        form = {"type": "json_schema", "json_schema": {"name": "output", "schema": config.format.schema_}}
    fields = {
        "max_tokens": body.max_tokens,
        "tools": [{"type": "function", "function": function} for function in functions] or None,
        "tool_choice": choice,
        "parallel_tool_calls": named is None or not named.disable_parallel_tool_use,
        "response_format": form,
        "reasoning_effort": _effort(body.thinking, config.effort),
    }
    return chat_request(body, turns, fields)


def _effort(thinking: Any, effort: str | None) -> str | None:
    """The effort of a chat."""
    if isinstance(thinking, ThinkingDisabled):
        return "instant"
    if effort is not None:
        return effort if effort in EFFORTS else "high"
    if not isinstance(thinking, ThinkingEnabled):
        return None
    fits = lambda name: 0 < EFFORTS[name].thinking <= thinking.budget_tokens
    return max(filter(fits, EFFORTS), key=lambda name: EFFORTS[name].thinking, default="low")


def _parts(content: Any) -> list[JsonObject]:
    """A text, or text blocks, as the parts of a chat message."""
    texts = [content] if isinstance(content, str) else [block.text for block in content]
    return [{"type": "text", "text": text} for text in texts]
