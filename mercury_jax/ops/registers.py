"""Kernels that hold rows in registers: their launch, and loads with a layout that the kernel names."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu

from mercury_jax.types import Device

_INDEXED = "idx" in inspect.signature(plgpu.load).parameters  # until jax 0.12


def kernel(body: Callable[..., None], out: Any, device: Device | None, **grid: int) -> Callable[..., Any]:
    """Makes the call of a kernel of one warpgroup a program."""
    return plgpu.kernel(
        body,
        out_type=out,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        interpret=None if device is None else device.interpret,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )


def load(ref: Any, layout: Any, interpreted: bool) -> Any:
    """Loads an array from global memory.

    Args:
        ref: Reference to all of the array, indexed by `ref.at[...]`.
        layout: How the threads of the program hold the array.
    """
    if interpreted:
        return ref[...]
    index = ((),) if _INDEXED else ()
    return plgpu.load(ref, *index, layout=layout, optimized=False)
