"""The numbers of a request as those of a job: room, effort, temperature, penalties."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple

from mercury_jax.decode.effort import EFFORTS, Effort
from mercury_jax.serve.api import errors
from mercury_jax.serve.api.service import Service

Ask = Mapping[str, Any]  # a validated request: every field of its table, by name

DEFAULT_TOKENS = 16384  # the vendor's, of a conversation's answer
LEAST_THINKING = 8  # tokens: less room is none
VENDOR_LEAST, VENDOR_MOST, VENDOR_TEMPERATURE = 0.5, 1.0, 0.75
PENALTIES = (0.01, 100.0)  # what dividing logits bears


class Room(NamedTuple):
    """Tokens for thinking, and those kept for the answer."""

    thinking: int
    answer: int


def room(context: int, prompt: int, wanted: int | None, thinking: int, param: str = "messages") -> Room:
    """How what the context leaves is shared. ApiError where a prompt leaves nothing.

    A client's own wish goes first and thinking shrinks to what is left of it; where the client named none,
    thinking takes at most half. Wishes beyond the context are cut: editors ask for 8192 tokens of any model.
    """
    left = context - prompt
    if left < 1:
        raise errors.too_long(context, param)
    left -= 1 if thinking else 0  # the token that ends thinking
    if wanted is None:
        thinking = min(thinking, left // 2)
        answer = min(DEFAULT_TOKENS, left - thinking)
    else:
        answer = min(wanted, left)
        thinking = min(thinking, left - answer)
    if thinking < LEAST_THINKING:
        return Room(0, min(DEFAULT_TOKENS if wanted is None else wanted, context - prompt))
    return Room(thinking, answer)


class Pace(NamedTuple):
    """How strictly tokens are accepted, as `Job` has it, and how much may be thought first."""

    rule: str
    p: float | None
    steps: int
    thinking: int


def pace(service: Service, name: str | None) -> Pace:
    """Of a named effort, else of the server's own; where there is none either, of the model's own rule."""
    name = name or service.options.effort
    lm, engine = service.engine.lm, service.engine
    own, steps = engine.rules.names[0], lm.decoding.get("steps")
    thinks = lm.tokenizer.thinking is not None
    if name is None:
        usual = EFFORTS["medium"].thinking
        fits = thinks and usual * 4 <= service.engine.context
        return Pace(own, None, steps or 0, usual if fits else 0)
    effort = EFFORTS[name]
    thinking = effort.thinking if thinks else 0
    if lm.corruption.mask is None or "threshold" not in engine.rules.names:
        return Pace(own, None, _share(effort, steps or engine.block), thinking)
    return Pace("threshold", effort.p, _share(effort, engine.block), thinking)


def _share(effort: Effort, steps: int) -> int:
    return max(1, round(effort.steps * steps))


def sampling(ask: Ask, vocab: int) -> dict[str, Any]:
    """The fields of `Job` that shape probabilities; what a table does not have stays as `Job` has it."""
    top_k = ask.get("top_k", -1)
    return {
        "top_p": ask["top_p"],
        "top_k": 0 if top_k < 1 or top_k >= vocab else top_k,
        "min_p": ask.get("min_p", 0.0),
        "repetition_penalty": min(max(ask.get("repetition_penalty", 1.0), PENALTIES[0]), PENALTIES[1]),
        "presence_penalty": ask["presence_penalty"],
        "frequency_penalty": ask["frequency_penalty"],
        "logit_bias": _bias(ask.get("logit_bias"), vocab),
    }


def _bias(table: Mapping[str, float] | None, vocab: int) -> dict[int, float]:
    out = {int(name): value for name, value in (table or {}).items()}
    for id in out:
        if id >= vocab:
            raise errors.refused("key of logit_bias", id, f"a token's id, 0 to {vocab - 1}")
    return out


def temperature(ask: Ask, strict: bool) -> tuple[float | None, str | None]:
    """(the temperature, a warning). Strict: as the vendor, whose model knows 0.5 to 1 only."""
    wanted = ask.get("temperature")
    if not strict:
        return wanted, None
    if wanted is None or VENDOR_LEAST <= wanted <= VENDOR_MOST:
        return VENDOR_TEMPERATURE if wanted is None else wanted, None
    told = f"temperature {wanted:g} is outside of {VENDOR_LEAST} to {VENDOR_MOST} and was reset to {VENDOR_TEMPERATURE}"
    return VENDOR_TEMPERATURE, told


def seed(ask: Ask) -> int:
    """The request's, or a fresh one; engines take 31 bits."""
    return secrets.randbits(31) if ask["seed"] is None else ask["seed"] % (1 << 31)


def check_size(service: Service, size: int, param: str = "messages") -> None:
    """Refuse texts of so many bytes that cannot fit the context, before they are tokenized."""
    if size > service.engine.context * service.longest:
        raise errors.too_long(service.engine.context, param)
