"""The addressing of TMA copies, checked while a Mosaic GPU kernel is interpreted on a CPU.

The interpreter copies a slice of an array. A chip copies a box of a tensor map, and the two differ in what is modelled
here, for every `copy_gmem_to_smem` and `copy_smem_to_gmem` with the coordinates that the kernel has computed:

- Where shared memory is tiled by (8, 64), an array [M, K] has the tensor map [M / 8, K / 64, 8, 64], and a slice
  that starts at (m, k) is the box at (m // 8, k // 64, m % 8, k % 64). What lies outside of an axis of the map is
  filled with zeros (a store leaves it out). So a slice must start and end with a tile, and M must be whole tiles.
- A box that leaves the array is filled with zeros in the same way. None of our kernels relies on that.
- Of a tensor map, all strides but the last, and the bytes of a box's last axis, are multiples of 16 bytes, a box has
  at most 256 elements an axis, and a swizzled box's last axis has as many bytes as the swizzle.
- In shared memory a box starts at a multiple of 128 bytes, or of the 8 lines after which a swizzle repeats itself.
- A store from untiled memory to contiguous elements is a bulk copy: addresses and size are multiples of 16 bytes.

Left out: what lowering and ptxas refuse by themselves (more than 5 axes after unit axes are dropped, registers, the
size of shared memory; qa/deviceless), multicast, gathers, predicates, asynchrony (the order of copies, barriers
and fences), and the address of shared memory as a whole, which Mosaic aligns to 1,024 bytes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import callback
from jax._src.pallas.mosaic_gpu import core as mosaic
from jax._src.pallas.mosaic_gpu.interpret.jaxpr_interpret import JaxprInterpreter
from jax._src.state.indexing import NDIndexer, Slice  # pyright: ignore[reportPrivateImportUsage]


class View(NamedTuple):
    """A slice of an array: of each axis its first element, how many, and whether one index has removed the axis."""

    shape: tuple[int, ...]
    start: tuple[Any, ...]
    size: tuple[int, ...]
    squeezed: tuple[bool, ...]

    @property
    def kept(self) -> list[int]:
        return [axis for axis, gone in enumerate(self.squeezed) if not gone]


class Copy(NamedTuple):
    """One copy. tiling, swizzle: of shared memory; () and 0: none."""

    load: bool
    itemsize: int
    array: View
    shared: View
    tiling: tuple[int, ...]
    swizzle: int

    def faults(self) -> list[str]:
        """What a chip would do otherwise than the interpreter; nothing where the copy is right."""
        found = [*self._box(), *self._alignment()]
        what = "load of" if self.load else "store to"
        slices = ", ".join(f"{s}:{s + n}" for s, n in zip(self.array.start, self.array.size, strict=True))
        return [f"{what} [{slices}] of {list(self.array.shape)}: {fault}" for fault in found]

    def _tiles(self) -> dict[int, int]:
        """Of each tiled axis of the array the size of a tile."""
        return dict(zip(self.array.kept[len(self.array.kept) - len(self.tiling) :], self.tiling, strict=True))

    def _box(self) -> Iterator[str]:
        tiles = self._tiles()
        for axis, (length, start, size) in enumerate(zip(*self.array[:3], strict=True)):
            tile = tiles.get(axis, 1)
            if size % tile or (length % tile and length > tile):
                yield f"axis {axis} is not in whole tiles of {tile}"
                continue
            # Cell (a, b) of the box has these coordinates in the tensor map [length // inner, inner].
            inner = min(length, tile)
            big = start // tile + np.arange(size // tile)[:, None]
            small = start % tile + np.arange(tile)
            lost = int(((big >= length // inner) | (small >= inner)).sum())
            if lost or start < 0:
                where = f"starts at {start % tile} of a tile of {tile}"
                yield f"{lost} of {size} elements of axis {axis} are out of range: it {where}"
            if max(size // tile, tile) > 256:
                yield f"the box has more than 256 elements along axis {axis}"

    def _alignment(self) -> Iterator[str]:
        strides = [
            math.prod(self.array.shape[axis + 1 :]) * self.itemsize for axis in range(len(self.array.shape))
        ]
        last = self._tiles().get(len(strides) - 1, self.array.size[-1]) * self.itemsize
        if self._bulk():
            at = sum(s * stride for s, stride in zip(self.array.start, strides, strict=True))
            if at % 16 or math.prod(self.array.size) * self.itemsize % 16 or self._offset() % 16:
                yield "addresses or size are no multiple of 16 bytes"
            return
        if any(stride % 16 for stride in strides[:-1]) or last % 16:
            yield "strides or the last axis are no multiple of 16 bytes"
        if self.swizzle and last != self.swizzle:
            yield f"the last axis has {last} bytes, the swizzle {self.swizzle}"
        if self._offset() % (multiple := max(8 * self.swizzle, 128)):
            yield f"shared memory is written or read at byte {self._offset()}, no multiple of {multiple}"

    def _bulk(self) -> bool:
        """Whether the elements follow each other in memory, so that no tensor map is made (for stores alone)."""
        many = [axis for axis, size in enumerate(self.array.size) if size > 1]
        whole = all(self.array.size[axis] == self.array.shape[axis] for axis in many[1:])
        inner = range(many[0], len(self.array.shape)) if many else range(0)
        return not (self.load or self.tiling) and whole and list(inner) == many

    def _offset(self) -> int:
        """Bytes from the start of the buffer, of which the last axes are in tiles: [M / 8, K / 64, 8, 64]."""
        plain = len(self.shared.shape) - len(self.tiling)
        tiles = (1,) * plain + self.tiling
        inside = [n % tile for n, tile in zip(self.shared.start, tiles, strict=True)]
        shape = [*(n // tile for n, tile in zip(self.shared.shape, tiles, strict=True)), *self.tiling]
        at = [*(n // tile for n, tile in zip(self.shared.start, tiles, strict=True)), *inside[plain:]]
        strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        return self.itemsize * sum(n * stride for n, stride in zip(at, strides, strict=True))


@contextlib.contextmanager
def checked() -> Iterator[list[Copy]]:
    """Kernels interpreted in this context are refused where a chip would not copy what they ask for.

    Yields the copies made so far. AssertionError at its end, with the first faults.
    """
    found: list[Copy] = []
    load, store = (
        getattr(JaxprInterpreter, f"_interpret_copy_{name}_p") for name in ("gmem_to_smem", "smem_to_gmem")
    )

    def watched_load(self: Any, eqn: Any, token: Any, read: Any) -> Any:
        array, shared = _views(eqn, read(), ("src", "dst"), skip=3)
        return load(self, eqn, _report(found, True, eqn.invars[0], token, array, shared), read)

    def watched_store(self: Any, eqn: Any, token: Any, *args: Any, **params: Any) -> Any:
        shared, array = _views(eqn, args, ("src", "dst"), skip=2)
        return store(self, eqn, _report(found, False, eqn.invars[1], token, array, shared), *args, **params)

    interpreter: Any = JaxprInterpreter
    interpreter._interpret_copy_gmem_to_smem_p = watched_load
    interpreter._interpret_copy_smem_to_gmem_p = watched_store
    try:
        yield found
    finally:
        JaxprInterpreter._interpret_copy_gmem_to_smem_p = load
        JaxprInterpreter._interpret_copy_smem_to_gmem_p = store
    faults = [fault for copy in dict.fromkeys(found) for fault in copy.faults()]
    assert not faults, f"{len(faults)} of {len(found)} TMA copies:\n" + "\n".join(faults[:8])


def _views(eqn: Any, values: Any, names: tuple[str, ...], skip: int) -> list[tuple[View, tuple[Any, ...]]]:
    """Of source and destination: the view, whose starts may be traced, and how its memory is laid out."""
    views, at = [], skip
    for name, variable in zip(names, eqn.invars, strict=False):
        tree = eqn.params[f"{name}_transforms_treedef"]
        transforms = jax.tree.unflatten(tree, values[at : at + tree.num_leaves])
        at += tree.num_leaves
        layout = tuple(t for t in transforms if isinstance(t, mosaic.UntilingTransform | mosaic.UnswizzleRef))
        shape = variable.aval.shape
        for t in layout:
            if isinstance(t, mosaic.UntilingTransform):  # the buffer's own axes are those of its tiles
                n = len(t.tiling)
                shape = shape[: -2 * n] + tuple(
                    a * b for a, b in zip(shape[-2 * n : -n], t.tiling, strict=True)
                )
        indexers = [t for t in transforms if isinstance(t, NDIndexer)]
        assert len(indexers) + len(layout) == len(transforms), transforms
        views.append((_sliced(shape, indexers), layout))
    return views


def _sliced(shape: tuple[int, ...], indexers: list[NDIndexer]) -> View:
    start, size, squeezed = [0] * len(shape), list(shape), [False] * len(shape)
    for indexer in indexers:
        axes = [axis for axis, gone in enumerate(squeezed) if not gone]
        for axis, index in zip(axes, indexer.indices, strict=True):
            if isinstance(index, Slice):
                assert index.stride == 1
                start[axis], size[axis] = start[axis] + index.start, index.size
            else:
                start[axis], size[axis], squeezed[axis] = start[axis] + index, 1, True
    return View(tuple(shape), tuple(start), tuple(size), tuple(squeezed))


def _report(found: list[Copy], load: bool, variable: Any, token: Any, array: Any, shared: Any) -> Any:
    """The token of a callback that notes the copy when it is made."""
    (array, _), (shared, layout) = array, shared
    tiling = next((t.tiling for t in layout if isinstance(t, mosaic.UntilingTransform)), ())
    swizzle = next((t.swizzle for t in layout if isinstance(t, mosaic.UnswizzleRef)), 0)

    def note(token: Any, at: Any, slot: Any) -> Any:
        views = [x._replace(start=tuple(map(int, s))) for x, s in ((array, at), (shared, slot))]
        found.append(Copy(load, jnp.dtype(variable.aval.dtype).itemsize, *views, tiling, swizzle))
        return token

    starts = [jnp.stack([jnp.asarray(s, jnp.int32) for s in x.start]) for x in (array, shared)]
    return callback.io_callback(note, jax.ShapeDtypeStruct(token.shape, token.dtype), token, *starts)
