"""The child of `mercury bench compile`: compiles one program for one chip, and writes what it found.

python -m mercury_jax.bench.compile_worker ASK.json OUT.json. A process of its own for each chip: one compiler's
state misleads the next (an H200's after a B200's took kernels that it should refuse).
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from mercury_jax.bench import ahead, chips, hlo, weightless

FULL = re.compile(r"Used ([\d.]+)([KMG]) of ([\d.]+)([KMG]) \w+", re.ASCII)
UNIT = {"K": 2**10, "M": 2**20, "G": 2**30}


def say(stage: str) -> None:
    """What is being done, for the parent's progress line."""
    print(f"stage: {stage}", file=sys.stderr, flush=True)


def work(ask: ahead.Ask) -> dict[str, Any]:
    """The record of one program: memory, FLOPs, collectives, calls, the roofline."""
    target = chips.target(ask.target)
    say(f"describing {ask.target}")
    found = weightless.source(ask.model, ask.dtype)
    say(f"tracing {ask.what} of {found.name}")
    made = ahead.lower(ask, found, target)
    record = {
        "model": found.name, "for": ask.target, "what": ask.what, "chip": target.chip.label, "devices": target.devices,
        "mesh": {name: size for name, size in made.mesh.shape.items() if size > 1}, "context": made.context,
        "batch": made.rows, "dtype": found.config.dtype, "quantise": ask.quantise, "per": made.per,
        "layers": found.config.layers, "jax": jax.__version__, "memory": int(target.chip.memory),
    }  # fmt: skip
    say(f"compiling for {target.chip.label}")
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            compiled = made.lowered.compile(compiler_options=options(target.chip, folder))
        except jax.errors.JaxRuntimeError as error:
            return record | too_large(str(error))
        record["compile_seconds"] = round(time.perf_counter() - began, 2)
        say("reading the program")
        program = text(compiled, Path(folder))
    return record | measured(compiled, target.chip, found.config.dtype, ask.what, program)


def options(chip: chips.Chip, folder: str) -> dict[str, Any] | None:
    """Of the compiler: a TPU's leaves the program in `folder`, as text."""
    return {"xla_dump_to": folder, "xla_dump_hlo_as_text": True} if chip.platform == "tpu" else None


def text(compiled: Any, folder: Path) -> str:
    """The optimized program.

    A libtpu may write what a jaxlib older than it cannot read back; then it is what the compiler left in `folder`.
    """
    try:
        return compiled.as_text()
    except jax.errors.JaxRuntimeError:
        left = sorted(folder.glob("*.after_codegen.txt"), key=lambda path: path.stat().st_size)
        if not left:
            raise
        return left[-1].read_text(encoding="utf-8")


def too_large(told: str) -> dict[str, Any]:
    """The record of a program that a TPU's compiler refuses for its memory; other failures are raised again."""
    found = FULL.search(told)
    if "RESOURCE_EXHAUSTED" not in told or found is None:
        raise ValueError(f"the compiler refuses the program: {told.splitlines()[0][:400]}")
    used, room = (float(n) * UNIT[u] for n, u in ((found[1], found[2]), (found[3], found[4])))
    nothing = {"temp_bytes": None, "flops": None, "collectives": {}, "kernels": [], "roofline": None}
    return {"bytes_per_device": int(used), "memory": int(room), "fits": False, **nothing}


def measured(
    compiled: Any, chip: chips.Chip, dtype: str, what: str, program: str | None = None
) -> dict[str, Any]:
    """What a compiled program says of itself, for one device. program: its text, where that is known."""
    module = hlo.parse(compiled.as_text() if program is None else program)
    memory = compiled.memory_analysis()
    given, made = memory.argument_size_in_bytes, memory.output_size_in_bytes
    total = given + memory.temp_size_in_bytes + made - memory.alias_size_in_bytes
    cost = compiled.cost_analysis() or {}
    flops = float(cost.get("flops") or hlo.products(module))
    moved = given + (made if what == "train" else 0)
    kernels = {"kernels": hlo.kernels(module)} if chip.platform == "tpu" else {}  # of a GPU, ptxas tells
    return kernels | {
        "bytes_per_device": total, "temp_bytes": memory.temp_size_in_bytes, "argument_bytes": given,
        "output_bytes": made, "aliased_bytes": memory.alias_size_in_bytes, "fits": total <= chip.memory,
        "flops": flops, "collectives": hlo.collectives(module), "calls": dict(hlo.calls(module)),
        "largest": hlo.largest(module), "roofline": roofline(chip, dtype, flops, moved),
    }  # fmt: skip


def roofline(chip: chips.Chip, dtype: str, flops: float, moved: float) -> dict[str, Any]:
    """Seconds that the chip's datasheet allows: to move so many bytes, to do so many FLOPs, the larger of both."""
    rate = chip.flops32 if dtype in ("float32", "float64") else chip.flops
    memory, compute = moved / chip.bandwidth, flops / rate
    return {
        "bytes": moved, "memory_seconds": memory, "compute_seconds": compute, "seconds": max(memory, compute),
        "bound": "memory" if memory >= compute else "compute",
    }  # fmt: skip


def main(argv: list[str]) -> int:
    """Exit code 2 with words for what the caller got wrong."""
    ask = ahead.Ask(**json.loads(argv[0]))
    try:
        record = work(ask)
    except (ValueError, FileNotFoundError) as error:
        record = {"refused": str(error)}
    Path(argv[1]).write_text(json.dumps(record), encoding="utf-8")
    return 2 if "refused" in record else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
