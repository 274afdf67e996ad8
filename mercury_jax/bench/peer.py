"""sample() against transformers' `generate` on the same DiffusionGemma checkpoint, by turns, in one run."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from mercury_jax import install, models, noise
from mercury_jax.bench.timing import compiled, timed
from mercury_jax.config import Experts, Plan, refuse
from mercury_jax.decode import processors, rules, stopping
from mercury_jax.decode.sample import sample
from mercury_jax.decode.sampler import Sampler
from mercury_jax.evaluate import card
from mercury_jax.hub import save_hf
from mercury_jax.hub.params import count_parameters
from mercury_jax.hub.tokenizer import IdTokenizer
from mercury_jax.models.gemma import GemmaConfig
from mercury_jax.types import LM

WORKER = Path(__file__).with_name("peer_worker.py")
PROMPT, CANVAS = 64, 256
LEAST = {"3M": 2.0, "94M": 1.5}  # times as fast, the goal


class Size(NamedTuple):
    """A configuration that is compared."""

    width: int
    layers: int
    experts: int
    expert_width: int
    dense: int
    vocab: int


SIZES = {"3M": Size(128, 6, 8, 64, 512, 512), "94M": Size(512, 10, 16, 256, 1024, 8192)}


def config_of(size: Size) -> GemmaConfig:
    """A DiffusionGemma of that size: five sliding layers to a global one, the last one global, top 2."""
    layers = tuple(sorted({*range(5, size.layers, 6), size.layers - 1}))
    return GemmaConfig(
        vocab=size.vocab, width=size.width, layers=size.layers, heads=size.width // 32, kv_heads=size.width // 64,
        head_dim=32, global_head_dim=64, global_kv_heads=1, ffn=size.dense, global_layers=layers, window=512,
        experts=Experts(count=size.experts, active=2, width=size.expert_width), block=CANVAS, context=1024,
        keys_as_values=True, self_conditioning=True, encoder_scalars=True, pad=0, eos=1,
    )  # fmt: skip


def model_of(size: Size, seed: int = 0) -> LM:
    """Random parameters; the end of text is never emitted, so that every canvas is whole."""
    config = config_of(size)
    model = models.build(config)
    return LM(
        model,
        jax.jit(model.init)(jax.random.key(seed)),
        IdTokenizer.of(config),
        noise.uniform(config.vocab),
        "random",
    )


def compare(
    names: Sequence[str], *, steps: int = 16, pairs: int = 7, python: str | None = None
) -> Iterator[dict[str, Any]]:
    """A JSON-ready row for each size: seconds a step of both, and the median of their ratios with quartiles.

    steps: denoising steps of a canvas, the same for both. python: an interpreter that has torch and transformers.
    """
    for name in names:
        if name not in SIZES:
            raise refuse("size", name, ", ".join(SIZES))
        yield _row(name, model_of(SIZES[name]), steps, pairs, python or sys.executable)


def _row(name: str, lm: LM, steps: int, pairs: int, python: str) -> dict[str, Any]:
    prompt = np.random.default_rng(0).integers(2, lm.model.config.vocab, PROMPT).tolist()
    with tempfile.TemporaryDirectory() as folder:
        save_hf(Path(folder) / "model", lm)
        with _worker(python, Path(folder) / "model", prompt) as ask:
            ours = lambda: _ours(lm, prompt, steps)
            passes = (int(ours().forwards[0]), int(ask(steps)["passes"]))
            ask(steps)
            before = compiled()
            times = [_turn(ours, lambda: ask(steps)["seconds"], i) for i in range(pairs)]
            again, peer = compiled() - before, ask.about
    ratios = sorted(b / a for a, b in times)
    quarter = len(ratios) // 4
    return {
        "bench": "peer",
        "size": name,
        "parameters": count_parameters(lm.model)[0],
        "prompt": PROMPT,
        "canvas": CANVAS,
        "steps": passes[0],
        "peer_steps": passes[1],
        "ms_per_step": 1000 * statistics.median(a for a, _ in times) / passes[0],
        "peer_ms_per_step": 1000 * statistics.median(b for _, b in times) / passes[1],
        "speedup": statistics.median(ratios),
        "speedup_quartiles": [ratios[quarter], ratios[-1 - quarter]],
        "at_least": LEAST[name],
        "pairs": pairs,
        "recompilations": again,
        "compared_with": f"transformers {peer['transformers']} generate, dynamic cache, torch {peer['torch']}, fp32",
        "hardware": card.hardware(),
    }


def _turn(ours: Any, theirs: Any, index: int) -> tuple[float, float]:
    """Seconds of both, who begins alternates; the other process stands still meanwhile."""
    if index % 2:
        second = theirs()
        return timed(ours)[1], second
    return timed(ours)[1], theirs()


def _ours(lm: LM, prompt: list[int], steps: int) -> Any:
    sampler = Sampler(
        rules.entropy_bound(0.1), (processors.cooling(last=0.4, first=0.8),),
        stopping.steady(entropy=1e-30, patience=1), temperature=1.0,
    )  # fmt: skip
    return sample(lm, prompt, max_tokens=CANVAS, sampler=sampler, plan=Plan(block=CANVAS, steps=steps))


class _Asked:
    """A running worker: call it with a number of steps."""

    def __init__(self, process: subprocess.Popen[str]):
        self.process = process
        self.about = self._read()

    def __call__(self, steps: int) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"steps": steps}) + "\n")
        self.process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        assert self.process.stderr is not None
        last = self.process.stderr.read().strip().splitlines()[-1:]
        raise refuse(
            "python",
            "".join(last),
            f"an interpreter with torch and transformers: {install.command('parity')}",
        )


@contextmanager
def _worker(python: str, folder: Path, prompt: list[int]) -> Iterator[_Asked]:
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    process = subprocess.Popen(
        [python, str(WORKER), str(folder), json.dumps(prompt), str(threads)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield _Asked(process)
    finally:
        process.kill()
        process.wait()
