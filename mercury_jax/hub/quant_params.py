"""Parameters of a quantised checkpoint: the matrices that make them up, stacked and fused without widening them.

`hub.load` calls `find_quantised` with the headers, and then reads each parameter through the `QuantisedTensors` that it
returns. `hub.quantised` knows the layouts of single matrices.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from mercury_jax.checkpoint import CheckpointError, unfit
from mercury_jax.checkpoint.tensors import TensorEntry
from mercury_jax.hub.params import TensorSource, shapes_of
from mercury_jax.hub.quant_config import Quantisation
from mercury_jax.hub.quantised import (
    INT32,
    StoredMatrix,
    UnpackedMatrix,
    stored_matrix,
    unpack_matrix,
    widened,
)
from mercury_jax.models.weight_quant import QuantisedWeight, WeightFormat, stored_bytes
from mercury_jax.sharding import matrix_axes
from mercury_jax.types import Model

# Tensors that only a computation with quantised activations or a quantised KV cache reads.
ACTIVATIONS = re.compile(r"\.(input|output|[qkv])_(scale|zero_point|global_scale)$")


def common_format(path: str, matrices: Sequence[StoredMatrix | None]) -> WeightFormat | None:
    """Finds the format of a parameter that is made of several matrices (gate and up, experts)."""
    found = [matrix for matrix in matrices if matrix is not None]
    formats = [matrix.format for matrix in found if matrix.format is not None]
    if len(formats) < len(found) or not found:
        return None
    if found[0].layout == "gguf" and (len(found) < len(matrices) or len({f.values for f in formats}) > 1):
        return None  # the parts of a parameter may have different types, which are widened
    kinds = {str(f.values) for f in formats} | ({"unquantised"} if len(found) < len(matrices) else set())
    if len(kinds) > 1:
        raise unfit(f"formats of {path} ({found[0].name}, ...)", sorted(kinds), "one format")
    # numpy cannot promote fp8 with others; fp32 holds the scales of every format.
    scales = {f.group_scale for f in formats}
    return WeightFormat(
        formats[0].values, math.lcm(*(max(f.groups, 1) for f in formats)) if any(f.groups for f in formats) else 0,
        scales.pop() if len(scales) == 1 else np.dtype(np.float32), any(f.zeros for f in formats),
        any(f.permuted for f in formats),
    )  # fmt: skip


def quantised_to_ours(
    source: TensorSource,
    shape: tuple[int, ...],
    inputs: int,
    batch: int,
    kind: WeightFormat,
    read: Callable[[str], UnpackedMatrix],
) -> QuantisedWeight:
    """Converts matrices of a checkpoint to one of our parameters, the counterpart of `params.to_ours`."""
    return _without_defaults(_assembled(source, shape, inputs, batch, kind, read))


def _assembled(
    source: TensorSource, shape: tuple[int, ...], inputs: int, batch: int, kind: WeightFormat,
    read: Callable[[str], UnpackedMatrix],
) -> QuantisedWeight:  # fmt: skip
    """Fills every array of the format; see `quantised_to_ours`."""
    likes = kind.shapes(shape, inputs, batch)
    empty: Any = (None if x is None else np.empty(x.shape, x.dtype) for x in likes)
    found: Any = type(likes)(*empty)
    if source.per_expert:  # one expert at a time, so that host memory holds the experts once
        for e in range(source.experts):
            one = source._replace(name=source.names[e :: source.experts], experts=0)
            expert = _assembled(one, shape[1:], inputs, 0, kind, read)
            for into, array in zip(found, expert, strict=True):
                if into is not None:
                    into[e] = array
        return found
    parts = [read(name) for name in source.names]
    if source.rows is not None:
        rows = slice(*source.rows[:2])
        take: Any = lambda a: None if a is None else a[..., rows, :]
        parts = [
            UnpackedMatrix(take(p.values), p.scale[..., rows], take(p.group_scale), take(p.zero), p.group)
            for p in parts
        ]
    orders = [() if part.group is None else part.group for part in parts]
    if not all(np.array_equal(order, orders[0]) for order in orders):
        raise CheckpointError(
            f"{', '.join(source.names)}: g_idx differ; allowed: one order of inputs when fused"
        )
    parts = [_conformed(part, kind) for part in parts]
    joined = lambda field, axis: np.concatenate([getattr(p, field) for p in parts], axis=axis)
    values = joined("values", -2)  # [..., out, in]
    found.values[...] = values.reshape(found.values.shape)
    found.scale[...] = joined("scale", -1).reshape(found.scale.shape)
    for field in ("group_scale", "zero"):
        if (into := getattr(found, field)) is not None:
            into[...] = joined(field, -2).reshape(into.shape)
    if found.group is not None:
        found.group[...] = parts[0].group
    return found


def _conformed(m: UnpackedMatrix, kind: WeightFormat) -> UnpackedMatrix:
    """Adds the groups, zero points and order of a format to a matrix that has fewer of them."""
    if not kind.groups:
        return m
    *lead, rows, columns = m.values.shape
    scale = np.ones((*lead, rows, 1), kind.group_scale) if m.group_scale is None else m.group_scale
    zero = np.zeros((*lead, rows, scale.shape[-1]), kind.values) if m.zero is None else m.zero
    # A group of the format is a part of a group of the matrix.
    times, group = kind.groups // scale.shape[-1], m.group
    if group is None:
        group = np.arange(columns, dtype=INT32) * kind.groups // columns
    else:
        group = group * times
    more = lambda a: np.repeat(a, times, axis=-1)
    return m._replace(group_scale=more(scale).astype(kind.group_scale), zero=more(zero), group=group)


def _without_defaults(w: QuantisedWeight) -> QuantisedWeight:
    """Leaves out zero points that are all 0, an order that is contiguous, and groups that have all inputs."""
    if w.group_scale is None:
        return w
    groups, scales = w.group_scale.shape[-1], np.asarray(w.group_scale)
    if w.zero is not None and not np.any(np.asarray(w.zero).astype(np.float32)):
        w = w._replace(zero=None)
    if w.group is not None:
        columns = w.group.shape[-1]
        if (np.asarray(w.group) == np.arange(columns) * groups // columns).all():
            w = w._replace(group=None)
    if groups == 1 and w.zero is None:
        factor: Any = scales[..., 0].astype(np.float32)
        w = QuantisedWeight(w.values, w.scale * factor)
    return w


class QuantisedTensors(NamedTuple):
    """What of a checkpoint is quantised, from its headers.

    Attributes:
        quantisation: From config.json.
        sources: The tensors of each parameter by path, as the checkpoint names them.
        matrices: The quantised matrices, by the name of their tensor in the unquantised checkpoint.
        formats: Format of each parameter that stays quantised, by path.
    """

    quantisation: Quantisation
    sources: Mapping[str, TensorSource]
    matrices: Mapping[str, StoredMatrix]
    formats: Mapping[str, WeightFormat]

    def tensors(self) -> set[str]:
        """Returns the names of all tensors of the matrices."""
        return {tensor for matrix in self.matrices.values() for tensor in matrix.tensors.values()}

    def widened(self, field: str, value: object) -> QuantisedTensors:
        """Returns the tensors with every matrix read in floating point; refuses all formats but GGUF.

        Args:
            field: Name of the argument that needs floating point, for the error.
            value: Its value.
        """
        if not self.quantisation.types:
            about = f"the checkpoint is quantised already ({self.quantisation.layout})"
            raise ValueError(f"{field} is {value!r}: {about}; load the unquantised one")
        return self._replace(formats={})

    def dense(self, read: Callable[[str], np.ndarray], dtype: DTypeLike) -> Callable[[str], np.ndarray]:
        """Makes a function that reads any tensor of the unquantised checkpoint, and dequantises matrices."""

        def found(name: str) -> np.ndarray:
            if name not in self.matrices:
                return read(name)
            return widened(self.matrices[name], read).astype(dtype, copy=False)

        return found

    def parameter(
        self, path: str, shape: tuple[int, ...], read: Callable[[str], np.ndarray]
    ) -> QuantisedWeight:
        """Reads a parameter that stays quantised."""
        axes = matrix_axes(path)
        assert axes is not None
        matrix = lambda name: unpack_matrix(self.matrices[name], read)
        return quantised_to_ours(
            self.sources[path], shape, axes.inputs, axes.batch, self.formats[path], matrix
        )

    def about(self, model: Model) -> dict[str, Any]:
        """Describes the formats for people."""
        kinds, numbers, size = dict[str, int](), 0, 0
        for path, like in shapes_of(model).items():
            if (kind := self.formats.get(path)) is None:
                continue
            axes = matrix_axes(path)
            assert axes is not None
            inputs = math.prod(like.shape[axes.batch : axes.batch + axes.inputs])
            label = jnp.dtype(kind.values).name + (
                f" in groups of {inputs // kind.groups} inputs" if kind.groups else ""
            )
            label += " with zero points" if kind.zeros else ""
            kinds[label] = kinds.get(label, 0) + 1
            numbers += math.prod(like.shape)
            size += sum(stored_bytes(x) for x in jax.tree.leaves(kind.shapes(like.shape, *axes)))
        return {
            "method": self.quantisation.layout, "matrices": kinds,
            "bytes_per_number": round(size / numbers, 3) if numbers else None,
        }  # fmt: skip


def find_quantised(
    quantisation: Quantisation,
    entries: Mapping[str, TensorEntry],
    names: Mapping[str, TensorSource],
    model: Model,
) -> QuantisedTensors:
    """Finds the quantised matrices of a checkpoint in its headers. No tensor is read."""
    sources = {path: _unfused(source, entries) for path, source in names.items()}
    matrices, formats = dict[str, StoredMatrix](), dict[str, WeightFormat]()
    for path, source in sources.items():
        shapes = source.shapes(shapes_of(model)[path].shape)
        found = {n: stored_matrix(quantisation, entries, n, s) for n, s in shapes.items() if len(s) > 1}
        matrices |= {name: matrix for name, matrix in found.items() if matrix is not None}
        kind = common_format(path, list(found.values()))
        if kind is not None and matrix_axes(path) is not None:
            formats[path] = kind
    return QuantisedTensors(quantisation, sources, matrices, formats)


def _unfused(source: TensorSource, entries: Mapping[str, TensorEntry]) -> TensorSource:
    """Finds the tensors of single experts, into which tools split a tensor of all experts before they quantise it."""
    name = source.name
    if not isinstance(name, str) or not source.experts or source.per_expert or "experts." not in name:
        return source
    stem, _, last = name.rpartition(".")
    if last not in ("gate_up_proj", "down_proj") or any(entry.startswith(name) for entry in entries):
        return source
    parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
    return source._replace(name=tuple(f"{stem}.{{e}}.{part}.weight" for part in parts))
