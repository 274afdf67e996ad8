"""The Mosaic GPU interpreter, which runs a kernel on a CPU: one door to what moved between releases of jax."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu

if hasattr(plgpu, "force_gpu_interpret_mode"):
    _door: Any = plgpu
else:  # before it was public, it also knew nothing of register layouts, which mean nothing on a CPU
    from jax._src.pallas.mosaic_gpu.core import layout_cast_p
    from jax._src.pallas.mosaic_gpu.interpret import params as _door
    from jax.interpreters import mlir

    import mercury_jax.kernels.turned  # noqa: F401  (transposed views, which it had not either)

    mlir.register_lowering(layout_cast_p, lambda _, x, **__: [x], platform="cpu")

_active = contextvars.ContextVar("interpreting", default=False)


@contextlib.contextmanager
def interpreted(**params: Any) -> Iterator[None]:
    """Mosaic GPU kernels that are traced in this context run on the CPU; params: fields of `InterpretGPUParams`."""
    token = _active.set(True)
    try:
        with _door.force_gpu_interpret_mode(_door.InterpretGPUParams(**params)):
            yield
    finally:
        _active.reset(token)


def interpreting() -> bool:
    """Whether this is traced within `interpreted`: for the few instructions that the interpreter lacks."""
    return _active.get()
