"""What the page may ask for, checked field by field, and the job that it becomes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, Optional

from pydantic import Field, create_model

from mercury_jax.decode import rules
from mercury_jax.decode.effort import EFFORTS
from mercury_jax.decode.grammar import JSONSchema
from mercury_jax.decode.prompts import normalise
from mercury_jax.serve.constraint import compile_grammar
from mercury_jax.serve.engine.types import Job
from mercury_jax.serve.errors import invalid_request, invalid_value
from mercury_jax.serve.protocol import RequestModel
from mercury_jax.serve.sampling_params import token_budget
from mercury_jax.types import LM

LENGTH, HOLE = 64, 16  # tokens of an answer and of a hole, where none are named
MOST_TOKENS = 1024  # of an answer: more cells than that no page shows well
MOST_CHARACTERS = 65_536
MOST_STEPS = 1024
MOST_STRICT = 1000.0  # every rule has a scale of its own


class Asked(NamedTuple):
    """A request as a job. chat: the answer may think. before, after: the text on either side of a hole."""

    job: Job
    chat: bool
    before: str
    after: str


ShortText = Annotated[str, Field(max_length=MOST_CHARACTERS)]


class Message(RequestModel):
    """A message of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: ShortText


class PlaygroundRequest(RequestModel):
    """The fields of a request; `request_model` adds those that depend on the model."""

    kind: Literal["chat", "text", "infill", "edit"]
    messages: Annotated[list[Message], Field(min_length=1, max_length=64, fail_fast=True)] | None = None
    prompt: ShortText | None = None
    before: ShortText = ""
    after: ShortText = ""
    selected: ShortText = ""
    p: Annotated[float, Field(ge=0, le=MOST_STRICT, allow_inf_nan=False)] | None = None
    steps: Annotated[int, Field(ge=0, le=MOST_STEPS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    effort: Literal["instant", "low", "medium", "high"] | None = None
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    answer_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


def request_model(rules: tuple[str, ...], most_tokens: int) -> type[PlaygroundRequest]:
    """The fields of a request, for a model that offers these rules."""
    tokens = Annotated[int, Field(ge=1, le=most_tokens)]
    return create_model(
        "ModelRequest",
        __base__=PlaygroundRequest,
        rule=(Literal[rules], rules[0]),  # type: ignore[valid-type]
        max_tokens=(Optional[tokens], None),  # noqa: UP045
    )


class Fit(NamedTuple):
    """What a job must fit: tokens of a row, and of a canvas."""

    context: int
    block: int


def asked(lm: LM, read: Mapping[str, Any], fit: Fit) -> Asked:
    """The job of a request that `table` has read, without its grammar. ApiError for what does not fit."""
    try:
        return _hole(lm, read, fit) if read["kind"] in ("infill", "edit") else _answer(lm, read, fit)
    except ValueError as error:  # of the tokenizer and its template, in the user's words
        raise invalid_request(_subject(read), str(error)) from None


def _subject(read: Mapping[str, Any]) -> str:
    return {"chat": "messages", "text": "prompt"}.get(read["kind"], "before")


def _answer(lm: LM, read: Mapping[str, Any], fit: Fit) -> Asked:
    """Thinking takes what the answer leaves of the context; where that is too little, there is none."""
    chat, param = read["kind"] == "chat", _subject(read)
    if read[param] is None:
        raise invalid_value(param, None, "a value: this kind needs it")
    effort, wanted = EFFORTS.get(read["effort"] or ""), read["max_tokens"] or LENGTH
    thinking = effort.thinking if effort is not None and chat and lm.tokenizer.thinking is not None else 0
    write = lambda think: (
        tuple(lm.tokenizer.render(read[param], thinking=think)) if chat else _ids(lm, read[param])
    )
    prompt = write(thinking > 0)
    left = token_budget(fit.context, len(prompt), wanted, min(thinking, MOST_TOKENS), param)
    prompt = prompt if left.thinking or not thinking else write(False)
    job = Job(prompt=prompt, max_tokens=wanted, thinking=left.thinking, **_knobs(lm, read, fit.block))
    return Asked(job, chat, "", "")


def _hole(lm: LM, read: Mapping[str, Any], fit: Fit) -> Asked:
    """What stands in front of the hole is the prompt, what stands behind it the suffix."""
    chat, before, after = read["messages"] is not None, read["before"], read["after"]
    if read["schema"] is not None:
        raise invalid_value("schema", "a schema", "none with a hole: it describes whole answers")
    if read["kind"] == "edit" and not read["selected"]:
        raise invalid_value("selected", "", "the text that is written anew")
    if not (chat or before or after):
        raise invalid_value("before", "", "text in front of the hole or behind it")
    tail = tuple(lm.tokenizer.encode(after))
    if chat:
        prompt = (*lm.tokenizer.render(read["messages"]), *lm.tokenizer.encode(before))
        tail += (lm.model.config.eos,)
    else:
        prompt = _ids(lm, before) if before else tuple(lm.tokenizer.begin)
    size = len(lm.tokenizer.encode(read["selected"])) if read["kind"] == "edit" else HOLE
    size = read["max_tokens"] or size
    if size > MOST_TOKENS:
        raise invalid_value("selected", f"{size} tokens", f"at most {MOST_TOKENS}")
    job = Job(prompt=prompt, suffix=tail, max_tokens=size, **_knobs(lm, read, fit.block))
    return Asked(job, chat, before, after)


def _ids(lm: LM, text: str) -> tuple[int, ...]:
    return tuple(normalise(lm, text)[0][0].ids)


def _knobs(lm: LM, read: Mapping[str, Any], block: int) -> dict[str, Any]:
    """An effort speaks of probabilities, so its p is for the threshold alone."""
    effort, p, steps = EFFORTS.get(read["effort"] or ""), read["p"], read["steps"]
    if effort is not None and p is None and read["rule"] == "threshold":
        p = effort.p
    if p is not None:
        _check_strictness(read["rule"], p)
    if steps is None:
        steps = lm.decoding.get("steps") or 0
        steps = max(1, round(effort.steps * (steps or block))) if effort is not None else steps
    return {
        "rule": read["rule"], "p": p, "steps": steps, "temperature": read["temperature"], "seed": read["seed"],
        "frames": True,
    }  # fmt: skip


def _check_strictness(name: str, p: float) -> None:
    """ApiError where `p` is no value of the rule's first parameter, which it sets."""
    allowed = next(iter(rules.ALL[name].ranges.values()), None)
    if allowed is not None and not allowed.holds(p):
        raise invalid_value("p", p, f"of the rule {name}: {allowed}")


def with_grammar(lm: LM, job: Job, schema: Mapping[str, Any] | None) -> Job:
    """The job bound to a schema. Compiles the grammar, so not for the event loop's thread."""
    if schema is None:
        return job
    return dataclasses.replace(job, grammar=compile_grammar(lm, JSONSchema(schema), "schema"))


def cells(job: Job) -> int:
    """The most cells that a job's answer may have, thinking and the end of it included."""
    return job.max_tokens + (job.thinking + 1 if job.thinking else 0)
