"""transformers' own DiffusionGemma with random weights on the same accelerator: what a pass of it takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from mercury_jax.bench.gpu_models import LONG, SHORT, Running
from mercury_jax.bench.known import find
from mercury_jax.hub.gemma4 import export_diffusion

WORKER = Path(__file__).with_name("gpu_peer_worker.py")


def peer(asked: Running, device: str = "cuda", python: str | None = None) -> dict[str, Any]:
    """A JSON-ready row: seconds of a denoising pass of transformers' `generate` in bf16, and of what versions.

    Where torch or transformers is not installed, the row says so. RuntimeError where the other process fails.
    """
    return run(find(asked.name).config(), asked, device, python)


def run(config: Any, asked: Running, device: str, python: str | None = None) -> dict[str, Any]:
    """The same of a configuration."""
    prompt = np.random.default_rng(0).integers(2, config.vocab, asked.prefix).tolist()
    told = {
        "config": export_diffusion(config), "prompt": prompt, "steps": [SHORT, LONG], "device": device,
        "dtype": config.dtype,
    }  # fmt: skip
    done = subprocess.run(
        [python or sys.executable, str(WORKER)], input=json.dumps(told), capture_output=True, text=True
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(f"transformers' process ended with code {done.returncode}: {done.stderr[-400:]}")
    row = {"experiment": "peer", "model": asked.name, "prefix": asked.prefix, "batch": 1}
    return row | json.loads(lines[-1])
