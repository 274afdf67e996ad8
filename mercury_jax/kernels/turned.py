"""Transposed views of shared memory under the interpreter of jax 0.10, which knows only plain slices.

A kernel transposes an operand of wgmma, or where it stores, by a view (`ref.transpose((1, 0))`): hardware does it
on the way. From jax 0.11 on the interpreter reads such views too; imported, this teaches the same to jax 0.10.
"""

from __future__ import annotations

from typing import Any

from jax._src.pallas.mosaic.interpret import shared_memory, utils
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.state.types import TransposeTransform

_to_range, _validate = utils.to_range, gpu_callbacks._validate_transforms
_get, _swap = shared_memory.SharedMemory.get_buffer_content, shared_memory.SharedMemory.swap_buffer_content


class _Turned(tuple[Any, ...]):
    """The range of a buffer whose content is seen transposed."""


def _range(transforms: Any) -> tuple[Any, ...]:
    """Slices, then at most one transposition of two axes, then at most the slice of everything."""
    kept = [t for t in transforms if not isinstance(t, TransposeTransform)]
    if len(kept) == len(transforms):
        return _to_range(transforms)
    first = next(i for i, t in enumerate(transforms) if isinstance(t, TransposeTransform))
    whole = all(i.start == 0 and i.stride == 1 for t in kept[first:] for i in t.indices)
    if len(transforms) - len(kept) > 1 or transforms[first].permutation != (1, 0) or not whole:
        raise NotImplementedError(f"a view by {transforms}")
    return _Turned(_to_range(kept[:first]))


def _read(self: Any, key: Any, rnge: Any, *args: Any, **named: Any) -> Any:
    value, *rest = _get(self, key, tuple(rnge), *args, **named)
    return (value.T if isinstance(rnge, _Turned) and value is not None else value, *rest)


def _write(self: Any, key: Any, rnge: Any, value: Any, mask: Any, *args: Any, **named: Any) -> Any:
    def turn(x: Any) -> Any:
        return x.T if isinstance(rnge, _Turned) and x is not None else x

    old, *rest = _swap(self, key, tuple(rnge), turn(value), turn(mask), *args, **named)
    return (turn(old), *rest)


utils.to_range = _range
gpu_callbacks._validate_transforms = lambda ts: _validate(
    [t for t in ts if not isinstance(t, TransposeTransform)]
)
shared_memory.SharedMemory.get_buffer_content = _read
shared_memory.SharedMemory.swap_buffer_content = _write
