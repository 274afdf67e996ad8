"""Loads from global memory into registers with a layout that the kernel names, for all versions of JAX we support."""

from __future__ import annotations

import inspect
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu

_INDEXED = "idx" in inspect.signature(plgpu.load).parameters  # until jax 0.12


def load(ref: Any, layout: Any, interpreted: bool) -> Any:
    """Loads an array from global memory.

    Args:
        ref: Reference to all of the array, indexed by `ref.at[...]`.
        layout: How the threads of the program hold the array.
        interpreted: Whether the interpreter runs the kernel. It has no load with a layout.

    Returns:
        The array.
    """
    if interpreted:
        return ref[...]
    index = ((),) if _INDEXED else ()
    return plgpu.load(ref, *index, layout=layout, optimized=False)
