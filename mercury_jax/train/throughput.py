"""How well a run uses its devices: FLOP/s against the peak (MFU), and the memory of the host.

MFU and memory in use go into `metrics.jsonl` beside the speed. They are of the wall clock and of the machine, so that
they are no part of what a resumed run repeats bit for bit. `keep_host_memory` spares a CPU a third of an update.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import math
import os
import platform
from pathlib import Path

import jax

from mercury_jax.config import ModelConfig
from mercury_jax.sharding import path_name
from mercury_jax.types import Params

# Dense bf16 FLOP/s of the data sheets. A `device_kind` of JAX begins with one of the names; the longest one counts.
PEAK = {
    "NVIDIA B200": 2250e12, "NVIDIA GB200": 2500e12, "NVIDIA H200": 989e12, "NVIDIA GH200": 989e12,
    "NVIDIA H100 PCIe": 756e12, "NVIDIA H100": 989e12, "NVIDIA A100": 312e12, "NVIDIA L40S": 362e12,
    "NVIDIA L4": 121e12, "NVIDIA A10G": 70e12, "TPU v4": 275e12, "TPU v5 lite": 197e12, "TPU v5e": 197e12,
    "TPU v5": 459e12, "TPU v6 lite": 918e12, "TPU v6e": 918e12,
}  # fmt: skip


def peak_flops(kind: str) -> float | None:
    """Looks up the peak of a kind of device.

    Args:
        kind: `jax.Device.device_kind`.

    Returns:
        Dense bf16 FLOP/s, or None where it is not known, as of a CPU.
    """
    names = [name for name in PEAK if kind == name or kind.startswith((f"{name} ", f"{name}-"))]
    return PEAK[max(names, key=len)] if names else None


def flops_per_position(config: ModelConfig, params: Params) -> float:
    """FLOPs of a forward and a backward pass for each position: 6 for each parameter that multiplies it.

    The convention of PaLM (arXiv 2204.02311, appendix B) without its term for attention. Neither recomputation nor
    further passes of an objective count, so that MFU is rather too low than too high.

    Args:
        config: Whether the embedding is also the head, and how many of the experts a token uses.
        params: Arrays or `jax.ShapeDtypeStruct`s.

    Returns:
        FLOPs.
    """
    experts, total = getattr(config, "experts", None), 0.0
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        name = path_name(path)
        if leaf.ndim < 2 or (name == "embed" and not getattr(config, "tied", False)):
            continue  # norms and biases; rows of an embedding are only looked up
        used = (
            experts.active / experts.count if experts and name.endswith(("moe/down", "moe/gate_up")) else 1.0
        )
        total += used * math.prod(leaf.shape)
    return 6.0 * total


def memory() -> dict[str, float]:
    """Memory in use, in GB: of the fullest device of this process where it says so, else of the process itself."""
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


# Parameters of glibc's mallopt (malloc.h). Memory is kept with one arena, no mapped blocks, and a heap never trimmed.
M_ARENA_MAX, M_MMAP_MAX, M_TRIM_THRESHOLD = -8, -4, -1


def keep_host_memory() -> bool:
    """Lets a process that trains on its CPU keep the memory that an update frees, for the next update.

    XLA allocates the temporary values of a program at every call, 520 MB of an update of nano. glibc maps a block of
    that size anew each time, so that the kernel clears it page by page: a third of the update's time. Call it before
    JAX's first computation: a thread keeps the arena that it had before. The process then keeps the most memory that
    it ever used. What the environment says of malloc stays as it is.

    Returns:
        Whether anything was changed: only with glibc, and where JAX has no platform but the CPU.
    """
    chosen = any(name.startswith("MALLOC_") for name in os.environ) or "GLIBC_TUNABLES" in os.environ
    if chosen or platform.libc_ver()[0] != "glibc" or not _cpu_alone():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all([mallopt(M_ARENA_MAX, 1), mallopt(M_MMAP_MAX, 0), mallopt(M_TRIM_THRESHOLD, -1)])


def _cpu_alone() -> bool:
    """Whether JAX has no other platform, without starting the ones it has."""
    if jax.config.values["jax_platforms"]:
        return jax.config.values["jax_platforms"] == "cpu"
    return not importlib.metadata.entry_points(group="jax_plugins") and not importlib.util.find_spec("libtpu")
