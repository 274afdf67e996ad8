"""Reads the quantisation in a config.json, and refuses what is not supported before any tensor is read.

`hub.quantised` finds the tensors. Their names, shapes and dtypes say how they are stored; config.json says the shape of
blocks, which modules are meant, and what else changes the arithmetic.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from mercury_jax.config import refuse

Json = Mapping[str, Any]
KEYS = ("quantization_config", "compression_config")  # the second is what older llm-compressor wrote
LAYOUTS = (
    "float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "nvfp4-pack-quantized", "mixed-precision",
)  # fmt: skip
SUPPORTED = (
    "compressed-tensors ("
    + ", ".join(LAYOUTS)
    + "), fp8, gptq and awq (4 or 8 bits), modelopt (FP8, NVFP4); or none: "
    "load the unquantised files, with quantise='int8' or 'fp8'"
)
MAX_PATTERN = 500  # characters of a regular expression in config.json


class BlockType(NamedTuple):
    """A type of tensors in a GGUF file: `numbers` consecutive inputs are stored in `nbytes` bytes."""

    name: str
    numbers: int
    nbytes: int


class Scheme(NamedTuple):
    """How config.json says that matrices are stored; None: it does not say.

    Attributes:
        targets: Names of modules, "re:" and a regular expression, or names of classes.
        bits: Bits of a value.
        block: Rows and columns [out, in] of the matrix that share a scale, for scales of blocks.
        group: Inputs that share a scale, for scales of groups.
        symmetric: Whether there are no zero points. If a file stores some for a symmetric matrix, they are ignored:
            by definition they are in the middle of the range (8 of 4 bits), and some files store other ones.
    """

    targets: tuple[str, ...] = ("Linear",)
    bits: int | None = None
    block: tuple[int, int] | None = None
    group: int | None = None
    symmetric: bool | None = None


class Quantisation(NamedTuple):
    """The quantisation of a checkpoint, from its config.json.

    Attributes:
        method: `quant_method`.
        layout: The method with its variant, for people.
        schemes: For each group of modules, how they are stored.
        ignored: Modules that are not quantised, as `Scheme.targets`.
        offset: Number to add to the zero points that are stored (1 in GPTQ's first format).
        activations: Whether the reference also rounds activations.
        types: With "gguf", how each quantised tensor is stored; other tensors are not quantised.
    """

    method: str
    layout: str
    schemes: tuple[Scheme, ...] = (Scheme(),)
    ignored: tuple[str, ...] = ()
    offset: int = 0
    activations: bool = False
    types: Mapping[str, BlockType] = MappingProxyType({})


def quantisation_of(config: Json, file: str) -> Quantisation | None:
    """Reads the quantisation in a config.json."""
    named = [key for key in KEYS if config.get(key) is not None]
    if not named:
        return None
    where, about = f"{file}: {named[0]}", config[named[0]]
    if not isinstance(about, Mapping):
        raise refuse(where, about, f"an object, of {SUPPORTED}")
    method = about.get("quant_method", "compressed-tensors" if "config_groups" in about else None)
    if method not in _METHODS:
        raise refuse(f"{where}.quant_method", method, SUPPORTED)
    return _METHODS[method](about, where)


def _allowed(where: str, about: Json, **values: Sequence[Any]) -> None:
    """Refuses a key of an object that has a value other than these; a missing key is allowed."""
    for key, allowed in values.items():
        if key in about and about[key] not in allowed:
            raise refuse(f"{where}.{key}", about[key], ", ".join(map(repr, allowed)))


def _compressed_tensors(about: Json, where: str) -> Quantisation:
    layout = about.get("format")
    _allowed(
        where,
        about,
        format=LAYOUTS,
        quantization_status=("compressed", "frozen"),
        transform_config=({}, None),
    )
    sparsity = about.get("sparsity_config") or {}
    _allowed(f"{where}.sparsity_config", sparsity, format=("dense",))
    groups = about.get("config_groups")
    if not isinstance(groups, Mapping) or not all(isinstance(one, Mapping) for one in groups.values()):
        raise refuse(f"{where}.config_groups", groups, "an object with an object for each group")
    schemes, activations = [], False
    for name, one in groups.items():
        inside = f"{where}.config_groups.{name}"
        _allowed(inside, one, format=(*LAYOUTS, None))
        if (weights := one.get("weights")) is None:
            continue
        _allowed(
            f"{inside}.weights", weights, num_bits=(4, 8), type=("int", "float"), dynamic=(False,),
            strategy=("tensor", "channel", "group", "block", "tensor_group"),
        )  # fmt: skip
        block, group = weights.get("block_structure"), weights.get("group_size")
        schemes.append(
            Scheme(
                targets=_names(one.get("targets"), f"{inside}.targets"), bits=weights.get("num_bits"),
                block=_block(block, f"{inside}.weights.block_structure"),
                group=_positive(group, f"{inside}.weights.group_size"), symmetric=weights.get("symmetric"),
            )
        )  # fmt: skip
        activations |= one.get("input_activations") is not None
    ignored = _names(about.get("ignore") or [], f"{where}.ignore")
    label = f"compressed-tensors, {layout or 'no format named'}"
    return Quantisation("compressed-tensors", label, tuple(schemes), ignored, activations=activations)


def _modelopt(about: Json, where: str) -> Quantisation:
    _allowed(
        where, about, quant_algo=("FP8", "NVFP4"), pre_quant_scale=(False, None), has_zero_point=(False, None)
    )
    label = f"modelopt, {about.get('quant_algo', 'no algorithm named')}"
    return Quantisation("modelopt", label, activations=True)


def _fp8(about: Json, where: str) -> Quantisation:
    _allowed(where, about, fmt=("e4m3", "float8_e4m3fn"), activation_scheme=("dynamic", "static", None))
    block = _block(about.get("weight_block_size"), f"{where}.weight_block_size")
    label = "fp8" if block is None else f"fp8 in blocks of {block[0]} x {block[1]}"
    return Quantisation("fp8", label, (Scheme(bits=8, block=block),), activations=True)


def _gptq(about: Json, where: str) -> Quantisation:
    _allowed(
        where, about, bits=(4, 8), checkpoint_format=("gptq", "gptq_v2"), is_marlin_format=(False, None),
        pack_dtype=("int32",), sym=(True, False, None),
    )  # fmt: skip
    symmetric = about.get("sym")
    for pattern, changes in (about.get("dynamic") or {}).items():  # other settings for some modules
        _allowed(f"{where}.dynamic.{pattern}", changes or {}, sym=(symmetric,))
    first = about.get("checkpoint_format", "gptq") == "gptq"
    return Quantisation("gptq", "GPTQ", (Scheme(symmetric=symmetric),), offset=1 if first else 0)


def _awq(about: Json, where: str) -> Quantisation:
    _allowed(where, about, bits=(4,), w_bit=(4,), version=("gemm", "GEMM"), zero_point=(True,))
    return Quantisation("awq", "AWQ", (Scheme(),))


def _gguf(about: Json, where: str) -> Quantisation:
    types = about["types"]
    named = collections.Counter(kind.name for kind in types.values())
    label = ", ".join(f"{name} ({count})" for name, count in sorted(named.items()))
    return Quantisation("gguf", f"GGUF, {label}", types=types)


_METHODS: Mapping[str | None, Callable[[Json, str], Quantisation]] = {
    "compressed-tensors": _compressed_tensors, "modelopt": _modelopt, "fp8": _fp8, "gptq": _gptq, "awq": _awq,
    "gguf": _gguf,
}  # fmt: skip


def _names(value: Any, where: str) -> tuple[str, ...]:
    """Checks a list of names, regular expressions ("re:...") and classes."""
    if not isinstance(value, list) or not all(isinstance(x, str) and len(x) <= MAX_PATTERN for x in value):
        raise refuse(where, str(value)[:200], f"a list of strings of at most {MAX_PATTERN} characters")
    for pattern in value:
        try:
            re.compile(pattern.removeprefix("re:"))
        except (re.error, RecursionError, OverflowError) as error:
            if pattern.startswith("re:"):
                raise refuse(where, pattern, f"a regular expression ({error})") from None
    return tuple(value)


def _positive(value: Any, where: str) -> int | None:
    """Checks a number of inputs; -1 and null say that all share a scale."""
    if value is None or value == -1:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise refuse(where, value, "an integer of 1 or more, -1, or null")
    return value


def _block(value: Any, where: str) -> tuple[int, int] | None:
    """Checks the rows and columns of a block; older files have a string such as "128x128"."""
    if value is None:
        return None
    found = value.split("x") if isinstance(value, str) else value
    if (
        not isinstance(found, list)
        or len(found) != 2
        or not all(str(n).isdecimal() and int(n) > 0 for n in found)
    ):
        raise refuse(where, value, "two positive integers: rows and columns")
    return int(found[0]), int(found[1])


def _matches(module: str, targets: Sequence[str], classes: bool = True) -> bool:
    """Says whether a module is named by `targets`. A name without dots that begins as a class does matches any."""
    for target in targets:
        if target.startswith("re:"):
            if re.match(target[3:], module):
                return True
        elif target == module or (classes and "." not in target and target[:1].isupper()):
            return True
    return False


def scheme_of(quantisation: Quantisation, module: str) -> Scheme | None:
    """Finds how config.json says that a module is stored. Names go before classes."""
    if _matches(module, quantisation.ignored, classes=False):
        return None
    for classes in (False, True):
        for scheme in quantisation.schemes:
            if _matches(module, scheme.targets, classes):
                return scheme
    return None
