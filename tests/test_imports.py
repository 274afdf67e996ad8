"""What `import mercury_jax`, loading, sampling and the command line import from other libraries.

Which part of the package may import which other part is in pyproject.toml, checked by `make lint`.
"""

import json
import subprocess
import sys

import pytest

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
loaded = [m for m in sys.modules if m.startswith(("mercury_jax.training", "mercury_jax.api"))]
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
