"""`attend`: attention for every pattern of this package, and the choice of a backend.

A backend that does not support a call gives a reason, and the next backend is tried. cuDNN is not a backend: it
supports one key length per row of a batch, or a causal mask from the first key on. Our patterns are more general, and
are known only on the device, from the ranges: a batch mixes rows that encode and rows that denoise, and training rows
hold several documents with two ranges per query. `mercury bench gpu` compares the kernels with cuDNN.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float, Int

from mercury_jax.config import refuse
from mercury_jax.ops import device as kernel_device
from mercury_jax.ops.attention import xla
from mercury_jax.ops.attention.inputs import (
    AttentionCall,
    AttentionResult,
    KVArray,
    RoundedVectors,
    attention_form,
)
from mercury_jax.ops.operation import PLATFORMS, Kernel, Op, device_code
from mercury_jax.types import Device


def _takes(function: Callable[[AttentionCall], Any]) -> Callable[..., Any]:
    """A function of the arguments of an operation that calls one of an `AttentionCall`."""
    return lambda *arrays, **static: function(AttentionCall(*arrays, **static))


def _xla(
    refuses: Callable[[AttentionCall], str | None], run: Callable[[AttentionCall], Any], *platforms: str
) -> Kernel:
    """An implementation in plain JAX."""
    return Kernel(_takes(refuses), _takes(run), None, platforms, plain_gradient=False)


def _kernel(module: str, kind: str, platform: str = "cuda") -> Kernel:
    """The kernel of a module. It has its own gradient, or none over a cache."""
    refuses, run = (
        _takes(device_code(f"mercury_jax.ops.attention.{module}", name)) for name in ("refuses", "run")
    )
    return Kernel(refuses, run, kind, (platform,), plain_gradient=False)


# Over a cache, whose keys have unused slots, without a gradient.
CACHED_ATTENTION = Op(
    "attention",
    _takes(xla.run_reference),
    {
        "chunked": _xla(xla.refuses_cached, xla.run_cached, "cpu"),
        "hopper": _kernel("hopper", kernel_device.HOPPER),
        "blackwell": _kernel("blackwell", kernel_device.BLACKWELL),
        "tpu": _kernel("tpu", kernel_device.TPU, "tpu"),
        "chunked_long": _xla(
            functools.partial(xla.refuses_cached, size=xla.LONG_CHUNK),
            functools.partial(xla.run_cached, size=xla.LONG_CHUNK),
            "cuda",
            "rocm",
        ),
    },
    lambda q, k, *more, softcap=None, **static: attention_form(q, k, softcap),
    fallback="plain XLA, whose scores are materialised",
    cases="mercury_jax.ops.attention.cases",
)
# Without a cache: differentiable, as in training.
ATTENTION = Op(
    "attention with its gradient",
    _takes(xla.run_reference),
    {
        "hopper_training": _kernel("hopper_training", kernel_device.HOPPER),
        "blockwise": _xla(xla.refuses_blockwise, xla.run_blockwise, *PLATFORMS),
    },
    lambda q, k, *more, softcap=None, **static: attention_form(q, k, softcap, gradient=True),
    fallback="blockwise attention, by XLA",
    cases="mercury_jax.ops.attention.cases",
)
_NAMED = {name: op for op in (ATTENTION, CACHED_ATTENTION) for name in op.kernels}


def backends() -> tuple[str, ...]:
    """Lists the names that `attend(backend=)` takes."""
    return (*CACHED_ATTENTION.kernels, *ATTENTION.kernels, "reference")


def attend(
    q: Float[Array, "B T H K"],
    k: KVArray,
    v: KVArray,
    ranges: Int[Array, "B T R 2"],
    *,
    scale: float | None = None,
    softcap: float | None = None,
    residual: bool = False,
    cached: bool = False,
    backend: str | None = None,
    device: Device | None = None,
) -> AttentionResult:
    """Computes attention in which each query attends only to the keys in its R ranges [start, end).

    Softmax is in fp32. The GPU kernels first copy the keys if S is not a multiple of 8.

    Args:
        residual: Whether to also return the log-sum-exp of each query's scores, with which the results of calls over
            parts of the keys can be merged.
        cached: True: the keys are a cache with unused slots, and no gradient is needed. False: the result is
            differentiable in reverse mode, and all keys and values are finite.

    Returns:
        The outputs [B, T, H, K] in the dtype of q; zeros for a query whose ranges are all empty. With `residual` also
        the log-sum-exp [B, T, H] in fp32, -inf for such a query.
    """
    _check(q, k, v, ranges)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    if backend not in (None, *backends()):
        raise refuse("backend", backend, ", ".join(backends()))
    op = _NAMED.get(backend or "", CACHED_ATTENTION if cached else ATTENTION)
    how: Any = dict(scale=factor, softcap=softcap, residual=residual)
    return op.run(q, k, v, ranges, backend=backend, device=device, **how)


def attention_kernel(
    q: Float[Array, "B T H K"],
    k: KVArray,
    v: KVArray,
    ranges: Int[Array, "B T R 2"],
    *,
    scale: float | None = None,
    softcap: float | None = None,
    cached: bool = False,
    device: Device | None = None,
) -> str | None:
    """Finds the kernel that `attend` runs for a call by default. XLA cannot partition kernels over a mesh."""
    op = CACHED_ATTENTION if cached else ATTENTION
    how: Any = dict(scale=q.shape[-1] ** -0.5 if scale is None else scale, softcap=softcap)
    chosen = [op.choose(name, q, k, v, ranges, device=device, **how) for name in PLATFORMS]
    return next((name for name, one in op.kernels.items() if one in chosen and one.kind is not None), None)


def _check(q: Array, k: KVArray, v: KVArray, ranges: Array) -> None:
    """Raises ValueError for shapes that do not match, and for empty ones."""
    if q.ndim != 4 or 0 in q.shape:
        raise refuse("q", list(q.shape), "[B, T, H, K], each at least 1")
    b, t, h, width = q.shape
    for name, x in (("k", k), ("v", v)):
        if len(x.shape) != 4 or x.shape[::3] != (b, width) or 0 in x.shape or h % x.shape[2]:
            allowed = f"[{b}, S, G, {width}], S at least 1 and G a divisor of {h} heads"
            raise refuse(name, list(x.shape), allowed)
        if isinstance(x, RoundedVectors) and x.scale.shape != x.shape[:3]:
            raise refuse(f"{name}.scale", list(x.scale.shape), f"one for each vector, {list(x.shape[:3])}")
    if k.shape != v.shape:
        raise refuse("v", list(v.shape), f"the shape of k, {list(k.shape)}")
    if ranges.ndim != 4 or ranges.shape[:2] != (b, t) or ranges.shape[3] != 2 or 0 in ranges.shape:
        raise refuse("ranges", list(ranges.shape), f"[{b}, {t}, R, 2], R at least 1")
