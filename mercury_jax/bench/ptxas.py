"""What ptxas says of each Pallas kernel that Mosaic GPU compiles: registers, spills, shared memory."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

# What makes Mosaic GPU print the PTX, ptxas' report, and the host's code, which says how a kernel is launched.
ENV = {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_HOST_LLVM": "1"}
_HEAD = re.compile(r"Compiling entry function '([^']+)' for '([^']+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_DYNAMIC = re.compile(r"@mosaic_gpu_get_function\(.*@(\w+)_name, i32 (\d+)")
_ENTRY = re.compile(r"\.visible \.entry (\w+)")
_PRODUCT = re.compile(r"\b(wgmma\.mma_async|tcgen05\.mma|mma\.sync)")


def kernels(text: str) -> list[dict[str, Any]]:
    """One record a kernel, in the order of compilation.

    {name, arch, registers, spill_bytes, stack_bytes, shared_bytes (static, and dynamic as the launch asks for it),
    products (tensor-core instructions in its PTX: kind -> count)}.
    """
    found: list[dict[str, Any]] = []
    products: dict[str, Counter[str]] = {}
    entry = ""
    for line in text.splitlines():
        if head := _ENTRY.search(line):
            entry = head[1]
            products[entry] = Counter()
        elif entry and (product := _PRODUCT.search(line)):
            products[entry][product[1]] += 1
        elif head := _HEAD.search(line):
            found.append({"name": head[1], "arch": head[2], "registers": None, "spill_bytes": 0, "stack_bytes": 0,
                          "shared_bytes": 0, "products": dict(products.get(head[1], {}))})  # fmt: skip
        elif found and (spills := _SPILLS.search(line)):
            found[-1]["stack_bytes"] = int(spills[1])
            found[-1]["spill_bytes"] = int(spills[2]) + int(spills[3])
        elif found and (used := _USED.search(line)):
            shared = _SHARED.search(line)
            found[-1] |= {"registers": int(used[1]), "shared_bytes": int(shared[1]) if shared else 0}
    dynamic = {name: int(size) for name, size in _DYNAMIC.findall(text)}
    return [one | {"shared_bytes": one["shared_bytes"] + dynamic.get(one["name"], 0)} for one in found]
