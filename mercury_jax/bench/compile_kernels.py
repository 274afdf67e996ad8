"""Every form of our Pallas kernels for GPUs, compiled ahead of time for one chip.

`forms` lists them: head sizes, dtypes, key types, ranges, page sizes, widths of experts. `compile_forms` compiles each,
and reads what ptxas reports; `bench.compile` runs it in a process of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mercury_jax.bench import chips, hlo
from mercury_jax.bench.compile import stage
from mercury_jax.kernels import attend, device as kernel_device
from mercury_jax.kernels.attention import attend_paged
from mercury_jax.kernels.attention_inputs import quantise_int8
from mercury_jax.kernels.grouped_matmul import grouped_matmul
from mercury_jax.types import Device

BACKENDS = {kernel_device.HOPPER: "hopper", kernel_device.BLACKWELL: "blackwell"}  # of `attend`
FALLBACK = {  # what runs where a kernel has no such form
    "attention": "plain XLA, whose scores are materialised",
    "paged": "each row's pages gathered, then attention over them",
    "grouped": "tiles of rows in a loop, by XLA",
}
WIDTHS, SLOTS = (64, 128, 256, 512), 8192
BF16, FP16 = jnp.dtype("bfloat16"), jnp.dtype("float16")


class KernelForm(NamedTuple):
    """One form of a kernel. Tracing `run(*args)` for a chip raises ValueError where the kernel has no such form."""

    kernel: str
    shape: str
    run: Callable[..., Any]
    args: tuple[Any, ...]


def forms(name: str) -> list[KernelForm]:
    """All forms for a chip, "sm_90a" or "sm_100a", in the order of compilation."""
    device = kernel_device.target(name)
    return [*_attention(BACKENDS[name], device), *_paged(device), *_grouped(device)]


def _attention(backend: str, device: Device) -> Iterator[KernelForm]:
    """Head sizes x dtypes x int8 keys x ranges, for few query rows (one warpgroup, keys split) and for many; every
    fifth form has a soft-cap."""
    sizes = itertools.product(WIDTHS, (BF16, FP16), (False, True), (1, 2, 3), (8, 512))
    for n, (width, dtype, int8, ranges, queries) in enumerate(sizes):
        batch = 1 if queries == 8 else 8  # with many rows keys are not split, and the output is 16 bits
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
        yield KernelForm("attention", shape, run, (q, keys, keys, seen))


def _paged(device: Device) -> Iterator[KernelForm]:
    """A whole canvas and a few queries for each of 8 sequences: head sizes x int8 keys x page sizes."""
    sizes = itertools.product(((64, 128), (128, 256), (256, 64), (512, 128)), (False, True), (8, 256))
    for (width, page), int8, queries in sizes:
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
        yield KernelForm("paged", shape, run, (q, keys, keys, pages, seen))


def _grouped(device: Device) -> Iterator[KernelForm]:
    """The widths of DiffusionGemma's experts, with few and with many rows for each, and the gradient of the rows."""
    sizes = jax.ShapeDtypeStruct((128,), jnp.int32)
    kinds = (BF16, FP16, jnp.dtype("int8"), jnp.dtype("float8_e4m3fn"))
    for rows, (inputs, outputs), kind in itertools.product((2048, 16384), ((2816, 1408), (704, 2816)), kinds):
        x = jax.ShapeDtypeStruct((rows, inputs), FP16 if kind == FP16 else BF16)
        w = jax.ShapeDtypeStruct((128, inputs, outputs), kind)
        scale = jax.ShapeDtypeStruct((128, outputs), jnp.float32)
        args = (x, w, sizes, scale) if kind.itemsize == 1 else (x, w, sizes)
        shape = f"{rows} x {inputs} by 128 x {inputs} x {outputs} of {_short(kind)}"
        product = functools.partial(grouped_matmul, device=device)
        yield KernelForm("grouped", shape, product, args)
        gradient = functools.partial(_row_gradient, product)
        yield KernelForm("grouped", f"gradient of rows, {shape}", gradient, args)


def _row_gradient(product: Callable[..., Any], x: Any, w: Any, *more: Any) -> Any:
    """The gradient of the rows: a product with the transposed matrices."""
    y, back = jax.vjp(lambda x: product(x, w, *more), x)
    return back(jnp.ones_like(y))


def _short(dtype: Any) -> str:
    return {"bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8"}.get(str(dtype), str(dtype))


# --- compiling


def compile_forms(name: str) -> list[dict[str, Any]]:
    """Compiles every form for a target in this process.

    Returns:
        A record for each form: {kernel, shape} with what `hlo.gpu_kernels` reads of it, or with `refused`, why there is
        no such form, and `fallback`, what runs instead.

    Raises:
        ValueError: An unknown target.
        RuntimeError: ptxas reported nothing for a form that was compiled.
    """
    target = chips.target(name)
    stage(f"describing {name}")
    device = NamedSharding(Mesh(np.array(target.describe().devices[:1]), ("one",)), PartitionSpec())
    records: list[dict[str, Any]] = []
    todo = forms(target.chip.kernels)
    for n, form in enumerate(todo, start=1):
        stage(f"{form.kernel} {n} of {len(todo)}: {form.shape}")
        args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), form.args)
        record = {"kernel": form.kernel, "shape": form.shape}
        records.append(record)
        try:
            lowered = jax.jit(form.run).lower(*args)
        except ValueError as error:
            record |= {"refused": str(error), "fallback": FALLBACK[form.kernel]}
            continue
        with captured_output() as read:
            lowered.compile()
            found = hlo.gpu_kernels(read())
        if not found:
            raise RuntimeError(f"ptxas reports nothing for {form.kernel}, {form.shape}")
        # A gradient has two kernels: the record is of the one that needs more.
        record |= max(found, key=lambda row: (row["spill_bytes"], row["registers"]))
    return records


@contextlib.contextmanager
def captured_output() -> Iterator[Callable[[], str]]:
    """Captures what C and C++ code writes to standard output and error; yields a function that returns the text."""
    libc = ctypes.CDLL(None)
    with tempfile.TemporaryFile() as sink:
        saved = {fd: os.dup(fd) for fd in (1, 2)}
        for stream in (sys.stdout, sys.stderr):
            stream.flush()

        def read() -> str:
            libc.fflush(None)
            sink.seek(0)
            return sink.read().decode(errors="replace")

        try:
            for fd in saved:
                os.dup2(sink.fileno(), fd)
            yield read
        finally:
            libc.fflush(None)
            for fd, old in saved.items():
                os.dup2(old, fd)
                os.close(old)
