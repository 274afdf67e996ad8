"""Reads published quantised checkpoints: which tensors hold a matrix, and how its bits are packed.

`quant_config` reads the method from config.json. `stored_matrix` finds the tensors of one matrix in the headers: the
shapes and dtypes there say how it is stored, and must agree with config.json. `unpack_matrix` reads it.
`hub.quant_params` turns the matrices of one parameter into a quantised matrix of the same numbers: no value is rounded
again, and none is widened.

    method               tensors of a matrix [out, in] (beside biases)
    compressed-tensors   weight in fp8 or int8, weight_scale; or
                         weight_packed int32 [out, in / 8], low bits first, value + 8; weight_scale [out, groups];
                         weight_zero_point int32 [out / 8, groups]; weight_g_idx [in]; or, in NVFP4,
                         weight_packed uint8 [out, in / 2], low half first; weight_scale fp8 [out, in / 16];
                         weight_global_scale, by which is divided
    modelopt             weight fp8, weight_scale; or in NVFP4 weight uint8, weight_scale, weight_scale_2, a factor
    fp8                  weight fp8, weight_scale or, in blocks, weight_scale_inv, which is a factor too
    gptq                 qweight int32 [in / 8, out], qzeros int32 [groups, out / 8], scales [groups, out], g_idx [in]
    awq                  qweight int32 [in, out / 8], qzeros, scales; the outputs of a word in the order of AWQ_ORDER
    gguf                 weight uint8 [out, bytes], in blocks of 32 or 256 inputs

Layouts: vllm-project/compressed-tensors `compressors/`, ModelCloud/GPTQModel `nn_modules/qlinear`,
casper-hansen/AutoAWQ `awq/modules/linear/gemm.py`, NVIDIA/Model-Optimizer `torch/export`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import ml_dtypes
import numpy as np

from mercury_jax.checkpoint import CheckpointError, unfit
from mercury_jax.checkpoint.tensors import TensorEntry
from mercury_jax.hub.quant_config import BlockType, Quantisation, Scheme, scheme_of
from mercury_jax.models.weight_quant import WeightFormat

INT4, FP4 = np.dtype(ml_dtypes.int4), np.dtype(ml_dtypes.float4_e2m1fn)
INT8, FP8 = np.dtype(np.int8), np.dtype(ml_dtypes.float8_e4m3fn)
UINT8, INT32, INT64 = (np.dtype(kind) for kind in (np.uint8, np.int32, np.int64))
FLOATS = tuple(np.dtype(kind) for kind in (np.float32, np.float16, ml_dtypes.bfloat16))
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # output of each half byte of a word, lowest first
NVFP4_GROUP = 16
# Types of GGUF that are kept as they are: whole numbers of these dtypes times an fp16 scale for 32 inputs.
GGUF_VALUES = {"Q8_0": INT8, "Q5_0": INT8, "Q4_0": INT4}
WIDEN_CHUNK = 2_000_000  # numbers that are widened at a time


# --- the tensors of a matrix


class StoredMatrix(NamedTuple):
    """The tensors that hold one quantised matrix [..., out, in].

    Attributes:
        name: Name of the tensor in the unquantised checkpoint, for messages.
        layout: "values", "packed", "nvfp4", "gptq", "awq" or "gguf".
        shape: Shape of the matrix.
        block: Rows and columns that share a scale.
        tensors: Names of the tensors by field: values, scale, and where they exist zero, order, shape, factor (fp32),
            divisor.
        format: How it is stored here; None if no format here has the same numbers, so that it is widened.
        offset: Number to add to the stored zero points.
        kind: With "gguf", the name of the type.
    """

    name: str
    layout: str
    shape: tuple[int, ...]
    block: tuple[int, int]
    tensors: Mapping[str, str]
    format: WeightFormat | None
    offset: int = 0
    kind: str = ""


def stored_matrix(
    quantisation: Quantisation, entries: Mapping[str, TensorEntry], name: str, shape: tuple[int, ...]
) -> StoredMatrix | None:
    """Finds the tensors of one matrix, and checks their dtypes and shapes.

    Args:
        shape: Shape of that tensor, [out, in] or [experts, out, in].
    """
    if name in quantisation.types:
        return _find_blocks(entries[name], name, shape, quantisation.types[name])
    module = name.removesuffix(".weight")
    has = lambda suffix: name + suffix in entries
    if f"{module}.qweight" in entries and module != name:
        layout = quantisation.method
        if layout not in ("gptq", "awq"):
            raise CheckpointError(f"tensor {module}.qweight: quant_method is {layout}; allowed: gptq, awq")
    elif has("_packed"):
        layout = "nvfp4" if entries[f"{name}_packed"].dtype == UINT8 else "packed"
    elif name in entries and entries[name].dtype.itemsize == 1 and len(shape) > 1:
        layout = "nvfp4" if entries[name].dtype == UINT8 else "values"
    else:
        return None
    scheme = scheme_of(quantisation, module)
    if scheme is None:
        raise CheckpointError(f"module {module} is quantised, and config.json ignores it or targets others")
    found = _Finder(name, shape, entries, scheme)
    if layout in ("gptq", "awq"):
        return _find_words(found, module, layout, quantisation.offset)
    if layout == "nvfp4":
        return _find_nvfp4(found)
    return _find_packed(found) if layout == "packed" else _find_values(found)


class _Finder(NamedTuple):
    """The tensors of a checkpoint, as one matrix looks for its own."""

    name: str
    shape: tuple[int, ...]
    entries: Mapping[str, TensorEntry]
    scheme: Scheme

    def need(self, tensor: str, dtypes: Sequence[np.dtype], *shapes: tuple[int, ...]) -> TensorEntry:
        """Returns a tensor that must exist with one of these dtypes and shapes (no shapes: any)."""
        if tensor not in self.entries:
            raise CheckpointError(f"tensor {tensor!r} is missing: {self.name} is quantised")
        entry = self.entries[tensor]
        if entry.dtype not in dtypes:
            raise unfit(f"dtype of {tensor}", entry.dtype.name, ", ".join(d.name for d in dtypes))
        if shapes and tuple(entry.shape) not in shapes:
            allowed = f"{' or '.join(map(str, dict.fromkeys(shapes)))} for {self.name} {self.shape}"
            raise unfit(f"shape of {tensor}", tuple(entry.shape), allowed)
        return entry

    def optional(self, tensor: str, dtypes: Sequence[np.dtype], *shapes: tuple[int, ...]) -> bool:
        """Says whether a tensor exists, and checks it if so."""
        return tensor in self.entries and bool(self.need(tensor, dtypes, *shapes))

    def agree(self, field: str, value: int, said: int | None) -> None:
        """Refuses a matrix that is stored in another way than config.json says."""
        if said is not None and value != said:
            raise unfit(f"{field} of {self.name}", value, f"{said}, by config.json")

    def block(self, tensor: str, dtypes: Sequence[np.dtype]) -> tuple[int, int]:
        """Finds the rows and columns that share a scale, from the shape of the scales."""
        entry, (rows, columns), lead = self.need(tensor, dtypes), self.shape[-2:], self.shape[:-2]
        found = tuple(entry.shape)
        if found in ((*lead,), (*lead, 1), (*lead, 1, 1)):
            return rows, columns
        if (block := self.scheme.block) is not None:
            self.need(
                tensor, dtypes, (*lead, *(-(-n // b) for n, b in zip((rows, columns), block, strict=True)))
            )
            return block
        if found == (*lead, rows):
            return 1, columns
        groups = found[-1] if len(found) == len(lead) + 2 else 0
        if found != (*lead, rows, groups) or not groups or columns % groups:
            allowed = (
                f"one scale, {(*lead, rows, 1)}, or {(*lead, rows, 'groups')} for {self.name} {self.shape}"
            )
            raise unfit(f"shape of {tensor}", found, allowed)
        if groups > 1:
            self.agree("group size", columns // groups, self.scheme.group)
        return 1, columns // groups


def _groups(shape: tuple[int, ...], block: tuple[int, int]) -> int:
    """Counts equal groups of inputs, so that each group is in one block; 0 if a block has all inputs."""
    columns = shape[-1]
    return 0 if block[1] >= columns else columns // math.gcd(block[1], columns)


def _find_values(f: _Finder) -> StoredMatrix:
    """Finds a matrix whose values are a tensor of their own, in fp8 or int8."""
    entry = f.need(f.name, (FP8, INT8), f.shape)
    f.agree("bits", 8, f.scheme.bits)
    scale = next((f.name + s for s in ("_scale", "_scale_inv") if f.name + s in f.entries), f"{f.name}_scale")
    block = f.block(scale, FLOATS)
    tensors, groups = {"values": f.name, "scale": scale}, _groups(f.shape, block)
    zeros = f.optional(f"{f.name}_zero_point", (entry.dtype,), tuple(f.entries[scale].shape))
    if zeros:
        tensors["zero"] = f"{f.name}_zero_point"
    zeros &= not f.scheme.symmetric
    kind = WeightFormat(entry.dtype, groups or int(zeros), f.entries[scale].dtype, zeros)
    return StoredMatrix(f.name, "values", f.shape, block, tensors, kind)


def _find_packed(f: _Finder) -> StoredMatrix:
    """Finds a matrix of compressed-tensors whose values are packed into int32."""
    packed, scale = f"{f.name}_packed", f"{f.name}_scale"
    if len(f.shape) != 2:
        raise unfit(f"axes of {f.name}", len(f.shape), "2 for packed values")
    rows, columns = f.shape
    words = {bits: (rows, -(-columns * bits // 32)) for bits in (4, 8)}
    entry = f.need(packed, (INT32,), *words.values())
    bits = next(bits for bits, shape in words.items() if shape == tuple(entry.shape))
    f.agree("bits", bits, f.scheme.bits)
    block = f.block(scale, FLOATS)
    tensors, groups = {"values": packed, "scale": scale}, _groups(f.shape, block)
    if f.optional(f"{f.name}_shape", (INT64, INT32), (2,)):
        tensors["shape"] = f"{f.name}_shape"
    zero_shape = (-(-rows * bits // 32), max(groups, 1))
    zeros = f.scheme.symmetric is False or f"{f.name}_zero_point" in f.entries
    if zeros:
        tensors["zero"] = f"{f.name}_zero_point"
        f.need(tensors["zero"], (INT32,), zero_shape)
    zeros &= not f.scheme.symmetric
    ordered = f.optional(f"{f.name}_g_idx", (INT32, INT64), (columns,)) and groups > 1
    if ordered:
        tensors["order"] = f"{f.name}_g_idx"
    kind = WeightFormat(
        INT4 if bits == 4 else INT8, groups or int(zeros), f.entries[scale].dtype, zeros, ordered
    )
    return StoredMatrix(f.name, "packed", f.shape, block, tensors, kind)


def _find_nvfp4(f: _Finder) -> StoredMatrix:
    """Finds a matrix in NVFP4, as compressed-tensors or modelopt write it."""
    *lead, rows, columns = f.shape
    if columns % NVFP4_GROUP:
        raise unfit(f"inputs of {f.name}", columns, f"a multiple of {NVFP4_GROUP} for NVFP4")
    f.agree("bits", 4, f.scheme.bits)
    ours = f"{f.name}_packed" in f.entries
    values = f"{f.name}_packed" if ours else f.name
    f.need(values, (UINT8,), (*lead, rows, columns // 2))
    f.need(f"{f.name}_scale", (FP8,), (*lead, rows, columns // NVFP4_GROUP))
    tensors = {"values": values, "scale": f"{f.name}_scale"}
    tensors |= {"divisor": f"{f.name}_global_scale"} if ours else {"factor": f"{f.name}_scale_2"}
    f.need(next(reversed(tensors.values())), FLOATS, (*lead,), (*lead, 1))
    kind = WeightFormat(FP4, columns // NVFP4_GROUP, FP8)
    return StoredMatrix(f.name, "nvfp4", f.shape, (1, NVFP4_GROUP), tensors, kind)


def _find_words(f: _Finder, module: str, layout: str, offset: int) -> StoredMatrix:
    """Finds a matrix of GPTQ or AWQ, whose axes are [in, out]. Shapes tell the bits, which may differ by module."""
    if len(f.shape) != 2:
        raise unfit(f"axes of {f.name}", len(f.shape), f"2 for {layout}")
    rows, columns = f.shape
    field = lambda name: f"{module}.{name}"
    if layout == "gptq":
        words = {bits: (columns * bits // 32, rows) for bits in (4, 8) if columns * bits % 32 == 0}
    else:
        words = {4: (columns, rows // 8)} if rows % 8 == 0 else {}
    if not words:
        raise unfit(f"shape of {f.name}", f.shape, "sizes that fill words of 32 bits")
    entry = f.need(field("qweight"), (INT32,), *words.values())
    bits = next(bits for bits, shape in words.items() if shape == tuple(entry.shape))
    scale = f.need(field("scales"), FLOATS)
    groups = scale.shape[0] if len(scale.shape) == 2 else 0
    if tuple(scale.shape) != (groups, rows) or not groups or columns % groups:
        allowed = f"(groups, {rows}), with groups that divide {columns}"
        raise unfit(f"shape of {field('scales')}", tuple(scale.shape), allowed)
    f.need(field("qzeros"), (INT32,), (groups, rows * bits // 32))
    tensors = {"values": field("qweight"), "scale": field("scales"), "zero": field("qzeros")}
    ordered = layout == "gptq" and f.optional(field("g_idx"), (INT32, INT64), (columns,))
    if ordered:
        tensors["order"] = field("g_idx")
    zeros = not f.scheme.symmetric
    kind = WeightFormat(INT4 if bits == 4 else INT8, groups, scale.dtype, zeros, ordered and groups > 1)
    return StoredMatrix(f.name, layout, f.shape, (1, columns // groups), tensors, kind, offset)


def _find_blocks(entry: TensorEntry, name: str, shape: tuple[int, ...], kind: BlockType) -> StoredMatrix:
    """Finds a matrix of a GGUF file, whose rows are blocks of bytes."""
    *lead, columns = shape
    if (
        tuple(entry.shape) != (stored := (*lead, columns * kind.nbytes // kind.numbers))
        or columns % kind.numbers
    ):
        raise unfit(f"bytes of {name}", tuple(entry.shape), f"{stored}, {kind.name} of {shape}")
    values = GGUF_VALUES.get(kind.name)
    found = None if values is None else WeightFormat(values, columns // kind.numbers, np.dtype(np.float16))
    return StoredMatrix(name, "gguf", shape, (1, kind.numbers), {"values": name}, found, kind=kind.name)


# --- reading


class UnpackedMatrix(NamedTuple):
    """A matrix [..., out, in] in numpy, with the fields of a `QuantisedWeight`.

    Attributes:
        values: [..., out, in].
        scale: fp32 [..., out].
        group_scale: [..., out, G], or None.
        zero: [..., out, G], or None.
        group: [in], or None.
    """

    values: np.ndarray
    scale: np.ndarray
    group_scale: np.ndarray | None = None
    zero: np.ndarray | None = None
    group: np.ndarray | None = None


def unpack_matrix(stored: StoredMatrix, read: Callable[[str], np.ndarray]) -> UnpackedMatrix:
    """Reads the tensors of a matrix and unpacks its values, without rounding them."""
    if stored.layout == "gguf":
        return _unpacked_blocks(stored, read(stored.tensors["values"]))
    assert stored.format is not None
    unread = {"values"} if stored.format.zeros else {"values", "zero"}
    named = {field: read(tensor) for field, tensor in stored.tensors.items() if field not in unread}
    values = read(stored.tensors["values"])
    kind, (*_, rows, columns) = stored.format, stored.shape
    if "shape" in named and tuple(named["shape"].tolist()) != stored.shape:
        allowed = f"{list(stored.shape)}, by config.json"
        raise unfit(stored.tensors["shape"], named["shape"].tolist(), allowed)
    for field in ("scale", "factor", "divisor"):
        numbers = np.asarray(named.get(field, 1), np.float32)
        if not np.isfinite(numbers).all() or (field == "divisor" and not numbers.all()):
            allowed = "finite numbers" + (" other than 0" if field == "divisor" else "")
            raise unfit(stored.tensors[field], "NaN, infinity or 0", allowed)
    zero = named.get("zero")
    if stored.layout == "packed":
        values = _signed(_unpacked(values, kind.values, columns), kind.values)
        if zero is not None:
            zero = _signed(_unpacked(zero.T, kind.values, rows), kind.values).T
    elif stored.layout == "nvfp4":
        values = _unpacked(values, kind.values, columns).view(FP4)
    elif stored.layout in ("gptq", "awq"):
        values, zero = _unpacked_words(stored, values, zero)
        named["scale"] = named["scale"].T
    if zero is not None and not np.any(zero.astype(np.float32)):
        zero = None
    factor = np.asarray(named.get("factor", 1), np.float32) / np.asarray(named.get("divisor", 1), np.float32)
    return _with_scales(
        stored, values, named["scale"], factor, zero, _group_index(stored, named.get("order"))
    )


def _unpacked(words: np.ndarray, kind: np.dtype, count: int) -> np.ndarray:
    """Unpacks the last axis to `count` unsigned numbers. The lowest bits come first, as the bytes of a word do here."""
    parts = np.ascontiguousarray(words).view(UINT8)
    if kind in (INT4, FP4):
        halves = np.empty((*parts.shape, 2), UINT8)
        halves[..., 0], halves[..., 1] = parts & 15, parts >> 4
        parts = halves.reshape(*parts.shape[:-1], -1)
    return parts[..., :count]


def _signed(numbers: np.ndarray, kind: np.dtype) -> np.ndarray:
    """Converts unsigned numbers n to n - 8 in int4, or n - 128 in int8."""
    shifted = numbers.astype(np.int8) - 8 if kind == INT4 else (numbers ^ 128).view(INT8)
    return shifted.astype(np.int8, copy=False).view(kind)


def _unpacked_words(
    stored: StoredMatrix, values: np.ndarray, zero: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Unpacks values and zero points of GPTQ or AWQ to [out, in] and [out, G]; None where zero points are not read."""
    assert stored.format is not None
    kind, (rows, columns) = stored.format.values, stored.shape
    if stored.layout == "gptq":
        values = _signed(_unpacked(values.T, kind, columns), kind)
        if zero is None:
            return values, None
        # The first format stores each zero point less one. Whole words are added, because a zero point of 0 borrowed
        # from the next one when it was stored.
        ones = np.uint32(stored.offset * (0x11111111 if kind == INT4 else 0x01010101))
        zero = (zero.view(np.uint32) + ones).view(INT32)
        return values, _signed(_unpacked(zero, kind, rows), kind).T
    order = np.argsort(AWQ_ORDER)

    def outputs(words: np.ndarray) -> np.ndarray:
        numbers = _unpacked(words, kind, rows).reshape(len(words), -1, len(AWQ_ORDER))
        return _signed(np.ascontiguousarray(numbers[..., order].reshape(len(words), rows).T), kind)

    return outputs(values), None if zero is None else outputs(zero)


def _group_index(stored: StoredMatrix, order: np.ndarray | None) -> np.ndarray | None:
    """Checks the group of each input; None if the groups are contiguous. A group of -1 says that none was chosen."""
    if order is None or (order == -1).any():
        return None
    assert stored.format is not None
    groups, columns = stored.format.groups, stored.shape[-1]
    if order.min() < 0 or order.max() >= groups:
        found = (int(order.min()), int(order.max()))
        raise unfit(stored.tensors["order"], found, f"groups in 0..{groups - 1}")
    return None if np.array_equal(order, np.arange(columns) // (columns // groups)) else order.astype(INT32)


def _with_scales(
    stored: StoredMatrix, values: np.ndarray, scale: np.ndarray, factor: np.ndarray, zero: np.ndarray | None,
    group: np.ndarray | None,
) -> UnpackedMatrix:  # fmt: skip
    """Expands the scales of blocks to one per output and group of inputs."""
    *lead, rows, columns = stored.shape
    assert stored.format is not None
    groups = stored.format.groups
    ones = np.ones((*lead, rows), np.float32)
    outer = ones * factor.reshape(*lead, 1)

    def expanded(numbers: np.ndarray) -> np.ndarray:  # [..., out / block, in / block] -> [..., out, G]
        numbers = numbers.reshape(*lead, -(-rows // stored.block[0]), -1)
        numbers = np.repeat(numbers, stored.block[0], axis=-2)[..., :rows, :]
        times = stored.block[1] * groups // columns if groups > 1 else 1
        return np.repeat(numbers, times, axis=-1)[..., : max(groups, 1)]

    each = expanded(scale)
    if groups < 2 and zero is None:
        return UnpackedMatrix(values, outer * each[..., 0].astype(np.float32))
    return UnpackedMatrix(values, outer, each, None if zero is None else expanded(zero), group)


def _unpacked_blocks(stored: StoredMatrix, raw: np.ndarray) -> UnpackedMatrix:
    """Unpacks blocks of GGUF: an fp16 scale, then 32 numbers. Half bytes hold number i low and number i + 16 high."""
    assert stored.format is not None
    blocks = raw.reshape(*raw.shape[:-1], stored.format.groups, -1)
    scale = blocks[..., :2].copy().view(np.float16)[..., 0]
    if not np.isfinite(scale).all():
        raise unfit(f"scales of {stored.name}", "NaN or infinity", "finite numbers")
    halves = np.concatenate([blocks[..., -16:] & 15, blocks[..., -16:] >> 4], axis=-1).view(INT8)
    if stored.kind == "Q8_0":
        values = blocks[..., 2:].view(INT8)
    elif stored.kind == "Q4_0":
        values = (halves - 8).view(INT4)
    else:  # Q5_0: the fifth bits of all numbers are in 4 bytes after the scale
        high = np.unpackbits(blocks[..., 2:6], axis=-1, bitorder="little").view(INT8)
        values = (halves | (high << 4)) - 16
    rows = np.ones(raw.shape[:-1], np.float32)
    return UnpackedMatrix(np.ascontiguousarray(values).reshape(stored.shape), rows, scale)


def widened(stored: StoredMatrix, read: Callable[[str], np.ndarray]) -> np.ndarray:
    """Reads a matrix in fp32, for a parameter that is not kept quantised (an embedding, a head, a router).

    Returns:
        The matrix [..., out, in].
    """
    if stored.layout != "gguf":
        return dequantised(unpack_matrix(stored, read))
    import gguf

    raw, numbers = read(stored.tensors["values"]), np.empty(stored.shape, np.float32)
    step = max(1, WIDEN_CHUNK // stored.shape[-1])
    for first in range(0, len(raw), step):  # the package needs several times the memory of what it returns
        rows = slice(first, first + step)
        with np.errstate(invalid="ignore", over="ignore"):  # checked below
            numbers[rows] = gguf.dequantize(raw[rows], gguf.GGMLQuantizationType[stored.kind])
    if not np.isfinite(numbers).all():
        raise unfit(f"numbers of {stored.name}", "NaN or infinity", "finite numbers")
    return numbers


def dequantised(matrix: UnpackedMatrix) -> np.ndarray:
    """Computes the numbers of a matrix in fp32."""
    values, columns = matrix.values.astype(np.float32), matrix.values.shape[-1]
    if matrix.group_scale is not None:
        groups = matrix.group_scale.shape[-1]
        index = np.arange(columns) * groups // columns if matrix.group is None else matrix.group
        values = values if matrix.zero is None else values - matrix.zero.astype(np.float32)[..., index]
        values = values * matrix.group_scale.astype(np.float32)[..., index]
    return values * matrix.scale[..., None]
