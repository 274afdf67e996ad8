"""Completions of text and code: /v1/completions, /v1/fim/completions, /v1/edit/completions, /v1/apply/completions.

Each handler reads its request, and passes `streaming.respond` a function that makes the engine's requests and the
response plan. `chat.code_prompts` and `chat.apply_edit` contain the prompts and replies of the endpoints for editors.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from mercury_jax.decode.grammar import Grammar, Without
from mercury_jax.hub.tokenizer import HFTokenizer
from mercury_jax.serve import errors, protocol, responses
from mercury_jax.serve.chat import apply_edit, code_prompts
from mercury_jax.serve.chat.code_prompts import CodePrompt
from mercury_jax.serve.chat.messages import plain_messages
from mercury_jax.serve.chat.output_parser import OutputParser
from mercury_jax.serve.chat_completions import OutputConstraint, compile_grammar, spec_constraint
from mercury_jax.serve.engine.request import EMPTY_SNAPSHOT, EngineRequest, Snapshot
from mercury_jax.serve.engine_requests import decoding_params, make_request, token_budget, with_seeds
from mercury_jax.serve.http import dump_json
from mercury_jax.serve.response_plan import ResponsePlan
from mercury_jax.serve.responses import EchoedPrompt
from mercury_jax.serve.service import SMALL_GRAMMAR_BYTES, ServedModels, Service
from mercury_jax.serve.streaming import respond
from mercury_jax.serve.structured_outputs import output_spec
from mercury_jax.types import LM

EditBody = protocol.EditCompletionsRequest | protocol.ApplyCompletionsRequest
CodeBody = protocol.CompletionsRequest | protocol.FimCompletionsRequest | EditBody

MAX_SCORED_TOKENS = 8192  # of all prompts of a request with echo and logprobs
END_OF_TEXT = "<|endoftext|>"  # suffix that editors send at the end of a file, instead of an empty one


async def completions(models: ServedModels, request: Request) -> Response:
    """Continues one or several prompts; with a suffix, fills the gap."""
    service, body = await models.read(request, protocol.CompletionsRequest)
    several = isinstance(body.prompt, list) and not isinstance(body.prompt[0], int)
    prompts: Any = body.prompt if several else [body.prompt]
    count = len(prompts) * body.n
    if count > protocol.MAX_CHOICES:
        message = f"{len(prompts)} prompts times n = {body.n}; allowed: {protocol.MAX_CHOICES} answers"
        raise errors.invalid_request("n", message)
    if body.echo and body.suffix:
        raise errors.invalid_value("echo", True, "false with a suffix")
    # Scoring a prompt takes as long as compiling a large grammar, so it takes a thread of that pool.
    fields = {"bad_words", *protocol.GUIDED_FIELDS}
    plain = body.model_dump(include=fields, exclude_unset=True, by_alias=True)
    slow = len(dump_json(plain)) if any(plain.values()) else None
    slow = SMALL_GRAMMAR_BYTES + 1 if body.echo and body.logprobs is not None else slow
    return await respond(
        service, request, lambda: _prepare_texts(service, body, prompts, body.n), count, slow
    )


async def fim_completions(models: ServedModels, request: Request) -> Response:
    """Fills the gap between prompt and suffix."""
    service, body = await models.read(request, protocol.FimCompletionsRequest)
    return await respond(service, request, lambda: _prepare_texts(service, body, [body.prompt], 1), 1)


async def edit_completions(models: ServedModels, request: Request) -> Response:
    """Rewrites the marked region of a file."""
    service, body = await models.read(request, protocol.EditCompletionsRequest)
    return await respond(service, request, lambda: _prepare_edit(service, body), 1)


async def apply_completions(models: ServedModels, request: Request) -> Response:
    """Merges an update into a file."""
    service, body = await models.read(request, protocol.ApplyCompletionsRequest)
    return await respond(service, request, lambda: _prepare_apply(service, body), 1)


class PrecomputedAnswer:
    """An `AnswerHandle` with a fixed answer, for a reply that needs no decoding."""

    def __init__(self, tokens: Sequence[int], finish: str = "stop"):
        self.request = EngineRequest(prompt=(0,), max_tokens=1)
        ids, n = np.asarray(tokens, np.int32), len(tokens)
        self._snapshot = EMPTY_SNAPSHOT._replace(tokens=ids, final=n, start=n, finish=finish)

    async def __aiter__(self) -> AsyncIterator[Snapshot]:
        yield self._snapshot

    def cancel(self) -> None:
        """Does nothing."""


def _prepare_texts(
    service: Service,
    body: protocol.CompletionsRequest | protocol.FimCompletionsRequest,
    prompts: Sequence[str | Sequence[int]],
    n: int,
) -> tuple[ResponsePlan, Sequence[EngineRequest | PrecomputedAnswer]]:
    """Makes the plan and n requests per prompt; the requests of a prompt are adjacent."""
    lm = service.engine.lm
    suffix = "" if body.suffix == END_OF_TEXT else body.suffix or ""
    logprobs = body.logprobs if isinstance(body, protocol.CompletionsRequest) else None
    codes: list[CodePrompt] = []
    jobs: list[EngineRequest | PrecomputedAnswer] = []
    words = tuple(filter(None, getattr(body, "bad_words", None) or ()))
    guided = output_spec(body) if isinstance(body, protocol.CompletionsRequest) else None
    constraint = OutputConstraint()
    for i, prompt in enumerate(prompts):
        service.check_size(len(prompt) + len(suffix), "prompt")
        if isinstance(prompt, str):
            code = code_prompts.fim_prompt(lm, prompt, suffix or None)
        else:
            if (beyond := max(prompt)) >= lm.model.config.vocab:
                allowed = f"a token id, 0 to {lm.model.config.vocab - 1}"
                raise errors.invalid_value("prompt", beyond, allowed, field="id in prompt")
            code = CodePrompt(tuple(prompt), tuple(lm.tokenizer.encode(suffix)) if suffix else None)
        codes.append(code)
        if words and suffix:
            raise errors.invalid_request("bad_words", "bad_words cannot be combined with suffix")
        if body.max_tokens:
            used = len(code.prompt) + len(code.suffix or ())  # what does not fit is refused before compiling
            token_budget(service.engine.context, used, body.max_tokens, 0, "prompt")
            before = prompt if isinstance(prompt, str) else lm.tokenizer.decode(prompt)
            constraint = OutputConstraint() if guided is None else spec_constraint(lm, guided)
            grammar = (
                compile_grammar(lm, Without(words, before), "bad_words") if words else constraint.grammar
            )
            jobs += with_seeds(_code_request(service, body, code, "prompt", logprobs, grammar), n, i)
        else:
            token_budget(service.engine.context, len(code.prompt) - 1, 1, 0, "prompt")  # the prompt must fit
            # Makes a request only to refuse parameters that do not fit.
            make_request(service, body, decoding_params(service, None), prompt=code.prompt, max_tokens=1)
            jobs += [PrecomputedAnswer((), "length")] * n
    plan = ResponsePlan(
        kind=responses.TEXT,
        request=body,
        prompt_tokens=sum(len(one.prompt) + len(one.suffix or ()) for one in codes),
        parser=lambda: OutputParser(lm, chat=False, stop=() if guided else body.stop_sequences),
        answers_per_prompt=n,
        check=constraint.check,
        valid=constraint.valid,
        strict=constraint.strict,
        logprobs=lambda snapshot, message: responses.text_logprobs(lm, snapshot, message, logprobs or 0),
        echoes=_echoes(service, prompts, codes, logprobs) if getattr(body, "echo", False) else (),
    )
    return plan, jobs


def _echoes(
    service: Service,
    prompts: Sequence[str | Sequence[int]],
    codes: Sequence[CodePrompt],
    logprobs: int | None,
) -> list[EchoedPrompt]:
    """Makes the prompts that come in front of their answers, and scores them if logprobs are requested."""
    lm, size = service.engine.lm, sum(len(code.prompt) for code in codes)
    if logprobs is not None and size > MAX_SCORED_TOKENS:
        allowed = f"{MAX_SCORED_TOKENS} with echo and logprobs, as each of them takes a row of a forward pass"
        raise errors.invalid_request("prompt", f"prompt has {size} tokens; allowed: up to {allowed}")
    made = []
    for prompt, code in zip(prompts, codes, strict=True):
        text = prompt if isinstance(prompt, str) else lm.tokenizer.decode(code.prompt)
        try:
            found = None if logprobs is None else responses.prompt_logprobs(lm, code.prompt, logprobs)
        except ValueError as error:  # a model without likelihoods of single tokens
            raise errors.invalid_request("echo", f"echo with logprobs: {error}") from None
        made.append(EchoedPrompt(text, found))
    return made


def _prepare_edit(
    service: Service, body: protocol.EditCompletionsRequest
) -> tuple[ResponsePlan, list[EngineRequest]]:
    """Makes the plan and the request of an edit.

    The content is sent at the end only: its first characters depend on whether anything changed (a fence or `None`).
    """
    lm, instruct = service.engine.lm, follows_instructions(service.engine.lm)
    edit = code_prompts.parse_edit(_message_text(service, body))
    code = code_prompts.edit_prompt(lm, edit, instruct)
    finish = lambda content, reason: code_prompts.edit_reply(edit, content, instruct, reason)
    return _edit_plan(lm, body, code, finish), [_code_request(service, body, code, "messages")]


def _prepare_apply(
    service: Service, body: protocol.ApplyCompletionsRequest
) -> tuple[ResponsePlan, Sequence[EngineRequest | PrecomputedAnswer]]:
    """Makes the plan and the request of a merge, or a precomputed answer if the update is unambiguous."""
    lm, instruct = service.engine.lm, follows_instructions(service.engine.lm)
    update = apply_edit.parse_apply(_message_text(service, body))
    # A model without instructions cannot merge, so similar lines are resolved by a guess before the request fails.
    merged = apply_edit.apply_update(update, guess=not instruct)
    if merged is None:
        code = apply_edit.apply_prompt(lm, update, instruct)
        finish = lambda content, reason: apply_edit.apply_reply(update, content)
        return _edit_plan(lm, body, code, finish), [_code_request(service, body, code, "messages")]
    message = CodePrompt(tuple(lm.tokenizer.encode(update.text)))
    plan = _edit_plan(lm, body, message, lambda content, reason: merged)
    return plan, [PrecomputedAnswer(lm.tokenizer.encode(merged))]


def follows_instructions(lm: LM) -> bool:
    """Says whether a model takes an edit or a merge as an instruction; other models fill the region as a gap."""
    return bool(lm.card.get("instruct", isinstance(lm.tokenizer, HFTokenizer)))


def _message_text(service: Service, body: EditBody) -> str:
    """Returns the text of the one message."""
    text = plain_messages(body.messages)[0]["content"]
    service.check_size(len(text))
    return text


def _edit_plan(lm: LM, body: EditBody, code: CodePrompt, finish: Callable[[str, str], str]) -> ResponsePlan:
    return ResponsePlan(
        kind=responses.EDIT,
        request=body,
        prompt_tokens=len(code.prompt) + len(code.suffix or ()),
        parser=lambda: OutputParser(lm, chat=code.chat),
        finish_content=finish,
    )


def _code_request(
    service: Service,
    body: CodeBody,
    code: CodePrompt,
    param: str,
    logprobs: int | None = None,
    grammar: Grammar | None = None,
) -> EngineRequest:
    """Makes the request of a code prompt.

    `max_tokens` is reduced to the tokens left in the context and to the maximum that the answer can need.
    """
    used = len(code.prompt) + len(code.suffix or ())
    answer = token_budget(service.engine.context, used, body.max_tokens, 0, param).answer
    return make_request(
        service,
        body,
        decoding_params(service, None),
        prompt=code.prompt,
        suffix=code.suffix,
        max_tokens=answer if code.max_tokens is None else max(1, min(answer, code.max_tokens)),
        logprobs=logprobs,
        grammar=grammar,
    )
