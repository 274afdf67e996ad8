"""Dream's rules for masked diffusion, by the names that its `alg` has (with `dream_` where it is too short).

Dream-7B (arXiv 2508.15487; `_sample` in Dream's `generation_utils.py`) moves the share 1 - s/t of the
masks in each step, on times that are evenly spaced from 1 to `eps` whatever the model's own schedule,
and all that are left in the last one. The share is rounded down, so that a step with few masks may settle
none: with as many steps as tokens the first passes are idle.

Dream reads its confidence after dividing the logits by its temperature and cutting them to top-p. Here
these are shapers: `Sampler(dream_entropy(), (shape.temperature(0.2), shape.top_p(0.95)), temperature=1.0)`.
"""

from __future__ import annotations

from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mercury_jax.decode.parts import Knob, Memory, rule, settle
from mercury_jax.decode.ranges import AtLeast, Between
from mercury_jax.decode.rules.masked import best
from mercury_jax.types import Key, Proposal, View


@rule(fits=("masked",), whole=False)
def dream_origin(
    key: Key, view: View, memory: Memory, *, eps: Annotated[Knob, Between(0, 1)] = 1e-3
) -> tuple[Proposal, Memory]:
    """Each mask alone becomes a token with probability 1 - s/t (`alg="origin"`): `ancestral` on Dream's times.

    Like Dream it takes the argmax unless the sampler has a temperature.
    """
    accept = view.masked & (jax.random.uniform(key, view.canvas.shape) < _moving(view, eps))
    return settle(view, accept), memory


@rule(fits=("masked",), whole=False)
def maskgit_plus(
    key: Key,
    view: View,
    memory: Memory,
    *,
    alg_temp: Annotated[Knob, AtLeast(0)] = 0.0,
    eps: Annotated[Knob, Between(0, 1)] = 1e-3,
) -> tuple[Proposal, Memory]:
    """The masks whose drawn token is the most probable (MaskGIT, arXiv 2202.04200)."""
    return _move(key, view, view.reading.p_sample, alg_temp, eps), memory


@rule(fits=("masked",), whole=False)
def topk_margin(
    key: Key,
    view: View,
    memory: Memory,
    *,
    alg_temp: Annotated[Knob, AtLeast(0)] = 0.0,
    eps: Annotated[Knob, Between(0, 1)] = 1e-3,
) -> tuple[Proposal, Memory]:
    """The masks whose first token is the furthest above the second (arXiv 2502.06768, top-k probability margin)."""
    return _move(key, view, view.reading.margin, alg_temp, eps), memory


@rule(fits=("masked",), whole=False)
def dream_entropy(
    key: Key,
    view: View,
    memory: Memory,
    *,
    alg_temp: Annotated[Knob, AtLeast(0)] = 0.0,
    eps: Annotated[Knob, Between(0, 1)] = 1e-3,
) -> tuple[Proposal, Memory]:
    """The masks of the lowest entropy (`alg="entropy"`)."""
    return _move(key, view, -view.reading.entropy, alg_temp, eps), memory


def _moving(view: View, eps: Knob) -> Float[Array, ""]:
    """The share 1 - s/t of the masks that this step moves, on t = linspace(1, eps, steps + 1)."""
    stride = (1.0 - eps) / view.steps
    return jnp.where(view.step + 1 >= view.steps, 1.0, stride / (1.0 - view.step * stride))


def _move(key: Key, view: View, score: Float[Array, "L"], alg_temp: Knob, eps: Knob) -> Proposal:
    """Settle this step's share: the highest scores, or with `alg_temp` > 0 a draw of them.

    The draw is without replacement from softmax(score / alg_temp), as the highest of the perturbed
    scores (Gumbel top-k, arXiv 1903.06059).
    """
    count = jnp.floor(view.masked.sum() * _moving(view, eps)).astype(jnp.int32)
    perturbed = score / jnp.maximum(alg_temp, 1e-9) + jax.random.gumbel(key, score.shape)
    return settle(view, best(jnp.where(jnp.asarray(alg_temp) > 0, perturbed, score), view.masked, count))
