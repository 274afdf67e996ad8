"""What the methods of drafting share: who may verify, rejection sampling, the count of accepted tokens, and the lookup.

`drafting.py` drafts with a diffusion model, `block_drafter.py` with a network that reads hidden states of the verifier,
`prompt_lookup.py` with the text itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mercury_jax.config import refuse
from mercury_jax.decode.rules.combined import autoregressive
from mercury_jax.decode.sampler import SamplerLike, check_sampler
from mercury_jax.decode.state import Frame, State, position_uniforms
from mercury_jax.decode.token_stats import draw, search_cdf
from mercury_jax.types import LM

ACCEPTANCE_KEY = 0x7FFFFFFE  # folded into a row's key for the uniforms that accept drafts
DRAFT_KEY = 0x7FFFFFFD  # folded into a row's key for drafts that are independent of the verifier's draws


def check_verifier(lm: LM, sampler: SamplerLike | None, others: Mapping[str, Any]) -> SamplerLike | None:
    """Checks that a model can verify drafts, and returns its sampler.

    Args:
        others: Arguments of the call that do not work with drafts, by name.
    """
    config = lm.model.config
    if not config.predicts_next:
        raise refuse("lm", lm.name, "a model whose encoding pass predicts the next token, to verify drafts")
    for name, value in others.items():
        if value is not None and value is not False:
            raise refuse(name, value, f"{None if value is not True else False} with draft=")
    if sampler is None and not config.autoregressive:
        sampler = autoregressive()
    if sampler is not None and check_sampler(sampler).speculate != 0:
        allowed = "rules.autoregressive(), or None; mj.Draft(sampler=) chooses how drafts are made"
        raise refuse("sampler", check_sampler(sampler).rule.name, allowed)
    return sampler


def count_drafts(
    state: State, frame: Frame, rows: Bool[Array, "B"]
) -> tuple[Int[Array, "B"], Int[Array, "B"]]:
    """Counts the proposed and the accepted draft tokens of a verifying pass; 0 in rows that verified nothing."""
    draft = state.answer[:, 1:]
    exists = jnp.arange(draft.shape[1]) < (state.used - 1)[:, None]
    agrees = (frame.answer[:, :-1] == draft) & exists
    accepted = jnp.minimum(jnp.cumprod(agrees.astype(jnp.int32), axis=1).sum(1), frame.used)
    of_rows = lambda count: jnp.where(rows, count, 0).astype(jnp.int32)
    return of_rows(exists.sum(1)), of_rows(accepted)


def look_up_row(
    size: int, ngram: int, tokens: Int[Array, "S"], last: Int[Array, ""]
) -> tuple[Int[Array, "L"], Int[Array, ""]]:
    """Finds the longest n-gram that ends at `last` and has occurred before, with n at most `ngram`.

    Returns:
        The `size` tokens that followed its latest occurrence, and n, 0 if there is no occurrence. If fewer than `size`
        tokens follow it, they are repeated.
    """
    at, back = jnp.arange(len(tokens)), jnp.arange(ngram)[:, None]
    # same [n, S]: whether the token n before each position is the one n before the last; then whether all up to n are.
    same = tokens[jnp.maximum(at - back, 0)] == tokens[jnp.maximum(last - back, 0)]
    same &= back <= jnp.minimum(at, last)
    length = jnp.where(at < last, jnp.cumprod(same.astype(jnp.int32), axis=0).sum(0), 0)
    best = jnp.argmax(length * len(tokens) + at * (length > 0))
    period = jnp.maximum(last - best, 1)
    return tokens[best + 1 + jnp.arange(size) % period], length[best]


class Proposals(NamedTuple):
    """The drafter's distributions of one row, aligned with the positions of a verifying pass."""

    logits: Float[Array, "W V"]  # logits of the drafter
    fresh: Bool[Array, "W"]  # sampled from these logits; False: accepted in an earlier step, so that q = 1
    temperature: Float[Array, ""]  # sampling temperature of the drafter


def accept_or_redraw(
    row: State,
    logits: Float[Array, "W V"],
    proposed: Proposals,
    draft: Int[Array, "W"],
    exists: Bool[Array, "W"],
    at: Int[Array, "W"],
) -> Int[Array, "W"]:
    """Samples a token for each position of a verifying pass by rejection sampling (arXiv 2211.17192, algorithm 1).

    The uniforms belong to absolute positions and are the same in every pass. This keeps the samples independent: the
    result at a position is used only in the one pass in which all draft tokens before it are accepted.
    """
    temperature = jnp.asarray(row.sampling.sampler.temperature, jnp.float32)
    softmax = lambda x, t: jax.nn.softmax(x / jnp.maximum(t, 1e-6), axis=-1)
    p = softmax(logits, temperature)
    # q [W, V]: the drafter's distribution, a one-hot vector for deterministic tokens, 0 where there is no draft token.
    certain = jax.nn.one_hot(draft, p.shape[-1], dtype=p.dtype)
    q = jnp.where(proposed.fresh[:, None], softmax(proposed.logits, proposed.temperature), certain)
    q = q * exists[:, None]
    of_draft = lambda x: jnp.take_along_axis(x, draft[:, None], axis=-1)[:, 0]
    uniforms = position_uniforms(jax.random.fold_in(row.key, ACCEPTANCE_KEY), at)
    accepted = exists & (uniforms * of_draft(q) < of_draft(p))  # u < p(x) / q(x), without the division
    rest = jnp.maximum(p - q, 0.0)
    # If p equals q, max(p - q, 0) is 0 everywhere. A rejection then happens only by rounding, and samples from p.
    rest = jnp.where(rest.sum(-1, keepdims=True) > 0, rest, p)
    again = search_cdf(rest, jnp.minimum(position_uniforms(row.key, at), 1.0 - 1e-6))
    drawn = jnp.where(accepted, draft, again)
    greedy = draw(logits, jnp.zeros(at.shape), jnp.zeros(()))
    return jnp.where(temperature > 0, drawn, greedy).astype(jnp.int32)
