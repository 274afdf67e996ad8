"""The training loop: train, log, evaluate, show samples, save, resume.

Everything that the next update depends on is in `TrainState` and in the data iterator's state;
both are in a checkpoint, so a resumed run goes on bit for bit.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
from jax.sharding import Mesh

from mercury_jax import checkpoint, sharding
from mercury_jax.config import refuse
from mercury_jax.noise import Corruption
from mercury_jax.train import launch, optim, resume, step as steps
from mercury_jax.train.recipe import TrainConfig, resolved
from mercury_jax.train.report import Reporter
from mercury_jax.train.resume import CHECKPOINTS, ready
from mercury_jax.types import Batch, Model, Params

CONFIG = "config.json"


@runtime_checkable
class Data(Protocol):
    """An endless iterator of batches, this process's rows of them, that can go on where it was.

    With several processes a state is `{"rows": {number: state of that row of the batch}, ...}`: a checkpoint merges
    the rows of all processes, and `set_state` is given all of them.
    """

    def __next__(self) -> Batch: ...
    def get_state(self) -> Any: ...  # ready for JSON
    def set_state(self, state: Any, /) -> None: ...


class Diverged(ArithmeticError):
    """The loss or the gradient is NaN or infinite. Nothing was saved since; the parameters before it stand."""

    exit_code = 3


@dataclass(frozen=True)
class Result:
    """What a run leaves: the last parameters, their average, the last metrics, and where it all is."""

    params: Params = field(repr=False)
    ema: Params = field(repr=False)  # the parameters themselves where no average is kept
    metrics: Mapping[str, float]
    out: Path
    step: int
    stopped: str | None = None  # the signal that ended the run before its last step


def run(
    config: TrainConfig,
    model: Model,
    corruption: Corruption,
    data: Data,
    *,
    evaluate: Callable[[Params], Mapping[str, float]] | None = None,
    preview: Callable[[Params], str] | None = None,
    params: Params | None = None,
) -> Result:
    """Train `model` as `config` says; returns after the last step, or after SIGTERM or SIGINT.

    data: yields numpy batches of this process's rows, see `sharding.share`. evaluate, preview: called
    with the averaged parameters; they must not keep them. params: start from these (fine-tuning); they are donated.
    Raises ValueError before any compute when `out` already holds checkpoints and `resume` is
    False, or holds another model's; Diverged on NaN or Inf; checkpoint.SaveFailed on a full disk.
    """
    with _opened(config, model, corruption, data, params) as loop, launch.signals() as stop:
        while loop.step < config.steps and not stop.asked(loop.step):
            loop.advance()
            due = lambda every, at=loop.step: every and (at % every == 0 or at == config.steps)
            if evaluate and due(config.eval_every):
                loop.evaluate(evaluate)
            if preview and due(config.sample_every):
                loop.preview(preview)
            if due(config.save_every):
                loop.save()
        early = stop.name if loop.step < config.steps else None
        if early:
            loop.save()
        return loop.finish(early)


def mesh_of(config: TrainConfig) -> Mesh:
    """The recipe's mesh over all devices, checked against its batch."""
    on = sharding.mesh(**dataclasses.asdict(config.mesh))
    micro, ways = config.batch // config.accumulate, sharding.row_shards(on)
    if micro % ways:
        raise refuse("batch / accumulate", micro, f"a multiple of {ways}, the mesh's data * fsdp")
    return on


@contextmanager
def _opened(
    config: TrainConfig, model: Model, corruption: Corruption, data: Data, params: Params | None
) -> Iterator[_Loop]:
    """A loop at its first or at its resumed step; whatever happens, a save under way is completed."""
    on = mesh_of(config)
    at = ready(config)
    folder = config.folder / CHECKPOINTS
    stale = checkpoint.clean(folder)
    tx = optim.optimizer(config.optim, config.steps)
    tokens = 0
    if at is None:
        state = steps.init(jax.random.key(config.seed), model, tx, config.ema > 0, on, params)
    else:
        found = checkpoint.restore(folder, steps.shapes(model, tx, config.ema > 0, on), at)
        state, tokens = found.tree, found.extra["tokens"]
        data.set_state(found.extra["data"])
    loop = _Loop(config, model, corruption, data, on, tx, state, at or 0, tokens)
    try:
        if stale:
            loop.report.say(f"removed what an interrupted save left: {', '.join(stale)}")
        loop.report.say(
            f"{config.name}: {'resumed at' if at else 'starts at'} step {at or 0} of {config.steps}"
        )
        yield loop
    finally:
        loop.close()


class _Loop:
    """The loop's moving parts; metrics are fetched one step late, so that the devices never wait."""

    def __init__(
        self, config: TrainConfig, model: Model, corruption: Corruption, data: Data, on: Mesh, tx: Any,
        state: steps.TrainState, at: int, tokens: int,
    ):  # fmt: skip
        self.config, self.data, self.on, self.state, self.step, self.tokens = (
            config,
            data,
            on,
            state,
            at,
            tokens,
        )
        self.update = steps.updater(
            model, config.objective, corruption, tx, optim.schedule(config.optim, config.steps),
            accumulate=config.accumulate, ema=config.ema, on=on,
        )  # fmt: skip
        config.folder.mkdir(parents=True, exist_ok=True)
        self.resolved = resolved(config)
        first = jax.process_index() == 0
        if first:
            (config.folder / CONFIG).write_text(json.dumps(self.resolved, indent=1), encoding="utf-8")
        self.saver = checkpoint.Saver(config.folder / CHECKPOINTS, config.keep)
        self.report = Reporter(config.folder, config.name, config.steps, at, quiet=not first)
        self.metrics: dict[str, float] = {}
        self._saved = at or -1  # a fresh state is not saved yet
        self._pending: tuple[int, steps.Report] | None = None
        self._window: list[dict[str, float]] = []

    def advance(self) -> None:
        """Dispatch one update, then look at the one before."""
        try:
            batch = next(self.data)
        except StopIteration:
            raise refuse(
                "data", f"{self.step} batches", f"an endless iterator: {self.config.steps} are needed"
            ) from None
        before = self._pending
        self.state, report = self.update(self.state, sharding.shard_batch(batch, self.on))
        self.step += 1
        self._pending = (self.step, report)
        self._look(before)
        self.saver.check()

    def settle(self) -> None:
        """Look at the newest update too; only then may its state be used or saved."""
        before, self._pending = self._pending, None
        self._look(before)

    def evaluate(self, evaluate: Callable[[Params], Mapping[str, float]]) -> None:
        self.settle()
        with self.report.clock.pause():
            found = {name: float(value) for name, value in evaluate(self.averaged).items()}
        self.metrics |= {f"eval/{name}": value for name, value in found.items()}
        self.report.metrics(self.step, "eval", found)

    def preview(self, preview: Callable[[Params], str]) -> None:
        self.settle()
        with self.report.clock.pause():
            text = preview(self.averaged)
        self.report.sample(self.step, text)

    def save(self) -> None:
        if self._saved == self.step:
            return
        self.settle()
        self._saved = self.step
        extra = {"data": resume.gather(self.data.get_state()), "tokens": self.tokens}
        self.saver.save(self.step, self.state, self.resolved, extra)

    def finish(self, stopped: str | None) -> Result:
        self.settle()
        self.saver.wait()
        if stopped:
            self.report.say(f"{stopped}: saved step {self.step}; go on with --resume")
        return Result(self.state.params, self.averaged, self.metrics, self.config.folder, self.step, stopped)

    def close(self) -> None:
        """After an error too: a save that has begun is worth completing."""
        try:
            self.saver.wait()
        finally:
            self.report.close()

    @property
    def averaged(self) -> Params:
        return self.state.ema if self.config.ema else self.state.params

    def _look(self, pending: tuple[int, steps.Report] | None) -> None:
        if pending is None:
            return
        step, report = pending[0], jax.device_get(pending[1])
        if not report.finite:
            self.saver.wait()  # the last good checkpoint may still be on its way
            raise Diverged(_diverged(self.config, step, report.values))
        values = {name: float(value) for name, value in report.values.items()}
        self.tokens += int(values.pop("tokens"))
        self._window.append(values)
        self.report.step(step, int(report.values["tokens"]), values["loss"])
        if step % self.config.log_every == 0 or step == self.config.steps:
            mean = {name: sum(v[name] for v in self._window) / len(self._window) for name in values}
            row = mean | {"lr": values["lr"], "tokens": self.tokens}
            self.metrics |= row
            self.report.metrics(step, "train", row)
            self._window = []


def _diverged(config: TrainConfig, step: int, values: Mapping[str, Any]) -> str:
    newest = checkpoint.latest(config.folder / CHECKPOINTS)
    stands = f"the checkpoint of step {newest} stands" if newest else "no checkpoint was written yet"
    return (
        f"step {step}: loss is {float(values['loss'])}, gradient norm {float(values['grad_norm'])}; "
        f"the batch is number {step} of the data stream (seed {config.seed}, {config.batch} rows); "
        f"{stands} in {config.folder}"
    )
