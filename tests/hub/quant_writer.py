"""Writes quantised checkpoints as llm-compressor, Model-Optimizer, GPTQModel and AutoAWQ publish them, and their twins.

Each writer rounds one matrix [out, in] and returns its tensors and the matrix that they stand for. Packing is written
with one shift per number, after the published layouts, so that it shares no code with what unpacks it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from mercury_jax import models
from mercury_jax.checkpoint import tensors
from mercury_jax.hub.family import family_of
from mercury_jax.hub.params import shapes_of, to_theirs

E4M3 = ml_dtypes.float8_e4m3fn
LEVELS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
Tensors = dict[str, np.ndarray]
Writer = Callable[
    [np.ndarray], tuple[Tensors, np.ndarray]
]  # matrix -> tensors by suffix of the module, its twin

# --- packing, one number at a time


def words(numbers: np.ndarray, bits: int) -> np.ndarray:
    """int32 [..., n * bits / 32] of unsigned numbers [..., n]; the first number is in the lowest bits."""
    per = 32 // bits
    padded = np.pad(
        numbers.astype(np.uint32), [(0, 0)] * (numbers.ndim - 1) + [(0, -numbers.shape[-1] % per)]
    )
    out = np.zeros((*padded.shape[:-1], padded.shape[-1] // per), np.uint32)
    for i in range(padded.shape[-1]):
        out[..., i // per] |= padded[..., i] << np.uint32(bits * (i % per))
    return out.view(np.int32)


def grouped(w: np.ndarray, groups: int) -> np.ndarray:
    return w.reshape(len(w), groups, -1)


def integers(w, groups, bits, symmetric, kind=np.float32):
    """Unsigned values [out, in], zero points and scales [out, groups], and the matrix that they stand for."""
    parts, top = grouped(w, groups), 2**bits - 1
    if symmetric:
        scale = np.abs(parts).max(-1) / (2 ** (bits - 1) - 0.5)
        zero = np.full(scale.shape, 2 ** (bits - 1))
    else:
        scale = (np.maximum(parts.max(-1), 0) - np.minimum(parts.min(-1), 0)) / top
        zero = np.rint(-np.minimum(parts.min(-1), 0) / scale)
    scale = scale.astype(kind).astype(np.float32)
    values = np.clip(np.rint(parts / scale[..., None]) + zero[..., None], 0, top)
    twin = (values - zero[..., None]) * scale[..., None]
    return (
        values.reshape(w.shape).astype(np.int64),
        zero.astype(np.int64),
        scale.astype(kind),
        twin.reshape(w.shape),
    )


# --- compressed-tensors


def fp8(per: str = "channel", kind: Any = ml_dtypes.bfloat16) -> Writer:
    def write(w):
        size = np.abs(w).max() if per == "tensor" else np.abs(w).max(1, keepdims=True)
        scale = (
            np.asarray(size / 448)
            .astype(kind)
            .astype(np.float32)
            .reshape((1,) if per == "tensor" else (-1, 1))
        )
        values = (w / scale).astype(E4M3)
        found = {"weight": values, "weight_scale": scale.astype(kind), "input_scale": np.ones(1, np.float32)}
        return found, values.astype(np.float32) * scale

    return write


def fp8_blocks(rows: int, columns: int, name: str = "weight_scale_inv") -> Writer:
    def write(w):
        count = (-(-w.shape[0] // rows), -(-w.shape[1] // columns))
        whole = lambda scale: np.kron(scale, np.ones((rows, columns), np.float32))[: w.shape[0], : w.shape[1]]
        scale = np.zeros(count, np.float32)
        for i, j in np.ndindex(*count):
            scale[i, j] = np.abs(w[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]).max() / 448
        values = (w / whole(scale)).astype(E4M3)
        return {"weight": values, name: scale}, values.astype(np.float32) * whole(scale)

    return write


def int8(symmetric: bool = True) -> Writer:
    def write(w):
        values, zero, scale, twin = integers(w, 1, 8, symmetric)
        found = {"weight": (values - 128).astype(np.int8), "weight_scale": scale}
        return found | ({} if symmetric else {"weight_zero_point": (zero - 128).astype(np.int8)}), twin

    return write


def packed(bits: int, size: int | None, symmetric: bool = True, order: bool = False) -> Writer:
    def write(w):
        groups = 1 if size is None else w.shape[1] // size
        # With an order, the inputs that the first group has are those that come first in `perm`.
        perm = np.random.default_rng(w.shape[1]).permutation(w.shape[1]) if order else np.arange(w.shape[1])
        back = np.argsort(perm)
        values, zero, scale, twin = integers(w[:, perm], groups, bits, symmetric, ml_dtypes.bfloat16)
        found = {"weight_packed": words(values[:, back], bits), "weight_scale": scale,
                 "weight_shape": np.array(w.shape, np.int64)}  # fmt: skip
        if not symmetric:
            found["weight_zero_point"] = np.ascontiguousarray(words(zero.T, bits).T)
        if order:
            found["weight_g_idx"] = (back // (w.shape[1] // groups)).astype(np.int32)
        return found, twin[:, back]

    return write


def nvfp4(modelopt: bool = False) -> Writer:
    def write(w):
        parts = grouped(w, w.shape[1] // 16)
        whole = np.float32(448 * 6 / np.abs(w).max())
        scale = (np.abs(parts).max(-1) / 6 * whole).astype(E4M3)  # of a group, times the scale of the matrix
        true = scale.astype(np.float32)[..., None] / whole
        nearest = np.abs(np.abs(parts / true)[..., None] - LEVELS).argmin(-1)
        codes = (nearest + 8 * (parts < 0)).reshape(w.shape).astype(np.uint8)
        halves = codes[:, ::2] | codes[:, 1::2] << 4
        twin = (np.where(parts < 0, -1, 1) * LEVELS[nearest] * true).reshape(w.shape)
        if modelopt:
            return {"weight": halves, "weight_scale": scale, "weight_scale_2": np.float32(1 / whole).reshape(()),
                    "input_scale": np.float32(0.1).reshape(())}, twin  # fmt: skip
        return {"weight_packed": halves, "weight_scale": scale, "weight_global_scale": whole.reshape(1),
                "input_global_scale": np.ones(1, np.float32)}, twin  # fmt: skip

    return write


# --- GPTQ and AWQ


def gptq(
    bits: int = 4, size: int = 16, symmetric: bool = True, act_order: bool = False, first: bool = True
) -> Writer:
    def write(w):
        inputs = w.shape[1]
        perm = np.random.default_rng(inputs).permutation(inputs) if act_order else np.arange(inputs)
        back = np.argsort(perm)
        values, zero, scale, twin = integers(w[:, perm], inputs // size, bits, symmetric, np.float16)
        # The first format stores the zero point less one, as one subtraction of the whole words.
        less = np.uint32(sum(1 << (bits * i) for i in range(32 // bits)) if first else 0)
        zeros = (words(zero.T, bits).view(np.uint32) - less).view(np.int32)
        found = {"qweight": np.ascontiguousarray(words(values[:, back], bits).T), "qzeros": zeros,
                 "scales": np.ascontiguousarray(scale.T), "g_idx": (back // size).astype(np.int32)}  # fmt: skip
        return found, twin[:, back]

    return write


def awq(size: int = 16) -> Writer:
    def write(w):
        values, zero, scale, twin = integers(w, w.shape[1] // size, 4, False, np.float16)

        def interleaved(
            numbers,
        ):  # [rows, out]: of 8 outputs, a word has 0, 2, 4, 6, 1, 3, 5, 7 from its lowest bits
            out = np.zeros((len(numbers), numbers.shape[1] // 8), np.uint32)
            for word in range(out.shape[1]):
                for place, one in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
                    out[:, word] |= numbers[:, 8 * word + one].astype(np.uint32) << np.uint32(4 * place)
            return out.view(np.int32)

        return {"qweight": interleaved(values.T), "qzeros": interleaved(zero.T),
                "scales": np.ascontiguousarray(scale.T)}, twin  # fmt: skip

    return write


# --- folders


def random_tensors(config: Mapping[str, Any], seed: int = 0) -> Tensors:
    """Random tensors of the checkpoint that a config.json describes, in its names."""
    family, _ = family_of(config)
    model = models.build(family.read({**config}))
    rng, found = np.random.default_rng(seed), Tensors()
    for path, source in family.names(model.config).items():
        shape = shapes_of(model)[path].shape
        noise = rng.standard_normal(shape).astype(np.float32)
        ours = 1 + 0.1 * noise if len(shape) < 2 else noise * float(0.5 / np.prod(shape[-2:]) ** 0.25)
        rows = source.rows
        for name, x in to_theirs(source._replace(rows=None), ours).items():
            if rows is None:
                found[name] = x
            else:
                whole = found.setdefault(name, np.zeros((rows[2], *x.shape[1:]), np.float32))
                whole[rows[0] : rows[1]] = x
    return found


def split_experts(given: Tensors) -> Tensors:
    """Single experts of stacked ones, as tools that know only Linear write them."""
    found = Tensors()
    for name, x in given.items():
        stem, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            for e, one in enumerate(x):
                gate, up = np.split(one, 2)
                found |= {f"{stem}.{e}.gate_proj.weight": gate, f"{stem}.{e}.up_proj.weight": up}
        elif last == "down_proj":
            found |= {f"{stem}.{e}.down_proj.weight": one for e, one in enumerate(x)}
        else:
            found[name] = x
    return found


def fused_experts(given: Tensors, like: Tensors) -> Tensors:
    """The inverse of `split_experts`, for the tensors of `like`."""
    found = {name: x for name, x in given.items() if ".experts." not in name or name in like}
    for name in like:
        stem, _, last = name.rpartition(".")
        count = range(len(like[name]))
        each = lambda part, stem=stem, count=count: np.stack(
            [given[f"{stem}.{e}.{part}.weight"] for e in count]
        )
        if last == "gate_up_proj":
            found[name] = np.concatenate([each("gate_proj"), each("up_proj")], axis=1)
        elif last == "down_proj":
            found[name] = each("down_proj")
    return found


def write_pair(
    folder: Path, config: Mapping[str, Any], quantisation: Mapping[str, Any], choose: Callable[[str], Writer | None],
    change: Callable[[Tensors], None] = lambda found: None,
) -> tuple[Path, Path]:  # fmt: skip
    """Writes a quantised checkpoint, and one whose matrices are those that it stands for.

    Args:
        folder: Where to write both.
        config: config.json without the quantisation.
        quantisation: `quantization_config`.
        choose: The writer of the module of a matrix; None: it is not quantised.
        change: Changes the quantised tensors.

    Returns:
        The folders.
    """
    plain = random_tensors(config)
    split, small, twin = split_experts(plain), Tensors(), Tensors()
    for name, x in split.items():
        module = name.removesuffix(".weight")
        writer = choose(module) if x.ndim == 2 else None
        if writer is None:
            small[name] = twin[name] = x
            continue
        found, matrix = writer(x)
        twin[name] = matrix.astype(np.float32)
        small |= {f"{module}.{field}": value for field, value in found.items()}
    change(small)
    kinds = {
        "quantised": (small, {"quantization_config": quantisation}),
        "twin": (fused_experts(twin, plain), {}),
    }
    for name, (arrays, more) in kinds.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps({**config, **more}))
        lazy = [tensors.LazyTensor(n, a.shape, a.dtype, lambda a=a: a) for n, a in arrays.items()]
        tensors.write(folder / name / "model.safetensors", lazy)
    return folder / "quantised", folder / "twin"
