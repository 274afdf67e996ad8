"""The child of `mercury bench compile kernels`: compiles every kernel for one chip, and writes what ptxas says of it.

python -m mercury_jax.bench.compile_kernels CHIP OUT.json. All in one process, and one process for each chip.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mercury_jax.bench import chips, ptxas
from mercury_jax.bench.compile_worker import say
from mercury_jax.bench.kernel_cases import FALLBACK, Case, cases


def work(name: str) -> list[dict[str, Any]]:
    """A record for each form of each kernel.

    {kernel, shape} with what `ptxas.kernels` says, or with why there is no such form and what runs instead.
    """
    target = chips.target(name)
    say(f"describing {name}")
    device = NamedSharding(Mesh(np.array(target.describe().devices[:1]), ("one",)), PartitionSpec())
    found, todo = [], cases(target.chip.kernels)
    for n, case in enumerate(todo, start=1):
        say(f"{case.kernel} {n} of {len(todo)}: {case.shape}")
        found.append({"kernel": case.kernel, "shape": case.shape} | _one(case, device))
    return found


def _one(case: Case, device: NamedSharding) -> dict[str, Any]:
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), case.args)
    try:
        lowered = jax.jit(case.run).lower(*args)
    except ValueError as error:
        return {"refused": str(error), "fallback": FALLBACK[case.kernel]}
    with printed() as read:
        lowered.compile()
        told = ptxas.kernels(read())
    if not told:
        raise RuntimeError(f"ptxas says nothing of {case.kernel}, {case.shape}")
    return max(told, key=lambda row: (row["spill_bytes"], row["registers"]))  # of a gradient, two


@contextlib.contextmanager
def printed() -> Iterator[Callable[[], str]]:
    """What code that is not Python's writes to standard output and error, given by a function."""
    libc = ctypes.CDLL(None)
    with tempfile.TemporaryFile() as sink:
        kept = {fd: os.dup(fd) for fd in (1, 2)}
        for stream in (sys.stdout, sys.stderr):
            stream.flush()

        def read() -> str:
            libc.fflush(None)
            sink.seek(0)
            return sink.read().decode(errors="replace")

        try:
            for fd in kept:
                os.dup2(sink.fileno(), fd)
            yield read
        finally:
            libc.fflush(None)
            for fd, old in kept.items():
                os.dup2(old, fd)
                os.close(old)


def main(argv: list[str]) -> int:
    """Exit code 2 with words for what the caller got wrong."""
    try:
        record: dict[str, Any] = {"kernels": work(argv[0])}
    except ValueError as error:
        record = {"refused": str(error)}
    Path(argv[1]).write_text(json.dumps(record), encoding="utf-8")
    return 2 if "refused" in record else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
