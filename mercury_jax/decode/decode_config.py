"""The static sizes of decoding: what a compiled step closes over.

`DecodeConfig` holds them. `build_config` chooses them for rows of given lengths, and refuses plans, rules and drafts
that the model does not support. Lengths are rounded up to a `bucket`, so that few programs are compiled.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from mercury_jax.config import Plan, Refresh, refuse
from mercury_jax.decode import inputs, processors
from mercury_jax.decode.cache_refresh import CachePolicy, cache_vectors
from mercury_jax.decode.registration import check_token_ids
from mercury_jax.decode.rules.position import check_tables
from mercury_jax.decode.sampler import LeaveOneOutMasks, Sampler
from mercury_jax.noise import Corruption
from mercury_jax.types import LM, Model

PREFILL = 256  # tokens per prefill pass
QUANTUM = 64  # capacities are multiples of this number; larger ones, of its products with powers of two
SEES_PADDING = "apply takes neither lengths nor attention_mask, so it would see the padding of shorter rows"


class DecodeConfig(NamedTuple):
    """What a compiled step closes over. Hashable: equal configs share one compilation."""

    model: Model
    corruption: Corruption
    width: int  # W, positions of a canvas
    block: int  # positions of the active block, at most `width`
    forbidden: tuple[int, ...] = ()  # ids that are never emitted, in addition to `corruption.forbidden`
    revisable: int = 0  # positions before the active block that stay editable
    refresh: Refresh | CachePolicy | None = None  # reuse of keys and values between the steps of a canvas
    # a pass feeds additional masks after the canvas, one per window position
    leave_one_out: LeaveOneOutMasks = False
    variable_length: bool = False  # the rule inserts and deletes positions
    speculative: bool = False  # drafts are verified by a causal pass
    lookahead: int = 0  # drafts of later canvases that each pass computes too (`lookahead.py`)
    # alternatives per token for which log-probabilities are kept; None: keep none
    logprobs: int | None = None
    times: tuple[float, ...] | None = None  # times t of a block's steps and its end; None: evenly from 1 to 0
    trajectory: bool = False  # record when each token was accepted, and the log-probability of its draw
    drafter: DecodeConfig | None = None  # config of a separate drafter (`drafting.py`); implies `speculative`
    drafts: str | None = None  # for a drafter: how its drafts are accepted, "same_seed" or "rejection"
    # rows up to which a pass commits a block and begins the next one (`fused_commit.py`)
    fuse_commit: int = 0
    vocab_chunk: int = 32768  # ids per chunk, if no part needs all logits (`chunked_vocab.py`)
    logit_bytes: int = 2**29  # up to this size in fp32, one product computes the logits of all chunks

    @property
    def window(self) -> int:
        """L, the number of positions that a rule sees."""
        return min(self.width, self.block + self.revisable)

    @property
    def seeded(self) -> bool:
        """Whether the pass that encodes a block also decides the first token of the next block (Fast-dLLM v2)."""
        config = self.model.config
        return config.pattern == "block_causal" and config.alignment == "shifted"

    @property
    def own_prefill(self) -> int:
        """The largest number of prompt tokens that `step` encodes; `prefill` encodes the rest."""
        # `step` encodes W tokens per pass, so that this rest takes two passes.
        return 2 * self.width

    @property
    def never_emitted(self) -> tuple[int, ...]:
        """Ids that may not occur in an answer."""
        return (*self.corruption.forbidden, *self.forbidden)

    @property
    def slots_after(self) -> int:
        """Slots after a row's last position, where a canvas and the leave-one-out masks after it are written."""
        # With shifted logits, a pass also feeds the token before its first position, unless it starts at position 0.
        # A row that reuses the keys before its block must fit that token into its widest pass too.
        more = 8 if self.refresh is not None and self.model.config.alignment == "shifted" else 0
        return self.width + (self.window if self.leave_one_out else 0) + more

    def encodable(self, committed: Int[Array, "B"]) -> Int[Array, "B"]:
        """Computes how many tokens of each row's prefix encoding passes write to the cache."""
        # With self-speculation the last committed token is left out: the verifying pass feeds it as the first token of
        # its draft, because the logits at its position verify the token after it.
        ready = self.model.encodable(committed)
        return jnp.minimum(ready, committed - 1) if self.speculative else ready


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
    draft: int = 0,
) -> DecodeConfig:
    """Chooses the static sizes for rows of given lengths."""
    for processor in (*sampler.processors, *sampler.allow):
        processors.check_ids(processor, lm.model.config.vocab)
    check_token_ids(sampler.rule, lm.model.config.vocab)
    _check_plan_fits(lm, plan, sampler)
    config, rule = lm.model.config, sampler.rule
    width, block = _sizes(lm, plan, sampler, block, longest, region)
    assert isinstance(plan.refresh, Refresh | CachePolicy | None)
    return with_rings(DecodeConfig(
        model=model,
        corruption=lm.corruption,
        width=width,
        block=block,
        forbidden=(config.eos, *config.ends) if infilling else (),
        revisable=min(plan.revise * block, width) if config.pattern == "bidirectional" else 0,
        refresh=plan.refresh,
        leave_one_out=rule.leave_one_out,
        variable_length=rule.variable_length,
        speculative=sampler.speculate is not None,
        lookahead=int(plan.lookahead),
        logprobs=logprobs,
        times=plan.times,
        trajectory=trajectory,
        fuse_commit=_fused_rows(lm, plan, sampler),
    ), draft)  # fmt: skip


def with_rings(config: DecodeConfig, draft: int = 0) -> DecodeConfig:
    """Lets layers with a sliding window keep only the slots of the KV cache that their window needs."""
    model = config.model
    if model.rings is None or isinstance(config.refresh, CachePolicy):
        return config
    longest = max(PREFILL, config.slots_after, draft + 1, 2 * config.width * (config.fuse_commit > 0))
    return config._replace(model=model.rings(model, longest))


def _fused_rows(lm: LM, plan: Plan, sampler: Sampler) -> int:
    """Computes `DecodeConfig.fuse_commit`; raises ValueError where the plan asks for what these parts do not allow."""
    config, reason = lm.model.config, None
    if config.pattern == "bidirectional":
        reason = "this model encodes no blocks"
    elif config.alignment == "shifted":
        reason = "this model's logits are shifted: a block needs those of the pass that commits the block before it"
    elif plan.refresh is not None or plan.lookahead:
        reason = "passes with plan.refresh or plan.lookahead compute parts or copies of a canvas"
    elif sampler.speculate is not None or sampler.rule.leave_one_out:
        reason = "passes that verify drafts or feed leave-one-out masks are wider already"
    if reason is not None:
        if plan.fuse_commit:
            raise refuse("plan.fuse_commit", plan.fuse_commit, f"0 or None: {reason}")
        return 0
    if plan.fuse_commit is None:
        return int(jax.default_backend() != "cpu")
    return int(plan.fuse_commit)


def _check_plan_fits(lm: LM, plan: Plan, sampler: Sampler) -> None:
    """Raises ValueError for plans, rules and drafts that the model does not support."""
    config, pattern, rule, draft = lm.model.config, lm.model.config.pattern, sampler.rule, sampler.speculate
    bidirectional, model = pattern == "bidirectional", lm.model
    check_tables(rule, config.vocab)
    if plan.refresh is not None and not model.reuses_keys:
        raise refuse("plan.refresh", plan.refresh, "None: this model has no KV cache")
    if rule.leave_one_out and not model.leave_one_out:
        allowed = "a rule without leave-one-out predictions: they need attention_mask and positions in apply"
        raise refuse("sampler.rule", rule.name, allowed)
    if rule.variable_length and not model.hides_padding:
        allowed = f"a rule that keeps the number of tokens: {SEES_PADDING}"
        raise refuse("sampler.rule", rule.name, allowed)
    if pattern == "block_causal" and plan.block is not None and config.block % plan.block:
        allowed = f"a divisor of {config.block}, the block of this model, or None"
        raise refuse("plan.block", plan.block, allowed)
    if rule.leave_one_out and config.alignment == "shifted":
        allowed = "a rule without leave-one-out predictions: this model's logits are shifted"
        raise refuse("sampler.rule", rule.name, allowed)
    if rule.name == "ancestral_cache" and config.timed:
        allowed = "ancestral: this model takes the time, and predicts anew in each step"
        raise refuse("sampler.rule", rule.name, allowed)
    if rule.name == "hybrid_ancestral" and lm.corruption.kind != "hybrid":
        raise refuse("sampler.rule", rule.name, f"ancestral: the noise of this model is {lm.corruption.kind}")
    if isinstance(plan.refresh, Refresh) and not bidirectional:
        allowed = f"a policy of mj.cache_refresh, or None: a {pattern} model computes its canvas alone"
        raise refuse("plan.refresh", plan.refresh, allowed)
    if plan.revise and not bidirectional:
        raise refuse("plan.revise", plan.revise, f"0: a {pattern} model encodes its blocks; use edit()")
    if plan.refresh is not None and (rule.leave_one_out or rule.variable_length):
        raise refuse("plan.refresh", plan.refresh, f"None with {rule.name}: it reads the whole canvas")
    self_cond = lambda: lm.model.condition(None, jnp.zeros((1, 1, 1)))
    if rule.variable_length and jax.tree.leaves(jax.eval_shape(self_cond)):
        allowed = (
            "a rule that keeps the number of tokens: this model reads its predictions of the pass before"
        )
        raise refuse("sampler.rule", rule.name, allowed)
    if rule.variable_length and plan.block is not None and "block" in rule.params:
        raise refuse("plan.block", plan.block, f"None with {rule.name}: {rule.name}(block=) sets it")
    if plan.lookahead:
        _check_lookahead(lm, plan, draft)
    if isinstance(plan.refresh, CachePolicy):
        name = f"the cache policy {plan.refresh.name}"
        if config.alignment == "shifted":
            raise refuse("plan.refresh", name, "a Refresh: this model's logits are shifted by a position")
        keys, _ = cache_vectors(jax.eval_shape(lambda: lm.model.empty_cache(1, 1)))
        if plan.refresh.drift and not keys:
            allowed = "a policy that compares no keys: those of this model are quantised"
            raise refuse("plan.refresh", name, allowed)
    elif plan.refresh is not None and not isinstance(plan.refresh, Refresh):
        raise refuse("plan.refresh", plan.refresh, "a Refresh, a policy of mj.cache_refresh, or None")
    if draft is None:
        return
    if plan.refresh is not None:
        raise refuse("sampler.speculate", draft, "None with plan.refresh: a draft is verified as a whole")
    allowed = "a number of tokens to draft, 0 or more, or None"
    inputs.check_whole("sampler.speculate", draft, 0, inputs.MAX_TOKENS, allowed)
    if not config.predicts_next:
        allowed = "None: this model's encoding pass does not predict the next token"
        raise refuse("sampler.speculate", draft, allowed)
    if pattern == "block_causal" and draft:
        raise refuse("sampler.speculate", draft, "0: a model of one-token blocks has no draft to verify")
    if rule.leave_one_out or rule.variable_length:
        raise refuse("sampler.rule", rule.name, "a rule that accepts masks in place, to draft with")


def _check_lookahead(lm: LM, plan: Plan, draft: int | None) -> None:
    """Raises ValueError for lookahead if the logits of a canvas depend on more than the canvas.

    Lookahead computes canvases of later steps in the same pass, when the passes before them have not been made.
    """
    reason = None
    if plan.refresh is not None:
        reason = "with plan.refresh: reused keys depend on earlier passes"
    elif draft is not None:
        reason = "with sampler.speculate: its drafts are verified by a causal pass"
    elif jax.tree.leaves(jax.eval_shape(lambda: lm.model.condition(None, jnp.zeros((1, 1, 1))))):
        reason = "for this model: its self-conditioning depends on the previous pass"
    if reason is not None:
        raise refuse("plan.lookahead", plan.lookahead, f"0 {reason}")


def _sizes(
    lm: LM, plan: Plan, sampler: Sampler, block: int | None, longest: int, region: int
) -> tuple[int, int]:
    """Chooses the sizes of the canvas W and of the active block.

    A bidirectional model has no encoded prefix: its canvas is the whole row, and the block moves through it. In other
    models the canvas is one block after the KV cache.
    """
    config = lm.model.config
    # A rule of variable length that names no block edits the whole answer at once.
    whole = sampler.rule.variable_length and plan.block is None and config.pattern != "block_causal"
    if config.pattern == "bidirectional":
        width = bucket(longest) if lm.model.hides_padding else longest
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


def check_equal_lengths(name: str, lengths: Any) -> None:
    """Raises ValueError unless all rows have the same length, for a model that would see the padding of shorter rows.

    Args:
        lengths: Length of each row, prompt and answer together.
    """
    found = sorted({int(n) for n in np.asarray(lengths)})
    if len(found) > 1:
        allowed = f"one length in a call: {SEES_PADDING}"
        raise refuse(f"lengths of the {name}", found, allowed)


def bucket(size: int, quantum: int = QUANTUM) -> int:
    """Rounds a size up to a capacity: multiples of `quantum` up to 8 quanta, then 4 capacities per doubling.

    Up to 8 quanta less than a quantum is wasted; beyond, less than a quarter of `size`.
    """
    step = quantum
    while step * 8 < size:
        step *= 2
    return -(-size // step) * step


def slots_for(tokens: int, behind: int, context: int, quantum: int = 2 * QUANTUM) -> int:
    """Computes the number of slots S of a row's tokens and KV cache: a bucket, bounded by the model's context.

    Without the bound, a row that fills a context of 2 ** k tokens would take the next bucket, a quarter more slots.

    Args:
        quantum: Smallest number of slots, and the step between buckets. The default is coarse: for a call, an empty
            slot costs little, and compiling another program costs seconds. A server compiles its programs in advance.
    """
    most = -(-(context + behind) // QUANTUM) * QUANTUM
    return min(bucket(tokens + behind, quantum), max(most, tokens + behind))


def prefill_width(config: DecodeConfig, slots: int, always: bool = False) -> int | None:
    """Chooses the number of tokens per prefill pass.

    It depends on the slots and not on the prompts, so that prompts of all lengths share a program.
    """
    short = slots <= 4 * config.width and not always
    if config.model.config.pattern == "bidirectional" or short:
        return None
    # Whole blocks: in a block-causal model the tokens of a block attend to each other, so that one pass must hold all.
    quantum = config.width if config.model.config.pattern == "block_causal" else 1
    return -(-min(PREFILL, slots // 2) // quantum) * quantum
