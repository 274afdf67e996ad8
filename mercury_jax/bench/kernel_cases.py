"""Every Pallas kernel for GPUs in every form that it has: what `mercury bench compile kernels` compiles ahead."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mercury_jax.kernels import attend
from mercury_jax.kernels.attention import attend_paged
from mercury_jax.kernels.device import BLACKWELL, HOPPER, target
from mercury_jax.kernels.grouped_matmul import grouped_matmul
from mercury_jax.kernels.kv_quant import quantise_int8
from mercury_jax.types import Device

ATTENTION = {HOPPER: "hopper", BLACKWELL: "blackwell"}  # chip: the backend of `attend` that is for it
FALLBACK = {
    "attention": "plain XLA, whose scores are materialised",
    "paged": "each row's pages gathered, then attention over them",
    "grouped": "tiles of rows in a loop, by XLA",
}
WIDTHS, SLOTS = (64, 128, 256, 512), 8192
BF16, FP16 = jnp.dtype("bfloat16"), jnp.dtype("float16")


class Case(NamedTuple):
    """One form of a kernel. run(*args) is to be traced for the chip; ValueError: it has no such form there."""

    kernel: str
    shape: str
    run: Callable[..., Any]
    args: tuple[Any, ...]


def cases(chip: str) -> list[Case]:
    """All for a chip ("sm_90a", "sm_100a"), in the order of compilation."""
    device = target(chip)
    return [*_attention(ATTENTION[chip], device), *_paged(device), *_grouped(device)]


def _attention(backend: str, device: Device) -> Iterator[Case]:
    """Head sizes x dtypes x int8 keys x ranges, for few rows (one warpgroup, keys split) and for many; caps between."""
    forms = itertools.product(WIDTHS, (BF16, FP16), (False, True), (1, 2, 3), (8, 512))
    for n, (width, dtype, int8, ranges, queries) in enumerate(forms):
        batch = 1 if queries == 8 else 8  # where rows are many nothing is split, and 16 bits are written
        q = jax.ShapeDtypeStruct((batch, queries, 16, width), dtype)
        k = jax.ShapeDtypeStruct((batch, SLOTS, 2, width), dtype)
        keys = jax.eval_shape(quantise_int8, k) if int8 else k
        seen = jax.ShapeDtypeStruct((batch, queries, ranges, 2), jnp.int32)
        softcap = 30.0 if n % 5 == 0 else None
        shape = (
            f"{batch} x {queries} x 16/2 heads of {width}, {ranges} ranges, {_short(dtype)}, "
            f"{'int8' if int8 else _short(dtype)} keys{', capped' if softcap else ''}"
        )
        how: dict[str, Any] = dict(residual=True, cached=True, backend=backend, device=device)
        run = functools.partial(attend, softcap=softcap, **how)
        yield Case("attention", shape, run, (q, keys, keys, seen))


def _paged(device: Device) -> Iterator[Case]:
    """A canvas, and few rows, for each of 8 sequences: head sizes x int8 keys x page sizes."""
    forms = itertools.product(((64, 128), (128, 256), (256, 64), (512, 128)), (False, True), (8, 256))
    for (width, page), int8, queries in forms:
        q = jax.ShapeDtypeStruct((8, queries, 16, width), BF16)
        k = jax.ShapeDtypeStruct((1024, page, 2, width), BF16)
        keys = jax.eval_shape(quantise_int8, k) if int8 else k
        pages = jax.ShapeDtypeStruct((8, SLOTS // page), jnp.int32)
        seen = jax.ShapeDtypeStruct((8, queries, 2, 2), jnp.int32)
        shape = (
            f"8 x {queries} x 16/2 heads of {width}, 2 ranges, bf16, {'int8' if int8 else 'bf16'} keys, "
            f"pages of {page}"
        )
        run = functools.partial(attend_paged, residual=True, backend="hopper", device=device)
        yield Case("paged", shape, run, (q, keys, keys, pages, seen))


def _grouped(device: Device) -> Iterator[Case]:
    """The widths of DiffusionGemma's experts, of which few rows each and many come; the last are a gradient's."""
    sizes = jax.ShapeDtypeStruct((128,), jnp.int32)
    kinds = (BF16, FP16, jnp.dtype("int8"), jnp.dtype("float8_e4m3fn"))
    for rows, (inputs, outputs), kind in itertools.product((2048, 16384), ((2816, 1408), (704, 2816)), kinds):
        x = jax.ShapeDtypeStruct((rows, inputs), FP16 if kind == FP16 else BF16)
        w = jax.ShapeDtypeStruct((128, inputs, outputs), kind)
        scale = jax.ShapeDtypeStruct((128, outputs), jnp.float32)
        args = (x, w, sizes, scale) if kind.itemsize == 1 else (x, w, sizes)
        shape = f"{rows} x {inputs} by 128 x {inputs} x {outputs} of {_short(kind)}"
        one = functools.partial(grouped_matmul, device=device)
        yield Case("grouped", shape, one, args)
        yield Case("grouped", f"gradient of rows, {shape}", functools.partial(_turned, one), args)


def _turned(product: Callable[..., Any], x: Any, w: Any, *more: Any) -> Any:
    """The product with the matrices turned around, which is what the gradient of the rows is."""
    y, back = jax.vjp(lambda x: product(x, w, *more), x)
    return back(jnp.ones_like(y))


def _short(dtype: Any) -> str:
    return {"bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8"}.get(str(dtype), str(dtype))
