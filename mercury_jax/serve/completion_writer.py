"""The writer of the completions endpoints: chat, text, infilling and edits.

`responses.ResponseWriter` builds the JSON; this module decides which chunks a stream has.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from mercury_jax.serve.chat.output_parser import OutputDelta, OutputParser
from mercury_jax.serve.engine.request import Snapshot
from mercury_jax.serve.errors import ApiError
from mercury_jax.serve.http import dump_json, sse_event
from mercury_jax.serve.response_plan import Events, FinishedAnswer, ResponsePlan, usage_of
from mercury_jax.serve.responses import JsonDict, ResponseWriter, Usage

DONE_EVENT = b"data: [DONE]\n\n"
OBFUSCATED_BYTES = 128  # the sizes of the chunks of a stream with `include_obfuscation`


class CompletionWriter:
    """Writes completions and their chunks. A stream ends with [DONE].

    First come the role of each choice (message endpoints) and the echoed prompts, then the chunks of all choices as
    they arrive, each choice ending with a chunk that has a finish reason, then the usage, if requested.
    """

    def __init__(self, plan: ResponsePlan):
        self.plan, self.writer = plan, ResponseWriter(plan.kind, plan.request.model)
        options = plan.request.stream_options
        self._with_usage = options is not None and options.include_usage
        self._continuous = options is not None and self._with_usage and options.continuous_usage_stats
        self._padded = options is not None and options.include_obfuscation
        self._read: dict[
            int, tuple[OutputParser, Snapshot]
        ] = {}  # by choice, what has been read of it so far
        self._drafts: dict[
            int, tuple[str, float]
        ] = {}  # with `diffusing`: the current text and progress, by choice

    def begin(self, count: int) -> Events:
        """Writes the roles and the echoed prompts."""
        for i in range(count if self.plan.kind.message else 0):
            yield self._event(self.writer.chunk_choice(i, first=True))
        for i in range(count if self.plan.echoes else 0):
            echo = self.plan.echoes[i // self.plan.answers_per_prompt]
            yield self._event(self.writer.chunk_choice(i, echo.text))

    def update(self, i: int, snapshot: Snapshot, delta: OutputDelta, parser: OutputParser) -> Events:
        """Writes the new text and calls; with `diffusing` the whole current text, if it changed."""
        plan, self._read[i] = self.plan, (parser, snapshot)
        if plan.diffusing and snapshot.finish is None:
            before, progress = self._drafts.get(i, ("", 0.0))
            if (text := parser.preview(snapshot)) != before:
                # Progress is the fraction of accepted tokens. A new block or a remasked token would decrease it, so
                # the maximum so far is reported, and 1 in the last chunk only.
                share = float(snapshot.accepted.mean()) if len(snapshot.accepted) else 0.0
                progress = round(min(0.99, max(progress, share)), 4)
                self._drafts[i] = text, progress
                yield self._draft(i, text, progress)
        # No deltas if chunks have the whole text (diffusing), or if the content is made from the complete text.
        deltas = not plan.diffusing and plan.finish_content is None
        content = (delta.content if deltas else None) or None
        if content or delta.tool_calls:
            yield self._event(self.writer.chunk_choice(i, content, delta.tool_calls))

    def finish(self, i: int, answer: FinishedAnswer) -> Events:
        """Writes the content that was not streamed, and the finish reason."""
        if self.plan.diffusing:
            yield self._draft(i, answer.text, 1.0)
        elif self.plan.finish_content is not None and answer.text:
            yield self._event(self.writer.chunk_choice(i, answer.text))
        last = self.writer.chunk_choice(i, finish=answer.finish_reason, logprobs=answer.logprobs)
        yield self._event(last, self._extra(answer))

    def end(self, answers: Sequence[FinishedAnswer], usage: Usage) -> Events:
        """Writes the usage, if it is requested, and [DONE]."""
        if self._with_usage:
            yield sse_event(self.writer.chunk([], {"usage": usage}))
        yield DONE_EVENT

    def fail(self, error: ApiError) -> Events:
        """Writes the error and [DONE]."""
        yield sse_event(error.envelope())
        yield DONE_EVENT

    def body(self, answers: Sequence[FinishedAnswer], usage: Usage) -> JsonDict:
        """Returns the completion."""
        choices = [
            self.writer.choice(i, a.text, a.message.tool_calls, a.finish_reason, a.logprobs)
            for i, a in enumerate(answers)
        ]
        return self.writer.completion(choices, usage, self._extra(answers[0]))

    def _event(self, choice: JsonDict, extra: JsonDict | None = None) -> bytes:
        """Makes the event of a chunk before the last one; its usage is null, or that of the text so far."""
        so_far = usage_of(self.plan, self._read) if self._continuous else None
        chunk = self.writer.chunk([choice], extra) | ({"usage": so_far} if self._with_usage else {})
        return sse_event(obfuscated(chunk) if self._padded else chunk)

    def _draft(self, i: int, text: str, progress: float) -> bytes:
        meta = {"diffusion_meta": {"diffusion_progress": progress}}
        return self._event(self.writer.chunk_choice(i, text), meta)

    def _extra(self, answer: FinishedAnswer) -> JsonDict:
        """Returns the fields next to `choices`: a warning, and the summary of the thinking."""
        extra: JsonDict = {} if self.plan.warning is None else {"warning": self.plan.warning}
        if self.plan.reasoning_summary:
            thinking = answer.message.reasoning
            status = "complete" if thinking else "unavailable" if self.plan.thinks else "skipped"
            extra["reasoning_summary"] = {"content": thinking or None, "status": status}
        return extra


def obfuscated(chunk: JsonDict) -> JsonDict:
    """Adds random characters to a chunk, so that the size of its JSON is a multiple of OBFUSCATED_BYTES."""
    size = len(dump_json(chunk | {"obfuscation": ""}))
    return chunk | {"obfuscation": secrets.token_hex(OBFUSCATED_BYTES)[: -size % OBFUSCATED_BYTES]}
