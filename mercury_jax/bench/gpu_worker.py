"""The child of `mercury bench gpu`: measures some of its steps, and says of each when it begins.

python -m mercury_jax.bench.gpu_worker ASKED.json, where ASKED is what `gpu.measure` wrote.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import date
from typing import Any

import jax

from mercury_jax.bench import gpu
from mercury_jax.bench.ceilings import Ceilings, ceilings
from mercury_jax.kernels.chip import SWITCH


def work(asked: dict[str, Any], say: Callable[[dict[str, Any]], None]) -> None:
    """Say {"at": i} as step i begins, {"row": ..} for each of its rows, {"at": i + 1} behind it."""
    began, most = time.monotonic(), asked["most"]
    if most is None:
        found = ceilings(64, 512) if asked["small"] else ceilings()
        most = about() | {
            "experiment": "ceilings",
            "bytes_per_second": found.bandwidth,
            "flops_per_second": found.matmul,
        }
        say({"row": most})
    limits = Ceilings(most["bytes_per_second"], most["flops_per_second"])
    todo = gpu.steps(asked["small"], asked["only"])
    for i in range(asked["from"], asked["to"]):
        say({"at": i})
        late = time.monotonic() - began > asked["seconds"]
        for row in [{"left_out": "the minutes were over"}] if late else rows(todo[i], limits):
            say({"row": about() | {"experiment": todo[i].name} | row})
    say({"at": asked["to"]})


def rows(step: gpu.Step, limits: Ceilings) -> list[dict[str, Any]]:
    """What a step measures, or why it failed: too little memory for one of them says nothing of the others."""
    os.environ[SWITCH] = "1" if step.kernels else "0"
    jax.clear_caches()  # a program keeps the kernels that it was traced with
    how = {"step": step.name, "kernels": step.kernels, "env": [list(x) for x in step.env]}
    try:
        return [how | row for row in step.run(limits)]
    except Exception as error:
        return [how | {"failed": f"{type(error).__name__}: {error}"[:500]}]


def about() -> dict[str, Any]:
    """The device, in words, and the date."""
    device = jax.devices()[0]
    return {
        "hardware": device.device_kind, "platform": device.platform, "devices": jax.device_count(),
        "jax": jax.__version__, "date": str(date.today()),
    }  # fmt: skip


if __name__ == "__main__":
    work(json.loads(sys.argv[1]), lambda told: print(json.dumps(told), flush=True))
