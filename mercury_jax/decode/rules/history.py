"""Rules for masked diffusion that remember earlier passes of the block, or depend on its progress."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.decode.registration import AtLeast, Count, NonNegative, Probability, rule
from mercury_jax.decode.rules.masked import even_share, fixed_share, top
from mercury_jax.decode.sampler import Memory, Param, accept
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

    C <- decay C, C[i, argmax] += p(argmax)^boost at the masks, and the logits become logits + weight log(1 + C). The
    token is the argmax of these; a draw that was not the argmax is kept, with its new probability.

    Args:
        key: Unused.
        view: Reads `logits`, `stats` and `masked`.
        memory: The credit C [L, V]; with a large vocabulary it needs as much memory as the logits.
        p: Probability from which a token is accepted.
        weight: Weight of the credit.
        boost: Exponent of the probability that earns credit.
        decay: Share of the credit that is kept from pass to pass.

    Returns:
        The proposal, and the new credit.

    As in the reference, masks within 1e-5 of the most confident one are always accepted. Departs from it: there tokens
    are drawn from the changed logits, here from the logits before.
    """
    stats, at = view.stats, jnp.arange(view.canvas.shape[0])
    # Masks earn credit for their argmax; all credit decays.
    earned = jnp.where(view.masked, stats.p_argmax**boost, 0.0)
    memory = jnp.asarray(decay * memory).at[at, stats.argmax].add(earned).astype(jnp.float32)
    log_p = jax.nn.log_softmax(view.logits + weight * jnp.log1p(memory), axis=-1)
    # The draw was made from the logits before: it is kept unless it was their argmax.
    argmax = log_p.argmax(-1).astype(stats.sample.dtype)
    token = jnp.where(stats.sample == stats.argmax, argmax, stats.sample)
    c = jnp.exp(log_p[at, token])
    best = jnp.max(jnp.where(view.masked, c, 0.0))
    which = view.masked & ((c >= p) | (c >= best - 1e-5))
    return accept(view._replace(stats=stats._replace(sample=token, argmax=argmax)), which), memory


class Stability(NamedTuple):
    """What `klass` remembers."""

    log_p: Float[Array, "L V"]  # of the previous pass
    stable: Int[Array, "L"]  # passes in a row in which the distribution has hardly changed


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

    The change is KL(p_now || p_before). Where no mask passes both tests, the fixed schedule's number of the most
    confident is accepted.

    Args:
        key: Unused.
        view: Reads `logits`, `stats.p_sample`, `masked`, `step` and `steps`.
        memory: The previous log-probabilities, and for how many passes they have been stable.
        p: Probability from which a token is accepted.
        kl: Nats.
        patience: Passes in a row.

    Returns:
        The proposal, and the new memory.

    Departs from the reference: it keeps the distributions of the last pass across blocks; here each block starts anew.
    """
    log_p, c = jax.nn.log_softmax(view.logits, axis=-1), view.stats.p_sample
    # KL(p_now || p_before) of each position [L]. There is no earlier pass at step 0.
    change = jnp.sum(jnp.exp(log_p) * (log_p - memory.log_p), axis=-1)
    stable = jnp.where((view.step > 0) & (change < kl), memory.stable + 1, 0)
    ready = view.masked & (c > p) & (stable >= patience)
    which = jnp.where(ready.any(), ready, top(c, view.masked, fixed_share(view)))
    return accept(view, which), Stability(log_p.astype(jnp.float32), stable)


class Cycle(NamedTuple):
    """Where `slow_fast` is: a cycle explores from `start` until it knows an `end`, then fills the span between."""

    start: Int[Array, ""]  # -1: the first mask
    end: Int[Array, ""]
    guess: Int[Array, ""]  # the previous step's guess of the end
    explored: Int[Array, ""]  # exploring steps of this cycle
    found: Bool[Array, ""]  # whether the end is decided
    filling: Bool[Array, ""]


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

    Both phases accept every mask of confidence `p` in their reach and at least the most confident one. Exploring
    reaches from the cycle's start to the end of the block, filling from its start to the cycle's end. An exploring
    step guesses the furthest mask of confidence `low` as the end; exploring ends when the last two guesses deviate by
    less than `spread` (the last one is the end), or after `most` steps (their mean is).

    Args:
        key: Unused.
        view: Reads `stats.p_sample` and `masked`.
        memory: The cycle.
        p: Confidence from which a token is accepted.
        low: Confidence of the furthest mask.
        spread: Standard deviation of two guesses, in positions.
        least: Least exploring steps of a cycle.
        most: Most exploring steps of a cycle.

    Returns:
        The proposal, and the cycle.

    Departs from the reference: the released code always explores for `most` steps, which is `least=6` here.
    """
    c, at = view.stats.p_sample, jnp.arange(view.canvas.shape[0])
    cycle = _current_cycle(view, memory)
    reach = view.masked & ((at < cycle.end) | ~cycle.filling)  # nothing is masked before the start
    which = reach & ((c >= p) | top(c, reach, 1))
    # One past the furthest mask that the model is not unsure of.
    guess = 1 + jnp.max(jnp.where(reach & (c >= low), at, cycle.start)).astype(jnp.int32)
    explored = _explore(cycle, guess, spread, least, most)
    pick = lambda old, new: jnp.where(cycle.filling, old, new)
    return accept(view, which), jax.tree.map(pick, cycle, explored)


def _current_cycle(view: View, cycle: Cycle) -> Cycle:
    """The same cycle, or the next one where its span is filled."""
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
    """The cycle after an exploring step."""
    steps = cycle.explored + 1
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

    The gap is that between the two largest logits, averaged over the open masks. It must reach `early` in the first
    third of the steps, `mid` in the second and `late` in the last.

    Args:
        key: Unused.
        view: Reads `logits` (after the processors: a temperature scales the gap), `masked`, `step` and `steps`.
        memory: Unused.
        early: Gap in the first third of the steps.
        mid: Gap in the second third.
        late: Gap in the last third.

    Returns:
        The proposal, and the unchanged memory.

    Departs from the reference: it looks at five positions where the answer is expected and counts the steps of all
    blocks; here a block looks at all of its own masks and counts its own steps.
    """
    # Mean gap between the two largest logits of the open masks.
    two, _ = jax.lax.top_k(view.logits, 2)
    gap = jnp.sum(jnp.where(view.masked, two[:, 0] - two[:, 1], 0.0)) / jnp.maximum(view.masked.sum(), 1)
    progress = (view.step + 1) / view.steps
    bound = jnp.where(progress < 0.33, early, jnp.where(progress < 0.67, mid, late))
    which = jnp.where(gap >= bound, view.masked, top(view.stats.p_sample, view.masked, even_share(view)))
    return accept(view, which), memory
