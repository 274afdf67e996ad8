"""`mercury bench compile`: compiles programs for a chip that is not here, in a process of its own.

The parent process checks the request, starts a child, `python -m mercury_jax.bench.compile program|kernels ARGUMENT
OUT.json`, passes on what it is doing, and reads the report of ptxas from what it prints. The child calls `bench.aot` or
`bench.compile_kernels`. There is one child for each chip: the state of one compiler misleads the next (an H200's after
a B200's accepted kernels that it should refuse).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mercury_jax.bench import chips, hlo
from mercury_jax.bench.aot import PROGRAMS, CompileRequest, compile_program
from mercury_jax.config import at_least, refuse

# Environment of the child process: it looks for no accelerator and uses no cache of programs.
ENV = {
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # the CUDA plugin would ask the driver, which is missing, for its version
    "TPU_SKIP_MDS_QUERY": "1",  # libtpu would ask a cloud's metadata server for its topology
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no device is opened, so several processes may compile at once
    "TF_CPP_MIN_LOG_LEVEL": "3",
    **hlo.PTXAS_ENV,
}
# XLA flags of the compiler for this machine; libtpu ends the process for a flag that it does not know.
HOST_FLAGS = ("--xla_cpu", "--xla_force_host", "--xla_backend", "--xla_llvm")

Stage = Callable[[str], None]  # called with what is being done


class CompilerFailed(RuntimeError):
    """The compiling process ended without a result."""

    exit_code = 1


def compile_for(request: CompileRequest, stage: Stage = lambda text: None) -> dict[str, Any]:
    """Compiles a program for a chip that is not here.

    Args:
        request: What to compile.
        stage: Called with what is being done.

    Returns:
        The record of `aot.compile_program`, with the registers and spills of its GPU kernels as `kernels`.

    Raises:
        ValueError: A bad request, or a plugin that is not installed; where possible before anything is compiled.
        CompilerFailed: The process ended without a result.
    """
    check(request)
    record, printed = _child("program", json.dumps(request._asdict()), request.target, stage)
    if "kernels" not in record:
        record["kernels"] = hlo.gpu_kernels(printed)
    return record


def compile_all_kernels(target: str, stage: Stage = lambda text: None) -> list[dict[str, Any]]:
    """Compiles every form of each of our Pallas kernels for a GPU.

    Args:
        target: As `chips.target` takes it.
        stage: Called with what is being done.

    Returns:
        The records of `compile_kernels.compile_forms`.

    Raises:
        ValueError: The target is no GPU, or its plugin is not installed.
    """
    found = chips.target(target).chip
    if found.platform != "cuda":
        names = [one.name for one in chips.ALL.values() if one.platform == "cuda"]
        raise refuse("--for", target, f"{', '.join(names)}: the compilers of other chips report no registers")
    if (missing := chips.missing(found)) is not None:
        raise ValueError(missing)
    return _child("kernels", target, target, stage)[0]["kernels"]


def check(request: CompileRequest) -> None:
    """Refuses what can be refused without compiling. ValueError names the option and what is allowed.

    Raises:
        ValueError: An unknown target, program or mesh, a size below 1, or a missing plugin.
    """
    target = chips.target(request.target)
    if request.what not in PROGRAMS:
        raise refuse("--what", request.what, ", ".join(PROGRAMS))
    chips.mesh_sizes(request.mesh)
    for name in ("context", "batch"):
        if getattr(request, name) is not None:
            at_least(1, **{f"--{name}": getattr(request, name)})
    if request.quantise is not None and request.what == "train":
        allowed = "no value with --what train: parameters are trained in fp32"
        raise refuse("--quantise", request.quantise, allowed)
    if (missing := chips.missing(target.chip)) is not None:
        raise ValueError(missing)


def _child(work: str, argument: str, target: str, stage: Stage) -> tuple[dict[str, Any], str]:
    """Runs `main` in a process of its own: (the record it wrote, all that was printed). ValueError for what it
    refuses."""
    flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if not f.startswith(HOST_FLAGS)]
    lines: list[str] = []  # of standard error, without the stages
    with tempfile.TemporaryDirectory() as folder:
        out, printed = Path(folder, "out.json"), Path(folder, "printed.txt")
        with printed.open("wb") as sink:
            child = subprocess.Popen(
                [sys.executable, "-m", "mercury_jax.bench.compile", work, argument, str(out)], stdout=sink,
                stderr=subprocess.PIPE, env={**os.environ, **ENV, "XLA_FLAGS": " ".join(flags)}, text=True,
                errors="replace",
            )  # fmt: skip
            try:
                for line in child.stderr or ():
                    name, _, about = line.rstrip().partition("stage: ")
                    if about and not name:
                        stage(about)
                    else:
                        lines.append(line.rstrip())
                code = child.wait()
            finally:
                child.kill()
                child.wait()
        record = json.loads(out.read_text(encoding="utf-8")) if out.exists() else None
        text = printed.read_text(encoding="utf-8", errors="replace")
    if record is None:
        last = "\n".join(lines[-3:])
        raise CompilerFailed(
            f"the process that compiles for {target} ended with code {code}\n{last}".rstrip()
        )
    if "refused" in record:
        raise ValueError(record["refused"])
    return record, "\n".join([text, *lines])


def main(argv: list[str]) -> int:
    """Compiles in this process and writes the record; of a bad request the reason as `refused`.

    Args:
        argv: "program" and a request in JSON, or "kernels" and a target; then the file to write.

    Returns:
        The exit code: 2 for a bad request.
    """
    work, argument, out = argv
    try:
        if work == "kernels":
            from mercury_jax.bench.compile_kernels import compile_forms

            record: dict[str, Any] = {"kernels": compile_forms(argument)}
        else:
            record = compile_program(CompileRequest(**json.loads(argument)))
    except (ValueError, FileNotFoundError) as error:
        record = {"refused": str(error)}
    Path(out).write_text(json.dumps(record), encoding="utf-8")
    return 2 if "refused" in record else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
