"""`python -m benchmarks.gpu speed | model`: how fast kernels and whole models are on a GPU, beside what others offer.

  speed   attention and grouped products beside cuDNN and XLA, as shares of the measured roofline; then a 100M model
          with kernels and CUDA graphs on and off
  model   the 26B: a slice with kernels against without, int8, bf16, beside transformers; then training

Runs cases as `mercury bench gpu` does, in child processes and within a budget, and writes the same rows. Kernels that
`mercury bench gpu check` did not pass are not timed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from mercury_jax.bench.gpu.commands import BF16, GEMMA, GRAPHS, INT8, MODEL_100M, matching, measure_device
from mercury_jax.bench.gpu.runner import GpuCase, Row, Runner
from mercury_jax.cli.bench_gpu import report

KERNELS, MODELS = "benchmarks.gpu_kernels", "benchmarks.gpu_models"  # modules of the cases
OFF = ("MERCURY_KERNELS", "0")
PLAIN, LOOPS = "kernels off", "loops as graphs"  # in the names of cases with OFF and GRAPHS

# Calls of attention that `speed` times: heads of DiffusionGemma's local and global layers, and of LLaDA.
_LOCAL, _GLOBAL, _LLADA = dict(h=16, g=8, width=256), dict(h=16, g=2, width=512), dict(h=32, g=8, width=128)
SHAPES = [
    dict(b=1, t=256, s=1024) | _LOCAL, dict(b=1, t=256, s=8192) | _LOCAL,
    dict(b=1, t=256, s=8192) | _LOCAL | {"int8": True}, dict(b=1, t=256, s=8192) | _GLOBAL,
    dict(b=1, t=32, s=1024) | _LLADA, dict(b=1, t=32, s=8192) | _LLADA,
    dict(b=8, t=256, s=1024) | _LOCAL, dict(b=8, t=32, s=1024) | _LLADA,
    dict(b=1, t=256, s=1024, h=12, g=4, width=64), dict(b=1, t=4096, s=4096) | _LLADA | {"causal": True},
    dict(b=8, t=2048, s=2048, h=12, g=4, width=64, causal=True, gradient=True),
    dict(b=2, t=4096, s=4096) | _LLADA | {"causal": True, "gradient": True},
]  # fmt: skip
SMALL_SHAPES = [
    dict(b=1, t=32, s=320, h=4, g=2, width=64),
    dict(b=1, t=256, s=256, h=4, g=2, width=64, causal=True),
    dict(b=1, t=256, s=256, h=4, g=2, width=64, causal=True, gradient=True),
]


def measure(runner: Runner, command: str, *, small: bool = False, only: Sequence[str] = ()) -> Iterator[Row]:
    """Times kernels (`speed`) or whole models (`model`).

    Args:
        runner: Runs the cases within its budget.
        command: "speed" or "model".
        small: Small shapes and models, for a machine without a GPU.
        only: Parts of names of cases.

    Yields:
        A row for each case. `times_as_fast` compares with the fastest other implementation of the same shape, or with
        transformers.

    Raises:
        ValueError: No case has such a name.
        Unmeasured: The device failed before its roofline was measured.
    """
    rows, first = measure_device(runner, command, small)
    yield from rows
    best: dict[str, float] = {}  # shape -> seconds of the fastest other implementation
    ours = None  # seconds of a pass of the model without quantisation
    cases = {"speed": speed_cases, "model": model_cases}[command]
    for case in matching(cases(small), only):
        for row in runner.run(case):
            row = with_shares(row, first)
            if "seconds" in row and "way" in row:
                shape = repr(row["shape"])
                if row["way"] != "ours":
                    best[shape] = min(best.get(shape, row["seconds"]), row["seconds"])
                elif shape in best:
                    row["times_as_fast"] = best[shape] / row["seconds"]
            if case.work == "decoding" and row.get("quantise") is None:
                ours = row.get("seconds_per_forward", ours)
            if case.work == "transformers" and ours and "seconds_per_forward" in row:
                row["times_as_fast"] = row["seconds_per_forward"] / ours
            yield first["same"] | {"case": case.name} | row


def with_shares(row: Row, first: Row) -> Row:
    """The row with its seconds as a share of what the measured roofline allows."""
    seconds = row.get("seconds_per_forward", row.get("seconds"))
    if seconds is None or "flops" not in row:
        return row
    arithmetic = row["flops"] / first["flops_per_second"]
    if "bytes" not in row:
        return row | {"mfu": arithmetic / seconds}
    least = max(arithmetic, row["bytes"] / first["bytes_per_second"])
    return row | {"least_seconds": least, "share_of_bound": least / seconds}


def speed_cases(small: bool = False) -> list[GpuCase]:
    """Attention and grouped products beside cuDNN and XLA; a model with kernels and CUDA graphs on and off."""
    todo: list[tuple[str, dict[str, Any], str]] = []
    for shape in SMALL_SHAPES if small else SHAPES:
        # cuDNN and XLA read no int8 keys; blockwise attention is what training falls back to.
        others = ("blockwise",) * shape.get("gradient", False) + ("cudnn", "xla") * (not shape.get("int8"))
        todo += [("attention", shape, way) for way in (*others, "ours")]
    product = (
        dict(rows=90, experts=10, width=64, inner=64)
        if small
        else dict(rows=2048, experts=128, width=2816, inner=704)
    )
    kinds = {BF16: ("ragged_dot", "tiles", "ours"), INT8: ("tiles", "ours")}
    routings = ("skewed",) if small else ("even", "random", "skewed")
    for (dtype, ways), routing in itertools.product(kinds.items(), routings):
        # XLA's ragged_dot multiplies every row by every expert: its time does not depend on the routing.
        some = [way for way in ways if way != "ragged_dot" or routing == routings[-1]]
        todo += [("grouped", product | {"dtype": dtype, "routing": routing}, way) for way in some]
    found = []
    for work, shape, way in todo:
        name = " ".join([work, *(f"{k}={v}" for k, v in shape.items())]) + f", {way}"
        found.append(GpuCase(name, f"time_{work}", {"shape": shape, "way": way}, limit=60.0, module=KERNELS))
    model = "tiny" if small else MODEL_100M
    args = {"model": model, "batch": 1, "prefix": 64 if small else 1024, "turns": 3 if small else 5}
    # On a CPU there are no graphs, and its XLA does not know the flag.
    for kernels, graphs in itertools.product((True, False), (False,) if small else (False, True)):
        name = f"decoding {model}, {'kernels on' if kernels else PLAIN}, {LOOPS if graphs else 'loops as XLA chooses'}"
        found.append(_model_case(name, "decoding", args, 100.0, least=20.0, alone=not small))
    return found


def model_cases(small: bool = False) -> list[GpuCase]:
    """A slice of the 26B model with kernels and without, the whole model, transformers beside it, then training."""
    name, prefix = ("tiny", 64) if small else (GEMMA, 1024)
    kinds = (INT8,) if small else (INT8, "fp8_dynamic", None)
    todo: list[tuple[str, str, dict[str, Any], float]] = []
    slices = [
        (
            f"logits of a slice of {name}, {kind or BF16}", "slice_logits",
            {"model": name, "quantise": kind, "layers": 2 if small else 4}, 150.0,
        )
        for kind in kinds
    ]  # fmt: skip
    todo.append(slices[0])
    for kind in kinds:
        args = {"model": name, "quantise": kind, "batch": 1, "prefix": prefix, "turns": 3}
        todo.append((f"decoding {name}, {kind or BF16}", "decoding", args, 240.0))
        long = args | {"prefix": 64 if small else 256, "tokens": 64 if small else 1024}
        todo.append((f"decoding {name}, {kind or BF16}, {long['tokens']} tokens", "decoding", long, 240.0))
        if not small:
            todo.append((f"decoding {name}, {kind or BF16}, {LOOPS}", "decoding", args, 240.0))
    args = {"model": name, "prefix": prefix, "device": "cpu" if small else "cuda"}
    todo.append((f"transformers, {name}", "transformers", args, 150.0))
    trained = ((MODEL_100M, 32, 2048), ("mercury-350m", 16, 2048), ("mercury-1b", 8, 2048))
    for model, rows, row in (("tiny-causal", 2, 128),) if small else trained:
        args = {"model": model, "rows": rows, "row": row, "turns": 1 if small else 5}
        todo.append((f"training {model}, {rows} x {row}", "training", args, 120.0))
        if model == MODEL_100M:
            todo.append((f"training {model}, {rows} x {row}, {PLAIN}", "training", args, 120.0))
    least = 10.0 if small else 30.0
    cases = [*todo, *slices[1:]]
    return [_model_case(*case, least=least, alone=not small) for case in cases]


def _model_case(name: str, work: str, args: dict[str, Any], limit: float, **how: Any) -> GpuCase:
    """A case of a whole model, in the environment that its name says."""
    env = (OFF,) * (PLAIN in name) + (GRAPHS,) * (LOOPS in name)
    return GpuCase(name, work, args, limit, env=env, module=MODELS, **how)


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 1 where a case failed, else 0."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("speed", "model"))
    parser.add_argument(
        "--small", action="store_true", help="small shapes and models, for a machine without a GPU"
    )
    parser.add_argument("--budget", type=float, default=520.0, help="seconds that it may take (default 520)")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="PART", help="only cases with these parts in their names"
    )
    parser.add_argument("--out", metavar="FILE.jsonl", help="append each row as soon as it is measured")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each row")
    args = parser.parse_args(argv)
    with contextlib.closing(Runner(args.budget)) as cases:
        return report(measure(cases, args.what, small=args.small, only=args.only), args.out, args.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
