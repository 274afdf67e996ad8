"""Which kernel forms passed their check on a device: a small JSON file that `mercury bench gpu check` writes.

`attend`, `attend_paged` and `grouped_matmul` read it while they are traced (through `kernels.device`): a form is used
by default if it passed all of its cases on this device, with this JAX and these sources of the kernels.

The file is `kernels.json` in `~/.cache/mercury_jax` (or `$XDG_CACHE_HOME/mercury_jax`, or the folder that
`MERCURY_CACHE` names), beside the compiled programs. `MERCURY_KERNEL_CHECKS` names another file, for example one
copied from a machine that no longer exists. With `MERCURY_CACHE` set to nothing and no `MERCURY_KERNEL_CHECKS` there
is no file.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from mercury_jax.kernels.kv_quant import Int8Vectors

FILE, FOLDER = "MERCURY_KERNEL_CHECKS", "MERCURY_CACHE"


def attention_form(q: Any, k: Any, softcap: float | None, paged: bool = False) -> str:
    """The form of the attention kernel that computes a call, for example "attention-128-bfloat16-int8-paged".

    Args:
        q: Queries [B, T, H, K]; an array or a shape.
        k: Keys as `attend` or `attend_paged` take them.
        softcap: Of the scores.
        paged: Whether the keys are in pages of a pool.

    Returns:
        Head size, dtype of the queries, "int8" for int8 keys, "paged", "softcap".
    """
    parts = ["attention", str(q.shape[-1]), str(jnp.dtype(q.dtype))]
    parts += ["int8"] * isinstance(k, Int8Vectors) + ["paged"] * paged + ["softcap"] * (softcap is not None)
    return "-".join(parts)


def grouped_form(dtype: Any, gradient: bool = False) -> str:
    """The form of the grouped product with matrices of a dtype: "grouped-int8", "grouped-int8-gradient"."""
    return f"grouped-{jnp.dtype(dtype)}" + "-gradient" * gradient


@functools.cache
def sources() -> str:
    """A hash of all source files of `mercury_jax.kernels`, 12 hex digits."""
    folder, total = Path(__file__).parent, hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        total.update(f"{file.relative_to(folder).as_posix()}\0".encode() + file.read_bytes() + b"\0")
    return total.hexdigest()[:12]


def entry_key(device_kind: str, jax_version: str) -> str:
    """The key of an entry of the file: each device, JAX version and source of the kernels has its own entry."""
    return f"{device_kind}, jax {jax_version}, kernels {sources()}"


def path(environ: Mapping[str, str] | None = None) -> Path | None:
    """Path of the file.

    Args:
        environ: Environment variables; None: those of this process.

    Returns:
        The path, whether the file exists or not; None if the user wants no file.
    """
    environ = os.environ if environ is None else environ
    if file := environ.get(FILE, "").strip():
        return Path(file)
    folder = environ.get(FOLDER)
    if folder is not None:
        return Path(folder) / "kernels.json" if folder.strip() else None
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mercury_jax" / "kernels.json"


def read(entry: str) -> dict[str, dict[str, Any]] | None:
    """Reads an entry of the file. Warns if the file is damaged.

    Args:
        entry: From `entry_key`.

    Returns:
        {form: {"passed": bool, ...}}; None if nothing was checked.
    """
    file = path()
    if file is None or not file.is_file():
        return None
    found = _parse(file, _file_state(file)).get(entry)
    return found["forms"] if found else None


def _file_state(file: Path) -> tuple[int, ...]:
    """Differs after the file was replaced, even if two files are written within one tick of the clock."""
    stat = file.stat()
    return stat.st_mtime_ns, stat.st_ino, stat.st_size


@functools.lru_cache(maxsize=4)
def _parse(file: Path, state: tuple[int, ...]) -> dict[str, Any]:
    del state  # only a key of the cache
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        forms = [form for entry in found.values() for form in entry["forms"].values()]
        if not all(isinstance(form["passed"], bool) for form in forms):
            raise ValueError("a form has no verdict")
        return found
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        warnings.warn(f"{file} is ignored, so that kernels stay off ({why}); delete it", stacklevel=2)
        return {}


def write(entry: str, forms: Mapping[str, Mapping[str, Any]], date: str) -> Path | None:
    """Replaces one entry of the file and keeps the others.

    Args:
        entry: From `entry_key`.
        forms: Result of each form.
        date: Of the check.

    Returns:
        The file; None if the user wants no file.
    """
    file = path()
    if file is None:
        return None
    others = _parse(file, _file_state(file)) if file.is_file() else {}
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.{os.getpid()}")
    temporary.write_text(
        json.dumps(others | {entry: {"date": date, "forms": forms}}, indent=1), encoding="utf-8"
    )
    temporary.replace(file)  # atomic
    return file
