"""The built-in corpus `python-stdlib`: the source of the running interpreter's standard library.

Every machine that runs us has it, so the recipes and tests that use it need no download.
"""

from __future__ import annotations

import hashlib
import sysconfig
from functools import cache
from pathlib import Path

from mercury_jax.train.data.sources import Split

TEST_SHARE = 20  # one file in this many is held out

# Installed packages are not the library; its tests are twice its size; the rest are tables made by machine.
_LEFT_OUT = {
    "site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test",
    "encodings", "pydoc_data", "lib-dynload", "__phello__",
}  # fmt: skip
_TABLES = {"html/entities.py", "sre_constants.py", "token.py", "keyword.py"}


def side(path: str) -> Split:
    """Where a file of this relative path falls: the same in every process and every Python version."""
    digest = hashlib.blake2b(path.encode(), digest_size=8).digest()
    return "test" if int.from_bytes(digest, "big") % TEST_SHARE == 0 else "train"


def files(split: Split) -> list[tuple[str, str]]:
    """[(relative path, text)] of one side of the split, in the order of the paths."""
    return [(path, text) for path, text in _library() if side(path) == split]


@cache
def _library() -> tuple[tuple[str, str], ...]:
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(p.relative_to(root).as_posix() for p in root.rglob("*.py"))
    texts = ((path, _text(root / path)) for path in paths if _wanted(path))
    return tuple((path, text) for path, text in texts if text)


def _wanted(path: str) -> bool:
    *folders, name = path.split("/")
    made = name.startswith("_sysconfigdata") or any(f.startswith("config-") for f in folders)
    return not (made or _LEFT_OUT.intersection(folders) or path in _TABLES)


def _text(path: Path) -> str:
    """The file, or nothing where it cannot be read or is not UTF-8 (a few show other encodings off)."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
