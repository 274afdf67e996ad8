"""Logits processors: what changes the logits of a row before the token statistics are computed.

logits      processors whose parameters are numbers: temperature, truncation, penalties
token_ids   processors that take tables of ids: bias, ban, allow

A forbidden id (its logit is `token_stats.NEVER`) stays forbidden, and finite, through every chain of processors.
A user's own processor, registered by `mj.logits_processor(name=...)`, is found here too.
"""

from typing import Any

from mercury_jax.decode.processors.logits import (
    cooling,
    frequency,
    min_p,
    presence,
    repetition,
    temperature,
    top_k,
    top_p,
)
from mercury_jax.decode.processors.token_ids import allow, allow_bits, ban, bias, check_ids
from mercury_jax.decode.registration import PROCESSORS

ALL = PROCESSORS  # by name; `allow`, `allow_bits`, `ban` and `bias` take tables and are not in it

__all__ = [
    "ALL", "allow", "allow_bits", "ban", "bias", "check_ids", "cooling", "frequency", "min_p", "presence", "repetition",
    "temperature", "top_k", "top_p",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in PROCESSORS:
        return PROCESSORS[name]
    raise AttributeError(f"no logits processor is called {name!r}; there are {', '.join(PROCESSORS)}")
