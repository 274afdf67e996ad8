"""SIGKILL at random moments of `mercury train`, each followed by --resume: the run ends equal, byte for byte.

`make chaos` kills 100 times; alone, this file kills as often as MERCURY_CHAOS says (default 6, the short form).
Moments are drawn inside of start-up, steps, checkpoint saves and the export, and counted by what the
killed process left behind, whatever was intended. MERCURY_CHAOS_OUT names a file for the counts.
"""

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mercury_jax import checkpoint
from tests.training import jobs

KILLS = int(os.environ.get("MERCURY_CHAOS", "6"))
ROUND = 20  # kills of a run; then it is completed and compared, and another one begins
STEPS, EVERY = 1000, 40  # of the run, and of its checkpoints; a save takes as long as 15 to 35 steps
KINDS = (
    "save",
    "steps",
    "start",
    "save",
)  # of two thirds of the kills, in this order; the last third is in the export

# The run trains its tokenizer, evaluates, samples and keeps an average, so that all of these are killed, too.
RECIPE = """
from mercury_jax.config import ModelConfig
from mercury_jax.training import data
from mercury_jax.training.objectives import masked_elbo
from mercury_jax.training.recipe import TrainConfig

def config():
    return TrainConfig(
        name="chaos", objective=masked_elbo(), data=data.text("TEXT", held_out=0.2),
        model=ModelConfig(vocab=340, width=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn=32, block=8),
        steps=STEPS, batch=4, row=96, log_every=7, eval_every=250, eval_batches=1, save_every=EVERY, keep=2,
        sample_every=500, sample_prompts=("7 plus",),
    )
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """The recipe, and the run that nothing disturbs."""
    root = tmp_path_factory.mktemp("chaos")
    (root / "text").mkdir()
    for n in range(40):
        lines = "\n".join(
            f"{n} plus {m} is {n + m}, and twice that is {2 * (n + m)}." for m in range(n, n + 12)
        )
        (root / "text" / f"{n}.txt").write_text(lines)
    text = (
        RECIPE.replace("TEXT", str(root / "text" / "*.txt"))
        .replace("STEPS", str(STEPS))
        .replace("EVERY", str(EVERY))
    )
    (root / "recipe.py").write_text(text)
    jobs.finish(root, "whole", [begin(root, "whole")])
    return root


@pytest.fixture(scope="module")
def startup(root) -> float:
    """Seconds that a run needs to start, with all programs compiled."""
    begun = time.monotonic()
    jobs.finish(root, "again", [begin(root, "again")])
    times = [(root / "again" / name).stat().st_mtime for name in ("config.json", "model/manifest.json")]
    return max(1.0, time.monotonic() - begun - (times[1] - times[0]))


def begin(root: Path, out: str) -> subprocess.Popen:
    argv = ["train", str(root / "recipe.py"), "--out", str(root / out), "--resume"]
    return subprocess.Popen(
        [sys.executable, "-m", "mercury_jax", *argv],
        stdout=subprocess.DEVNULL, stderr=(root / f"{out}.0.log").open("a"), env=jobs.environment(root),
    )  # fmt: skip


def kill(root: Path, out: str, kind: str, draw: random.Random, startup: float) -> str | None:
    """Starts the run and kills it at a moment of a kind.

    Args:
        root: Where the recipe is.
        out: The run's folder in `root`.
        kind: The intended moment: "start", "steps", "save" or "export".
        draw: Draws the moment.
        startup: About how many seconds the run takes to start.

    Returns:
        Where the kill was, by what it left; None where the run had ended before.
    """
    folder, log = root / out, root / f"{out}.0.log"
    saves = folder / "checkpoints"
    # "starts at step", "resumed at step": by then the leavings of the kill before are gone, but for those of an export.
    said = lambda: log.read_text(errors="replace").count("s at step ") + log.read_text().count("d at step ")
    exported = lambda: {(p.name, p.stat().st_mtime_ns) for p in folder.glob("model*")}
    at, target = jobs.reached(folder), (checkpoint.latest(saves) or 0) + EVERY * draw.randint(1, 2)
    before, old, begun, started = said() if log.exists() else 0, exported(), time.monotonic(), False
    wait, steps = startup * draw.uniform(0.05, 1.0), 7 * draw.randint(1, 8)
    run = begin(root, out)
    while run.poll() is None:
        started = started or said() > before
        if kind == "start" and time.monotonic() > begun + wait:
            break
        saving = any(saves.glob("*.tmp"))
        if kind == "steps" and started and not saving and jobs.reached(folder) >= at + steps:
            break
        if kind == "save" and started and any(int(p.name[:8]) >= target for p in saves.glob("*.tmp")):
            break
        with suppress(FileNotFoundError):  # it came and went
            if kind == "export" and started and exported() != old:
                break
        time.sleep(0.002 if kind in ("start", "steps") or not started else 0)
    time.sleep(draw.uniform(0, 0.02 if kind in ("start", "save") else 0.004))
    run.kill()
    if run.wait() != -9:
        assert run.returncode == 0, jobs.said(root, out)
        return None
    if said() == before:
        return "start"
    if exported() != old:
        return "export"
    return "save" if any(saves.glob("*.tmp")) else "steps"


def arrays(out: Path) -> dict[str, bytes]:
    """Every array of the last checkpoint: parameters, average, moments, key, step."""
    about = checkpoint.inspect(out / "checkpoints")[1]
    shapes = {
        name: jax.ShapeDtypeStruct(size, jnp.dtype(kind)) for name, (kind, *size) in about["arrays"].items()
    }
    found = checkpoint.restore(out / "checkpoints", shapes).tree
    return {name: np.asarray(array).tobytes() for name, array in found.items()}


def assert_same(found: Path, want: Path) -> None:
    """Equal checkpoints, rows of metrics, samples, tokenizer and exported model; nothing half-written is left."""
    assert (
        checkpoint.steps(found / "checkpoints")
        == checkpoint.steps(want / "checkpoints")
        == [STEPS - EVERY, STEPS]
    )
    assert arrays(found) == arrays(want)
    left, right = (checkpoint.inspect(out / "checkpoints")[1]["extra"] for out in (found, want))
    assert left == right
    assert jobs.rows(found) == jobs.rows(want)
    files = lambda out: {str(p.relative_to(out)) for p in out.rglob("*") if "checkpoints" not in p.parts}
    assert files(found) == files(want)
    for name in ("samples.txt", "tokenizer.model", *(f"model/{p.name}" for p in (want / "model").iterdir())):
        assert (found / name).read_bytes() == (want / name).read_bytes(), name


def test_a_run_that_is_killed_again_and_again_ends_equal_byte_for_byte(root, startup):
    draw, counts, missed, begun = random.Random(17), Counter(), 0, time.monotonic()
    for number in range(0, KILLS, ROUND):
        out, kills = f"killed{number}", min(ROUND, KILLS - number)
        exports = max(1, kills // 3)
        kinds = [KINDS[n % len(KINDS)] for n in range(kills - exports)]
        draw.shuffle(kinds)
        for kind in kinds + ["export"] * exports:
            for _ in range(20):  # a run that ended before the moment came is started again
                where = kill(root, out, kind, draw, startup)
                if where is not None:
                    break
                missed += 1
            assert where is not None
            counts[where] += 1
        jobs.finish(root, out, [begin(root, out)])
        assert_same(root / out, root / "whole")
    row = {
        "kills": sum(counts.values()), **{kind: counts[kind] for kind in ("start", "steps", "save", "export")},
        "runs": -(-KILLS // ROUND), "equal": True, "ended_before_the_kill": missed,
        "seconds": round(time.monotonic() - begun), "jax": jax.__version__,
    }  # fmt: skip
    print(json.dumps(row))
    if place := os.environ.get("MERCURY_CHAOS_OUT"):
        Path(place).write_text(json.dumps(row) + "\n")
    assert counts["save"] >= KILLS // 10 and counts["export"] >= KILLS // 10
