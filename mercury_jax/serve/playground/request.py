"""What the page may ask for, checked field by field, and the job that it becomes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from mercury_jax.decode import rules
from mercury_jax.decode.effort import EFFORTS
from mercury_jax.decode.grammar import JSONSchema
from mercury_jax.decode.prompts import normalise
from mercury_jax.serve.api.constraint import compiled
from mercury_jax.serve.api.errors import invalid, refused
from mercury_jax.serve.api.kinds import (
    REQUIRED,
    Anything,
    Choice,
    Field,
    Integer,
    Items,
    Number,
    Record,
    Text,
)
from mercury_jax.serve.api.numbers import room
from mercury_jax.serve.engine.request import EngineRequest
from mercury_jax.types import LM

KINDS = ("chat", "text", "infill", "edit")
LENGTH, HOLE = 64, 16  # tokens of an answer and of a hole, where none are named
MOST_TOKENS = 1024  # of an answer: more cells than that no page shows well
MOST_CHARACTERS = 65_536
MOST_STEPS = 1024
MOST_STRICT = 1000.0  # every rule has a scale of its own


class Asked(NamedTuple):
    """A request as a job. chat: the answer may think. before, after: the text on either side of a hole."""

    job: EngineRequest
    chat: bool
    before: str
    after: str


def table(rules: tuple[str, ...], most_tokens: int) -> Record:
    """The fields of a request, for a model that offers these rules."""
    text = Text(most=MOST_CHARACTERS)
    roles = Choice(("system", "user", "assistant"))
    message = Record((Field("role", roles, REQUIRED, "who speaks"), Field("content", text, REQUIRED, "what")))
    return Record((
        Field("kind", Choice(KINDS), REQUIRED, "a conversation, a text to go on with, or a hole in a text"),
        Field("messages", Items(message, 1, 64), None, "of chat; of a hole: what its text answers"),
        Field("prompt", text, None, "of text"),
        Field("before", text, "", "of a hole: the text in front of it"),
        Field("after", text, "", "of a hole: the text behind it"),
        Field("selected", text, "", "of edit: the text that stood there, whose length the hole takes"),
        Field("rule", Choice(rules), rules[0], "how tokens are accepted"),
        Field("p", Number(0, MOST_STRICT), None, "the rule's strictness"),
        Field("steps", Integer(0, MOST_STEPS), None, "most passes of a block, 0: as many as it has tokens"),
        Field("temperature", Number(0, 2), None, "of the draw"),
        Field("effort", Choice(tuple(EFFORTS)), None, "sets p, steps and thinking where they are not given"),
        Field("max_tokens", Integer(1, most_tokens), None, "of the answer; of infill: the hole"),
        Field("seed", Integer(0, 2**31 - 1), 0, "of the draw"),
        Field("schema", Anything(), None, "JSON Schema that the answer obeys"),
    ))  # fmt: skip


class Fit(NamedTuple):
    """What a job must fit: tokens of a row, and of a canvas."""

    context: int
    block: int


def asked(lm: LM, read: Mapping[str, Any], fit: Fit) -> Asked:
    """The job of a request that `table` has read, without its grammar. ApiError for what does not fit."""
    try:
        return _hole(lm, read, fit) if read["kind"] in ("infill", "edit") else _answer(lm, read, fit)
    except ValueError as error:  # of the tokenizer and its template, in the user's words
        raise invalid(_subject(read), str(error)) from None


def _subject(read: Mapping[str, Any]) -> str:
    return {"chat": "messages", "text": "prompt"}.get(read["kind"], "before")


def _answer(lm: LM, read: Mapping[str, Any], fit: Fit) -> Asked:
    """Thinking takes what the answer leaves of the context; where that is too little, there is none."""
    chat, param = read["kind"] == "chat", _subject(read)
    if read[param] is None:
        raise refused(param, None, "a value: this kind needs it")
    effort, wanted = EFFORTS.get(read["effort"] or ""), read["max_tokens"] or LENGTH
    thinking = effort.thinking if effort is not None and chat and lm.tokenizer.thinking is not None else 0
    write = lambda think: (
        tuple(lm.tokenizer.render(read[param], thinking=think)) if chat else _ids(lm, read[param])
    )
    prompt = write(thinking > 0)
    left = room(fit.context, len(prompt), wanted, min(thinking, MOST_TOKENS), param)
    prompt = prompt if left.thinking or not thinking else write(False)
    job = EngineRequest(
        prompt=prompt, max_tokens=wanted, thinking=left.thinking, **_knobs(lm, read, fit.block)
    )
    return Asked(job, chat, "", "")


def _hole(lm: LM, read: Mapping[str, Any], fit: Fit) -> Asked:
    """What stands in front of the hole is the prompt, what stands behind it the suffix."""
    chat, before, after = read["messages"] is not None, read["before"], read["after"]
    if read["schema"] is not None:
        raise refused("schema", "a schema", "none with a hole: it describes whole answers")
    if read["kind"] == "edit" and not read["selected"]:
        raise refused("selected", "", "the text that is written anew")
    if not (chat or before or after):
        raise refused("before", "", "text in front of the hole or behind it")
    tail = tuple(lm.tokenizer.encode(after))
    if chat:
        prompt = (*lm.tokenizer.render(read["messages"]), *lm.tokenizer.encode(before))
        tail += (lm.model.config.eos,)
    else:
        prompt = _ids(lm, before) if before else tuple(lm.tokenizer.begin)
    size = len(lm.tokenizer.encode(read["selected"])) if read["kind"] == "edit" else HOLE
    size = read["max_tokens"] or size
    if size > MOST_TOKENS:
        raise refused("selected", f"{size} tokens", f"at most {MOST_TOKENS}")
    job = EngineRequest(prompt=prompt, suffix=tail, max_tokens=size, **_knobs(lm, read, fit.block))
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
        raise refused("p", p, f"of the rule {name}: {allowed}")


def with_grammar(lm: LM, job: EngineRequest, schema: Mapping[str, Any] | None) -> EngineRequest:
    """The job bound to a schema. Compiles the grammar, so not for the event loop's thread."""
    if schema is None:
        return job
    return dataclasses.replace(job, grammar=compiled(lm, JSONSchema(schema), "schema"))


def cells(job: EngineRequest) -> int:
    """The most cells that a job's answer may have, thinking and the end of it included."""
    return job.max_tokens + (job.thinking + 1 if job.thinking else 0)
