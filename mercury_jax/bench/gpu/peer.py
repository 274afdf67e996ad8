"""transformers on the same accelerator, with random weights of the same shapes: seconds of a pass of its `generate`.

The process that runs torch is not this one: JAX and torch would share the device's memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mercury_jax.bench.gpu.model import FEW, MANY, find
from mercury_jax.hub.families.gemma import export_diffusion

WORKER = Path(__file__).with_name("peer_worker.py")


def transformers(asked: dict[str, Any], stage: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Seconds of a denoising pass in the model's dtype and of which versions, or {"left_out": why}."""
    config: Any = find(asked["model"]).config
    prompt = np.random.default_rng(0).integers(2, config.vocab, asked["prefix"]).tolist()
    told = {
        "config": export_diffusion(config), "prompt": prompt, "steps": [FEW, MANY], "device": asked["device"],
        "dtype": config.dtype,
    }  # fmt: skip
    stage("transformers in a process of its own")
    python = asked.get("python", sys.executable)
    done = subprocess.run([python, str(WORKER)], input=json.dumps(told), capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(f"transformers' process ended with code {done.returncode}: {done.stderr[-400:]}")
    yield {"model": asked["model"], "prefix": asked["prefix"], "batch": 1} | json.loads(lines[-1])
