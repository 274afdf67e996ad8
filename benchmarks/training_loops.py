"""Measures the overhead of the training loop against a hand-written loop, in alternation in one process.

The real loop is `train.loop.run` as `mj.train` runs it, with the recipe's data pipeline, log and checkpoints. The
hand-written loop is a jitted update and a Python loop over batches in memory; it uses neither `train.step` nor
`train.loop`. Both have the same model, objective, optimizer, moving average, batches and noise, so they end at the same
parameters. Evaluation and samples are disabled in both.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.timing import quartiles, ratio
from mercury_jax import checkpoint, models, noise, sharding
from mercury_jax.bench.timing import matmul_loop
from mercury_jax.compilation import compilations, hardware
from mercury_jax.config import ModelConfig, at_least, refuse
from mercury_jax.models import masks
from mercury_jax.tokenizer import AnyTokenizer
from mercury_jax.training import data as pipelines, loop, optim
from mercury_jax.training.objectives import layout_of
from mercury_jax.training.recipe import InitModel, TrainConfig
from mercury_jax.training.report import flops_per_position
from mercury_jax.types import Batch, Model, Params

GOAL = 0.97  # required steps per second, relative to the hand-written loop
PEAK_WIDTH = 2048  # width of the matrices whose product measures the peak FLOP/s
SAVE_SECONDS = 600.0  # seconds within which a checkpoint must be on the disk
COMPARED = (
    "a jitted optax update with the same objective, noise, optimizer and average, and a state that is donated, in a "
    "Python loop over batches in memory; it does not load data, check for NaN, report metrics, log or save"
)


class Seconds(NamedTuple):
    """Seconds that a number of steps took: wall-clock time, and CPU time of all threads of this process."""

    wall: float
    cpu: float


class Stopwatch:
    """Measures wall-clock and CPU time from its construction."""

    def __init__(self) -> None:
        """Starts the measurement."""
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def read(self) -> Seconds:
        """Returns the seconds since the construction."""
        return Seconds(time.perf_counter() - self.wall, time.process_time() - self.cpu)


# --- the loop written by hand


class HandState(NamedTuple):
    """The state of the hand-written update; `ema` is () for a recipe without a moving average."""

    params: Params
    opt: optax.OptState
    ema: Params
    step: jax.Array


class HandWritten:
    """A training loop as one would write it for a single recipe: replicated parameters, rows divided over devices."""

    def __init__(self, config: TrainConfig, model: Model, corruption: noise.Corruption) -> None:
        """Initialises the state with the keys that `train.loop` uses, and jits the update.

        Args:
            config: The recipe, which passed `check_recipe`.
            model: The denoiser.
            corruption: The forward process.
        """
        tx = optim.optimizer(config.optim, config.steps, model.config.width)
        self.mesh = loop.mesh_of(config)
        init_key, noise_key = jax.random.split(jax.random.key(config.seed))
        params = jax.jit(model.init)(init_key)
        ema = jax.tree.map(lambda x: jnp.array(x, jnp.float32), params) if config.ema else ()
        state = HandState(params, jax.jit(tx.init)(params), ema, jnp.zeros((), jnp.int32))
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        self.state = jax.device_put(state, everywhere)

        @functools.partial(jax.jit, donate_argnums=0, out_shardings=everywhere)
        def update(state: HandState, batch: Batch) -> tuple[HandState, jax.Array]:
            def total(params: Params) -> tuple[jax.Array, jax.Array]:
                key = jax.random.fold_in(noise_key, state.step)
                loss = config.objective(key, model, params, batch, corruption)
                return loss.per_example.sum(), loss.weight.sum()

            (value, weight), grads = jax.value_and_grad(total, has_aux=True)(state.params)
            weight = jnp.where(weight == 0, 1, weight)
            delta, opt = tx.update(jax.tree.map(lambda g: g / weight, grads), state.opt, state.params)
            params = optax.apply_updates(state.params, delta)
            ema = optim.update_average(state.ema, params, state.step, config.ema) if config.ema else state.ema
            return HandState(params, opt, ema, state.step + 1), value / weight

        self.update = update

    def run(self, batches: list[Batch]) -> Seconds:
        """Takes a step with each batch, and waits until the last one has finished.

        Args:
            batches: numpy batches.

        Returns:
            The time of all steps.
        """
        clock = Stopwatch()
        for batch in batches:
            self.state, _ = self.update(self.state, sharding.shard_batch(batch, self.mesh))
        jax.block_until_ready(self.state)
        return clock.read()


# --- the real loop, interrupted between segments


class Alternation:
    """The recipe's batches for `loop.run`, which also runs the hand-written loop between segments of the real one.

    `loop.run` calls `observe` with the parameters before it takes each batch (`loop.PolicyData`). After every `steps`
    batches, `observe` waits until the parameters are computed and a due checkpoint is on the disk; this ends a segment
    of the real loop. Then the hand-written loop runs. It runs either two segments or none at a time, so that the order
    of the two loops alternates between pairs.
    """

    def __init__(
        self,
        batches: Callable[[], Any],
        hand: HandWritten,
        folder: Path,
        steps: int,
        save_every: int,
        peak: Callable[[], None],
    ) -> None:
        """Opens the data twice, once for each loop.

        Args:
            batches: Opens the recipe's data at the first batch.
            hand: The hand-written loop.
            folder: Folder of the checkpoints of the real loop.
            steps: Steps of a segment.
            save_every: Interval of the checkpoints in steps.
            peak: Multiplies large matrices once, to measure the peak FLOP/s.
        """
        self.data, self.ahead, self.hand = batches(), batches(), hand
        self.folder, self.steps, self.save_every, self.peak = folder, steps, save_every, peak
        self.taken, self.clock = 0, Stopwatch()
        self.real: list[Seconds] = []
        self.by_hand: list[Seconds] = []
        self.peaks: list[Seconds] = []
        self.differences: list[float] = []
        self.compiled: list[int] = []
        self.shapes: list[BatchCounts] = []

    def __next__(self) -> Batch:
        """Returns the next batch of the real loop."""
        self.taken += 1
        return next(self.data)

    def get_state(self) -> Any:
        """Returns the state of the recipe's data."""
        return self.data.get_state()

    def set_state(self, state: Any, /) -> None:
        """Sets the state of the recipe's data.

        Args:
            state: From `get_state`.
        """
        self.data.set_state(state)

    def observe(self, params: Params, /) -> None:
        """Ends a segment after every `steps` batches, and starts the clock of the next one.

        Args:
            params: Parameters of the real loop before its next update.
        """
        if self.taken % self.steps:
            return
        if self.taken:
            jax.block_until_ready(params)
            self._wait_for_checkpoint()
            self.real.append(self.clock.read())
            # After odd segments the hand-written loop runs twice: the pair of this segment, and the pair of the next
            # one in advance. Both loops have taken the same number of steps where the parameters are compared.
            odd = len(self.real) % 2
            if odd:
                self._run_by_hand()
            self.differences.append(largest_difference(params, self.hand.state.params))
            if odd:
                self._run_by_hand()
        # The peak is measured between segments, because the clock frequency of the machine changes over time.
        clock = Stopwatch()
        self.peak()
        self.peaks.append(clock.read())
        self.compiled.append(compilations())
        self.clock = Stopwatch()

    def _run_by_hand(self) -> None:
        batches = [next(self.ahead) for _ in range(self.steps)]
        self.by_hand.append(self.hand.run(batches))
        self.shapes.append(count_batches(batches))

    def _wait_for_checkpoint(self) -> None:
        limit = time.monotonic() + SAVE_SECONDS
        due = self.taken // self.save_every * self.save_every
        while due and checkpoint.latest(self.folder) != due:
            if time.monotonic() > limit:
                raise RuntimeError(f"no checkpoint of step {due} within {SAVE_SECONDS:g} s")
            time.sleep(0.0005)


def largest_difference(one: Params, other: Params) -> float:
    """Computes the largest relative difference of two trees.

    Args:
        one: A tree of arrays.
        other: A tree of the same structure and shapes.

    Returns:
        The largest absolute difference of any leaf, divided by the largest absolute value of that leaf in `one`.
    """

    def difference(a: Any, b: Any) -> float:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        return float(np.abs(a - b).max() / max(np.abs(a).max(), 1e-30))

    return max(jax.tree.leaves(jax.tree.map(difference, one, other)))


# --- arithmetic of a step


class BatchCounts(NamedTuple):
    """Means over batches: scored tokens, and (query, key) pairs of attention without and with the sliding window."""

    tokens: float
    pairs: float
    local_pairs: float


def count_batches(batches: list[Batch], window: int | None = None) -> BatchCounts:
    """Counts scored tokens and attending pairs of positions.

    Args:
        batches: numpy batches.
        window: Positions of the sliding window; None: no layer has one.

    Returns:
        The means over the batches.
    """
    size = lambda ranges: float(np.maximum(ranges[..., 1] - ranges[..., 0], 0).sum())
    pairs = [size(np.asarray(b.ranges)) for b in batches]
    local = (
        pairs
        if window is None
        else [size(np.asarray(masks.sliding_window_ranges(jnp.asarray(b.ranges), window))) for b in batches]
    )
    tokens = [float(np.asarray(b.editable).sum()) for b in batches]
    return BatchCounts(statistics.mean(tokens), statistics.mean(pairs), statistics.mean(local))


def attention_flops(config: ModelConfig, counts: BatchCounts) -> float:
    """Computes the FLOPs of attention in an update: 12 per attending pair, head and component of a head.

    Attention has two matrix products in the forward pass and four in the backward pass, with 2 FLOPs per multiply-add.
    Masked pairs do not count.

    Args:
        config: Layers, heads and windows.
        counts: From `count_batches`.

    Returns:
        FLOPs of all layers.
    """
    layers = range(config.layers)
    pairs = sum(counts.pairs if config.is_global(i) else counts.local_pairs for i in layers)
    return 12.0 * config.heads * config.head_dim * pairs


# --- the measurement


def compare(
    config: TrainConfig,
    tokenizer: AnyTokenizer,
    *,
    steps: int = 50,
    pairs: int = 5,
    peak_width: int = PEAK_WIDTH,
) -> Iterator[dict[str, Any]]:
    """Measures a recipe. Before the timed segments, both loops run one segment in which they compile.

    Args:
        config: The recipe. Its folder is replaced, and evaluation and samples are disabled.
        tokenizer: Tokenizer of its data, from `api.tokenizer_of`.
        steps: Steps of a segment. Checkpoints are saved as often as the recipe says.
        pairs: How often both loops are timed.
        peak_width: Width of the matrices whose product measures the peak FLOP/s.

    Yields:
        One record. `ratio` is the median over pairs of the steps per second of the real loop divided by those of the
        hand-written one; `ratio_of_totals` divides the times of all steps, including `saves` checkpoints; `cpu_ratio`
        is the median by CPU time. `mfu` is the FLOP/s of one forward and backward pass divided by the FLOP/s of large
        fp32 products measured next to it; `mfu_of_cpu_time` uses seconds of CPU time for both.

    Raises:
        ValueError: The recipe uses a feature that the hand-written loop lacks: adapters, frozen parameters, a
            checkpoint to start from, microbatches, sharded parameters, or data that the model makes.
    """
    at_least(1, steps=steps, pairs=pairs)
    check_recipe(config)
    with tempfile.TemporaryDirectory() as folder:
        config = dataclasses.replace(
            config, out=folder, steps=steps * (pairs + 1) + 1, eval_every=0, sample_every=0,
            resume=False, wandb="", profile=(0, 0),
        )  # fmt: skip
        yield _measured(config, tokenizer, steps, peak_width)


def check_recipe(config: TrainConfig) -> None:
    """Refuses a recipe that uses a feature which the hand-written loop lacks.

    Args:
        config: The recipe.

    Raises:
        ValueError: The recipe uses such a feature; the message names the field.
    """
    for name in ("init", "freeze", "distributed"):
        if getattr(config, name):
            raise refuse(name, getattr(config, name), "a recipe without it, for benchmarks.training")
    if isinstance(config.model, InitModel):
        raise refuse("model", "InitModel", "a ModelConfig, for benchmarks.training")
    if config.lora.rank:
        raise refuse("lora.rank", config.lora.rank, "0, for benchmarks.training")
    if config.accumulate != 1:
        raise refuse("accumulate", config.accumulate, "1, for benchmarks.training")
    if isinstance(config.data, pipelines.BatchSource):
        raise refuse("data", type(config.data).__name__, "documents, for benchmarks.training")
    mesh = loop.mesh_of(config)
    if mesh.size != mesh.shape["data"]:
        allowed = "one that only divides rows (fsdp, tensor and expert 1), for benchmarks.training"
        raise refuse("mesh", dict(mesh.shape), allowed)


def _measured(config: TrainConfig, tokenizer: AnyTokenizer, steps: int, peak_width: int) -> dict[str, Any]:
    model = models.build(config.model_config, config.remat)
    c = config.model_config
    corruption = noise.build(config.noise, c.vocab, c.mask, noise.specials(tokenizer, c.vocab))
    batches = functools.partial(
        pipelines.build, config.mixture, tokenizer, layout_of(config.objective, model), rows=config.batch,
        row=config.row, seed=config.seed,
    )  # fmt: skip
    peak, peak_work = matmul_loop(peak_width, jnp.float32)
    hand = HandWritten(config, model, corruption)
    run = Alternation(batches, hand, config.folder / loop.CHECKPOINTS, steps, config.save_every, peak)
    # The loop's progress bar on standard error is discarded; its rows of metrics are written as always.
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stderr(nowhere):
        loop.run(config, model, corruption, run)
    counts = BatchCounts(*(statistics.mean(x) for x in zip(*run.shapes, strict=True)))
    products = config.batch * config.row * flops_per_position(c, hand.state.params)
    attention = attention_flops(c, counts)
    found = _record(run, steps, products + attention, peak_work)
    return {
        "recipe": config.name,
        "parameters": sum(x.size for x in jax.tree.leaves(hand.state.params)),
        "optimizer": config.optim.optimizer,
        "batch": config.batch,
        "row": config.row,
        "steps": steps,
        "save_every": config.save_every,
        "log_every": config.log_every,
        **found,
        "tokens_per_second": counts.tokens * found["steps_per_second"],
        "positions_per_second": config.batch * config.row * found["steps_per_second"],
        "flops_per_step": products + attention,
        "attention_flops_per_step": attention,
        "at_least": GOAL,
        "within": found["ratio"] >= GOAL and found["recompilations"] == 0,
        "hardware": hardware(),
        "seed": config.seed,
        "compared_with": COMPARED,
    }


def _record(run: Alternation, steps: int, work: float, peak_work: float) -> dict[str, Any]:
    """Computes the figures of all segments without the first one, in which both loops compile.

    Args:
        run: The alternation after its last segment.
        steps: Steps of a segment.
        work: FLOPs of a step.
        peak_work: FLOPs of one call of `run.peak`.

    Returns:
        The measured fields of the record.
    """
    real, hand = run.real[1:], run.by_hand[1 : len(run.real)]
    # The peak of a segment is the faster of the measurements before and after it.
    around = list(zip(run.peaks[1:], run.peaks[2:], strict=False))
    peaks = [peak_work / min(a.wall, b.wall) for a, b in around]
    peaks_by_cpu = [peak_work / max(min(a.cpu, b.cpu), 1e-9) for a, b in around]
    rates = [steps * work / r.wall for r in real]
    rates_by_cpu = [steps * work / max(r.cpu, 1e-9) for r in real]
    pairs = [(h.wall, r.wall) for h, r in zip(hand, real, strict=True)]
    cpu = jax.devices()[0].platform == "cpu"
    median = statistics.median
    return {
        "steps_per_second": steps / median(r.wall for r in real),
        "hand_steps_per_second": steps / median(h.wall for h in hand),
        "ratio": ratio(pairs),
        "ratio_quartiles": quartiles([h / r for h, r in pairs]),
        "ratio_of_fastest": min(h for h, _ in pairs) / min(r for _, r in pairs),
        "ratio_of_totals": sum(h for h, _ in pairs) / sum(r for _, r in pairs),
        "saves": len(run.real) * steps // run.save_every - steps // run.save_every,
        "cpu_ratio": ratio([(h.cpu, r.cpu) for h, r in zip(hand, real, strict=True)]),
        "cpu_seconds_per_step": median(r.cpu for r in real) / steps,
        "pairs": len(pairs),
        "recompilations": run.compiled[-1] - run.compiled[1],
        "difference": run.differences[-1],
        "peak_flops": max(peaks),
        "mfu": median(x / p for x, p in zip(rates, peaks, strict=True)),
        "mfu_of_fastest": max(rates) / max(peaks),
        "mfu_of_cpu_time": median(x / p for x, p in zip(rates_by_cpu, peaks_by_cpu, strict=True))
        if cpu
        else None,
    }
