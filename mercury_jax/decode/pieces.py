"""Reading a large vocabulary piece by piece: its logits are made, shaped and read, and never all there.

What rules ask of a pass are sums, largest values and a draw. Each piece of ids gives its own, which are then put
together logitsly; so do the mean embeddings of self-conditioning, as the values of an attention would whose keys are
the ids (a running softmax: Milakov and Gimelshein, arXiv 1805.02867). A canvas of 256 over 262,144 ids has 268 MB of
logits in fp32, and one piece 34 MB.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mercury_jax.decode import across
from mercury_jax.decode.parts import Sampler
from mercury_jax.decode.read import NEVER, inverse
from mercury_jax.decode.sight import Sight, shaped
from mercury_jax.decode.state import Knobs, Program, State
from mercury_jax.types import Params, Reading, SelfCond


class Piece(NamedTuple):
    """What some of the ids tell of each position of a row. Probabilities are relative to exp(most)."""

    most: Float[Array, "L"]  # the largest logit
    argmax: Int[Array, "L"]
    second: Float[Array, "L"]  # the largest logit of the others
    total: Float[Array, "L"]  # sum of exp(logit - most)
    moment: Float[Array, "L"]  # sum of exp(logit - most) * (logit - most)
    canvas: Float[Array, "L"]  # logit of the token that stands there; NEVER where it is not among these ids
    eos: Float[Array, "L"]  # the same of the end of text
    mass: Float[Array, "L"]  # sum of exp((logit - most) / temperature)
    drawn: Int[Array, "L"]  # a draw among these ids at the sampler's temperature
    chance: Float[Array, "L"]  # its logit


class Soft(NamedTuple):
    """The mean embedding so far: weights relative to exp(most), their sum, and the weighted sum."""

    most: Float[Array, "B L 1"]
    total: Float[Array, "B L 1"]
    sum: Float[Array, "B L D"]


def applies(program: Program, sampler: Sampler) -> bool:
    """Whether this vocabulary is read in pieces: it is large, and no part asks for all of its logits."""
    parts = (sampler.rule, *sampler.shape, *sampler.allow, *([] if sampler.stop is None else [sampler.stop]))
    alone = program.model.head_chunk is not None and not any(part.whole for part in parts)
    others = program.verify or program.blind or program.grows or program.logprobs is not None
    return alone and not others and program.model.config.vocab > program.piece


def read(
    program: Program, params: Params, state: State, hidden: Any, sight: Sight, knobs: Knobs
) -> tuple[Reading, SelfCond]:
    """The reading of every row, and the carry for the next pass.

    A draw is the inverse of the distribution at one uniform over the pieces, and at another inside of each.
    """
    vocab, on, rows = program.model.config.vocab, program.model.mesh, (state, hidden, sight, knobs)
    walk = functools.partial(_walk, program)
    if across.divides(on, vocab):
        soft, pieces = across.walk(on, walk, params, vocab, *rows)
    else:
        soft, pieces = walk(params, 0, vocab, *rows)
    joined = jax.vmap(join, in_axes=(1, 0, 0))
    temperature = jnp.asarray(knobs.sampler.temperature, jnp.float32)
    reading = joined(pieces, sight.uniforms, temperature)
    reading = reading._replace(p_eos=jnp.where(sight.view.eos[:, None] >= 0, reading.p_eos, 0.0))
    return reading, () if soft is None else soft.sum / soft.total


def _walk(
    program: Program,
    params: Params,
    base: Any,
    count: int,
    state: State,
    hidden: Any,
    sight: Sight,
    knobs: Knobs,
) -> tuple[Soft | None, Piece]:
    """(mean embedding, pieces [P, B, L]) of the `count` ids from `base` on, which are all that the tables hold."""
    size = min(program.piece, count)
    one = functools.partial(_piece, program, params, base, state, hidden, sight, knobs)
    soft, pieces = jax.lax.scan(
        lambda soft, i: one(soft, i * size, size), _nothing(program, state), jnp.arange(count // size)
    )
    if count % size:
        soft, last = one(soft, count - count % size, count % size)
        pieces = jax.tree.map(lambda all, x: jnp.concatenate([all, x[None]]), pieces, last)
    return soft, pieces


def _piece(
    program: Program, params: Params, base: Any, state: State, hidden: Any, sight: Sight, knobs: Knobs,
    soft: Soft | None, at: Any, size: int,
) -> tuple[Soft | None, Piece]:  # fmt: skip
    """The ids base + at..base + at + size, which stand in the tables from `at` on."""
    assert program.model.head_chunk is not None
    first = base + at
    logits = program.model.head_chunk(params, hidden, at, size)
    logits = jax.vmap(lambda row, at, x, knobs: shaped(program, row, at, x, knobs, first))(
        state, sight, logits, knobs
    )
    piece = jax.vmap(functools.partial(taken, first))(logits, sight.view.canvas, sight.view.eos)
    soft = None if soft is None else _softer(program, params, soft, logits, piece.most, at)
    return soft, _drawn(piece, logits, sight.inside, knobs.sampler.temperature, first)


def taken(first: Any, logits: Float[Array, "L v"], canvas: Int[Array, "L"], eos: Int[Array, ""]) -> Piece:
    """All of one row's piece but its draw."""
    ids, best, at = jnp.arange(logits.shape[-1]), logits.max(axis=-1), logits.argmax(axis=-1)
    centred = logits - best[:, None]
    e = jnp.exp(centred)

    def among(id: Array) -> Array:
        inside = (id >= first) & (id < first + logits.shape[-1])
        return jnp.where(inside, _pick(logits, jnp.clip(id - first, 0, logits.shape[-1] - 1)), NEVER)

    found = (at + first).astype(jnp.int32)
    return Piece(
        most=best,
        argmax=found,
        second=jnp.where(ids == at[:, None], -jnp.inf, logits).max(axis=-1),
        total=e.sum(axis=-1),
        moment=(e * centred).sum(axis=-1),
        canvas=among(canvas),
        eos=among(jnp.full_like(canvas, eos)),
        mass=jnp.ones_like(best),
        drawn=found,
        chance=best,
    )


def _pick(logits: Float[Array, "*s v"], column: Int[Array, "*s"]) -> Float[Array, "*s"]:
    return jnp.take_along_axis(logits, column[..., None], axis=-1)[..., 0]


def _drawn(
    piece: Piece, logits: Float[Array, "B L v"], uniforms: Array, temperature: Any, first: Any
) -> Piece:
    """The pieces of all rows with their draws; weights are added up only where some row draws at all."""
    warmth = jnp.asarray(temperature, jnp.float32)

    def warm() -> tuple[Array, Array, Array]:
        weights = jnp.exp((logits - piece.most[..., None]) / jnp.maximum(warmth, 1e-6)[:, None, None])
        column = inverse(weights, jnp.minimum(uniforms, 1.0 - 1e-6))
        return weights.sum(-1), (column + first).astype(jnp.int32), _pick(logits, column)

    cold = lambda: (piece.mass, piece.drawn, piece.chance)
    mass, drawn, chance = jax.lax.cond(jnp.any(warmth > 0), warm, cold)
    return piece._replace(mass=mass, drawn=drawn, chance=chance)


def join(p: Piece, uniforms: Float[Array, "L"], temperature: Float[Array, ""]) -> Reading:
    """The reading of one row from its pieces [P, L], which are in the order of their ids."""
    most, who = p.most.max(axis=0), p.most.argmax(axis=0)
    gap = p.most - most
    total = (p.total * jnp.exp(gap)).sum(axis=0)
    moment = (jnp.exp(gap) * (p.moment + gap * p.total)).sum(axis=0)
    of = lambda x, index: jnp.take_along_axis(x, index[None], axis=0)[0]
    second = jnp.where(jnp.arange(len(gap))[:, None] == who, p.second, p.most).max(axis=0)
    argmax = of(p.argmax, who)
    ends = jnp.cumsum(p.mass * jnp.exp(gap / jnp.maximum(temperature, 1e-6)), axis=0)
    aim = jnp.minimum(uniforms, 1.0 - 1e-6) * ends[-1]
    which = jnp.where(temperature > 0, jnp.minimum((ends <= aim).sum(axis=0), len(gap) - 1), who)
    chance = lambda logit: jnp.exp(logit - most) / total
    return Reading(
        argmax=argmax,
        sample=jnp.where(temperature > 0, of(p.drawn, which), argmax),
        p_argmax=1.0 / total,
        p_sample=chance(jnp.where(temperature > 0, of(p.chance, which), most)),
        p_canvas=chance(p.canvas.max(axis=0)),
        entropy=jnp.log(total) - moment / total,
        margin=(1.0 - jnp.exp(second - most)) / total,
        p_eos=chance(p.eos.max(axis=0)),
    )


def _nothing(program: Program, state: State) -> Soft | None:
    """The mean embedding of no id; None for a model without self-conditioning."""
    if program.model.embed_mixture is None:
        return None
    rows, width = state.canvas.shape[0], program.model.config.width
    zero = jnp.zeros((rows, program.window, 1), jnp.float32)
    return Soft(zero + NEVER, zero, jnp.zeros((rows, program.window, width), jnp.float32))


def _softer(
    program: Program, params: Params, soft: Soft, logits: Float[Array, "B L v"], largest: Array, at: Any
) -> Soft:
    assert program.model.embed_mixture is not None
    most = jnp.maximum(soft.most, largest[..., None])
    weights, shrink = jnp.exp(logits - most), jnp.exp(soft.most - most)
    fresh = program.model.embed_mixture(params, weights, at)
    return Soft(most, soft.total * shrink + weights.sum(-1, keepdims=True), soft.sum * shrink + fresh)
