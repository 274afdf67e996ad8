"""The training loop: train, log, evaluate, show samples, save, resume.

Everything that the next update depends on is in `TrainState` and in the state of the data; both are in a checkpoint,
so a resumed run ends equal bit for bit to one without an interruption. What several processes share is in
`distributed.py`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
from jax.sharding import Mesh

from mercury_jax import checkpoint, sharding
from mercury_jax.checkpoint import manifest
from mercury_jax.config import from_dict, refuse
from mercury_jax.noise import Corruption
from mercury_jax.train import lora, optim, step as steps
from mercury_jax.train.distributed import DataState, gather_data_state, watch_signals
from mercury_jax.train.recipe import TrainConfig, resolved
from mercury_jax.train.report import Reporter
from mercury_jax.train.throughput import flops_per_position, peak_flops
from mercury_jax.types import Batch, Model, Params

CONFIG, CHECKPOINTS, PROFILE = "config.json", "checkpoints", "profile"  # in the run's folder

T = TypeVar("T")
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
    start, frozen = params, ()
    if part is not None:
        if params is None:
            raise refuse("params", None, "the parameters of a model, of which lora or freeze keeps a part")
        start, frozen = part.split(params)
    base = None if part is None else lora.digest(frozen)
    # In a resumed run the checkpoint takes the place of what is trained.
    if at is None:
        state, counted = steps.init_state(jax.random.key(config.seed), setup, mesh, start), {}
    else:
        found = checkpoint.restore(folder, steps.abstract_state(setup, mesh), at)
        if found.extra.get("base") != base:
            allowed = "the model that the run to resume started from: this one has other values"
            raise refuse("init", config.init, allowed)
        state, counted = found.tree, found.extra
        data.set_state(counted["data"])
    del params, start  # nobody else may hold what the update donates
    loop = _Loop(config, setup, mesh, data, state, at or 0, counted, frozen, base)
    try:
        if stale:
            loop.report.say(f"removed what an interrupted save left: {', '.join(stale)}")
        begins = "resumed at" if at else "starts at"
        loop.report.say(f"{config.name}: {begins} step {at or 0} of {config.steps}")
        yield loop
    finally:
        try:
            loop.end_trace(wait=False)  # its steps may never end
            loop.saver.join()  # after an error too: a save that has begun is worth completing
        finally:
            loop.report.close()


class _Loop:
    """The loop's moving parts. Metrics are fetched one step late, so that the devices never wait."""

    def __init__(
        self, config: TrainConfig, setup: steps.TrainSetup, mesh: Mesh, data: Batches, state: steps.TrainState,
        step: int, counted: Mapping[str, Any], frozen: Params, base: str | None,
    ) -> None:  # fmt: skip
        self.config, self.mesh, self.data = config, mesh, data
        self.frozen, self.base = frozen, base  # parameters that are not trained, and their digest
        self.combine = (lambda trained, _: trained) if setup.partition is None else setup.partition.combine
        self.state, self.step = state, step
        # What a checkpoint carries for the rows of metrics: these do not depend on where a run was resumed either.
        self.tokens: int = counted.get("tokens", 0)
        self.metrics: dict[str, float] = dict(counted.get("metrics", {}))
        self._window: list[dict[str, float]] = list(counted.get("window", []))
        self.update = steps.sharded_update(setup, mesh)
        self.resolved = resolved(config)
        config.folder.mkdir(parents=True, exist_ok=True)
        first = jax.process_index() == 0
        if first:
            manifest.replace(config.folder / CONFIG, json.dumps(self.resolved, indent=1).encode())
        self.saver = checkpoint.Saver(config.folder / CHECKPOINTS, config.keep)
        self.report = Reporter(
            config.folder, config.name, config.steps, step, quiet=not first,
            peak_share=self._peak_share(), wandb=config.wandb, config=self.resolved,
        )  # fmt: skip
        self.tracing = False
        self._saved = step or -1  # a fresh state is not saved yet
        self._pending: tuple[int, steps.StepReport] | None = None

    def advance(self) -> None:
        """Dispatches one update, then reads the report of the one before."""
        if isinstance(self.data, PolicyData):
            self.data.observe(self.combine(self.state.params, self.frozen))
        try:
            batch = next(self.data)
        except StopIteration:
            allowed = f"an endless iterator: {self.config.steps} are needed"
            raise refuse("data", f"{self.step} batches", allowed) from None
        if self.step + 1 == self.config.profile[0]:
            self._read()  # so that the trace begins with its first step
            jax.profiler.start_trace(str(self.config.folder / PROFILE / f"process_{jax.process_index()}"))
            self.tracing = True
        # Dispatch is asynchronous: the devices work on this update while the report of the one before is read.
        self.state, report = self.update(self.state, sharding.shard_batch(batch, self.mesh), self.frozen)
        self.step += 1
        self._read((self.step, report))
        self.saver.check()
        if self.step == self.config.profile[1]:
            self.end_trace()

    def end_trace(self, wait: bool = True) -> None:
        """Writes the trace, if one has begun; with `wait`, when all of its steps are done."""
        if self.tracing:
            self.tracing = False
            if wait:
                jax.block_until_ready(self.state)
            jax.profiler.stop_trace()

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
        extra = {
            "data": gather_data_state(self.data.get_state()),
            "tokens": self.tokens, "metrics": self.metrics, "window": self._window,
        }  # fmt: skip
        extra |= {} if self.base is None else {"base": self.base}
        self.report.sync()  # a checkpoint never survives a power failure without the rows before it
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

    def _peak_share(self) -> float:
        """The MFU of one step a second; 0 where the peak of these devices is not known."""
        peak = peak_flops(self.mesh.devices.flat[0].device_kind)
        work = (
            self.config.batch
            * self.config.row
            * flops_per_position(self.config.model_config, self.combine(self.state.params, self.frozen))
        )
        return work / (peak * self.mesh.size) if peak else 0.0

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
