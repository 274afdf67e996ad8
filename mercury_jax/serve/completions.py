"""POST /v1/completions and /v1/fim/completions: continue a text, or fill the gap between two texts."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from mercury_jax.serve import errors, responses
from mercury_jax.serve.auth import cache_salt
from mercury_jax.serve.chat import code_prompts
from mercury_jax.serve.chat.messages import InvalidField
from mercury_jax.serve.chat.output_parser import OutputParser
from mercury_jax.serve.engine.request import EngineRequest
from mercury_jax.serve.protocol import MAX_CHOICES, CompletionsRequest, FimCompletionsRequest
from mercury_jax.serve.sampling_params import decoding_params, make_job, repeat_job, token_budget
from mercury_jax.serve.service import Service
from mercury_jax.serve.streaming import ResponsePlan, respond

END_OF_TEXT = "<|endoftext|>"  # what editors send as the suffix at the end of a file


async def fim_completions(service: Service, request: Request) -> Response:
    """Fills the gap between prompt and suffix.

    Args:
        service: The service.
        request: The HTTP request.

    Returns:
        A JSON response or an event stream.
    """
    body = await service.read(request, FimCompletionsRequest)
    salt = cache_salt(request.scope)
    return await respond(service, request, lambda: prepare_texts(service, body, [body.prompt], 1, salt), 1)


async def completions(service: Service, request: Request) -> Response:
    """Continues one prompt or several; with a suffix, fills the gap.

    Args:
        service: The service.
        request: The HTTP request.

    Returns:
        A JSON response or an event stream.

    Raises:
        ApiError: 400 for more than `MAX_CHOICES` answers.
    """
    body = await service.read(request, CompletionsRequest)
    prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    count = len(prompts) * body.n
    if count > MAX_CHOICES:
        message = f"{len(prompts)} prompts times n = {body.n}; allowed: {MAX_CHOICES} answers"
        raise errors.invalid_request("n", message)
    salt = cache_salt(request.scope)
    return await respond(service, request, lambda: prepare_texts(service, body, prompts, body.n, salt), count)


def prepare_texts(
    service: Service,
    body: CompletionsRequest | FimCompletionsRequest,
    prompts: Sequence[str],
    n: int,
    salt: str,
) -> tuple[ResponsePlan, list[EngineRequest]]:
    """Makes the jobs of a request: n answers for each prompt.

    Args:
        service: The service.
        body: The request.
        prompts: Texts before the answers.
        n: Answers per prompt.
        salt: Requests of another salt never share cached prefixes.

    Returns:
        The plan of the response, and the jobs, prompt by prompt.

    Raises:
        ApiError: 400 for a prompt that is empty or too long.
    """
    lm, decoding = service.engine.lm, decoding_params(service, None)
    suffix = "" if body.suffix == END_OF_TEXT else body.suffix or ""
    logprobs = body.logprobs if isinstance(body, CompletionsRequest) else None
    stops = body.stop_sequences
    jobs: list[EngineRequest] = []
    for prompt in prompts:
        service.check_size(len(prompt) + len(suffix), "prompt")
        try:
            asked = code_prompts.fim_prompt(lm, prompt, suffix or None)
        except InvalidField as refused:
            raise errors.invalid_request(refused.param, refused.message) from None
        job = make_job(
            service,
            body,
            decoding,
            prompt=asked.prompt,
            suffix=asked.suffix,
            max_tokens=answer_budget(service, asked, body.max_tokens, "prompt"),
            logprobs=logprobs,
            cache_salt=salt,
        )
        jobs += repeat_job(job, n)
    plan = ResponsePlan(
        kind=responses.TEXT,
        request=body,
        prompt_tokens=sum(len(job.prompt) + len(job.suffix or ()) for job in jobs[::n]),
        parser=lambda: OutputParser(lm, chat=False, stop=stops),
        answers_per_prompt=n,
        logprobs=lambda snapshot, message: responses.text_logprobs(lm, snapshot, message, logprobs or 0),
    )
    return plan, jobs


def answer_budget(service: Service, asked: code_prompts.CodePrompt, max_tokens: int, param: str) -> int:
    """Divides what the prompt leaves of the context, for an answer without thinking.

    Args:
        service: The service.
        asked: The prompt, with the most tokens that its answer can need.
        max_tokens: As requested.
        param: Field that holds the prompt.

    Returns:
        Tokens of the answer: `max_tokens`, cut to what is left and to what the answer can need.

    Raises:
        ApiError: 400 where the prompt leaves nothing.
    """
    used = len(asked.prompt) + len(asked.suffix or ())
    answer = token_budget(service.engine.context, used, max_tokens, 0, param).answer
    return answer if asked.max_tokens is None else max(1, min(answer, asked.max_tokens))
