"""POST /v1/edit/completions and /v1/apply/completions: rewrite a region of a file, merge an update into a file."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response

from mercury_jax.hub.tokenizer import HFTokenizer
from mercury_jax.serve import errors, responses
from mercury_jax.serve.auth import cache_salt
from mercury_jax.serve.chat import apply_edit, code_prompts
from mercury_jax.serve.chat.messages import InvalidField, check_messages
from mercury_jax.serve.chat.output_parser import OutputParser
from mercury_jax.serve.completions import answer_budget
from mercury_jax.serve.engine.request import EngineRequest
from mercury_jax.serve.protocol import ApplyCompletionsRequest, EditCompletionsRequest
from mercury_jax.serve.sampling_params import decoding_params, make_job
from mercury_jax.serve.service import PrecomputedAnswer, Service
from mercury_jax.serve.streaming import ResponsePlan, respond
from mercury_jax.types import LM

EditBody = EditCompletionsRequest | ApplyCompletionsRequest


async def edit_completions(service: Service, request: Request) -> Response:
    """Rewrites the marked region of a file.

    Args:
        service: The service.
        request: The HTTP request.

    Returns:
        A JSON response or an event stream.
    """
    body = await service.read(request, EditCompletionsRequest)
    salt = cache_salt(request.scope)
    return await respond(service, request, lambda: prepare_edit(service, body, salt), 1)


async def apply_completions(service: Service, request: Request) -> Response:
    """Merges an update into a file.

    Args:
        service: The service.
        request: The HTTP request.

    Returns:
        A JSON response or an event stream.
    """
    body = await service.read(request, ApplyCompletionsRequest)
    salt = cache_salt(request.scope)
    return await respond(service, request, lambda: prepare_apply(service, body, salt), 1)


def prepare_edit(
    service: Service, body: EditCompletionsRequest, salt: str
) -> tuple[ResponsePlan, list[EngineRequest]]:
    """Makes the job of an edit. Its content is known at the end only: whether anything changed decides how it begins.

    Args:
        service: The service.
        body: The request.
        salt: Requests of another salt never share cached prefixes.

    Returns:
        The plan of the response, and the job.

    Raises:
        ApiError: 400 for a message without a region, or one that is too long.
    """
    lm, text = service.engine.lm, _message_text(service, body)
    instruct = follows_instructions(lm)
    try:
        edit = code_prompts.parse_edit(text)
        asked = code_prompts.edit_prompt(lm, edit, instruct)
    except InvalidField as refused:
        raise errors.invalid_request(refused.param, refused.message) from None
    finish = lambda content, reason: code_prompts.edit_reply(edit, content, instruct, reason)
    return _plan(lm, body, asked, finish), [_job(service, body, asked, salt)]


def prepare_apply(
    service: Service, body: ApplyCompletionsRequest, salt: str
) -> tuple[ResponsePlan, list[EngineRequest] | list[PrecomputedAnswer]]:
    """Makes the job of a merge. Where the update says itself where it belongs, the model is not asked.

    Args:
        service: The service.
        body: The request.
        salt: Requests of another salt never share cached prefixes.

    Returns:
        The plan, and a job or an answer. A model that takes no instructions is never asked.

    Raises:
        ApiError: 400 for a message without file and update, or where such a model would have to be asked.
    """
    lm, text = service.engine.lm, _message_text(service, body)
    instruct = follows_instructions(lm)
    try:
        update = apply_edit.parse_apply(text)
        merged = apply_edit.apply_update(update, guess=not instruct)
        if merged is None:
            asked = apply_edit.apply_prompt(lm, update, instruct)
            finish = lambda content, reason: apply_edit.apply_reply(update, content)
            return _plan(lm, body, asked, finish), [_job(service, body, asked, salt)]
    except InvalidField as refused:
        raise errors.invalid_request(refused.param, refused.message) from None
    prompt_tokens, tokens = (len(lm.tokenizer.encode(t)) for t in (text, merged))
    answer = PrecomputedAnswer(merged, tokens)
    plan = ResponsePlan(kind=responses.EDIT, request=body, prompt_tokens=prompt_tokens, parser=lambda: answer)
    return plan, [answer]


def follows_instructions(lm: LM) -> bool:
    """Returns whether a model takes an edit or a merge as an instruction; others fill the region as a gap.

    Args:
        lm: The model. Its card may say so; otherwise imported checkpoints count as chat models.
    """
    return bool(lm.card.get("instruct", isinstance(lm.tokenizer, HFTokenizer)))


def _message_text(service: Service, body: EditBody) -> str:
    """Returns the text of the one message."""
    try:
        messages = body.model_dump(include={"messages"}, exclude_unset=True)["messages"]
        text = check_messages(messages)[0]["content"]
    except InvalidField as refused:
        raise errors.invalid_request(refused.param, refused.message) from None
    service.check_size(len(text))
    return text


def _plan(
    lm: LM, body: EditBody, asked: code_prompts.CodePrompt, finish: Callable[[str, str], str]
) -> ResponsePlan:
    return ResponsePlan(
        kind=responses.EDIT,
        request=body,
        prompt_tokens=len(asked.prompt) + len(asked.suffix or ()),
        parser=lambda: OutputParser(lm, chat=asked.chat),
        finish_content=finish,
    )


def _job(service: Service, body: EditBody, asked: code_prompts.CodePrompt, salt: str) -> EngineRequest:
    return make_job(
        service,
        body,
        decoding_params(service, None),
        prompt=asked.prompt,
        suffix=asked.suffix,
        max_tokens=answer_budget(service, asked, body.max_tokens, "messages"),
        cache_salt=salt,
    )
