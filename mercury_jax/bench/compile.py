"""Compile a program for a chip that is not here, in a process of its own, and tell what it needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mercury_jax.bench import chips, ptxas
from mercury_jax.bench.ahead import WHAT, Ask, sizes
from mercury_jax.config import at_least, refuse

# What the child needs: no accelerator is looked for, nothing is taken from or left in a cache of programs.
ENV = {
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # else the plugin asks the missing driver for its version
    "TPU_SKIP_MDS_QUERY": "1",  # and libtpu a cloud's metadata server for its place
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    **ptxas.ENV,
}


class Failed(RuntimeError):
    """The compiling process ended without a result."""

    exit_code = 1


def compiled(ask: Ask, stage: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """The record of `compile_worker`, with the registers and spills of its kernels; `stage` is told what is done.

    Raises ValueError, before anything is compiled, for what does not fit or a plugin that is not installed.
    """
    check(ask)
    with tempfile.TemporaryDirectory() as folder:
        out, printed = Path(folder, "out.json"), Path(folder, "printed.txt")
        code, words = _run(ask, out, printed, stage)
        record = json.loads(out.read_text(encoding="utf-8")) if out.exists() else None
        told = printed.read_text(encoding="utf-8", errors="replace")
    if record is None:
        last = "\n".join(words[-3:])
        raise Failed(f"the process that compiles for {ask.target} ended with code {code}\n{last}".rstrip())
    if "refused" in record:
        raise ValueError(record["refused"])
    if "kernels" not in record:
        record["kernels"] = kernels(record["calls"], ptxas.kernels("\n".join([told, *words])))
    return record


def check(ask: Ask) -> None:
    """Refuse in words what can be told without compiling."""
    target = chips.target(ask.target)
    if ask.what not in WHAT:
        raise refuse("--what", ask.what, ", ".join(WHAT))
    sizes(ask.mesh)
    for name in ("context", "batch"):
        if getattr(ask, name) is not None:
            at_least(1, **{f"--{name}": getattr(ask, name)})
    if ask.quantise is not None and ask.what == "train":
        raise refuse("--quantise", ask.quantise, "nothing with --what train: parameters are trained in fp32")
    absent = chips.missing(target.chip)
    if absent:
        raise ValueError(absent)


def kernels(calls: dict[str, int], found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Pallas kernels: those of Mosaic GPU with their registers and spills, a TPU's by their number."""
    tpu = calls.get("tpu_custom_call", 0)
    return [*found, *([{"name": "tpu_custom_call", "count": tpu}] if tpu else [])]


def _run(ask: Ask, out: Path, printed: Path, stage: Callable[[str], None]) -> tuple[int, list[str]]:
    """(exit code, lines of standard error); what a compiler prints goes into a file."""
    words: list[str] = []
    command = [sys.executable, "-m", "mercury_jax.bench.compile_worker", json.dumps(ask._asdict()), str(out)]
    with printed.open("wb") as sink:
        child = subprocess.Popen(
            command,
            stdout=sink,
            stderr=subprocess.PIPE,
            env={**os.environ, **ENV},
            text=True,
            errors="replace",
        )
        try:
            for line in child.stderr or ():
                name, _, about = line.rstrip().partition("stage: ")
                if about and not name:
                    stage(about)
                else:
                    words.append(line.rstrip())
            return child.wait(), words
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
