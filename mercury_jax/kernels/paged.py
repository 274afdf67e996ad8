"""attend_paged(): attention whose keys and values lie in pages of one pool that all rows share.

Rows with the same prefix name the same pages, and none reserves more than its last page leaves unused (PagedAttention,
arXiv 2309.06180). On Hopper the kernel of `attend` reads the pages where they are: a tile of keys lies within one of
them. Elsewhere the pages of each row are gathered first.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mercury_jax.config import refuse
from mercury_jax.kernels import checked, chip
from mercury_jax.kernels.attention import attend
from mercury_jax.kernels.reference import visible
from mercury_jax.kernels.rounded import Pool, Rounded
from mercury_jax.types import Device


def attend_paged(
    q: Float[Array, "B T H K"],
    k: Pool,
    v: Pool,
    pages: Int[Array, "B N"],
    ranges: Int[Array, "B T R 2"],
    *,
    scale: float | None = None,
    softcap: float | None = None,
    residual: bool = False,
    backend: str | None = None,
    device: Device | None = None,
) -> Any:
    """`attend` over a pool: slot s of row b has the key k[pages[b, s // page], s % page], and so has v its value.

    k, v [P, page, G, K]: P pages, arrays or `Rounded` (int8; scale [P, page, G]). pages: those of
    each row in their order; a page may be in any number of rows. ranges: of slots, 0 <= start <= end <= N * page.
    scale, softcap, residual, device and what is returned are those of `attend`; there is no gradient.
    Where no slot of a page lies between the lowest start and the highest end that one range has over a row's
    queries, that row may name any page there: one that holds NaN, or one outside 0..P-1.
    backend: "hopper" reads pages in place, whose size is a multiple of 128 slots (of 64: head size 256); any other of
    `backends()` is given them gathered; None takes the first of both that does not refuse. On a machine where it is
    chosen by itself (`kernels.chip`) int8 scales of more than one key head are transposed over the whole pool.
    ValueError where shapes do not fit, or where a backend that was named refuses.
    """
    _check(q, k, v, pages, ranges)
    asked: dict[str, Any] = dict(
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        softcap=softcap,
        residual=residual,
        device=device,
    )
    args = (q, k, v, jnp.clip(pages, 0, k.shape[0] - 1).astype(jnp.int32), ranges)
    if backend not in (None, "hopper"):
        return _gathered(*args, backend=backend, **asked)
    why = _refused(*args, **asked)
    if backend is not None:
        if why is not None:
            raise refuse(
                "backend", backend, f"one that takes these arguments ({why}); None picks one that does"
            )
        return _in_place(*args, **asked)
    gathered = functools.partial(_gathered, **asked)
    if (
        why is not None
        or chip.chosen(checked.attention_form(q, k, softcap, paged=True), device) != chip.HOPPER
    ):
        return gathered(*args)
    return jax.lax.platform_dependent(*args, cuda=functools.partial(_in_place, **asked), default=gathered)


def _refused(
    q: Any, k: Any, v: Any, pages: Any, ranges: Any, device: Device | None, **asked: Any
) -> str | None:
    """Why pages are not read in place, or None."""
    if chip.present(device) != chip.HOPPER:
        return "the device is no Hopper (sm_90a)"
    from mercury_jax.kernels import hopper  # elsewhere nobody pays for Mosaic's import

    return hopper.refuses(q, k, v, ranges, pages=pages, **asked)


def _in_place(q: Any, k: Any, v: Any, pages: Any, ranges: Any, **asked: Any) -> Any:
    from mercury_jax.kernels import hopper

    return hopper.run(q, k, v, ranges, pages=pages, **asked)


def _gathered(q: Any, k: Any, v: Any, pages: Any, ranges: Any, **asked: Any) -> Any:
    """`attend` over a copy [B, N * page, G, K] of each row's pages."""
    k, v = (jax.tree.map(lambda y: y[pages].reshape(pages.shape[0], -1, *y.shape[2:]), x) for x in (k, v))
    # Of keys that a query does not see `attend` hides the scores; a value that nobody sees could still be NaN.
    see = visible(ranges, v.shape[1]).any(axis=1)
    v = jax.tree.map(lambda y: jnp.where(jnp.expand_dims(see, range(2, y.ndim)), y, 0), v)
    return attend(q, k, v, ranges, cached=True, **asked)


def _check(q: Any, k: Any, v: Any, pages: Any, ranges: Any) -> None:
    """Raise for shapes that do not belong together."""
    if q.ndim != 4:
        raise refuse("q", list(q.shape), "a shape [B, T, H, K]")
    (b, t, h, width), of = q.shape, {"k": k, "v": v}
    for name, x in of.items():
        if len(x.shape) != 4 or x.shape[-1] != width or 0 in x.shape[:3] or h % x.shape[2]:
            allowed = (
                f"a pool [P, page, G, {width}] of at least one page and slot, and G a divisor of {h} heads"
            )
            raise refuse(name, list(x.shape), allowed)
        if isinstance(x, Rounded) and x.scale.shape != x.shape[:3]:
            raise refuse(f"{name}.scale", list(x.scale.shape), f"one for each vector, {list(x.shape[:3])}")
    if k.shape != v.shape:
        raise refuse("v", list(v.shape), f"the shape of k, {list(k.shape)}")
    if pages.ndim != 2 or pages.shape[0] != b or not pages.shape[1]:
        raise refuse(
            "pages", list(pages.shape), f"a shape [{b}, N] with N of 1 or more, a line for each row of q"
        )
    if not jnp.issubdtype(pages.dtype, jnp.integer):
        raise refuse("pages", str(pages.dtype), "integers")
    if ranges.ndim != 4 or ranges.shape[:2] != (b, t) or ranges.shape[3] != 2 or 0 in ranges.shape:
        raise refuse("ranges", list(ranges.shape), f"a shape [{b}, {t}, R, 2], each at least 1")
