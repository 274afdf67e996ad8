"""Chips for ahead-of-time compilation: their topology descriptions for XLA, and their datasheet figures.

`target` parses names such as "h200x8" or "v5e:4x4". JAX is imported only where it is needed, so that a wrong name is
refused quickly.
"""

from __future__ import annotations

import importlib.util
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mercury_jax import install
from mercury_jax.config import refuse

if TYPE_CHECKING:
    from mercury_jax.types import Device

TARGETS = Path(__file__).with_name("targets")
GPUS_PER_HOST = 8
MOST_DEVICES = 4096  # a target with more devices is taken for a typing error


@dataclass(frozen=True, kw_only=True)
class Chip:
    """A device and the figures of its datasheet.

    Attributes:
        name: Name in targets.
        label: Name of the product.
        memory: Memory in bytes.
        bandwidth: Memory bandwidth in bytes/s.
        flops: Dense FLOP/s in bf16 and fp16.
        flops32: FLOP/s of fp32 products at JAX's default precision: TF32 on a GPU, one bf16 pass on a TPU.
        bf16: Whether it multiplies bf16. Without, XLA converts bf16 to fp32 and multiplies that.
        dims: Number of dimensions of a TPU topology; 0 for a GPU.
        kernels: Kind of the device, as in `ops.device`; no kernels are written for other kinds.
    """

    name: str
    label: str
    memory: float
    bandwidth: float
    flops: float
    flops32: float
    bf16: bool = True
    dims: int = 0
    kernels: str = ""

    @property
    def platform(self) -> str:
        """Name of the platform in XLA."""
        return "tpu" if self.dims else "cuda"

    def flop_rate(self, dtype: str) -> float:
        """Returns the FLOP/s of matrix products in a dtype."""
        wide = dtype in ("float32", "float64") or (dtype == "bfloat16" and not self.bf16)
        return self.flops32 if wide else self.flops


ALL = {
    chip.name: chip
    for chip in (
        Chip(name="h200", label="NVIDIA H200", memory=150e9, bandwidth=4.8e12, flops=989e12, flops32=494e12,
             kernels="sm_90a"),
        Chip(name="h100", label="NVIDIA H100 SXM", memory=85e9, bandwidth=3.35e12, flops=989e12, flops32=494e12,
             kernels="sm_90a"),
        Chip(name="a100", label="NVIDIA A100 80 GB", memory=85e9, bandwidth=2.039e12, flops=312e12, flops32=156e12,
             kernels="sm_80"),
        Chip(name="l4", label="NVIDIA L4", memory=24e9, bandwidth=0.3e12, flops=121e12, flops32=60e12,
             kernels="sm_89"),
        Chip(name="t4", label="NVIDIA T4", memory=15.8e9, bandwidth=0.32e12, flops=65e12, flops32=8.1e12,
             bf16=False, kernels="sm_75"),
        Chip(name="rtx5090", label="NVIDIA RTX 5090", memory=34e9, bandwidth=1.792e12, flops=209e12, flops32=104e12,
             kernels="sm_120"),
        Chip(name="b200", label="NVIDIA B200", memory=190e9, bandwidth=8.0e12, flops=2250e12, flops32=1125e12,
             kernels="sm_100a"),
        Chip(name="v4", label="TPU v4", memory=32 * 2**30, bandwidth=1.228e12, flops=275e12, flops32=275e12, dims=3,
             kernels="tpu"),
        Chip(name="v5e", label="TPU v5e", memory=16 * 2**30, bandwidth=0.819e12, flops=197e12, flops32=197e12,
             dims=2, kernels="tpu"),
        Chip(name="v5p", label="TPU v5p", memory=95 * 2**30, bandwidth=2.765e12, flops=459e12, flops32=459e12,
             dims=3, kernels="tpu"),
        Chip(name="v6e", label="TPU v6e", memory=32 * 2**30, bandwidth=1.64e12, flops=918e12, flops32=918e12, dims=2,
             kernels="tpu"),
    )
}  # fmt: skip

FORMS = (
    "t4, l4, a100, rtx5090, h100, h200, b200, h200x8, h200x64, v5e-1, v6e-1, v5e:4x4, v5p:8x8x8, and the like"
)
SINGLE = {"v5e-1": "v5e:1x1", "v6e-1": "v6e:1x1"}  # Colab's names of one chip


@dataclass(frozen=True)
class Target:
    """A number of devices of one chip.

    Attributes:
        name: The name that was parsed, such as "h200x8".
        chip: The chip.
        devices: Number of devices.
        topology: Topology for XLA: slices x hosts x GPUs per host, or the shape of a TPU slice such as "4x4".
    """

    name: str
    chip: Chip
    devices: int
    topology: str

    @property
    def device(self) -> Device | None:
        """The device that kernels are compiled for; None for a chip without kernels."""
        from mercury_jax.types import Device  # imports JAX

        return Device(self.chip.kernels) if self.chip.kernels else None

    def describe(self) -> Any:
        """Returns XLA's description of the devices. The plugin of the chip must be installed."""
        from jax.experimental import topologies

        if self.chip.platform == "tpu":
            return topologies.get_topology_desc(
                platform="tpu", topology_name=f"{self.chip.name}:{self.topology}"
            )
        text = (TARGETS / f"{self.chip.name}.txtpb").read_text(encoding="utf-8")
        return topologies.get_topology_desc(
            platform="cuda", topology_name="", topology=self.topology, target_config=text
        )


def target(name: str) -> Target:
    """Parses the name of a target."""
    found = re.fullmatch(r"([a-z]+\d+[a-z]?)(?:x(\d+)|:(\d+(?:x\d+)*))?", SINGLE.get(name, name))
    chip = ALL.get(found[1]) if found else None
    if found is None or chip is None:
        raise refuse("--for", name, FORMS)
    if chip.dims:
        dims = [int(n) for n in found[3].split("x")] if found[3] else []
        if len(dims) != chip.dims or not 1 <= math.prod(dims) <= MOST_DEVICES:
            form = f"{chip.name}:{'x'.join('4' * chip.dims)}"
            allowed = f"{form} and the like, {chip.dims} sizes and at most {MOST_DEVICES} chips"
            raise refuse("--for", name, allowed)
        return Target(name, chip, math.prod(dims), "x".join(map(str, dims)))
    if found[3]:
        raise refuse("--for", name, f"{chip.name}xN, N devices of {GPUS_PER_HOST} a host")
    devices = int(found[2] or 1)
    if not 1 <= devices <= MOST_DEVICES or (devices > GPUS_PER_HOST and devices % GPUS_PER_HOST):
        allowed = f"1..{GPUS_PER_HOST} devices, or a multiple of {GPUS_PER_HOST} up to {MOST_DEVICES}"
        raise refuse("--for", name, allowed)
    hosts = -(-devices // GPUS_PER_HOST)
    return Target(name, chip, devices, f"1x{hosts}x{devices // hosts}")


def check_plugin(chip: Chip) -> None:
    """Refuses a chip whose compiler is not installed."""
    plugins = ("libtpu",) if chip.dims else ("jax_cuda12_plugin", "jax_cuda13_plugin")
    if not any(importlib.util.find_spec(name) for name in plugins):
        what = "libtpu" if chip.dims else "JAX's CUDA plugin"
        raise ValueError(
            f"compiling for {chip.label} needs {what}, which this Python does not have: "
            f"{install.command('deviceless')}, best in an environment of its own"
        )


def mesh_sizes(text: str | None) -> dict[str, int]:
    """Parses the sizes of a mesh."""
    if text is None:
        return {}
    from mercury_jax.sharding import AXES

    found = {}
    for pair in text.split(","):
        name, equals, value = pair.partition("=")
        if name not in AXES or not equals or not value.removeprefix("-").isdigit():
            raise refuse("--mesh", text, f"{', '.join(f'{axis}=N' for axis in AXES)}, separated by commas")
        found[name] = int(value)
    return found


def datasheet_roofline(chip: Chip, dtype: str, flops: float, moved: float) -> dict[str, Any]:
    """Computes the shortest possible time of a program from the datasheet of the chip (the roofline model).

    Returns:
        `bytes`, `memory_seconds`, `compute_seconds`, the larger of both as `seconds`, and `bound`: "memory" or
        "compute".
    """
    memory, compute = moved / chip.bandwidth, flops / chip.flop_rate(dtype)
    return {
        "bytes": moved, "memory_seconds": memory, "compute_seconds": compute, "seconds": max(memory, compute),
        "bound": "memory" if memory >= compute else "compute",
    }  # fmt: skip
