"""Dream's rules for masked diffusion, named by Dream's `alg` (with the prefix `dream_` where that is too short).

Dream-7B (arXiv 2508.15487; `_sample` in Dream's `generation_utils.py`) accepts the share 1 - s/t of the masks in each
step, on times that are evenly spaced from 1 to `eps` whatever the model's own schedule, and all that are left in the
last step. The share is rounded down, so that a step with few masks may accept none: with as many steps as tokens the
first passes accept nothing.

Dream reads its confidence after dividing the logits by its temperature and cutting them to top-p. Here these are
processors: `Sampler(dream_entropy(), (processors.temperature(0.2), processors.top_p(0.95)), temperature=1.0)`.
"""

from __future__ import annotations

from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mercury_jax.decode.ranges import AtLeast, Between
from mercury_jax.decode.registration import rule
from mercury_jax.decode.rules.masked import top
from mercury_jax.decode.sampler import Memory, Param, accept
from mercury_jax.types import Key, Proposal, View


def _accepted_share(view: View, eps: Param) -> Float[Array, ""]:
    """The share 1 - s/t of the masks that this step accepts, on t = linspace(1, eps, steps + 1)."""
    stride = (1.0 - eps) / view.steps
    return jnp.where(view.step + 1 >= view.steps, 1.0, stride / (1.0 - view.step * stride))


def _accept_share(key: Key, view: View, score: Float[Array, "L"], alg_temp: Param, eps: Param) -> Proposal:
    """Accepts this step's share: the highest scores, or with `alg_temp` > 0 a random choice.

    The choice is without replacement from softmax(score / alg_temp): the highest of the perturbed scores (Gumbel
    top-k, arXiv 1903.06059).
    """
    count = jnp.floor(view.masked.sum() * _accepted_share(view, eps)).astype(jnp.int32)
    perturbed = score / jnp.maximum(alg_temp, 1e-9) + jax.random.gumbel(key, score.shape)
    return accept(view, top(jnp.where(jnp.asarray(alg_temp) > 0, perturbed, score), view.masked, count))


@rule(
    name="dream_origin",
    noise="absorbing",
    needs_logits=False,
    source='Dream, arXiv 2508.15487, `alg="origin"`',
)
def dream_origin(
    key: Key, view: View, memory: Memory, eps: Annotated[Param, Between(0, 1)] = 1e-3
) -> tuple[Proposal, Memory]:
    """Accepts each mask independently with probability 1 - s/t: `ancestral` on Dream's times.

    Like Dream it takes the argmax unless the sampler has a temperature.

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


@rule(
    name="maskgit_plus",
    noise="absorbing",
    needs_logits=False,
    source='MaskGIT, arXiv 2202.04200; Dream, `alg="maskgit_plus"`',
)
def maskgit_plus(
    key: Key,
    view: View,
    memory: Memory,
    alg_temp: Annotated[Param, AtLeast(0)] = 0.0,
    eps: Annotated[Param, Between(0, 1)] = 1e-3,
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
    name="topk_margin",
    noise="absorbing",
    needs_logits=False,
    source='top-k probability margin, arXiv 2502.06768; Dream, `alg="topk_margin"`',
)
def topk_margin(
    key: Key,
    view: View,
    memory: Memory,
    alg_temp: Annotated[Param, AtLeast(0)] = 0.0,
    eps: Annotated[Param, Between(0, 1)] = 1e-3,
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


@rule(
    name="dream_entropy",
    noise="absorbing",
    needs_logits=False,
    source='Dream, arXiv 2508.15487, `alg="entropy"`',
)
def dream_entropy(
    key: Key,
    view: View,
    memory: Memory,
    alg_temp: Annotated[Param, AtLeast(0)] = 0.0,
    eps: Annotated[Param, Between(0, 1)] = 1e-3,
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
