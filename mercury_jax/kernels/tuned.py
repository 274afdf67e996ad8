"""Settings of kernels that were measured on a GPU: `mercury bench gpu tune` writes them, the kernels look them up.

What a kernel leaves open, such as the rows of a tile, is a record of *knobs*. Its default is a heuristic beside the
kernel; a measured record replaces it for one device, form (`kernels.device`) and bucket of shapes. Records are in
`tuned/<device>.json`, in the folder of `kernels.json` or else in this package, which has none until a GPU was tuned.
Compilation for a device that is not here uses the heuristics.
"""

from __future__ import annotations

import functools
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from mercury_jax.kernels import device as kernel_device
from mercury_jax.types import Device


class GroupedKnobs(NamedTuple):
    """Choices of a grouped product."""

    tile: int  # rows that are multiplied at a time
    workers: int  # computing warpgroups, each with 64 outputs; with a gate two, for gate and up
    depth: int  # inputs of a step
    stages: int  # steps that the loads are ahead


class AttentionKnobs(NamedTuple):
    """Choices of attention."""

    workers: int  # computing warpgroups, each with 64 rows; for head size 512 two that share them
    keys: int  # of a tile
    stages: int  # tiles in flight
    splits: int  # programs that share the keys of a row, a power of two


Knobs = TypeVar("Knobs", GroupedKnobs, AttentionKnobs)
# The files by which a measured time changes.
SOURCES = {
    GroupedKnobs: ("hopper/grouped_matmul.py",),
    AttentionKnobs: tuple(
        f"hopper/{name}.py" for name in ("attention", "head_dim_512", "split_merge", "tile_loop")
    ),
}


def kernel_name(operation: str, knobs: tuple[int, ...]) -> str:
    """Names a kernel in profiles and in the report of ptxas."""
    return "_".join([operation, *map(str, knobs)])


def bucket(size: int) -> int:
    """The next power of two: sizes that share a bucket share their settings."""
    return 1 << max(size - 1, 0).bit_length()


def find(kind: type[Knobs], form: str, shapes: str, device: Device | None) -> Knobs | None:
    """Looks up the measured settings of a call."""
    if device is not None:
        return None
    for entry in entries(kernel_device.device_name()):
        if (entry["form"], entry["shapes"]) == (form, shapes) and set(entry["settings"]) == set(kind._fields):
            return kind(**entry["settings"])
    return None


def entries(device: str) -> Iterator[dict[str, Any]]:
    """Reads what was measured on a device, such as "NVIDIA H200", with the sources that the kernels have now.

    The user's entries come before those of the package.
    """
    hashes = {kernel_device.sources(*files) for files in SOURCES.values()}
    for file in filter(None, (user_file(device), Path(__file__).parent / "tuned" / _file_name(device))):
        if file.is_file():
            yield from (x for x in _read(file, kernel_device.file_state(file)) if x["sources"] in hashes)


def write(kind: type[Knobs], device: str, entry: Mapping[str, Any]) -> Path | None:
    """Stores an entry in the user's file, in the place of one of the same form and shapes.

    Args:
        entry: `form`, `shapes`, `settings` and what was measured.
    """
    if (file := user_file(device)) is None:
        return None
    old = _read(file, kernel_device.file_state(file)) if file.is_file() else []
    kept = [x for x in old if (x["form"], x["shapes"]) != (entry["form"], entry["shapes"])]
    return kernel_device.replace_json(
        file, [*kept, {**entry, "sources": kernel_device.sources(*SOURCES[kind])}]
    )


def user_file(device: str) -> Path | None:
    """The file of a device beside `kernels.json`; None if the user wants no file."""
    checks = kernel_device.checks_file()
    return None if checks is None else checks.parent / "tuned" / _file_name(device)


def _file_name(device: str) -> str:
    return f"{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}.json"


@functools.lru_cache(maxsize=4)
def _read(file: Path, state: tuple[int, ...]) -> list[dict[str, Any]]:
    del state  # only a key of the cache
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        for entry in found:
            if not all(isinstance(entry[key], str) for key in ("form", "shapes", "sources")):
                raise ValueError("an entry has no form, shapes or sources")
            if not all(isinstance(value, int) for value in entry["settings"].values()):
                raise ValueError("a setting is no integer")
        return found
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        warnings.warn(f"{file} is ignored ({type(error).__name__}: {error}); delete it", stacklevel=2)
        return []
