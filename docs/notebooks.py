"""The notebooks of colab/: writes their first cells, runs them, and lists them as pages of the site.

    python docs/notebooks.py            # write badge and install cell into every notebook
    python docs/notebooks.py --run      # the same, then run them and keep their outputs (STEPS=... shortens training)

Every notebook opens with a title, a badge "Open in Colab" and a cell that installs mercury_jax. Both are written from
REPOSITORY in conf.py; the extra to install stands in the notebook's metadata. conf.py copies the notebooks into the
site with `pages`.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from conf import BRANCH, REPOSITORY, ROOT

FOLDER = ROOT / "colab"
BADGE = "https://colab.research.google.com/assets/colab-badge.svg"
TITLE = "Install mercury_jax"
INSTALL = '''\
# @title {title}
import importlib.util
from pathlib import Path

# Where mercury_jax comes from if it is not installed: the clone that this notebook stands in, else this address.
SOURCE = "git+https://{repository}"

if importlib.util.find_spec("mercury_jax") is None:
    folders = (Path.cwd(), *Path.cwd().parents)
    clone = next((folder for folder in folders if (folder / "mercury_jax" / "__init__.py").is_file()), None)
    wanted = f"mercury-jax[{extra}] @ {{SOURCE}}" if clone is None else f"{{clone}}[{extra}]"
    chips = {{"cuda12": "/dev/nvidia0", "tpu": "/dev/vfio/0"}}
    jax = "jax" + "".join(f"[{{name}}]" for name, device in chips.items() if Path(device).exists())
    %pip install -q "{{wanted}}" "{{jax}}"'''


def badge(name: str) -> str:
    """Returns the Markdown of the badge of a notebook, by its name without suffix."""
    repository = REPOSITORY.removeprefix("github.com/")
    address = f"https://colab.research.google.com/github/{repository}/blob/{BRANCH}/colab/{name}.ipynb"
    return f"[![Open in Colab]({BADGE})]({address})"


def install_cell(extra: str) -> str:
    """Returns the source of the cell that installs mercury_jax with an extra."""
    return INSTALL.format(title=TITLE, repository=REPOSITORY, extra=extra)


def with_first_cells(notebook: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns a notebook with the badge behind its title, and the install cell as its first code cell."""
    title, first, *rest = notebook["cells"]
    heading, *text = [line for line in "".join(title["source"]).split("\n") if "colab-badge" not in line]
    source = "\n".join([heading, "", badge(name), "", *text]).strip()
    title = title | {"source": re.sub(r"\n{3,}", "\n\n", source).splitlines(keepends=True)}
    install = install_cell(notebook["metadata"]["mercury_jax"]["extra"])
    first = first | {"source": install.splitlines(keepends=True), "outputs": [], "execution_count": None}
    # Folded on Colab and on the site.
    first["metadata"] = {"cellView": "form", "tags": ["hide-input"], "mystnb": {"code_prompt_show": TITLE}}
    return notebook | {"cells": [title, first, *rest]}


def execute(path: Path) -> None:
    """Runs a notebook in its folder and keeps its outputs, without warnings, paths of this machine and times of cells.

    Warnings are printed, to be read.

    Args:
        path: The notebook, which is written again.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=3600, resources={"metadata": {"path": str(FOLDER)}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.execution_count = None
            cell.outputs = _joined(cell.outputs)
    notebook.metadata.pop("language_info", None)
    text = nbformat.writes(notebook).replace(str(ROOT), "mercury_jax")
    path.write_text(text + "\n", encoding="utf-8")


def _joined(outputs: list[Any]) -> list[Any]:
    """Returns outputs without warnings, which are printed, with what was printed in turns as one text."""
    kept: list[Any] = []
    for output in outputs:
        if output.get("name") == "stderr":
            print(output.text, file=sys.stderr)
            continue
        if output.output_type == "stream" and kept and kept[-1].output_type == "stream":
            kept[-1].text += output.text
        else:
            kept.append(output)
    return kept


def write(path: Path, notebook: dict[str, Any]) -> None:
    """Writes a notebook as Jupyter does."""
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def pages(folder: Path) -> None:
    """Copies the notebooks into a folder of the site, where myst-nb shows them with the outputs that they hold.

    Args:
        folder: The folder, which is made again.
    """
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("runs", ".ipynb_checkpoints"))


def main() -> None:
    """Writes the first cells of all notebooks or of those that are named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("names", nargs="*", help="of notebooks, without suffix; default: all")
    parser.add_argument("--run", action="store_true", help="run them and keep their outputs")
    args = parser.parse_args()
    for path in [FOLDER / f"{name}.ipynb" for name in args.names] or sorted(FOLDER.glob("*.ipynb")):
        write(path, with_first_cells(json.loads(path.read_text(encoding="utf-8")), path.stem))
        if args.run:
            print(f"running {path.stem} ...", flush=True)
            execute(path)


if __name__ == "__main__":
    main()
