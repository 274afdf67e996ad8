"""POST /v1/edit/completions and /v1/apply/completions: a region written anew, an update merged into a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mercury_jax.hub.tokenizer import HFTokenizer
from mercury_jax.serve.api import body, errors, numbers, tables, wire
from mercury_jax.serve.api.guard import key_of
from mercury_jax.serve.api.kinds import Record
from mercury_jax.serve.api.numbers import Ask
from mercury_jax.serve.api.ready import Ready
from mercury_jax.serve.api.running import respond
from mercury_jax.serve.api.service import Service
from mercury_jax.serve.api.texts import answer_room
from mercury_jax.serve.api.work import Work
from mercury_jax.serve.chat import apply_edit, code_prompts
from mercury_jax.serve.chat.messages import InvalidField, check_messages
from mercury_jax.serve.chat.output_parser import OutputParser
from mercury_jax.serve.engine.request import EngineRequest
from mercury_jax.types import LM

Whole = Callable[[str, str], str]


async def edit(service: Service, request: Request) -> Response:
    """Write the marked region of a file anew."""
    return await _respond(service, request, tables.EDIT, prepare_edit)


async def apply(service: Service, request: Request) -> Response:
    """Merge an update snippet into a file."""
    return await _respond(service, request, tables.APPLY, prepare_apply)


async def _respond(service: Service, request: Request, table: Record, prepare: Any) -> Response:
    data = body.merged(await body.read(request, service.options))
    ask = table.read(data, "")
    service.check(ask["model"])
    salt = key_of(request.scope)
    return await respond(service, request, lambda: prepare(service, ask, content(service, data), salt), 1)


def content(service: Service, data: Any) -> str:
    """The text of the one message."""
    try:
        text = check_messages(data["messages"])[0]["content"]
    except InvalidField as refused:
        raise errors.invalid(refused.param, refused.message) from None
    numbers.check_size(service, len(text))
    return text


def prepare_edit(service: Service, ask: Ask, text: str, salt: str) -> tuple[Work, Sequence[EngineRequest]]:
    """The reply is known at its end alone: whether anything changed decides how it begins."""
    lm = service.engine.lm
    instruct = instructed(lm)
    try:
        request = code_prompts.parse_edit(text)
        asked = code_prompts.edit_prompt(lm, request, instruct)
    except InvalidField as refused:
        raise errors.invalid(refused.param, refused.message) from None
    whole = lambda text, finish: code_prompts.edit_reply(request, text, instruct, finish)
    return _work(service, ask, asked, whole), [_job(service, ask, asked, salt)]


def prepare_apply(service: Service, ask: Ask, text: str, salt: str) -> tuple[Work, Sequence[Any]]:
    """Where the snippet says what to do, no model is asked; one that takes no instructions never is."""
    lm = service.engine.lm
    instruct = instructed(lm)
    try:
        request = apply_edit.parse_apply(text)
        merged = apply_edit.apply_update(request, guess=not instruct)
        if merged is not None:
            return _ready(service, ask, text, merged)
        asked = apply_edit.apply_prompt(lm, request, instruct)
    except InvalidField as refused:
        raise errors.invalid(refused.param, refused.message) from None
    whole = lambda text, finish: apply_edit.apply_reply(request, text)
    return _work(service, ask, asked, whole), [_job(service, ask, asked, salt)]


def instructed(lm: LM) -> bool:
    """Whether a model takes an edit or a merge as an instruction; others fill the region as a gap, and merge nothing.

    Its card may say so; else checkpoints of others are taken for chat models, ours for what they were trained on.
    """
    return bool(lm.card.get("instruct", isinstance(lm.tokenizer, HFTokenizer)))


def _work(service: Service, ask: Ask, asked: code_prompts.CodePrompt, whole: Whole | None) -> Work:
    lm = service.engine.lm
    return Work(
        form=wire.EDIT,
        model=ask["model"],
        prompt_tokens=len(asked.prompt) + len(asked.suffix or ()),
        reply=lambda: OutputParser(lm, chat=asked.chat),
        stream=ask["stream"],
        include_usage=bool(ask["stream_options"] and ask["stream_options"]["include_usage"]),
        whole=whole,
    )


def _ready(service: Service, ask: Ask, prompt: str, merged: str) -> tuple[Work, Sequence[Any]]:
    count = lambda text: len(service.engine.lm.tokenizer.encode(text))
    ready = Ready(merged, count(merged))
    work = _work(service, ask, code_prompts.CodePrompt((), None, None, False), None)
    return work._replace(prompt_tokens=count(prompt), reply=lambda: ready), [ready]


def _job(service: Service, ask: Ask, asked: code_prompts.CodePrompt, salt: str) -> EngineRequest:
    pace = numbers.pace(service, None)
    warmth, _ = numbers.temperature(ask, False)
    return EngineRequest(
        prompt=asked.prompt,
        suffix=asked.suffix,
        max_tokens=answer_room(service, asked, ask["max_tokens"], "messages"),
        rule=pace.rule,
        p=pace.p,
        steps=pace.steps,
        temperature=warmth,
        seed=numbers.seed(ask),
        cache_salt=salt,
        **numbers.sampling(ask, service.engine.lm.model.config.vocab),
    )
