"""`python -m benchmarks.gpu speed`: attention beside cuDNN and XLA, and the grouped product in bytes/s under several
routings.

One program makes many calls, each on the result of the one before, and alternates between several sets of keys where
one set would stay in the chip's cache. Inputs are random, not zeros. A form that did not pass `check` is not timed.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mercury_jax.bench.gpu.runner import Row, Stage
from mercury_jax.bench.timing import timed
from mercury_jax.models import moe
from mercury_jax.models.weight_quant import QuantisedWeight
from mercury_jax.ops import attend, device as kernel_device
from mercury_jax.ops.attention.inputs import AttentionResult, attention_form, quantise_int8
from mercury_jax.ops.experts.grouped_matmul import grouped_form, offsets_of

CACHED = 200e6  # bytes: several times the 50 MB of an H200's L2 cache
SETS, CALLS, REPEATS = 6, 18, 7


def time_attention(args: Row, stage: Stage) -> Iterator[Row]:
    """Seconds, bytes and FLOP of an attention call by one implementation: "ours", "cudnn", "xla" or "blockwise".

    Args:
        args: `shape` (b, t, s, h, g, width, causal, int8, gradient) and `way`, the implementation. With `gradient`
            t equals s, and a call is a forward and a backward pass, which chains the gradient of the queries.
        stage: Called with what is being done.

    Yields:
        One row with `seconds`, or with `left_out` or `refused`, the reason why there are none.
    """
    way, shape = args["way"], args["shape"]
    causal, int8, gradient = (shape.get(name, False) for name in ("causal", "int8", "gradient"))
    b, t, s, h, g, width = (shape[name] for name in ("b", "t", "s", "h", "g", "width"))
    row: Row = {"shape": shape, "way": way, "dtype": "bfloat16"}
    if way == "ours":
        q = jax.ShapeDtypeStruct((b, t, h, width), jnp.bfloat16)
        k = jax.ShapeDtypeStruct((b, s, g, width), jnp.bfloat16)
        keys = jax.eval_shape(quantise_int8, k) if int8 else k
        row |= _computed_by(attention_form(q, keys, None, gradient=gradient))
        if "left_out" in row:
            yield row
            return
    stage("drawing")
    sets = max(1, min(SETS, math.ceil(CACHED / (2 * b * s * g * width * (1 if int8 else 2)))))

    @jax.jit
    def drawn(key: Any) -> Any:
        kq, *ks = jax.random.split(key, 1 + 2 * sets)
        keys = [jax.random.normal(k, (b, s, g, width), jnp.bfloat16) for k in ks]
        keys = [quantise_int8(k) for k in keys] if int8 else keys
        return jax.random.normal(kq, (b, t, h, width), jnp.bfloat16), list(zip(keys[::2], keys[1::2]))

    q, pairs = drawn(jax.random.key(0))
    seen = np.zeros((b, t, 2, 2), np.int32)
    seen[:, :, 0, 1] = s - t + 1 + np.arange(t) if causal else s
    seen_on_device = jnp.asarray(seen)

    def forward(q: jax.Array, k: Any, v: Any) -> AttentionResult:
        if way in ("ours", "blockwise"):
            backend = None if way == "ours" else way
            return attend(q, k, v, seen_on_device, cached=not gradient, backend=backend)
        return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation=way)

    def call(q: jax.Array, kv: Any) -> AttentionResult:
        if not gradient:
            return forward(q, *kv)
        out, back = jax.vjp(forward, q, *kv)
        dq, dk, dv = back(out)
        # XLA would leave out the gradients of keys and values if nothing read them.
        return dq + (dk + dv).repeat(h // g, axis=2)

    stage("compiling, then timing")
    try:
        seconds = _chained(call, q, pairs)
    except jax.errors.JaxRuntimeError:  # an error of the device, after which this process is unusable
        raise
    except Exception as error:  # cuDNN does not support every shape, and is not on every machine
        if way == "ours":
            raise
        yield row | {"refused": f"{type(error).__name__}: {error}"[:300]}
        return
    visible = float((seen[..., 1] - seen[..., 0]).sum())
    moved = 2 * b * s * g * (width + 4 if int8 else 2 * width) + 4 * b * t * h * width
    # A backward pass reads what the forward pass reads and writes, and has five products where that has two.
    products = 7.0 if gradient else 2.0
    flops = 2.0 * products * visible * h * width
    yield row | seconds | {"bytes": 3 * moved if gradient else moved, "flops": flops, "sets": sets}


def time_grouped(args: Row, stage: Stage) -> Iterator[Row]:
    """Seconds and GB/s of the two products of an expert layer by one implementation: "ours", "tiles", "ragged_dot".

    Args:
        args: `shape` (rows, experts, width, inner, dtype, routing) and `way`, the implementation.
        stage: Called with what is being done.

    Yields:
        One row with `seconds`, or with `left_out`, the reason why there are none.
    """
    way, shape = args["way"], args["shape"]
    rows, experts, width, inner = (shape[name] for name in ("rows", "experts", "width", "inner"))
    row: Row = {"shape": shape, "way": way}
    if way == "ours":
        row |= _computed_by(grouped_form(shape["dtype"]))
        if "left_out" in row:
            yield row
            return
    stage("drawing")
    sizes = routed(shape["routing"], rows, experts)
    int8 = shape["dtype"] == "int8"

    @jax.jit
    def drawn(key: jax.Array) -> Any:
        keys = jax.random.split(key, 3)
        x, matrices = jax.random.normal(keys[0], (rows, width), jnp.bfloat16), []
        for key, (inputs, outputs) in zip(keys[1:], ((width, 2 * inner), (inner, width))):
            if int8:
                bits = jax.random.bits(key, (experts, outputs, inputs), jnp.uint8)
                values = jax.lax.bitcast_convert_type(bits, jnp.int8)
                # 74 is the standard deviation of uniform bytes.
                scale = jnp.full((experts, outputs), inputs**-0.5 / 74, jnp.float32)
                matrices.append(QuantisedWeight(values, scale))
            else:
                normal = jax.random.normal(key, (experts, inputs, outputs), jnp.bfloat16)
                matrices.append(normal * inputs**-0.5)
        return x, *matrices

    x, up, down = drawn(jax.random.key(0))
    act = jax.nn.gelu
    run = {"ours": moe.grouped_or_tiled, "tiles": moe.tiled, "ragged_dot": moe.ragged}[way]
    offsets = offsets_of(sizes)
    stage("compiling, then timing")
    seconds = _chained(lambda x, ws: run(act, x, offsets, *ws), x, [(up, down)])
    touched, item = int((sizes > 0).sum()), 1 if int8 else 2
    moved = touched * 3 * width * inner * item + rows * (2 * width + 3 * inner) * 2
    row |= {"experts_touched": touched, "largest": int(sizes.max()), "bytes": moved}
    row |= {"flops": 6.0 * rows * width * inner} | seconds
    yield row | {"gigabytes_per_second": moved / seconds["seconds"] / 1e9}


def _computed_by(form: str) -> Row:
    """Whether our own call runs as a kernel here; `left_out` says why a form that did not pass is not timed."""
    if kernel_device.present() is None:
        return {"form": form, "computed_by": "plain XLA"}
    why = kernel_device.why_off(form)
    return {"form": form, "computed_by": "kernel"} if why is None else {"form": form, "left_out": why}


def routed(routing: str, rows: int, experts: int) -> np.ndarray:
    """Rows of each expert: "even", "random" (uniform), or "skewed" with probabilities 1 / rank^0.7.

    Args:
        routing: "even", "random" or "skewed".
        rows: Rows in all.
        experts: Number of experts.

    Returns:
        Counts [experts] whose sum is `rows`.
    """
    rng = np.random.default_rng(0)
    if routing == "even":
        return np.diff(np.linspace(0, rows, experts + 1).astype(int))
    share = np.ones(experts) if routing == "random" else 1 / np.arange(1, experts + 1) ** 0.7
    return rng.multinomial(rows, share / share.sum())


def _chained(call: Callable[[Any, Any], Any], start: Any, sets: list[Any]) -> dict[str, float]:
    """Seconds of a call: the median, the fastest and the slowest of REPEATS loops, each of about CALLS calls.

    Args:
        call: (value, set) -> value of the same shape.
        start: The first value.
        sets: Second arguments, used in turn.

    Returns:
        `seconds`, `seconds_fastest` and `seconds_slowest`, each a loop's time divided by its calls.
    """
    turns, call = max(1, CALLS // len(sets)), jax.jit(call)  # jitted, so that it is lowered once for all sets

    # A loop of known length needs no synchronisation with the host, and its body is compiled once.
    body = lambda x, sets: functools.reduce(call, sets, x)
    program = jax.jit(lambda x, sets: jax.lax.fori_loop(0, turns, lambda _, x: body(x, sets), x))
    run = lambda: jax.block_until_ready(program(start, sets))
    calls = turns * len(sets)
    run()  # compiles
    found = sorted(timed(run)[1] / calls for _ in range(REPEATS))
    return {"seconds": statistics.median(found), "seconds_fastest": found[0], "seconds_slowest": found[-1]}
