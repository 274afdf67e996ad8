"""The training loop: train, log, evaluate, show samples, save, resume.

Everything that the next update depends on is in `TrainState` and in the state of the data; both are in a checkpoint,
so a resumed run ends equal bit for bit to one without an interruption. With several processes, `join` joins a job,
`gather_data_state` shares the state of the data, and `watch_signals` stops all of them at the same step.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from mercury_jax import checkpoint, sharding
from mercury_jax.config import from_dict, refuse
from mercury_jax.noise import Corruption
from mercury_jax.train import lora, optim, step as steps
from mercury_jax.train.recipe import TrainConfig, resolved
from mercury_jax.train.report import Reporter
from mercury_jax.types import Batch, Model, Params

CONFIG, CHECKPOINTS = "config.json", "checkpoints"  # in the run's folder

T = TypeVar("T")
DataState = dict[str, Any]  # JSON, see `Batches`
Evaluate = Callable[[Params], Mapping[str, float]]
Preview = Callable[[Params], str]


@runtime_checkable
class Batches(Protocol):
    """Batches without end, this process's rows of them, whose order can be resumed exactly.

    With several processes a state is `{"rows": {number: state of that row of the batch}, ...}`: a checkpoint merges the
    rows of all processes, and `set_state` receives all of them.
    """

    def __next__(self) -> Batch:
        """The next batch, numpy arrays [rows of this process, T]."""
        ...

    def get_state(self) -> DataState:
        """Where the data are, ready for JSON."""
        ...

    def set_state(self, state: DataState, /) -> None:
        """Continues where `state` was taken."""
        ...


@runtime_checkable
class PolicyData(Protocol):
    """Batches that are made with the current parameters, beside what `Batches` has."""

    def observe(self, params: Params, /) -> None:
        """Receives the parameters before each batch; they are donated to the update that follows."""
        ...


class Diverged(ArithmeticError):
    """The loss or the gradient is NaN or infinite. Nothing was saved since; earlier checkpoints are intact."""

    exit_code = 3


@dataclass(frozen=True)
class TrainResult:
    """What a run leaves.

    Attributes:
        params: The last parameters, frozen ones included; with adapters a `LoraWeight` for each targeted matrix.
        ema: Their average; the parameters themselves if there is none.
        metrics: The last metrics.
        out: The run's folder.
        step: Updates taken.
        stopped: The signal that ended the run before its last step, or None.
    """

    params: Params = field(repr=False)
    ema: Params = field(repr=False)
    metrics: Mapping[str, float]
    out: Path
    step: int
    stopped: str | None = None


def run(
    config: TrainConfig,
    model: Model,
    corruption: Corruption,
    data: Batches,
    *,
    evaluate: Evaluate | None = None,
    preview: Preview | None = None,
    params: Params | None = None,
) -> TrainResult:
    """Trains a model; returns after the last step, or after SIGTERM or SIGINT.

    Args:
        config: The recipe.
        model: Pure functions of the denoiser.
        corruption: The forward process.
        data: numpy batches of this process's rows, see `sharding.process_share`.
        evaluate: Called with the averaged parameters, which it must not keep; returns metrics.
        preview: Called with the averaged parameters; returns text for the log.
        params: Start from these (fine-tuning); what is trained of them is donated. None: from the model's init. Frozen
            parameters are not in checkpoints, so a resumed run needs them too.

    Returns:
        The last parameters and metrics.

    Raises:
        ValueError: Before any compute, when `out` already holds checkpoints and `resume` is False, or holds another
            model's; or when frozen parameters are not those of the run to resume.
        Diverged: On NaN or Inf.
        checkpoint.SaveFailed: On a full disk.
    """
    with _opened(config, model, corruption, data, params) as loop, watch_signals() as stop:
        while loop.step < config.steps and not stop.arrived(loop.step):
            loop.advance()
            due = lambda every, at=loop.step: every and (at % every == 0 or at == config.steps)
            if evaluate and due(config.eval_every):
                found = loop.call(evaluate)
                found = {name: float(value) for name, value in found.items()}
                loop.metrics |= {f"eval/{name}": value for name, value in found.items()}
                loop.report.metrics(loop.step, "eval", found)
            if preview and due(config.sample_every):
                loop.report.sample(loop.step, loop.call(preview))
            if due(config.save_every):
                loop.save()
        early = stop.name if loop.step < config.steps else None
        if early:
            loop.save()
        return loop.finish(early)


def mesh_of(config: TrainConfig) -> Mesh:
    """The recipe's mesh over all devices.

    Raises:
        ValueError: The rows of a microbatch cannot be divided over it.
    """
    mesh = sharding.mesh(**dataclasses.asdict(config.mesh))
    rows, shards = config.batch // config.accumulate, sharding.row_shards(mesh)
    if rows % shards:
        raise refuse("batch / accumulate", rows, f"a multiple of {shards}, the mesh's data * fsdp")
    return mesh


def resume_step(config: TrainConfig) -> int | None:
    """Finds the step from which a run resumes; None for a fresh run.

    Raises:
        ValueError: The folder holds checkpoints and `resume` is False, or those of another model or noise.
    """
    folder = config.folder / CHECKPOINTS
    newest = checkpoint.latest(folder)
    if newest is None:
        return None
    if not config.resume:
        allowed = f"a folder without checkpoints; {folder} holds step {newest}: resume it (--resume) or choose another"
        raise refuse("out", str(config.folder), allowed)
    saved, now = checkpoint.inspect(folder)[1]["config"], resolved(config)
    for part in ("model", "noise", "lora"):
        # A key that the checkpoint is too old to have stands at its default.
        had = resolved(from_dict(type(getattr(config, part)), saved.get(part, {})))
        for name, value in now[part].items():
            if had[name] != value:
                raise refuse(f"{part}.{name}", value, f"{had[name]!r}, as in the checkpoint to resume")
    if (had := saved.get("freeze", "")) != config.freeze:
        raise refuse("freeze", config.freeze, f"{had!r}, as in the checkpoint to resume")
    return newest


@contextmanager
def _opened(
    config: TrainConfig, model: Model, corruption: Corruption, data: Batches, params: Params | None
) -> Iterator[_Loop]:
    """A loop at its first or at its resumed step; whatever happens, a save in progress is completed."""
    mesh = mesh_of(config)
    at = resume_step(config)
    folder = config.folder / CHECKPOINTS
    stale = checkpoint.clean(folder)
    part = lora.partition(config.lora, config.freeze, model)
    if config.lora.rank:
        model = model._replace(shardings=lora.adapted_shardings(config.lora, config.freeze, model))
    setup = steps.TrainSetup(
        model, config.objective, corruption, optim.optimizer(config.optim, config.steps),
        optim.schedule(config.optim, config.steps), config.accumulate, config.ema, part,
    )  # fmt: skip
    tokens, start, frozen = 0, params, ()
    if part is not None:
        if params is None:
            raise refuse("params", None, "the parameters of a model, of which lora or freeze keeps a part")
        start, frozen = part.split(params)
    base = None if part is None else lora.digest(frozen)
    # In a resumed run the checkpoint takes the place of what is trained.
    if at is None:
        state = steps.init_state(jax.random.key(config.seed), setup, mesh, start)
    else:
        found = checkpoint.restore(folder, steps.abstract_state(setup, mesh), at)
        if found.extra.get("base") != base:
            raise refuse(
                "init",
                config.init,
                "the model that the run to resume started from: this one has other values",
            )
        state, tokens = found.tree, found.extra["tokens"]
        data.set_state(found.extra["data"])
    del params, start  # nobody else may hold what the update donates
    loop = _Loop(config, setup, mesh, data, state, at or 0, tokens, frozen, base)
    try:
        if stale:
            loop.report.say(f"removed what an interrupted save left: {', '.join(stale)}")
        begins = "resumed at" if at else "starts at"
        loop.report.say(f"{config.name}: {begins} step {at or 0} of {config.steps}")
        yield loop
    finally:
        try:
            loop.saver.wait()  # after an error too: a save that has begun is worth completing
        finally:
            loop.report.close()


class _Loop:
    """The loop's moving parts. Metrics are fetched one step late, so that the devices never wait."""

    def __init__(
        self, config: TrainConfig, setup: steps.TrainSetup, mesh: Mesh, data: Batches, state: steps.TrainState,
        step: int, tokens: int, frozen: Params, base: str | None,
    ) -> None:  # fmt: skip
        self.config, self.mesh, self.data = config, mesh, data
        self.frozen, self.base = frozen, base  # parameters that are not trained, and their digest
        self.combine = (lambda trained, _: trained) if setup.partition is None else setup.partition.combine
        self.state, self.step, self.tokens = state, step, tokens
        self.update = steps.sharded_update(setup, mesh)
        self.resolved = resolved(config)
        config.folder.mkdir(parents=True, exist_ok=True)
        first = jax.process_index() == 0
        if first:
            (config.folder / CONFIG).write_text(json.dumps(self.resolved, indent=1), encoding="utf-8")
        self.saver = checkpoint.Saver(config.folder / CHECKPOINTS, config.keep)
        self.report = Reporter(config.folder, config.name, config.steps, step, quiet=not first)
        self.metrics: dict[str, float] = {}
        self._saved = step or -1  # a fresh state is not saved yet
        self._pending: tuple[int, steps.StepReport] | None = None
        self._window: list[dict[str, float]] = []

    def advance(self) -> None:
        """Dispatches one update, then reads the report of the one before."""
        if isinstance(self.data, PolicyData):
            self.data.observe(self.combine(self.state.params, self.frozen))
        try:
            batch = next(self.data)
        except StopIteration:
            allowed = f"an endless iterator: {self.config.steps} are needed"
            raise refuse("data", f"{self.step} batches", allowed) from None
        # Dispatch is asynchronous: the devices work on this update while the report of the one before is read.
        self.state, report = self.update(self.state, sharding.shard_batch(batch, self.mesh), self.frozen)
        self.step += 1
        self._read((self.step, report))
        self.saver.check()

    def call(self, function: Callable[[Params], T]) -> T:
        """Calls a function of the averaged parameters, which does not count as training time."""
        self._read()
        with self.report.clock.pause():
            return function(self.averaged)

    def save(self) -> None:
        if self._saved == self.step:
            return
        self._read()
        self._saved = self.step
        extra = {"data": gather_data_state(self.data.get_state()), "tokens": self.tokens}
        extra |= {} if self.base is None else {"base": self.base}
        self.saver.save(self.step, self.state, self.resolved, extra)

    def finish(self, stopped: str | None) -> TrainResult:
        self._read()
        self.saver.wait()
        if stopped:
            self.report.say(f"{stopped}: saved step {self.step}; continue with --resume")
        return TrainResult(
            self.combine(self.state.params, self.frozen),
            self.averaged,
            self.metrics,
            self.config.folder,
            self.step,
            stopped,
        )

    @property
    def averaged(self) -> Params:
        return self.combine(self.state.ema if self.config.ema else self.state.params, self.frozen)

    def _read(self, newest: tuple[int, steps.StepReport] | None = None) -> None:
        """Fetches the pending report from the devices: stops on NaN, and logs the mean of the steps since the last row.

        Args:
            newest: (step, report) to read next time. None: nothing is pending then, and the state may be used or saved.
        """
        pending = self._pending
        self._pending = newest
        if pending is None:
            return
        step, report = pending[0], jax.device_get(pending[1])
        config, values = self.config, {name: float(value) for name, value in report.values.items()}
        # 1. NaN or Inf ends the run; the state stayed as it was.
        if not report.finite:
            self.saver.wait()  # the last good checkpoint may still be on its way
            saved = checkpoint.latest(config.folder / CHECKPOINTS)
            intact = f"the checkpoint of step {saved} stands" if saved else "no checkpoint was written yet"
            raise Diverged(
                f"step {step}: loss is {values['loss']}, gradient norm {values['grad_norm']}; the batch is number "
                f"{step} of the data stream (seed {config.seed}, {config.batch} rows); {intact} in {config.folder}"
            )
        # 2. Progress at every step, a row of metrics at every `log_every`.
        tokens = int(values.pop("tokens"))
        self.tokens += tokens
        self._window.append(values)
        self.report.step(step, tokens, values["loss"])
        if step % config.log_every == 0 or step == config.steps:
            mean = {name: sum(v[name] for v in self._window) / len(self._window) for name in values}
            row = mean | {"lr": values["lr"], "tokens": self.tokens}
            self.metrics |= row
            self.report.metrics(step, "train", row)
            self._window = []


# --- several processes, and signals


def join() -> None:
    """Joins the other processes of this job. Call it before anything touches a device.

    JAX detects SLURM, GKE, Cloud TPU and MPI; elsewhere the variables JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
    JAX_PROCESS_ID describe the job.

    Raises:
        ValueError: There is no such job.
    """
    count, index = os.environ.get("JAX_NUM_PROCESSES"), os.environ.get("JAX_PROCESS_ID")
    try:
        jax.distributed.initialize(
            num_processes=None if count is None else int(count),
            process_id=None if index is None else int(index),
        )
    except (ValueError, RuntimeError) as error:
        if "already" in str(error):
            return
        allowed = "a job of SLURM, GKE, Cloud TPU or MPI, or JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID"
        raise refuse("distributed", True, f"{allowed}; JAX says: {error}") from error


def gather_data_state(state: DataState) -> DataState:
    """Merges the states of all processes' data, so that any number of processes can continue from the result.

    Args:
        state: This process's; its `rows` are {number of the row: state of the row}.

    Returns:
        The state with the `rows` of every process, on each of them. A single process's state is returned as it is.
    """
    if jax.process_count() == 1:
        return state
    # JSON as bytes, padded to the longest: collectives need arrays of one shape.
    own = np.frombuffer(json.dumps(state).encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.int32(len(own)))
    padded = np.pad(own, (0, int(lengths.max()) - len(own)))
    every = multihost_utils.process_allgather(padded)
    states = [json.loads(bytes(row[:length])) for row, length in zip(every, lengths)]
    return {**state, "rows": {number: row for one in states for number, row in one["rows"].items()}}


@dataclass
class StopSignal:
    """The signal that ends a run early.

    Attributes:
        name: "SIGTERM" or "SIGINT"; None while there was none.
    """

    name: str | None = None

    def arrived(self, step: int) -> bool:
        """Whether to stop at this step: the same answer on every process, by JAX's preemption service."""
        several = self.name is None and jax.process_count() > 1
        if several and multihost_utils.reached_preemption_sync_point(step):
            self.name = "SIGTERM"
        return self.name is not None


@contextmanager
def watch_signals() -> Iterator[StopSignal]:
    """Records SIGTERM and SIGINT instead of ending the process; a second SIGINT interrupts as usual.

    With several processes JAX itself watches SIGTERM, and informs all of them. In a thread signals are left alone.

    Yields:
        What arrived.

    Raises:
        KeyboardInterrupt: At the second SIGINT.
    """
    stop = StopSignal()

    def record(number: int, frame: object) -> None:
        if number == signal.SIGINT and stop.name is not None:
            raise KeyboardInterrupt
        stop.name = signal.Signals(number).name

    alone = jax.process_count() == 1 and threading.current_thread() is threading.main_thread()
    watched = (signal.SIGTERM, signal.SIGINT) if alone else ()
    before = {number: signal.signal(number, record) for number in watched}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
