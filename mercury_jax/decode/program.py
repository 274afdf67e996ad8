"""From a request, a sampler and a plan to the program that decodes it, with every misfit refused in words."""

from __future__ import annotations

import dataclasses
from typing import Any

from mercury_jax.config import Plan, refuse
from mercury_jax.decode import shape
from mercury_jax.decode.parts import Sampler, complete
from mercury_jax.decode.ranges import AtLeast, checked
from mercury_jax.decode.state import Program
from mercury_jax.types import LM

QUANTUM = 64  # capacities are multiples of it, then of powers of two


def bucket(size: int, quantum: int = QUANTUM) -> int:
    """The least capacity >= size of a ladder: multiples of `quantum` up to 8 of them, then 4 steps to each doubling.

    Beyond 8 quanta it wastes less than a quarter of `size`; below that, less than a quantum.
    """
    step = quantum
    while step * 8 < size:
        step *= 2
    return -(-size // step) * step


def slots_for(tokens: int, behind: int, context: int) -> int:
    """Slots of a row's text and KV cache: `bucket` of what it needs, but no more than any row of the model needs.

    Without that bound a row that fills a context of 2 ** k would take the next step of the ladder, a quarter more
    slots, for the canvas behind it.

    Args:
        tokens: Positions of the longest row.
        behind: Further slots behind a row's last position, where canvases are written.
        context: The model's; no row is longer.
    """
    most = -(-(context + behind) // QUANTUM) * QUANTUM
    return min(bucket(tokens + behind), max(most, tokens + behind))


def plan_program(
    lm: LM, request: Any, sampler: Any, plan: Plan, *, block: int | None, infilling: bool
) -> tuple[Program, Sampler]:
    """(the program, the sampler with its defaults filled). Raises ValueError for what does not fit."""
    config = lm.model.config
    sampler = complete(sampler, lm.corruption, autoregressive=config.autoregressive)
    sampler = sampler._replace(temperature=checked_temperature(sampler.temperature))
    rule, verify = sampler.rule, sampler.verify
    _check_parts(sampler, config.vocab)
    _check_plan(lm, plan, sampler)
    full = config.pattern == "bidirectional"
    longest, region = int(request.longest.max()), int((request.longest - request.known).max())
    width, active = _sizes(lm, plan, sampler, block, longest, region)
    refresh = plan.refresh
    if refresh is not None and refresh.after is None:
        refresh = dataclasses.replace(refresh, after=bucket(region))
    program = Program(
        lm.model,
        lm.corruption,
        width=width,
        block=active,
        forbidden=(config.eos, *config.ends) if infilling else (),
        back=min(plan.revise * active, width) if full else 0,
        refresh=refresh,
        blind=rule.blind,
        grows=rule.grows,
        verify=verify is not None,
    )
    return program, sampler._replace(verify=None)


def _sizes(
    lm: LM, plan: Plan, sampler: Sampler, block: int | None, longest: int, region: int
) -> tuple[int, int]:
    """(positions of the canvas, positions of the active block)."""
    config = lm.model.config
    whole = sampler.rule.grows and plan.block is None and config.pattern != "block_causal"
    if config.pattern == "bidirectional":
        width = bucket(longest)
        return width, width if whole else min(block or plan.block or config.block, width)
    if block is not None:
        return block, block
    if config.pattern == "block_causal" and sampler.verify is None:
        return config.block, plan.block or config.block
    if sampler.verify is not None:
        width = min(plan.block or config.block, sampler.verify + 1)
        return width, width
    width = bucket(region, config.block) if whole else plan.block or config.block
    return width, width


def _check_parts(sampler: Sampler, vocab: int) -> None:
    for part in (*sampler.shape, *sampler.allow):
        shape.check_ids(part, vocab)


def _check_plan(lm: LM, plan: Plan, sampler: Sampler) -> None:
    config, rule = lm.model.config, sampler.rule
    full = config.pattern == "bidirectional"
    if config.pattern == "block_causal" and plan.block is not None and config.block % plan.block:
        raise refuse(
            "plan.block", plan.block, f"a divisor of {config.block}, the block of this model, or None"
        )
    if rule.blind and config.alignment == "shifted":
        raise refuse(
            "sampler.rule", rule.name, "a rule that needs no blind masks: this model's logits are shifted"
        )
    if plan.refresh is not None and not full:
        raise refuse("plan.refresh", plan.refresh, f"None: the cache of a {config.pattern} model is exact")
    if plan.revise and not full:
        raise refuse(
            "plan.revise", plan.revise, f"0: a {config.pattern} model encodes its blocks; use edit()"
        )
    if plan.refresh is not None and (rule.blind or rule.grows):
        raise refuse("plan.refresh", plan.refresh, f"None with {rule.name}: it looks at the whole canvas")
    if sampler.verify is not None:
        _check_verify(lm, sampler, plan)


def _check_verify(lm: LM, sampler: Sampler, plan: Plan) -> None:
    verify, config = sampler.verify, lm.model.config
    if isinstance(verify, bool) or not isinstance(verify, int) or verify < 0:
        raise refuse("sampler.verify", verify, "a number of tokens to draft, 0 or more, or None")
    if not config.predicts_next:
        raise refuse(
            "sampler.verify", verify, "None: this model's encoding pass does not predict the next token"
        )
    if config.pattern == "block_causal" and verify:
        raise refuse("sampler.verify", verify, "0: a model of one-token blocks has no longer draft to check")
    if sampler.rule.blind or sampler.rule.grows:
        raise refuse("sampler.rule", sampler.rule.name, "a rule that settles masks in place, to draft with")


def checked_temperature(value: Any) -> Any:
    """A temperature, or an array of one a row; values traced under `jit` pass."""
    return checked("temperature", value, AtLeast(0))
