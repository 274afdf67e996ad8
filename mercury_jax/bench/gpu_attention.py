"""Attention on an accelerator: every backend over a table of shapes, against what the device can do at most."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mercury_jax.bench.ceilings import Ceilings, per_call
from mercury_jax.kernels import attend, backends

PEERS = ("cudnn", "xla")  # of jax.nn.dot_product_attention, timed beside ours


class Shape(NamedTuple):
    """batch rows of `queries` tokens behind `keys` slots; causal: prefill, where each sees those before it."""

    name: str
    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    width: int
    causal: bool = False


def table(full: bool = True) -> list[Shape]:
    """Canvases over caches as DiffusionGemma and LLaDA have them, then prefill. full: the long ones, too."""
    gemma, wide, llada = (16, 8, 256), (16, 2, 512), (32, 8, 128)
    out = [Shape(f"canvas {t} over {s}, batch {b}, heads {h}/{g} of {k}", b, t, s, h, g, k)
           for t, s, (h, g, k) in ((256, 1024, gemma), (256, 8192, gemma), (256, 8192, wide), (32, 1024, llada),
                                   (32, 8192, llada)) for b in ((1, 8) if full else (1,))]  # fmt: skip
    for n in (4096, 8192, 32768) if full else (4096,):
        out.append(Shape(f"prefill {n}, heads 32/8 of 128", 1, n, n, 32, 8, 128, causal=True))
    out.append(Shape("prefill 8192, heads 16/2 of 512", 1, 8192, 8192, 16, 2, 512, causal=True))
    return out


def work(shape: Shape, dtype: Any = jnp.bfloat16) -> tuple[float, float]:
    """(bytes that must be read and written, FLOP of both products); half of the keys where causal."""
    item = jnp.dtype(dtype).itemsize
    keys = 2 * shape.batch * shape.keys * shape.kv_heads * shape.width
    rows = 2 * shape.batch * shape.queries * shape.heads * shape.width
    seen = shape.keys / 2 if shape.causal else shape.keys
    return float((keys + rows) * item), 4.0 * shape.batch * shape.queries * shape.heads * shape.width * seen


def inputs(shape: Shape, dtype: Any = jnp.bfloat16, seed: int = 0) -> tuple[Any, Any, Any, Any]:
    """(q, k, v, ranges): a canvas sees all keys, a causal row those up to its own."""
    kind = lambda i, rows, heads: jax.random.normal(
        jax.random.fold_in(jax.random.key(seed), i), (shape.batch, rows, heads, shape.width), dtype
    )
    q, k, v = (
        kind(0, shape.queries, shape.heads),
        *(kind(i, shape.keys, shape.kv_heads) for i in (1, 2)),
    )
    ends = np.full((shape.batch, shape.queries), shape.keys, np.int32)
    if shape.causal:
        ends[:] = shape.keys - shape.queries + 1 + np.arange(shape.queries)
    ranges = np.zeros((*ends.shape, 2, 2), np.int32)
    ranges[:, :, 0, 1] = ends
    return q, k, v, jnp.asarray(ranges)


def ways(shape: Shape) -> dict[str, Callable[..., Any]]:
    """Name -> attention of (q, k, v, ranges): our backends, and JAX's."""
    ours: dict[str, Callable[..., Any]] = {
        name: functools.partial(attend, backend=name, cached=True) for name in backends()
    }

    def theirs(kind: str, q: Any, k: Any, v: Any, ranges: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, is_causal=shape.causal, implementation=kind)  # type: ignore[arg-type]

    return ours | {f"jax {kind}": functools.partial(theirs, kind) for kind in PEERS}


def measure(most: Ceilings, shapes: list[Shape], limit: int = 4 << 30) -> Iterator[dict[str, Any]]:
    """A JSON-ready row for each shape and way: seconds, share of the bound, error, ratio to the fastest of JAX's.

    limit: bytes of fp32 scores from which on what materialises them is left out. What refuses has its reason.
    """
    for shape in shapes:
        arrays = inputs(shape)
        exact, least, rows = _exact(arrays), most.bound(*work(shape)), []
        for name, way in ways(shape).items():
            row = {"experiment": "attention", "shape": shape.name, **shape._asdict(), "way": name}
            scores = 4 * shape.batch * shape.heads * shape.queries * shape.keys
            if name in ("reference", "jax xla") and scores > limit:
                rows.append(row | {"refused": f"its scores take {scores / 1e9:.1f} GB"})
            else:
                rows.append(row | _tried(way, arrays, exact, least))
        peers = [r["seconds"] for r in rows if r["way"].startswith("jax ") and "seconds" in r]
        for row in rows:
            if "seconds" in row and peers:
                row["times_as_fast_as_jax"] = min(peers) / row["seconds"]
            yield row


LOOK = 32  # of the last queries, which are compared with the reference in fp32


def _exact(arrays: tuple[Any, ...]) -> np.ndarray:
    q, k, v, ranges = arrays
    some: list[Any] = [x.astype(jnp.float32) for x in (q[:1, -LOOK:], k[:1], v[:1])]
    with jax.default_matmul_precision("highest"):
        out = attend(some[0], some[1], some[2], ranges[:1, -LOOK:], backend="reference")
    return np.asarray(out)


def _tried(
    way: Callable[..., Any], arrays: tuple[Any, ...], exact: np.ndarray, least: float
) -> dict[str, Any]:
    q, k, v, ranges = arrays
    try:
        out = np.asarray(jax.jit(way)(q, k, v, ranges)[:1, -LOOK:], np.float32)
        seconds = per_call(lambda x: way(x, k, v, ranges), q)
    except Exception as error:  # a shape that a way does not take, or a library that is not there
        return {"refused": f"{type(error).__name__}: {error}"[:300]}
    error = float(np.abs(out - exact).max() / np.abs(exact).max())
    return {"seconds": seconds, "share_of_bound": least / seconds, "relative_error": error}
