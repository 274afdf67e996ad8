"""Which forms of our kernels passed on a chip: a small JSON file that `mercury bench gpu check` writes.

`attend`, `attend_paged` and the grouped product read it while they are traced (through `kernels.chip`): a form that
passed all of its cases on this chip, with this JAX and these sources of the kernels, is used by default; no other is.

The file is `kernels.json` in `~/.cache/mercury_jax` (or `$XDG_CACHE_HOME/mercury_jax`, or the folder that
`MERCURY_CACHE` names), beside the compiled programs. `MERCURY_KERNEL_CHECKS` names another file, for example one that
came back from a machine that is gone. With `MERCURY_CACHE` set to nothing and no `MERCURY_KERNEL_CHECKS` there is none.
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

from mercury_jax.kernels.rounded import Rounded

FILE, FOLDER = "MERCURY_KERNEL_CHECKS", "MERCURY_CACHE"


def attention_form(q: Any, k: Any, softcap: float | None, paged: bool = False) -> str:
    """The form of an attention kernel that computes a call, for example "attention-128-bfloat16-int8-paged".

    Args:
        q: Queries [B, T, H, K]; an array or a shape.
        k: Keys as `attend` or `attend_paged` take them.
        softcap: Of the scores.
        paged: Whether the keys lie in pages of a pool.

    Returns:
        Head size, dtype of the queries, "int8" for int8 keys, "paged", "softcap".
    """
    parts = ["attention", str(q.shape[-1]), str(jnp.dtype(q.dtype))]
    parts += ["int8"] * isinstance(k, Rounded) + ["paged"] * paged + ["softcap"] * (softcap is not None)
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


def key(device_kind: str, jax_version: str) -> str:
    """What an entry of the file stands for: another chip, JAX or source of the kernels has an entry of its own."""
    return f"{device_kind}, jax {jax_version}, kernels {sources()}"


def path(environ: Mapping[str, str] | None = None) -> Path | None:
    """The file, whether it exists or not; None where the user wants nothing kept."""
    environ = os.environ if environ is None else environ
    if named := environ.get(FILE, "").strip():
        return Path(named)
    own = environ.get(FOLDER)
    if own is not None:
        return Path(own) / "kernels.json" if own.strip() else None
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mercury_jax" / "kernels.json"


def read(entry: str) -> dict[str, dict[str, Any]] | None:
    """The forms of an entry, each {"passed": bool, ...}; None where nothing was checked. Warns of a damaged file."""
    file = path()
    if file is None or not file.is_file():
        return None
    found = _parsed(file, _state(file)).get(entry)
    return found["forms"] if found else None


def _state(file: Path) -> tuple[int, ...]:
    """What differs once the file was replaced; two may be written within one tick of the clock."""
    told = file.stat()
    return told.st_mtime_ns, told.st_ino, told.st_size


@functools.lru_cache(maxsize=4)
def _parsed(file: Path, state: tuple[int, ...]) -> dict[str, Any]:
    del state  # part of the cache's key alone
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
    """Replaces one entry and keeps the others; the file, or None where nothing is kept."""
    file = path()
    if file is None:
        return None
    kept = _parsed(file, _state(file)) if file.is_file() else {}
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_name(f"{file.name}.{os.getpid()}")
    fresh.write_text(json.dumps(kept | {entry: {"date": date, "forms": forms}}, indent=1), encoding="utf-8")
    fresh.replace(file)
    return file
