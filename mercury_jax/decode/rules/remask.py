"""Remasking and self-correction: rules that turn decided tokens back into masks, or replace them in place.

remdm_*                  reverse processes that remask at random (ReMDM)
wino                     drafts many tokens, and remasks those that fail a leave-one-out test (WINO)
editing, blind_editing   replace tokens that the model contradicts (LLaDA2.1)
hybrid_ancestral         the reverse process of mixed mask and uniform noise (GIDD)
self_correct             resamples tokens of a full block (GIDD)
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.decode import stopping
from mercury_jax.decode.registration import Count, NonNegative, Probability, rule
from mercury_jax.decode.rules.masked import top
from mercury_jax.decode.sampler import Memory, Param, accept, propose
from mercury_jax.decode.token_stats import NEVER, draw
from mercury_jax.types import Key, Proposal, TokenStats, View

Scalar = Float[Array, ""]
# Decorator of ReMDM's rules: a reverse process takes all of its steps, even without masks, and draws at temperature 1.
_remdm = functools.partial(
    rule, noise="absorbing", temperature=1.0, stopping=stopping.never, needs_logits=False
)


def reverse_times(view: View, eps: Param) -> tuple[Scalar, Scalar]:
    """Computes the times of this step in ReMDM's sampler (`_sample` in its diffusion.py).

    A block of N + 1 steps takes N transitions, with times evenly spaced from 1 to `eps`, and a last step that replaces
    every remaining mask by its argmax (`noise_removal`). As in the reference, the schedule is log-linear,
    alpha(t) = 1 - t, even if the model was trained with another one. A model that takes the time as input gets
    1 - step / steps, which is up to 1 / steps above the time t computed here.

    Args:
        view: Reads `step` and `steps`.
        eps: Time at which the last transition ends.

    Returns:
        The times t before and s after the step, scalars. In the last step they are `eps` and 0.
    """
    stride = (1.0 - eps) / jnp.maximum(view.steps - 1, 1)
    last = is_last(view)
    t = jnp.where(last, eps, 1.0 - view.step * stride)
    return t, jnp.where(last, 0.0, t - stride)


def is_last(view: View) -> Bool[Array, ""]:
    """Returns whether this is the last step that the block may take."""
    return view.step + 1 >= view.steps


def sigma_max(alpha_t: Scalar, alpha_s: Scalar) -> Scalar:
    """Computes the largest remasking probability that keeps the marginals: min(1, (1 - alpha_s) / alpha_t).

    With a larger one, the acceptance probability in `remask_step` would exceed 1 (ReMDM, arXiv 2503.00307).

    Args:
        alpha_t: alpha at the time of the canvas.
        alpha_s: alpha at the time after the step.

    Returns:
        The probability.
    """
    return jnp.minimum(1.0, (1.0 - alpha_s) / jnp.maximum(alpha_t, 1e-9))


def remask_step(key: Key, view: View, sigma: Param, alpha_t: Scalar, alpha_s: Scalar) -> Proposal:
    """Takes one step of ReMDM's reverse process (arXiv 2503.00307).

    A decided token becomes a mask with probability sigma. A mask becomes a token with probability
    (alpha_s - (1 - sigma) alpha_t) / (1 - alpha_t), so that the share of decided tokens is alpha_s on average. The last
    step replaces every mask by its argmax and remasks nothing.

    Args:
        key: One draw per position.
        view: View of one row. Reads `stats`, `canvas`, `masked`, `editable`, `noise`, `step` and `steps`.
        sigma: Probability that a decided token is remasked; one number, or one per position [L].
        alpha_t: alpha at the time of the canvas.
        alpha_s: alpha at the time after the step.

    Returns:
        The proposal.
    """
    # One uniform number per position serves both draws, since a position is either a mask or decided.
    u, last = jax.random.uniform(key, view.canvas.shape), is_last(view)
    chance = (alpha_s - (1.0 - sigma) * alpha_t) / jnp.maximum(1.0 - alpha_t, 1e-9)
    stats = view.stats._replace(sample=jnp.where(last, view.stats.argmax, view.stats.sample))
    proposal = accept(view._replace(stats=stats), view.masked & (last | (u < chance)))
    return remask(view, proposal, ~view.masked & ~last & (u < sigma))


def remask(view: View, proposal: Proposal, which: Bool[Array, "L"]) -> Proposal:
    """Turns tokens of a proposal back into noise. Its answer, what would be emitted now, keeps the tokens.

    Args:
        view: View of one row. Reads `editable` and `noise`.
        proposal: The proposal to change.
        which: Positions to remask [L]; those that are not editable stay as they are.

    Returns:
        The changed proposal.
    """
    return proposal._replace(canvas=jnp.where(view.editable & which, view.noise, proposal.canvas))


def replace_tokens(proposal: Proposal, which: Bool[Array, "L"], tokens: Int[Array, "L"]) -> Proposal:
    """Writes tokens into the canvas and the answer of a proposal.

    Args:
        proposal: The proposal to change.
        which: Positions to overwrite [L].
        tokens: The new tokens [L], or one token for all positions.

    Returns:
        The changed proposal.
    """
    put = lambda old: jnp.where(which, tokens, old)
    return proposal._replace(canvas=put(proposal.canvas), answer=put(proposal.answer))


@_remdm(source="ReMDM, arXiv 2503.00307, `remdm-cap`")
def remdm_cap(
    key: Key, view: View, memory: Memory, eta: Probability = 0.008, eps: Probability = 1e-5
) -> tuple[Proposal, Memory]:
    """Decodes as `ancestral`, and remasks each decided token with probability min(eta, sigma_max).

    With sigma_max = min(1, (1 - alpha_s) / alpha_t) the marginals of the forward process are kept. The paper samples
    tokens from the top-p nucleus: add `processors.top_p(0.9, crossing=0)` for that.

    Args:
        key: One draw per position.
        view: Reads `masked`, `step` and `steps`.
        memory: Unused.
        eta: Upper bound of the remasking probability.
        eps: Time at which remasking ends; see `reverse_times`.

    Returns:
        The proposal, and the unchanged memory.
    """
    alpha_t, alpha_s = (1.0 - time for time in reverse_times(view, eps))
    sigma = jnp.minimum(eta, sigma_max(alpha_t, alpha_s))
    return remask_step(key, view, sigma, alpha_t, alpha_s), memory


@_remdm(source="ReMDM, arXiv 2503.00307, `remdm-rescale`")
def remdm_rescale(
    key: Key, view: View, memory: Memory, eta: Probability = 0.015, eps: Probability = 1e-5
) -> tuple[Proposal, Memory]:
    """Decodes as `ancestral`, and remasks each decided token with probability eta * sigma_max.

    Args:
        key: One draw per position.
        view: Reads `masked`, `step` and `steps`.
        memory: Unused.
        eta: Share of the largest remasking probability.
        eps: Time at which remasking ends; see `reverse_times`.

    Returns:
        The proposal, and the unchanged memory.
    """
    alpha_t, alpha_s = (1.0 - time for time in reverse_times(view, eps))
    return remask_step(key, view, eta * sigma_max(alpha_t, alpha_s), alpha_t, alpha_s), memory


@_remdm(
    init=lambda canvas, vocab: jnp.ones(canvas.shape, jnp.float32),
    source="ReMDM, arXiv 2503.00307, `remdm-conf`, which has eta 1",
)
def remdm_confidence(
    key: Key, view: View, memory: Float[Array, "L"], eta: Probability = 1.0, eps: Probability = 1e-5
) -> tuple[Proposal, Float[Array, "L"]]:
    """Decodes as `remdm_rescale`, remasking most often the tokens that were least certain when accepted.

    sigma_i = eta * sigma_max * softmax(-c)_i over the decided tokens, where c_i is the probability that token i had
    when it was accepted. The softmax sums to 1, so on average at most one token is remasked per step. Tokens that were
    decided before the first step have c = 1.

    Args:
        key: One draw per position.
        view: Reads `masked`, `editable`, `stats.p_sample`, `step` and `steps`.
        memory: The probability c of each token when it was accepted [L].
        eta: Share of the largest remasking probability.
        eps: Time at which remasking ends; see `reverse_times`.

    Returns:
        The proposal, and the new c.
    """
    alpha_t, alpha_s = (1.0 - time for time in reverse_times(view, eps))
    # softmax(-c) over the decided tokens of the block only [L].
    doubt = jnp.where(view.editable & ~view.masked, jnp.exp(-memory), 0.0)
    share = doubt / jnp.maximum(doubt.sum(), 1e-9)
    sigma = jnp.minimum(eta * share, 1.0) * sigma_max(alpha_t, alpha_s)
    proposal = remask_step(key, view, sigma, alpha_t, alpha_s)
    accepted = view.masked & (proposal.canvas != view.noise)
    return proposal, jnp.where(accepted, view.stats.p_sample, memory).astype(memory.dtype)


@_remdm(source="ReMDM, arXiv 2503.00307, `remdm-loop`")
def remdm_loop(
    key: Key,
    view: View,
    memory: Memory,
    eta: Probability = 0.02,
    t_on: Probability = 0.55,
    t_off: Probability = 0.05,
    alpha_on: Probability = 0.9,
    eps: Probability = 1e-5,
) -> tuple[Proposal, Memory]:
    """Fills most masks early, then remasks for a while, then fills the rest.

    The rule uses its own schedule alpha(t), in three phases:

        1 >= t > t_on       alpha = alpha_on (1 - t) / (1 - t_on), nothing is remasked
        t_on >= t > t_off   alpha = alpha_on, a decided token is remasked with probability eta
        t_off >= t >= 0     alpha = 1 - (1 - alpha_on) t / t_off, nothing is remasked

    A step belongs to the phase in which it begins: alpha(s) is computed by the formula of the phase of t, even if s
    lies in the next phase.

    Args:
        key: One draw per position.
        view: Reads `masked`, `step` and `steps`.
        memory: Unused.
        eta: Remasking probability of the middle phase.
        t_on: Time at which remasking begins.
        t_off: Time at which it ends.
        alpha_on: alpha of the middle phase.
        eps: Time of the last transition's end; see `reverse_times`.

    Returns:
        The proposal, and the unchanged memory.
    """
    t, s = reverse_times(view, eps)

    def alpha(time: Scalar) -> Scalar:
        # t, the beginning of the step, selects the phase for both t and s.
        rising = alpha_on * (1.0 - time) / jnp.maximum(1.0 - t_on, 1e-6)
        closing = 1.0 - (1.0 - alpha_on) * time / jnp.maximum(t_off, 1e-6)
        return jnp.where(t > t_on, rising, jnp.where(t > t_off, alpha_on, closing))

    sigma = jnp.where((t <= t_on) & (t > t_off), eta, 0.0)
    return remask_step(key, view, sigma, alpha(t), alpha(s)), memory


@rule(
    noise="absorbing",
    init=lambda canvas, vocab: jnp.asarray(30, jnp.int32),
    leave_one_out="joint",
    needs_logits=False,
    source="WINO, arXiv 2507.18578; LLaDA/decoding.py of Feng-Hong/WINO-DLLM",
)
def wino(
    key: Key, view: View, memory: Int[Array, ""], p: Probability = 0.6, p_back: Probability = 0.9
) -> tuple[Proposal, Int[Array, ""]]:
    """Drafts with a low threshold, and remasks tokens that are improbable when the model cannot see them.

    Each step drafts and verifies in the same forward pass:

        draft    Masks with a probability above `p` become tokens: at least one of the M masks, and at most
                 clip(0.7 M, 5, 20).
        verify   Tokens that were on the canvas before the step become masks again if their leave-one-out probability
                 is below `p_back`, the least probable first. Fewer tokens are remasked than the previous step drafted,
                 so that a block of L masks ends within L steps. A step that drafts one token verifies nothing.

    The block ends when no mask is left, so the last draft is not verified, as in the reference.

    The leave-one-out probabilities come from shadow masks behind the canvas, one for each position of the active block.
    A shadow mask attends to the canvas except the token at its own position, and to all other shadow masks.

    Args:
        key: Unused.
        view: Reads `stats.p_sample`, `leave_one_out.p_canvas`, `masked` and `editable`.
        memory: Number of tokens that the previous step drafted; 30 before the first step.
        p: Probability above which a mask is drafted.
        p_back: Leave-one-out probability below which a token is remasked.

    Returns:
        The proposal, and the number of tokens drafted in this step.
    """
    c = view.stats.p_sample
    # 1. Draft: the most confident masks above p, a bounded number of them.
    most = jnp.clip(view.masked.sum() * 7 // 10, 5, 20)
    which = top(c, view.masked & (c > p), most) | top(c, view.masked, 1)
    drafted = which.sum()
    # 2. Verify the tokens that were there before this step: their probability if the model does not see them [L].
    p_seen = view.leave_one_out.p_canvas
    wrong = view.editable & ~view.masked & (p_seen < p_back)
    wrong = top(-p_seen, wrong, memory - 1) & (drafted > 1)
    return remask(view, accept(view, which), wrong), drafted.astype(memory.dtype)


def _joint_thresholds(view: View, judge: TokenStats, p: Param, p_edit: Param, least: Param = 1) -> Proposal:
    """Fills masks above `p`, and replaces decided tokens if `judge` draws another one with more than `p_edit`.

    If fewer than `least` masks are above `p`, the `least` most confident ones are filled.
    """
    c = view.stats.p_sample
    certain = view.masked & (c > p)
    which = jnp.where(certain.sum() >= least, certain, top(c, view.masked, jnp.asarray(least)))
    wrong = (judge.sample != view.canvas) & (judge.p_sample > p_edit)
    return replace_tokens(accept(view, which), view.editable & ~view.masked & wrong, judge.sample)


@rule(
    noise="absorbing",
    stopping=stopping.after_sixteen_edits,
    needs_logits=False,
    source="LLaDA2.1's joint thresholds, arXiv 2602.08676; dllm/pipelines/llada21/sampler.py",
)
def editing(
    key: Key, view: View, memory: Memory, p: Probability = 0.95, p_edit: Probability = 0.9, least: Count = 1
) -> tuple[Proposal, Memory]:
    """Fills masks by threshold, and replaces decided tokens that the model contradicts with high probability.

    A mask becomes the drawn token if that has a probability above `p`; at least `least` masks do in each step. A
    decided token is replaced by the drawn token if the two differ and the drawn one has a probability above `p_edit`.
    Once the block is full, up to 16 more passes edit it, until one changes nothing: allow 16 steps more than the block
    has tokens. The model must have seen wrong tokens in training; otherwise use `blind_editing`.

    Args:
        key: Unused.
        view: Reads `stats`, `canvas`, `masked` and `editable`.
        memory: Unused.
        p: Probability above which a mask is filled.
        p_edit: Probability above which a decided token is replaced.
        least: Minimum number of masks to fill in a step; the reference's `num_to_transfer`.

    Returns:
        The proposal, and the unchanged memory.
    """
    return _joint_thresholds(view, view.stats, p, p_edit, least), memory


@rule(
    noise="absorbing",
    stopping=stopping.after_sixteen_edits,
    leave_one_out=True,
    needs_logits=False,
    source="`editing` with the leave-one-out predictions of WINO, arXiv 2507.18578",
)
def blind_editing(
    key: Key, view: View, memory: Memory, p: Probability = 0.95, p_edit: Probability = 0.9
) -> tuple[Proposal, Memory]:
    """Decodes as `editing`, where decided tokens are judged by masks that see everything but the token itself.

    A model trained with masked noise only has learnt that every visible token is right, and predicts it again. The
    leave-one-out prediction hides the token, so that the model predicts what it would have written there.

    Args:
        key: Unused.
        view: Reads `stats`, `leave_one_out`, `canvas`, `masked` and `editable`.
        memory: Unused.
        p: Probability above which a mask is filled.
        p_edit: Leave-one-out probability of another token above which it replaces a decided one.

    Returns:
        The proposal, and the unchanged memory.

    Departs from the reference: WINO remasks such tokens; this rule replaces them.
    """
    other = view.leave_one_out  # its argmax judges the tokens, whatever the temperature
    return _joint_thresholds(
        view, other._replace(sample=other.argmax, p_sample=other.p_argmax), p, p_edit
    ), memory


@rule(
    noise="absorbing",
    temperature=1.0,
    stopping=stopping.never,
    needs=("hybrid noise",),
    source="GIDD, arXiv 2503.04482, `GiddSampler` in gidd/sampling.py",
)
def hybrid_ancestral(
    key: Key, view: View, memory: Memory, min_p: Probability = 0.0
) -> tuple[Proposal, Memory]:
    """Samples the reverse process of mask and uniform noise: masks become tokens, and tokens may change.

    The forward process is q_t = alpha_t x + b_t, where b_t is the mixture of mask and uniform noise. With
    alpha_ts = alpha_t / alpha_s, its posterior is

        q(z_s | z_t, x) ~ (alpha_ts [z_s = z_t] + b_t(z_t) - alpha_ts b_s(z_t)) (alpha_s x(z_s) + b_s(z_s))

    where x is the predicted distribution of each position and ~ means up to normalization. The rule assumes
    `noise.hybrid`, which has gamma = 1.

    Args:
        key: One draw per position.
        view: Reads `logits`, `draw_logits`, `canvas`, `noise`, `editable`, `t`, `s`, `alpha_t` and `alpha_s`.
        memory: Unused.
        min_p: Tokens with a smaller posterior probability are never drawn.

    Returns:
        The proposal, and the unchanged memory.

    Departs from the reference: it ends at time `t_eps` and may return masks; here the answer holds the argmax at masks,
    and `Plan(times=)` may end at 0.
    """
    vocab = jnp.arange(view.logits.shape[-1])
    is_mask = vocab == view.noise[0]
    # The uniform part of the noise is over the ids that the model may emit. [V]
    allowed = (view.logits[0] > NEVER / 10) & ~is_mask
    uniform = allowed / jnp.maximum(allowed.sum(), 1)

    def noise_at(time: Float[Array, ""], alpha: Float[Array, ""]) -> Float[Array, "V"]:
        # b_t = (t mask + c uniform) / (1 + c), and alpha = (1 - t) / (1 + c) gives c without knowing the schedule.
        c = jnp.where(alpha > 0, (1.0 - time) / jnp.maximum(alpha, 1e-12) - 1.0, 0.0)
        return (time * is_mask + jnp.maximum(c, 0.0) * uniform) / (1.0 + c)

    b_t, b_s = noise_at(view.t, view.alpha_t), noise_at(view.s, view.alpha_s)
    ratio = view.alpha_t / jnp.maximum(view.alpha_s, 1e-12)
    z = view.canvas
    # First factor of the posterior, alpha_ts [z_s = z_t] + b_t(z_t) - alpha_ts b_s(z_t); then the whole product [L, V].
    stays = ratio * (vocab == z[:, None])  # [L, V]
    fresh = jnp.maximum(b_t[z] - ratio * b_s[z], 0.0)[:, None]  # [L, 1]
    weight = (stays + fresh) * (view.alpha_s * jax.nn.softmax(view.draw_logits, axis=-1) + b_s)
    share = weight / jnp.maximum(weight.sum(-1, keepdims=True), 1e-30)
    share = jnp.where(share < min_p, 0.0, share)
    drawn = draw(jnp.log(jnp.maximum(share, 1e-30)), jax.random.uniform(key, z.shape), jnp.float32(1.0))
    # Where all weights are 0 in fp32 (t = s = 0), there is nothing to draw from and the token stays.
    canvas = jnp.where(view.editable & (share.sum(-1) > 0), drawn, z)
    answer = jnp.where(view.editable & (canvas == view.noise), view.stats.argmax, canvas)
    return propose(view, canvas, answer), memory


@rule(
    noise="absorbing",
    stopping=stopping.stalled,
    source="GIDD's self-correction, arXiv 2503.04482; gidd/eval/self_correction.py",
)
def self_correct(
    key: Key, view: View, memory: Memory, p: Probability = 0.9, t: NonNegative = 0.1, count: Count = 1
) -> tuple[Proposal, Memory]:
    """Fills the masks by threshold `p`, then resamples the most probable disagreements until none is left.

    Once the block is full, each step draws every token anew at temperature `t`. Of the draws that differ from the
    canvas, the `count` most probable ones (at that temperature) replace their tokens. The block ends when no draw
    differs, or when the agreement of canvas and argmax has not risen for more than 32 steps (`stopping.stalled`). Allow
    more steps than the block has tokens.

    Args:
        key: Draws the tokens.
        view: Reads `draw_logits`, `stats.p_sample`, `canvas`, `masked` and `editable`.
        memory: Unused.
        p: Probability above which a mask is filled; the most confident mask always is.
        t: Temperature of the correction.
        count: Maximum number of tokens to replace per step.

    Returns:
        The proposal, and the unchanged memory.

    Departs from the reference: it corrects finished samples and gives the model a fixed time near 0; here filling and
    correction share the steps of the block, and the model is given no time.
    """
    c = view.stats.p_sample
    filled = accept(view, view.masked & (c > p) | top(c, view.masked, 1))
    # Correction starts once no mask is left.
    tokens, chance = resample(key, view.draw_logits, jnp.asarray(t, jnp.float32))
    full = ~jnp.any(view.masked)
    differ = view.editable & full & (tokens != view.canvas)
    return replace_tokens(filled, top(chance, differ, jnp.asarray(count)), tokens), memory


def resample(
    key: Key, logits: Float[Array, "L V"], t: Float[Array, ""]
) -> tuple[Int[Array, "L"], Float[Array, "L"]]:
    """Draws a token for every position from softmax(logits / t).

    Args:
        key: One uniform number per position.
        logits: Logits of one row.
        t: Temperature, a scalar; 0 takes the argmax.

    Returns:
        The tokens [L], and the probability of each at this temperature [L].
    """
    tokens = draw(logits, jax.random.uniform(key, logits.shape[:1]), t)
    # Subtracting the largest logit before the division keeps fp32 finite near t = 0: the argmax has probability 1.
    scaled = (logits - logits.max(axis=-1, keepdims=True)) / jnp.maximum(t, 1e-6)
    log_p = jax.nn.log_softmax(scaled, axis=-1)
    return tokens, jnp.exp(jnp.take_along_axis(log_p, tokens[:, None], axis=-1)[:, 0])
