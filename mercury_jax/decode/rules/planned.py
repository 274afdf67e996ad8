"""Rules that plan which tokens stay: P2's path planning, and PRISM's remasking by a trained quality head.

A head is a function of the model's parameters and the hidden states, `Rule.needs_hidden`; what it returns is
`view.hidden`. Its own parameters are among those of the model, so that they are sharded, saved and passed with them:

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

    Each position is scored by log p of the token that the model would draw there, with `eta` as factor where a token
    is already decided. After step i of N, the floor((1 - i / N) L) positions with the lowest scores of the block's L
    positions are masks; the other masks become their draws. Positions whose score equals the lowest one that is kept
    are kept too.

    Args:
        key: Unused.
        view: Reads `stats.p_sample`, `masked`, `editable`, `step` and `steps`.
        memory: Unused.
        eta: Above 1 decided tokens are remasked more easily, at 0 never.

    Returns:
        The proposal, and the unchanged memory.

    Departs from the reference: above temperature 0 it scores the logits with the noise that drew the token, here the
    score is that of the draw without noise. A planner that is a second model (its BERT planner) is not offered.
    """
    score = jnp.log(jnp.maximum(view.stats.p_sample, 1e-30)) * jnp.where(view.masked, 1.0, eta)
    score = jnp.where(view.editable, score, jnp.inf)
    length = view.editable.sum()
    count = length - -(-length * (view.step + 1) // view.steps)  # floor((1 - i / N) L)
    cutoff = jnp.sort(score)[jnp.clip(count, 0, score.shape[0] - 1)]
    lowest = view.editable & (score < cutoff)
    return remask(view, accept(view, view.masked & ~lowest), ~view.masked & lowest), memory


def quality_head(params: Params, hidden: Float[Array, "B L D"]) -> Float[Array, "B L"]:
    """Computes PRISM's quality of each token: the logit of the probability that it is right.

    The head of PRISM for LLaDA (`RemaskingHead` in its llada.py): LayerNorm, a linear layer of the same width, GELU,
    and a linear layer to one number.

    Args:
        params: Of the model; `params["quality_head"]` holds {"norm": {"scale" [D], "bias" [D]},
            "first": {"w" [D, D], "b" [D]}, "second": {"w" [D, 1], "b" [1]}}.
        hidden: After the model's final norm.

    Returns:
        The logits.

    Raises:
        ValueError: The parameters hold no such head.
    """
    if "quality_head" not in params:
        allowed = (
            'params with a "quality_head", which the rule prism reads; see mj.rules.planned.quality_head'
        )
        raise refuse("lm.params", sorted(params), allowed)
    head, dtype = params["quality_head"], accumulation_dtype(hidden.dtype)
    x = hidden.astype(dtype)
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

    The quality of a token is that of `quality_head`, which is trained to tell whether a token is right. The remaskings
    are spread evenly over the steps, the remainder over those in the middle; a step that remasks k tokens fills k masks
    more than its schedule, chosen from those that were masks before.

    Args:
        key: Unused.
        view: Reads `hidden`, `stats.p_sample`, `masked`, `editable`, `step` and `steps`.
        memory: Unused.
        remasks: Remaskings of a block; 0 for none.

    Returns:
        The proposal, and the unchanged memory.

    Departs from the reference: what the last step remasks stays a mask in the reference's answer, here it is the
    argmax.
    """
    every, rest = jnp.divmod(jnp.asarray(remasks).astype(jnp.int32), view.steps)
    count = every + (rank_from_middle(view.step, view.steps) < rest)
    filled = top(view.stats.p_sample, view.masked, fixed_share(view) + count)
    worst = top(-view.hidden, view.editable & ~view.masked, count)
    return remask(view, accept(view, filled), worst), memory


def rank_from_middle(step: Int[Array, ""], steps: Int[Array, ""]) -> Int[Array, ""]:
    """Ranks a step by its distance from the middle of all steps, 0 for the nearest; of two the earlier comes first.

    Args:
        step: In 0..steps - 1.
        steps: Of the block.

    Returns:
        The rank.
    """
    distance = jnp.abs(2 * step - (steps - 1))  # in half steps; of the same parity for all steps
    return jnp.maximum(distance - 1, 0) + (2 * step > steps - 1)
