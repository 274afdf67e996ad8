"""Compiled programs are kept between runs: a second `mercury sample` starts in a quarter of the time."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

FOLDER = "MERCURY_CACHE"  # where; empty: nowhere
SECONDS = 0.1  # that a program took to compile from which on it is worth a file


def keep(environ: Mapping[str, str] | None = None) -> Path | None:
    """Turn JAX's own cache on, unless the user has set it or turned ours off; the folder, or None.

    Call it before JAX makes its first program. The folder may be deleted at any time.
    """
    environ = os.environ if environ is None else environ
    folder = folder_of(environ)
    if folder is None or "JAX_COMPILATION_CACHE_DIR" in environ:
        return None
    wanted = {"jax_compilation_cache_dir": str(folder), "jax_persistent_cache_min_compile_time_secs": SECONDS}
    if "jax" in sys.modules:
        for name, value in wanted.items():
            sys.modules["jax"].config.update(name, value)
    os.environ.update({name.upper(): str(value) for name, value in wanted.items()})  # for children, too
    return folder


def folder_of(environ: Mapping[str, str]) -> Path | None:
    """A folder for this kind of processor: code for another one that shares the home might not run here."""
    own = environ.get(FOLDER)
    if own is not None and not own.strip():
        return None
    root = Path(own) if own else Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mercury_jax"
    return root / f"xla-{hashlib.sha256(_processor().encode()).hexdigest()[:12]}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [platform.processor()]
    told = {line for line in lines if line.startswith(("flags", "Features", "model name"))}
    return "\n".join([platform.machine(), *sorted(told)])
