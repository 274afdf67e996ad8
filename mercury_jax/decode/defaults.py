"""Default samplers and plans: the settings of the checkpoint, or else those for its noise.

Also the effort levels, each of which sets the thinking budget, the rule and the steps of a conversation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from mercury_jax.config import Above, AtLeast, Plan, refuse
from mercury_jax.decode import processors, rules, stopping
from mercury_jax.decode.inputs import Effort, EffortLike
from mercury_jax.decode.registration import check_number
from mercury_jax.decode.sampler import LogitsProcessor, Param, Rule, Sampler, SamplerLike, check_sampler
from mercury_jax.noise import Corruption
from mercury_jax.types import LM

# Keys of `LM.decoding`; hub/generation.py defines them.
SETTINGS = (
    "rule", "params", "temperature", "processors", "cooling", "steady", "block", "steps", "source",
    "ban", "begin_ban", "min_tokens", "bias",
)  # fmt: skip


def default_sampler(lm: LM, temperature: Param | Sequence[float] | None = None) -> Rule | Sampler:
    """Returns the default sampler of a model: that of its checkpoint or family, or else the default for its noise.

    Args:
        temperature: Replaces the temperature of the settings, one number or one per row. If the settings contain a
            temperature processor, which also changes the confidence, it is replaced there. None: that of the settings.
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
        # The processor divides by the temperature; 0 must not, and selects the argmax by `drawn` instead.
        t = jnp.asarray(temperature, float)
        chain = {**chain, "temperature": {"t": jnp.where(t > 0, t, 1.0)}}
        drawn = jnp.where(t > 0, 1.0, 0.0)
    elif temperature is not None:
        drawn = temperature
    # As in the code of the authors, these processors all change the confidence.
    named = tuple(
        processors.before_confidence(processors.ALL[key](**params)) for key, params in chain.items()
    )
    return own._replace(
        processors=_tables(lm) + ((processors.cooling(**cooling),) if cooling else ()) + named,
        stopping=stopping.steady(**steady) if steady else own.stopping,
        temperature=drawn,
    )


def _tables(lm: LM) -> tuple[LogitsProcessor, ...]:
    """Makes the processors of the settings that are ids. Ids beyond the vocabulary have no effect."""
    settings, c = lm.decoding, lm.model.config
    within = lambda name: [i for i in settings.get(name, ()) if 0 <= i < c.vocab]
    made = []
    if biases := {int(i): x for i, x in settings.get("bias", ()) if 0 <= i < c.vocab}:
        made.append(processors.bias(biases))
    if ids := within("ban"):
        made.append(processors.ban(ids))
    if ids := within("begin_ban"):
        made.append(processors.ban(ids, before=1))
    ends = [i for i in (c.eos, *c.ends) if i >= 0]
    if ends and (least := settings.get("min_tokens")):
        made.append(processors.ban(ends, before=least))
    return tuple(made)


def default_editor(lm: LM) -> Rule:
    """Chooses the rule that replaces tokens of a text which the model finds improbable."""
    if lm.corruption.mask is None:
        return rules.entropy_bound()
    blind = lm.model.leave_one_out and lm.model.config.alignment != "shifted"
    return rules.blind_editing() if blind else rules.editing()


def default_plan(lm: LM, plan: Plan, share: float = 1.0) -> Plan:
    """Completes a plan without a block by the block and steps of the model's settings."""
    block, steps = lm.decoding.get("block"), lm.decoding.get("steps")
    if plan.block is not None:
        return plan
    if plan.steps is None and steps is not None:
        plan = dataclasses.replace(plan, steps=max(1, round(share * steps)))
    return dataclasses.replace(plan, block=lm.model.config.context if block == "answer" else block)


def rule_settings(sampler: Any) -> dict[str, Any]:
    """Describes a rule as `LM.decoding` stores it in a model's folder: {"rule": name, "params": {parameters}}.

    Args:
        sampler: A registered rule whose parameters are single numbers; None: store no rule.

    Returns:
        Settings for `default_sampler`; empty for None.
    """
    if sampler is None:
        return {}
    plain = isinstance(sampler, Rule) and sampler.name in rules.ALL
    if not plain or not all(isinstance(value, int | float) for value in sampler.params.values()):
        raise refuse("sampler", sampler, "a rule of mercury_jax.rules such as rules.threshold(0.9), or None")
    return {"rule": sampler.name, "params": dict(sampler.params)}


def complete_sampler(sampler: SamplerLike, corruption: Corruption, autoregressive: bool = False) -> Sampler:
    """Sets the stopping criterion and the temperature of a sampler that does not name them.

    Args:
        corruption: Noise of the model. The default stopping criterion is `filled` for absorbing noise, and `steady`
            for uniform noise.
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


EFFORTS = {
    "instant": Effort(thinking=0, p=0.7, steps=0.25),
    "low": Effort(thinking=128, p=0.8, steps=0.5),
    "medium": Effort(thinking=512, p=0.9, steps=1.0),
    "high": Effort(thinking=2048, p=0.99, steps=1.0),
}


def find_effort(effort: EffortLike | Sequence[EffortLike] | None) -> Effort | list[Effort] | None:
    """Looks up an effort level, or one per prompt."""
    if effort is None or (isinstance(effort, list | tuple) and not isinstance(effort, Effort)):
        return None if effort is None else [_one_effort(f"effort[{i}]", one) for i, one in enumerate(effort)]
    return _one_effort("effort", effort)


def _one_effort(name: str, effort: Any) -> Effort:
    """Looks up one effort level, or checks the fields of an `Effort`."""
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
    """Chooses the sampler and the fields of the plan that the caller does not set.

    Args:
        effort: For absorbing noise the effort sets the threshold and the steps; for uniform noise, the share of the
            default steps.
        temperature: The temperature of the caller; it replaces that of the default sampler. It has no effect on a
            sampler of the caller, which `request.py` handles.
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
