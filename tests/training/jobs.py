"""Real processes of `mercury train` on this machine, each with a device of its own, over JAX's gloo collectives."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from mercury_jax.training.report import RATES
from tests.tiny import tokenizer

ROOT = Path(__file__).parents[2]

# The objective also reports a digest of the batch: an integer below 2**24, exact in fp32, of every token and its place.
# Equal digests at every step are equal batches in equal order.
RECIPE = """
import jax.numpy as jnp
from mercury_jax.config import ModelConfig
from mercury_jax.training import data
from mercury_jax.training.objectives import masked_elbo
from mercury_jax.training.optim import OptimConfig
from mercury_jax.training.recipe import TrainConfig

elbo = masked_elbo()

def objective(key, model, params, batch, corruption):
    loss = elbo(key, model, params, batch, corruption)
    place = jnp.arange(batch.tokens.size, dtype=jnp.uint32).reshape(batch.tokens.shape) * jnp.uint32(2654435761)
    digest = jnp.sum((batch.tokens.astype(jnp.uint32) + 1) * (place ^ (place >> 13) | 1), dtype=jnp.uint32) >> 8
    one = jnp.float32(1)
    return loss._replace(metrics={**loss.metrics, "digest": (digest.astype(jnp.float32), one)})

def config():
    return TrainConfig(
        name="tiny", objective=objective, data=data.mixture((data.generated("add3"), 0.5), (data.text("TEXT"), 0.5)),
        model=ModelConfig(vocab=320, width=16, layers=1, heads=2, kv_heads=2, head_dim=8, ffn=32, block=8, context=96),
        optim=OptimConfig(lr=1e-2, warmup=5), tokenizer="TOKENIZER", steps=50, batch=4, row=96, log_every=1,
        eval_every=25, eval_batches=2, save_every=10, sample_every=50, sample_prompts=("1+2=",), keep=2,
    )
"""


def write_recipe(root: Path) -> Path:
    """The recipe, its tokenizer and its text in a folder."""
    tokenizer().save(root / "tokenizer.model")
    lines = [f"{n} plus {n * n} is {n + n * n}; " * 3 for n in range(400)]
    (root / "text.txt").write_text("\n".join(lines))
    text = RECIPE.replace("TOKENIZER", str(root / "tokenizer.model")).replace("TEXT", str(root / "text.txt"))
    (root / "recipe.py").write_text(text)
    return root


def free_address() -> str:
    """A place for the coordinator that nobody uses."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


def environment(root: Path) -> dict[str, str]:
    """Variables of a process with one device, and with the programs that earlier ones compiled."""
    flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in f]
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(root / "xla"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | cache | {"XLA_FLAGS": " ".join(flags), "PYTHONPATH": path}


def begin(root: Path, processes: int, out: str, *more: str, only: Sequence[int] | None = None) -> list:
    """Starts `mercury train` in several processes, which find each other by JAX's environment variables.

    Args:
        root: Where the recipe is.
        processes: Number of processes.
        out: The run's folder in `root`.
        more: Options.
        only: Start only these of the processes.
    """
    job = {"JAX_COORDINATOR_ADDRESS": free_address(), "JAX_NUM_PROCESSES": str(processes)}
    argv = ["train", str(root / "recipe.py"), "--out", str(root / out), *more]
    return [
        subprocess.Popen(
            [sys.executable, "-m", "mercury_jax", *argv, *(["--distributed"] if processes > 1 else [])],
            stdout=subprocess.DEVNULL, stderr=(root / f"{out}.{i}.log").open("a"),
            env=environment(root) | job | {"JAX_PROCESS_ID": str(i)},
        )
        for i in (range(processes) if only is None else only)
    ]  # fmt: skip


def codes(workers: list[subprocess.Popen], seconds: float = 240) -> list[int]:
    """Exit codes of all; none may be left behind."""
    until = time.monotonic() + seconds
    try:
        return [worker.wait(timeout=max(0.1, until - time.monotonic())) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def finish(root: Path, out: str, workers: list[subprocess.Popen]) -> None:
    """All processes end, and well."""
    found = codes(workers)
    assert found == [0] * len(workers), said(root, out)


def said(root: Path, out: str) -> list[str]:
    """What each process of a run wrote to stderr, its end."""
    return [path.read_text(errors="replace")[-4000:] for path in sorted(root.glob(f"{out}.*.log"))]


def wait_until(ready: Callable[[], bool], workers: list[subprocess.Popen], seconds: float = 120) -> None:
    """Waits for a moment of a run; fails where a process has ended before."""
    until = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > until or any(worker.poll() is not None for worker in workers):
            for worker in workers:
                worker.kill()
            raise AssertionError("the moment never came")
        time.sleep(0.02)


def rows(out: Path) -> list[dict]:
    """The rows of metrics.jsonl without rates, which are of the wall clock; half a line is left out."""
    if not (out / "metrics.jsonl").exists():
        return []
    lines = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [{k: v for k, v in row.items() if k not in RATES} for row in found]


def reached(out: Path) -> int:
    """The last step that a run has logged."""
    return max((row["step"] for row in rows(out)), default=0)
