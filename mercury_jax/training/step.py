"""One update: the gradient of an objective over microbatches, the optimizer step, the moving average.

`TrainSetup` holds everything that is constant during training, `TrainState` everything that changes. The state is
donated to each update, and a checkpoint saves all of it.

    setup = TrainSetup(model, objective, corruption, tx, lr)
    state, update = init_state(key, setup, mesh), sharded_update(setup, mesh)
    state, report = update(state, batch)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import chex
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Int

from mercury_jax import sharding
from mercury_jax.config import refuse
from mercury_jax.noise import Corruption
from mercury_jax.training import optim
from mercury_jax.training.lora import Partition
from mercury_jax.training.objectives.objective import Objective
from mercury_jax.types import Batch, Key, Loss, Model, Params

LossSums = tuple[Array, Array, Mapping[str, tuple[Array, Array]]]  # numerator, weight, metrics


class TrainSetup(NamedTuple):
    """The constant parts of an update.

    Attributes:
        model: Pure functions of the denoiser.
        objective: The loss of a batch.
        corruption: The forward process.
        tx: The optimizer.
        lr: step -> learning rate, only for the report; `tx` has its own schedule.
        accumulate: Microbatches per batch. Their losses and weights are summed and divided once, so the gradient equals
            the one of the whole batch even if the microbatches have different numbers of scored tokens.
        ema: Decay of the moving average of the parameters; 0: no average.
        partition: Which parameters are trained; None: all.
    """

    model: Model
    objective: Objective
    corruption: Corruption
    tx: optax.GradientTransformation
    lr: optax.Schedule
    accumulate: int = 1
    ema: float = 0.0
    partition: Partition | None = None


class TrainState(NamedTuple):
    """The state that an update changes.

    Attributes:
        params: The trained parameters. With a `Partition`, the frozen ones are an argument of the update.
        ema: Moving average of the trained parameters in fp32; () without one.
        opt: State of the optimizer.
        key: Random key of the run. It is constant; each update folds its step number in.
        step: Updates taken.
    """

    params: Params
    ema: Params
    opt: optax.OptState
    key: Key
    step: Int[Array, ""]


class StepReport(NamedTuple):
    """Scalars that an update reports.

    Attributes:
        finite: Whether loss and gradient norm are finite. If not, the update left the state unchanged.
        values: loss, grad_norm, lr, tokens, and the metrics of the objective.
    """

    finite: Array
    values: Mapping[str, Array]


class Update(Protocol):
    """(state, batch) -> (state, report); the state is donated."""

    def __call__(self, state: TrainState, batch: Batch, frozen: Params = ()) -> tuple[TrainState, StepReport]:
        """Takes one optimizer step.

        Args:
            state: State before the update; its buffers are donated.
            batch: Packed rows.
            frozen: The parameters that are not trained; () without a `Partition`. They are only read.

        Returns:
            The state after the update, and the scalars to report.
        """
        ...


# --- the state


def _new_state(key: Key, setup: TrainSetup, params: Params | None) -> TrainState:
    init_key, noise_key = jax.random.split(key)
    init = setup.model.init if setup.partition is None else setup.partition.init
    start = init(init_key) if params is None else params
    # The state that an update returns is never weakly typed. A weakly typed first state would have other avals, and the
    # second update would compile again.
    start = jax.tree.map(lambda x: jnp.asarray(x, x.dtype), start)
    average = jax.tree.map(lambda x: x.astype(jnp.float32), start) if setup.ema else ()
    return TrainState(start, average, setup.tx.init(start), noise_key, jnp.zeros((), jnp.int32))


def abstract_state(setup: TrainSetup, mesh: Mesh) -> TrainState:
    """Computes shapes, dtypes and shardings of a state without allocating it: the target of a checkpoint restore."""
    shapes = jax.eval_shape(lambda key: _new_state(key, setup, None), jax.eval_shape(jax.random.key, 0))
    where = sharding.shardings(shapes, setup.model.shardings, mesh)
    return jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), shapes, where)


def init_state(key: Key, setup: TrainSetup, mesh: Mesh, params: Params | None = None) -> TrainState:
    """Makes a fresh state directly in its shards, so that no device ever holds all of a sharded model.

    Args:
        params: Initial parameters; None: from the model's init. With a partition, its trained tree. They are donated,
            so that the run does not hold a second copy of them.
    """
    where = jax.tree.map(lambda x: x.sharding, abstract_state(setup, mesh))
    if params is not None:  # XLA can reuse a donated buffer only for an output with the same sharding
        params = jax.device_put(params, where.params)
    with jax.set_mesh(mesh):
        new = jax.jit(lambda key, p: _new_state(key, setup, p), donate_argnums=1, out_shardings=where)
        return new(key, params)


# --- the update


def make_update(setup: TrainSetup) -> Update:
    """Makes the update as a plain function, which `jit_update` jits."""

    def update(state: TrainState, batch: Batch, frozen: Params = ()) -> tuple[TrainState, StepReport]:
        # 1. The gradient of the whole batch. The noise depends on the run's key and the step only, so a resumed run
        #    draws the same noise.
        key = jax.random.fold_in(state.key, state.step)
        (numerator, weight, metrics), grads = _gradients(setup, key, state.params, frozen, batch)
        loss, norm = _ratio(numerator, weight), optax.tree.norm(grads)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        # 2. The optimizer step and the moving average.
        delta, opt = setup.tx.update(grads, state.opt, state.params)
        params = optax.apply_updates(state.params, delta)
        average = optim.update_average(state.ema, params, state.step, setup.ema) if setup.ema else ()
        new = TrainState(params, average, opt, state.key, state.step + 1)
        # 3. The report. If the loss or the gradient is not finite, the old state is returned. The loop reads the report
        #    one step later and stops; until then no update may spread the NaN.
        values = {"loss": loss, "grad_norm": norm, "lr": setup.lr(state.step)}
        values |= {name: _ratio(*pair) for name, pair in metrics.items()}
        report = StepReport(finite, values | {"tokens": batch.editable.sum()})
        return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state), report

    return update


def jit_update(update: Update, state: TrainState) -> Any:
    """Jits an update for states with the shardings of `state`."""
    # Without explicit output shardings XLA may choose others, and the next update, or a resumed run, would compile
    # another program.
    where = (jax.tree.map(lambda x: x.sharding, state), None)
    return jax.jit(update, donate_argnums=0, out_shardings=where)


def sharded_update(setup: TrainSetup, mesh: Mesh) -> Update:
    """Makes the jitted update on a mesh. It donates the state."""
    update = make_update(setup._replace(model=sharding.with_training_mesh(setup.model, mesh)))
    compiled: list[Update] = []

    def run(state: TrainState, batch: Batch, frozen: Params = ()) -> tuple[TrainState, StepReport]:
        if not compiled:
            compiled.append(jit_update(update, state))
        with jax.set_mesh(mesh):
            return compiled[0](state, batch, frozen)

    return run


def _gradients(
    setup: TrainSetup, key: Key, trained: Params, frozen: Params, batch: Batch
) -> tuple[LossSums, Params]:
    """Computes the sums of the batch's loss, and the gradient of numerator / weight, over A microbatches.

    Only the trained parameters are differentiated; no gradient of the frozen ones is computed.
    """

    combine = (lambda trained, _: trained) if setup.partition is None else setup.partition.combine

    def numerator(trained: Params, key: Key, batch: Batch) -> tuple[Array, LossSums]:
        params = combine(trained, frozen)
        loss = _loss(setup.objective, key, setup.model, params, batch, setup.corruption)
        sums = (loss.per_example.sum(), loss.weight.sum(), dict(loss.metrics))
        return sums[0], sums

    gradient = jax.grad(numerator, has_aux=True)
    if setup.accumulate == 1:
        grads, sums = gradient(trained, key, batch)
    else:
        # Microbatch i has the rows i, i + A, i + 2A, ..., so that each device splits its own rows and none of them
        # moves. The numerators, weights and gradients of the microbatches are added in a scan and divided once at its
        # end: the mean over the batch, not the mean of A means.
        split = lambda x: x.reshape(-1, setup.accumulate, *x.shape[1:]).swapaxes(0, 1)  # [A, B / A, ...]
        parts = jax.random.split(key, setup.accumulate), jax.tree.map(split, batch)

        def add(carry: tuple[Params, LossSums], part: tuple[Key, Batch]) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, carry, gradient(trained, *part)), None

        shapes = jax.eval_shape(gradient, trained, *jax.tree.map(lambda x: x[0], parts))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        (grads, sums), _ = jax.lax.scan(add, zeros, parts)
    return sums, jax.tree.map(lambda g: _ratio(g, sums[1]), grads)


def _ratio(a: Array, b: Array) -> Array:
    """Computes a / b, or a if b is 0: a batch without a scored token has a loss and a gradient of 0, not NaN."""
    return a / jnp.where(b == 0, 1, b)


# --- objectives


def _loss(
    objective: Objective, key: Key, model: Model, params: Params, batch: Batch, corruption: Corruption
) -> Loss:
    """Calls the objective; raises ValueError, while tracing, if its result does not have the shapes of `types.Loss`."""
    loss, rows = objective(key, model, params, batch, corruption), len(jax.tree.leaves(batch)[0])
    try:
        chex.assert_shape((loss.per_example, loss.weight), (rows,))
        chex.assert_rank(jax.tree.leaves(dict(loss.metrics)), 0)
    except AssertionError as error:
        shape = f"({rows},)"
        allowed = f"one that returns per_example and weight of shape {shape} and scalar metrics: {error}"
        raise refuse("objective", getattr(objective, "__qualname__", "?"), allowed) from error
    return loss


def check_objective(objective: Objective, model: Model, corruption: Corruption, rows: int, row: int) -> None:
    """Traces the objective on abstract arrays, so that errors of a recipe show up before any data is loaded."""
    slots = lambda *more, dtype=jnp.int32: jax.ShapeDtypeStruct((rows, row, *more), dtype)
    batch = Batch(slots(), slots(), slots(2, 2), slots(dtype=jnp.bool_), slots())  # pyright: ignore
    key = jax.eval_shape(jax.random.key, 0)
    params = jax.eval_shape(model.init, key)
    jax.eval_shape(lambda k, p, b: _loss(objective, k, model, p, b, corruption), key, params, batch)


def make_evaluator(
    model: Model, objective: Objective, corruption: Corruption, key: Key, mesh: Mesh
) -> Callable[[Params, Sequence[Batch]], dict[str, float]]:
    """Makes a function that evaluates parameters on held-out batches.

    The noise of batch i is the same in each evaluation, so that two evaluations differ only by the parameters.
    """
    model = sharding.with_training_mesh(model, mesh)

    @jax.jit
    def sums(params: Params, batch: Batch, index: Array) -> dict[str, tuple[Array, Array]]:
        loss = _loss(objective, jax.random.fold_in(key, index), model, params, batch, corruption)
        return {"loss": (loss.per_example.sum(), loss.weight.sum()), **loss.metrics}

    def evaluate(params: Params, batches: Sequence[Batch]) -> dict[str, float]:
        total: dict[str, tuple[float, float]] = {}
        for index, batch in enumerate(batches):
            with jax.set_mesh(mesh):
                found = jax.device_get(sums(params, sharding.shard_batch(batch, mesh), index))
            for name, (a, b) in found.items():
                x, y = total.get(name, (0.0, 0.0))
                total[name] = (x + float(a), y + float(b))
        return {name: a / b if b else 0.0 for name, (a, b) in total.items()}

    return evaluate
