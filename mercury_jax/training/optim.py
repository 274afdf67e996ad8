"""Learning-rate schedules, the optimizer, and the moving average of the parameters.

`step.py` applies all three in one update; `OptimConfig` is the field `optim` of a recipe.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, muon

from mercury_jax.config import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    Share,
    ShareBelowOne,
    check_fields,
    check_pattern,
    refuse,
)
from mercury_jax.sharding import MatrixAxes, Role, matrix_axes, path_name, role
from mercury_jax.types import Params

Decay = Literal["cosine", "linear", "constant", "wsd"]
OptimizerName = Literal["adamw", "muon"]


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW or Muon, with warm-up, learning-rate decay and gradient clipping.

    Raises:
        ValueError: A field is out of range.
    """

    optimizer: OptimizerName = "adamw"  # muon: Muon for matrices of layers and experts, AdamW for the rest
    lr: NonNegativeFloat = 1e-3  # the peak, after warm-up
    base_width: NonNegativeInt = 0  # width at which lr was tuned: matrices get lr * base_width / width; 0: lr
    # (regular expression, factor of lr) for the parameters whose paths it finds, such as ("embed", 0.1); the first that
    # matches counts. With adapters ("/b$", 16.0) is LoRA+ (arXiv 2402.12354).
    rates: tuple[tuple[str, float], ...] = ()
    warmup: NonNegativeInt = 100  # number of the step that has the peak; the first has 1 / warmup of it
    decay: Decay = "cosine"  # wsd: constant, then linear over the last `tail` of the steps
    final: Share = 0.1  # the last learning rate as a share of the peak
    tail: Share = 0.2  # share of the steps over which wsd decays
    b1: ShareBelowOne = 0.9  # decay of AdamW's average of gradients
    b2: ShareBelowOne = 0.98  # decay of AdamW's average of squared gradients
    eps: PositiveFloat = 1e-8  # added to the denominator of an update
    weight_decay: NonNegativeFloat = 0.1  # on matrices and tables, never on norms and biases
    clip: NonNegativeFloat = 1.0  # largest global norm of the gradient; 0: no clipping

    def __post_init__(self) -> None:
        check_fields(self, "optim.")
        for pattern, factor in self.rates:
            check_pattern("optim.rates", pattern)
            if not 0 <= factor < math.inf:
                raise refuse(
                    "optim.rates", factor, "finite factors of 0 or more; freeze leaves parameters out"
                )


def schedule(config: OptimConfig, steps: int) -> optax.Schedule:
    """Makes the learning-rate schedule: a linear warm-up, then the decay.

    The first update has 1 / warmup of the peak, so that it is not wasted, and update number `warmup` the peak. The last
    update of the run has the share `final` of the peak, unless the decay is constant
    or the warm-up is as long as the run.

    Args:
        config: Peak, warm-up and decay.
        steps: Number of steps of the run; the decay ends at the last one.

    Returns:
        Updates taken before this one -> learning rate.
    """
    c, warmup = config, max(1, config.warmup)
    rest = max(1, steps - warmup)
    low = c.lr * c.final
    # `optax.join_schedules` passes each schedule the steps since its own start: `after` counts from the warm-up's end.
    if c.decay == "cosine":
        after = optax.cosine_decay_schedule(c.lr, rest, alpha=c.final)
    elif c.decay == "linear":
        after = optax.linear_schedule(c.lr, low, rest)
    elif c.decay == "wsd":
        tail = min(rest, max(1, round(steps * c.tail)))
        after = optax.linear_schedule(c.lr, low, tail, transition_begin=rest - tail)
    else:
        after = optax.constant_schedule(c.lr)
    joined = optax.join_schedules([optax.linear_schedule(0.0, c.lr, warmup), after], [warmup])
    return lambda count: joined(count + 1)


def optimizer(config: OptimConfig, steps: int, width: int) -> optax.GradientTransformation:
    """Makes the optimizer: clipping, then AdamW or Muon under the schedule.

    Args:
        config: The optimizer and its hyperparameters.
        steps: Number of steps of the run.
        width: Size of the model's hidden states, for `config.base_width`.

    Returns:
        The optax transformation of gradients into parameter updates.
    """
    c = config
    direction = _muon(c) if c.optimizer == "muon" else optax.scale_by_adam(c.b1, c.b2, c.eps)
    if c.base_width:
        direction = by_width(direction, c, width)
    # Weight decay comes after the factors of `by_width`: it is the same at every width.
    decay = optax.add_decayed_weights(c.weight_decay, decayed)
    update = optax.chain(
        direction, decay, _by_group(optax.scale_by_learning_rate(schedule(c, steps)), c.rates)
    )
    # Without clipping the state has the same structure, so that a resumed run may change `clip`.
    return optax.chain(optax.clip_by_global_norm(c.clip) if c.clip else optax.identity(), update)


def by_width(
    direction: optax.GradientTransformation, config: OptimConfig, width: int
) -> optax.GradientTransformation:
    """Scales the updates of matrices, so that a learning rate chosen at `config.base_width` suits another width.

    An update of AdamW has entries of about 1, whatever the width, and its product with an input of D entries of about 1
    grows as D. With a factor base_width / width, a step changes the outputs of hidden matrices and the logits of every
    width alike (muP, arXiv 2203.03466, table 3; with standard initialisation: arXiv 2407.05872, table 1). Updates that
    Muon makes of a hidden matrix are orthogonal matrices, rescaled to entries of about 0.2: their product with the
    input grows as sqrt(D), and the factor is the square root. All sizes of a layer are taken to grow with the width.

    Departs from muP for embeddings, which get the factor although a lookup sums over no inputs: in most of our models
    they are the head, too.

    Args:
        direction: Makes the updates before weight decay and learning rate.
        config: The optimizer, with a `base_width`.
        width: Size of the model's hidden states.

    Returns:
        The transformation, with the same state as `direction`.
    """
    ratio = config.base_width / width

    def factor(path: Sequence[Any], x: jax.Array) -> float:
        kind = _role(path, x)
        if kind == "vector":
            return 1.0
        return ratio**0.5 if config.optimizer == "muon" and kind == "matrix" else ratio

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        updates, state = direction.update(updates, state, params)
        return jax.tree_util.tree_map_with_path(lambda path, x: factor(path, x) * x, updates), state

    return optax.GradientTransformation(direction.init, update)


def _by_group(
    learning_rate: optax.GradientTransformation, rates: Sequence[tuple[str, float]]
) -> optax.GradientTransformation:
    """Scales the updates of groups of parameters by factors of their own; the state is that of `learning_rate`."""

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        names = [path_name(path) for path, _ in jax.tree_util.tree_flatten_with_path(updates)[0]]
        for pattern, _ in rates:
            if not any(re.search(pattern, name) for name in names):
                found = ", ".join(dict.fromkeys(re.sub(r"block_\d+", "block_0", name) for name in names))
                raise refuse("optim.rates", pattern, f"an expression that finds a trained parameter: {found}")
        factor = lambda path: next((x for p, x in rates if re.search(p, path_name(path))), 1.0)
        updates, state = learning_rate.update(updates, state, params)
        return jax.tree_util.tree_map_with_path(lambda path, x: factor(path) * x, updates), state

    return optax.GradientTransformation(learning_rate.init, update) if rates else learning_rate


def _role(path: Sequence[Any], x: jax.Array) -> Role:
    return role(path_name(path), x.ndim)


def decayed(params: Params) -> Params:
    """Selects the parameters that weight decay applies to: matrices and tables, not norms, biases or other vectors.

    Args:
        params: Parameters, nested dicts of arrays.

    Returns:
        The same tree with a bool for each array.
    """
    return jax.tree_util.tree_map_with_path(lambda path, x: _role(path, x) != "vector", params)


def _muon(c: OptimConfig) -> optax.GradientTransformation:
    """Makes Muon (Jordan 2024) for the matrices of layers and experts, and AdamW for tables and vectors.

    consistent_rms = 0.2 scales Muon's updates to the RMS of AdamW's, so that one learning rate fits both (Moonlight,
    arXiv 2502.16982, section 2.2).
    """

    def axes(path: Sequence[Any], x: jax.Array) -> MuonDimensionNumbers | None:
        """Says which axes of a matrix are contracted; None for parameters that AdamW updates."""
        found = matrix_axes(path_name(path))
        if found is None or _role(path, x) != "matrix":
            return None
        if x.ndim <= found.batch + found.inputs:  # a user's matrix [D, D'] with the name of a larger one
            found = MatrixAxes(1, 0)
        # Axes of experts come before the inputs: each expert has an update of its own.
        first = found.batch + found.inputs
        return MuonDimensionNumbers(tuple(range(found.batch, first)), tuple(range(first, x.ndim)))

    # optax's `muon` would decay the parameters that AdamW updates without a mask. `optimizer` applies weight decay and
    # learning rate after it, to all parameters alike. A rate of -1 undoes the sign that `muon` gives.
    return muon(
        -1.0,
        adam_b1=c.b1,
        adam_b2=c.b2,
        eps=c.eps,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=lambda params: jax.tree_util.tree_map_with_path(axes, params),
    )


def update_average(ema: Params, params: Params, step: jax.Array, decay: float) -> Params:
    """Updates the moving average: ema <- d ema + (1 - d) params with d = min(decay, (1 + step) / (10 + step)).

    Args:
        ema: The average before the update.
        params: The newest parameters.
        step: Updates taken before this one.
        decay: The limit of d, 0 <= decay < 1.

    Returns:
        The new average, in the dtype of `ema`.
    """
    # A smaller d in the first steps: otherwise the average would keep the random initial parameters for a long time.
    d = jnp.minimum(decay, (1.0 + step) / (10.0 + step))
    return jax.tree.map(lambda e, p: d * e + (1.0 - d) * p.astype(e.dtype), ema, params)
