"""`python -m benchmarks.gpu model`: passes of `mj.sample`, logits with kernels and without, training, transformers.

Models have random weights. transformers runs in a process of its own, since JAX and
torch would share the device's memory.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mercury_jax as mj
from mercury_jax import models, noise, sharding
from mercury_jax.bench import abstract_params as ap
from mercury_jax.bench.gpu.profile import FEW, MANY, decoding_call, find
from mercury_jax.bench.gpu.runner import Row, Stage
from mercury_jax.bench.timing import timed
from mercury_jax.config import ModelConfig, NoiseConfig
from mercury_jax.hub.families.gemma import export_diffusion
from mercury_jax.models import masks
from mercury_jax.ops import device as kernel_device
from mercury_jax.types import LM, Batch

# Steps of a canvas for which tokens/s are given. The pass that commits it is counted as one more, also in a batch of
# one row, where it is half of a wider pass.
DENOISING = 16


def decoding(args: Row, stage: Stage) -> Iterator[Row]:
    """Seconds of a forward pass in `mj.sample`: the difference of calls with many and with few denoising steps.

    Args:
        args: `model`, `quantise`, `batch`, `prefix` tokens of the prompts, `tokens` of an answer (default: one
            canvas), `turns` that are timed.
        stage: Called with what is being done.

    Yields:
        One row with `seconds_per_forward`, bytes and FLOP of a pass, and `tokens_per_second_of_a_call`, prefill
        included.
    """
    lm, call = decoding_call(args, stage)
    c, batch, prefix = lm.model.config, args["batch"], args["prefix"]
    stage("compiling, and the first call")
    first = call(FEW)[0]
    call(MANY)
    stage("timing")
    pairs = [(call(FEW, n), call(MANY, n)) for n in range(args["turns"])]
    each = [(b[0] - a[0]) / max(b[1] - a[1], 1) for a, b in pairs]
    seconds, (bytes, flops) = statistics.median(each), load(lm, batch, prefix)
    tokens = args.get("tokens", c.block)
    whole = statistics.median(call(DENOISING, n)[0] for n in range(args["turns"]))
    if seconds <= 0:
        why = f"{MANY} steps took no longer than {FEW}: too small to time here"
        yield {"model": args["model"], "left_out": why}
        return
    status = kernel_device.status()
    yield {
        "model": args["model"], "quantise": args.get("quantise"), "dtype": c.dtype, "batch": batch, "prefix": prefix,
        "canvas": c.block, "passes": [a[1] for a in pairs[0]], "seconds_per_forward": seconds,
        "seconds_per_forward_all": each, "seconds_of_a_call": statistics.median(b[0] for _, b in pairs),
        "first_call_seconds": first, "tokens_per_second": c.block * batch / (seconds * (DENOISING + 1)),
        "max_tokens": tokens, "tokens_per_second_of_a_call": batch * tokens / whole,
        "bytes": bytes, "flops": flops, "parameter_bytes": size(lm.params), "peak_bytes": peak(),
        "kernels": status["rule"], "kernels_on": status["on"], "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }  # fmt: skip


def slice_logits(args: Row, stage: Stage) -> Iterator[Row]:
    """Logits with kernels and without, each against the same weights in fp32 arithmetic.

    Passes if the error with kernels is at most 1.5 times that of plain XLA in bf16, or at most 1e-3.

    Args:
        args: `model`, `quantise`, and `layers` of the slice.
        stage: Called with what is being done.

    Yields:
        One row with `passed` and both errors.
    """
    found = find(args["model"])
    layers: int = args["layers"]
    config: Any = found.config  # a DiffusionGemma, whose last layer must be global
    found = found._replace(config=dataclasses.replace(config, layers=layers, global_layers=(layers - 1,)))
    stage("filling the weights")
    lm = ap.random_lm(found, args["quantise"])
    c, rng = lm.model.config, np.random.default_rng(0)
    prompt, canvas = (rng.integers(c.vocab // 4, c.vocab // 2, n) for n in (2 * c.block, c.block))
    exact = dataclasses.replace(lm, model=models.build(dataclasses.replace(c, dtype="float32")))

    def logits(lm: LM, switch: str | None) -> np.ndarray:
        jax.clear_caches()  # compiled programs keep the kernels they were traced with
        os.environ.pop(kernel_device.SWITCH, None)  # this process runs the cases of `runner` alone
        if switch is not None:
            os.environ[kernel_device.SWITCH] = switch
        with jax.default_matmul_precision("highest" if lm is exact else "default"):
            return np.asarray(mj.logits(lm, canvas, prompt=prompt.tolist()))

    stage("in fp32, without kernels")
    want = logits(exact, "0")
    stage("without kernels")
    off = logits(lm, "0")
    stage("with kernels")
    on, status = logits(lm, None), kernel_device.status()
    error = lambda x: float(np.linalg.norm(x - want) / np.linalg.norm(want))
    agree = lambda a, b: float((a.argmax(-1) == b.argmax(-1)).mean())
    good = error(on) <= max(1.5 * error(off), 1e-3)
    row = {
        "model": args["model"], "quantise": args["quantise"], "layers": args["layers"], "passed": bool(good),
        "relative_error_on": error(on), "relative_error_off": error(off),
        "relative_difference": float(np.linalg.norm(on - off) / np.linalg.norm(off)),
        "same_argmax": agree(on, off), "same_argmax_as_fp32": {"on": agree(on, want), "off": agree(off, want)},
        "kernels": status["rule"], "kernels_on": status["on"], "peak_bytes": peak(),
    }  # fmt: skip
    if status["chip"] is None:
        row["note"] = "plain XLA on both sides: no kernel of ours runs on this device"
    yield row if good else row | {"why": "with kernels the logits are further from fp32 than without"}


def training(args: Row, stage: Stage) -> Iterator[Row]:
    """An AdamW update: seconds, tokens/s, FLOP. The parent process divides by the matmul roofline (MFU).

    A row is a document's clean tokens and its canvases (block diffusion), so there are about twice as many positions as
    tokens to learn from.

    Args:
        args: `model`, `rows` and positions of a `row`, `turns` that are timed.
        stage: Called with what is being done.

    Yields:
        One row with `seconds` of an update and its FLOP.
    """
    from mercury_jax.training import objectives, optim, step as steps  # only this function needs optax

    found, rows, row = find(args["model"]), args["rows"], args["row"]
    c, on = found.config, sharding.mesh(devices=jax.devices()[:1])
    model, corruption = models.build(c), noise.build(found.noise or NoiseConfig(), c.vocab, c.mask)
    tx, lr = optim.optimizer(optim.OptimConfig(), 1000, c.width), optim.schedule(optim.OptimConfig(), 1000)
    stage("making the state")
    setup = steps.TrainSetup(model, objectives.masked_elbo(), corruption, tx, lr)
    state, update = steps.init_state(jax.random.key(0), setup, on), steps.sharded_update(setup, on)
    data, seconds, report = batch_of(c, rows, row), [], None
    stage("compiling, then timing")
    for _ in range(args["turns"] + 1):  # the first one compiles
        (state, report), took = timed(lambda state=state: jax.block_until_ready(update(state, data)))
        seconds.append(took)
    assert report is not None
    each = statistics.median(seconds[1:])
    yield {
        "model": args["model"], "rows": rows, "row": row, "seconds": each, "seconds_all": seconds[1:],
        "positions_per_second": rows * row / each, "tokens_per_second": float(data.editable.sum()) / each,
        "flops": flops_of(state.params, c, data), "loss": float(report.values["loss"]), "peak_bytes": peak(),
    }  # fmt: skip


def load(lm: LM, batch: int, prefix: int) -> tuple[float, float]:
    """(bytes that a pass must read, FLOP that it must do): all experts are read, but a token multiplies with few.

    Args:
        lm: The model, or its shapes.
        batch: Rows.
        prefix: Tokens of each prompt.

    Returns:
        (bytes, FLOP).
    """
    c = lm.model.config
    positions = batch * c.block
    total = sum(math.prod(x.shape) for x in jax.tree.leaves(lm.params) if x.ndim > 1)
    e = c.experts
    idle = 0.0 if e is None else 3.0 * c.width * e.width * (e.count - e.active) * c.layers
    cache = size(jax.eval_shape(lambda: lm.model.empty_cache(batch, prefix + c.block)))
    seen = 4.0 * positions * (prefix + c.block) * c.heads * c.head_dim * c.layers
    return float(size(lm.params) + cache), 2.0 * (total - idle) * positions + seen


def size(tree: Any) -> int:
    """Bytes of arrays or shapes."""
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))


def peak() -> int | None:
    """Most bytes that the first device has held so far; None where it does not say."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def batch_of(c: ModelConfig, rows: int, row: int) -> Batch:
    """A batch of rows with one random document each, as long as fits behind its clean tokens, then padding.

    Args:
        c: Configuration of the model.
        rows: Rows of the batch.
        row: Positions of a row.

    Returns:
        Numpy arrays in the place of those of the data pipeline.
    """
    length = row if c.pattern == "bidirectional" else max(c.block, (row + c.block) // (2 * c.block) * c.block)
    ids = np.random.default_rng(0).integers(c.vocab // 4, c.vocab // 2, length)  # no special tokens
    laid = masks.layout(c, ids, 0)

    def pad(x: Any, fill: int = 0) -> Any:
        x = np.asarray(x)[:row]
        x = np.pad(x, [(0, row - len(x)), *[(0, 0)] * (x.ndim - 1)], constant_values=fill)
        return np.repeat(x[None], rows, axis=0)

    return Batch(
        tokens=pad(laid.tokens), positions=pad(laid.positions), ranges=pad(laid.ranges), editable=pad(laid.editable),
        canvas=pad(laid.canvas, -1),
    )  # fmt: skip


def flops_of(params: Any, c: ModelConfig, data: Batch) -> float:
    """FLOP that a training step must do: 6 for each matrix parameter and position, 12 for each number of a head and key
    that a query sees.

    Args:
        params: Parameters, or their shapes.
        c: Configuration of the model.
        data: The batch.

    Returns:
        FLOP of the forward and the backward pass.
    """
    total = sum(math.prod(x.shape) for x in jax.tree.leaves(params) if x.ndim > 1)
    lookup = 0 if c.tied else c.vocab * c.width
    ranges = np.asarray(data.ranges, np.int64)
    seen = float((ranges[..., 1] - ranges[..., 0]).clip(0).sum())
    positions = np.asarray(data.tokens).size
    return 6.0 * (total - lookup) * positions + 12.0 * c.heads * c.head_dim * c.layers * seen


def transformers(args: Row, stage: Stage) -> Iterator[Row]:
    """Seconds of a denoising pass of transformers' `generate` with random weights of the same shapes.

    Args:
        args: `model`, `prefix` tokens of the prompt, `device` of torch.
        stage: Called with what is being done.

    Raises:
        RuntimeError: The process of transformers ended without a result.

    Yields:
        One row with `seconds_per_forward` and the versions, or with `left_out`, why it was not timed.
    """
    config: Any = find(args["model"]).config
    prompt = np.random.default_rng(0).integers(2, config.vocab, args["prefix"]).tolist()
    request = {
        "config": export_diffusion(config), "prompt": prompt, "steps": [FEW, MANY], "device": args["device"],
        "dtype": config.dtype,
    }  # fmt: skip
    worker = Path(__file__).with_name("transformers_worker.py")
    stage("transformers in a process of its own")
    command = [args.get("python", sys.executable), str(worker)]
    done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(f"transformers' process ended with code {done.returncode}: {done.stderr[-400:]}")
    yield {"model": args["model"], "prefix": args["prefix"], "batch": 1} | json.loads(lines[-1])
