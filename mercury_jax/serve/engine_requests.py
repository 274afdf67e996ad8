"""Conversion of a validated API request into engine requests: token budget, sampling parameters, continuation.

The endpoints call `make_request` once per prompt, and `with_seeds` for several answers to a prompt. `continuation_of`
makes the request that continues an answer without content; `streaming.ContinuedAnswer` submits it.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from mercury_jax.config import nearest
from mercury_jax.decode import answer_text, rules
from mercury_jax.decode.defaults import EFFORTS
from mercury_jax.serve import errors
from mercury_jax.serve.engine.request import EngineRequest, Snapshot
from mercury_jax.serve.protocol import ApiRequest
from mercury_jax.serve.service import Service
from mercury_jax.types import LM

# (request, its last snapshot) -> the part of the snapshot to keep and the next request; None if no request follows.
Continuation = Callable[[EngineRequest, Snapshot], "tuple[Snapshot, EngineRequest] | None"]

DEFAULT_MAX_TOKENS = 16384  # the vendor's default for a chat answer
MIN_THINKING = 8  # tokens; with less room, thinking is disabled
# With `strict_temperature`: the temperature range of the vendor's model, and the replacement for other values.
VENDOR_MIN_TEMPERATURE, VENDOR_MAX_TEMPERATURE, VENDOR_TEMPERATURE = 0.5, 1.0, 0.75
MIN_REPETITION, MAX_REPETITION = 0.01, 100.0  # logits are divided by it, so extreme values overflow


# Sampling fields with the same name and meaning in the API and in `EngineRequest`; an endpoint may lack some of them.
SAMPLING_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias",
)  # fmt: skip


class TokenBudget(NamedTuple):
    """Maximum tokens of the thinking, and of the answer."""

    thinking: int
    answer: int


def token_budget(
    context: int, prompt: int, max_tokens: int | None, thinking: int, param: str = "messages"
) -> TokenBudget:
    """Divides the rest of the context, after the prompt, between thinking and answer.

    A requested `max_tokens` has priority, and thinking gets what is left. Without `max_tokens`, thinking takes at most
    half. A `max_tokens` beyond the context is reduced, not refused, since editors send 8192 to any model.
    """
    left = context - prompt
    if left < 1:
        detail = (
            f"The prompt has {prompt} tokens; allowed: up to {context - 1}, which leaves one for the answer."
        )
        raise errors.context_length_exceeded(context, detail, param)
    wanted = DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens
    usable = left - 1 if thinking else left  # the token that ends thinking takes one position
    if max_tokens is None:
        thinking = min(thinking, usable // 2)
        answer = min(wanted, usable - thinking)
    else:
        answer = min(wanted, usable)
        thinking = min(thinking, usable - answer)
    if thinking < MIN_THINKING:
        return TokenBudget(0, min(wanted, left))
    return TokenBudget(thinking, answer)


class DecodingParams(NamedTuple):
    """The decoding rule with its strictness and step limit, as in `EngineRequest`, and the thinking budget."""

    rule: str
    p: float | None
    steps: int
    thinking: int


def decoding_params(service: Service, effort: str | None) -> DecodingParams:
    """Selects the decoding parameters for an effort.

    Args:
        effort: Name of an effort. None: the server's default effort, or, without a default, the model's own rule with
            the thinking budget of "medium" if that is at most a quarter of the context.
    """
    name = effort or service.options.effort
    lm, engine = service.engine.lm, service.engine
    default_rule, default_steps = engine.rules.names[0], lm.decoding.get("steps")
    can_think = lm.tokenizer.thinking is not None
    if name is None:
        thinking = EFFORTS["medium"].thinking
        fits = can_think and thinking * 4 <= service.engine.context
        return DecodingParams(default_rule, None, default_steps or 0, thinking if fits else 0)
    chosen = EFFORTS[name]
    thinking = chosen.thinking if can_think else 0
    steps = lambda available: max(1, round(chosen.steps * available))
    # `p` of an effort is a confidence threshold, so it applies to the threshold rule only.
    if lm.corruption.mask is None or "threshold" not in engine.rules.names:
        return DecodingParams(default_rule, None, steps(default_steps or engine.block), thinking)
    return DecodingParams("threshold", chosen.p, steps(engine.block), thinking)


def make_request(
    service: Service, body: ApiRequest, decoding: DecodingParams, **fields: Any
) -> EngineRequest:
    """Makes the engine request of an API request.

    Args:
        **fields: Other fields of `EngineRequest`, such as `prompt` and `max_tokens`. They take precedence.
    """
    vocab = service.engine.lm.model.config.vocab
    sampling = {name: getattr(body, name) for name in SAMPLING_FIELDS if name in type(body).model_fields}
    # the engine takes seeds of 31 bits
    sampling["seed"] = secrets.randbits(31) if body.seed is None else body.seed % (1 << 31)
    if not 1 <= sampling.get("top_k", 0) < vocab:
        sampling["top_k"] = 0
    if "repetition_penalty" in sampling:
        sampling["repetition_penalty"] = min(
            max(sampling["repetition_penalty"], MIN_REPETITION), MAX_REPETITION
        )
    sampling["logit_bias"] = {
        int(token): value for token, value in (sampling.get("logit_bias") or {}).items()
    }
    for token in sampling["logit_bias"]:
        if token >= vocab:
            allowed = f"a token id, 0 to {vocab - 1}"
            raise errors.invalid_value("logit_bias", token, allowed, field="key of logit_bias")
    rule = {"rule": decoding.rule, "p": decoding.p}
    if body.rule is not None or body.rule_params:
        rule = check_rule(service, body.rule, body.rule_params or {})
    return EngineRequest(**{**sampling, **rule, "steps": decoding.steps, **fields})


def check_rule(service: Service, name: str | None, params: Mapping[str, float]) -> dict[str, Any]:
    """Checks the decoding rule of a request.

    Returns:
        The fields of `EngineRequest`.
    """
    names = service.engine.rules.names
    if name is None:
        raise errors.invalid_request("rule_params", "rule_params needs rule, the name of the decoding rule")
    if name not in names:
        raise errors.invalid_value("rule", name, nearest(name, names))
    try:
        rules.ALL[name](**params)
    except ValueError as error:
        raise errors.invalid_request("rule_params", str(error)) from None
    return {"rule": name, "rule_params": params}


def with_seeds(request: EngineRequest, n: int, prompt: int = 0) -> list[EngineRequest]:
    """Copies a request for several answers to one prompt."""
    first = request.seed + prompt * n
    return [dataclasses.replace(request, seed=(first + j) % (1 << 31)) for j in range(n)]


def vendor_temperature(wanted: float | None) -> tuple[float, str | None]:
    """Returns the temperature that the vendor would use, and its warning.

    Returns:
        The temperature and a warning or None: 0.75 without a requested temperature; 0.75 and a warning for a
        temperature outside of 0.5 to 1; otherwise the requested temperature.
    """
    if wanted is None:
        return VENDOR_TEMPERATURE, None
    if VENDOR_MIN_TEMPERATURE <= wanted <= VENDOR_MAX_TEMPERATURE:
        return wanted, None
    allowed = f"{VENDOR_MIN_TEMPERATURE} to {VENDOR_MAX_TEMPERATURE}"
    return (
        VENDOR_TEMPERATURE,
        f"temperature {wanted:g} is outside of {allowed} and was reset to {VENDOR_TEMPERATURE}",
    )


def continuation_of(
    lm: LM, context: int, opened: bool, request: EngineRequest, last: Snapshot
) -> tuple[Snapshot, EngineRequest] | None:
    """Makes the request that continues an answer without content, so that no client receives empty content.

    Two cases. If unbudgeted thinking used up `max_tokens`, the next request continues the thinking with its own budget,
    and `max_tokens` is kept for the answer. In all other cases the thinking, if any, is closed, and the first token of
    the next request is restricted to visible text.
    """
    tokenizer, marks = lm.tokenizer, lm.tokenizer.thinking
    if request.grammar is not None or request.visible:  # their answers always have content
        return None
    answer, inside = tuple(last.tokens.tolist()), opened or request.thinking > 0
    left = context - len(request.prompt) - len(answer) - 1
    unfinished = last.finish == "length" and answer_text.is_thinking(tokenizer, answer, inside)
    if unfinished and not request.thinking and left >= 2:
        max_tokens = min(request.max_tokens, left - 1)
        budget = min(EFFORTS["low"].thinking, left - max_tokens)
        prompt = (*request.prompt, *answer)
        more = {"prompt": prompt, "thinking": budget, "max_tokens": max_tokens, "prediction": ()}
        return last, dataclasses.replace(request, **more)
    closed = answer_text.close_thinking_ids(tokenizer, answer, inside)
    behind, size = answer_text.continuation_prompt(
        tokenizer, request.prompt, closed, request.max_tokens, context
    )
    following = dataclasses.replace(
        request, prompt=tuple(behind.ids), max_tokens=size, thinking=0, visible=True
    )
    if marks is not None and closed != answer:
        last = last.with_token(marks.close)
    return last, following
