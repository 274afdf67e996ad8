"""One update: gradients of an objective over microbatches, the optimizer, the average.

`TrainState` is all that changes during training; it is donated to every update and saved whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Int

from mercury_jax import sharding
from mercury_jax.config import refuse
from mercury_jax.noise import Corruption
from mercury_jax.train import optim
from mercury_jax.types import Batch, Key, Loss, Model, Params

Objective = Callable[[Key, Model, Params, Batch, Corruption], Loss]
Sums = tuple[Array, Array, Mapping[str, tuple[Array, Array]]]  # of a loss: numerator, weight, metrics


class TrainState(NamedTuple):
    """What an update changes. `ema` is () without an average."""

    params: Params
    ema: Params
    opt: optax.OptState
    key: Key  # never changes: each step folds its number in
    step: Int[Array, ""]  # updates taken


class Report(NamedTuple):
    """What an update says about itself; all scalars."""

    finite: Array  # loss and gradient norm are finite; if not, the state stayed as it was
    values: Mapping[str, Array]  # loss, grad_norm, lr, tokens, and the objective's own


def shapes(model: Model, tx: optax.GradientTransformation, ema: bool, on: Mesh) -> TrainState:
    """Shapes, dtypes and shardings of a state, nothing allocated: the target to restore into."""
    key = jax.eval_shape(jax.random.key, 0)
    plain = jax.eval_shape(lambda key: _fresh(key, model, tx, ema, None), key)
    lies = sharding.shardings(plain, model.shardings, on)
    return jax.tree.map(lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), plain, lies)


def init(
    key: Key,
    model: Model,
    tx: optax.GradientTransformation,
    ema: bool,
    on: Mesh,
    params: Params | None = None,
) -> TrainState:
    """A fresh state, made where it lies: no device ever holds all of a sharded model.

    Args:
        key: For the parameters and for the noise of all updates.
        model: Gives shapes, shardings, and parameters where none are given.
        tx: The optimizer.
        ema: Whether an average of the parameters is kept.
        on: The mesh.
        params: Start from these instead of the model's init. They are donated: their buffers are freed, or become
            those of the state, which otherwise would stand beside them for the whole run.
    """
    lies = jax.tree.map(lambda x: x.sharding, shapes(model, tx, ema, on))
    if params is not None:  # only what lies as the state does can be donated
        params = jax.device_put(params, lies.params)
    with jax.set_mesh(on):
        build = jax.jit(
            lambda key, params: _fresh(key, model, tx, ema, params), donate_argnums=1, out_shardings=lies
        )
        return build(key, params)


def _fresh(
    key: Key, model: Model, tx: optax.GradientTransformation, ema: bool, params: Params | None
) -> TrainState:
    begin, noise = jax.random.split(key)
    start: Any = model.init(begin) if params is None else params
    # An update's results are never weakly typed. Where the first state is, the second update would compile again.
    start = jax.tree.map(lambda x: jnp.asarray(x, x.dtype), start)
    average = jax.tree.map(lambda x: x.astype(jnp.float32), start) if ema else ()
    return TrainState(start, average, tx.init(start), noise, jnp.zeros((), jnp.int32))


def scored(
    key: Key, model: Model, objective: Objective, params: Params, batch: Batch, corruption: Corruption
) -> Loss:
    """The objective's Loss. ValueError, while it is traced, where its shapes are not those of `types.Loss`."""
    loss = objective(key, model, params, batch, corruption)
    try:
        chex.assert_shape((loss.per_example, loss.weight), (len(batch.tokens),))
        chex.assert_rank(jax.tree.leaves(dict(loss.metrics)), 0)
    except AssertionError as error:
        allowed = (
            f"one that returns per_example and weight of shape ({len(batch.tokens)},) and scalar metrics"
        )
        raise refuse("objective", getattr(objective, "__qualname__", "?"), f"{allowed}: {error}") from error
    return loss


def check(objective: Objective, model: Model, corruption: Corruption, rows: int, row: int) -> None:
    """Traces the objective on abstract data, so that what it refuses is refused before anything is loaded.

    Args:
        objective: The recipe's.
        model: What it will be called with.
        corruption: The noise; its forbidden ids do not matter here.
        rows: Rows B of a microbatch.
        row: Positions T of a row.

    Raises:
        ValueError: The objective does not fit the noise or the model, or returns other shapes than `types.Loss`.
    """
    slots = lambda *more, dtype=jnp.int32: jax.ShapeDtypeStruct((rows, row, *more), dtype)
    batch = Batch(slots(), slots(), slots(2, 2), slots(dtype=jnp.bool_), slots())  # pyright: ignore
    key = jax.eval_shape(jax.random.key, 0)
    params = jax.eval_shape(model.init, key)
    jax.eval_shape(lambda k, p, b: scored(k, model, objective, p, b, corruption), key, params, batch)


def updater(
    model: Model,
    objective: Objective,
    corruption: Corruption,
    tx: optax.GradientTransformation,
    lr: optax.Schedule,
    *,
    accumulate: int = 1,
    ema: float = 0.0,
    on: Mesh,
) -> Callable[[TrainState, Batch], tuple[TrainState, Report]]:
    """The jitted (state, batch) -> (state, report), see `plain`; the state is donated."""
    model = sharding.with_training_mesh(model, on)
    update = plain(model, objective, corruption, tx, lr, accumulate=accumulate, ema=ema)
    compiled: dict[str, Any] = {}

    def run(state: TrainState, batch: Batch) -> tuple[TrainState, Report]:
        if "update" not in compiled:
            compiled["update"] = jitted(update, state)
        with jax.set_mesh(on):
            return compiled["update"](state, batch)

    return run


def jitted(update: Callable[..., Any], state: TrainState) -> Any:
    """The update as a program for states that lie as `state` does (arrays, or `shapes`)."""
    # The new state lies exactly where the old one did, so that resuming compiles the same program.
    where = (jax.tree.map(lambda x: x.sharding, state), None)
    return jax.jit(update, donate_argnums=0, out_shardings=where)


def plain(
    model: Model,
    objective: Objective,
    corruption: Corruption,
    tx: optax.GradientTransformation,
    lr: optax.Schedule,
    *,
    accumulate: int = 1,
    ema: float = 0.0,
) -> Callable[[TrainState, Batch], tuple[TrainState, Report]]:
    """(state, batch) -> (state, report) as a plain function.

    accumulate: microbatches of a batch. Numerators and weights are summed and divided once, so the
    gradient is that of the whole batch, however the scored tokens are spread.
    """

    def update(state: TrainState, batch: Batch) -> tuple[TrainState, Report]:
        key = jax.random.fold_in(state.key, state.step)
        sums, grads = gradients(key, model, objective, state.params, batch, corruption, accumulate)
        number = {"loss": _share(sums[0], sums[1]), "grad_norm": optax.tree.norm(grads), "lr": lr(state.step)}
        finite = jnp.isfinite(number["loss"]) & jnp.isfinite(number["grad_norm"])
        delta, opt = tx.update(grads, state.opt, state.params)
        params = optax.apply_updates(state.params, delta)
        average = optim.average(state.ema, params, state.step, ema) if ema else ()
        new = TrainState(params, average, opt, state.key, state.step + 1)
        own = {name: _share(*pair) for name, pair in sums[2].items()}
        report = Report(finite, number | own | {"tokens": batch.editable.sum()})
        return _choose(finite, new, state), report

    return update


def gradients(
    key: Key,
    model: Model,
    objective: Objective,
    params: Params,
    batch: Batch,
    corruption: Corruption,
    accumulate: int,
) -> tuple[Sums, Params]:
    """(sums of the batch's loss, gradient of numerator / weight), over `accumulate` microbatches.

    Microbatch i takes the rows i, i + A, i + 2A, ...: on a mesh every device keeps its own rows.
    """

    def total(params: Params, key: Key, batch: Batch) -> tuple[Array, Sums]:
        loss = scored(key, model, objective, params, batch, corruption)
        sums = (loss.per_example.sum(), loss.weight.sum(), dict(loss.metrics))
        return sums[0], sums

    slope = jax.grad(total, has_aux=True)
    if accumulate == 1:
        grads, sums = slope(params, key, batch)
    else:
        micro = jax.tree.map(lambda x: x.reshape(-1, accumulate, *x.shape[1:]).swapaxes(0, 1), batch)
        keys = jax.random.split(key, accumulate)

        def add(carry: tuple[Params, Sums], now: tuple[Key, Batch]) -> tuple[tuple[Params, Sums], None]:
            return jax.tree.map(jnp.add, carry, slope(params, *now)), None

        first = jax.tree.map(lambda x: x[0], (keys, micro))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(slope, params, *first))
        (grads, sums), _ = jax.lax.scan(add, zeros, (keys, micro))
    return sums, jax.tree.map(lambda g: _share(g, sums[1]), grads)


def evaluator(
    model: Model, objective: Objective, corruption: Corruption, key: Key, on: Mesh
) -> Callable[[Params, list[Batch]], dict[str, float]]:
    """(params, batches) -> the objective's loss and metrics over all of them.

    The noise of batch i is always the same, so that two evaluations differ by the parameters alone.
    """

    model = sharding.with_training_mesh(model, on)

    @jax.jit
    def sums(params: Params, batch: Batch, index: Array) -> dict[str, tuple[Array, Array]]:
        loss = scored(jax.random.fold_in(key, index), model, objective, params, batch, corruption)
        return {"loss": (loss.per_example.sum(), loss.weight.sum()), **loss.metrics}

    def evaluate(params: Params, batches: list[Batch]) -> dict[str, float]:
        total: dict[str, tuple[float, float]] = {}
        for index, batch in enumerate(batches):
            with jax.set_mesh(on):
                found = jax.device_get(sums(params, sharding.shard_batch(batch, on), index))
            for name, (a, b) in found.items():
                x, y = total.get(name, (0.0, 0.0))
                total[name] = (x + float(a), y + float(b))
        return {name: a / b if b else 0.0 for name, (a, b) in total.items()}

    return evaluate


def _share(a: Array, b: Array) -> Array:
    """a / b, and a where there is nothing to divide by: a batch without a scored token has no gradient."""
    return a / jnp.where(b == 0, 1, b)


def _choose(finite: Array, new: TrainState, old: TrainState) -> TrainState:
    return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
