"""What an endpoint says about its response, and what a writer makes of the answers.

An endpoint makes a `ResponsePlan`. `streaming.Responder` reads the answers and passes them to the `AnswerWriter` of the
plan, which writes them in the form of an API: `completion_writer` writes the objects of the completions endpoints,
`dialects` those of the Responses API and of the Messages API.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from mercury_jax.serve.chat.output_parser import OutputDelta, OutputParser, ParsedMessage
from mercury_jax.serve.engine.request import Snapshot
from mercury_jax.serve.engine_requests import Continuation
from mercury_jax.serve.errors import ApiError
from mercury_jax.serve.protocol import ApiRequest
from mercury_jax.serve.responses import CompletionDetails, EchoedPrompt, JsonDict, ResponseKind, Usage

Events = Iterator[bytes]  # in the format of server-sent events


class ResponsePlan(NamedTuple):
    """How the answers to one request are parsed and written.

    Attributes:
        kind: Names of the endpoint's objects.
        request: The API request.
        prompt_tokens: Number of tokens of all prompts.
        parser: Makes a new parser for one answer.
        answers_per_prompt: Number of jobs per prompt; the jobs of a prompt are adjacent.
        prediction_tokens: Number of tokens of the prediction.
        diffusing: Whether each chunk of the stream has the whole current text instead of a delta.
        reasoning_summary: Whether to report the thinking.
        thinks: Whether the prompt starts a thinking section.
        warning: A warning for the response.
        finish_content: Makes the content from (text, finish reason) at the end; no text is streamed before. None: the
            text is the content.
        check: Says whether an answer satisfies its schema.
        valid: Says whether an answer is valid where no grammar enforces it. One that is not is decoded once more.
        strict: Whether such an answer is decoded up to RETRIES times more, and is an error if `check` fails after them.
            It is not streamed before it is complete.
        logprobs: Makes the log-probabilities of an answer, in the form of the endpoint.
        echoes: The prompts, which come in front of their answers; empty unless that is requested.
        continuation: Makes the job that continues an answer that ended without content.
        writer: Makes the writer of the response. None: `completion_writer.CompletionWriter`.
    """

    kind: ResponseKind
    request: ApiRequest
    prompt_tokens: int
    parser: Callable[[], OutputParser]
    answers_per_prompt: int = 1
    prediction_tokens: int = 0
    diffusing: bool = False
    reasoning_summary: bool = False
    thinks: bool = False
    warning: str | None = None
    finish_content: Callable[[str, str], str] | None = None
    check: Callable[[ParsedMessage], bool] | None = None
    valid: Callable[[ParsedMessage], bool] | None = None
    strict: bool = False
    logprobs: Callable[[Snapshot, ParsedMessage], Any] | None = None
    echoes: Sequence[EchoedPrompt] = ()
    continuation: Continuation | None = None
    writer: Callable[[ResponsePlan], AnswerWriter] | None = None


class FinishedAnswer(NamedTuple):
    """A complete answer: its content, parsed message, finish reason, last snapshot and logprobs."""

    text: str
    message: ParsedMessage
    finish_reason: str
    snapshot: Snapshot
    logprobs: JsonDict | None


def usage_of(plan: ResponsePlan, read: Mapping[int, tuple[OutputParser, Snapshot]]) -> Usage:
    """Sums the usage of all answers so far. Each prompt is counted once, whatever its number of answers.

    Args:
        read: By answer, its parser and its last snapshot.
    """
    counts = [parser.counts for parser, _ in read.values()]
    reasoning, completion = (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0)
    cached = sum(read[i][1].cached for i in read if i % plan.answers_per_prompt == 0)
    details: CompletionDetails = {"reasoning_tokens": reasoning}
    if plan.prediction_tokens:
        accepted = sum(snapshot.predicted for _, snapshot in read.values())
        details["accepted_prediction_tokens"] = accepted
        details["rejected_prediction_tokens"] = plan.prediction_tokens * len(read) - accepted
    return {
        "prompt_tokens": plan.prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": plan.prompt_tokens + completion,
        "reasoning_tokens": reasoning,
        "cached_input_tokens": cached,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": details,
    }


class AnswerWriter(Protocol):
    """Writes the response to one request in the form of an API.

    A response without a stream is written by the same calls, whose events are dropped, and by `body` at the end.
    """

    def begin(self, count: int) -> Events:
        """Writes the events before the first answer.

        Args:
            count: Number of answers.

        Returns:
            The events.
        """
        ...

    def update(self, i: int, snapshot: Snapshot, delta: OutputDelta, parser: OutputParser) -> Events:
        """Writes the events of a snapshot.

        Args:
            i: Number of the answer.
            snapshot: The newest state of the answer.
            delta: What the parser made of it.
            parser: The parser of the answer, for previews.

        Returns:
            The events.
        """
        ...

    def finish(self, i: int, answer: FinishedAnswer) -> Events:
        """Writes the events at the end of an answer.

        Args:
            i: Number of the answer.
            answer: The complete answer.

        Returns:
            The events.
        """
        ...

    def end(self, answers: Sequence[FinishedAnswer], usage: Usage) -> Events:
        """Writes the events behind all answers.

        Args:
            answers: All of them, by number.
            usage: Their tokens.

        Returns:
            The events.
        """
        ...

    def fail(self, error: ApiError) -> Events:
        """Writes the events that end a stream with an error, whose status 200 has been sent already.

        Args:
            error: What ended the answers.

        Returns:
            The events.
        """
        ...

    def body(self, answers: Sequence[FinishedAnswer], usage: Usage) -> JsonDict:
        """Makes a response that is not streamed.

        Args:
            answers: All of them, by number.
            usage: Their tokens.

        Returns:
            The JSON.
        """
        ...
