"""Lossless ways to decode with a model whose encoding pass predicts the next token."""

from __future__ import annotations

from typing import Any

from mercury_jax.config import refuse
from mercury_jax.decode.parts import Sampler
from mercury_jax.decode.rules.masked import confidence


def autoregressive(temperature: float = 0.0) -> Sampler:
    """One token a pass, each drawn from the causal pass's prediction: plain autoregressive decoding."""
    return Sampler(confidence(), temperature=temperature, verify=0)


def self_speculation(draft: float = 31, temperature: float = 0.0, rule: Any = None) -> Sampler:
    """Draft up to `draft` tokens by diffusion, check them in one causal pass, keep what agrees.

    The text is that of `autoregressive` with the same seed, token for token, at any temperature. rule:
    drafts (None: all tokens of the canvas in one pass, as in LinearSpec and TiDAR, arXiv 2511.08923;
    more passes a draft with `Plan(steps=)`).
    """
    if isinstance(draft, bool) or draft != int(draft) or draft < 1:
        raise refuse("self_speculation(draft=)", draft, "a whole number from 1 on")
    return Sampler(rule or confidence(), temperature=temperature, verify=int(draft))


def _knobs(make: Any, **defaults: Any) -> None:
    """The numbers that a maker takes, as makers of rules tell them."""
    make.knobs = defaults


_knobs(autoregressive, temperature=0.0)
_knobs(self_speculation, draft=31, temperature=0.0)
