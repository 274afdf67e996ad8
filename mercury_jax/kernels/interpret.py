"""Mosaic GPU's interpreter, which runs a kernel on a CPU: what moved between releases of JAX."""

from __future__ import annotations

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu

from mercury_jax.kernels.chip import HOPPER
from mercury_jax.types import Device

if hasattr(plgpu, "InterpretGPUParams"):
    _Params: Any = plgpu.InterpretGPUParams
else:  # before it was public, it also knew nothing of register layouts, which mean nothing on a CPU
    from jax._src.pallas.mosaic_gpu.core import layout_cast_p
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams as _Params
    from jax.interpreters import mlir

    import mercury_jax.kernels.turned  # noqa: F401  (transposed views, which it had not either)

    mlir.register_lowering(layout_cast_p, lambda _, x, **__: [x], platform="cpu")


def interpreted(kind: str = HOPPER, **params: Any) -> Device:
    """A GPU whose kernels run on the CPU; params: fields of `InterpretGPUParams`."""
    return Device(kind, _Params(**params))
