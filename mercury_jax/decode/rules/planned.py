"""Rules that plan which tokens to keep: P2's path planning, and PRISM's remasking by a trained quality head.

A head, given as `Rule.needs_hidden`, is a function (params, hidden states) -> array; the rule reads its result as
`view.hidden`. The parameters of the head are part of the model's parameters, so that they are sharded and saved with
them:

    lm = dataclasses.replace(lm, params=lm.params | {"quality_head": head})
"""

from __future__ import annotations

from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mercury_jax.config import refuse
from mercury_jax.decode import stopping
from mercury_jax.decode.registration import AtLeast, NonNegative, rule
from mercury_jax.decode.rules.masked import fixed_share, top
from mercury_jax.decode.rules.remask import remask
from mercury_jax.decode.sampler import Memory, Param, accept
from mercury_jax.types import Key, Params, Proposal, View, accumulation_dtype


@rule(
    noise="absorbing",
    stopping=stopping.never,
    needs_logits=False,
    source="P2, arXiv 2502.03540, `p2_sampling` of its path_planning package",
)
def p2(key: Key, view: View, memory: Memory, eta: NonNegative = 1.0) -> tuple[Proposal, Memory]:
    """Keeps the tokens that the model itself is surest of, and remasks the others: P2 with self-planning.

    The score of a position is log p of the token drawn there in this pass, multiplied by `eta` if the position is
    already decided. In step i of N (from 1), the floor((1 - i / N) L) of the block's L positions with the lowest scores
    become masks or stay masks, and all other masks become tokens. Positions that score equal to the lowest kept one are
    kept too.

    Args:
        key: Unused.
        view: Reads `stats.p_sample`, `masked`, `editable`, `step` and `steps`.
        memory: Unused.
        eta: Factor on the scores of decided tokens. Above 1 they are remasked more easily, at 0 never.

    Returns:
        The proposal, and the unchanged memory.

    Departs from the reference: above temperature 0 it scores a token by the logits plus the noise that drew it; here
    the score is the log-probability without that noise. A second model as planner (its BERT planner) is not supported.
    """
    # Log-probabilities are negative: eta > 1 lowers the scores of decided tokens, eta = 0 makes them 0, the highest.
    score = jnp.log(jnp.maximum(view.stats.p_sample, 1e-30)) * jnp.where(view.masked, 1.0, eta)
    score = jnp.where(view.editable, score, jnp.inf)
    length = view.editable.sum()
    count = length - -(-length * (view.step + 1) // view.steps)  # floor((1 - i / N) L)
    # The score of rank `count` is the lowest one that is kept; positions strictly below it become masks.
    cutoff = jnp.sort(score)[jnp.clip(count, 0, score.shape[0] - 1)]
    lowest = view.editable & (score < cutoff)
    return remask(view, accept(view, view.masked & ~lowest), ~view.masked & lowest), memory


def quality_head(params: Params, hidden: Float[Array, "B L D"]) -> Float[Array, "B L"]:
    """Computes PRISM's quality of each token: the logit of the probability that it is right.

    The head has the architecture of PRISM for LLaDA (`RemaskingHead` in its llada.py): LayerNorm, a linear layer
    D -> D, GELU, and a linear layer D -> 1.

    Args:
        params: Parameters of the model; `params["quality_head"]` holds {"norm": {"scale" [D], "bias" [D]},
            "first": {"w" [D, D], "b" [D]}, "second": {"w" [D, 1], "b" [1]}}.
        hidden: Hidden states after the final norm of the model [B, L, D].

    Returns:
        The logits [B, L], at least fp32.

    Raises:
        ValueError: `params` has no "quality_head".
    """
    if "quality_head" not in params:
        allowed = (
            'params with a "quality_head", which the rule prism reads; see mj.rules.planned.quality_head'
        )
        raise refuse("lm.params", sorted(params), allowed)
    head, dtype = params["quality_head"], accumulation_dtype(hidden.dtype)
    x = hidden.astype(dtype)  # LayerNorm first, then the two linear layers
    x = x - x.mean(-1, keepdims=True)
    x = (
        x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5) * head["norm"]["scale"]
        + head["norm"]["bias"]
    )
    x = jax.nn.gelu(x @ head["first"]["w"] + head["first"]["b"], approximate=False)
    return (x @ head["second"]["w"] + head["second"]["b"])[..., 0].astype(dtype)


@rule(
    noise="absorbing",
    needs_hidden=quality_head,
    needs_logits=False,
    source="PRISM, arXiv 2510.01384, `llada_inference` in PRISM_llada/sampling.py",
)
def prism(
    key: Key, view: View, memory: Memory, remasks: Annotated[Param, AtLeast(0, integer=True)] = 0
) -> tuple[Proposal, Memory]:
    """Decodes as `confidence`, and remasks the decided tokens of the lowest quality, `remasks` times in a block.

    `quality_head`, which is trained to predict whether a token is right, computes the quality. The remaskings are
    divided evenly among the steps; a remainder goes to the steps in the middle of the block, one each. A step that
    remasks k tokens accepts k masks more than the schedule says, so that the number of masks follows the schedule. The
    tokens that it remasks are not among those that it accepts.

    Args:
        key: Unused.
        view: Reads `hidden` (the quality [L]), `stats.p_sample`, `masked`, `editable`, `step` and `steps`.
        memory: Unused.
        remasks: Number of remaskings in the whole block; 0 for none.

    Returns:
        The proposal, and the unchanged memory.

    Departs from the reference: positions that the last step remasks stay masks in the reference's answer; here the
    answer keeps their tokens.
    """
    # Every step remasks `every` tokens, and the `rest` steps nearest to the middle one more.
    every, rest = jnp.divmod(jnp.asarray(remasks).astype(jnp.int32), view.steps)
    count = every + (rank_from_middle(view.step, view.steps) < rest)
    filled = top(view.stats.p_sample, view.masked, fixed_share(view) + count)
    worst = top(-view.hidden, view.editable & ~view.masked, count)
    return remask(view, accept(view, filled), worst), memory


def rank_from_middle(step: Int[Array, ""], steps: Int[Array, ""]) -> Int[Array, ""]:
    """Ranks a step by its distance from the middle of all steps, 0 for the nearest.

    Args:
        step: Index of the step, in 0..steps - 1.
        steps: Number of steps of the block.

    Returns:
        The rank, in 0..steps - 1. Of two steps at the same distance, the earlier one ranks first.
    """
    # Distance in half steps: 0, 2, 2, 4, 4, ... for an odd number of steps, 1, 1, 3, 3, ... for an even one. Both steps
    # of a distance d > 0 rank d - 1, and the later one gets 1 more.
    distance = jnp.abs(2 * step - (steps - 1))
    return jnp.maximum(distance - 1, 0) + (2 * step > steps - 1)
