"""Rules for masked (absorbing) diffusion: which masks become tokens in this step.

These rules depend on the current view only, except `ancestral_cache`, which also counts the steps it has skipped.
Rules that remember earlier passes are in `history.py`, rules that remask in `remask.py`. Most rules here rank the masks
by confidence, the probability of the drawn token.

The last four rules are the values of Dream's option `alg`. Dream-7B (arXiv 2508.15487; `_sample` in Dream's
`generation_utils.py`) uses times evenly spaced from 1 to `eps`, independent of the noise schedule of the model. A step
from time t to s accepts the share 1 - s/t of the remaining masks, rounded down; the last step accepts all of them. A
step with few masks may therefore accept none: with as many steps as tokens, the first passes accept nothing.

Dream computes the confidence from logits that are divided by its temperature and truncated to top-p. Here both are
logits processors:

    Sampler(dream_entropy(), (processors.temperature(0.2), processors.top_p(0.95)), temperature=1.0)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.config import Above, AtLeast, Between
from mercury_jax.decode.registration import Count, NonNegative, Probability, rule
from mercury_jax.decode.sampler import Memory, Param, Rule, Static, accept
from mercury_jax.types import Key, Proposal, View


def rank_among(score: Float[Array, "L"], among: Bool[Array, "L"]) -> Int[Array, "L"]:
    """Ranks positions by score.

    Args:
        score: Higher is better.
        among: Positions to rank; all others come after them.

    Returns:
        The rank of each position [L], 0 for the highest score. Of equal scores, the leftmost position ranks first.
    """
    # `order` lists the positions by rank; its inverse permutation is the rank of each position.
    order = jnp.argsort(jnp.where(among, -score, jnp.inf), stable=True)
    return jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0]))


def top(score: Float[Array, "L"], among: Bool[Array, "L"], count: Int[Array, ""] | int) -> Bool[Array, "L"]:
    """Selects the `count` positions with the highest scores; of equal scores, the leftmost.

    Args:
        score: Higher is better.
        among: Positions that may be selected.
        count: Number of positions to select; may be traced. With fewer candidates, all of them are selected.

    Returns:
        Whether each position is selected [L].
    """
    if isinstance(count, int) and count == 1:  # an argmax, without the sort
        return among & (jnp.arange(score.shape[0]) == jnp.where(among, score, -jnp.inf).argmax())
    return among & (rank_among(score, among) < count)


def even_share(view: View) -> Int[Array, ""]:
    """Computes how many masks to accept in this step, dividing them evenly among the remaining steps.

    With M masks and R remaining steps (this one included) it is ceil(M / R). Under uniform noise accepted positions
    stay open, so M does not fall; there it is ceil(M i / N) in step i of N, which reaches all positions in the last.

    Args:
        view: View of one row. Reads `masked`, `canvas`, `noise`, `step` and `steps`.

    Returns:
        The number of positions to accept, a scalar.
    """
    remaining = jnp.maximum(view.steps - view.step, 1)
    open_count = view.masked.sum()
    # The view does not name the kind of noise. With masks, every open position holds `view.noise`, the mask id.
    # Under uniform noise a canvas equals its fresh noise at every open position with probability V^-L.
    absorbing = jnp.all((view.canvas == view.noise) | ~view.masked)
    return jnp.where(absorbing, -(-open_count // remaining), -(-open_count * (view.step + 1) // view.steps))


def fixed_share(view: View, length: Param = 0) -> Int[Array, ""]:
    """Computes how many tokens LLaDA's fixed schedule accepts in this step (`get_num_transfer_tokens`).

    The tokens of the block are divided by its steps; the first steps take one more each if there is a remainder.
    Unlike `even_share`, the number does not depend on what earlier steps have accepted.

    Args:
        view: View of one row. Reads `editable`, `step` and `steps`.
        length: Number of tokens to divide among the steps. 0: the editable positions of the block, as in LLaDA. SDAR
            and LLaDA2.0 use the block length, even where the prompt ends inside the block.

    Returns:
        The number of tokens to accept, a scalar.
    """
    tokens = jnp.where(jnp.asarray(length) > 0, length, view.editable.sum()).astype(jnp.int32)
    every, rest = jnp.divmod(tokens, view.steps)
    return every + (view.step < rest)


@rule(source="LLaDA's low-confidence remasking, arXiv 2502.09992, algorithm 5", needs_logits=False)
def confidence(key: Key, view: View, memory: Memory) -> tuple[Proposal, Memory]:
    """Accepts the most confident masks, spread evenly over the remaining steps.

    With as many steps as tokens it accepts one token per step.

    Args:
        key: Unused.
        view: Reads `stats.p_sample`, `masked`, `step` and `steps`.
        memory: Unused.

    Returns:
        The proposal, and the unchanged memory.
    """
    return accept(view, top(view.stats.p_sample, view.masked, even_share(view))), memory


def confidence_without(ids: Sequence[int]) -> Rule:
    """Makes a rule like `confidence` that accepts some ids last: they have no share in any confidence.

    A drawn token that is one of `ids` has the confidence 0, another one its probability among the ids that are not in
    `ids`. With the ends of text and of turn this is LLaDA's `confidence_eos_eot_inf` at temperature 0 (ML-GSAI/LLaDA,
    generate.py; arXiv 2502.09992, appendix B.4), for models that predict the end of text at most positions at first.

    Args:
        ids: Ids of the vocabulary.

    Returns:
        The rule. It is not registered by name.

    Departs from the reference: of several tokens with the confidence 0 the leftmost is accepted first, where torch's
    `topk` does not define an order.
    """
    return Rule(_confidence_without, {"ids": Static(np.asarray(ids, np.int32))}, "confidence_without")


def _confidence_without(
    key: Key, view: View, memory: Memory, *, ids: Int[Array, "n"]
) -> tuple[Proposal, Memory]:
    # p(id) = p_argmax exp(logit - largest logit). A token that is not in `ids` is the argmax, so 1 - share is at least
    # its own probability, and the division is safe.
    stats, best = view.stats, view.logits.max(axis=-1, keepdims=True)
    share = (stats.p_argmax[:, None] * jnp.exp(view.logits[:, ids] - best)).sum(-1)
    score = stats.p_sample / jnp.maximum(1.0 - share, 1e-30)
    score = jnp.where((stats.sample[:, None] == ids).any(-1), 0.0, score)
    return accept(view, top(score, view.masked, even_share(view))), memory


@rule(source="Fast-dLLM, arXiv 2505.22618, section 3.3", needs_logits=False)
def threshold(key: Key, view: View, memory: Memory, p: Probability = 0.9) -> tuple[Proposal, Memory]:
    """Accepts every mask whose drawn token has a probability of at least `p`, and always the most confident one.

    Args:
        key: Unused.
        view: Reads `stats.p_sample` and `masked`.
        memory: Unused.
        p: Probability from which a token is accepted. Lower values accept more tokens per step.

    Returns:
        The proposal, and the unchanged memory.

    Example:
        >>> mj.sample(lm, prompts, sampler=mj.rules.threshold(0.9))
    """
    certain = view.masked & (view.stats.p_sample >= p)
    return accept(view, certain | top(view.stats.p_sample, view.masked, 1)), memory


@rule(
    noise="absorbing",
    needs_logits=False,
    source='Fast-dLLM for Dream, arXiv 2505.22618, `alg="confidence_threshold"` without a cache',
)
def budgeted_threshold(
    key: Key, view: View, memory: Memory, p: Probability = 0.9, tokens: Count = 1
) -> tuple[Proposal, Memory]:
    """Accepts masks of confidence `p`, at most `tokens` a step with what earlier steps left, and at least one.

    A threshold alone may accept a whole block in one step. The budget limits the number of decided tokens after
    step i to i * `tokens`, so that a step may use what earlier steps left over.

    Args:
        key: Unused.
        view: Reads `stats.p_sample`, `editable`, `masked` and `step`.
        memory: Unused.
        p: Confidence from which a token is accepted.
        tokens: Tokens that each step adds to the budget.

    Returns:
        The proposal, and the unchanged memory.
    """
    c, decided = view.stats.p_sample, view.editable.sum() - view.masked.sum()
    within = top(c, view.masked, (view.step + 1) * tokens - decided)
    return accept(view, (within & (c >= p)) | top(c, view.masked, 1)), memory


@rule(source="LLaDA's random remasking, arXiv 2502.09992", needs_logits=False)
def random(key: Key, view: View, memory: Memory) -> tuple[Proposal, Memory]:
    """Accepts masks in random order, spread evenly over the remaining steps.

    Args:
        key: Draws the order.
        view: Reads `masked`, `step` and `steps`.
        memory: Unused.

    Returns:
        The proposal, and the unchanged memory.
    """
    score = jax.random.uniform(key, view.canvas.shape)
    return accept(view, top(score, view.masked, even_share(view))), memory


@rule(noise="absorbing", temperature=1.0, needs_logits=False, source="MDLM, arXiv 2406.07524, eq. 6")
def ancestral(key: Key, view: View, memory: Memory) -> tuple[Proposal, Memory]:
    """Accepts each mask with probability (alpha_s - alpha_t) / (1 - alpha_t): the reverse process itself.

    As the number of steps grows, two tokens are rarely accepted in the same step, and the samples approach the
    distribution that the model defines.

    Args:
        key: Draws which masks are accepted.
        view: Reads `masked`, `alpha_t` and `alpha_s`.
        memory: Unused.

    Returns:
        The proposal, and the unchanged memory.
    """
    chance = (view.alpha_s - view.alpha_t) / jnp.maximum(1.0 - view.alpha_t, 1e-9)
    return accept(view, view.masked & (jax.random.uniform(key, view.canvas.shape) < chance)), memory


@rule(
    noise="absorbing",
    temperature=1.0,
    needs_logits=False,
    init=lambda canvas, vocab: jnp.asarray(0, jnp.int32),
    needs=("no time",),
    source="MDLM, arXiv 2406.07524, `ddpm_cache` in its diffusion.py; `ancestral_cache` in DUO's trainer_base.py",
)
def ancestral_cache(key: Key, view: View, memory: Int[Array, ""]) -> tuple[Proposal, Int[Array, ""]]:
    """Decodes as `ancestral`, without the passes that accept nothing.

    A denoiser that does not take the time predicts the same tokens until the canvas changes. Each pass therefore draws
    for every mask the step in which the reverse process would accept it, skips to the earliest of these steps, and
    accepts the masks that share it. This takes at most min(steps, masks) passes. The steps are evenly spaced in alpha.

    Args:
        key: Draws the steps.
        view: Reads `masked` and `steps`.
        memory: Number of steps of the reverse process that are done or skipped, a scalar.

    Returns:
        The proposal, and the new number of steps.

    Departs from the reference: its times end at 1e-5, where a further pass gives the remaining masks their argmax
    (`noise_removal`); here the last step ends at time 0, where no mask is left. Its cache is shared by the batch, so it
    saves a pass only if no row changes; here each row skips its own steps.
    """
    steps, left = view.steps, 1.0 - memory / view.steps
    # With alpha = 1 - t, the time at which a remaining mask is accepted is uniform in [0, left], whatever was drawn in
    # earlier passes, so drawing it again is exact. Step i ends at time 1 - (i + 1) / steps.
    time = left * jax.random.uniform(key, view.canvas.shape)
    step = jnp.clip(jnp.floor((1.0 - time) * steps).astype(jnp.int32), memory, steps - 1)
    earliest = jnp.min(jnp.where(view.masked, step, steps - 1))
    return accept(view, view.masked & (step == earliest)), (earliest + 1).astype(memory.dtype)


@rule(
    noise="absorbing",
    temperature=1.0,
    needs_logits=False,
    source="first-hitting sampler, arXiv 2409.02908; `first_hitting` in bd3lms `diffusion.py`",
)
def first_hitting(key: Key, view: View, memory: Memory) -> tuple[Proposal, Memory]:
    """Accepts one mask per step at a random position, and all remaining ones in the last step.

    This is the reverse process without the passes that accept nothing. With as many steps as masks, it samples exactly
    from the reverse process of a denoiser that does not take the time.

    Args:
        key: Draws the position.
        view: Reads `masked`, `step` and `steps`.
        memory: Unused.

    Returns:
        The proposal, and the unchanged memory.

    Departs from the reference: it also draws the time of each acceptance, for denoisers that take the time as input;
    here no time is drawn.
    """
    score = jax.random.uniform(key, view.canvas.shape)
    count = jnp.where(view.step + 1 >= view.steps, view.canvas.shape[0], 1)
    return accept(view, top(score, view.masked, count)), memory


@rule(noise="absorbing", needs_logits=False, source="Fast-dLLM, arXiv 2505.22618, section 3.3")
def factor(
    key: Key,
    view: View,
    memory: Memory,
    f: Annotated[Param, Above(0)] = 1.0,
    accept_last: Annotated[Param, Between(0, 1, integer=True)] = 1,
) -> tuple[Proposal, Memory]:
    """Accepts the n most confident masks for the largest n with (n + 1)(1 - c_n) <= f, at least one.

    The more tokens are accepted in the same step, the more certain the least certain of them must be.

    Args:
        key: Unused.
        view: Reads `stats.p_sample` and `masked`.
        memory: Unused.
        f: Upper bound of (n + 1)(1 - c_n). Larger values accept more tokens per step.
        accept_last: 1: if all masks but one pass the test, accept this last one too, as the reference's
            `get_transfer_index_dynamic` does. 0: it waits for the next step, as in the paper's algorithm.

    Returns:
        The proposal, and the unchanged memory.
    """
    c = view.stats.p_sample
    rank = rank_among(c, view.masked)
    # The mask of rank r is the n-th with n = r + 1, so the test reads c >= 1 - f / (r + 2). c falls with the rank and
    # the bound rises: the masks that pass form a prefix, and testing each mask by itself finds the largest n.
    which = view.masked & ((c >= 1.0 - f / (rank + 2)) | (rank == 0))
    finish = (jnp.asarray(accept_last) > 0) & (which.sum() + 1 >= view.masked.sum())
    return accept(view, which | (view.masked & finish)), memory


@rule(noise="absorbing", needs_logits=False, source="Fast-dLLM++, arXiv 2606.02955, section 3")
def frechet(key: Key, view: View, memory: Memory, margin: NonNegative = 0.25) -> tuple[Proposal, Memory]:
    """Accepts the n most confident masks for the largest n with c_1 + ... + c_n - (n - 1) - (1 - c_n) > margin.

    c_1 + ... + c_n - (n - 1) is the Frechet lower bound on the probability that all n tokens are right together;
    1 - c_n is an upper bound on the probability of any competing combination. If the n confidences are equal, the rule
    equals `factor(1 - margin, 0)`. If they differ it accepts more tokens, since `factor` treats all n as if they had
    the lowest confidence. At least one mask is accepted.

    Args:
        key: Unused.
        view: Reads `stats.p_sample` and `masked`.
        memory: Unused.
        margin: Larger values accept fewer tokens per step. The authors use 0.02 to 0.3.

    Returns:
        The proposal, and the unchanged memory.
    """
    rank = rank_among(view.stats.p_sample, view.masked)
    # c: the confidences in descending order [L]. Positions that are not masks come last, as 0.
    c = jnp.zeros_like(view.stats.p_sample).at[rank].set(jnp.where(view.masked, view.stats.p_sample, 0.0))
    # Both terms fall with n, so the masks that pass form a prefix.
    passes = jnp.cumsum(c) - jnp.arange(c.shape[0]) - (1.0 - c) > margin
    return accept(view, view.masked & (passes[rank] | (rank == 0))), memory


@rule(
    noise="absorbing",
    needs_logits=False,
    source="dParallel, arXiv 2509.26488, and d3LLM, arXiv 2601.07568, `get_transfer_index_entropy`",
)
def entropy_threshold(key: Key, view: View, memory: Memory, h: NonNegative = 0.5) -> tuple[Proposal, Memory]:
    """Accepts every mask whose entropy is at most `h`, and at least the one of the lowest entropy.

    Args:
        key: Unused.
        view: Reads `stats.entropy` and `masked`.
        memory: Unused.
        h: Entropy in nats up to which a token is accepted. dParallel uses 0.45 to 0.5, d3LLM 0.4 to 0.5.

    Returns:
        The proposal, and the unchanged memory.

    The reference code for Dream compares with `<`, the one for LLaDA with `<=`; here it is `<=`. Departs from d3LLM:
    its generator decodes several blocks at once, here one block is active.
    """
    certain = view.masked & (view.stats.entropy <= h)
    return accept(view, certain | top(-view.stats.entropy, view.masked, 1)), memory


Tokens = Annotated[Param, AtLeast(0, integer=True)]


@rule(
    noise="absorbing",
    needs_logits=False,
    source="LLaDA2.0, `LLaDA2Sampler` in dllm; SDAR, `low_confidence_dynamic` in generate.py",
)
def scheduled(
    key: Key, view: View, memory: Memory, p: Probability = 0.95, length: Tokens = 0
) -> tuple[Proposal, Memory]:
    """Accepts every mask above `p`, or the fixed schedule's number of the most confident where that is more.

    It never takes more steps than the fixed schedule. At `p=1` it is the fixed schedule (SDAR's
    `low_confidence_static`).

    Args:
        key: Unused.
        view: Reads `stats.p_sample`, `masked`, `editable`, `step` and `steps`.
        memory: Unused.
        p: Probability above which a token is accepted.
        length: Number of tokens to divide among the steps; 0: the editable positions. See `fixed_share`.

    Returns:
        The proposal, and the unchanged memory.

    Departs from the reference: if fewer masks are left than the schedule accepts, SDAR's `topk` also selects decided
    tokens, even of the prompt, and overwrites them with the prediction; here they stay, as in LLaDA2.0.
    """
    c, due = view.stats.p_sample, fixed_share(view, length)
    certain = view.masked & (c > p)
    return accept(view, jnp.where(certain.sum() >= due, certain, top(c, view.masked, due))), memory


@rule(noise="absorbing", needs_logits=False, source="SDAR, arXiv 2510.06303, `sequential` in generate.py")
def sequential(key: Key, view: View, memory: Memory, length: Tokens = 0) -> tuple[Proposal, Memory]:
    """Accepts the first masks from the left, as many as the fixed schedule says.

    Args:
        key: Unused.
        view: Reads `masked`, `editable`, `step` and `steps`.
        memory: Unused.
        length: Number of tokens to divide among the steps; 0: the editable positions. See `fixed_share`.

    Returns:
        The proposal, and the unchanged memory.
    """
    return accept(view, view.masked & (jnp.cumsum(view.masked) <= fixed_share(view, length))), memory


@rule(noise="absorbing", needs_logits=False, source="LocalLeap, arXiv 2510.07081, `get_transfer_index`")
def local_leap(
    key: Key,
    view: View,
    memory: Memory,
    p: Probability = 0.9,
    relaxed: Probability = 0.75,
    radius: Annotated[Param, AtLeast(0, integer=True)] = 4,
) -> tuple[Proposal, Memory]:
    """Accepts every mask of confidence `p`, and within `radius` of one every mask of confidence `relaxed`.

    Masks of confidence `p` are the anchors. The most confident mask is always accepted.

    Args:
        key: Unused.
        view: Reads `stats.p_sample` and `masked`.
        memory: Unused.
        p: Confidence from which a mask is an anchor.
        relaxed: Confidence from which a mask near an anchor is accepted.
        radius: Positions on either side of an anchor.

    Returns:
        The proposal, and the unchanged memory.
    """
    c, length = view.stats.p_sample, view.canvas.shape[0]
    anchor = view.masked & (c >= p)
    # The nearest anchor to the left and to the right of each position [L]. If a side has none, the placeholder is
    # further away than any position of the window.
    at, far = jnp.arange(length), 2 * length
    before = jax.lax.cummax(jnp.where(anchor, at, -far))
    behind = jax.lax.cummin(jnp.where(anchor, at, 2 * far), reverse=True)
    near = jnp.minimum(at - before, behind - at) <= radius
    relaxed_masks = view.masked & (c >= relaxed) & near
    return accept(view, anchor | relaxed_masks | top(c, view.masked, 1)), memory


@rule(noise="absorbing", needs_logits=False, source="dInfer's `HierarchyDecoder`, arXiv 2510.08666")
def hierarchical(
    key: Key, view: View, memory: Memory, p: Probability = 0.9, low: Probability = 0.4
) -> tuple[Proposal, Memory]:
    """Accepts the best mask of each run of adjacent masks if above `low`, every mask above `p`, and the best of all.

    Tokens that are accepted in the same step are then mostly apart from each other and depend less on each other. An
    accepted token splits its run in two, so the number of runs grows from step to step.

    Args:
        key: Unused.
        view: Reads `stats.p_sample` and `masked`.
        memory: Unused.
        p: Confidence above which any mask is accepted.
        low: Confidence above which the most confident mask of a run is accepted.

    Returns:
        The proposal, and the unchanged memory.
    """
    c, masked = view.stats.p_sample, view.masked
    # Number the runs of adjacent masks from the left, and find the highest confidence of each position's run [L].
    # Positions between two runs get the number of the run before them; they count as -1, so they change no maximum.
    starts = masked & ~jnp.concatenate([jnp.zeros(1, bool), masked[:-1]])
    run = jnp.maximum(jnp.cumsum(starts) - 1, 0)
    best = jax.ops.segment_max(jnp.where(masked, c, -1.0), run, num_segments=c.shape[0])[run]
    leads = masked & (c == best) & (c > low)
    return accept(view, leads | (masked & (c > p)) | top(c, masked, 1)), memory


def _accepted_share(view: View, eps: Param) -> Float[Array, ""]:
    """Computes the share 1 - s/t of the masks to accept in this step, for the times linspace(1, eps, steps + 1).

    The last step accepts all masks.
    """
    # t = 1 - step * stride and s = t - stride, so 1 - s/t = stride / t.
    stride = (1.0 - eps) / view.steps
    return jnp.where(view.step + 1 >= view.steps, 1.0, stride / (1.0 - view.step * stride))


def _accept_share(key: Key, view: View, score: Float[Array, "L"], alg_temp: Param, eps: Param) -> Proposal:
    """Accepts this step's share of the masks: those with the highest scores, or a random choice if `alg_temp` > 0.

    The random choice samples without replacement from softmax(score / alg_temp), by adding Gumbel noise to the scores
    and taking the highest (Gumbel top-k, arXiv 1903.06059).
    """
    count = jnp.floor(view.masked.sum() * _accepted_share(view, eps)).astype(jnp.int32)
    perturbed = score / jnp.maximum(alg_temp, 1e-9) + jax.random.gumbel(key, score.shape)
    return accept(view, top(jnp.where(jnp.asarray(alg_temp) > 0, perturbed, score), view.masked, count))


@rule(noise="absorbing", needs_logits=False, source='Dream, arXiv 2508.15487, `alg="origin"`')
def dream_origin(key: Key, view: View, memory: Memory, eps: Probability = 1e-3) -> tuple[Proposal, Memory]:
    """Accepts each mask independently with probability 1 - s/t: `ancestral` on Dream's times.

    As in Dream, accepted tokens are the argmax unless the sampler has a temperature; `ancestral` samples them.

    Args:
        key: Draws which masks are accepted.
        view: Reads `masked`, `step` and `steps`.
        memory: Unused.
        eps: Time of the last step.

    Returns:
        The proposal, and the unchanged memory.
    """
    which = view.masked & (jax.random.uniform(key, view.canvas.shape) < _accepted_share(view, eps))
    return accept(view, which), memory


@rule(noise="absorbing", needs_logits=False, source='MaskGIT, arXiv 2202.04200; Dream, `alg="maskgit_plus"`')
def maskgit_plus(
    key: Key, view: View, memory: Memory, alg_temp: NonNegative = 0.0, eps: Probability = 1e-3
) -> tuple[Proposal, Memory]:
    """Accepts this step's share of the masks, those whose drawn token is the most probable.

    Args:
        key: Draws the choice where `alg_temp` > 0.
        view: Reads `stats.p_sample`, `masked`, `step` and `steps`.
        memory: Unused.
        alg_temp: Temperature of the choice; 0 takes the highest scores.
        eps: Time of the last step.

    Returns:
        The proposal, and the unchanged memory.
    """
    return _accept_share(key, view, view.stats.p_sample, alg_temp, eps), memory


@rule(
    noise="absorbing",
    needs_logits=False,
    source='top-k probability margin, arXiv 2502.06768; Dream, `alg="topk_margin"`',
)
def topk_margin(
    key: Key, view: View, memory: Memory, alg_temp: NonNegative = 0.0, eps: Probability = 1e-3
) -> tuple[Proposal, Memory]:
    """Accepts this step's share of the masks, those with the largest margin between the two most probable tokens.

    Args:
        key: Draws the choice where `alg_temp` > 0.
        view: Reads `stats.margin`, `masked`, `step` and `steps`.
        memory: Unused.
        alg_temp: Temperature of the choice; 0 takes the highest scores.
        eps: Time of the last step.

    Returns:
        The proposal, and the unchanged memory.
    """
    return _accept_share(key, view, view.stats.margin, alg_temp, eps), memory


@rule(noise="absorbing", needs_logits=False, source='Dream, arXiv 2508.15487, `alg="entropy"`')
def dream_entropy(
    key: Key, view: View, memory: Memory, alg_temp: NonNegative = 0.0, eps: Probability = 1e-3
) -> tuple[Proposal, Memory]:
    """Accepts this step's share of the masks, those of the lowest entropy.

    Args:
        key: Draws the choice where `alg_temp` > 0.
        view: Reads `stats.entropy`, `masked`, `step` and `steps`.
        memory: Unused.
        alg_temp: Temperature of the choice; 0 takes the lowest entropies.
        eps: Time of the last step.

    Returns:
        The proposal, and the unchanged memory.
    """
    return _accept_share(key, view, -view.stats.entropy, alg_temp, eps), memory
