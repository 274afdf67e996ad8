"""attend(): one signature for every attention pattern; backends refuse with a reason and fall through.

cuDNN is none of them. It takes one key length for each row of a batch, or a causal mask that starts at the first key;
which of these holds, if one does, only the ranges tell, on the device: rows that encode stand beside rows that
denoise, and training rows hold several documents of two ranges each. It is what `mercury bench gpu` measures against.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float, Int

from mercury_jax.config import refuse
from mercury_jax.kernels import blockwise, checked, chip, reference, walk
from mercury_jax.kernels.rounded import Keys, Rounded
from mercury_jax.types import Device


class Backend(NamedTuple):
    """One way to compute it.

    refuses(q, k, v, ranges, *, scale, softcap, residual, device): why it does not take these, or None.
    run: the same arguments. platforms: of lowering on which it is tried. cached: True for passes over a cache
    alone, without a gradient; False for those without a cache alone. chip: the one that it is written for.
    """

    refuses: Callable[..., str | None]
    run: Callable[..., Any]
    platforms: tuple[str, ...]
    cached: bool | None = None
    chip: str | None = None


def _kernel(module: str, kind: str, label: str, platform: str) -> Backend:
    """Kernels of a module of their own, which is imported for their device alone: nobody else pays for Mosaic."""

    def load() -> Any:
        return importlib.import_module(f"mercury_jax.kernels.{module}")

    def refuses(*args: Any, device: Device | None, **asked: Any) -> str | None:
        if chip.present(device) != kind:
            return f"the device is no {label}"
        return load().refuses(*args, **asked)

    def run(*args: Any, **asked: Any) -> Any:
        return load().run(*args, **asked)

    return Backend(refuses, run, (platform,), cached=True, chip=kind)


def _plain(module: Any, platforms: tuple[str, ...], cached: bool | None = None) -> Backend:
    """Plain XLA, for which the device does not matter."""

    def refuses(*args: Any, device: Device | None, **asked: Any) -> str | None:
        return module.refuses(*args, **asked)

    def run(*args: Any, device: Device | None, **asked: Any) -> Any:
        return module.run(*args, **asked)

    return Backend(refuses, run, platforms, cached)


EVERYWHERE = ("cpu", "cuda", "rocm", "tpu")
# Fastest first. The plain one is last and takes everything.
_BACKENDS: dict[str, Backend] = {
    "walk": _plain(walk, ("cpu",), cached=True),
    "hopper": _kernel("hopper", chip.HOPPER, "Hopper (sm_90a)", "cuda"),
    "blackwell": _kernel("blackwell", chip.BLACKWELL, "Blackwell (sm_100a)", "cuda"),
    "tpu": _kernel("tpu", chip.TPU, "TPU", "tpu"),
    "blockwise": _plain(blockwise, EVERYWHERE, cached=False),
    "reference": _plain(reference, EVERYWHERE),
}


def backends() -> tuple[str, ...]:
    """Names that `attend(backend=)` takes."""
    return tuple(_BACKENDS)


def attend(
    q: Float[Array, "B T H K"],
    k: Keys,
    v: Keys,
    ranges: Int[Array, "B T R 2"],
    *,
    scale: float | None = None,
    softcap: float | None = None,
    residual: bool = False,
    cached: bool = False,
    backend: str | None = None,
    device: Device | None = None,
) -> Any:
    """Attention in which query row (b, t) sees the keys of its R ranges [start, end), and no others.

    Ranges of one row must not overlap. A row whose ranges are all empty gets zeros. H must be a multiple of G
    (grouped queries: head h reads key head h // (H / G)). Softmax is in fp32.

    k, v [B, S, G, K]: arrays, or `Rounded` (int8). scale: of the scores (None: 1 / sqrt(K)). softcap: scores become
    softcap * tanh(scores / softcap). cached: the keys are a cache, longer than what it holds, and nobody asks for a
    gradient; without it there is one, in reverse mode. backend: one by its name; None takes the first that does not
    refuse, for the platform that the program is lowered for. device: to compile for; None: the device of this machine.
    Returns [B, T, H, K] in q's dtype; with `residual` also the log-sum-exp of each row's scores [B, T, H] in fp32,
    -inf where it sees nothing, by which calls over parts of the keys are merged. ValueError where shapes do not belong
    together, and where a backend that was named refuses. The GPU kernels copy keys whose S is no multiple of 8.
    """
    _check(q, k, v, ranges)
    asked: dict[str, Any] = dict(
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        softcap=softcap,
        residual=residual,
        device=device,
    )
    if backend is not None:
        return _named(backend, q, k, v, ranges, asked)
    found = {name: _first(name, cached, q, k, v, ranges, asked) for name in EVERYWHERE}
    if len(set(found.values())) == 1:
        return found["cpu"].run(q, k, v, ranges, **asked)
    each = {name: functools.partial(one.run, **asked) for name, one in found.items()}
    return jax.lax.platform_dependent(q, k, v, ranges, default=each.pop("tpu"), **each)


def _check(q: Any, k: Any, v: Any, ranges: Any) -> None:
    """Raises ValueError for shapes that do not belong together, and for empty ones."""
    if q.ndim != 4 or 0 in q.shape:
        raise refuse("q", list(q.shape), "[B, T, H, K], each at least 1")
    b, t, h, width = q.shape
    for name, x in (("k", k), ("v", v)):
        if len(x.shape) != 4 or x.shape[0] != b or x.shape[3] != width or 0 in x.shape or h % x.shape[2]:
            raise refuse(
                name, list(x.shape), f"[{b}, S, G, {width}], S at least 1 and G a divisor of {h} heads"
            )
        if isinstance(x, Rounded) and x.scale.shape != x.shape[:3]:
            raise refuse(f"{name}.scale", list(x.scale.shape), f"one for each vector, {list(x.shape[:3])}")
    if k.shape != v.shape:
        raise refuse("v", list(v.shape), f"the shape of k, {list(k.shape)}")
    if ranges.ndim != 4 or ranges.shape[:2] != (b, t) or ranges.shape[3] != 2 or 0 in ranges.shape:
        raise refuse("ranges", list(ranges.shape), f"[{b}, {t}, R, 2], R at least 1")


def _first(platform: str, cached: bool, *args: Any) -> Backend:
    """The first backend of a platform that takes it."""
    *arrays, asked = args
    kernel = chip.chosen(checked.attention_form(arrays[0], arrays[1], asked["softcap"]), asked["device"])
    return next(
        one
        for one in _BACKENDS.values()
        if platform in one.platforms
        and one.cached in (None, cached)
        and (one.chip is None or one.chip == kernel)
        and one.refuses(*arrays, **asked) is None
    )


def _named(name: str, q: Any, k: Any, v: Any, ranges: Any, asked: dict[str, Any]) -> Any:
    if name not in _BACKENDS:
        raise refuse("backend", name, ", ".join(_BACKENDS))
    why = _BACKENDS[name].refuses(q, k, v, ranges, **asked)
    if why is not None:
        raise refuse(
            "backend", name, f"one that takes these arguments ({why}); None picks the first that does"
        )
    return _BACKENDS[name].run(q, k, v, ranges, **asked)
