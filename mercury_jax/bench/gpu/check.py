"""Correctness of the kernels on this device: each form against plain jnp in fp32, on inputs that reveal errors.

Keys that no query sees are NaN, and so are rows behind the last expert and matrices of
experts without rows; memory is filled with NaN before each run. Each compiled program runs twice on each draw of
inputs: two results that differ show a race. Without a GPU the same code runs under the Mosaic GPU interpreter, on
small shapes (`check --small`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np

import mercury_jax as mj
from mercury_jax.bench import abstract_params
from mercury_jax.bench.gpu.runner import Row, Stage
from mercury_jax.bench.timing import endless, measure_roofline
from mercury_jax.compilation import GRAPH_FLAGS
from mercury_jax.config import Plan
from mercury_jax.decode import rules
from mercury_jax.models import ops
from mercury_jax.ops import device as kernel_device
from mercury_jax.ops.operation import KernelCheck
from mercury_jax.types import Device

TOLERANCE = 2e-2  # relative error of a row; bf16 arithmetic has 1e-3 to 1e-2
# A gradient may have a larger error where bf16 arithmetic without kernels has at least half of it, as in the tests of
# FlashAttention: the rows of dq that are small differences of large sums.
TIMES_PLAIN = 2.0
MOVED = 1e-3  # relative difference between two runs of one program on the same inputs
PACKAGES = ("jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "jax-cuda13-plugin", "jax-cuda12-plugin", "torch",
            "transformers")  # fmt: skip


def about(args: Row, stage: Stage) -> Iterator[Row]:
    """Versions, the device, and which kernels are for it."""
    stage("starting JAX on the device")
    devices = jax.devices()
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    driver = Path("/proc/driver/nvidia/version")  # of NVIDIA's kernel module
    # The ptxas that Mosaic and XLA may compile with explains rows in which they could not.
    ptxas = shutil.which("ptxas") or shutil.which("ptxas", path="/usr/local/cuda/bin")
    yield {
        "hardware": devices[0].device_kind, "platform": devices[0].platform, "devices": len(devices),
        "jax": jax.__version__, "python": platform.python_version(), "versions": versions,
        "driver": driver.read_text().splitlines()[0] if driver.is_file() else None,
        "memory_bytes": (devices[0].memory_stats() or {}).get("bytes_limit"), "chip": kernel_device.present(),
        "kernels": kernel_device.status() | {"file": None}, "cores": os.cpu_count(),
        "cuda": {"CUDA_ROOT": os.environ.get("CUDA_ROOT"), "ptxas": ptxas},
    }  # fmt: skip


def roofline(args: Row, stage: Stage) -> Iterator[Row]:
    """The measured roofline: bytes/s of a copy (read and written) and FLOP/s of bf16 products.

    Args:
        args: `megabytes` of the copied array and `width` of the matrices.
    """
    stage("copying, then multiplying")
    found = measure_roofline(args["megabytes"], args["width"])
    yield {"bytes_per_second": found.bandwidth, "flops_per_second": found.matmul}


def here() -> Device | None:
    """The device of kernels: this machine's, None; without one a Hopper that is interpreted on the CPU."""
    if kernel_device.present() is not None:
        return None
    from mercury_jax.bench.gpu.interpreter import interpreted

    return interpreted()


OPERATIONS = {op.name: op for op in ops.OPERATIONS}


def checked(operation: str, shape: Row, device: Device | None) -> KernelCheck:
    """The kernel of an operation beside its reference, at the shape with these fields."""
    op = OPERATIONS[operation]
    return op.table().shape(**shape).check(op, device)


def check_form(args: Row, stage: Stage) -> Iterator[Row]:
    """Checks one shape of one form of a kernel.

    Args:
        args: `operation`, a key of `OPERATIONS`, `shape`, the fields of its shape, `seed`, and `draws` of inputs.

    Yields:
        One row with `passed`, `relative_error` (of the worst row of the outputs) and `moved` (the difference of two
        runs), or with `refused`, the reason why the kernel has no such form.
    """
    case, seed = checked(args["operation"], args["shape"], here()), args["seed"]
    inputs, exact = case.inputs(seed)
    stage("compiling")
    try:
        program = jax.jit(case.kernel).lower(*inputs).compile()
    except ValueError as error:
        if "allowed:" not in str(error):  # only our own refusals contain this
            raise
        yield {"shape": args["shape"], "passed": None, "refused": str(error)[:300]}
        return
    like = jax.eval_shape(case.kernel, *inputs)
    errors, plain, moved = [0.0] * len(jax.tree.leaves(like)), [0.0] * len(jax.tree.leaves(like)), 0.0
    for turn in range(args["draws"]):
        if turn:
            inputs, exact = case.inputs(seed + turn)
        stage("computing the reference")
        with jax.default_matmul_precision("highest"):
            want = jax.device_get(jax.jit(case.reference)(*exact))
        stage("running")
        outs = []
        for _ in range(2):
            poison(program, like)
            outs.append(jax.device_get(program(*inputs)))
        for got in outs:
            errors = list(map(max, errors, worst_of_each(got, want)))
        moved = max(moved, worst(outs[0], outs[1]))
        if case.plain is not None and not max(errors) <= TOLERANCE:
            stage("computing it without kernels")
            found = jax.device_get(jax.jit(case.plain)(*inputs))
            plain = list(map(max, plain, worst_of_each(found, want)))
    row = {"shape": args["shape"], "relative_error": max(errors), "moved": moved, "seed": seed}
    row |= {"relative_error_plain": max(plain)} if any(plain) else {}
    judged = map(why_wrong, errors, [moved] * len(errors), plain)  # each output by its own plain computation
    why = next((why for why in judged if why is not None), None)
    yield row | ({"passed": True} if why is None else {"passed": False, "why": why})


def worst_of_each(got: Any, want: Any) -> list[float]:
    """The largest relative error of a row, for each output.

    Args:
        got: Outputs of the kernel, one array or several.
    """
    return [worst(a, b) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)]


def why_wrong(error: float, moved: float, plain: float = 0.0) -> str | None:
    """Judges a kernel."""
    # A plain result with NaN, whose error is infinite, excuses nothing.
    allowed = max(TOLERANCE, TIMES_PLAIN * plain) if plain < float("inf") else TOLERANCE
    if not error < float("inf"):
        return "NaN, or an infinity where none belongs"
    if not moved <= MOVED:  # true for NaN, too
        return (
            f"two runs on the same inputs differ by {moved:.2g}: a race, or memory read before it is written"
        )
    return None if error <= allowed else f"relative error {error:.2g} is more than {allowed:.2g}"


def poison(program: Any, like: Any) -> None:
    """Fills the memory that a program will be given with NaN, so that what it does not write shows.

    The allocator reuses freed chunks of the right size first, so arrays of the sizes of the program's temporaries and
    outputs (`like`) are filled and freed.
    """
    need = program.memory_analysis()
    sizes = [x.size * x.dtype.itemsize for x in jax.tree.leaves(like)]
    if need is not None:
        sizes.append(need.temp_size_in_bytes)
    junk = [jax.device_put(np.full(n, 0xFF, np.uint8)) for n in sizes if n]  # NaN in bf16, fp16 and fp32
    jax.block_until_ready(junk)


def worst(got: Any, want: Any) -> float:
    """The largest relative error of a row over all outputs: |got - want| / |want| of its vector; infinite for NaN.

    The norm of a row counts as at least a twentieth of the typical one. Of outputs with one number for each row, such
    as log-sum-exp, the difference is taken relative to at least 1. Infinities must be at the same places: a row that
    sees nothing has -inf.

    Args:
        got: Outputs of the kernel, one array or several.
    """
    found = 0.0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        if np.isnan(a).any() or (np.isinf(a) != np.isinf(b)).any():
            return float("inf")
        a, b = np.where(np.isinf(a), 0, a), np.where(np.isinf(b), 0, b)
        if a.ndim == 3:
            error = np.abs(a - b) / np.maximum(np.abs(b), 1.0)
        else:
            norm = np.linalg.norm(b, axis=-1)
            typical = float(np.sqrt((norm**2).mean()))
            error = np.linalg.norm(a - b, axis=-1) / np.maximum(norm, max(typical / 20, 1e-30))
        found = max(found, float(error.max()))
    return found


def decoded(args: Row, stage: Stage) -> Iterator[Row]:
    """Decodes the same canvas twice with a model of random weights.

    Args:
        args: `model`, and its `layers`.
    """
    from mercury_jax.bench.gpu.profile import find

    source = find(args["model"])
    source = source._replace(config=dataclasses.replace(source.config, layers=args["layers"]))
    lm = endless(abstract_params.random_lm(source))
    c = lm.model.config
    stage("decoding twice")
    how: Any = dict(sampler=rules.confidence(), plan=Plan(block=c.block, steps=8), max_tokens=c.block, seed=0)
    prompt = list(range(c.vocab // 4, c.vocab // 4 + 32))
    yield {"tokens": [np.asarray(mj.sample(lm, prompt, **how).tokens).tolist() for _ in range(2)]}


def graphs(args: Row, stage: Stage) -> Iterator[Row]:
    """Checks that a loop decodes the same tokens as a CUDA graph, at each of two calls, as without.

    Args:
        args: As of `decoded`. The process has `compilation.GRAPH_FLAGS`; another one, which it starts, has not.
    """
    [with_graphs] = decoded(args, stage)
    stage("decoding without graphs")
    env = os.environ | {"XLA_FLAGS": os.environ.get("XLA_FLAGS", "").replace(GRAPH_FLAGS, "")}
    line = json.dumps({"module": __name__, "work": "decoded", "args": args}) + "\n"
    command = [sys.executable, "-m", "mercury_jax.bench.gpu.runner"]
    done = subprocess.run(command, input=line, capture_output=True, text=True, env=env)
    rows = [json.loads(answer).get("row") for answer in done.stdout.splitlines()]
    without = next((row["tokens"][0] for row in rows if row), None)
    if without is None:
        raise RuntimeError(f"nothing was decoded without graphs: {(done.stdout or done.stderr)[-400:]}")
    wrong = [n + 1 for n, tokens in enumerate(with_graphs["tokens"]) if tokens != without]
    yield {"passed": False, "why": f"call {wrong[0]} decoded other tokens"} if wrong else {"passed": True}


def sanitizer(args: Row, stage: Stage) -> Iterator[Row]:
    """Runs NVIDIA's memory checker over some small cases, with a separate allocation for each buffer.

    Args:
        args: `cases`, each with `work` and `args`.
    """
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if tool is None:
        yield {"left_out": "compute-sanitizer is not installed here"}
        return
    stage("running compute-sanitizer, memcheck")
    lines = "".join(json.dumps(case) + "\n" for case in args["cases"])
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        command = [tool, "--tool", "memcheck", "--print-limit", "5", "--log-file", str(log)]
        done = subprocess.run(
            [*command, sys.executable, "-m", "mercury_jax.bench.gpu.runner"],
            input=lines, capture_output=True, text=True, env=os.environ | {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"},
        )  # fmt: skip
        report = log.read_text(errors="replace") if log.is_file() else ""
    summary = [line.strip("= ") for line in report.splitlines() if "ERROR SUMMARY" in line]
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    right = sum(bool(x["row"].get("passed")) for x in answers if "row" in x)
    row = {"tool": "memcheck", "summary": summary, "cases": len(args["cases"]), "right": right}
    if not summary:
        row |= {"left_out": f"it reported nothing: {(report or done.stderr)[-300:].strip()}"}
    elif all("0 errors" in line for line in summary):
        row |= {"passed": True}
    else:
        row |= {"passed": False, "why": "memcheck found errors", "log": report[:1500]}
    yield row | {"code": done.returncode}
