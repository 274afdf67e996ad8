"""JSON of all responses: their types, and the functions that build them.

The types follow the vendor's document, which reports usage twice: in flat fields, and nested as in OpenAI's API.
`openapi.py` writes the JSON Schemas of the types, and the tests validate every response against these schemas.
"""

from __future__ import annotations

import codecs
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, NotRequired

from pydantic import Field
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

from mercury_jax.decode.likelihood import prefix_log_p
from mercury_jax.serve.chat.output_parser import ParsedCall, ParsedCallDelta, ParsedMessage
from mercury_jax.serve.engine.request import Snapshot
from mercury_jax.types import LM

MIN_LOGPROB = -9999.0  # represents a probability of 0, as in OpenAI's API

Count = Annotated[int, Field(ge=0)]
FinishReason = Literal["stop", "length", "tool_calls"]


class CallFunction(TypedDict):
    """The function of a tool call; the arguments are JSON."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """A tool call."""

    index: Count
    id: str
    type: Literal["function"]
    function: CallFunction


class CallFunctionDelta(TypedDict):
    """What is new of the function of a tool call."""

    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    """A part of a tool call. Only the first one has the id, the type and the name."""

    index: Count
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: CallFunctionDelta


class AnswerText(TypedDict):
    """A message without tool calls."""

    role: Literal["assistant"]
    content: str | None


class AnswerMessage(AnswerText):
    """A message, which may call tools. `refusal` is always null: a refusal is content."""

    refusal: None
    tool_calls: NotRequired[list[ToolCall]]


class AnswerTextDelta(TypedDict, total=False):
    """What is new of a message without tool calls."""

    role: Literal["assistant"]
    content: str


class AnswerMessageDelta(AnswerTextDelta, total=False):
    """What is new of a message."""

    tool_calls: list[ToolCallDelta]


class TokenLogprob(TypedDict):
    """A token with its log-probability, in nats."""

    token: str
    logprob: float
    bytes: list[Count]


class TokenLogprobs(TokenLogprob):
    """A token of the answer and its alternatives."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(TypedDict):
    """Logprobs of a chat answer. The content is null if the answer has none, as one that only calls tools."""

    content: list[TokenLogprobs] | None
    refusal: None


class TextLogprobs(TypedDict):
    """Logprobs of a text completion; null for the first token of a prompt, and for the end of a text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[Count]


class _Choice(TypedDict):
    index: Count
    finish_reason: FinishReason | None


class ChatChoice(_Choice):
    """One answer of a chat."""

    message: AnswerMessage
    logprobs: ChatLogprobs | None


class ChatChunkChoice(_Choice):
    """What is new of one answer of a chat."""

    delta: AnswerMessageDelta
    logprobs: ChatLogprobs | None


class TextChoice(_Choice):
    """One text, or what is new of it."""

    text: str
    logprobs: TextLogprobs | None


class EditChoice(_Choice):
    """An edited or merged text."""

    message: AnswerText


class EditChunkChoice(_Choice):
    """What is new of an edited or merged text."""

    delta: AnswerTextDelta


class CachedTokens(TypedDict):
    """Tokens of the prompt found in the prefix cache."""

    cached_tokens: Count


class CompletionDetails(TypedDict):
    """Tokens of thinking; of a request with a prediction, also its tokens that the answer has, and its others."""

    reasoning_tokens: Count
    accepted_prediction_tokens: NotRequired[Count]
    rejected_prediction_tokens: NotRequired[Count]


class Usage(TypedDict):
    """Tokens of a request. The completion's include those of thinking."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    reasoning_tokens: Count
    cached_input_tokens: Count
    prompt_tokens_details: CachedTokens
    completion_tokens_details: CompletionDetails


class ReasoningSummary(TypedDict):
    """The thinking, of requests with `reasoning_summary`."""

    content: str | None
    status: Literal["complete", "unavailable", "skipped"]


class DiffusionMeta(TypedDict):
    """Share of the tokens that are accepted; 1 in the last chunk only."""

    diffusion_progress: Annotated[float, Field(ge=0, le=1)]


class _Response(TypedDict):
    id: str
    created: Count
    model: str
    warning: NotRequired[str]
    reasoning_summary: NotRequired[ReasoningSummary]


class _Completion(_Response):
    usage: Usage


class _Chunk(_Response):
    usage: NotRequired[Usage | None]
    obfuscation: NotRequired[str]
    diffusion_meta: NotRequired[DiffusionMeta]


class ChatCompletion(_Completion):
    """Response of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class ChatCompletionChunk(_Chunk):
    """Event of a streamed chat."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class TextCompletion(_Completion):
    """Response of /v1/completions and /v1/fim/completions."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class TextChunk(_Chunk):
    """Event of a streamed text."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class EditCompletion(_Completion):
    """Response of /v1/edit/completions and /v1/apply/completions."""

    object: Literal["edit.completion"]
    choices: list[EditChoice]


class EditChunk(_Chunk):
    """Event of a streamed edit."""

    object: Literal["edit.completion.chunk"]
    choices: list[EditChunkChoice]


class Pricing(TypedDict):
    """Prices per token; all are 0."""

    prompt: str
    completion: str
    input_cache_reads: str
    input_cache_writes: str


class ModelObject(TypedDict):
    """A model, as the vendor describes it, with OpenAI's `object` and `owned_by`."""

    id: str
    object: Literal["model"]
    owned_by: str
    name: str
    created: Count
    description: str
    input_modalities: list[str]
    output_modalities: list[str]
    context_length: Count
    max_output_length: Count
    pricing: Pricing
    supported_sampling_parameters: list[str]
    supported_features: list[str]
    supported_endpoints: list[str]


class ModelList(TypedDict):
    """Response of the routes that list models."""

    object: Literal["list"]
    data: list[ModelObject]


class Status(TypedDict):
    """Response of /health and /ready."""

    status: str


class ErrorBody(TypedDict):
    """What went wrong, and in which field."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(TypedDict):
    """Response of every refused or failed request."""

    error: ErrorBody


JsonDict = dict[str, Any]


class ResponseKind(NamedTuple):
    """The differences between endpoints.

    Attributes:
        completion: `object` of a response.
        chunk: `object` of an event.
        prefix: Start of the ids.
        message: Whether a choice has a message instead of a text.
        logprobs: Whether a choice has logprobs, and a message a refusal; null where there are none.
    """

    completion: str
    chunk: str
    prefix: str
    message: bool
    logprobs: bool


CHAT = ResponseKind("chat.completion", "chat.completion.chunk", "chatcmpl-", True, True)
TEXT = ResponseKind("text_completion", "text_completion", "cmpl-", False, True)
EDIT = ResponseKind("edit.completion", "edit.completion.chunk", "cmpl-", True, False)


class ResponseWriter:
    """Builds the JSON of one response: a completion, or the chunks of a stream, under one id."""

    def __init__(self, kind: ResponseKind, model: str):
        self.kind = kind
        self._head = {"id": kind.prefix + secrets.token_hex(12), "created": int(time.time()), "model": model}

    def completion(self, choices: Sequence[JsonDict], usage: Usage, extra: Mapping[str, Any]) -> JsonDict:
        """Builds a complete response.

        Args:
            extra: Further fields: a warning, a summary of the thinking.
        """
        body: JsonDict = {"choices": list(choices), "usage": usage}
        return {"object": self.kind.completion, **self._head, **body, **extra}

    def chunk(self, choices: Sequence[JsonDict], extra: Mapping[str, Any] | None = None) -> JsonDict:
        """Builds one event of a stream."""
        return {"object": self.kind.chunk, **self._head, "choices": list(choices), **(extra or {})}

    def choice(
        self, index: int, text: str, calls: Sequence[ParsedCall], finish: str, logprobs: JsonDict | None
    ) -> JsonDict:
        """Builds a complete choice."""
        body: JsonDict = {"text": text}
        if self.kind.message:
            body = {"message": {"role": "assistant", "content": text if text or not calls else None}}
            if calls:
                body["message"]["tool_calls"] = [
                    {"index": i, **_tool_call(call.id, call.name, call.arguments)}
                    for i, call in enumerate(calls)
                ]
            if self.kind.logprobs:
                body["message"]["refusal"] = None
        return {"index": index, "finish_reason": finish, **body, **self._logprobs(logprobs)}

    def chunk_choice(
        self,
        index: int,
        text: str | None = None,
        calls: Sequence[ParsedCallDelta] = (),
        *,
        first: bool = False,
        finish: str | None = None,
        logprobs: JsonDict | None = None,
    ) -> JsonDict:
        """Builds a choice of a chunk."""
        choice: JsonDict = {"index": index, "text": text or "", "finish_reason": finish}
        if self.kind.message:
            delta: JsonDict = {"role": "assistant"} if first else {}
            if text is not None:
                delta["content"] = text
            if calls:
                delta["tool_calls"] = [
                    {"index": call.index, **_tool_call(call.id, call.name, call.arguments)} for call in calls
                ]
            choice = {"index": index, "delta": delta, "finish_reason": finish}
        return {**choice, **self._logprobs(logprobs)}

    def _logprobs(self, logprobs: JsonDict | None) -> JsonDict:
        return {"logprobs": logprobs} if self.kind.logprobs else {}


def _tool_call(id: str | None, name: str | None, arguments: str) -> JsonDict:
    """Builds a tool call or a delta of one; only the first delta of a call has id, type and name."""
    if id is None:
        return {"function": {"arguments": arguments}}
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def content_logprobs(lm: LM, snapshot: Snapshot, message: ParsedMessage, top: int) -> list[TokenLogprobs]:
    """Builds the logprobs of the tokens of an answer."""
    logprobs, at = snapshot.logprobs, [i for i, _ in message.content_offsets]
    assert logprobs is not None
    # For each token: its id, its log-probability, ids of the alternatives [K] and their log-probabilities [K].
    rows = (snapshot.tokens, logprobs.tokens, logprobs.top_ids, logprobs.top)
    content: list[TokenLogprobs] = []
    for token, value, ids, values in zip(*(row[at] for row in rows), strict=True):
        alternatives = [_token_logprob(lm, i, v) for i, v in zip(ids[:top], values[:top])]
        content.append({**_token_logprob(lm, token, value), "top_logprobs": alternatives})
    return content


def text_logprobs(lm: LM, snapshot: Snapshot, message: ParsedMessage, top: int) -> TextLogprobs:
    """Builds the logprobs of a text completion."""
    made: TextLogprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    entries = content_logprobs(lm, snapshot, message, top)
    for entry, (_, offset) in zip(entries, message.content_offsets, strict=True):
        made["tokens"].append(entry["token"])
        made["token_logprobs"].append(entry["logprob"])
        # Tokens with the same text share a key: the likeliest, which comes first, is kept.
        ordered = reversed(entry["top_logprobs"])
        made["top_logprobs"].append({other["token"]: other["logprob"] for other in ordered})
        made["text_offset"].append(offset)
    return made


class EchoedPrompt(NamedTuple):
    """A prompt in front of its answer, with its logprobs if they are requested."""

    text: str
    logprobs: TextLogprobs | None

    def followed_by(self, answer: TextLogprobs | None) -> TextLogprobs | None:
        """Returns the logprobs of the prompt and of its answer."""
        if self.logprobs is None or answer is None:
            return self.logprobs or answer
        moved = [len(self.text) + offset for offset in answer["text_offset"]]
        # Clients cut off the answer by its number of tokens: an answer that ends at once is one token, the end.
        if not answer["tokens"]:
            answer = {"tokens": [""], "token_logprobs": [None], "top_logprobs": [None], "text_offset": []}
            moved = [len(self.text)]
        return {
            "tokens": self.logprobs["tokens"] + answer["tokens"],
            "token_logprobs": self.logprobs["token_logprobs"] + answer["token_logprobs"],
            "top_logprobs": self.logprobs["top_logprobs"] + answer["top_logprobs"],
            "text_offset": self.logprobs["text_offset"] + moved,
        }


def prompt_logprobs(lm: LM, ids: Sequence[int], top: int) -> TextLogprobs:
    """Builds the logprobs of a prompt. The first token, which has none before it, has none."""
    log_p, top_ids, best = prefix_log_p(lm, ids)
    made: TextLogprobs = {
        "tokens": [_token_logprob(lm, token, 0.0)["token"] for token in ids],
        "token_logprobs": [None],
        "top_logprobs": [None],
        "text_offset": [],
    }
    decoder, size = codecs.getincrementaldecoder("utf-8")("replace"), 0
    for token in ids:
        made["text_offset"].append(size)
        size += len(decoder.decode(_piece(lm, token)))
    for token, value, alternatives, values in zip(ids[1:], log_p, top_ids, best, strict=True):
        made["token_logprobs"].append(_token_logprob(lm, token, value)["logprob"])
        entries = [_token_logprob(lm, i, v) for i, v in zip(alternatives[:top], values[:top], strict=True)]
        made["top_logprobs"].append({entry["token"]: entry["logprob"] for entry in reversed(entries)})
    return made


def _piece(lm: LM, token: int) -> bytes:
    return lm.tokenizer.pieces[int(token)] if token < len(lm.tokenizer.pieces) else b""


def _token_logprob(lm: LM, token: int, logprob: float) -> TokenLogprob:
    raw, value = _piece(lm, token), float(logprob)
    value = MIN_LOGPROB if math.isnan(value) else round(max(value, MIN_LOGPROB), 6)
    return {"token": raw.decode("utf-8", "replace"), "logprob": value, "bytes": list(raw)}
