"""Mosaic GPU's interpreter, which runs the GPU kernels on a CPU, for tests and `mercury bench gpu check --small`.

Before JAX 0.11 the interpreter is not public, has no lowering for register layouts (which mean nothing on a CPU), and
reads only plain slices of shared memory. The kernels also read transposed views (`ref.transpose((1, 0))`): the
hardware transposes an operand of wgmma, or a stored tile, while it reads it. For these versions this module adds both
to the interpreter when it is imported.
"""

from __future__ import annotations

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu

from mercury_jax.kernels.device import HOPPER
from mercury_jax.types import Device


def interpreted(kind: str = HOPPER, **params: Any) -> Device:
    """A GPU whose kernels run on the CPU.

    Args:
        kind: "sm_90a" or "sm_100a".
        **params: Fields of Mosaic GPU's `InterpretGPUParams`.

    Returns:
        The device.
    """
    return Device(kind, _InterpretParams(**params))


class _TransposedRange(tuple[Any, ...]):
    """The range of a buffer that is seen transposed."""


def _support_transposed_views() -> None:
    """Teaches the interpreter of JAX 0.10 to read and write transposed views of shared memory."""
    from jax._src.pallas.mosaic.interpret import shared_memory, utils
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
    from jax._src.state.types import TransposeTransform

    to_range, validate = utils.to_range, gpu_callbacks._validate_transforms
    get = shared_memory.SharedMemory.get_buffer_content
    swap = shared_memory.SharedMemory.swap_buffer_content

    def to_range_transposed(transforms: Any) -> tuple[Any, ...]:
        """Slices, then at most one transposition of two axes, then at most the slice of everything."""
        kept = [t for t in transforms if not isinstance(t, TransposeTransform)]
        if len(kept) == len(transforms):
            return to_range(transforms)
        first = next(i for i, t in enumerate(transforms) if isinstance(t, TransposeTransform))
        whole = all(i.start == 0 and i.stride == 1 for t in kept[first:] for i in t.indices)
        if len(transforms) - len(kept) > 1 or transforms[first].permutation != (1, 0) or not whole:
            raise NotImplementedError(f"a view by {transforms}")
        return _TransposedRange(to_range(kept[:first]))

    def read(self: Any, key: Any, rnge: Any, *args: Any, **options: Any) -> Any:
        value, *rest = get(self, key, tuple(rnge), *args, **options)
        return (value.T if isinstance(rnge, _TransposedRange) and value is not None else value, *rest)

    def write(self: Any, key: Any, rnge: Any, value: Any, mask: Any, *args: Any, **options: Any) -> Any:
        if isinstance(rnge, _TransposedRange):
            value, mask = (None if x is None else x.T for x in (value, mask))
        old, *rest = swap(self, key, tuple(rnge), value, mask, *args, **options)
        return (old.T if isinstance(rnge, _TransposedRange) and old is not None else old, *rest)

    utils.to_range = to_range_transposed
    gpu_callbacks._validate_transforms = lambda transforms: validate(
        [t for t in transforms if not isinstance(t, TransposeTransform)]
    )
    shared_memory.SharedMemory.get_buffer_content = read
    shared_memory.SharedMemory.swap_buffer_content = write


_InterpretParams: Any = getattr(plgpu, "InterpretGPUParams", None)
if _InterpretParams is None:
    from jax._src.pallas.mosaic_gpu.core import layout_cast_p
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams as _InterpretParams
    from jax.interpreters import mlir

    mlir.register_lowering(layout_cast_p, lambda _, x, **__: [x], platform="cpu")
    _support_transposed_views()
