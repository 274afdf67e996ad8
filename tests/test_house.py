"""The laws of the house: who may import whom, and how light `import mercury_jax` is."""

import ast
import graphlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "mercury_jax"

# `chat`, the template over the tokenizer's special tokens, is core: training data and sampling both write it.
CORE = {
    "types",
    "compilation",
    "config",
    "noise",
    "sharding",
    "checkpoint",
    "tokenizer",
    "chat",
    "install",
    "tasks",
}
TOP = {"evaluate", "rl", "serve", "bench"}
BELOW = CORE | {"kernels", "models", "hub", "decode", "train", "viz"}
# What each room may import. `__init__` as a target is the package itself, `mercury_jax`.
MAY_IMPORT = (
    dict.fromkeys(CORE, CORE)
    | {"kernels": CORE, "models": CORE - {"noise"} | {"kernels"}, "hub": CORE | {"kernels", "models"}}
    | {"decode": CORE, "train": CORE, "viz": CORE | {"decode"}}
    | dict.fromkeys(TOP, BELOW | TOP | {"__init__"})
    | dict.fromkeys(["__init__", "api", "cli", "__main__"], BELOW | TOP | {"__init__", "api", "cli"})
)


def imports(tree: ast.AST, package: list[str]):
    """Yields (line, dotted name) of every import, inside functions and under TYPE_CHECKING too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, a.name) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            stem = ".".join(base + ([node.module] if node.module else []))
            yield from ((node.lineno, f"{stem}.{a.name}") for a in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "flax.linen":
            yield node.lineno, "flax.linen"


def violations(root: Path) -> list[str]:
    """Every import under `root` that the dependency rule forbids, as 'file:line room -> target'."""
    bad = []
    for path in sorted(root.rglob("*.py")):
        rel = path.relative_to(root)
        room = rel.parts[0].removesuffix(".py")
        if room not in MAY_IMPORT:
            bad.append(f"{rel}: {room} is no room of the house")
            continue
        for line, name in imports(ast.parse(path.read_text()), ["mercury_jax", *rel.parts[:-1]]):
            parts = [*name.split("."), ""]
            if parts[0] == "mercury_jax":
                target = parts[1] if parts[1] in MAY_IMPORT else "__init__"
                if target != room and target not in MAY_IMPORT[room]:
                    bad.append(f"{rel}:{line} {room} -> {target}")
            elif parts[:2] == ["flax", "linen"] and room != "models":
                bad.append(f"{rel}:{line} {room} -> flax.linen")
    return bad


@pytest.mark.long
def test_the_package_keeps_the_dependency_rule():
    assert any(PACKAGE.rglob("*.py"))
    assert violations(PACKAGE) == []


@pytest.mark.parametrize(
    "file, source, found",
    [
        ("decode/rules/new.py", "from mercury_jax.models import dense", "decode -> models"),
        ("decode/decoder.py", "from ..train.loop import train", "decode -> train"),
        ("decode/state.py", "def f():\n    from mercury_jax.viz import html", "decode -> viz"),
        ("train/step.py", "def f():\n    import mercury_jax.decode.decoder", "train -> decode"),
        ("train/loop.py", "from mercury_jax import models, types", "train -> models"),
        ("models/dense.py", "from .. import noise", "models -> noise"),
        ("models/dense.py", "from mercury_jax import sample", "models -> __init__"),
        ("kernels/flash.py", "import mercury_jax.models.layers", "kernels -> models"),
        ("types.py", "from .decode import decoder", "types -> decode"),
        ("evaluate/runner.py", "from mercury_jax.cli import main", "evaluate -> cli"),
        ("hub/families/llada.py", "from flax import linen as nn", "hub -> flax.linen"),
        ("train/optim.py", "import flax\n\ndense = flax.linen.Dense", "train -> flax.linen"),
        ("utils.py", "", "utils is no room of the house"),
    ],
)
def test_the_checker_finds_a_violation(tmp_path, file, source, found):
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    assert [found in v for v in violations(tmp_path)] == [True]


def test_the_checker_accepts_what_the_design_allows(tmp_path):
    allowed = {
        "__init__.py": "from mercury_jax.decode import sample\nfrom .models import dense",
        "cli.py": "import mercury_jax as mj\nfrom mercury_jax.serve import app",
        "models/dense.py": "import flax.linen as nn\nfrom . import layers\nfrom ..kernels import attend",
        "decode/rules/new.py": "from ..state import State\nfrom ...noise import corrupt",
        "bench/speed.py": "from mercury_jax import sample\nfrom mercury_jax.hub import load",
    }
    for file, source in allowed.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(source)
    assert violations(tmp_path) == []


def loop(root: Path, room: str) -> list[str]:
    """A loop of imports among the files of `room`, as their names below `root`; empty where there is none."""
    graph: dict[str, set[str]] = {}
    files = {
        path.relative_to(root).with_suffix("").as_posix().removesuffix("/__init__"): path
        for path in (root / room).rglob("*.py")
    }
    for name, path in files.items():
        package = ["mercury_jax", *path.relative_to(root).parts[:-1]]
        targets = (t.split(".")[1:] for _, t in imports(ast.parse(path.read_text()), package))
        # `from mercury_jax.decode import state` imports a file, `from mercury_jax.decode.state import State` a name.
        named = ({"/".join(parts), "/".join(parts[:-1])} for parts in targets)
        graph[name] = {max(found, key=len) for names in named if (found := names & files.keys())} - {name}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


@pytest.mark.parametrize("room", ["decode", "viz"])
def test_no_files_import_each_other_in_a_loop(room):
    """Inside functions and under TYPE_CHECKING too: a reader can begin with a file that needs no other."""
    assert loop(PACKAGE, room) == []


@pytest.mark.parametrize(
    "back",
    [
        "from mercury_jax.decode.request import Request",
        "from . import request",
        "def f():\n    import mercury_jax.decode.request",
        "if TYPE_CHECKING:\n    from .request import Request",
    ],
)
def test_a_loop_of_imports_is_found(tmp_path, back):
    (tmp_path / "decode").mkdir()
    for name, source in {
        "__init__": "",
        "request": "from mercury_jax.decode import stops, types",
        "stops": "from mercury_jax.decode.drafting import Draft",
        "drafting": back,
    }.items():
        (tmp_path / "decode" / f"{name}.py").write_text(source)
    assert set(loop(tmp_path, "decode")) == {"decode/request", "decode/stops", "decode/drafting"}
    (tmp_path / "decode" / "drafting.py").write_text("from mercury_jax.decode import Pictures")
    assert loop(tmp_path, "decode") == []


IMPORT = """
import json, sys, time
import jax
before = time.perf_counter()
import mercury_jax
seconds = time.perf_counter() - before
print(json.dumps({"seconds": seconds, "modules": sorted({m.split(".")[0] for m in sys.modules})}))
"""
HEAVY = {"torch", "tensorflow", "matplotlib", "starlette", "fastapi", "uvicorn", "flask"}
TRAINER = {"grain", "optax", "orbax", "tyro"}


def fresh_import() -> dict:
    run = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.long
def test_import_is_quick_and_loads_nothing_heavy():
    runs = [fresh_import() for _ in range(3)]
    assert HEAVY.isdisjoint(runs[0]["modules"])
    assert min(run["seconds"] for run in runs) < 2.0


BLOCKED = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in NAMES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""


def without(names: set[str], code: str) -> str:
    """What `code` prints in a process in which the modules `names` cannot be imported."""
    program = BLOCKED.replace("NAMES", repr(names)) + code
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_loading_and_sampling_need_no_trainer():
    code = """
import mercury_jax as mj
out = mj.sample(mj.load(), "import ", max_tokens=4, history=True)
assert "<script" in out._repr_html_()  # as a notebook asks for it
loaded = [m for m in sys.modules if m.startswith(("mercury_jax.train", "mercury_jax.api"))]
print(len(out.text) > 0, loaded)
"""
    assert without(TRAINER | HEAVY, code) == "True []\n"


@pytest.mark.long
def test_the_command_line_starts_without_the_trainer():
    code = """
from mercury_jax.cli import main
for command in ("info", "--help"), ("info",), ("sample", "--help"), ("eval", "--help"), ("bench", "gpu", "--help"):
    assert main(command) == 0, command
"""
    assert "sudoku4" in without((TRAINER | HEAVY) - {"tyro"}, code)
