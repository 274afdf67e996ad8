"""What a request comes to once it is understood, and what an answer comes to once it is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mercury_jax.serve.api import wire
from mercury_jax.serve.api.again import Next
from mercury_jax.serve.api.ready import Ready
from mercury_jax.serve.chat.output_parser import OutputParser, ParsedMessage
from mercury_jax.serve.engine.request import Snapshot

Json = dict[str, Any]


class Work(NamedTuple):
    """How the answers to one request are read and told.

    reply: a fresh parser of snapshots. prompt_tokens: of all prompts; copies: answers to each of them. whole:
    content of (text, finish), where it is known at the end alone. check: whether an answer obeys what was
    promised. logprobs: the answer's log-probabilities in the endpoint's form. then: the job that continues a reply
    which ended without an answer.
    """

    form: wire.Form
    model: str
    prompt_tokens: int
    reply: Callable[[], OutputParser | Ready]
    copies: int = 1
    stream: bool = False
    include_usage: bool = False
    diffusing: bool = False
    summary: bool = False
    thinks: bool = False
    warning: str | None = None
    whole: Callable[[str, str], str] | None = None
    check: Callable[[ParsedMessage], bool] | None = None
    logprobs: Callable[[Snapshot, ParsedMessage], Json] | None = None
    then: Next | None = None


class Answer(NamedTuple):
    """One answer at its end."""

    text: str
    message: ParsedMessage
    finish: str
    snapshot: Snapshot
    logprobs: Json | None


def usage(work: Work, answers: Sequence[Answer]) -> wire.Usage:
    """Prompts are counted once, however many answers each of them got."""
    return wire.Usage(
        prompt=work.prompt_tokens,
        completion=sum(a.message.completion_tokens for a in answers),
        reasoning=sum(a.message.reasoning_tokens for a in answers),
        cached=sum(a.snapshot.cached for a in answers[:: work.copies]),
    )


def more(work: Work, answer: Answer) -> Json:
    """What stands beside the choices: a warning, and what was thought, where they were asked for."""
    out: Json = {} if work.warning is None else {"warning": work.warning}
    if not work.summary:
        return out
    thought = answer.message.reasoning
    status = "complete" if thought else "unavailable" if work.thinks else "skipped"
    return out | {"reasoning_summary": {"content": thought or None, "status": status}}


def progress(snapshot: Snapshot, before: float) -> float:
    """Share of what stands that is settled; it never falls, and is 1 in the last snapshot alone."""
    if snapshot.finish is not None:
        return 1.0
    share = float(snapshot.accepted.mean()) if len(snapshot.accepted) else 0.0
    return round(min(0.99, max(before, share)), 4)
