"""How a model is decoded where the caller does not say: as its checkpoint asks, else as its noise suggests."""

from __future__ import annotations

import dataclasses
from typing import Any

from mercury_jax.config import Plan, refuse
from mercury_jax.decode import rules, shape, stop
from mercury_jax.decode.parts import Part, Sampler
from mercury_jax.types import LM


def sampler(lm: LM) -> Part | Sampler:
    """The model's own sampler: `LM.decoding`'s; else one by the noise, `threshold` where there is a mask."""
    if lm.decoding.get("rule"):
        return _asked(lm)
    if lm.model.config.autoregressive:
        return rules.autoregressive()
    return rules.diffusion_gemma() if lm.corruption.mask is None else rules.threshold()


def described(sampler: Any) -> dict[str, Any]:
    """A rule as `LM.decoding` stores it, for a model's own folder: {"rule": name, "knobs": {}}.

    Args:
        sampler: A rule of `mj.rules` with one number for each of its parameters; None for no rule of its own.

    Returns:
        What `sampler()` reads back; empty for None.

    Raises:
        ValueError: It is no such rule. Processors and stopping criteria are not stored.
    """
    if sampler is None:
        return {}
    plain = isinstance(sampler, Part) and sampler.name in rules.ALL
    if not plain or not all(isinstance(value, int | float) for value in sampler.knobs.values()):
        raise refuse("sampler", sampler, "a rule of mercury_jax.rules such as rules.threshold(0.9), or None")
    return {"rule": sampler.name, "knobs": dict(sampler.knobs)}


def plan(lm: LM, wanted: Plan, share: float = 1.0) -> Plan:
    """The plan with the checkpoint's own block and `share` of its steps, where it names none itself."""
    block, steps = lm.decoding.get("block"), lm.decoding.get("steps")
    if wanted.block is None and wanted.steps is None and steps is not None:
        return dataclasses.replace(wanted, block=block, steps=max(1, round(share * steps)))
    return wanted


def _asked(lm: LM) -> Sampler:
    """LM.decoding as a sampler: {"rule": name, "knobs": {}, "temperature", "cooling": {}, "steady": {}}."""
    name = lm.decoding["rule"]
    if name not in rules.ALL:
        raise refuse("LM.decoding: rule", name, ", ".join(rules.ALL))
    shapes, cooling, steady = [], lm.decoding.get("cooling"), lm.decoding.get("steady")
    if cooling:
        shapes.append(shape.cooling(**cooling))
    ending: Any = stop.steady(**steady) if steady else None
    rule: Any = rules.ALL[name](**lm.decoding.get("knobs", {}))
    return Sampler(rule, tuple(shapes), ending, lm.decoding.get("temperature"))
