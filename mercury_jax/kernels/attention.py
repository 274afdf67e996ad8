"""`attend`: attention for every pattern of this package, and the choice of a backend.

A backend that does not support a call gives a reason, and the next backend is tried. cuDNN is not a backend: it
supports one key length per row of a batch, or a causal mask from the first key on. Our patterns are more general, and
are known only on the device, from the ranges: a batch mixes rows that encode and rows that denoise, and training rows
hold several documents with two ranges per query. `mercury bench gpu` compares the kernels with cuDNN.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
from jaxtyping import Array, Float, Int

from mercury_jax.config import refuse
from mercury_jax.kernels import chunked, device as kernel_device, reference
from mercury_jax.kernels.attention_inputs import AttentionCall, AttentionResult, KVArray, RoundedVectors
from mercury_jax.types import Device


class Backend(NamedTuple):
    """One implementation of attention.

    Attributes:
        refuses: Gives the reason why the backend does not support a call; None: it supports the call.
        run: Computes the call.
        platforms: Platforms for which it is tried when a program is lowered.
        cached: True: only for passes over a cache (it has no gradient); False: only for passes without a cache; None:
            for both.
        device: The kind of device that it is written for; None: any device.
    """

    refuses: Callable[[AttentionCall], str | None]
    run: Callable[[AttentionCall], AttentionResult]
    platforms: tuple[str, ...]
    cached: bool | None = None
    device: str | None = None


def _kernel_backend(module: str, kind: str, label: str, platform: str, cached: bool = True) -> Backend:
    """Makes the backend of a module, which is only imported on its kind of device, because importing Mosaic is slow."""
    load = functools.partial(importlib.import_module, f"mercury_jax.kernels.{module}")

    def refuses(call: AttentionCall) -> str | None:
        if kernel_device.present(call.device) != kind:
            return f"the device is no {label}"
        return load().refuses(call)

    return Backend(refuses, lambda call: load().run(call), (platform,), cached=cached, device=kind)


PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
# Fastest first. The reference is last and supports every call.
_BACKENDS: dict[str, Backend] = {
    "chunked": Backend(chunked.refuses_cached, chunked.run_cached, ("cpu",), cached=True),
    "hopper": _kernel_backend("hopper", kernel_device.HOPPER, "Hopper (sm_90a)", "cuda"),
    "hopper_training": _kernel_backend(
        "hopper.training", kernel_device.HOPPER, "Hopper (sm_90a)", "cuda", cached=False
    ),
    "blackwell": _kernel_backend("blackwell", kernel_device.BLACKWELL, "Blackwell (sm_100a)", "cuda"),
    "tpu": _kernel_backend("tpu", kernel_device.TPU, "TPU", "tpu"),
    "chunked_long": Backend(
        functools.partial(chunked.refuses_cached, size=chunked.LONG_CHUNK),
        functools.partial(chunked.run_cached, size=chunked.LONG_CHUNK),
        ("cuda", "rocm"),
        cached=True,
    ),
    "blockwise": Backend(chunked.refuses_blockwise, chunked.run_blockwise, PLATFORMS, cached=False),
    "reference": Backend(lambda call: None, reference.run, PLATFORMS),
}


def backends() -> tuple[str, ...]:
    """Lists the names that `attend(backend=)` takes."""
    return tuple(_BACKENDS)


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
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    call = AttentionCall(q, k, v, ranges, factor, softcap, residual, device)
    _check(call)
    if backend is not None:
        if backend not in _BACKENDS:
            raise refuse("backend", backend, ", ".join(_BACKENDS))
        return _run_named(backend, call)
    chosen = {name: _choose(name, cached, call) for name in PLATFORMS}
    if len(set(chosen.values())) == 1:
        return chosen["cpu"].run(call)
    runs = {name: one.run for name, one in chosen.items()}
    return _by_platform(call, runs.pop("tpu"), runs)


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
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    call = AttentionCall(q, k, v, ranges, factor, softcap, False, device)
    chosen = [_choose(platform, cached, call) for platform in PLATFORMS]
    return next((name for name, one in _BACKENDS.items() if one in chosen and one.device is not None), None)


def _run_named(backend: str, call: AttentionCall) -> AttentionResult:
    """Runs the backend that the user named, or raises ValueError with its reason."""
    why = _BACKENDS[backend].refuses(call)
    if why is not None:
        allowed = f"one that takes these arguments ({why}); None picks the first that does"
        raise refuse("backend", backend, allowed)
    return _BACKENDS[backend].run(call)


def _choose(platform: str, cached: bool, call: AttentionCall) -> Backend:
    """Finds the first backend of a platform that supports a call and, if it is a kernel, is enabled."""
    form = kernel_device.attention_form(call.q, call.k, call.softcap, gradient=not cached)
    kernel = kernel_device.chosen(form, call.device)
    return next(
        one
        for one in _BACKENDS.values()
        if platform in one.platforms
        and one.cached in (None, cached)
        and one.device in (None, kernel)
        and one.refuses(call) is None
    )


def _by_platform(
    call: AttentionCall,
    default: Callable[[AttentionCall], AttentionResult],
    runs: Mapping[str, Callable[[AttentionCall], AttentionResult]],
) -> AttentionResult:
    """Computes a call with the function for the platform that the program is lowered for."""

    names = ("q", "k", "v", "ranges")  # the fields that are traced
    arrays = (getattr(call, name) for name in names)
    branches = {
        name: lambda *arrays, run=run: run(call._replace(**dict(zip(names, arrays, strict=True))))
        for name, run in {**runs, "default": default}.items()
    }
    return jax.lax.platform_dependent(*arrays, **branches)


def _check(call: AttentionCall) -> None:
    """Raises ValueError for shapes that do not match, and for empty ones."""
    q, k, v, ranges = call.q, call.k, call.v, call.ranges
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
