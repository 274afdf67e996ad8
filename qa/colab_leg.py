"""Runs the notebooks as Colab does: an empty Python environment, an empty folder, and the first cell installs from git.

    python qa/colab_leg.py --python python3.12                # all ten
    python qa/colab_leg.py --python python3.12 quickstart     # one

Each notebook gets an environment of its own that holds nothing but a kernel. Its first cell names the address of the
repository; git is told to read this clone in its place, so the commit that is checked out here is what gets installed.
What Colab has and this lacks: the packages of its image in their own versions, a GPU or TPU, its page.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))
REPOSITORY = importlib.import_module("conf").REPOSITORY
NOTEBOOKS = sorted(path.stem for path in (ROOT / "colab").glob("*.ipynb"))


def environment(folder: Path, python: str, constraints: str | None) -> dict[str, str]:
    """Makes an environment with a kernel in `folder`, and returns the variables under which that kernel runs."""
    subprocess.run([python, "-m", "venv", folder / "venv"], check=True)
    interpreter = folder / "venv/bin/python"
    subprocess.run(
        [interpreter, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "ipykernel"], check=True
    )
    subprocess.run(
        [interpreter, "-m", "ipykernel", "install", "--prefix", folder, "--name", "colab"],
        check=True,
        capture_output=True,
    )
    given = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV", "MPLBACKEND")
    }
    given |= {
        "PATH": f"{interpreter.parent}{os.pathsep}{os.environ['PATH']}",
        "JAX_PLATFORMS": "cpu",
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.{ROOT.as_uri()}.insteadOf",
        "GIT_CONFIG_VALUE_0": f"https://{REPOSITORY}",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_ROOT_USER_ACTION": "ignore",
    }
    return given | ({"PIP_CONSTRAINT": str(Path(constraints).resolve())} if constraints else {})


def run(name: str, python: str, constraints: str | None) -> str:
    """Runs one notebook in an environment of its own.

    Returns:
        Where mercury_jax was imported from, relative to the environment.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        variables = environment(folder, python, constraints)
        (folder / "content").mkdir()
        notebook = nbformat.read(ROOT / "colab" / f"{name}.ipynb", as_version=4)
        asked = "import mercury_jax, importlib.metadata as m; print(mercury_jax.__file__, m.version('jax'))"
        notebook.cells.append(nbformat.v4.new_code_cell(asked))
        kernels = KernelSpecManager(kernel_dirs=[str(folder / "share/jupyter/kernels")])
        manager = AsyncKernelManager(kernel_name="colab", kernel_spec_manager=kernels)
        client = NotebookClient(
            notebook, km=manager, timeout=600, resources={"metadata": {"path": str(folder / "content")}}
        )
        client.execute(env=variables)
        told = "".join(output.get("text", "") for output in notebook.cells[-1].outputs).split()
        if not told[0].startswith(str(folder / "venv")):
            raise SystemExit(
                f"{name}: mercury_jax came from {told[0]}, not from what the first cell installed"
            )
        return f"jax {told[1]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "names", nargs="*", choices=[[], *NOTEBOOKS], help="notebooks; all of them if left out",
        metavar="NAME",
    )  # fmt: skip
    parser.add_argument("--python", required=True, help="an interpreter of Colab's minor version, 3.12")
    parser.add_argument(
        "--constraints", help="a file of pinned versions; otherwise the newest are installed, as in Colab"
    )
    options = parser.parse_args()
    os.environ.setdefault("STEPS", "10")  # the short form, as in `make notebooks`
    os.environ.setdefault("QUESTIONS", "32")
    failed = []
    for name in options.names or NOTEBOOKS:
        start = time.monotonic()
        try:
            outcome = run(name, options.python, options.constraints)
        except CellExecutionError as error:
            failed.append(name)
            outcome = f"FAILED\n{error}"
        print(json.dumps({"notebook": name, "seconds": round(time.monotonic() - start)}), outcome, flush=True)
    print(f"{len(failed)} failed" + "".join(f" {name}" for name in failed), flush=True)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
