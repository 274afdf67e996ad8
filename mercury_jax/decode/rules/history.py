"""Rules for masked diffusion that look back: at the passes before, or at how far the block has come."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.decode.parts import Knob, Memory, rule, settle
from mercury_jax.decode.ranges import AtLeast, Between
from mercury_jax.decode.rules.masked import best, quota, share
from mercury_jax.types import Key, Proposal, View


@rule(init=lambda canvas, vocab: jnp.zeros((*canvas.shape, vocab), jnp.float32), fits=("masked",))
def credit(
    key: Key,
    view: View,
    memory: Memory,
    *,
    p: Annotated[Knob, Between(0, 1)] = 0.9,
    weight: Annotated[Knob, AtLeast(0)] = 0.7,
    boost: Annotated[Knob, AtLeast(0)] = 0.2,
    decay: Annotated[Knob, Between(0, 1)] = 0.8,
) -> tuple[Proposal, Memory]:
    """`threshold` on logits that favour what has been the first choice in the passes before.

    dInfer's `CreditThresholdParallelDecoder` (arXiv 2510.08666): C <- decay C, C[i, first] += p(first)^boost
    at the masks, logits + weight log(1 + C). The memory is C [L, V], so mind the vocabulary. The token is
    the fused argmax, but a draw that was not the argmax stands, with its fused probability: the reference
    draws from the fused logits. It also takes what is within 1e-5 of the best; here only the best is.
    """
    del key
    r, at = view.reading, jnp.arange(view.canvas.shape[0])
    earned = jnp.where(view.masked, r.p_argmax**boost, 0.0)
    memory = (decay * memory).at[at, r.argmax].add(earned).astype(jnp.float32)
    fused = jax.nn.log_softmax(view.logits + weight * jnp.log1p(memory), axis=-1)
    first = fused.argmax(-1).astype(r.sample.dtype)
    token = jnp.where(r.sample == r.argmax, first, r.sample)
    c = jnp.exp(fused[at, token])
    accept = view.masked & ((c >= p) | best(c, view.masked, jnp.asarray(1)))
    return settle(view._replace(reading=r._replace(sample=token, argmax=first)), accept), memory


class Stability(NamedTuple):
    """What `klass` remembers."""

    log_p: Float[Array, "L V"]  # of the pass before
    calm: Int[Array, "L"]  # for how many passes in a row the distribution has hardly moved


def _unstable(canvas: Int[Array, "L"], vocab: int) -> Stability:
    return Stability(jnp.zeros((*canvas.shape, vocab), jnp.float32), jnp.zeros(canvas.shape, jnp.int32))


@rule(init=_unstable, fits=("masked",))
def klass(
    key: Key,
    view: View,
    memory: Stability,
    *,
    p: Annotated[Knob, Between(0, 1)] = 0.9,
    kl: Annotated[Knob, AtLeast(0)] = 0.01,
    patience: Annotated[Knob, AtLeast(0, whole=True)] = 2,
) -> tuple[Proposal, Stability]:
    """Every mask above `p` whose distribution moved by less than `kl` nats in each of `patience` passes.

    KLASS (arXiv 2511.05664; `stable_confident_decode` in its `llada_klass.py`), on KL(p_now || p_before).
    Where no mask is both, the fixed schedule's number of the most confident. The reference keeps the
    distributions of the last pass across blocks; here each block begins anew.
    """
    del key
    now, c = jax.nn.log_softmax(view.logits, axis=-1), view.reading.p_sample
    moved = jnp.sum(jnp.exp(now) * (now - memory.log_p), axis=-1)
    calm = jnp.where((view.step > 0) & (moved < kl), memory.calm + 1, 0)
    ready = view.masked & (c > p) & (calm >= patience)
    accept = jnp.where(ready.any(), ready, best(c, view.masked, quota(view)))
    return settle(view, accept), Stability(now.astype(jnp.float32), calm)


class Cycle(NamedTuple):
    """Where `slow_fast` is: a cycle explores from `start` on until it knows an `end`, then fills what is between."""

    start: Int[Array, ""]  # -1: at the first mask
    end: Int[Array, ""]
    guess: Int[Array, ""]  # the last step's guess of the end
    explored: Int[Array, ""]  # exploring steps of this cycle
    found: Bool[Array, ""]  # the end is settled
    filling: Bool[Array, ""]


def _first_cycle(canvas: Int[Array, "L"], vocab: int) -> Cycle:
    del canvas, vocab
    number, no = jnp.asarray(0, jnp.int32), jnp.asarray(False)
    return Cycle(number - 1, number, number, number, no, no)


@rule(init=_first_cycle, fits=("masked",), whole=False)
def slow_fast(
    key: Key,
    view: View,
    memory: Cycle,
    *,
    p: Annotated[Knob, Between(0, 1)] = 0.9,
    low: Annotated[Knob, Between(0, 1)] = 0.3,
    spread: Annotated[Knob, AtLeast(0)] = 1.0,
    least: Annotated[Knob, AtLeast(1, whole=True)] = 2,
    most: Annotated[Knob, AtLeast(1, whole=True)] = 6,
) -> tuple[Proposal, Cycle]:
    """Explore until it is clear how far the model can see, then fill that span in parallel, then on from its end.

    SlowFast Sampling (arXiv 2506.10848, section 3.3). Both phases settle every mask of confidence `p` in
    their reach and at least the best: exploring reaches from the cycle's start to the block's end, filling
    from its start to the cycle's end. Exploring guesses the furthest mask of confidence `low`; it ends when
    the last two guesses deviate by less than `spread` (their last is the end), or after `most` steps (their
    mean). The released code explores for `most` steps always: that is `least=6`.
    """
    del key
    cycle, c, at = _begin(view, memory), view.reading.p_sample, jnp.arange(view.canvas.shape[0])
    reach = view.masked & ((at < cycle.end) | ~cycle.filling)  # before the start nothing is masked
    accept = reach & ((c >= p) | best(c, reach, jnp.asarray(1)))
    guess = 1 + jnp.max(jnp.where(reach & (c >= low), at, cycle.start)).astype(jnp.int32)
    explored = _explore(cycle, guess, spread, least, most)
    kept = jax.tree.map(lambda old, new: jnp.where(cycle.filling, old, new), cycle, explored)
    return settle(view, accept), kept


def _begin(view: View, cycle: Cycle) -> Cycle:
    """The same cycle, or the next one where its span is filled."""
    at = jnp.arange(view.canvas.shape[0])
    first = jnp.where(cycle.start < 0, jnp.argmax(view.masked), cycle.start).astype(jnp.int32)
    over = cycle.filling & ~jnp.any(view.masked & (at < cycle.end))
    return Cycle(
        start=jnp.where(over, cycle.end, first),
        end=cycle.end,
        guess=cycle.guess,
        explored=jnp.where(over, 0, cycle.explored),
        found=cycle.found & ~over,
        filling=cycle.filling & ~over,
    )


def _explore(cycle: Cycle, guess: Int[Array, ""], spread: Knob, least: Knob, most: Knob) -> Cycle:
    """The cycle after an exploring step: its end is the last guess if that holds still, else the mean of two."""
    steps = cycle.explored + 1
    again = cycle.explored > 0
    still = again & (jnp.abs(guess - cycle.guess) / 2 < spread)  # the deviation of two numbers
    mean = jnp.where(again, (guess + cycle.guess) // 2, guess)
    end = jnp.where(cycle.found, cycle.end, jnp.where(still, guess, mean))
    found = cycle.found | still
    over = (steps >= most) | (found & (steps >= least))
    return Cycle(cycle.start, end, guess, steps, found, over)


@rule(fits=("masked",))
def prophet(
    key: Key,
    view: View,
    memory: Memory,
    *,
    early: Annotated[Knob, AtLeast(0, infinite=True)] = 7.5,
    mid: Annotated[Knob, AtLeast(0, infinite=True)] = 5.0,
    late: Annotated[Knob, AtLeast(0, infinite=True)] = 2.5,
) -> tuple[Proposal, Memory]:
    """`confidence`, until the first logit leads the second by so much that the whole block is settled at once.

    Prophet (arXiv 2508.19982; `should_early_exit` in its `generate_earlyexit.py`): the mean lead over the
    open masks must reach `early` in the first third of the steps, `mid` in the second, `late` in the
    last. The reference looks at five positions where the answer is expected and counts the steps of all
    blocks; here a block looks at itself. The leads are those of the shaped logits: a temperature scales them.
    """
    del key
    top, _ = jax.lax.top_k(view.logits, 2)
    lead = jnp.sum(jnp.where(view.masked, top[:, 0] - top[:, 1], 0.0)) / jnp.maximum(view.masked.sum(), 1)
    done = (view.step + 1) / view.steps
    bar = jnp.where(done < 0.33, early, jnp.where(done < 0.67, mid, late))
    accept = jnp.where(lead >= bar, view.masked, best(view.reading.p_sample, view.masked, share(view)))
    return settle(view, accept), memory
