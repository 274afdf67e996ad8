"""One look at an accelerator in some minutes: its own ceilings, then kernels, models and training against them.

What is measured runs in a process of its own, which is given up where it says nothing for long: a kernel that
hangs, or that brings the driver down, costs its own row and no other.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, NamedTuple

from mercury_jax.bench import gpu_attention, gpu_models, gpu_peer, gpu_training
from mercury_jax.bench.ceilings import Ceilings
from mercury_jax.bench.gpu_models import Running
from mercury_jax.config import refuse

Row = dict[str, Any]
PATIENCE = (
    180.0  # seconds without a word, after which a process is given up; compiling the 26B takes one of them
)
# Loops as command buffers: XLA's own choice (without WHILE and CONDITIONAL), with both of them.
LOOPS = (
    "--xla_gpu_enable_command_buffer="
    "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL"
)
ROOM = (("XLA_PYTHON_CLIENT_PREALLOCATE", "false"),)  # so that torch finds memory beside JAX


class Unmeasured(RuntimeError):
    """The device did not get as far as its ceilings."""

    exit_code = 1


class Step(NamedTuple):
    """One thing to measure. kernels: with ours. env: what its process has beside ours, a process of its own."""

    name: str
    run: Callable[[Ceilings], Iterator[Row]]
    kernels: bool = True
    env: tuple[tuple[str, str], ...] = ()


GEMMA = Running("diffusiongemma-26b-a4b")
SOON = (GEMMA, GEMMA._replace(quantise="int8"), Running("mercury-100m"))
LATER = (
    Running("mercury-100m", batch=64), Running("llada-8b", prefix=256), Running("llada-8b", "int8", prefix=256),
    GEMMA._replace(batch=4), GEMMA._replace(quantise="int8", prefix=32000),
)  # fmt: skip
TRAINED = (("mercury-100m", 32), ("mercury-350m", 16), ("mercury-1b", 8))
SMALL = (Running("nano", prefix=64), Running("nano", "int8", prefix=64))
SMALL_SHAPES = [
    gpu_attention.Shape("canvas 32 over 320, batch 2, heads 4/2 of 64", 2, 32, 320, 4, 2, 64),
    gpu_attention.Shape("prefill 256, heads 4/2 of 64", 1, 256, 256, 4, 2, 64, causal=True),
]


def steps(small: bool = False, only: Sequence[str] = ()) -> list[Step]:
    """What is measured, the most wanted first. only: parts of names; those without any of them are left out."""
    if small:
        once = [_decoding(m, turns=1) for m in SMALL]
        found = [*once, *map(_attention, SMALL_SHAPES), _training("nano", 2, 128, turns=1)]
    else:
        shapes = gpu_attention.table()
        first = [s for s in shapes if s.batch == 1 and not s.causal]
        found = [
            *map(_decoding, SOON), *map(_attention, first), *(_training(*t) for t in TRAINED),
            *map(_attention, [s for s in shapes if s not in first]), *map(_decoding, LATER),
            *(_decoding(m)._replace(kernels=False) for m in SOON[:2]),
            *(_decoding(m)._replace(env=(("XLA_FLAGS", LOOPS),)) for m in SOON[1:]),
            Step(f"peer {GEMMA.name}", lambda most: iter([gpu_peer.peer(GEMMA)]), env=ROOM),
        ]  # fmt: skip
    chosen = [s for s in found if not only or any(part in s.name for part in only)]
    if not chosen:
        raise refuse("--only", list(only), f"parts of names: {', '.join(sorted({s.name for s in found}))}")
    return chosen


def _decoding(asked: Running, turns: int = 5) -> Step:
    named = ("batch", "prefix") if asked.batch > 1 else ("prefix",)
    more = [asked.quantise, *(f"{n} {getattr(asked, n)}" for n in named)]
    name = " ".join(["decoding", asked.name, *(x for x in more if x)])
    return Step(name, lambda most: iter([gpu_models.decoding(most, asked, turns)]))


def _attention(shape: gpu_attention.Shape) -> Step:
    return Step(f"attention {shape.name}", lambda most: gpu_attention.measure(most, [shape]))


def _training(name: str, rows: int, row: int = 2048, turns: int = 5) -> Step:
    return Step(f"training {name}", lambda most: iter([gpu_training.training(most, name, rows, row, turns)]))


def measure(
    small: bool = False, minutes: float = 8.0, only: Sequence[str] = (), patience: float = PATIENCE
) -> Iterator[Row]:
    """JSON-ready rows as they are measured; the first has the ceilings. small: what a laptop can do in a minute.

    Behind `minutes` nothing new begins; what was left out has a row that says so. A model or kernel that fails, for
    memory or else, or is silent for `patience` seconds, has a row with the reason, and the others are measured.
    """
    todo, began, at, most, ours = steps(small, only), time.monotonic(), 0, None, None
    while at < len(todo):
        end = next((i for i in range(at, len(todo)) if todo[i].env != todo[at].env), len(todo))
        left = 60 * minutes - (time.monotonic() - began)
        asked = {"small": small, "only": list(only), "from": at, "to": end, "seconds": left, "most": most}
        command = [sys.executable, "-m", "mercury_jax.bench.gpu_worker", json.dumps(asked)]
        for told in words(command, patience, dict(todo[at].env)):
            if "row" in told:
                row = told["row"]
                most = row if row["experiment"] == "ceilings" else most
                ours = row["seconds_per_forward"] if _same(row) else ours
                yield row | (
                    {"times_as_fast": row["seconds_per_forward"] / ours} if ours and _peers(row) else {}
                )
            elif "failed" in told:
                if most is None:
                    raise Unmeasured(f"the device could not be measured: {told['failed']}")
                yield _about(most) | {"experiment": todo[at].name, "failed": told["failed"]}
            at = told.get("at", at)
            at += "failed" in told


def _peers(row: Row) -> bool:
    return row["experiment"] == "peer" and "seconds_per_forward" in row


def _same(row: Row) -> bool:
    """Whether a row has our time of what the peer does: the model in bf16, with all that we have."""
    how = {
        "experiment": "decoding",
        "model": GEMMA.name,
        "quantise": None,
        "batch": 1,
        "kernels": True,
        "env": [],
    }
    return "seconds_per_forward" in row and how.items() <= row.items()


def _about(most: Row) -> Row:
    return {name: most[name] for name in ("hardware", "platform", "devices", "jax", "date")}


def words(command: Sequence[str], patience: float, env: dict[str, str]) -> Iterator[Row]:
    """Objects that a process writes, one a line; {"failed": why} last where it is silent for long, or breaks."""
    flags = " ".join(x for x in (os.environ.get("XLA_FLAGS", ""), env.pop("XLA_FLAGS", "")) if x)
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=said, text=True, start_new_session=True,
            env=os.environ | env | ({"XLA_FLAGS": flags} if flags else {}),
        )  # fmt: skip
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=_fill, args=(child.stdout, lines), daemon=True).start()
        try:
            while (line := lines.get(timeout=patience)) is not None:
                if line.startswith("{"):
                    yield json.loads(line)
            if code := child.wait(patience):
                said.seek(0)
                yield {"failed": f"its process ended with code {code}: {said.read()[-400:].strip()}"}
        except (queue.Empty, subprocess.TimeoutExpired):
            yield {"failed": f"silent for {patience:g} s, and given up"}
        finally:
            child.kill()
            child.wait()


def _fill(source: IO[str] | None, lines: queue.Queue[str | None]) -> None:
    for line in source or ():
        lines.put(line)
    lines.put(None)
