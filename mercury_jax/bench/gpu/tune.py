"""The search of `mercury bench gpu tune`: the settings with which a kernel is fastest on this device, at one shape.

The search starts with the heuristic's settings, changes one knob at a time and keeps what is faster. The variants of a
knob are lowered and compiled by a pool of threads, while this thread times those that are ready. One that does not fit,
spills registers or differs from the plain computation is dropped. In the end the fastest are timed once more beside the
heuristic's, while nothing is compiled.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mercury_jax.bench import hlo
from mercury_jax.bench.gpu.check import TOLERANCE, checked, here, worst
from mercury_jax.bench.gpu.runner import Row, Stage
from mercury_jax.bench.timing import timed
from mercury_jax.ops import tuned
from mercury_jax.ops.attention import hopper as attention_kernel
from mercury_jax.ops.attention.cases import AttentionShape
from mercury_jax.ops.attention.inputs import AttentionCall
from mercury_jax.ops.experts import grouped_matmul as products, hopper_grouped_matmul as grouped_kernel
from mercury_jax.ops.experts.cases import GroupedShape
from mercury_jax.types import Device

CACHED = 200e6  # bytes: several times the 50 MB of an H200's L2 cache
SETS = 6  # of inputs, at most, that calls use in turn, so that none stays in the cache
REPEATS = 5  # runs of a program of many calls, of which the fastest counts
ROUNDS = 2  # over all knobs
FINALISTS = 3
# seconds after which a thread that compiles lets the one that times go on; Python's own are 5 ms
SWITCH = 1e-4


class Tunable(NamedTuple):
    """An operation at one shape, whose knobs are searched."""

    name: str  # of its kernels, as in `tuned.kernel_name`
    form: str
    shapes: str
    default: Any  # the heuristic's knobs
    unfit: Callable[[Any], str | None]
    start: Any  # what the first call takes
    sets: list[Any]  # inputs
    turns: int  # of a timed program over the inputs
    call: Callable[[Any, Any, Any], tuple[Any, Any]]  # (knobs, value, inputs) -> (result, next value)
    expected: Any  # result of the first call, computed in fp32
    bytes: float  # that a call must move


def tune(args: Row, stage: Stage) -> Iterator[Row]:
    """Searches the knobs of one operation at one shape.

    Args:
        args: `operation`, "grouped" or "attention"; `shape`, fields of its record in `check`; `values` of each knob;
            and `calls` of a timed program after its first.

    Yields:
        A row for each variant, with `seconds` or with `refused`; `best` marks what is the fastest so far. The last one
        is the fastest of all, with the heuristic's time as `default_seconds`.
    """
    stage("drawing, and computing the reference")
    op = (_grouped if args["operation"] == "grouped" else _attention)(args["shape"], here(), args["calls"])
    runs: dict[Any, Callable[[], Any]] = {}
    rows: dict[Any, Row] = {}
    fastest = lambda: min(runs, key=lambda knobs: rows[knobs]["seconds"], default=op.default)
    sys.setswitchinterval(SWITCH)
    for step in [{}, *ROUNDS * [{knob: values} for knob, values in args["values"].items()]]:
        todo = [knobs for knobs in neighbours(fastest(), step, op.unfit) if knobs not in rows]
        stage(f"{len(rows)} variants are done; compiling and timing {len(todo)}")
        with ThreadPoolExecutor() as pool, hlo.captured_output() as report:
            waiting = {pool.submit(_compiled, op, one): one for one in todo}
            for future in as_completed(waiting):
                knobs, run = waiting[future], future.result()
                row = {"refused": run} if isinstance(run, str) else _measured(op, knobs, run, report)
                rows[knobs] = {"form": op.form, "shapes": op.shapes, "settings": knobs._asdict()} | row
                if not isinstance(run, str) and "seconds" in row:
                    runs[knobs] = run
                yield rows[knobs] | {"best": knobs in runs and fastest() == knobs}
    stage("timing the fastest again")
    last = sorted(runs, key=lambda knobs: rows[knobs]["seconds"])[:FINALISTS]
    for knobs in {*last, op.default} & set(runs):
        rows[knobs] |= _times(op, runs[knobs], rows[knobs]["seconds"])
    if last:
        best = min(last, key=lambda knobs: rows[knobs]["seconds"])
        default = rows[op.default].get("seconds")
        yield rows[best] | {"best": True, "default_seconds": default, "variants": len(rows)}


def neighbours(
    knobs: Any, values: Mapping[str, Sequence[int]], unfit: Callable[[Any], str | None]
) -> list[Any]:
    """Lists knobs, and those that differ in one of them."""
    found = {}
    for one in (knobs, *(knobs._replace(**{knob: value}) for knob in values for value in values[knob])):
        while one.stages > 2 and unfit(one) is not None:
            one = one._replace(stages=one.stages - 1)
        found[one] = True
    return list(found)


def choices(
    operation: str, shape: Row, device: Device | None = None
) -> tuple[Any, Callable[[Any], str | None]]:
    """Finds what a call leaves open, from its shapes.

    Args:
        shape: Fields of its record in `check`.
    """
    if operation == "grouped":
        p = _product(GroupedShape(**shape))
        tile = products.default_tile(p, p.experts)
        return grouped_kernel.default_knobs(p, tile), functools.partial(grouped_kernel.unfit, p)
    a = AttentionShape(**shape)
    q, k, v, ranges = a.abstract()
    call = AttentionCall(q, k, v, ranges, a.width**-0.5, a.softcap, True, device)
    return attention_kernel.default_knobs(call), functools.partial(attention_kernel.unfit, call)


def _compiled(op: Tunable, knobs: Any) -> Callable[[], Any] | str:
    """Compiles a program of many calls, and returns a function that runs it, or why the kernel has no such form."""
    if (why := op.unfit(knobs)) is not None:
        return why
    call = jax.jit(functools.partial(op.call, knobs))

    def program(start: Any, sets: list[Any]) -> Any:
        # A loop of known length needs no synchronisation with the host.
        body = lambda _, value: functools.reduce(lambda value, inputs: call(value, inputs)[1], sets, value)
        first, value = call(start, sets[0])
        return first, jax.lax.fori_loop(0, op.turns, body, value)

    try:
        ready = jax.jit(program).lower(op.start, op.sets).compile()
    # The last is an error of ptxas or XLA.
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        return f"{type(error).__name__}: {error}"[:300]
    return lambda: jax.block_until_ready(ready(op.start, op.sets))


def _measured(op: Tunable, knobs: Any, run: Callable[[], Any], report: Callable[[], str]) -> Row:
    """Checks a variant, and times it if it is right; `report` returns what ptxas has printed."""
    name = tuned.kernel_name(op.name, knobs)
    spills = [one["spill_bytes"] for one in hlo.gpu_kernels(report()) if one["name"].startswith(f"{name}_")]
    if any(spills):
        return {"refused": f"its registers spill {max(spills)} bytes"}
    (found, _), once = timed(run)
    error = worst(jax.device_get(found), op.expected)
    if not error <= TOLERANCE:
        return {"relative_error": error, "refused": f"WRONG: relative error {error:.2g}"}
    return {"relative_error": error} | _times(op, run, once)


def _times(op: Tunable, run: Callable[[], Any], once: float) -> Row:
    """Times a program, which took `once` seconds in its first run; that counts if it has no loop, as on a CPU."""
    program = min(timed(run)[1] for _ in range(REPEATS)) if op.turns else once
    seconds = program / (1 + op.turns * len(op.sets))
    return {"seconds": seconds, "bytes": op.bytes, "gigabytes_per_second": op.bytes / seconds / 1e9}


# --- the operations


def _product(a: GroupedShape) -> products.Product:
    w, out = jnp.dtype(a.dtype), jnp.dtype(jnp.bfloat16)
    x, outputs = w if a.rounded else out, a.outputs // 2 if a.gated else a.outputs
    return products.Product(a.rows, a.experts, a.inputs, outputs, a.gated, False, x, w, out)


def _grouped(shape: Row, device: Device | None, calls: int) -> Tunable:
    """The grouped product of rows that are routed uniformly; of one expert, a dense product."""
    a = GroupedShape(**shape)
    sizes = np.random.default_rng(0).multinomial(a.rows, np.full(a.experts, 1 / a.experts)).astype(np.int32)
    prepare, act = jax.jit(a.prepared), jax.nn.gelu if a.gated else None
    weights = a.experts * a.inputs * a.outputs * jnp.dtype(a.dtype).itemsize
    drawn = [prepare(jax.random.key(seed), sizes) for seed in range(_sets(weights, calls))]
    with jax.default_matmul_precision("highest"):
        expected = jax.device_get(jax.jit(checked("grouped", shape, device).reference)(*drawn[0]))

    def call(knobs: Any, offsets: Any, given: Any) -> tuple[Any, Any]:
        x, row_scale, w, scale = given
        how: Any = dict(row_scale=row_scale, act=act, knobs=knobs, device=device)
        y = products.grouped_matmul(x, w, offsets, scale, **how)
        return y, offsets + jnp.isnan(y[0, 0]).astype(jnp.int32)  # the next call waits for this one

    sets = []
    for rows, _, w, _, scale in drawn:
        x, row_scale = rows if a.rounded else (rows, None)
        cut = lambda v: None if v is None else v[: a.rows]
        sets.append((cut(x), cut(row_scale), w, scale))
    p, (default, unfit), start = _product(a), choices("grouped", shape), products.offsets_of(sizes)
    moved = weights * (sizes > 0).mean() + sets[0][0].nbytes + 2 * p.rows * p.outputs
    turns = calls // len(sets)
    return Tunable(
        "grouped", p.form, p.shapes, default, unfit, start, sets, turns, call, expected, float(moved)
    )


def _attention(shape: Row, device: Device | None, calls: int) -> Tunable:
    """Attention of a canvas to all keys of a cache."""
    a = AttentionShape(**shape)
    case, count = (
        checked("attention", shape, device),
        _sets(2 * a.b * a.s * a.g * a.width * (1 if a.int8 else 2), calls),
    )
    drawn = [case.inputs(seed) for seed in range(count)]
    with jax.default_matmul_precision("highest"):
        expected = jax.device_get(jax.jit(case.reference)(*drawn[0][1]))

    def call(knobs: Any, q: Any, given: Any) -> tuple[Any, Any]:
        result = checked("attention", shape | {"knobs": knobs._asdict()}, device).kernel(q, *given)
        return result, result[0]

    (q, k, v, ranges), sets = drawn[0][0], [given[1:] for given, _ in drawn]
    moved = sum(x.nbytes for x in jax.tree.leaves((k, v))) + 2 * q.nbytes
    shapes = attention_kernel.shapes_of(AttentionCall(q, k, v, ranges, 1.0))
    default, unfit = choices("attention", shape, device)
    return Tunable(
        "attention", a.form, shapes, default, unfit, q, sets, calls // count, call, expected, float(moved)
    )


def _sets(size: float, calls: int) -> int:
    """How many inputs of a size the calls use in turn."""
    return max(1, min(SETS, calls, math.ceil(CACHED / size)))
