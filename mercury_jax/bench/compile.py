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
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no device is opened: several may compile at once
    "TF_CPP_MIN_LOG_LEVEL": "3",
    **ptxas.ENV,
}


HOST = ("--xla_cpu", "--xla_force_host", "--xla_backend", "--xla_llvm")  # of what compiles for this machine


def flags() -> str:
    """XLA_FLAGS without those of the host: what is compiled is for others, and libtpu ends where it knows one not."""
    return " ".join(f for f in os.environ.get("XLA_FLAGS", "").split() if not f.startswith(HOST))


class Failed(RuntimeError):
    """The compiling process ended without a result."""

    exit_code = 1


def compiled(ask: Ask, stage: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """The record of `compile_worker`, with the registers and spills of its kernels; `stage` is told what is done.

    Raises ValueError, before anything is compiled, for what does not fit or a plugin that is not installed.
    """
    check(ask)
    record, told = _child("compile_worker", json.dumps(ask._asdict()), ask.target, stage)
    if "kernels" not in record:
        record["kernels"] = ptxas.kernels(told)
    return record


def kernels(target: str, stage: Callable[[str], None] = lambda text: None) -> list[dict[str, Any]]:
    """The records of `compile_kernels`: every form of each of our kernels for a GPU, compiled for it.

    Raises ValueError where the target is none, or its plugin is not installed.
    """
    found = chips.target(target).chip
    if found.platform != "cuda":
        names = [one.name for one in chips.ALL.values() if one.platform == "cuda"]
        raise refuse("--for", target, f"{', '.join(names)}: of other chips no compiler tells registers")
    absent = chips.missing(found)
    if absent:
        raise ValueError(absent)
    return _child("compile_kernels", target, target, stage)[0]["kernels"]


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


def _child(
    module: str, argument: str, target: str, stage: Callable[[str], None]
) -> tuple[dict[str, Any], str]:
    """(what a worker wrote, all that was printed); ValueError for what it refuses."""
    with tempfile.TemporaryDirectory() as folder:
        out, printed = Path(folder, "out.json"), Path(folder, "printed.txt")
        command = [sys.executable, "-m", f"mercury_jax.bench.{module}", argument, str(out)]
        code, words = _run(command, printed, stage)
        record = json.loads(out.read_text(encoding="utf-8")) if out.exists() else None
        told = printed.read_text(encoding="utf-8", errors="replace")
    if record is None:
        last = "\n".join(words[-3:])
        raise Failed(f"the process that compiles for {target} ended with code {code}\n{last}".rstrip())
    if "refused" in record:
        raise ValueError(record["refused"])
    return record, "\n".join([told, *words])


def _run(command: list[str], printed: Path, stage: Callable[[str], None]) -> tuple[int, list[str]]:
    """(exit code, lines of standard error); what a compiler prints goes into a file."""
    words: list[str] = []
    with printed.open("wb") as sink:
        child = subprocess.Popen(
            command,
            stdout=sink,
            stderr=subprocess.PIPE,
            env={**os.environ, **ENV, "XLA_FLAGS": flags()},
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
