"""What compressed-tensors packs and unpacks: `python qa/parity/quantised.py` writes quantised.safetensors.

Needs the package `compressed-tensors` (0.20.0 with torch 2.15.0 made the file), which `make parity` does not install.
For each case the file has the tensors of a random matrix as the package compresses it, and as `twin` the matrix that
the package decompresses from them, in float32.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # the package would compile its packing of 4-bit floats

import torch  # pyright: ignore[reportMissingImports]
from compressed_tensors.compressors.base import BaseCompressor  # pyright: ignore[reportMissingImports]
from compressed_tensors.compressors.nvfp4.helpers import (  # pyright: ignore[reportMissingImports]
    unpack_fp4_from_uint8,
)
from compressed_tensors.quantization import (  # pyright: ignore[reportMissingImports]
    QuantizationArgs,
    QuantizationScheme,
)
from compressed_tensors.quantization.lifecycle.forward import dequantize  # pyright: ignore[reportMissingImports]
from compressed_tensors.quantization.utils import (  # pyright: ignore[reportMissingImports]
    calculate_qparams,
    generate_gparam,
)
from safetensors.torch import save_file  # pyright: ignore[reportMissingImports]

OUT = Path(__file__).parents[2] / "tests/hub/goldens/quantised.safetensors"
INT = dict(type="int", num_bits=4, strategy="group", group_size=32)
CASES = {  # arguments of the weights, and the format
    "int4_groups": (INT | {"symmetric": True}, "pack-quantized"),
    "int4_zero_points": (INT | {"symmetric": False}, "pack-quantized"),
    "int8_packed": (INT | {"num_bits": 8, "symmetric": False}, "pack-quantized"),
    "int8_channel": (dict(type="int", num_bits=8, strategy="channel", symmetric=False), "int-quantized"),
    "fp8_channel": (dict(type="float", num_bits=8, strategy="channel"), "float-quantized"),
    "fp8_tensor": (dict(type="float", num_bits=8, strategy="tensor"), "float-quantized"),
    "fp8_blocks": (dict(type="float", num_bits=8, strategy="block", block_structure=[32, 48]),
                   "float-quantized"),
    "nvfp4": (dict(type="float", num_bits=4, strategy="tensor_group", group_size=16,
                   scale_dtype=torch.float8_e4m3fn, zp_dtype=torch.float8_e4m3fn), "nvfp4-pack-quantized"),
}  # fmt: skip
SHAPE = (40, 96)


def parts_of(w: torch.Tensor, args: QuantizationArgs) -> torch.Tensor:
    """The numbers that share a scale, in the last axis of an array whose other axes are those of the scales."""
    if args.strategy == "tensor":
        return w.reshape(1, -1)
    if args.strategy == "block":
        rows, columns = args.block_structure
        padded = torch.nn.functional.pad(w, (0, -w.shape[1] % columns, 0, -w.shape[0] % rows))
        blocks = padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
        return blocks.transpose(1, 2).flatten(2)
    return w.reshape(len(w), -1, args.group_size or w.shape[1])


def case(seed: int, about: dict, layout: str) -> dict[str, torch.Tensor]:
    """The tensors of one matrix, and the matrix that they stand for."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(SHAPE, generator=generator) * torch.rand((SHAPE[0], 1), generator=generator)
    args = QuantizationArgs(**about)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=layout)
    parts = parts_of(w, args)
    whole = generate_gparam(w.min(), w.max()) if layout.startswith("nvfp4") else None
    scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), args, global_scale=whole)
    state: dict[str, torch.Tensor | None] = {"weight": w, "weight_scale": scale, "weight_zero_point": zero}
    if whole is not None:
        state["weight_global_scale"] = whole
    kind = BaseCompressor.get_value_from_registry(layout)
    found = {name: x for name, x in kind.compress(dict(state), scheme).items() if x is not None}
    if whole is None:
        twin = kind.decompress(dict(found), scheme)["weight"]
    else:  # its own decompression rounds to bfloat16
        values = unpack_fp4_from_uint8(found["weight_packed"], *SHAPE, dtype=torch.float32)
        twin = dequantize(
            values, found["weight_scale"].float(), args=args, global_scale=whole, dtype=torch.float32
        )
    return found | {"twin": twin.float()}


if __name__ == "__main__":
    tensors = {
        f"{name}/{field}": x.contiguous()
        for seed, (name, how) in enumerate(CASES.items())
        for field, x in case(seed, *how).items()
    }
    save_file(tensors, OUT)
    print(f"{len(tensors)} tensors, {OUT.stat().st_size} bytes in {OUT}", file=sys.stderr)
