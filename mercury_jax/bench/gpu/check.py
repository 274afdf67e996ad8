"""Correctness of the kernels on this device: each form against plain jnp in fp32, on inputs that reveal errors.

Keys that no query sees are NaN, and so are rows behind the last expert and matrices of
experts without rows; memory is filled with NaN before each run. Each compiled program runs twice on each draw of
inputs: two results that differ show a race. Without a GPU the same code runs under the Mosaic GPU interpreter, on
small shapes (`check --small`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import mercury_jax as mj
from mercury_jax.bench import abstract_params
from mercury_jax.bench.gpu.runner import Row, Stage
from mercury_jax.bench.timing import endless, measure_roofline
from mercury_jax.compilation import GRAPH_FLAGS
from mercury_jax.config import Plan
from mercury_jax.decode import rules
from mercury_jax.kernels import attend, device as kernel_device, grouped_matmul as products
from mercury_jax.kernels.attention_inputs import AttentionCall, Int8Vectors, dequantise, quantise_int8
from mercury_jax.kernels.fused_norms import (
    HeadFactors,
    Projections,
    Residual,
    kernel_norm_rope_write,
    kernel_residual_norms,
)
from mercury_jax.kernels.hopper import attention as hopper_attention
from mercury_jax.kernels.routing import (
    ExpertOutputs,
    dispatch as plain_dispatch,
    kernel_dispatch,
    kernel_route,
    route,
)
from mercury_jax.kernels.tuned import AttentionKnobs, GroupedKnobs
from mercury_jax.models.norms import residual_norms
from mercury_jax.models.rope import norm_rope_write
from mercury_jax.models.weight_quant import quantise_rows
from mercury_jax.types import Device

TOLERANCE = 2e-2  # relative error of a row; bf16 arithmetic has 1e-3 to 1e-2
# A gradient may have a larger error where bf16 arithmetic without kernels has at least half of it, as in the tests of
# FlashAttention: the rows of dq that are small differences of large sums.
TIMES_PLAIN = 2.0
MOVED = 1e-3  # relative difference between two runs of one program on the same inputs
BACKENDS = {kernel_device.HOPPER: "hopper", kernel_device.BLACKWELL: "blackwell", kernel_device.TPU: "tpu"}
PACKAGES = ("jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "jax-cuda13-plugin", "jax-cuda12-plugin", "torch",
            "transformers")  # fmt: skip


def about(args: Row, stage: Stage) -> Iterator[Row]:
    """Versions, the device, and which kernels are for it."""
    stage("starting JAX on the device")
    devices = jax.devices()
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    driver = Path("/proc/driver/nvidia/version")  # of NVIDIA's kernel module
    # The ptxas that Mosaic and XLA may compile with explains rows in which they could not.
    ptxas = shutil.which("ptxas") or shutil.which("ptxas", path="/usr/local/cuda/bin")
    yield {
        "hardware": devices[0].device_kind, "platform": devices[0].platform, "devices": len(devices),
        "jax": jax.__version__, "python": platform.python_version(), "versions": versions,
        "driver": driver.read_text().splitlines()[0] if driver.is_file() else None,
        "memory_bytes": (devices[0].memory_stats() or {}).get("bytes_limit"), "chip": kernel_device.present(),
        "kernels": kernel_device.status() | {"file": None}, "cores": os.cpu_count(),
        "cuda": {"CUDA_ROOT": os.environ.get("CUDA_ROOT"), "ptxas": ptxas},
    }  # fmt: skip


def roofline(args: Row, stage: Stage) -> Iterator[Row]:
    """The measured roofline: bytes/s of a copy (read and written) and FLOP/s of bf16 products.

    Args:
        args: `megabytes` of the copied array and `width` of the matrices.
    """
    stage("copying, then multiplying")
    found = measure_roofline(args["megabytes"], args["width"])
    yield {"bytes_per_second": found.bandwidth, "flops_per_second": found.matmul}


class KernelCheck(NamedTuple):
    """A kernel, its reference in fp32, and their inputs: with NaN where nothing may be read for the kernel, without for
    the reference.

    `plain` is the reference on the inputs of the kernel, in their dtype; None where these hold NaN.
    """

    kernel: Callable[..., Any]
    reference: Callable[..., Any]
    inputs: Callable[[int], tuple[Any, Any]]  # seed -> (for the kernel, for the reference)
    plain: Callable[..., Any] | None = None


class AttentionShape(NamedTuple):
    """A call of `attend`, or of `attend` with its gradient.

    Attributes:
        width: Head size.
        int8: Whether keys and values are int8.
        softcap: Cap of the scores; None for none.
        gradient: Whether the result has gradients, too: the call is one without a cache.
        knobs: Settings of the Hopper kernel; None: those that calls have by default.
        full: Whether every query attends to all keys.
        b, t, h: Rows, queries of a row, query heads.
        g, s: Key heads, keys of a row.
        r: Ranges of each query.
    """

    width: int
    dtype: str = "bfloat16"
    int8: bool = False
    softcap: float | None = None
    gradient: bool = False
    knobs: dict[str, int] | None = None
    full: bool = False
    b: int = 1
    t: int = 8
    h: int = 16
    g: int = 2
    s: int = 1024
    r: int = 2

    def drawn(self, seed: int) -> tuple[Any, ...]:
        """Draws the inputs: a prefix, a gap that no query sees, ranges that grow from query to query; some queries see
        nothing.

        Returns:
            Queries [b, t, h, width], keys and values [b, s, g, width], which keys are seen [b, s], and ranges
            [b, t, r, 2].
        """
        rng, ranges = np.random.default_rng(seed), np.zeros((self.b, self.t, self.r, 2), np.int32)
        prefix = self.s // 3 + np.arange(self.b)[:, None] * 3 % (self.s // 8)
        ranges[:, :, 0] = np.stack([np.arange(self.b)[:, None] * 5 % (self.s // 4), prefix], axis=-1)
        for i in range(1, self.r):
            start = prefix + 7 + self.s // 4 * (i - 1)
            end = start + 1 + np.arange(self.t) * 3 % (self.s // 5)
            ranges[:, :, i] = np.stack(np.broadcast_arrays(start, end), axis=-1)
        ranges[:, 3::7] = 0
        if self.t > 1:
            ranges[:, -1] = 0
        if self.full:
            ranges[:], ranges[:, :, 0, 1] = 0, self.s
        see = ((np.arange(self.s) >= ranges[..., :1]) & (np.arange(self.s) < ranges[..., 1:])).any((1, 2))
        draw = lambda n, heads: rng.standard_normal((self.b, n, heads, self.width), np.float32)
        return draw(self.t, self.h), draw(self.s, self.g), draw(self.s, self.g), see, ranges

    def abstract(self) -> tuple[Any, ...]:
        """The shapes of the kernel's arguments."""
        like = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)
        q, k = (like(self.b, n, heads, self.width) for n, heads in ((self.t, self.h), (self.s, self.g)))
        ranges = like(self.b, self.t, self.r, 2, dtype=jnp.int32)
        return jax.eval_shape(self.prepared, q, k, k, like(self.b, self.s, dtype=jnp.bool_), ranges)[0]

    def prepared(self, q: Any, k: Any, v: Any, see: Any, ranges: Any) -> tuple[Any, Any]:
        """(arguments of the kernel, of the reference). Unseen keys are 0, and NaN in the first if there is no gradient.

        Args:
            q, k, v: Queries [b, t, h, width], keys and values [b, s, g, width], fp32.
            see: Which keys any query sees [b, s].
            ranges: [b, t, r, 2].
        """
        q, k, v = (x.astype(self.dtype) for x in (q, k, v))
        clean, poisoned = [], []
        for x in (k, v):
            x = jnp.where(see[:, :, None, None], x, 0)
            if self.int8:
                bits = quantise_int8(x)
                clean.append(dequantise(bits, jnp.float32))
                poisoned.append(Int8Vectors(bits.values, jnp.where(see[:, :, None], bits.scale, jnp.nan)))
            else:
                clean.append(x.astype(jnp.float32))
                poisoned.append(x if self.gradient else jnp.where(see[:, :, None, None], x, jnp.nan))
        return (q, *poisoned, ranges), (q.astype(jnp.float32), *clean, ranges)

    def check(self, device: Device | None = None) -> KernelCheck:
        """The kernel of a device, by default this one, beside the reference."""
        how: dict[str, Any] = dict(scale=self.width**-0.5, softcap=self.softcap, residual=True)
        if self.gradient:
            return self._check_gradient(device, how)
        backend = BACKENDS[kernel_device.present(device) or kernel_device.HOPPER]
        kernel = functools.partial(attend, cached=True, backend=backend, device=device, **how)
        if self.knobs is not None:
            knobs = AttentionKnobs(**self.knobs)
            call = functools.partial(AttentionCall, **how, device=device)
            kernel = lambda *args: hopper_attention.run(call(*args), knobs=knobs)
        prepare = jax.jit(self.prepared)
        return KernelCheck(
            kernel,
            functools.partial(attend, backend="reference", **how),
            lambda seed: prepare(*self.drawn(seed)),
        )

    def _check_gradient(self, device: Device | None, how: dict[str, Any]) -> KernelCheck:
        """Output, log-sum-exp and the gradients of both, whose cotangents are the queries in reverse order."""

        def graded(q: Any, k: Any, v: Any, ranges: Any, **more: Any) -> Any:
            found, back = jax.vjp(lambda q, k, v: attend(q, k, v, ranges, **more, **how), q, k, v)
            turned = jnp.flip(q, axis=1)
            return *found, *back((turned, turned[..., 0].astype(jnp.float32)))

        kernel = functools.partial(graded, backend="hopper_training", device=device)
        prepare = jax.jit(self.prepared)
        inputs = lambda seed: prepare(*self.drawn(seed))
        reference = functools.partial(graded, backend="reference")
        return KernelCheck(kernel, reference, inputs, plain=reference)


class GroupedShape(NamedTuple):
    """A grouped product: `rows` rows over `experts` experts, unevenly, each times its expert's [inputs, outputs].

    With `gated`, the first half of the outputs is the gate of the second. With `rounded`, rows have 8 bits as well.
    """

    dtype: str
    rows: int
    experts: int
    inputs: int
    outputs: int
    gradient: bool = False
    gated: bool = False
    rounded: bool = False
    # settings of the Hopper kernel; None: those that calls have by default
    knobs: dict[str, int] | None = None

    def sizes(self, rng: np.random.Generator) -> np.ndarray:
        """Rows of each expert: one has none, one has many, and the first rows have all remainders modulo 8.

        One expert has all rows.
        """
        if self.experts == 1:
            return np.array([self.rows])
        few = np.full(min(self.experts - 2, 8), 9)
        rest = self.rows - int(few.sum())
        if self.experts <= 10:
            return np.array([*few, 0, rest])
        share = rng.dirichlet(np.full(self.experts - 9, 0.7))
        return np.array([*few, 0, *rng.multinomial(rest, share)])

    def abstract(self) -> tuple[Any, ...]:
        """The shapes of the kernel's arguments."""
        return jax.eval_shape(self.prepared, jax.random.key(0), jnp.zeros(self.experts, jnp.int32))

    def prepared(self, key: Any, sizes: Any) -> tuple[Any, ...]:
        """Rows, a cotangent, matrices, sizes, scales; what no row may read is NaN.

        Args:
            sizes: Rows of each expert [experts].

        Returns:
            (rows [rows + 5, inputs] or `QuantisedRows`, cotangent [rows + 5, outputs], matrices [experts, inputs,
            outputs], sizes, scales [experts, outputs] or None).
        """
        keys, kind, scale = jax.random.split(key, 4), jnp.dtype(self.dtype), None
        x = jax.random.normal(keys[0], (self.rows + 5, self.inputs), jnp.bfloat16)
        x = x.at[self.rows :].set(jnp.nan)
        dy = jax.random.normal(keys[3], (self.rows + 5, self.outputs), jnp.bfloat16)
        shape = (self.experts, self.inputs, self.outputs)
        if kind == jnp.int8:
            w = jax.lax.bitcast_convert_type(jax.random.bits(keys[1], shape, jnp.uint8), jnp.int8)
        else:
            w = (jax.random.normal(keys[1], shape, jnp.bfloat16) * self.inputs**-0.5).astype(kind)
        if kind.itemsize == 1:
            w = w.swapaxes(1, 2)
            scale = jax.random.uniform(keys[2], (self.experts, self.outputs), minval=0.005, maxval=0.02)
            scale = jnp.where(sizes[:, None] > 0, scale, jnp.nan)
        else:
            w = jnp.where(sizes[:, None, None] > 0, w, jnp.nan)
        return quantise_rows(x, kind) if self.rounded else x, dy, w, sizes, scale

    def check(self, device: Device | None = None) -> KernelCheck:
        """The grouped product, or its gradient, beside a loop over the experts in fp32."""
        act = jax.nn.gelu if self.gated else None
        knobs = None if self.knobs is None else GroupedKnobs(**self.knobs)
        product = functools.partial(products.grouped_matmul, act=act, knobs=knobs, device=device)

        def kernel(x: Any, dy: Any, w: Any, sizes: Any, scale: Any) -> Any:
            offsets = products.offsets_of(sizes)
            if not self.gradient:
                x, row_scale = x if self.rounded else (x, None)
                return product(x, w, offsets, scale, row_scale=row_scale)[: self.rows]
            _, back = jax.vjp(lambda x: product(x, w, offsets, scale), x)
            return back(dy)[0][: self.rows]

        def exact(x: Any, dy: Any, w: Any, sizes: Any, scale: Any) -> Any:
            owner = jnp.repeat(jnp.arange(self.experts), sizes, total_repeat_length=self.rows + 5)
            x = x.values.astype(jnp.float32) * x.scale[:, None] if self.rounded else x
            left = (dy if self.gradient else x).astype(jnp.float32)

            def one(e: Any, out: Any) -> Any:
                y = w[e].astype(jnp.float32) if scale is None else w[e].astype(jnp.float32).T * scale[e]
                y = left @ (y.T if self.gradient else y)
                return jnp.where((owner == e)[:, None], y, out)

            width = self.inputs if self.gradient else self.outputs
            y = jax.lax.fori_loop(0, self.experts, one, jnp.zeros((self.rows + 5, width)))[: self.rows]
            if act is None:
                return y
            gate, up = jnp.split(y, 2, axis=-1)
            return act(gate) * up

        prepare = jax.jit(self.prepared)

        def inputs(seed: int) -> tuple[Any, Any]:
            sizes = np.asarray(self.sizes(np.random.default_rng(seed)), np.int32)
            return (args := prepare(jax.random.key(seed), sizes)), args

        return KernelCheck(kernel, exact, inputs)


class NormShape(NamedTuple):
    """Two branches of a layer with their norms, added to `rows` hidden states; and three norms of the sum.

    Attributes:
        active: Experts of each token, whose outputs the second branch combines; 0: it is an array.
    """

    rows: int
    width: int
    active: int = 0

    def check(self, device: Device | None = None) -> KernelCheck:
        """The kernel beside the plain computation in fp32."""
        kernel = functools.partial(kernel_residual_norms, residual_norms, eps=1e-6, device=device)

        def exact(*args: Any) -> Any:
            wide = lambda a: a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a
            return residual_norms(*jax.tree.map(wide, args), eps=1e-6)

        @jax.jit
        def prepared(key: Any) -> Any:
            keys = iter(jax.random.split(key, 13))
            draw = lambda rows: jax.random.normal(next(keys), (rows, self.width), jnp.bfloat16)
            hidden: list[Any] = [draw(self.rows) for _ in range(3)]
            if self.active:
                routed = (self.rows, self.active)
                rank = jax.random.permutation(next(keys), self.rows * self.active).reshape(routed)
                weights = jax.random.uniform(next(keys), routed)
                hidden[2] = ExpertOutputs(draw(rank.size), rank, weights)
            factors = [1 + 0.3 * jax.random.normal(next(keys), (self.width,), jnp.bfloat16) for _ in range(6)]
            scales = jnp.full((1,), 0.7, jnp.bfloat16), jnp.full((1,), 1.9, jnp.bfloat16)
            choice = jax.random.bernoulli(next(keys), 0.5, (self.rows,))
            residual = Residual(tuple(hidden[1:]), tuple(factors[:2]), factors[2], scales, choice)
            return hidden[0], residual, factors[3:]

        def inputs(seed: int) -> tuple[Any, Any]:
            return (args := prepared(jax.random.key(seed))), args

        return KernelCheck(kernel, exact, inputs)


class RoutingShape(NamedTuple):
    """The choice of `active` of `experts` experts for each of `rows` tokens."""

    rows: int
    experts: int
    active: int

    def check(self, device: Device | None = None) -> KernelCheck:
        """The kernel beside the plain computation: the weight of every expert, 0 for one that is not chosen."""

        def spread(choose: Callable[..., Any]) -> Callable[..., Any]:
            def weights(logits: Any, factors: Any) -> Any:
                ids, weights = choose(logits, factors, self.active)
                return jnp.zeros_like(logits).at[jnp.arange(self.rows)[:, None], ids].set(weights)

            return weights

        def inputs(seed: int) -> tuple[Any, Any]:
            keys = jax.random.split(jax.random.key(seed))
            logits = jnp.round(2 * jax.random.normal(keys[0], (self.rows, self.experts)), 1)  # many are equal
            args = logits, jax.random.uniform(keys[1], (self.experts,), minval=0.5, maxval=2.0)
            return args, args

        return KernelCheck(spread(functools.partial(kernel_route, device=device)), spread(route), inputs)


class DispatchShape(NamedTuple):
    """The hidden states [rows, width], dispatched to `active` of `experts` experts each."""

    rows: int
    width: int
    experts: int
    active: int

    def check(self, device: Device | None = None) -> KernelCheck:
        """The kernel beside the plain computation: rows, places and offsets."""

        def one_hot(run: Callable[..., Any]) -> Callable[..., Any]:
            def found(x: Any, expert: Any) -> Any:
                rows, rank, offsets = run(x, expert, self.experts)
                # One-hot, so that the next place is as wrong as any other.
                places = jnp.concatenate([rank.reshape(-1), offsets[: self.experts + 1]])
                return rows, jax.nn.one_hot(places, expert.size + 1)

            return found

        def inputs(seed: int) -> tuple[Any, Any]:
            keys = jax.random.split(jax.random.key(seed))
            x = jax.random.normal(keys[0], (self.rows, self.width), jnp.bfloat16)
            # Id E: no expert of this device. Not all experts have rows.
            expert = jax.random.randint(keys[1], (self.rows, self.active), 0, self.experts + 1, jnp.int32)
            return (x, expert // 2 * 2), (x, expert // 2 * 2)

        kernel = functools.partial(kernel_dispatch, device=device)
        return KernelCheck(one_hot(kernel), one_hot(plain_dispatch), inputs)


class HeadsShape(NamedTuple):
    """Head norms, RoPE and the cache write of two rows of `t` tokens.

    Attributes:
        width: Head size.
        t: Tokens of a row, of which the last two are not written.
        h, g: Query heads, key heads; with fewer than 4 key heads the keys are the values.
        s: Slots of a row, a ring.
    """

    width: int
    t: int
    h: int
    g: int
    s: int

    def check(self, device: Device | None = None) -> KernelCheck:
        """The kernel beside the plain computation in fp32."""
        kernel = functools.partial(kernel_norm_rope_write, norm_rope_write, eps=1e-6, device=device)

        def exact(*args: Any) -> Any:
            wide = lambda a: a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a
            return norm_rope_write(*jax.tree.map(wide, args), eps=1e-6)

        @jax.jit
        def prepared(key: Any) -> Any:
            keys = iter(jax.random.split(key, 12))
            normal = lambda *shape: jax.random.normal(next(keys), shape, jnp.bfloat16)
            counts = [self.h, self.g, self.g][: 3 if self.g > 3 else 2]
            products = [normal(2, self.t, n, self.width) for n in counts]
            x = Projections(products[0], products[1], products[2] if len(products) > 2 else None)
            factors = HeadFactors(1 + 0.3 * normal(self.width), 1 + 0.3 * normal(self.width))
            angle = jax.random.uniform(next(keys), (2, self.t, 1, self.width // 2), maxval=6.3)
            kv = normal(2, self.s, self.g, self.width), normal(2, self.s, self.g, self.width)
            column = jnp.arange(self.t)
            slots = jnp.where(column < self.t - 2, (column + self.s - 3) % self.s, self.s + column)
            return x, factors, (jnp.cos(angle), jnp.sin(angle)), kv, jnp.tile(slots, (2, 1))

        def inputs(seed: int) -> tuple[Any, Any]:
            return (args := prepared(jax.random.key(seed))), args

        return KernelCheck(kernel, exact, inputs)


def here() -> Device | None:
    """The device of kernels: this machine's, None; without one a Hopper that is interpreted on the CPU."""
    if kernel_device.present() is not None:
        return None
    from mercury_jax.kernels.interpreter import interpreted

    return interpreted()


SHAPES: dict[str, Any] = {
    "attention": AttentionShape, "grouped": GroupedShape, "norm": NormShape, "routing": RoutingShape,
    "dispatch": DispatchShape, "heads": HeadsShape,
}  # fmt: skip


def check_form(args: Row, stage: Stage) -> Iterator[Row]:
    """Checks one shape of one form of a kernel.

    Args:
        args: `operation`, a key of `SHAPES`, `shape`, its fields, `seed`, and `draws` of inputs.

    Yields:
        One row with `passed`, `relative_error` (of the worst row of the outputs) and `moved` (the difference of two
        runs), or with `refused`, the reason why the kernel has no such form.
    """
    shape = SHAPES[args["operation"]](**args["shape"])
    checked, seed = shape.check(here()), args["seed"]
    inputs, exact = checked.inputs(seed)
    stage("compiling")
    try:
        program = jax.jit(checked.kernel).lower(*inputs).compile()
    except ValueError as error:
        if "allowed:" not in str(error):  # only our own refusals contain this
            raise
        yield {"shape": args["shape"], "passed": None, "refused": str(error)[:300]}
        return
    like = jax.eval_shape(checked.kernel, *inputs)
    errors, plain, moved = [0.0] * len(jax.tree.leaves(like)), [0.0] * len(jax.tree.leaves(like)), 0.0
    for turn in range(args["draws"]):
        if turn:
            inputs, exact = checked.inputs(seed + turn)
        stage("computing the reference")
        with jax.default_matmul_precision("highest"):
            want = jax.device_get(jax.jit(checked.reference)(*exact))
        stage("running")
        outs = []
        for _ in range(2):
            poison(program, like)
            outs.append(jax.device_get(program(*inputs)))
        for got in outs:
            errors = list(map(max, errors, worst_of_each(got, want)))
        moved = max(moved, worst(outs[0], outs[1]))
        if checked.plain is not None and not max(errors) <= TOLERANCE:
            stage("computing it without kernels")
            found = jax.device_get(jax.jit(checked.plain)(*inputs))
            plain = list(map(max, plain, worst_of_each(found, want)))
    row = {"shape": args["shape"], "relative_error": max(errors), "moved": moved, "seed": seed}
    row |= {"relative_error_plain": max(plain)} if any(plain) else {}
    judged = map(why_wrong, errors, [moved] * len(errors), plain)  # each output by its own plain computation
    why = next((why for why in judged if why is not None), None)
    yield row | ({"passed": True} if why is None else {"passed": False, "why": why})


def worst_of_each(got: Any, want: Any) -> list[float]:
    """The largest relative error of a row, for each output.

    Args:
        got: Outputs of the kernel, one array or several.
    """
    return [worst(a, b) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)]


def why_wrong(error: float, moved: float, plain: float = 0.0) -> str | None:
    """Judges a kernel."""
    # A plain result with NaN, whose error is infinite, excuses nothing.
    allowed = max(TOLERANCE, TIMES_PLAIN * plain) if plain < float("inf") else TOLERANCE
    if not error < float("inf"):
        return "NaN, or an infinity where none belongs"
    if not moved <= MOVED:  # true for NaN, too
        return (
            f"two runs on the same inputs differ by {moved:.2g}: a race, or memory read before it is written"
        )
    return None if error <= allowed else f"relative error {error:.2g} is more than {allowed:.2g}"


def poison(program: Any, like: Any) -> None:
    """Fills the memory that a program will be given with NaN, so that what it does not write shows.

    The allocator reuses freed chunks of the right size first, so arrays of the sizes of the program's temporaries and
    outputs (`like`) are filled and freed.
    """
    need = program.memory_analysis()
    sizes = [x.size * x.dtype.itemsize for x in jax.tree.leaves(like)]
    if need is not None:
        sizes.append(need.temp_size_in_bytes)
    junk = [jax.device_put(np.full(n, 0xFF, np.uint8)) for n in sizes if n]  # NaN in bf16, fp16 and fp32
    jax.block_until_ready(junk)


def worst(got: Any, want: Any) -> float:
    """The largest relative error of a row over all outputs: |got - want| / |want| of its vector; infinite for NaN.

    The norm of a row counts as at least a twentieth of the typical one. Of outputs with one number for each row, such
    as log-sum-exp, the difference is taken relative to at least 1. Infinities must be at the same places: a row that
    sees nothing has -inf.

    Args:
        got: Outputs of the kernel, one array or several.
    """
    found = 0.0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        if np.isnan(a).any() or (np.isinf(a) != np.isinf(b)).any():
            return float("inf")
        a, b = np.where(np.isinf(a), 0, a), np.where(np.isinf(b), 0, b)
        if a.ndim == 3:
            error = np.abs(a - b) / np.maximum(np.abs(b), 1.0)
        else:
            norm = np.linalg.norm(b, axis=-1)
            typical = float(np.sqrt((norm**2).mean()))
            error = np.linalg.norm(a - b, axis=-1) / np.maximum(norm, max(typical / 20, 1e-30))
        found = max(found, float(error.max()))
    return found


def decoded(args: Row, stage: Stage) -> Iterator[Row]:
    """Decodes the same canvas twice with a model of random weights.

    Args:
        args: `model`, and its `layers`.
    """
    from mercury_jax.bench.gpu.profile import find

    source = find(args["model"])
    source = source._replace(config=dataclasses.replace(source.config, layers=args["layers"]))
    lm = endless(abstract_params.random_lm(source))
    c = lm.model.config
    stage("decoding twice")
    how: Any = dict(sampler=rules.confidence(), plan=Plan(block=c.block, steps=8), max_tokens=c.block, seed=0)
    prompt = list(range(c.vocab // 4, c.vocab // 4 + 32))
    yield {"tokens": [np.asarray(mj.sample(lm, prompt, **how).tokens).tolist() for _ in range(2)]}


def graphs(args: Row, stage: Stage) -> Iterator[Row]:
    """Checks that a loop decodes the same tokens as a CUDA graph, at each of two calls, as without.

    Args:
        args: As of `decoded`. The process has `compilation.GRAPH_FLAGS`; another one, which it starts, has not.
    """
    [with_graphs] = decoded(args, stage)
    stage("decoding without graphs")
    env = os.environ | {"XLA_FLAGS": os.environ.get("XLA_FLAGS", "").replace(GRAPH_FLAGS, "")}
    line = json.dumps({"module": __name__, "work": "decoded", "args": args}) + "\n"
    command = [sys.executable, "-m", "mercury_jax.bench.gpu.runner"]
    done = subprocess.run(command, input=line, capture_output=True, text=True, env=env)
    rows = [json.loads(answer).get("row") for answer in done.stdout.splitlines()]
    without = next((row["tokens"][0] for row in rows if row), None)
    if without is None:
        raise RuntimeError(f"nothing was decoded without graphs: {(done.stdout or done.stderr)[-400:]}")
    wrong = [n + 1 for n, tokens in enumerate(with_graphs["tokens"]) if tokens != without]
    yield {"passed": False, "why": f"call {wrong[0]} decoded other tokens"} if wrong else {"passed": True}


def sanitizer(args: Row, stage: Stage) -> Iterator[Row]:
    """Runs NVIDIA's memory checker over some small cases, with a separate allocation for each buffer.

    Args:
        args: `cases`, each with `work` and `args`.
    """
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if tool is None:
        yield {"left_out": "compute-sanitizer is not installed here"}
        return
    stage("running compute-sanitizer, memcheck")
    lines = "".join(json.dumps(case) + "\n" for case in args["cases"])
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        command = [tool, "--tool", "memcheck", "--print-limit", "5", "--log-file", str(log)]
        done = subprocess.run(
            [*command, sys.executable, "-m", "mercury_jax.bench.gpu.runner"],
            input=lines, capture_output=True, text=True, env=os.environ | {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"},
        )  # fmt: skip
        report = log.read_text(errors="replace") if log.is_file() else ""
    summary = [line.strip("= ") for line in report.splitlines() if "ERROR SUMMARY" in line]
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    right = sum(bool(x["row"].get("passed")) for x in answers if "row" in x)
    row = {"tool": "memcheck", "summary": summary, "cases": len(args["cases"]), "right": right}
    if not summary:
        row |= {"left_out": f"it reported nothing: {(report or done.stderr)[-300:].strip()}"}
    elif all("0 errors" in line for line in summary):
        row |= {"passed": True}
    else:
        row |= {"passed": False, "why": "memcheck found errors", "log": report[:1500]}
    yield row | {"code": done.returncode}
