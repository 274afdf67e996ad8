"""Lossless ways to decode with a model whose encoding pass predicts the next token."""

from __future__ import annotations

from typing import Annotated, Any

from mercury_jax.config import refuse
from mercury_jax.decode.parts import Sampler, tell
from mercury_jax.decode.ranges import AtLeast, checked, ranges_of
from mercury_jax.decode.rules.masked import confidence


def autoregressive(temperature: Annotated[float, AtLeast(0)] = 0.0) -> Sampler:
    """One token a pass, each drawn from the causal pass's prediction: plain autoregressive decoding."""
    temperature = checked("autoregressive(temperature=)", temperature, autoregressive.ranges["temperature"])
    return Sampler(confidence(), temperature=temperature, verify=0)


def self_speculation(
    draft: Annotated[float, AtLeast(1, whole=True)] = 31,
    temperature: Annotated[float, AtLeast(0)] = 0.0,
    rule: Any = None,
) -> Sampler:
    """Draft up to `draft` tokens by diffusion, check them in one causal pass, keep what agrees.

    The text is that of `autoregressive` with the same seed, token for token, at any temperature. rule:
    drafts (None: all tokens of the canvas in one pass, as in LinearSpec and TiDAR, arXiv 2511.08923;
    more passes a draft with `Plan(steps=)`).
    """
    ranges = self_speculation.ranges
    draft = checked("self_speculation(draft=)", draft, ranges["draft"])
    if not isinstance(draft, int):  # it sets the width of the canvas
        raise refuse("self_speculation(draft=)", draft, "one number for all rows")
    temperature = checked("self_speculation(temperature=)", temperature, ranges["temperature"])
    return Sampler(rule or confidence(), temperature=temperature, verify=draft)


tell(autoregressive, {"temperature": 0.0}, ranges_of(autoregressive))
tell(self_speculation, {"draft": 31, "temperature": 0.0}, ranges_of(self_speculation))
