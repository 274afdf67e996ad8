"""The notebooks of colab/: a first cell that installs anywhere, public names only, outputs to read on GitHub.

`make notebooks` runs them.
"""

import ast
import importlib
import json
import re
import sys
from pathlib import Path

import pytest

import mercury_jax as mj

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))
notebooks, conf = importlib.import_module("notebooks"), importlib.import_module("conf")
REPOSITORY = conf.REPOSITORY

NOTEBOOKS = {path.stem: json.loads(path.read_text()) for path in sorted((ROOT / "colab").glob("*.ipynb"))}
# Beside `mj`: what the guides import, too.
MODULES = {"evaluate", "rl", "tasks", "training"}


def sources(name: str, kind: str = "code") -> list[str]:
    return ["".join(cell["source"]) for cell in NOTEBOOKS[name]["cells"] if cell["cell_type"] == kind]


def test_the_guides_link_each():
    index, site = (ROOT / "docs/README.md").read_text(), (ROOT / "docs/index.rst").read_text()
    for name in NOTEBOOKS:
        assert f"../colab/{name}.ipynb" in index and f"notebooks/{name}" in site


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_badge_and_install_cell_are_those_of_the_documentations_address(name):
    assert notebooks.with_first_cells(NOTEBOOKS[name], name) == NOTEBOOKS[name]
    assert (
        f"github/{REPOSITORY.removeprefix('github.com/')}/blob/main/colab/{name}.ipynb"
        in sources(name, "markdown")[0]
    )
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", "\n".join(sources(name, "markdown"))):
        assert (ROOT / "colab" / target).exists(), target


@pytest.mark.parametrize("name", ["quickstart", "agent"])
def test_a_notebook_installs_from_its_clone_else_from_the_address(name, tmp_path, monkeypatch):
    line = '%pip install -q "{wanted}" "{jax}"'
    first = sources(name)[0]
    assert first.count(line) == 1
    program = first.replace(line, "installed.append(wanted)")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    def run(folder, source=None):
        monkeypatch.chdir(folder)
        installed: list[str] = []
        changed = program if source is None else re.sub("SOURCE = .*", f"SOURCE = {source!r}", program)
        exec(changed, {"installed": installed})
        return installed

    extra = NOTEBOOKS[name]["metadata"]["mercury_jax"]["extra"]
    assert run(ROOT / "colab") == run(ROOT) == [f"{ROOT}[{extra}]"]
    assert run(tmp_path) == [f"mercury-jax[{extra}] @ git+https://{REPOSITORY}"]
    assert run(tmp_path, "https://x.example/y.whl") == [f"mercury-jax[{extra}] @ https://x.example/y.whl"]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_uses_public_names_only(name):
    code = "\n".join(sources(name)[1:])
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mercury_jax"):
            parts = (node.module or "").split(".")[1:] or [alias.name for alias in node.names]
            assert parts[0] in MODULES, ast.unparse(node)
        named = [node.attr] if isinstance(node, ast.Attribute) else []
        named += [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        assert not [x for x in named if x.startswith("_") and not x.startswith("__")], named
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "mj":
            assert node.attr in mj.__all__, ast.unparse(node)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_outputs_are_committed_small_and_of_no_one_machine(name):
    path = ROOT / "colab" / f"{name}.ipynb"
    text, cells = path.read_text(), NOTEBOOKS[name]["cells"]
    assert path.stat().st_size < 300_000
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    assert len(outputs) >= 3
    assert not [x for x in outputs if x["output_type"] == "error" or x.get("name") == "stderr"]
    assert not re.search(r"/(home|root|tmp|work|Users)/", text)
