"""Request models of all POST endpoints, and how a JSON object becomes one.

Each endpoint has one pydantic model. It validates requests, and `openapi.py` writes the document from it, so that
the two cannot differ. Names, ranges and defaults follow the vendor's document; fields that only OpenAI's API has are
accepted as well. `parse_request` turns a validation failure into an `ApiError` that names the field, its value and
what is allowed.

To add a field: declare it here, and use it in `sampling_params.py` (if it changes how tokens are chosen) or in the
module of its endpoint.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from mercury_jax.serve.errors import invalid_value, validation_error

MAX_TOKENS = 1 << 20  # larger requests are refused; what exceeds the context is only cut
MAX_TOP_K = 1 << 20
MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, MAX_CHOICES, MAX_TOP_LOGPROBS = 2048, 1024, 128, 16, 20
NAME_PATTERN = "^[A-Za-z0-9_.-]{1,64}$"

# Values by which clients say that they do not use a field.
UNUSED = (None, False, 0, "", [], {})

_FORMAT = "Use response_format of /v1/chat/completions, with type json_schema or json_object."
_GRAMMAR = (
    "Grammars of this kind are not supported; response_format of /v1/chat/completions takes a JSON Schema."
)
_TOKENS = "Use logit_bias and stop."
# Fields of other servers (vLLM, SGLang, TGI, llama.cpp, older forms of OpenAI's API) that constrain the answer.
# Unknown fields are ignored, as the vendor does: clients send their own bookkeeping (`user`, `store`, `nextEdit`).
# A constraint that is ignored would go unnoticed, so these are refused by name.
CONSTRAINT_FIELDS = {
    **dict.fromkeys(("guided_json", "json_schema", "structured_outputs", "structural_tag", "guided_decoding"), _FORMAT),
    **dict.fromkeys(("guided_regex", "guided_choice", "guided_grammar", "guided_whitespace_pattern"), _GRAMMAR),
    **dict.fromkeys(("regex", "ebnf", "grammar", "choice"), _GRAMMAR),
    **dict.fromkeys(("allowed_token_ids", "stop_token_ids", "bad_words", "bad_words_ids"), _TOKENS),
    "logits_processors": _TOKENS,
    "min_tokens": "The length of an answer has no lower bound.",
    "functions": "Use tools of /v1/chat/completions.",
    "function_call": "Use tool_choice of /v1/chat/completions.",
}  # fmt: skip


def _integral(value: Any) -> Any:
    """Makes 5.0 the integer 5, as JSON Schema does. Strict integers take neither `true` nor "5"."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _not_zero(value: int) -> int:
    if value == 0:
        raise ValueError("0 is not allowed")
    return value


def _only_false(value: bool) -> bool:
    if value:
        raise ValueError("only false is allowed")
    return value


# Efforts of OpenAI's API that stand for one of ours.
EFFORT_ALIASES = {"none": "instant", "minimal": "instant", "xhigh": "high"}

Integral = BeforeValidator(_integral)
Name = Annotated[str, Field(min_length=1, max_length=64, pattern=NAME_PATTERN)]
CallId = Annotated[str, Field(min_length=1, max_length=256)]
JsonObject = dict[str, Any]
TokenLimit = Annotated[int, Field(ge=1, le=MAX_TOKENS), Integral]
Seed = Annotated[int, Field(ge=-(1 << 63), le=(1 << 63) - 1), Integral]
TokenId = Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,9})$")]
Probability = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
LogitBias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
StopSequences = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=32, fail_fast=True)
]
ReasoningEffort = Annotated[
    Literal["instant", "low", "medium", "high", "none", "minimal", "xhigh"],
    AfterValidator(lambda name: EFFORT_ALIASES.get(name, name)),
]

# Fields of several endpoints, whose defaults may differ.
MaxTokens = Annotated[
    TokenLimit, Field(description="Most tokens of the answer. More than the context leaves is cut to that.")
]
Temperature = Annotated[
    float, Field(ge=0, le=2, allow_inf_nan=False, description="Sampling temperature; 0: always the likeliest token.")
]  # fmt: skip
OptionalTemperature = Annotated[
    Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None,
    Field(
        description="Sampling temperature; 0: always the likeliest token. Left out, the decoding rule's own."
    ),
]
FrequencyPenalty = Annotated[
    float, Field(ge=-2, le=2, allow_inf_nan=False, description="Subtracted once for each time that a token occurred.")
]  # fmt: skip
PresencePenalty = Annotated[
    float, Field(ge=-2, le=2, allow_inf_nan=False, description="Subtracted from tokens that occurred.")
]  # fmt: skip
RepetitionPenalty = Annotated[
    float,
    Field(
        gt=0, le=1000, allow_inf_nan=False, description="Divides the logits of tokens that occurred; 1: off."
    ),
]
Stop = Annotated[
    Annotated[str, Field(max_length=256)] | StopSequences | None,
    Field(
        description="Texts that end the answer and are not part of it; not applied where `response_format` is enforced."
    ),
]


class RequestModel(BaseModel):
    """Base of all request models: null means the default, no type is coerced, unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")
    refused_fields: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_null(cls, data: Any) -> Any:
        return {k: v for k, v in data.items() if v is not None} if isinstance(data, dict) else data


# Messages


class TextPart(RequestModel):
    """A part of a message. Text is the only kind."""

    type: Literal["text"]
    text: Annotated[str, Field(description="The text.")]


Content = str | Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True)]


class CalledFunction(RequestModel):
    """The function of a tool call."""

    name: Annotated[Name, Field(description="Name of the function.")]
    arguments: Annotated[
        str | JsonObject, Field(description="The arguments: an object, or its JSON as a string.")
    ] = ""


class AssistantToolCall(RequestModel):
    """A tool call in the conversation so far."""

    id: Annotated[CallId, Field(description="The id to which the result refers.")]
    type: Annotated[Literal["function"], Field(description="Always function.")] = "function"
    function: Annotated[CalledFunction, Field(description="The function that was called.")]


class _Message(RequestModel):
    content: Annotated[Content | None, Field(description="A string, or a list of parts of type text.")] = None


class PlainMessage(_Message):
    """A message of the system or the user; developer counts as system."""

    role: Literal["system", "developer", "user"]
    name: Annotated[
        Annotated[str, Field(max_length=256)] | None, Field(description="Name of the speaker.")
    ] = None


class AssistantMessage(_Message):
    """A message of the model."""

    role: Literal["assistant"]
    name: Annotated[
        Annotated[str, Field(max_length=256)] | None, Field(description="Name of the speaker.")
    ] = None
    tool_calls: Annotated[
        Annotated[list[AssistantToolCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None,
        Field(description="The tool calls of this turn."),
    ] = None
    function_call: Annotated[CalledFunction | None, Field(description="A call in OpenAI's older form.")] = (
        None
    )


class ToolMessage(_Message):
    """The result of a tool call."""

    role: Literal["tool"]
    tool_call_id: Annotated[CallId, Field(description="Id of the earlier call that this answers.")]


class FunctionMessage(_Message):
    """The result of a call in OpenAI's older form."""

    role: Literal["function"]
    name: Annotated[Name | None, Field(description="Name of the function.")] = None


ChatMessage = Annotated[
    PlainMessage | AssistantMessage | ToolMessage | FunctionMessage, Field(discriminator="role")
]


class UserMessage(RequestModel):
    """The one message of an edit or apply request, in which editors send the texts of files."""

    role: Annotated[Literal["user"], Field(description="Always user.")]
    content: Annotated[Content, Field(description="The prompt with its tags.")]


# Tools and formats


class FunctionDefinition(RequestModel):
    """A function that the model may call."""

    name: Annotated[Name, Field(description="Name of the function.")]
    description: Annotated[str | None, Field(description="What the function does.")] = None
    parameters: Annotated[JsonObject | None, Field(description="JSON Schema of the arguments.")] = None
    strict: Annotated[bool, Field(description="Accepted; the schema is always enforced.")] = False


class FunctionTool(RequestModel):
    """A tool."""

    type: Literal["function"]
    function: Annotated[FunctionDefinition, Field(description="The function that may be called.")]


class FunctionName(RequestModel):
    """The name of one of the tools."""

    name: Annotated[Name, Field(description="One of the tools.")]


class NamedTool(RequestModel):
    """Requires a call of one tool."""

    type: Literal["function"]
    function: Annotated[FunctionName, Field(description="The function that must be called.")]


class ToolSubset(RequestModel):
    """A choice among the tools."""

    mode: Annotated[Literal["auto", "required"], Field(description="Whether one of them must be called.")]
    tools: Annotated[
        list[NamedTool],
        Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True, description="The tools that may be called."),
    ]  # fmt: skip


class AllowedTools(RequestModel):
    """Restricts calls to some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: Annotated[ToolSubset, Field(description="A choice among the tools.")]


ToolChoice = (
    Literal["auto", "required", "none"] | Annotated[NamedTool | AllowedTools, Field(discriminator="type")]
)


class TextFormat(RequestModel):
    """Free text."""

    type: Literal["text"]


class JsonObjectFormat(RequestModel):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(RequestModel):
    """A JSON Schema with a name."""

    name: Annotated[Name, Field(description="Name of the format.")]
    description: Annotated[str | None, Field(description="What the format is for.")] = None
    schema_: Annotated[
        JsonObject | None, Field(alias="schema", description="The JSON Schema (none: any object).")
    ] = None
    strict: Annotated[bool, Field(description="Accepted; the schema is always enforced.")] = False


class JsonSchemaFormat(RequestModel):
    """JSON that obeys a schema."""

    type: Literal["json_schema"]
    json_schema: Annotated[NamedSchema, Field(description="The schema that the answer obeys.")]


AnswerFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


# Endpoints


class StreamOptions(RequestModel):
    """How to stream."""

    include_usage: Annotated[
        bool, Field(description="Send one more chunk, with the usage and no choices.")
    ] = False


class ApiRequest(RequestModel):
    """Fields of all endpoints. Subclasses set the default of `max_tokens`."""

    refused_fields = {**CONSTRAINT_FIELDS, "response_format": _FORMAT}

    model: Annotated[
        str, Field(min_length=1, max_length=256, description="The model, by its name or one of its aliases.")
    ]  # fmt: skip
    top_p: Annotated[
        Probability, Field(description="Sample among the likeliest tokens that make up this probability.")
    ] = 1.0
    frequency_penalty: FrequencyPenalty = 0.0
    presence_penalty: PresencePenalty = 0.0
    stream: Annotated[
        bool, Field(description="Send the answer as server-sent events while it is written.")
    ] = False
    stream_options: Annotated[
        StreamOptions | None, Field(description="How to stream; used where `stream` is true.")
    ] = None
    seed: Annotated[
        Seed | None, Field(description="The same seed gives the same text (default: a fresh one).")
    ] = None
    extra_body: Annotated[
        JsonObject | None, Field(description="Further fields of this object; those outside of it win.")
    ] = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def stop_sequences(self) -> tuple[str, ...]:
        """Texts that end the answer. The empty text ends nothing."""
        stop = getattr(self, "stop", None)
        return tuple(filter(None, [stop] if isinstance(stop, str) else stop or ()))


class SampledRequest(ApiRequest):
    """Sampling fields of the endpoints for chat and plain text."""

    temperature: OptionalTemperature = None
    stop: Stop = None
    top_k: Annotated[
        int,
        Field(ge=-1, le=MAX_TOP_K, description="Sample among this many of the likeliest tokens; -1 and 0: all."),
        Integral,
    ] = -1  # fmt: skip
    min_p: Annotated[
        Probability, Field(description="Sample among tokens at least this many times as likely as the best.")
    ] = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    logit_bias: Annotated[
        Annotated[dict[TokenId, LogitBias], Field(max_length=512)] | None,
        Field(description="What to add to the logits of tokens, by their ids."),
    ] = None
    n: Annotated[
        int,
        Field(ge=1, le=MAX_CHOICES, description="Number of answers; answer i samples with seed + i."),
        Integral,
    ] = 1


class ChatCompletionsRequest(SampledRequest):
    """Body of POST /v1/chat/completions."""

    refused_fields = CONSTRAINT_FIELDS

    messages: Annotated[
        list[ChatMessage],
        Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True, description="The conversation so far."),
    ]  # fmt: skip
    max_tokens: Annotated[
        TokenLimit | None,
        Field(
            description="Most tokens of the answer, thinking apart (default 16384). More than the context leaves is "
            "cut to that."
        ),
    ] = None
    max_completion_tokens: Annotated[
        TokenLimit | None, Field(description="OpenAI's newer name of `max_tokens`; takes precedence.")
    ] = None
    tools: Annotated[
        Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None,
        Field(description="Functions that the model may call."),
    ] = None
    tool_choice: Annotated[
        ToolChoice | None,
        Field(
            description="Whether a tool is called: as the model decides, always, never, this one, or one of these."
        ),
    ] = None
    parallel_tool_calls: Annotated[
        bool, Field(description="Whether one answer may hold several tool calls.")
    ] = True
    response_format: Annotated[
        AnswerFormat | None,
        Field(description="What the answer obeys: nothing, any JSON object, or a schema."),
    ] = None
    reasoning_effort: Annotated[
        ReasoningEffort | None,
        Field(
            description="How long to think and how strictly to accept tokens; `max_tokens` is kept for the answer."
        ),
    ] = None
    reasoning_summary: Annotated[bool, Field(description="Report the thinking.")] = False
    reasoning_summary_wait: Annotated[
        bool, Field(description="Accepted; a stream always waits for its summary.")
    ] = False
    diffusing: Annotated[bool, Field(description="With stream: each chunk holds the whole current text.")] = (
        False
    )
    realtime: Annotated[
        bool, Field(description="Answer at once: reasoning_effort instant, unless it is set.")
    ] = False
    logprobs: Annotated[bool, Field(description="Report the logprobs of the answer's tokens.")] = False
    top_logprobs: Annotated[
        Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), Integral] | None,
        Field(description="With logprobs: number of alternatives per token."),
    ] = None


class CompletionsRequest(SampledRequest):
    """Body of POST /v1/completions."""

    prompt: Annotated[
        str | Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)],
        Field(description="The text to continue."),
    ]
    suffix: Annotated[str | None, Field(description="Text behind the answer, which then fills the gap.")] = (
        None
    )
    max_tokens: MaxTokens = 512
    logprobs: Annotated[
        Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), Integral] | None,
        Field(description="Report logprobs, with this many alternatives."),
    ] = None
    echo: Annotated[
        bool,
        Field(
            description="Not supported: there are no logprobs of a prompt.",
            json_schema_extra={"not": {"enum": [True]}},
        ),
        AfterValidator(_only_false),
    ] = False
    best_of: Annotated[
        int,
        Field(ge=1, le=1, description="Not supported: every answer that is generated is returned."),
        Integral,
    ] = 1


class FimCompletionsRequest(ApiRequest):
    """Body of POST /v1/fim/completions."""

    prompt: Annotated[str, Field(description="The text before the gap.")]
    suffix: Annotated[str, Field(description="The text behind the gap.")] = ""
    max_tokens: MaxTokens = 512
    top_k: Annotated[
        int,
        Field(
            ge=-1,
            le=1000,
            description="Sample among this many of the likeliest tokens; -1: all, 0 is refused.",
            json_schema_extra={"not": {"enum": [0]}},
        ),
        Integral,
        AfterValidator(_not_zero),
    ] = -1
    presence_penalty: PresencePenalty = 1.5
    repetition_penalty: RepetitionPenalty = 1.0
    stop: Stop = ["\n\n", "\n \n"]  # noqa: RUF012 (pydantic copies defaults)


class EditCompletionsRequest(ApiRequest):
    """Body of POST /v1/edit/completions."""

    messages: Annotated[
        list[UserMessage], Field(min_length=1, max_length=1, description="Exactly one message of the user.")
    ]
    max_tokens: MaxTokens = 1024
    temperature: Temperature = 0.2
    presence_penalty: PresencePenalty = 1.0


class ApplyCompletionsRequest(ApiRequest):
    """Body of POST /v1/apply/completions."""

    messages: Annotated[
        list[UserMessage], Field(min_length=1, max_length=1, description="Exactly one message of the user.")
    ]
    max_tokens: MaxTokens = 8192
    temperature: Temperature = 0.0


# From JSON to a model

Request = TypeVar("Request", bound=RequestModel)


def parse_request(model: type[Request], data: Mapping[str, Any]) -> Request:
    """Validates a JSON object.

    Fields of `extra_body` count as fields of the object where the object itself does not have them: clients of
    OpenAI's SDK send there what the SDK has no argument for.

    Args:
        model: The request model of the endpoint.
        data: The body of the request.

    Returns:
        The request, with all defaults.

    Raises:
        ApiError: 400, naming the first field that does not fit, its value and what is allowed.
    """
    extra = data.get("extra_body")
    if isinstance(extra, dict) and "extra_body" in model.model_fields:
        data = {**{name: value for name, value in extra.items() if name != "extra_body"}, **data}
    for name, instead in model.refused_fields.items():
        if data.get(name) not in UNUSED:
            raise invalid_value(name, data[name], f"none: this server has no such field. {instead}")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise validation_error(request_schema(model), data, error) from None


class RequestJsonSchema(GenerateJsonSchema):
    """JSON Schema of a request model as OpenAPI needs it: fields with a default may be null, and have no titles."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        made = super().default_schema(schema)
        if made.get("default", ...) is None:
            del made["default"]
        if {"type": "null"} in made.get("anyOf", ()):
            return made
        default = {"default": made.pop("default")} if "default" in made else {}
        return {"anyOf": [made, {"type": "null"}]} | default

    def dict_schema(self, schema: core_schema.DictSchema) -> JsonSchemaValue:
        made = super().dict_schema(schema)
        # A pattern of keys is a condition on every key; pydantic writes it as `patternProperties`, which allows others.
        for pattern, values in made.pop("patternProperties", {}).items():
            made |= {"propertyNames": {"pattern": pattern}, "additionalProperties": values}
        return made


@functools.cache
def request_schema(model: type[RequestModel]) -> JsonSchemaValue:
    """Returns the JSON Schema of a request model, with `$defs`.

    Args:
        model: The request model.
    """
    return model.model_json_schema(schema_generator=RequestJsonSchema)


def refused_properties(model: type[RequestModel]) -> JsonSchemaValue:
    """Returns the schemas of the fields that a model refuses: only values that mean "not used" are valid."""
    return {
        name: {"enum": list(UNUSED), "description": f"Refused. {instead}"}
        for name, instead in model.refused_fields.items()
    }
