"""attend(): one signature for every attention pattern; backends refuse and fall through."""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Array, Float, Int

from mercury_jax.config import refuse
from mercury_jax.kernels.reference import attend as reference

Backend = Callable[..., Array | None]  # None: this backend refuses the shapes it was given

# Fastest first. The plain one is last and takes everything; GPU kernels go in front of it.
_BACKENDS: dict[str, Backend] = {"reference": reference}


def backends() -> tuple[str, ...]:
    """Names that `attend(backend=)` takes."""
    return tuple(_BACKENDS)


def attend(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    ranges: Int[Array, "B T R 2"],
    *,
    backend: str | None = None,
) -> Float[Array, "B T H K"]:
    """Attention in which query row (b, t) sees the keys of its R ranges [start, end), and no others.

    Ranges of one row must not overlap. A row whose ranges are all empty gets zeros. H must be a
    multiple of G (grouped queries: head h reads key head h // (H / G)). Softmax is in fp32.
    """
    if backend is not None and backend not in _BACKENDS:
        raise refuse("backend", backend, ", ".join(_BACKENDS))
    for name, run in _BACKENDS.items():
        if backend in (None, name):
            out = run(q, k, v, ranges)
            if out is not None:
                return out
    raise refuse("backend", backend, "one that takes these shapes; None picks the first that does")
