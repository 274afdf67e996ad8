"""Speed of kernels: attention beside cuDNN and XLA, and the grouped product in bytes/s under several routings.

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

from mercury_jax.bench.timing import timed
from mercury_jax.kernels import attend, device as kernel_device
from mercury_jax.kernels.grouped_matmul import tile_rows
from mercury_jax.kernels.inputs import quantise_int8
from mercury_jax.models import moe
from mercury_jax.models.weight_quant import QuantisedWeight

CACHED = 200e6  # bytes: several times the 50 MB of an H200's L2 cache
SETS, CALLS, REPEATS = 6, 18, 7


def time_attention(asked: dict[str, Any], stage: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Seconds, bytes and FLOP of an attention call by one implementation: "ours", "cudnn" or "xla".

    Args:
        asked: `shape` (b, t, s, h, g, width, causal, int8) and `way`, the implementation.
        stage: Called with what is being done.

    Yields:
        One row with `seconds`, or with `left_out` or `refused`, the reason why there are none.
    """
    way, shape = asked["way"], asked["shape"]
    causal, int8 = shape.get("causal", False), shape.get("int8", False)
    b, t, s, h, g, width = (shape[name] for name in ("b", "t", "s", "h", "g", "width"))
    told: dict[str, Any] = {"shape": shape, "way": way, "dtype": "bfloat16"}
    like = jax.ShapeDtypeStruct((b, t, h, width), jnp.bfloat16)
    key_like = jax.ShapeDtypeStruct((b, s, g, width), jnp.bfloat16)
    if way == "ours":
        form = kernel_device.attention_form(
            like, jax.eval_shape(quantise_int8, key_like) if int8 else key_like, None
        )
        told["form"] = form
        if (why := kernel_device.why_off(form)) is not None and kernel_device.present() is not None:
            yield told | {"left_out": why}
            return
        told["computed_by"] = "plain XLA" if kernel_device.present() is None else "kernel"
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
    call = _attention(way, causal, jnp.asarray(seen))
    stage("compiling, then timing")
    try:
        seconds = _chained(call, q, pairs)
    except jax.errors.JaxRuntimeError:  # an error of the device, after which this process is unusable
        raise
    except Exception as error:  # cuDNN does not support every shape, and is not on every machine
        if way == "ours":
            raise
        yield told | {"refused": f"{type(error).__name__}: {error}"[:300]}
        return
    visible = float((seen[..., 1] - seen[..., 0]).sum())
    keys = 2 * b * s * g * (width + 4 if int8 else 2 * width)
    yield (
        told
        | seconds
        | {"bytes": keys + 4 * b * t * h * width, "flops": 4.0 * visible * h * width, "sets": sets}
    )


def _attention(way: str, causal: bool, seen: Any) -> Callable[..., Any]:
    if way == "ours":
        return lambda q, kv: attend(q, kv[0], kv[1], seen, cached=True)
    how: dict[str, Any] = dict(is_causal=causal, implementation=way)
    return lambda q, kv: jax.nn.dot_product_attention(q, kv[0], kv[1], **how)


def time_grouped(asked: dict[str, Any], stage: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Seconds and GB/s of the two products of an expert layer by one implementation: "ours", "tiles", "ragged_dot".

    Args:
        asked: `shape` (rows, experts, width, inner, dtype, routing) and `way`, the implementation.
        stage: Called with what is being done.

    Yields:
        One row with `seconds`, or with `left_out`, the reason why there are none.
    """
    way, shape = asked["way"], asked["shape"]
    rows, experts, width, inner = (shape[name] for name in ("rows", "experts", "width", "inner"))
    told: dict[str, Any] = {"shape": shape, "way": way}
    if way == "ours":
        told["form"] = kernel_device.grouped_form(shape["dtype"])
        why = kernel_device.why_off(told["form"])
        if why is not None and kernel_device.present() is not None:
            yield told | {"left_out": why}
            return
        told["computed_by"] = "plain XLA" if kernel_device.present() is None else "kernel"
    stage("drawing")
    sizes = routed(shape["routing"], rows, experts)
    int8 = shape["dtype"] == "int8"

    @jax.jit
    def drawn(key: Any) -> Any:
        keys = jax.random.split(key, 3)
        x = jax.random.normal(keys[0], (rows, width), jnp.bfloat16)
        return x, *(
            _matrices(k, (experts, *s), int8) for k, s in zip(keys[1:], ((width, 2 * inner), (inner, width)))
        )

    x, up, down = drawn(jax.random.key(0))
    act, tile = functools.partial(jax.nn.gelu, approximate=True), tile_rows(rows, experts)
    run = {"ours": moe.grouped_or_tiled, "tiles": moe.tiled, "ragged_dot": moe.ragged}[way]
    count = jnp.asarray(sizes, jnp.int32)
    stage("compiling, then timing")
    seconds = _chained(lambda x, ws: run(act, x, count, *ws, tile=tile), x, [(up, down)])
    touched, item = int((sizes > 0).sum()), 1 if int8 else 2
    moved = touched * 3 * width * inner * item + rows * (2 * width + 3 * inner) * 2
    told |= {
        "experts_touched": touched,
        "largest": int(sizes.max()),
        "bytes": moved,
        "flops": 6.0 * rows * width * inner,
    }
    yield told | seconds | {"gigabytes_per_second": moved / seconds["seconds"] / 1e9}


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


def _matrices(key: Any, shape: tuple[int, ...], int8: bool) -> Any:
    if not int8:
        return jax.random.normal(key, shape, jnp.bfloat16) * shape[1] ** -0.5
    values = jax.lax.bitcast_convert_type(jax.random.bits(key, shape, jnp.uint8), jnp.int8)
    # 74 is the standard deviation of uniform bytes.
    return QuantisedWeight(values, jnp.full((shape[0], shape[2]), shape[1] ** -0.5 / 74, jnp.float32))


def _chained(call: Callable[[Any, Any], Any], start: Any, sets: list[Any]) -> dict[str, float]:
    """Seconds of a call: median, fastest and slowest of REPEATS loops over the sets with about CALLS calls each."""
    turns, call = max(1, CALLS // len(sets)), jax.jit(call)  # jitted, so that it is lowered once for all sets

    def chain(x: Any, sets: list[Any]) -> Any:
        # A loop of known length needs no synchronisation with the host, and its body is compiled once.
        return jax.lax.fori_loop(0, turns, lambda _, x: functools.reduce(call, sets, x), x)

    program, calls = jax.jit(chain), turns * len(sets)
    run = lambda: jax.block_until_ready(program(start, sets))
    run()
    found = sorted(timed(run)[1] / calls for _ in range(REPEATS))
    return {"seconds": statistics.median(found), "seconds_fastest": found[0], "seconds_slowest": found[-1]}
