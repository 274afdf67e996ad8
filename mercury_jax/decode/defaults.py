"""How a model is decoded where the caller does not say: the checkpoint's own settings, else those of its noise.

Also the effort levels, which set the thinking budget, the rule and the steps of a conversation at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp

from mercury_jax.config import Plan, refuse
from mercury_jax.decode import processors, rules, stopping
from mercury_jax.decode.registration import Above, AtLeast, check_number
from mercury_jax.decode.sampler import Param, Rule, Sampler, SamplerLike, check_sampler
from mercury_jax.noise import Corruption
from mercury_jax.types import LM

# Keys of `LM.decoding`; hub/generation.py says what they mean.
SETTINGS = (
    "rule", "params", "temperature", "processors", "cooling", "steady", "block", "steps", "source",
)  # fmt: skip


def default_sampler(lm: LM, temperature: Param | Sequence[float] | None = None) -> Rule | Sampler:
    """Returns the model's own sampler: that of its checkpoint or family, else one that suits its noise.

    Args:
        lm: `LM.decoding` holds the settings, by the keys of hub/generation.py.
        temperature: Replaces the temperature of these settings, also where it divides the logits before the confidence
            is read from them; one number or one per row. None: theirs.

    Returns:
        The rule, or a sampler of it.

    Raises:
        ValueError: The settings name a rule or processor that does not exist, or a key that is not used.
    """
    if unknown := sorted(set(lm.decoding) - set(SETTINGS)):
        raise refuse("LM.decoding", unknown, ", ".join(SETTINGS))
    name, chain = lm.decoding.get("rule"), lm.decoding.get("processors", {})
    if not name:
        if lm.model.config.autoregressive:
            made = rules.autoregressive()
        else:
            made = rules.diffusion_gemma() if lm.corruption.mask is None else rules.threshold()
        return made if temperature is None else check_sampler(made)._replace(temperature=temperature)
    if name not in rules.ALL:
        raise refuse("LM.decoding: rule", name, ", ".join(rules.ALL))
    for processor in chain:
        if processor not in processors.ALL:
            raise refuse("LM.decoding: processors", processor, ", ".join(processors.ALL))
    cooling, steady = lm.decoding.get("cooling"), lm.decoding.get("steady")
    own = check_sampler(rules.ALL[name](**lm.decoding.get("params", {})))
    drawn = own.temperature if lm.decoding.get("temperature") is None else lm.decoding["temperature"]
    if temperature is not None and "temperature" in chain:
        t = jnp.asarray(temperature, float)  # 0 takes the argmax, and does not divide by it
        chain = {**chain, "temperature": {"t": jnp.where(t > 0, t, 1.0)}}
        drawn = jnp.where(t > 0, 1.0, 0.0)
    elif temperature is not None:
        drawn = temperature
    named = tuple(processors.ALL[key](**params) for key, params in chain.items())
    return own._replace(
        processors=((processors.cooling(**cooling),) if cooling else ()) + named,
        stopping=stopping.steady(**steady) if steady else own.stopping,
        temperature=drawn,
    )


def default_plan(lm: LM, plan: Plan, share: float = 1.0) -> Plan:
    """Returns the plan with the block and steps of the model's own settings where it names no block itself.

    Args:
        lm: `LM.decoding` may hold "block" and "steps"; the block "answer" is as long as the context.
        plan: The caller's; its steps are kept.
        share: Of the model's own steps, by effort.

    Returns:
        The plan.
    """
    block, steps = lm.decoding.get("block"), lm.decoding.get("steps")
    if plan.block is not None:
        return plan
    if plan.steps is None and steps is not None:
        plan = dataclasses.replace(plan, steps=max(1, round(share * steps)))
    return dataclasses.replace(plan, block=lm.model.config.context if block == "answer" else block)


def rule_settings(sampler: Any) -> dict[str, Any]:
    """Describes a rule as `LM.decoding` stores it in a model's folder: {"rule": name, "params": {parameters}}.

    Args:
        sampler: A registered rule with one number for each of its parameters; None for no rule of its own.

    Returns:
        What `default_sampler` reads; empty for None.

    Raises:
        ValueError: It is no such rule. Processors and stopping criteria are not stored.
    """
    if sampler is None:
        return {}
    plain = isinstance(sampler, Rule) and sampler.name in rules.ALL
    if not plain or not all(isinstance(value, int | float) for value in sampler.params.values()):
        raise refuse("sampler", sampler, "a rule of mercury_jax.rules such as rules.threshold(0.9), or None")
    return {"rule": sampler.name, "params": dict(sampler.params)}


def complete_sampler(sampler: SamplerLike, corruption: Corruption, autoregressive: bool = False) -> Sampler:
    """Fills in what a sampler leaves open: stopping criterion and temperature.

    Args:
        sampler: A sampler, or a rule alone.
        corruption: The default stopping criterion is `filled` under masks, `steady` under uniform noise.
        autoregressive: Whether the model can only decode so: then nothing is drafted, and the rule has no effect.

    Returns:
        A sampler whose `stopping` and `temperature` are set.

    Raises:
        ValueError: The rule is made for another kind of noise, or a field holds something else.
    """
    checked = check_sampler(sampler)
    if autoregressive and checked.speculate is None:
        checked = checked._replace(speculate=0)
    noise = "uniform" if corruption.mask is None else "absorbing"
    rule = checked.rule
    if noise not in rule.noise and checked.speculate != 0:
        allowed = f"a rule for {noise} noise; this one is for {rule.noise[0]} noise"
        raise refuse("sampler.rule", rule.name, allowed)
    default = stopping.steady if corruption.mask is None else stopping.filled
    return checked._replace(
        stopping=checked.stopping or (rule.stopping or default)(),
        temperature=rule.temperature if checked.temperature is None else checked.temperature,
    )


class Effort(NamedTuple):
    """How much compute an answer may use. The tokens of the answer itself are `max_tokens`, at every effort.

    Attributes:
        thinking: Most tokens of thinking before the answer of a conversation; 0: none.
        p: Probability from which `threshold` accepts a token.
        steps: Most denoising steps of a block, as a share of its tokens.
    """

    thinking: int
    p: float
    steps: float


EffortLike: TypeAlias = str | Effort
EFFORTS = {
    "instant": Effort(thinking=0, p=0.7, steps=0.25),
    "low": Effort(thinking=128, p=0.8, steps=0.5),
    "medium": Effort(thinking=512, p=0.9, steps=1.0),
    "high": Effort(thinking=2048, p=0.99, steps=1.0),
}


def find_effort(effort: EffortLike | Sequence[EffortLike] | None) -> Effort | list[Effort] | None:
    """Looks up an effort level, or one per prompt.

    Args:
        effort: A name, an `Effort` of one's own, a list of these, or None.

    Returns:
        The `Effort`, a list of them, or None.

    Raises:
        ValueError: An unknown name, or a field out of range.
    """
    if effort is None or (isinstance(effort, list | tuple) and not isinstance(effort, Effort)):
        return None if effort is None else [_one_effort(f"effort[{i}]", one) for i, one in enumerate(effort)]
    return _one_effort("effort", effort)


def _one_effort(name: str, effort: Any) -> Effort:
    if isinstance(effort, Effort):
        check_number("Effort.thinking", effort.thinking, AtLeast(0, integer=True))
        check_number("Effort.p", effort.p, rules.threshold.ranges["p"])
        check_number("Effort.steps", effort.steps, Above(0))
        return effort
    if not isinstance(effort, str) or effort not in EFFORTS:
        raise refuse(name, effort, ", ".join(EFFORTS) + ", or an Effort")
    return EFFORTS[effort]


def choose_sampler(
    lm: LM,
    sampler: SamplerLike | None,
    plan: Plan,
    effort: Effort | None,
    temperature: Param | Sequence[float] | None = None,
) -> tuple[SamplerLike, Plan]:
    """Chooses sampler and plan where the caller leaves them open.

    Args:
        lm: Its checkpoint and noise set the defaults.
        sampler: The caller's, or None.
        plan: The caller's; fields that it sets are kept.
        effort: Under masked noise it sets the threshold and the steps; under uniform noise a share of the steps.
        temperature: The caller's; where the model's own sampler applies, it replaces that one's.

    Returns:
        The sampler and the plan.
    """
    if effort is not None and lm.corruption.mask is not None:
        sampler = sampler or rules.threshold(effort.p)
        if plan.steps is None:
            tokens = plan.block or lm.model.config.block
            plan = dataclasses.replace(plan, steps=max(1, round(effort.steps * tokens)))
    if sampler is None:
        share = 1.0 if effort is None else effort.steps
        return default_sampler(lm, temperature), default_plan(lm, plan, share)
    return sampler, plan
