"""Rules for masked diffusion that remember earlier passes of the block, or depend on its progress."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.config import AtLeast
from mercury_jax.decode.registration import Count, NonNegative, Probability, rule
from mercury_jax.decode.rules.masked import even_share, fixed_share, top
from mercury_jax.decode.sampler import Memory, Param, accept
from mercury_jax.decode.token_stats import NEVER
from mercury_jax.types import Key, Proposal, View


@rule(
    noise="absorbing",
    init=lambda canvas, vocab: jnp.zeros((*canvas.shape, vocab), jnp.float32),
    source="dInfer's `CreditThresholdParallelDecoder`, arXiv 2510.08666",
)
def credit(
    key: Key,
    view: View,
    memory: Float[Array, "L V"],
    p: Probability = 0.9,
    weight: NonNegative = 0.7,
    boost: NonNegative = 0.2,
    decay: Probability = 0.8,
) -> tuple[Proposal, Float[Array, "L V"]]:
    """Applies `threshold` to logits that favour what has been the argmax in earlier passes.

    In each pass the credit is updated, C <- decay C, then C[i, argmax_i] += p_i(argmax_i)^boost at each mask i, and
    raises the logits to logits + weight log(1 + C). The token of a position becomes the argmax of the raised logits. If
    the token drawn from the original logits was not their argmax, it is kept, with its new probability.

    Args:
        key: Unused.
        view: Reads `logits`, `draw_logits`, `stats` and `masked`.
        memory: The credit C [L, V], which takes as much memory as the logits in fp32.
        p: Probability from which a token is accepted.
        weight: Factor of log(1 + C) in the logits.
        boost: Exponent of the probability that is added to the credit.
        decay: Share of the credit that is kept from one pass to the next.

    Returns:
        The proposal, and the new credit.

    As in the reference, masks within 1e-5 of the most confident one are always accepted. Departs from it: the reference
    samples tokens from the raised logits, here they are sampled from the original ones.
    """
    stats, at = view.stats, jnp.arange(view.canvas.shape[0])
    # Masks earn credit for their argmax; all credit decays. [L, V]
    earned = jnp.where(view.masked, stats.p_argmax**boost, 0.0)
    memory = jnp.asarray(decay * memory).at[at, stats.argmax].add(earned).astype(jnp.float32)
    log_p = jax.nn.log_softmax(view.logits + weight * jnp.log1p(memory), axis=-1)
    # `stats.sample` was drawn from the original logits. Only a draw that was their argmax follows the new argmax;
    # replacing the others too would decode greedily, whatever the temperature.
    argmax = jnp.where(view.draw_logits > NEVER, log_p, NEVER).argmax(-1).astype(stats.sample.dtype)
    token = jnp.where(stats.sample == stats.argmax, argmax, stats.sample)
    c = jnp.exp(log_p[at, token])  # confidence after the credit [L]
    best = jnp.max(jnp.where(view.masked, c, 0.0))
    which = view.masked & ((c >= p) | (c >= best - 1e-5))
    return accept(view._replace(stats=stats._replace(sample=token, argmax=argmax)), which), memory


class Stability(NamedTuple):
    """Memory of `klass`."""

    log_p: Float[Array, "L V"]  # log-probabilities of the previous pass
    stable: Int[Array, "L"]  # number of consecutive passes in which the KL divergence was below `kl`


@rule(
    noise="absorbing",
    init=lambda canvas, vocab: Stability(
        jnp.zeros((*canvas.shape, vocab), jnp.float32), jnp.zeros(canvas.shape, jnp.int32)
    ),
    source="KLASS, arXiv 2511.05664, `stable_confident_decode` in its `llada_klass.py`",
)
def klass(
    key: Key,
    view: View,
    memory: Stability,
    p: Probability = 0.9,
    kl: NonNegative = 0.01,
    patience: Annotated[Param, AtLeast(0, integer=True)] = 2,
) -> tuple[Proposal, Stability]:
    """Accepts every mask above `p` whose distribution changed by less than `kl` in each of `patience` passes.

    The change between two passes is KL(p_now || p_before). If no mask passes both tests, the most confident masks are
    accepted, in the number of the fixed schedule (`fixed_share`).

    Args:
        key: Unused.
        view: Reads `logits`, `stats.p_sample`, `masked`, `editable`, `step` and `steps`.
        memory: Log-probabilities of the previous pass, and the number of passes for which they have been stable.
        p: Probability above which a token is accepted.
        kl: Bound on the KL divergence, in nats.
        patience: Number of consecutive passes.

    Returns:
        The proposal, and the new memory.

    Departs from the reference: it keeps the distributions of the last pass across blocks; here each block starts anew.
    """
    log_p, c = jax.nn.log_softmax(view.logits, axis=-1), view.stats.p_sample
    # KL(p_now || p_before) of each position [L]. At step 0 the memory is not a distribution, so nothing is stable.
    change = jnp.sum(jnp.exp(log_p) * (log_p - memory.log_p), axis=-1)
    stable = jnp.where((view.step > 0) & (change < kl), memory.stable + 1, 0)
    ready = view.masked & (c > p) & (stable >= patience)
    which = jnp.where(ready.any(), ready, top(c, view.masked, fixed_share(view)))
    return accept(view, which), Stability(log_p.astype(jnp.float32), stable)


class Cycle(NamedTuple):
    """Memory of `slow_fast`. A cycle explores from `start` until its `end` is found, then fills the span between.

    Positions are indices into the window.
    """

    start: Int[Array, ""]  # first position of the span; -1 before the first step: the first mask
    end: Int[Array, ""]  # one past the last position of the span; valid while `filling`
    guess: Int[Array, ""]  # the previous step's guess of the end
    explored: Int[Array, ""]  # number of exploring steps of this cycle
    found: Bool[Array, ""]  # whether two guesses have agreed on the end
    filling: Bool[Array, ""]  # whether the cycle is in its second phase


@rule(
    noise="absorbing",
    init=lambda canvas, vocab: Cycle(
        jnp.int32(-1), jnp.int32(0), jnp.int32(0), jnp.int32(0), jnp.bool_(False), jnp.bool_(False)
    ),
    needs_logits=False,
    source="SlowFast Sampling, arXiv 2506.10848, section 3.3",
)
def slow_fast(
    key: Key,
    view: View,
    memory: Cycle,
    p: Probability = 0.9,
    low: Probability = 0.3,
    spread: NonNegative = 1.0,
    least: Count = 2,
    most: Count = 6,
) -> tuple[Proposal, Cycle]:
    """Explores until the span that the model predicts well is known, fills it in parallel, and continues after it.

    Decoding repeats a cycle of two phases, exploring and filling:

        exploring   considers the masks from the start of the cycle to the end of the block
        filling     considers the masks from the start of the cycle to its end

    In both phases a step accepts every considered mask of confidence `p`, and at least the most confident one. An
    exploring step also guesses the end of the cycle: the furthest mask of confidence `low`. When the standard deviation
    of the last two guesses is below `spread`, the last guess is the end; after `most` steps without that, their mean is
    the end. The next cycle starts where this one ends.

    Args:
        key: Unused.
        view: Reads `stats.p_sample` and `masked`.
        memory: The current cycle.
        p: Confidence from which a token is accepted.
        low: Confidence from which a mask may be the guessed end.
        spread: Bound on the standard deviation of the last two guesses, in positions.
        least: Minimum number of exploring steps of a cycle.
        most: Maximum number of exploring steps of a cycle.

    Returns:
        The proposal, and the cycle after this step.

    Departs from the reference: the released code always explores for `most` steps, which is `least=6` here.
    """
    c, at = view.stats.p_sample, jnp.arange(view.canvas.shape[0])
    cycle = _current_cycle(view, memory)
    # No mask is left before the start of a cycle, so only the end bounds the masks that are considered.
    reach = view.masked & ((at < cycle.end) | ~cycle.filling)
    which = reach & ((c >= p) | top(c, reach, 1))
    # One past the furthest mask of confidence `low`.
    guess = 1 + jnp.max(jnp.where(reach & (c >= low), at, cycle.start)).astype(jnp.int32)
    explored = _explore(cycle, guess, spread, least, most)
    pick = lambda old, new: jnp.where(cycle.filling, old, new)
    return accept(view, which), jax.tree.map(pick, cycle, explored)


def _current_cycle(view: View, cycle: Cycle) -> Cycle:
    """Returns the cycle of this step: the same one, or a new one if the span of the last cycle is full."""
    at = jnp.arange(view.canvas.shape[0])
    first = jnp.where(cycle.start < 0, jnp.argmax(view.masked), cycle.start).astype(jnp.int32)
    filled = cycle.filling & ~jnp.any(view.masked & (at < cycle.end))
    return Cycle(
        start=jnp.where(filled, cycle.end, first),
        end=cycle.end,
        guess=cycle.guess,
        explored=jnp.where(filled, 0, cycle.explored),
        found=cycle.found & ~filled,
        filling=cycle.filling & ~filled,
    )


def _explore(cycle: Cycle, guess: Int[Array, ""], spread: Param, least: Param, most: Param) -> Cycle:
    """Returns the cycle after an exploring step with a new guess of the end.

    Filling begins after `most` steps, or once the end is found and at least `least` steps were taken.
    """
    steps = cycle.explored + 1
    # The first guess of a cycle has no earlier one to agree with; an end that was found once stays.
    again = cycle.explored > 0
    converged = again & (jnp.abs(guess - cycle.guess) / 2 < spread)  # standard deviation of two numbers
    mean = jnp.where(again, (guess + cycle.guess) // 2, guess)
    end = jnp.where(cycle.found, cycle.end, jnp.where(converged, guess, mean))
    found = cycle.found | converged
    return Cycle(cycle.start, end, guess, steps, found, (steps >= most) | (found & (steps >= least)))


@rule(
    noise="absorbing", source="Prophet, arXiv 2508.19982, `should_early_exit` in its `generate_earlyexit.py`"
)
def prophet(
    key: Key,
    view: View,
    memory: Memory,
    early: Annotated[Param, AtLeast(0, infinite=True)] = 7.5,
    mid: Annotated[Param, AtLeast(0, infinite=True)] = 5.0,
    late: Annotated[Param, AtLeast(0, infinite=True)] = 2.5,
) -> tuple[Proposal, Memory]:
    """Decodes as `confidence`, until the logit gap is so large that all remaining masks are accepted at once.

    The gap is the difference of the two largest logits, averaged over the remaining masks. The bound that it must reach
    depends on the progress of the block: `early`, `mid` or `late`.

    Args:
        key: Unused.
        view: Reads `logits` (after the processors: a temperature scales the gap), `masked`, `step` and `steps`.
        memory: Unused.
        early: Gap to reach in the first third of the steps.
        mid: Gap to reach in the second third.
        late: Gap to reach in the last third.

    Returns:
        The proposal, and the unchanged memory.

    Departs from the reference: it averages over five positions where the final answer is expected, and measures
    progress over the steps of all blocks; here each block averages over its own masks and counts its own steps.
    """
    # Mean gap between the two largest logits, over the remaining masks.
    two, _ = jax.lax.top_k(view.logits, 2)
    gap = jnp.sum(jnp.where(view.masked, two[:, 0] - two[:, 1], 0.0)) / jnp.maximum(view.masked.sum(), 1)
    progress = (view.step + 1) / view.steps
    bound = jnp.where(progress < 0.33, early, jnp.where(progress < 0.67, mid, late))
    which = jnp.where(gap >= bound, view.masked, top(view.stats.p_sample, view.masked, even_share(view)))
    return accept(view, which), memory
