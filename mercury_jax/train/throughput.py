"""Model FLOPs utilisation (MFU) and memory in use, which `report.py` writes into `metrics.jsonl`.

Both depend on the machine and the wall clock, unlike the other metrics, which a resumed run repeats bit for bit.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import jax

from mercury_jax.config import ModelConfig
from mercury_jax.sharding import path_name
from mercury_jax.types import Params

# Dense bf16 FLOP/s from the data sheets (T4: fp16, since it has no bf16). A `device_kind` of JAX starts with one of
# these names; the longest one counts.
PEAK = {
    "NVIDIA B200": 2250e12, "NVIDIA GB200": 2500e12, "NVIDIA H200": 989e12, "NVIDIA GH200": 989e12,
    "NVIDIA H100 PCIe": 756e12, "NVIDIA H100": 989e12, "NVIDIA A100": 312e12, "NVIDIA L40S": 362e12,
    "NVIDIA L4": 121e12, "NVIDIA A10G": 70e12, "Tesla T4": 65e12,
    "NVIDIA GeForce RTX 5090": 209e12, "TPU v4": 275e12, "TPU v5 lite": 197e12, "TPU v5e": 197e12,
    "TPU v5": 459e12, "TPU v6 lite": 918e12, "TPU v6e": 918e12,
}  # fmt: skip


def peak_flops(kind: str) -> float | None:
    """Looks up the peak FLOP/s of a kind of device.

    Args:
        kind: `jax.Device.device_kind`.

    Returns:
        Dense bf16 FLOP/s; None if it is not known, for example for a CPU.
    """
    names = [name for name in PEAK if kind == name or kind.startswith((f"{name} ", f"{name}-"))]
    return PEAK[max(names, key=len)] if names else None


def flops_per_position(config: ModelConfig, params: Params) -> float:
    """Estimates the FLOPs of a forward and a backward pass per position: 6 per parameter that the position uses.

    This is the convention of PaLM (arXiv 2204.02311, appendix B) without its attention term. Rematerialisation and
    additional passes of an objective do not count, so the MFU is rather too low than too high.

    Args:
        config: Says whether the embedding is also the head, and how many experts a token uses.
        params: Parameters, as arrays or `jax.ShapeDtypeStruct`.

    Returns:
        FLOPs per position of a row.
    """
    experts, total = getattr(config, "experts", None), 0.0
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        name = path_name(path)
        if leaf.ndim < 2 or (name == "embed" and not getattr(config, "tied", False)):
            continue  # norms and biases, and an embedding that is only looked up, multiply nothing
        used = (
            experts.active / experts.count if experts and name.endswith(("moe/down", "moe/gate_up")) else 1.0
        )
        total += used * math.prod(leaf.shape)
    return 6.0 * total


def memory() -> dict[str, float]:
    """Measures the memory in use.

    Returns:
        `device_memory_gb` and `device_memory_peak_gb` of the fullest device of this process, in 10^9 bytes. On devices
        without statistics (CPU) `host_memory_gb`, the resident memory of the process. Empty if neither is known.
    """
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    if all("bytes_in_use" in found for found in stats):
        now, peak = (
            max(found.get(key, 0) for found in stats) for key in ("bytes_in_use", "peak_bytes_in_use")
        )
        return {"device_memory_gb": round(now / 1e9, 3), "device_memory_peak_gb": round(peak / 1e9, 3)}
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):  # not Linux
        return {}
    return {"host_memory_gb": round(pages * os.sysconf("SC_PAGE_SIZE") / 1e9, 3)}
