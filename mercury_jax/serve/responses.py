"""JSON of all responses: their types, and the functions that build them.

The types follow the vendor's document, which names usage both flat and nested as OpenAI does. `openapi.py` writes
their JSON Schemas, and the tests validate every response against those.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, NotRequired

import numpy as np
from pydantic import Field
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

from mercury_jax.decode.output import LogProbs
from mercury_jax.serve.chat.reply import Call, CallDelta, Message
from mercury_jax.serve.engine.types import Snapshot
from mercury_jax.types import LM

MIN_LOGPROB = -9999.0  # stands for a probability of 0, as with OpenAI

Count = Annotated[int, Field(ge=0)]
FinishReason = Literal["stop", "length", "tool_calls"]


class CallFunction(TypedDict):
    name: str
    arguments: str


class ToolCall(TypedDict):
    index: Count
    id: str
    type: Literal["function"]
    function: CallFunction


class CallFunctionDelta(TypedDict):
    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    """A part of a tool call. Only the first one has the id, the type and the name."""

    index: Count
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: CallFunctionDelta


class AnswerText(TypedDict):
    role: Literal["assistant"]
    content: str | None


class AnswerMessage(AnswerText):
    tool_calls: NotRequired[list[ToolCall]]


class AnswerTextDelta(TypedDict, total=False):
    role: Literal["assistant"]
    content: str


class AnswerMessageDelta(AnswerTextDelta, total=False):
    tool_calls: list[ToolCallDelta]


class TokenLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[Count]


class TokenLogprobs(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(TypedDict):
    content: list[TokenLogprobs]


class TextLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[Count]


class _Choice(TypedDict):
    index: Count
    finish_reason: FinishReason | None


class ChatChoice(_Choice):
    message: AnswerMessage
    logprobs: NotRequired[ChatLogprobs]


class ChatChunkChoice(_Choice):
    delta: AnswerMessageDelta
    logprobs: NotRequired[ChatLogprobs]


class TextChoice(_Choice):
    text: str
    logprobs: NotRequired[TextLogprobs]


class EditChoice(_Choice):
    message: AnswerText


class EditChunkChoice(_Choice):
    delta: AnswerTextDelta


class CachedTokens(TypedDict):
    cached_tokens: Count


class ReasoningTokens(TypedDict):
    reasoning_tokens: Count


class Usage(TypedDict):
    """Tokens of a request. The completion's include those of thinking."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    reasoning_tokens: Count
    cached_input_tokens: Count
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens


class ReasoningSummary(TypedDict):
    content: str | None
    status: Literal["complete", "unavailable", "skipped"]


class DiffusionMeta(TypedDict):
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
    usage: NotRequired[Usage]
    diffusion_meta: NotRequired[DiffusionMeta]


class ChatCompletion(_Completion):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class ChatCompletionChunk(_Chunk):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class TextCompletion(_Completion):
    object: Literal["text_completion"]
    choices: list[TextChoice]


class TextChunk(_Chunk):
    object: Literal["text_completion"]
    choices: list[TextChoice]


class EditCompletion(_Completion):
    object: Literal["edit.completion"]
    choices: list[EditChoice]


class EditChunk(_Chunk):
    object: Literal["edit.completion.chunk"]
    choices: list[EditChunkChoice]


class Pricing(TypedDict):
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
    object: Literal["list"]
    data: list[ModelObject]


class Status(TypedDict):
    status: str


class ErrorBody(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(TypedDict):
    error: ErrorBody


JsonDict = dict[str, Any]


class ResponseKind(NamedTuple):
    """What differs between the endpoints: names of the objects, prefix of the ids, and messages or plain text."""

    completion: str
    chunk: str
    prefix: str
    message: bool


CHAT = ResponseKind("chat.completion", "chat.completion.chunk", "chatcmpl-", True)
TEXT = ResponseKind("text_completion", "text_completion", "cmpl-", False)
EDIT = ResponseKind("edit.completion", "edit.completion.chunk", "cmpl-", True)


def usage(*, prompt: int, completion: int, reasoning: int, cached: int) -> Usage:
    """Returns the usage of a request.

    Args:
        prompt: Tokens of all prompts.
        completion: Tokens of all answers, thinking included.
        reasoning: Of these, tokens of thinking.
        cached: Of the prompts' tokens, those whose keys and values were in the prefix cache.
    """
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "reasoning_tokens": reasoning,
        "cached_input_tokens": cached,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }


class ResponseWriter:
    """Builds the JSON of one response: a completion, or the chunks of a stream, under one id.

    Args:
        kind: Kind of the endpoint.
        model: The model's name as the client wrote it.
    """

    def __init__(self, kind: ResponseKind, model: str):
        self.kind = kind
        self._head = {"id": kind.prefix + secrets.token_hex(12), "created": int(time.time()), "model": model}

    def completion(self, choices: Sequence[JsonDict], usage: Usage, extra: Mapping[str, Any]) -> JsonDict:
        """Returns the whole response; `extra` holds a warning and a reasoning summary."""
        return {
            "object": self.kind.completion,
            **self._head,
            "choices": list(choices),
            "usage": usage,
            **extra,
        }

    def chunk(self, choices: Sequence[JsonDict], extra: Mapping[str, Any] | None = None) -> JsonDict:
        """Returns one event of a stream; `extra` holds what stands beside the choices."""
        return {"object": self.kind.chunk, **self._head, "choices": list(choices), **(extra or {})}

    def choice(
        self, index: int, text: str, calls: Sequence[Call], finish: str, logprobs: JsonDict | None
    ) -> JsonDict:
        """Returns a whole choice. The content of a message that only calls tools is null."""
        body: JsonDict = {"text": text}
        if self.kind.message:
            body = {"message": {"role": "assistant", "content": text if text or not calls else None}}
            if calls:
                body["message"]["tool_calls"] = [_tool_call(i, call) for i, call in enumerate(calls)]
        return {"index": index, "finish_reason": finish, **body} | _with_logprobs(logprobs)

    def first_choice(self, index: int) -> JsonDict | None:
        """Returns the choice of a first chunk, which only has the role; None for plain text."""
        return self._delta(index, {"role": "assistant"}) if self.kind.message else None

    def delta_choice(self, index: int, text: str, calls: Sequence[CallDelta] = ()) -> JsonDict:
        """Returns what is new of a choice."""
        if not self.kind.message:
            return {"index": index, "text": text, "finish_reason": None}
        delta: JsonDict = {"content": text} if text else {}
        if calls:
            delta["tool_calls"] = [_tool_call_delta(call) for call in calls]
        return self._delta(index, delta)

    def canvas_choice(self, index: int, text: str) -> JsonDict:
        """Returns the whole current text, which replaces what the client had, even by nothing."""
        if not self.kind.message:
            return self.delta_choice(index, text)
        return self._delta(index, {"content": text})

    def last_choice(self, index: int, finish: str, logprobs: JsonDict | None) -> JsonDict:
        """Returns the choice of a last chunk, with the reason of the end."""
        if self.kind.message:
            choice = self._delta(index, {}, finish)
        else:
            choice = {"index": index, "text": "", "finish_reason": finish}
        return choice | _with_logprobs(logprobs)

    @staticmethod
    def _delta(index: int, delta: JsonDict, finish: str | None = None) -> JsonDict:
        return {"index": index, "delta": delta, "finish_reason": finish}


def _with_logprobs(logprobs: JsonDict | None) -> JsonDict:
    return {} if logprobs is None else {"logprobs": logprobs}


def _tool_call(index: int, call: Call) -> JsonDict:
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": index, "id": call.id, "type": "function", "function": function}


def _tool_call_delta(call: CallDelta) -> JsonDict:
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def chat_logprobs(lm: LM, snapshot: Snapshot, message: Message, top: int) -> ChatLogprobs:
    """Returns the logprobs of a chat answer, without those of its thinking.

    Args:
        lm: The model, whose tokenizer spells the tokens.
        snapshot: The last snapshot, which has `logprobs`.
        message: The answer, which says how many tokens were thinking.
        top: Alternatives per token.
    """
    content: list[TokenLogprobs] = []
    for token, value, ids, values in _answer_rows(snapshot, message):
        alternatives = [_token_logprob(lm, i, v) for i, v in zip(ids[:top], values[:top])]
        content.append({**_token_logprob(lm, token, value), "top_logprobs": alternatives})
    return {"content": content}


def text_logprobs(lm: LM, snapshot: Snapshot, message: Message, top: int) -> TextLogprobs:
    """Returns the logprobs of a text completion. Offsets count characters.

    Args:
        lm: The model, whose tokenizer spells the tokens.
        snapshot: The last snapshot, which has `logprobs`.
        message: The answer.
        top: Alternatives per token.
    """
    made: TextLogprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    offset = 0
    for token, value, ids, values in _answer_rows(snapshot, message):
        entry = _token_logprob(lm, token, value)
        others = (_token_logprob(lm, i, v) for i, v in zip(ids[:top], values[:top]))
        made["tokens"].append(entry["token"])
        made["token_logprobs"].append(entry["logprob"])
        made["top_logprobs"].append({other["token"]: other["logprob"] for other in others})
        made["text_offset"].append(offset)
        offset += len(entry["token"])
    return made


def _answer_rows(snapshot: Snapshot, message: Message) -> Iterator[tuple[int, float, np.ndarray, np.ndarray]]:
    """Yields (token, logprob, ids of the alternatives [K], their logprobs [K]) of each token of the answer."""
    logprobs: LogProbs = snapshot.logprobs
    answer = slice(message.reasoning_tokens, message.completion_tokens)
    rows = (snapshot.tokens, logprobs.tokens, logprobs.top_ids, logprobs.top)
    return zip(*(row[answer] for row in rows), strict=True)


def _token_logprob(lm: LM, token: int, logprob: float) -> TokenLogprob:
    raw, value = lm.tokenizer.pieces[int(token)], float(logprob)
    value = MIN_LOGPROB if math.isnan(value) else round(max(value, MIN_LOGPROB), 6)
    return {"token": raw.decode("utf-8", "replace"), "logprob": value, "bytes": list(raw)}
