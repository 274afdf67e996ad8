"""The static sizes of decoding: what a compiled step closes over.

`DecodeConfig` holds them. `build_config` chooses them for rows of given lengths, and refuses plans, rules and drafts
that the model cannot decode with. Lengths are rounded up to a `bucket`, so that few programs are compiled.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from mercury_jax.config import Plan, Refresh, refuse
from mercury_jax.decode import inputs
from mercury_jax.decode.sampler import Sampler
from mercury_jax.noise import Corruption
from mercury_jax.types import LM, Model

PREFILL = 256  # tokens of one pass over a long prompt
QUANTUM = 64  # capacities are multiples of it, then of powers of two


class DecodeConfig(NamedTuple):
    """What a compiled step closes over. Hashable: equal configs share one compilation."""

    model: Model
    corruption: Corruption
    width: int  # W, positions of a canvas
    block: int  # positions of the active block, at most the width
    forbidden: tuple[int, ...] = ()  # ids that are never emitted, beside the corruption's
    revisable: int = 0  # positions before the active block that stay editable
    refresh: Refresh | None = None  # bidirectional models: reuse of keys between steps; None: no reuse
    leave_one_out: bool = False  # each pass also predicts every position by a mask that does not see it
    variable_length: bool = False  # the rule inserts and deletes positions
    speculative: bool = False  # drafts are verified by a causal pass
    logprobs: int | None = None  # keep log-probabilities, with this many alternatives; None: keep none
    trajectory: bool = False  # keep when each token was accepted, and the log-probability of its draw
    vocab_chunk: int = 32768  # ids per chunk, where no part needs all logits (`chunked_vocab`)

    @property
    def window(self) -> int:
        """L, the positions that a rule sees."""
        return min(self.width, self.block + self.revisable)

    @property
    def never_emitted(self) -> tuple[int, ...]:
        """Ids that no answer may hold."""
        return (*self.corruption.forbidden, *self.forbidden)

    @property
    def slots_after(self) -> int:
        """Slots after a row's last position, where canvases are written; leave-one-out masks follow the canvas."""
        return self.width * (2 if self.leave_one_out else 1)


def build_config(
    lm: LM,
    sampler: Sampler,
    plan: Plan,
    *,
    model: Model,
    longest: int,
    region: int,
    block: int | None = None,
    infilling: bool = False,
    logprobs: int | None = None,
    trajectory: bool = False,
) -> DecodeConfig:
    """Chooses the static sizes for rows of given lengths.

    Args:
        lm: The model.
        sampler: Completed by `defaults.complete_sampler`.
        plan: Block and reuse of keys.
        model: `lm.model`, guided or divided over a mesh where the call asks for that.
        longest: The furthest position that any row can reach.
        region: Most tokens that a row may write.
        block: Width of the canvas where the rows fix it, instead of the plan's.
        infilling: No id ends the answer.
        logprobs: Keep log-probabilities, with this many alternatives at each token.
        trajectory: Keep when each token was accepted, and the log-probability of its draw.

    Returns:
        The static configuration.

    Raises:
        ValueError: Names what does not fit together.
    """
    _check_plan_fits(lm, plan, sampler)
    config, rule = lm.model.config, sampler.rule
    width, block = _sizes(lm, plan, sampler, block, longest, region)
    # Between refreshes a pass runs over `after` positions past the window; by default all that a row may write.
    refresh = plan.refresh
    if refresh is not None and refresh.after is None:
        refresh = dataclasses.replace(refresh, after=bucket(region))
    return DecodeConfig(
        model=model,
        corruption=lm.corruption,
        width=width,
        block=block,
        forbidden=(config.eos, *config.ends) if infilling else (),
        revisable=min(plan.revise * block, width) if config.pattern == "bidirectional" else 0,
        refresh=refresh,
        leave_one_out=rule.leave_one_out,
        variable_length=rule.variable_length,
        speculative=sampler.speculate is not None,
        logprobs=logprobs,
        trajectory=trajectory,
    )


def _check_plan_fits(lm: LM, plan: Plan, sampler: Sampler) -> None:
    """Refuses plans, rules and drafts that the model cannot decode with."""
    config, pattern, rule, draft = lm.model.config, lm.model.config.pattern, sampler.rule, sampler.speculate
    bidirectional = pattern == "bidirectional"
    if pattern == "block_causal" and plan.block is not None and config.block % plan.block:
        allowed = f"a divisor of {config.block}, the block of this model, or None"
        raise refuse("plan.block", plan.block, allowed)
    if rule.leave_one_out and config.alignment == "shifted":
        allowed = "a rule without leave-one-out predictions: this model's logits are shifted"
        raise refuse("sampler.rule", rule.name, allowed)
    if plan.refresh is not None and not bidirectional:
        raise refuse("plan.refresh", plan.refresh, f"None: the cache of a {pattern} model is exact")
    if plan.revise and not bidirectional:
        raise refuse("plan.revise", plan.revise, f"0: a {pattern} model encodes its blocks; use edit()")
    if plan.refresh is not None and (rule.leave_one_out or rule.variable_length):
        raise refuse("plan.refresh", plan.refresh, f"None with {rule.name}: it reads the whole canvas")
    if draft is None:
        return
    allowed = "a number of tokens to draft, 0 or more, or None"
    inputs.check_whole("sampler.speculate", draft, 0, inputs.MAX_TOKENS, allowed)
    if not config.predicts_next:
        allowed = "None: this model's encoding pass does not predict the next token"
        raise refuse("sampler.speculate", draft, allowed)
    if pattern == "block_causal" and draft:
        raise refuse("sampler.speculate", draft, "0: a model of one-token blocks has no draft to verify")
    if rule.leave_one_out or rule.variable_length:
        raise refuse("sampler.rule", rule.name, "a rule that accepts masks in place, to draft with")


def _sizes(
    lm: LM, plan: Plan, sampler: Sampler, block: int | None, longest: int, region: int
) -> tuple[int, int]:
    """Positions of the canvas, and of the active block."""
    config = lm.model.config
    whole = sampler.rule.variable_length and plan.block is None and config.pattern != "block_causal"
    if config.pattern == "bidirectional":
        width = bucket(longest)
        return width, width if whole else min(block or plan.block or config.block, width)
    if block is not None:
        return block, block
    if sampler.speculate is not None:
        width = min(plan.block or config.block, sampler.speculate + 1)
        return width, width
    if config.pattern == "block_causal":
        return config.block, plan.block or config.block
    width = bucket(region, config.block) if whole else plan.block or config.block
    return width, width


def bucket(size: int, quantum: int = QUANTUM) -> int:
    """Returns the smallest capacity >= size: multiples of `quantum` up to 8 of them, then 4 steps per doubling.

    Beyond 8 quanta it wastes less than a quarter of `size`; below that, less than a quantum.

    Args:
        size: What must fit.
        quantum: Smallest capacity.

    Returns:
        The capacity.
    """
    step = quantum
    while step * 8 < size:
        step *= 2
    return -(-size // step) * step


def slots_for(tokens: int, behind: int, context: int) -> int:
    """Returns the slots of a row's tokens and KV cache: a bucket, but no more than any row of the model needs.

    Without that bound a row that fills a context of 2 ** k would take the next bucket, a quarter more slots.

    Args:
        tokens: Positions of the longest row.
        behind: Further slots after a row's last position, where canvases are written.
        context: The model's; no row is longer.

    Returns:
        The number of slots.
    """
    most = -(-(context + behind) // QUANTUM) * QUANTUM
    return min(bucket(tokens + behind), max(most, tokens + behind))


def prefill_width(config: DecodeConfig, pending: int) -> int | None:
    """Returns the tokens of one pass over a long prompt; None where the decoder's own steps encode it.

    Args:
        config: Static sizes.
        pending: Committed tokens that are not in the cache, at most.

    Returns:
        The width, or None.
    """
    if config.model.config.pattern == "bidirectional" or pending <= 2 * config.width:
        return None
    # Whole blocks: a block-causal row must find the keys of its own block in the same pass.
    quantum = config.width if config.model.config.pattern == "block_causal" else 1
    return -(-min(PREFILL, bucket(pending)) // quantum) * quantum
