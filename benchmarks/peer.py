"""sample() against transformers' `generate` on the same DiffusionGemma checkpoint, in alternation, in one run.

transformers runs in a process of its own (`peer_worker`). Run with `python -m benchmarks.peer`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np

from benchmarks.script import run_script
from benchmarks.timing import quartiles
from mercury_jax import install, models, noise
from mercury_jax.bench.timing import timed
from mercury_jax.cli import arguments, show
from mercury_jax.cli.arguments import Flag, Int, option
from mercury_jax.compilation import compilations, hardware
from mercury_jax.config import Experts, Plan, refuse
from mercury_jax.decode import processors, rules, stopping
from mercury_jax.decode.sample import sample
from mercury_jax.decode.sampler import Sampler
from mercury_jax.hub import save_hf
from mercury_jax.hub.params import count_parameters
from mercury_jax.hub.tokenizer import IdTokenizer
from mercury_jax.models.gemma import GemmaConfig
from mercury_jax.types import LM

WORKER = Path(__file__).with_name("peer_worker.py")
PROMPT, CANVAS = 64, 256
GOAL = {"3M": 3.0, "94M": 2.0}  # times as fast
PAUSE = 0.5  # seconds before each call: the threads of the process that was timed last spin until they sleep


@dataclass(frozen=True, kw_only=True)
class PeerBenchmark:
    """Compare sample() with transformers' generate on the same DiffusionGemma.

    examples:
      python -m benchmarks.peer
      python -m benchmarks.peer --sizes 3M --python torch-env/bin/python --json

    A random DiffusionGemma checkpoint is written once and read by both:
    `mercury_jax.sample` and transformers' `generate` (dynamic cache, eager,
    fp32), batch 1, prompt 64, canvas 256, the same number of denoising steps.
    They alternate in one run, half a second apart, and the other one waits
    meanwhile. transformers needs torch, so it runs in a process of its own: --python names an
    interpreter that has both (the extra `parity` installs them).
    """

    sizes: Annotated[tuple[str, ...], option("NAME [NAME ...]")] = ("3M", "94M")
    """3M, 94M."""
    steps: Int = 16
    """Denoising steps of a canvas."""
    pairs: Int = 7
    """How often both are timed."""
    python: Annotated[str | None, option("PATH")] = None
    """Interpreter with torch and transformers. Default: this one."""
    out: Annotated[str | None, option("FILE.jsonl")] = None
    """Write the records, too."""
    json: Flag = False
    """Print one JSON object for each record."""


def run(argv: Sequence[str]) -> int:
    """Runs the benchmark; returns its exit code."""
    args = arguments.read(PeerBenchmark, argv, "python -m benchmarks.peer")
    show.check_writable("--out", args.out)
    found = compare(args.sizes, steps=args.steps, pairs=args.pairs, python=args.python)
    show.report(found, args.out, None if args.json else line)
    return 0


def line(row: Mapping[str, Any]) -> str:
    """A record for people."""
    low, high = row["speedup_quartiles"]
    return (
        f"{row['size']} ({row['parameters'] / 1e6:.1f}M parameters): {row['ms_per_step']:.1f} ms per step, "
        f"transformers {row['peer_ms_per_step']:.1f}: {row['speedup']:.2f} times as fast (quartiles {low:.2f} to "
        f"{high:.2f}; the goal is {row['at_least']}), {row['recompilations']} recompilations"
    )


class PeerSize(NamedTuple):
    """Sizes of a DiffusionGemma that is compared."""

    width: int
    layers: int
    experts: int
    expert_width: int
    dense: int
    vocab: int


SIZES = {"3M": PeerSize(128, 6, 8, 64, 512, 512), "94M": PeerSize(512, 10, 16, 256, 1024, 8192)}


def config_of(size: PeerSize) -> GemmaConfig:
    """A DiffusionGemma with five sliding-window layers for each global one, the last one global, and top-2 experts."""
    layers = tuple(sorted({*range(5, size.layers, 6), size.layers - 1}))
    return GemmaConfig(
        vocab=size.vocab, width=size.width, layers=size.layers, heads=size.width // 32, kv_heads=size.width // 64,
        head_dim=32, global_head_dim=64, global_kv_heads=1, ffn=size.dense, global_layers=layers, window=512,
        experts=Experts(count=size.experts, active=2, width=size.expert_width), block=CANVAS, context=1024,
        keys_as_values=True, self_conditioning=True, encoder_scalars=True, pad=0, eos=1,
    )  # fmt: skip


def model_of(size: PeerSize, seed: int = 0) -> LM:
    """A model with random parameters.

    Args:
        size: Of `SIZES`.
        seed: Draws the parameters.

    Returns:
        The model.
    """
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
    """Measures both on each size.

    Args:
        names: Of `SIZES`.
        steps: Denoising steps of a canvas, the same for both.
        pairs: How often both are timed.
        python: An interpreter that has torch and transformers. Default: this one.

    Yields:
        A record with the milliseconds per step of both, and the median of their ratios with quartiles.

    Raises:
        ValueError: An unknown size, or an interpreter without torch and transformers.
    """
    for name in names:
        if name not in SIZES:
            raise refuse("size", name, ", ".join(SIZES))
        yield _row(name, model_of(SIZES[name]), steps, pairs, python or sys.executable)


def _row(name: str, lm: LM, steps: int, pairs: int, python: str) -> dict[str, Any]:
    prompt = np.random.default_rng(0).integers(2, lm.model.config.vocab, PROMPT).tolist()
    with tempfile.TemporaryDirectory() as folder:
        save_hf(Path(folder) / "model", lm)
        with worker(python, WORKER, str(Path(folder) / "model"), json.dumps(prompt)) as ask:
            ours = lambda: _ours(lm, prompt, steps)
            passes = (int(ours().forwards[0]), int(ask(steps=steps)["passes"]))
            ask(steps=steps)
            before = compilations()
            times = [_turn(ours, lambda: ask(steps=steps)["seconds"], i) for i in range(pairs)]
            again, peer = compilations() - before, ask.about
    ratios = [b / a for a, b in times]
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
        "speedup_quartiles": quartiles(ratios),
        "at_least": GOAL[name],
        "pairs": pairs,
        "recompilations": again,
        "compared_with": f"transformers {peer['transformers']} generate, dynamic cache, torch {peer['torch']}, fp32",
        "hardware": hardware(),
    }


def _turn(ours: Any, theirs: Any, index: int) -> tuple[float, float]:
    """Seconds of both; which begins alternates, and the other process waits meanwhile."""
    found = {}
    for name, call in sorted(
        {"ours": lambda: timed(ours)[1], "theirs": theirs}.items(), reverse=bool(index % 2)
    ):
        time.sleep(PAUSE)
        found[name] = call()
    return found["ours"], found["theirs"]


def _ours(lm: LM, prompt: list[int], steps: int) -> Any:
    sampler = Sampler(
        rules.entropy_bound(0.1), (processors.cooling(last=0.4, first=0.8),),
        stopping.steady(entropy=1e-30, patience=1), temperature=1.0,
    )  # fmt: skip
    return sample(lm, prompt, max_tokens=CANVAS, sampler=sampler, plan=Plan(block=CANVAS, steps=steps))


class Worker:
    """A running script that answers one JSON line with another; `about` is its first line."""

    def __init__(self, process: subprocess.Popen[str]):
        self.process = process
        self.about = self._read()

    def __call__(self, **asked: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asked) + "\n")
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
def worker(python: str, script: Path, *arguments: str) -> Iterator[Worker]:
    """Runs a script by an interpreter with torch; its last argument is the number of threads."""
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    process = subprocess.Popen(
        [python, str(script), *arguments, str(threads)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield Worker(process)
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    sys.exit(run_script(run))
