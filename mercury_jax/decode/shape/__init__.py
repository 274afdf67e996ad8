"""Shapers: what is done to the logits of a row before a rule reads them.

An id that is forbidden (a logit of `NEVER`) stays forbidden, and finite, through every chain of them.
"""

from mercury_jax.decode.shape.allow import allow, allow_bits
from mercury_jax.decode.shape.bias import ban, bias
from mercury_jax.decode.shape.penalty import frequency, presence, repetition
from mercury_jax.decode.shape.scale import cooling, temperature
from mercury_jax.decode.shape.tables import check_ids
from mercury_jax.decode.shape.truncate import min_p, top_k, top_p

# Those whose parameters are numbers; `allow`, `ban` and `bias` take tables of ids.
ALL = {
    make.__name__: make
    for make in (temperature, cooling, top_k, top_p, min_p, repetition, presence, frequency)
}

__all__ = [
    "ALL", "allow", "allow_bits", "ban", "bias", "check_ids", "cooling", "frequency", "min_p", "presence", "repetition",
    "temperature", "top_k", "top_p",
]  # fmt: skip
