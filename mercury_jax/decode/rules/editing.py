"""Rules that replace settled tokens in place: LLaDA2.1's joint thresholds, GIDD's self-correction."""

from __future__ import annotations

from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mercury_jax.decode import stop as stops
from mercury_jax.decode.parts import Knob, Memory, Part, rule, settle
from mercury_jax.decode.ranges import AtLeast, Between
from mercury_jax.decode.read import draw
from mercury_jax.decode.rules.masked import best
from mercury_jax.types import Key, Proposal, Reading, View


def _sixteen() -> Part:
    return stops.fixed_point(patience=1, limit=16)


@rule(stop=_sixteen, fits=("masked",), whole=False)
def editing(
    key: Key,
    view: View,
    memory: Memory,
    *,
    p: Annotated[Knob, Between(0, 1)] = 0.95,
    p_edit: Annotated[Knob, Between(0, 1)] = 0.9,
) -> tuple[Proposal, Memory]:
    """Fill masks that are sure, and replace settled tokens of which the model is sure they are wrong.

    LLaDA2.1's joint thresholds (arXiv 2602.08676; dllm/pipelines/llada21/sampler.py): a mask becomes
    a token above probability `p` (at least one does); a settled token becomes the argmax where that
    differs and has more than `p_edit`. Once the block is full, up to 16 passes edit, until one changes
    nothing. At temperature 0 it is the reference; above it, edits are still the argmax. The model
    must have seen wrong tokens in training: for one that has not, see `blind_editing`.
    """
    del key
    return _edited(view, view.reading, p, p_edit), memory


@rule(stop=_sixteen, fits=("masked",), blind=True, whole=False)
def blind_editing(
    key: Key,
    view: View,
    memory: Memory,
    *,
    p: Annotated[Knob, Between(0, 1)] = 0.95,
    p_edit: Annotated[Knob, Between(0, 1)] = 0.9,
) -> tuple[Proposal, Memory]:
    """The same, where settled tokens are judged by masks that see everything but the token itself.

    A model trained on masks alone has learnt that what stands there is right, and never edits; asked
    with the token left out, it tells what it would have written (the reader of WINO, arXiv
    2507.18578, which masks where this replaces).
    """
    del key
    return _edited(view, view.blind, p, p_edit), memory


def _edited(view: View, judge: Reading, p: Knob, p_edit: Knob) -> Proposal:
    c = view.reading.p_sample
    filled = settle(view, view.masked & (c > p) | best(c, view.masked, jnp.asarray(1)))
    wrong = (judge.argmax != view.canvas) & (judge.p_argmax > p_edit)
    return _replaced(filled, view.editable & ~view.masked & wrong, judge.argmax)


def _replaced(proposal: Proposal, where: Array, tokens: Array) -> Proposal:
    put = lambda old: jnp.where(where, tokens, old)
    return proposal._replace(canvas=put(proposal.canvas), answer=put(proposal.answer))


@rule(stop=stops.stalled, fits=("masked",))
def self_correct(
    key: Key,
    view: View,
    memory: Memory,
    *,
    p: Annotated[Knob, Between(0, 1)] = 0.9,
    t: Annotated[Knob, AtLeast(0)] = 0.1,
    count: Annotated[Knob, AtLeast(1, whole=True)] = 1,
) -> tuple[Proposal, Memory]:
    """Fill the masks by threshold `p`, then resample the surest disagreements until none is left.

    GIDD's self-correction (arXiv 2503.04482; gidd/eval/self_correction.py): draw every
    token anew at temperature `t`; of the draws that differ from what stands there, the `count` most
    probable (at that temperature) are taken. The block ends when no draw differs, or when the
    agreement with the argmax has not risen for more than 32 steps (`stop.stalled`).
    The reference corrects finished samples and tells its model a fixed time near 0; here both
    halves share the steps of the block, and the model is told no time. Give more steps than tokens.
    """
    c = view.reading.p_sample
    drafted = settle(view, view.masked & (c > p) | best(c, view.masked, jnp.asarray(1)))
    tokens, chance = resample(key, view.logits, jnp.asarray(t, jnp.float32))
    full = ~jnp.any(view.masked)
    differ = view.editable & full & (tokens != view.canvas)
    return _replaced(drafted, best(chance, differ, jnp.asarray(count)), tokens), memory


def resample(
    key: Key, logits: Float[Array, "L V"], t: Float[Array, ""]
) -> tuple[Int[Array, "L"], Float[Array, "L"]]:
    """A token for every position from softmax(logits / t), and the probability that it had there."""
    tokens = draw(logits, jax.random.uniform(key, logits.shape[:1]), t)
    # The best becomes 0 before the division, so that near t = 0 every argmax has probability 1.
    scaled = (logits - logits.max(axis=-1, keepdims=True)) / jnp.maximum(t, 1e-6)
    log_p = jax.nn.log_softmax(scaled, axis=-1)
    return tokens, jnp.exp(jnp.take_along_axis(log_p, tokens[:, None], axis=-1)[:, 0])
