"""The training loop: train, log, evaluate, show samples, save, resume.

The next update depends only on `TrainState` and on the state of the data iterator. A checkpoint holds both, so a
resumed run ends with the same bits as an uninterrupted one. `distributed.py` holds the code for several processes.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
from jax.sharding import Mesh

from mercury_jax import checkpoint, sharding
from mercury_jax.checkpoint import manifest
from mercury_jax.config import brief, from_dict, refuse
from mercury_jax.noise import Corruption
from mercury_jax.training import lora, optim, step as steps
from mercury_jax.training.data import BatchSource
from mercury_jax.training.distributed import DataState, gather_data_state, watch_signals
from mercury_jax.training.recipe import TrainConfig, resolved
from mercury_jax.training.report import Reporter, flops_per_position, peak_flops
from mercury_jax.types import Batch, Model, Params

CONFIG, CHECKPOINTS, BEST, PROFILE = "config.json", "checkpoints", "best", "profile"  # in the run's folder

T = TypeVar("T")
Evaluate = Callable[[Params], Mapping[str, float]]
Preview = Callable[[Params], str]


@runtime_checkable
class Batches(Protocol):
    """An endless iterator of batches that can be resumed exactly. Each process iterates over its own rows.

    With several processes, a state is `{"rows": {number: state of that row of the batch}, ...}`. A checkpoint merges
    the rows of all processes, and `set_state` receives the merged state.
    """

    def __next__(self) -> Batch:
        """Returns the next batch, numpy arrays [rows of this process, T]."""
        ...

    def get_state(self) -> DataState:
        """Returns the position in the data as values that JSON can write."""
        ...

    def set_state(self, state: DataState, /) -> None:
        """Continues from a saved position.

        Args:
            state: From `get_state`; with several processes, the merged state of all of them.
        """
        ...


@runtime_checkable
class PolicyData(Protocol):
    """`Batches` that are made with the current parameters, as in reinforcement learning."""

    def observe(self, params: Params, /) -> None:
        """Receives the current parameters; called before each `__next__`.

        Args:
            params: The parameters, frozen ones included. The next update donates them: do not keep a reference.
        """
        ...


class Diverged(ArithmeticError):
    """The loss or the gradient is NaN or infinite. Nothing was saved afterwards; earlier checkpoints are intact."""

    exit_code = 3


@dataclass(frozen=True)
class TrainResult:
    """The result of a run.

    Attributes:
        params: The last parameters, frozen ones included; with adapters a `LoraWeight` for each targeted matrix.
        ema: Moving average of the parameters; without one, `params`.
        metrics: The last metrics by name.
        out: Folder of the run.
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
        params: Initial parameters (fine-tuning); the trained ones are donated. None: from the model's init. Checkpoints
            do not contain frozen parameters, so a resumed run needs them too.
    """
    with _opened(config, model, corruption, data, params) as loop, watch_signals() as stop:
        while loop.step < config.steps and not loop.exhausted and not stop.arrived(loop.step):
            loop.advance()
            # The order matters to a resumed run: the metrics of this step are logged before the checkpoint that
            # stands for it is written.
            due = lambda every, at=loop.step: every and (at % every == 0 or at == config.steps)
            if evaluate and due(config.eval_every):
                found = loop.call(evaluate)
                found = {name: float(value) for name, value in found.items()}
                loop.metrics |= {f"eval/{name}": value for name, value in found.items()}
                loop.report.metrics(loop.step, "eval", found)
                loop.judge(found)
            if preview and due(config.sample_every):
                loop.report.sample(loop.step, loop.call(preview))
            if due(config.save_every):
                loop.save()
        # A signal during the last step does not make the run incomplete.
        early = stop.name if loop.step < config.steps and not loop.exhausted else None
        if early or loop.exhausted:
            loop.save()
        return loop.finish(early)


def mesh_of(config: TrainConfig) -> Mesh:
    """Makes the recipe's mesh over all devices."""
    mesh = sharding.mesh(**dataclasses.asdict(config.mesh))
    rows, shards = config.batch // config.accumulate, sharding.row_shards(mesh)
    if rows % shards:
        raise refuse("batch / accumulate", rows, f"a multiple of {shards}, the mesh's data * fsdp")
    return mesh


def resume_step(config: TrainConfig) -> int | None:
    """Finds the step from which a run resumes."""
    folder = config.folder / CHECKPOINTS
    newest = checkpoint.latest(folder)
    if newest is None:
        return None
    if not config.resume:
        allowed = f"a folder without checkpoints; {folder} holds step {newest}: resume it (--resume) or choose another"
        raise refuse("out", str(config.folder), allowed)
    if newest > config.steps:
        raise refuse("steps", config.steps, f"{newest} or more, the step of the checkpoint to resume")
    saved, now = checkpoint.inspect(folder)[1]["config"], resolved(config)
    # The model, the noise and the adapters must be the same. The data check their own state (`Batches.set_state`), and
    # the number of steps, the optimizer's hyperparameters and the intervals may change on a resume.
    for part in ("model", "noise", "lora"):
        # An older checkpoint may lack a field that was added later: it was trained with the default.
        had = resolved(from_dict(type(getattr(config, part)), saved.get(part, {})))
        for name, value in now[part].items():
            if had[name] != value and f"{part}.{name}" not in config.unread:
                raise refuse(f"{part}.{name}", value, f"{brief(had[name])}, as in the checkpoint to resume")
    # A checkpoint holds no average if ema is 0, and the moments of its own optimizer.
    same = {"freeze": "", "optim.optimizer": "adamw"} | (
        {} if config.ema and saved.get("ema", 0) else {"ema": 0}
    )
    had, has = _flat(saved), _flat(now)
    for name, default in same.items():
        if had.get(name, default) != has[name]:
            raise refuse(name, has[name], f"{had.get(name, default)!r}, as in the checkpoint to resume")
    return newest


def _flat(config: Any, name: str = "") -> dict[str, Any]:
    """Names the values of a resolved config as the command line does: "optim.lr"."""
    if not isinstance(config, dict) or not config:
        return {name: config}
    return {path: x for k, v in config.items() for path, x in _flat(v, f"{name}.{k}" if name else k).items()}


def _changes(saved: Mapping[str, Any], now: Mapping[str, Any], unlisted: tuple[str, ...]) -> str:
    """Lists the fields in which a resumed run differs from its checkpoint."""
    had, has = _flat(saved), _flat(now)
    names = [n for n in has if n in had and had[n] != has[n]]
    names = [n for n in names if n.split(".")[0] not in unlisted]
    return ", ".join(f"{n} is {has[n]!r} (was {had[n]!r})" for n in names)


@contextmanager
def _opened(
    config: TrainConfig, model: Model, corruption: Corruption, data: Batches, params: Params | None
) -> Iterator[_Loop]:
    """Opens a loop at its first or at its resumed step; on exit, also after an error, a running save is completed."""
    mesh = mesh_of(config)
    at = resume_step(config)
    folder = config.folder / CHECKPOINTS
    stale = [*checkpoint.clean(folder), *checkpoint.clean(config.folder / BEST)]
    if at is None and jax.process_index() == 0:
        shutil.rmtree(config.folder / BEST, ignore_errors=True)  # of a run whose checkpoints were removed
    part = lora.partition(config.lora, config.freeze, model)
    if config.lora.rank:
        model = model._replace(shardings=lora.adapted_shardings(config.lora, config.freeze, model))
    setup = steps.TrainSetup(
        model, config.objective, corruption, optim.optimizer(config.optim, config.steps, model.config.width),
        optim.schedule(config.optim, config.steps), config.accumulate, config.ema, part,
    )  # fmt: skip
    start, frozen, changes, before = params, (), "", None
    if part is not None:
        if params is None:
            raise refuse("params", None, "the parameters of a model, of which lora or freeze keeps a part")
        start, frozen = part.split(params)
    # Checkpoints hold only the trained tree. A digest of the frozen tree makes sure that both belong together.
    base = None if part is None else lora.digest(frozen)
    # A fresh run starts from the given parameters; a resumed run restores the trained tree from the checkpoint.
    if at is None:
        state, counted = steps.init_state(jax.random.key(config.seed), setup, mesh, start), {}
    else:
        found = checkpoint.restore(folder, steps.abstract_state(setup, mesh), at)
        if found.extra.get("base") != base:
            allowed = "the model that the run to resume started from: this one has other values"
            raise refuse("init", config.init, allowed)
        state, counted = found.tree, found.extra
        # Documents compare their own state; of data that are made, the settings may change.
        unlisted = ("resume", "out", "chats", "init", "join_timeout")
        unlisted += () if isinstance(config.data, BatchSource) else ("data",)
        if changes := _changes(found.config, resolved(config), unlisted):
            before = found.config
        data.set_state(counted["data"])
    del params, start  # the update donates these buffers: no other reference may remain
    loop = _Loop(config, setup, mesh, data, state, at or 0, counted, frozen, base, before)
    try:
        if stale:
            loop.report.say(f"removed what an interrupted save left: {', '.join(stale)}")
        begins = "resumed at" if at else "starts at"
        loop.report.say(f"{config.name}: {begins} step {at or 0} of {config.steps}")
        if changes:
            loop.report.say(f"changed since the checkpoint: {changes}")
        yield loop
    finally:
        try:
            loop.end_trace(wait=False)  # after an error the traced steps may never finish
            loop.saver.join()  # after an error too: a save that has started should be completed
            loop.best_saver.join()
        finally:
            loop.report.close()


class _Loop:
    """State and I/O of the loop. Metrics are fetched one step late, so that the devices never wait for the host."""

    def __init__(
        self, config: TrainConfig, setup: steps.TrainSetup, mesh: Mesh, data: Batches, state: steps.TrainState,
        step: int, counted: Mapping[str, Any], frozen: Params, base: str | None,
        before: Mapping[str, Any] | None,
    ) -> None:  # fmt: skip
        self.config, self.mesh, self.data = config, mesh, data
        self.frozen, self.base = frozen, base  # parameters that are not trained, and their digest
        self.combine = (lambda trained, _: trained) if setup.partition is None else setup.partition.combine
        self.state, self.step = state, step
        # A row of metrics is a mean over `log_every` steps. The values since the last row are saved too, so that the
        # rows do not depend on where a run was interrupted.
        self.tokens: int = counted.get("tokens", 0)
        self.metrics: dict[str, float] = dict(counted.get("metrics", {}))
        self._window: list[dict[str, float]] = list(counted.get("window", []))
        self.update = steps.sharded_update(setup, mesh)
        self.resolved = resolved(config)
        config.folder.mkdir(parents=True, exist_ok=True)
        first = jax.process_index() == 0
        if first:
            # The config of the steps before a resume is kept if it was another one.
            kept = config.folder / f"config_to_step_{step}.json"
            if before is not None and not kept.exists():
                manifest.replace(kept, json.dumps(before, indent=1).encode())
            manifest.replace(config.folder / CONFIG, json.dumps(self.resolved, indent=1).encode())
        self.saver = checkpoint.Saver(config.folder / CHECKPOINTS, config.keep)
        # The best evaluation so far, as its checkpoint has it, and the number of evaluations since. A run that was
        # killed may have a best checkpoint of a later step than that from which it resumes.
        self.best_saver = checkpoint.Saver(config.folder / BEST, 1)
        self.best: Mapping[str, Any] = {}
        self.since: int = counted.get("since", 0)
        if step and checkpoint.latest(self.best_saver.folder) is not None:
            self.best = checkpoint.inspect(self.best_saver.folder)[1]["extra"]
        if self.best.get("metric") != config.best:  # of another metric: values do not compare
            self.best, self.since = {}, 0
        self.report = Reporter(
            config.folder, config.name, config.steps, step, quiet=not first,
            peak_share=self._peak_share(), wandb=config.wandb, config=self.resolved,
        )  # fmt: skip
        self.tracing = False
        self._saved = step or -1  # a fresh state is not saved yet
        self._pending: tuple[int, steps.StepReport] | None = None

    def advance(self) -> None:
        """Dispatches one update, then reads the report of the previous one."""
        if isinstance(self.data, PolicyData):
            self.data.observe(self.combine(self.state.params, self.frozen))
        try:
            batch = next(self.data)
        except StopIteration:
            allowed = f"an endless iterator: {self.config.steps} are needed"
            raise refuse("data", f"{self.step} batches", allowed) from None
        if self.step + 1 == self.config.profile[0]:
            self._read()  # waits for the previous step, so that it is not part of the trace
            jax.profiler.start_trace(str(self.config.folder / PROFILE / f"process_{jax.process_index()}"))
            self.tracing = True
        # Dispatch is asynchronous: the devices compute this update while the host reads the report of the previous one.
        self.state, report = self.update(self.state, sharding.shard_batch(batch, self.mesh), self.frozen)
        self.step += 1
        self._read((self.step, report))
        self.saver.check()
        if self.step == self.config.profile[1]:
            self.end_trace()

    def end_trace(self, wait: bool = True) -> None:
        """Writes the profiler trace, if one is running."""
        if self.tracing:
            self.tracing = False
            if wait:
                jax.block_until_ready(self.state)
            jax.profiler.stop_trace()

    def call(self, function: Callable[[Params], T]) -> T:
        """Calls a function with the averaged parameters; the time does not count as training time."""
        self._read()
        with self.report.clock.pause():
            return function(self.averaged)

    def save(self) -> None:
        """Starts to write a checkpoint of this step, unless there is one."""
        if self._saved == self.step:
            return
        self._read()  # stops on NaN before anything is written, and brings tokens and metrics up to this step
        self._saved = self.step
        extra = {
            "data": gather_data_state(self.data.get_state()),
            "tokens": self.tokens, "metrics": self.metrics, "window": self._window, "since": self.since,
        }  # fmt: skip
        extra |= {} if self.base is None else {"base": self.base}
        self.report.sync()  # after a power failure, a checkpoint must not be on the disk without the rows before it
        self.saver.save(self.step, self.state, self.resolved, extra)

    def judge(self, found: Mapping[str, float]) -> None:
        """Saves the state beside the checkpoints if it has the best evaluation so far."""
        direction, _, name = self.config.best.partition(":")
        if not direction:
            return
        if name not in found:
            raise refuse("best", self.config.best, ", ".join(f"{direction}:{x}" for x in found))
        if self.best and self.step <= self.best["step"]:
            return  # a resumed run takes these steps again
        sign = 1 if direction == "min" else -1
        self.since += 1
        if not self.best or sign * found[name] < sign * self.best["value"]:
            self.best, self.since = {"metric": self.config.best, "value": found[name], "step": self.step}, 0
            self.best_saver.save(self.step, self.state, self.resolved, self.best)

    @property
    def exhausted(self) -> bool:
        """Whether too many evaluations in a row were not the best one."""
        return 0 < self.config.patience <= self.since

    def finish(self, stopped: str | None) -> TrainResult:
        """Waits for the last save and returns the result; `stopped` is the signal that ended the run early."""
        self._read()
        self.saver.wait()
        self.best_saver.wait()
        if self.exhausted:
            self.report.say(f"ended at step {self.step}: {self.since} evaluations without a better one")
        if self.config.best and self.best and not stopped:
            like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
            target = jax.tree.map(like, self.state)
            del self.state  # two states need not fit
            self.state = checkpoint.restore(self.config.folder / BEST, target, self.best["step"]).tree
            best = f"{self.config.best} {self.best['value']:.4g}"
            self.report.say(f"the model is that of step {self.best['step']}: {best}")
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
        """The MFU at one step per second; 0 if the peak FLOP/s of these devices is not known."""
        peak = peak_flops(self.mesh.devices.flat[0].device_kind)
        work = (
            self.config.batch
            * self.config.row
            * flops_per_position(self.config.model_config, self.combine(self.state.params, self.frozen))
        )
        return work / (peak * self.mesh.size) if peak else 0.0

    def _read(self, newest: tuple[int, steps.StepReport] | None = None) -> None:
        """Fetches the pending report from the devices, stops on NaN, and logs the mean since the last row of metrics.

        Args:
            newest: (step, report) of the update just dispatched, to be read by the next call. None: no report is
                pending afterwards, so that the state may be used or saved.
        """
        pending = self._pending
        self._pending = newest
        if pending is None:
            return
        step, report = pending[0], jax.device_get(pending[1])
        config, values = self.config, {name: float(value) for name, value in report.values.items()}
        # 1. NaN or Inf ends the run; the update left the state unchanged.
        if not report.finite:
            self.saver.wait()  # the last good checkpoint may still be being written
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
        # A row holds means over the steps since the last row, but the learning rate and the token count of its step.
        self.report.step(step, tokens, values["loss"])
        if step % config.log_every == 0 or step == config.steps:
            mean = {name: sum(v[name] for v in self._window) / len(self._window) for name in values}
            row = mean | {"lr": values["lr"], "tokens": self.tokens}
            self.metrics |= row
            self.report.metrics(step, "train", row)
            self._window = []
