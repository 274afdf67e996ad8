"""Load balancing for mixtures of experts: a wrapper that adds the auxiliary loss of the Switch Transformer.

`balanced` passes the wrapped objective a model whose `apply` also returns the routing of each layer, and adds
`balance` of that routing to its loss. No objective needs to know about experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from mercury_jax import noise
from mercury_jax.config import PositiveFloat, checked, refuse
from mercury_jax.training.objectives.objective import Objective
from mercury_jax.types import Batch, Hidden, Key, Loss, Model, PackedPass, Params, Routing


class RoutedPass(NamedTuple):
    """The routing of one forward pass: scores and choices of each layer with experts, and the slots without padding."""

    layers: Sequence[Routing]
    used: Bool[Array, "B T"]


class Balance(NamedTuple):
    """How evenly a pass uses its experts; means over the layers.

    Attributes:
        loss: The auxiliary loss: 1 if all E experts are used equally, up to E / active if a few get all tokens.
        busiest: Share of the choices that fall on the most frequent expert; 1 / E if all are used equally.
    """

    loss: Float[Array, ""]
    busiest: Float[Array, ""]


@checked
def balanced(
    objective: Annotated[Objective, "an objective, as train.objectives makes them"],
    *,
    weight: PositiveFloat = 0.01,
) -> Objective:
    """Adds a loss that spreads tokens evenly over the experts (Switch Transformer, arXiv 2101.03961, eq. 4 to 6).

        loss + weight * mean over layers of E * sum_i f_i P_i

    f_i is the share of the choices that fall on expert i, and P_i its mean router score, over all tokens of the
    microbatch without padding. If a token has several experts, f counts all of them, as in DeepSeek-V3 (arXiv
    2412.19437, eq. 17 to 20, where the sums are over each sequence). The scores of a sigmoid router are divided by
    their sum. The gradient flows through P only.

    The routing is taken from the forward pass of the wrapped objective, or from its last one if it makes several (for
    self-conditioning). With `accumulate` above 1, each microbatch is balanced separately.

    Args:
        objective: Any objective that calls `Model.apply` outside of a loop.
        weight: Weight of the added loss.

    Returns:
        The objective. Its metrics also hold `balance`, the added loss before `weight`, and `busiest_expert`.

    Raises:
        ValueError: An argument is out of range; or, when the objective is traced, a model without experts.
    """

    def with_balance(
        key: Key, model: Model, params: Params, batch: Batch, corruption: noise.Corruption
    ) -> Loss:
        experts = model.config.experts
        if experts is None:
            raise refuse("experts", None, "a mixture of experts, for the objective balanced")
        passes: list[RoutedPass] = []

        # A side effect under tracing: the list receives tracers, which stay valid until the objective returns.
        def apply(params: Params, given: PackedPass, **more: object) -> Hidden:
            hidden, layers = model.apply(params, given, routing=True, **more)  # pyright: ignore[reportArgumentType]
            passes.append(RoutedPass(layers, (given.ranges[..., 0] < given.ranges[..., 1]).any(-1)))
            return hidden

        loss = objective(key, model._replace(apply=apply), params, batch, corruption)
        if not passes or not passes[-1].layers:
            allowed = "a model with routed layers, and an objective that makes a pass with it"
            raise refuse("experts", experts, f"{allowed}, for the objective balanced")
        found = balance(passes[-1])
        # The loss of the batch is sum(per_example) / sum(weight), so each row adds the term times its own weight.
        total = loss.weight.sum()
        metrics = {
            **loss.metrics,
            "balance": (found.loss * total, total),
            "busiest_expert": (found.busiest * total, total),
        }
        return Loss(loss.per_example + weight * found.loss * loss.weight, loss.weight, metrics)

    vars(with_balance)["clean_fill"] = getattr(objective, "clean_fill", False)
    return with_balance


def balance(routed: RoutedPass) -> Balance:
    """Measures how evenly a forward pass uses its experts (Switch Transformer, arXiv 2101.03961, eq. 4 to 6).

    Args:
        routed: Routing of the pass; scores [B, T, E] and chosen experts [B, T, active] of each layer.

    Returns:
        The auxiliary loss, differentiable in the scores, and the share of the busiest expert; means over the layers.
    """
    losses, busiest = [], []
    for scores, chosen in routed.layers:
        used = routed.used.astype(scores.dtype)
        tokens = jnp.maximum(used.sum(), 1.0)
        count, active = scores.shape[-1], chosen.shape[-1]
        # Scores of a softmax router sum to 1 already. f counts choices with a comparison, so it has no gradient.
        probabilities = scores / jnp.maximum(scores.sum(-1, keepdims=True), 1e-20)
        mean = jnp.einsum("bt,bte->e", used, probabilities) / tokens  # P [E]
        choices = (chosen[..., None] == jnp.arange(count)).sum(-2).astype(scores.dtype)  # [B, T, E]
        share = jnp.einsum("bt,bte->e", used, choices) / (tokens * active)  # f [E]
        losses.append(count * jnp.sum(share * mean))
        busiest.append(share.max())
    return Balance(jnp.stack(losses).mean(), jnp.stack(busiest).mean())
