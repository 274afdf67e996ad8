"""Settings of kernels that were measured on a GPU: `mercury bench gpu tune` writes them, the kernels look them up.

What a kernel leaves open, such as the rows of a tile, is a record of *knobs*. Its default is a heuristic beside the
kernel; a measured record replaces it for one device, form (`ops.device`) and bucket of shapes. Records are in
`tuned/<device>.json`, in the folder of `kernels.json` or else in this package.
Compilation for a device that is not here uses the heuristics.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from mercury_jax.ops import device as kernel_device
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
    GroupedKnobs: ("experts/hopper_grouped_matmul.py",),
    AttentionKnobs: tuple(
        f"attention/hopper{name}.py" for name in ("", "_head_dim_512", "_split_merge", "_tile_loop")
    ),
}


@functools.cache
def code_hash(*files: str) -> str:
    """Hashes the code of some files, without imports, docstrings, comments and blank lines, which change no time."""
    total = hashlib.sha256()
    for file in files:
        text = (Path(__file__).parent / file).read_text(encoding="utf-8")
        left_out: set[int] = set()
        for node in ast.walk(ast.parse(text)):
            is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            is_import = isinstance(node, (ast.Import, ast.ImportFrom))
            if isinstance(node, ast.stmt) and (is_docstring or is_import):
                left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        for number, line in enumerate(text.splitlines(), start=1):
            if number not in left_out and line.strip() and not line.strip().startswith("#"):
                total.update(f"{line}\n".encode())
    return total.hexdigest()[:12]


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
    hashes = {code_hash(*files) for files in SOURCES.values()}
    for file in (user_file(device), Path(__file__).parent / "tuned" / _file_name(device)):
        found = kernel_device.read_json(file, _check_entries, [])
        yield from (x for x in found if x["sources"] in hashes)


def write(kind: type[Knobs], device: str, entry: Mapping[str, Any]) -> Path | None:
    """Stores an entry in the user's file, in the place of one of the same form and shapes.

    Args:
        entry: `form`, `shapes`, `settings` and what was measured.
    """
    if (file := user_file(device)) is None:
        return None
    old = kernel_device.read_json(file, _check_entries, [])
    kept = [x for x in old if (x["form"], x["shapes"]) != (entry["form"], entry["shapes"])]
    return kernel_device.replace_json(file, [*kept, {**entry, "sources": code_hash(*SOURCES[kind])}])


def user_file(device: str) -> Path | None:
    """The file of a device beside `kernels.json`; None if the user wants no file."""
    checks = kernel_device.checks_file()
    return None if checks is None else checks.parent / "tuned" / _file_name(device)


def _file_name(device: str) -> str:
    return f"{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}.json"


def _check_entries(found: Any) -> None:
    for entry in found:
        if not all(isinstance(entry[key], str) for key in ("form", "shapes", "sources")):
            raise ValueError("an entry has no form, shapes or sources")
        if not all(isinstance(value, int) for value in entry["settings"].values()):
            raise ValueError("a setting is no integer")
