"""POST /v1/completions and /v1/fim/completions: texts that go on, and gaps that are filled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mercury_jax.serve.api import body, errors, logprobs, numbers, tables, wire
from mercury_jax.serve.api.chat import copies, stop_texts
from mercury_jax.serve.api.fields import CHOICES
from mercury_jax.serve.api.guard import key_of
from mercury_jax.serve.api.numbers import Ask
from mercury_jax.serve.api.running import respond
from mercury_jax.serve.api.service import Service
from mercury_jax.serve.api.work import Work
from mercury_jax.serve.chat import code_prompts
from mercury_jax.serve.chat.messages import InvalidField
from mercury_jax.serve.chat.output_parser import OutputParser
from mercury_jax.serve.engine.request import EngineRequest

END_OF_TEXT = "<|endoftext|>"  # what an editor sends where nothing stands behind the gap


async def fim(service: Service, request: Request) -> Response:
    """Fill the gap between prompt and suffix."""
    ask = tables.FIM.read(body.merged(await body.read(request, service.options)), "")
    service.check(ask["model"])
    salt = key_of(request.scope)
    return await respond(service, request, lambda: prepare(service, ask, [ask["prompt"]], salt), 1)


async def completions(service: Service, request: Request) -> Response:
    """Go on from one prompt or several; with a suffix, fill the gap."""
    ask = tables.COMPLETIONS.read(body.merged(await body.read(request, service.options)), "")
    service.check(ask["model"])
    prompts = [ask["prompt"]] if isinstance(ask["prompt"], str) else ask["prompt"]
    count = len(prompts) * ask["n"]
    if count > CHOICES:
        raise errors.invalid("n", f"{len(prompts)} prompts times n = {ask['n']}; allowed: {CHOICES} answers")
    salt = key_of(request.scope)
    return await respond(service, request, lambda: prepare(service, ask, prompts, salt), count)


def prepare(
    service: Service, ask: Ask, prompts: Sequence[str], salt: str
) -> tuple[Work, Sequence[EngineRequest]]:
    """The jobs of a request, prompt by prompt."""
    lm, n = service.engine.lm, ask.get("n", 1)
    suffix = ask["suffix"] or ""
    suffix = "" if suffix == END_OF_TEXT else suffix
    jobs = [job for prompt in prompts for job in copies(_job(service, ask, prompt, suffix, salt), n)]
    stops, most = stop_texts(ask["stop"]), ask.get("logprobs")
    work = Work(
        form=wire.TEXT,
        model=ask["model"],
        prompt_tokens=sum(len(job.prompt) + len(job.suffix or ()) for job in jobs[::n]),
        reply=lambda: OutputParser(lm, chat=False, stop=stops),
        copies=n,
        stream=ask["stream"],
        include_usage=bool(ask["stream_options"] and ask["stream_options"]["include_usage"]),
        logprobs=lambda snapshot, message: logprobs.text(lm, snapshot, message, most or 0),
    )
    return work, jobs


def _job(service: Service, ask: Ask, prompt: str, suffix: str, salt: str) -> EngineRequest:
    numbers.check_size(service, len(prompt) + len(suffix), "prompt")
    asked = fim_ask(service, prompt, suffix)
    pace = numbers.pace(service, None)
    warmth, _ = numbers.temperature(ask, False)
    return EngineRequest(
        prompt=asked.prompt,
        suffix=asked.suffix,
        max_tokens=answer_room(service, asked, ask["max_tokens"]),
        rule=pace.rule,
        p=pace.p,
        steps=pace.steps,
        temperature=warmth,
        seed=numbers.seed(ask),
        logprobs=ask.get("logprobs"),
        cache_salt=salt,
        **numbers.sampling(ask, service.engine.lm.model.config.vocab),
    )


def fim_ask(service: Service, prompt: str, suffix: str) -> code_prompts.CodePrompt:
    try:
        return code_prompts.fim_prompt(service.engine.lm, prompt, suffix or None)
    except InvalidField as refused:
        raise errors.invalid(refused.param, refused.message) from None


def answer_room(
    service: Service, asked: code_prompts.CodePrompt, wanted: int | None, param: str = "prompt"
) -> int:
    """Tokens for an answer without thinking: what was wished for, can be needed, and is left."""
    used = len(asked.prompt) + len(asked.suffix or ())
    room: Any = numbers.room(service.engine.context, used, wanted, 0, param)
    return room.answer if asked.max_tokens is None else max(1, min(room.answer, asked.max_tokens))
