"""The check that a package of an extra is there, and the pip command that adds the extra to this installation.

There is no release in a package index, so the command names what this installation was made from: the clone whose code
runs, or what pip recorded in `direct_url.json` (a folder, a Git address or an archive; PEP 610).
"""

from __future__ import annotations

import importlib.util
import json
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlparse

NAME = "mercury-jax"


def check(argument: str, package: str, extra: str) -> None:
    """Refuses an argument that needs a package which is missing."""
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"{argument} needs {package}: {command(extra)}")


def command(extra: str) -> str:
    """The pip command that adds an extra of mercury_jax to this installation."""
    clone = Path(__file__).parents[1]
    if (clone / "pyproject.toml").is_file():
        return f"pip install -e '{clone}[{extra}]'"
    try:
        found = json.loads(distribution(NAME).read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):  # pip did not write where it took the package from
        found = {}
    url = str(found.get("url", ""))
    if "vcs_info" in found:
        about = found["vcs_info"]
        revision = f"@{about['requested_revision']}" if about.get("requested_revision") else ""
        return f"pip install '{NAME}[{extra}] @ {about.get('vcs', 'git')}+{url}{revision}'"
    if "archive_info" in found:
        return f"pip install '{NAME}[{extra}] @ {url}'"
    folder = Path(unquote(urlparse(url).path))
    if url.startswith("file:") and (folder / "pyproject.toml").is_file():
        return f"pip install '{folder}[{extra}]'"
    return f"pip install '.[{extra}]' in the folder that holds mercury_jax's pyproject.toml"
