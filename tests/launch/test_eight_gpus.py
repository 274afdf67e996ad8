"""The figures of docs/26b-on-eight-gpus.md: rows of compiled programs, and the slots that the server computes."""

import json
import re
import subprocess
import sys

import pytest

from tests.training import jobs

PAGE = (jobs.ROOT / "docs/26b-on-eight-gpus.md").read_text()


def row(day: str, mesh: dict[str, int]) -> dict:
    lines = (jobs.ROOT / f"docs/results/deviceless-2026-11-{day}.jsonl").read_text().splitlines()
    [found] = [one for one in map(json.loads, lines) if (one["for"], one["mesh"]) == ("h200x8", mesh)]
    return found


@pytest.mark.parametrize("day, mesh", [("24", {"tensor": 2, "expert": 4}), ("28", {"tensor": 8})])
def test_compiled_figures_are_those_of_the_rows(day, mesh):
    found = row(day, mesh)
    name = ",".join(f"{axis}={size}" for axis, size in mesh.items())
    [cells] = re.findall(
        rf"^\| `{name}` \| [\d.]+ GB \| (.+) GB \| (.+) GB \| (.+) \| (.+) ms \|$", PAGE, re.M
    )
    assert cells[:2] == (f"{found['bytes_per_device'] / 1e9:.2f}", f"{found['bytes_per_pass'] / 1e9:.1f}")
    assert cells[3] == f"{1e3 * found['implied']['seconds']:.1f}"
    kinds = {kind: (one["per_pass"], one["bytes"]) for kind, one in found["collectives"].items()}
    assert kinds == {"all-reduce": (62, 135529472), "all-gather": (1, 81920)}  # 2.2 MB each
    assert f"{found['implied']['tokens_per_second']:,.0f}" in PAGE.partition("What to expect")[2]


# On eight virtual devices, with shapes instead of weights; nothing is compiled.
SLOTS = """
import json
import jax
import mercury_jax as mj
from mercury_jax.bench import abstract_params
from mercury_jax.bench.chips import ALL
from mercury_jax.hub.params import param_bytes
from mercury_jax.serve.engine import memory
from mercury_jax.serve.engine.request import EngineConfig

source = abstract_params.source("diffusiongemma-26b-a4b")

def slots(lm, context, free):
    needed = lambda count: memory.engine_memory(lm, EngineConfig(slots=count, context=context)).total
    return next(count for count in range(0, 512, 8) if needed(count + 8) > free)

for sizes in ({"tensor": 8}, {"tensor": 2, "expert": 4}, {}):
    mesh = mj.mesh(**{"data": 1, **sizes}, devices=jax.devices()[: 8 if sizes else 1])
    for quantise in (None, "int8"):
        lm = abstract_params.abstract_lm(source, mesh, quantise)
        weights = param_bytes(lm.model, mesh, source.stored, quantise)
        free = [memory.SHARE * (0.75 * ALL[chip].memory - weights) for chip in ("h100", "h200")]
        print(f"{weights / 1e9:.2f} GB", *(slots(lm, context, x) for x in free for context in (8192, 32768)), sep=" | ")
"""


@pytest.mark.slow
def test_slots_are_those_that_the_server_computes(tmp_path):
    env = jobs.environment(tmp_path) | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    done = subprocess.run([sys.executable, "-c", SLOTS], env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    table = re.findall(r"^\| [18](?:, `[a-z=\d,]+`)? \| (?:bf16|int8) \| (.+) \|$", PAGE, re.MULTILINE)
    assert done.stdout.splitlines() == table
