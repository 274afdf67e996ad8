"""Request models of all POST endpoints, and how a JSON object becomes one.

Each endpoint has one pydantic model, which validates requests and from which `openapi.py` generates the document, so
the two cannot differ. Names, ranges and defaults follow the vendor's document; fields that only OpenAI's API has are
accepted as well. `parse_request` converts a validation failure to an `ApiError` that names the field, its value and the
allowed values.

To add a field: declare it here with its description as a docstring, and use it in one other file: in
`engine_requests.py` if it changes how tokens are chosen, else in the module of its endpoint. A field that
`EngineRequest` has under the same name only needs its name in `engine_requests.SAMPLING_FIELDS`.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from mercury_jax.serve.errors import ApiError, invalid_value, validation_error

MAX_TOKENS = 1 << 20  # larger values are refused; values up to this are reduced to the context
MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, MAX_CHOICES, MAX_TOP_LOGPROBS = 2048, 1024, 128, 16, 20
NAME_PATTERN = "^[A-Za-z0-9_.-]{1,64}$"

# Values by which clients say that they do not use a field; see `unused_values`.
UNUSED = (None, False, 0, "", [], {})

_FORMAT = "Use response_format of /v1/chat/completions, with type json_schema or json_object."
_GUIDED = "Use guided_regex, guided_choice or guided_grammar of /v1/chat/completions or /v1/completions."
_TOKENS = "Use logit_bias and stop."
_LENGTH = "Use max_tokens."
# Fields of other servers (vLLM, SGLang, TGI, llama.cpp, older forms of OpenAI's API) that constrain the answer.
# Unknown fields are ignored, as the vendor does: clients send their own bookkeeping (`user`, `store`, `nextEdit`).
# A constraint that is ignored would go unnoticed, so these are refused by name.
CONSTRAINT_FIELDS = {
    **dict.fromkeys(("guided_json", "json_schema", "structured_outputs", "structural_tag", "guided_decoding"), _FORMAT),
    **dict.fromkeys(("guided_regex", "guided_choice", "guided_grammar", "guided_whitespace_pattern"), _GUIDED),
    **dict.fromkeys(("regex", "ebnf", "grammar", "choice"), _GUIDED),
    **dict.fromkeys(("allowed_token_ids", "stop_token_ids", "bad_words", "bad_words_ids"), _TOKENS),
    "logits_processors": _TOKENS,
    "max_new_tokens": _LENGTH,
    "min_tokens": "The length of an answer has no lower bound.",
    "functions": "Use tools of /v1/chat/completions.",
    "function_call": "Use tool_choice of /v1/chat/completions.",
}  # fmt: skip


# Fields of other servers that look like a misspelt field of this one, and are ignored like all unknown fields.
NOT_MISSPELT = (
    "context", "models", "parse_tool_calls", "reasoning_format", "top_logprobs_num",
    "frequency_penalty_range", "repetition_penalty_range", "repetition_penalty_slope",
)  # fmt: skip
MAX_UNKNOWN = 128  # different unknown fields of one request, of which the nearest field is searched
SIMILARITY = 0.85  # of `difflib`, from which on an unknown field is taken for a misspelt one

# Efforts of OpenAI's API, mapped to the efforts of this server.
EFFORT_ALIASES = {"none": "instant", "minimal": "instant", "xhigh": "high", "max": "high"}

JsonObject = dict[str, Any]
Name = Annotated[str, Field(min_length=1, max_length=64, pattern=NAME_PATTERN)]
CallId = Annotated[str, Field(min_length=1, max_length=256)]
ShortText = Annotated[str, Field(max_length=256)]
TokenId = Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,9})$")]
LogitBias = Annotated[float, Field(ge=-100, le=100)]
Choices = Annotated[list[str], Field(max_length=10_000, fail_fast=True)]
StopSequences = ShortText | Annotated[list[ShortText], Field(max_length=32, fail_fast=True)]
ReasoningEffort = Annotated[
    Literal["instant", "low", "medium", "high", "none", "minimal", "xhigh", "max"],
    AfterValidator(lambda name: EFFORT_ALIASES.get(name, name)),
]

# Fields of several endpoints, whose defaults differ.
ABOUT_MAX_TOKENS = "Most tokens of the answer. More than the context leaves is cut to that."
ABOUT_TEMPERATURE = "Sampling temperature; 0: always the likeliest token."
ABOUT_STOP = (
    "Texts that end the answer and are not part of it; not applied where a format or a grammar is enforced."
)
MaxTokens = Annotated[int, Field(ge=1, le=MAX_TOKENS, description=ABOUT_MAX_TOKENS)]
PresencePenalty = Annotated[
    float, Field(ge=-2, le=2, description="Subtracted from the logits of tokens that occurred.")
]
RepetitionPenalty = Annotated[
    float, Field(gt=0, le=1000, description="Divides the logits of tokens that occurred; 1: off.")
]


class RequestModel(BaseModel):
    """Base of all request models: null means the default, no type is coerced, unknown fields are ignored.

    An unknown field whose name is nearly that of a field is refused by `parse_request`.
    """

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, use_attribute_docstrings=True)
    refused_fields: ClassVar[Mapping[str, str]] = {}
    every_field: ClassVar[set[str]] = {*CONSTRAINT_FIELDS, "response_format", *NOT_MISSPELT}

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        """Collects the fields of all models: a field of another endpoint is not a misspelt one."""
        RequestModel.every_field.update(cls.field_names())

    @classmethod
    def field_names(cls) -> dict[str, str]:
        """Returns the name of each field in JSON, and in Python."""
        return {info.alias or name: name for name, info in cls.model_fields.items()}

    @classmethod
    def prepared(cls, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the JSON object that `parse_request` validates, for forms that a schema cannot say."""
        return data

    @model_validator(mode="before")
    @classmethod
    def _json_values(cls, data: Any) -> Any:
        """Leaves out null, and makes 5.0 the integer 5 as JSON Schema does; fields of type float take integers."""
        if not isinstance(data, dict):
            return data
        integral = lambda v: isinstance(v, float) and v.is_integer()
        return {k: int(v) if integral(v) else v for k, v in data.items() if v is not None}


# Messages


class TextPart(RequestModel):
    """A text in a message."""

    type: Literal["text"]
    text: str
    """The text."""


class ImageUrl(RequestModel):
    """The address of a picture."""

    url: str
    """A data URL: `data:image/png;base64,...`, or jpeg, webp, gif. Other addresses are refused."""
    detail: Literal["auto", "low", "high"] = "auto"
    """Most tokens of the picture: as the model's processor does, 70, or 1120."""


class ImagePart(RequestModel):
    """A picture in a message of the user, for models with a vision tower."""

    type: Literal["image_url"]
    image_url: ImageUrl
    """The picture."""


class RefusalPart(RequestModel):
    """A part of a message of the assistant, as OpenAI's models write it."""

    type: Literal["refusal"]
    refusal: str
    """The text."""


Content = str | Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True)]
UserPart = Annotated[TextPart | ImagePart, Field(discriminator="type")]
UserContent = str | Annotated[list[UserPart], Field(max_length=MAX_PARTS, fail_fast=True)]
AnswerPart = Annotated[TextPart | RefusalPart, Field(discriminator="type")]
AnswerContent = str | Annotated[list[AnswerPart], Field(max_length=MAX_PARTS, fail_fast=True)]


class CalledFunction(RequestModel):
    """The function of a tool call."""

    name: Name
    """Name of the function."""
    arguments: str | JsonObject = ""
    """The arguments: an object, or its JSON as a string."""


class AssistantToolCall(RequestModel):
    """A tool call in the conversation so far."""

    id: CallId
    """The id to which the result refers."""
    type: Literal["function"] = "function"
    """Always function."""
    function: CalledFunction
    """The function that was called."""


class _Message(RequestModel):
    content: Content | None = None
    """A string, or a list of parts of type text."""


class SystemMessage(_Message):
    """A message of the system; developer counts as system."""

    role: Literal["system", "developer"]
    name: ShortText | None = None
    """Name of the speaker."""


class PlainMessage(_Message):
    """A message of the user."""

    role: Literal["user"]
    content: UserContent | None = None  # type: ignore[assignment]
    """A string, or a list of parts of type text or image_url."""
    name: ShortText | None = None
    """Name of the speaker."""


class AssistantMessage(_Message):
    """A message of the model."""

    role: Literal["assistant"]
    content: AnswerContent | None = None  # type: ignore[assignment]
    """A string, or a list of parts of type text or refusal."""
    refusal: str | None = None
    """The text of a refusal. It is the content of a message that has no other."""
    name: ShortText | None = None
    """Name of the speaker."""
    tool_calls: list[AssistantToolCall] | None = Field(None, max_length=MAX_TOOLS, fail_fast=True)
    """The tool calls of this turn."""
    function_call: CalledFunction | None = None
    """A call in OpenAI's older form."""
    prefix: bool = False
    """In the last message: the answer continues this message, instead of beginning a new one."""


class ToolMessage(_Message):
    """The result of a tool call."""

    role: Literal["tool"]
    tool_call_id: CallId
    """Id of the earlier call that this answers."""


class FunctionMessage(_Message):
    """The result of a call in OpenAI's older form."""

    role: Literal["function"]
    name: Name | None = None
    """Name of the function."""


ChatMessage = Annotated[
    SystemMessage | PlainMessage | AssistantMessage | ToolMessage | FunctionMessage,
    Field(discriminator="role"),
]


class UserMessage(RequestModel):
    """The one message of an edit or apply request, in which editors send the texts of files."""

    role: Literal["user"]
    """Always user."""
    content: Content
    """The prompt with its tags."""


# Tools and formats


class FunctionDefinition(RequestModel):
    """A function that the model may call."""

    name: Name
    """Name of the function."""
    description: str | None = None
    """What the function does."""
    parameters: JsonObject | None = None
    """JSON Schema of the arguments."""
    strict: bool = False
    """Whether to refuse a schema that cannot be enforced as a whole. Otherwise the rest of it is checked afterwards."""


class FunctionTool(RequestModel):
    """A tool."""

    refused_fields = {"strict": "Use function.strict."}

    type: Literal["function"]
    function: FunctionDefinition
    """The function that may be called."""


class FunctionName(RequestModel):
    """The name of one of the tools."""

    name: Name
    """One of the tools."""


class NamedTool(RequestModel):
    """Requires a call of one tool."""

    type: Literal["function"]
    function: FunctionName
    """The function that must be called."""


class ToolSubset(RequestModel):
    """A choice among the tools."""

    mode: Literal["auto", "required"]
    """Whether one of them must be called."""
    tools: list[NamedTool] = Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)
    """The tools that may be called."""


class AllowedTools(RequestModel):
    """Restricts calls to some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: ToolSubset
    """The choice."""


ToolChoice = (
    Literal["auto", "required", "none"] | Annotated[NamedTool | AllowedTools, Field(discriminator="type")]
)


class TextFormat(RequestModel):
    """Free text."""

    refused_fields = {
        "schema": "Use the type json_object or json_schema.",
        "json_schema": "Use the type json_schema.",
    }

    type: Literal["text"]


class JsonObjectFormat(RequestModel):
    """Any JSON object, or one that obeys a schema."""

    refused_fields = {"json_schema": "Use the type json_schema, or put the schema in the field schema."}

    type: Literal["json_object"]
    schema_: JsonObject | None = Field(None, alias="schema")
    """The JSON Schema (none: any object)."""


class NamedSchema(RequestModel):
    """A JSON Schema with a name."""

    name: Name
    """Name of the format."""
    description: str | None = None
    """What the format is for."""
    schema_: JsonObject | None = Field(None, alias="schema")
    """The JSON Schema (none: any object)."""
    strict: bool = False
    """Accepted; the schema is always enforced."""


class JsonSchemaFormat(RequestModel):
    """JSON that obeys a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema
    """The schema that the answer obeys."""


AnswerFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


# Endpoints


class Prediction(RequestModel):
    """What the answer is expected to be."""

    type: Literal["content"]
    """Always content."""
    content: Content
    """A string, or a list of parts of type text, which are put together."""

    @property
    def text(self) -> str:
        """The predicted text."""
        content = self.content
        return content if isinstance(content, str) else "".join(part.text for part in content)


class StreamOptions(RequestModel):
    """How to stream."""

    include_usage: bool = False
    """Send one more chunk, with the usage and no choices."""
    continuous_usage_stats: bool = False
    """With `include_usage`: the usage so far in every chunk, as vLLM sends it."""
    include_obfuscation: bool = False
    """Fill each chunk up with random characters in `obfuscation`, so that its size tells little about its text."""


class StructuredOutputs(RequestModel):
    """A constraint on the answer, as vLLM's clients send it. Exactly one field is used."""

    refused_fields = {
        **dict.fromkeys(("structural_tag", "disable_additional_properties"), "Use json."),
        "whitespace_pattern": _GUIDED,
    }

    json_: JsonObject | str | None = Field(None, alias="json")
    """A JSON Schema, or its text."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """As `guided_regex`."""
    choice: Choices | None = None
    """As `guided_choice`."""
    grammar: str | None = None
    """As `guided_grammar`."""


OF_CHAT = {"response_format": _FORMAT, "max_completion_tokens": _LENGTH}  # refused by the other endpoints
# Fields of the endpoints for chat and plain text.
GUIDED_FIELDS = (
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "regex", "ebnf",
)  # fmt: skip
SAMPLED_CONSTRAINTS = {
    name: why for name, why in CONSTRAINT_FIELDS.items() if name not in ("bad_words", *GUIDED_FIELDS)
}


class ApiRequest(RequestModel):
    """Fields of all endpoints. Subclasses add `max_tokens`, whose default differs."""

    refused_fields = {**CONSTRAINT_FIELDS, **OF_CHAT}

    model: str = Field(min_length=1, max_length=256)
    """The model, by its name or one of its aliases."""
    top_p: float = Field(1.0, ge=0, le=1)
    """Sample among the likeliest tokens that make up this probability."""
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    """Subtracted from the logit of a token once per occurrence."""
    presence_penalty: PresencePenalty = 0.0
    stream: bool = False
    """Send the answer as server-sent events while it is written."""
    stream_options: StreamOptions | None = None
    """How to stream; used where `stream` is true."""
    seed: int | None = Field(None, ge=-(1 << 63), le=(1 << 63) - 1)
    """The same seed gives the same text (default: a fresh one)."""
    rule: str | None = Field(None, min_length=1, max_length=64)
    """Decoding rule, such as threshold; the refusal of an unknown one lists those of the server. Its `p` and the
    temperature are the rule's own unless they are given; `reasoning_effort` still sets thinking and steps."""
    rule_params: dict[str, float] | None = Field(None, max_length=16)
    """Parameters of `rule` by name, as in `mj.rules`: {"p": 0.8} for threshold."""
    extra_body: JsonObject | None = None
    """Further fields of this object; those outside of it win."""

    @property
    def stop_sequences(self) -> tuple[str, ...]:
        """Texts that end the answer. The empty text ends nothing."""
        stop = getattr(self, "stop", None)
        return tuple(filter(None, [stop] if isinstance(stop, str) else stop or ()))


class SampledRequest(ApiRequest):
    """Sampling fields of the endpoints for chat and plain text."""

    refused_fields = {**SAMPLED_CONSTRAINTS, **OF_CHAT}

    temperature: float | None = Field(
        None, ge=0, le=2, description=f"{ABOUT_TEMPERATURE} Left out, the decoding rule's own."
    )
    stop: StopSequences | None = Field(None, description=ABOUT_STOP)
    bad_words: Annotated[list[ShortText], Field(max_length=32, fail_fast=True)] | None = None
    """Texts that no answer holds, in whatever tokens. Not with tools, `response_format` or `suffix`."""
    guided_json: JsonObject | str | None = None
    """A JSON Schema that the answer obeys, or its text. At most one such constraint, and no tools, `response_format`,
    `bad_words` or `suffix`; so with the fields below."""
    guided_regex: str | None = None
    """A regular expression that the whole answer matches, in the syntax of Rust's regex crate."""
    guided_choice: Choices | None = None
    """Texts of which the answer is one."""
    guided_grammar: str | None = None
    """A context-free grammar of the answer, in Lark or GBNF."""
    structured_outputs: StructuredOutputs | None = None
    """The same in one object, as vLLM's clients send it."""
    regex: str | None = None
    """SGLang's name of `guided_regex`."""
    ebnf: str | None = None
    """SGLang's name of `guided_grammar`."""
    top_k: int = Field(-1, ge=-1, le=1 << 20)
    """Sample among this many of the likeliest tokens; -1 and 0: all."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Sample among tokens at least this many times as likely as the best."""
    repetition_penalty: RepetitionPenalty = 1.0
    logit_bias: dict[TokenId, LogitBias] | None = Field(None, max_length=512)
    """What to add to the logits of tokens, by their ids."""
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    """Number of answers; answer j to prompt i samples with seed + i n + j."""


class ChatCompletionsRequest(SampledRequest):
    """Body of POST /v1/chat/completions."""

    refused_fields = {
        **SAMPLED_CONSTRAINTS,
        "audio": "Answers are texts.",
        "web_search_options": "Use tools: this server searches nothing itself.",
    }

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    """The conversation so far."""
    max_tokens: int | None = Field(
        None, ge=1, le=MAX_TOKENS, description=f"{ABOUT_MAX_TOKENS} Thinking does not count (default 16384)."
    )
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    """OpenAI's newer name of `max_tokens`; takes precedence."""
    tools: list[FunctionTool] | None = Field(None, max_length=MAX_TOOLS, fail_fast=True)
    """Functions that the model may call."""
    tool_choice: ToolChoice | None = None
    """Whether a tool is called: as the model decides, always, never, this one, or one of these."""
    continue_final_message: bool = False
    """Continue the last message, the assistant's, instead of beginning a new one; the answer is the new text only."""
    add_generation_prompt: bool = True
    """False: as `continue_final_message`."""
    parallel_tool_calls: bool = True
    """Whether one answer may hold several tool calls."""
    response_format: AnswerFormat | None = None
    """What the answer obeys: nothing, any JSON object, or a schema."""
    prediction: Prediction | None = None
    """The text that the answer is expected to be, such as a file of which one line changes. It makes the answer faster
    where it is right; see docs/serving.md. Without effect with `response_format`, tools and other constraints."""
    modalities: list[Literal["text"]] | None = Field(None, max_length=4)
    """What the answer is: a text."""
    reasoning_effort: ReasoningEffort | None = None
    """How long to think and how strictly to accept tokens; `max_tokens` is kept for the answer."""
    reasoning_summary: bool = False
    """Report the thinking."""
    reasoning_summary_wait: bool = False
    """Accepted; a stream always waits for its summary."""
    diffusing: bool = False
    """With stream: each chunk holds the whole current text."""
    realtime: bool = False
    """Answer at once: reasoning_effort instant, unless it is set."""
    logprobs: bool = False
    """Report the logprobs of the answer's tokens."""
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    """With logprobs: number of alternatives per token."""


def _prompt_kind(value: Any) -> str:
    """Says which kind of prompt a value is meant to be, by its first entry."""
    first = value[0] if isinstance(value, list) and value else value
    if isinstance(value, list) and isinstance(first, list):
        return "lists of ids"
    if not isinstance(value, list):
        return "text"
    return "ids" if isinstance(first, int | float) and not isinstance(first, bool) else "texts"


PromptId = Annotated[int, Field(ge=0, le=(1 << 31) - 1)]
PromptIds = Annotated[list[PromptId], Field(min_length=1, max_length=MAX_TOKENS, fail_fast=True)]
Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True), Tag("texts")]
    | Annotated[PromptIds, Tag("ids")]
    | Annotated[
        list[PromptIds], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True), Tag("lists of ids")
    ],
    Discriminator(_prompt_kind),
]


class CompletionsRequest(SampledRequest):
    """Body of POST /v1/completions."""

    prompt: Prompt
    """The text to continue, or its token ids; or a list of several."""
    suffix: str | None = None
    """Text behind the answer, which then fills the gap."""
    max_tokens: int = Field(512, ge=0, le=MAX_TOKENS, description=f"{ABOUT_MAX_TOKENS} 0: no answer.")
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    """Report logprobs, with this many alternatives."""
    echo: bool = False
    """Put the prompt in front of the answer; with `logprobs` also those of its tokens, each given all before it."""
    best_of: int = Field(1, ge=1, le=1)
    """Not supported: every answer that is generated is returned."""


class FimCompletionsRequest(ApiRequest):
    """Body of POST /v1/fim/completions."""

    prompt: str
    """The text before the gap."""
    suffix: str = ""
    """The text behind the gap."""
    max_tokens: MaxTokens = 512
    top_k: Literal[-1] | Annotated[int, Field(ge=1, le=1000)] = -1
    """Sample among this many of the likeliest tokens; -1: all, 0 is refused."""
    presence_penalty: PresencePenalty = 1.5
    repetition_penalty: RepetitionPenalty = 1.0
    stop: StopSequences | None = Field(["\n\n", "\n \n"], description=ABOUT_STOP)


class EditCompletionsRequest(ApiRequest):
    """Body of POST /v1/edit/completions."""

    messages: list[UserMessage] = Field(min_length=1, max_length=1)
    """Exactly one message of the user."""
    max_tokens: MaxTokens = 1024
    temperature: float = Field(0.2, ge=0, le=2, description=ABOUT_TEMPERATURE)
    presence_penalty: PresencePenalty = 1.0


class ApplyCompletionsRequest(ApiRequest):
    """Body of POST /v1/apply/completions."""

    messages: list[UserMessage] = Field(min_length=1, max_length=1)
    """Exactly one message of the user."""
    max_tokens: MaxTokens = 8192
    temperature: float = Field(0.0, ge=0, le=2, description=ABOUT_TEMPERATURE)


# From JSON to a model

Request = TypeVar("Request", bound=RequestModel)


def parse_request(model: type[Request], data: Mapping[str, Any]) -> Request:
    """Validates a JSON object.

    Fields of `extra_body` count as fields of the object where the object itself does not have them: clients of
    OpenAI's SDK send there what the SDK has no argument for.
    """
    extra = data.get("extra_body")
    if isinstance(extra, dict) and "extra_body" in model.model_fields:
        data = {**{name: value for name, value in extra.items() if name != "extra_body"}, **data}
    data, unknown = model.prepared(data), set[str]()
    check_names(model, data, "", unknown)
    try:
        made = model.model_validate(data)
    except ValidationError as error:
        raise validation_error(request_schema(model), data, error) from None
    _check_inner(made, data, "", unknown)
    return made


def check_names(model: type[RequestModel], data: Mapping[str, Any], path: str, unknown: set[str]) -> None:
    """Refuses unknown fields that must not be ignored: those that the model refuses by name, and misspelt ones.

    Args:
        unknown: Unknown fields of the request so far, to which those of the object are added. Beyond `MAX_UNKNOWN`
            misspelt ones are no longer looked for, since that takes time.
    """
    for name, instead in model.refused_fields.items():
        # a client that sends both spellings
        other = instead == _LENGTH and data.get("max_tokens") is not None
        if data.get(name) not in unused_values(name) and not other:
            allowed = f"no value, since this endpoint has no such field. {instead}"
            raise invalid_value(f"{path}{name}", data[name], allowed)
    known = model.field_names()
    found = [name for name in data if name not in known]
    unknown.update(found)
    for name in found if len(unknown) <= MAX_UNKNOWN else ():
        near = None if data[name] is None else _nearest_field(model, name[:64])
        if near is not None and near not in data:  # the AI SDK sends `logitBias` beside `logit_bias`
            message = f"{path}{name[:64]} is not a field; did you mean {near}?"
            raise ApiError(400, message, param=f"{path}{name[:64]}", code="unknown_parameter")


def unused_values(name: str) -> tuple[Any, ...]:
    """Returns the values by which clients say that they do not use a field."""
    return (
        (None, False, 0) if name == "web_search_options" else UNUSED
    )  # {} asks for a search with all defaults


@functools.lru_cache(4096)
def _nearest_field(model: type[RequestModel], name: str) -> str | None:
    if name in RequestModel.every_field:
        return None
    words = name.lower().replace("-", "_")
    return next(iter(difflib.get_close_matches(words, model.field_names(), 1, SIMILARITY)), None)


def _check_inner(made: RequestModel, data: Mapping[str, Any], path: str, unknown: set[str]) -> None:
    """Applies `check_names` to the objects within a valid request."""
    for name, field in made.field_names().items():
        value = getattr(made, field)
        many = isinstance(value, list)
        for i, inner in enumerate(value if many else (value,)):
            if not isinstance(inner, RequestModel):
                break  # lists hold things of one kind
            raw, at = (data[name][i], f"{path}{name}[{i}].") if many else (data[name], f"{path}{name}.")
            check_names(type(inner), raw, at, unknown)
            _check_inner(inner, raw, at, unknown)


class RequestJsonSchema(GenerateJsonSchema):
    """JSON Schema of a request model as OpenAPI needs it: fields with a default may be null, and have no titles."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Omits titles, which only repeat the names."""
        return False

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        """Lets a field with a default be null; a default of null goes without saying."""
        made = super().default_schema(schema)
        if made.get("default", ...) is None:
            del made["default"]
        if {"type": "null"} in made.get("anyOf", ()):
            return made
        default = {"default": made.pop("default")} if "default" in made else {}
        return {"anyOf": [made, {"type": "null"}]} | default

    def dict_schema(self, schema: core_schema.DictSchema) -> JsonSchemaValue:
        """Makes a pattern of keys a condition on every key."""
        made = super().dict_schema(schema)
        # pydantic writes `patternProperties`, which allows keys that do not match.
        for pattern, values in made.pop("patternProperties", {}).items():
            made |= {"propertyNames": {"pattern": pattern}, "additionalProperties": values}
        return made


@functools.cache
def request_schema(model: type[RequestModel]) -> JsonSchemaValue:
    """Returns the JSON Schema of a request model, with `$defs`."""
    return model.model_json_schema(schema_generator=RequestJsonSchema)


def refused_properties(model: type[RequestModel]) -> JsonSchemaValue:
    """Returns the schemas of the fields that a model refuses: only values that mean "not used" are valid."""
    return {
        name: {"enum": list(unused_values(name)), "description": f"Refused. {instead}"}
        for name, instead in model.refused_fields.items()
    }
