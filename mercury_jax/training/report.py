"""Progress of a run: a progress bar or plain lines, metrics as JSONL, TensorBoard and Weights & Biases; MFU and memory.

`loop.py` calls a `Reporter` at each step. TensorBoard files are written if the package is installed, W&B is used if the
recipe names a project.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import jax

from mercury_jax.checkpoint import manifest
from mercury_jax.config import ModelConfig, refuse
from mercury_jax.sharding import path_name
from mercury_jax.types import Params

Json = Any  # numbers, texts, None, and lists and dicts of them
METRICS, SAMPLES = "metrics.jsonl", "samples.txt"  # in the run's folder
# Fields of a row that depend on the machine and the wall clock; all others are the same in a resumed run.
RATES = (
    "tokens_per_second", "step_seconds", "goodput", "mfu", "device_memory_gb", "device_memory_peak_gb",
    "host_memory_gb",
)  # fmt: skip

# Dense bf16 FLOP/s from the data sheets (T4: fp16, since it has no bf16). A `device_kind` of JAX starts with one of
# these names; the longest one counts.
PEAK = {
    "NVIDIA B200": 2250e12, "NVIDIA GB200": 2500e12, "NVIDIA H200": 989e12, "NVIDIA GH200": 989e12,
    "NVIDIA H100 PCIe": 756e12, "NVIDIA H100": 989e12, "NVIDIA A100": 312e12, "NVIDIA L40S": 362e12,
    "NVIDIA L4": 121e12, "NVIDIA A10G": 70e12, "Tesla T4": 65e12,
    "NVIDIA GeForce RTX 5090": 209e12, "TPU v4": 275e12, "TPU v5 lite": 197e12, "TPU v5e": 197e12,
    "TPU v5": 459e12, "TPU v6 lite": 918e12, "TPU v6e": 918e12,
}  # fmt: skip


class Clock:
    """Measures tokens per second of training, and estimates the remaining time from the whole run so far."""

    def __init__(self, steps: int) -> None:
        """Starts the clock; call it before the first step."""
        self.steps = steps
        self._marks: list[tuple[float, int]] = []  # (seconds of training, tokens) of the last 50 steps
        self._begin: tuple[float, int] | None = None  # (time, step) after compilation
        self._paused = 0.0
        self._tokens = 0
        self._opened, self._steps = time.monotonic(), 0

    def tick(self, step: int, tokens: int) -> None:
        """Counts a step."""
        # The speed excludes pauses for evaluation and sampling, the remaining time includes them.
        now = time.monotonic()
        self._begin = self._begin or (now, step)
        self._tokens += tokens
        self._steps += 1
        self._marks.append((now - self._paused, self._tokens))
        del self._marks[:-50]

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Excludes the time of the block, for evaluation or sampling, from the tokens per second."""
        begin = time.monotonic()
        yield
        self._paused += time.monotonic() - begin

    def speed(self) -> float:
        """Returns tokens per second over the last 50 steps; 0 while unknown."""
        if len(self._marks) < 2:
            return 0.0
        (t0, n0), (t1, n1) = self._marks[0], self._marks[-1]
        return (n1 - n0) / max(t1 - t0, 1e-9)

    def step_seconds(self) -> float:
        """Returns the mean seconds per step over the last 50 steps; NaN while unknown."""
        if len(self._marks) < 2:
            return math.nan
        return (self._marks[-1][0] - self._marks[0][0]) / (len(self._marks) - 1)

    def goodput(self) -> float:
        """Returns the share of this process's time that its steps needed; compiling, evaluating and waiting do not."""
        return min(1.0, self._steps * self.step_seconds() / max(time.monotonic() - self._opened, 1e-9))

    def left(self, step: int) -> float:
        """Estimates the remaining time."""
        if self._begin is None or step <= self._begin[1]:
            return math.nan
        return (self.steps - step) * (time.monotonic() - self._begin[0]) / (step - self._begin[1])


class Reporter:
    """Writes metrics and samples of a run. With several processes, only process 0 writes.

    Tokens are the editable positions of a batch, which the objective scores. Padding and clean copies do not count.
    """

    def __init__(
        self, out: Path, name: str, steps: int, start: int, quiet: bool = False, *, peak_share: float = 0.0,
        wandb: str = "", config: Json = None,
    ) -> None:  # fmt: skip
        """Opens the files, and drops rows and samples of steps after `start`.

        Such rows exist if the run was killed after its last checkpoint: a resumed run takes these steps again.
        """
        self.clock = Clock(steps)
        self.steps, self.quiet = steps, quiet
        self._out, self._peak_share = out, peak_share
        self._bar = self._file = self._board = self._wandb = None
        if quiet:
            return
        _drop_rows_after(out / METRICS, start)
        _drop_samples_after(out / SAMPLES, start)
        self._file = (out / METRICS).open("a", encoding="utf-8", buffering=1)
        try:
            # The event writer of the package `tensorboard` itself, so that TensorFlow or PyTorch are not needed.
            from tensorboard.compat.proto import event_pb2, summary_pb2  # pyright: ignore[reportMissingImports]
            from tensorboard.summary.writer import event_file_writer  # pyright: ignore[reportMissingImports]
        except ImportError:
            pass
        else:
            writer = event_file_writer.EventFileWriter(str(out / "tensorboard"))
            self._board = writer, event_pb2.Event, summary_pb2.Summary
        if wandb:
            self._wandb = _wandb_run(wandb, out, name, config)
        if sys.stderr.isatty():
            self._bar = _progress_bar(name, steps, start)

    def step(self, step: int, tokens: int, loss: float) -> None:
        """Updates the clock and the progress bar; called at each step."""
        self.clock.tick(step, tokens)
        if self._bar is not None:
            bar, task = self._bar
            bar.update(task, completed=step, line=f"loss {loss:.4f}  {_count(self.clock.speed())} tokens/s")

    def metrics(self, step: int, kind: str, values: Mapping[str, float]) -> None:
        """Writes one row {"step", "kind", ...} of metrics; a training row also gets the fields `RATES`."""
        if self._file is None:
            return
        row: dict[str, Any] = {"step": step, "kind": kind, **values}
        if kind == "train":
            row |= self._rates()
        self._file.write(json.dumps(row) + "\n")
        if self._wandb is not None:
            self._wandb.log(
                {f"{kind}/{key}": x for key, x in row.items() if key not in ("step", "kind")}, step=step
            )
        if self._board is not None:
            writer, event, summary = self._board
            for name, value in values.items():
                scalar = summary.Value(tag=f"{kind}/{name}", simple_value=value)
                writer.add_event(event(wall_time=time.time(), step=step, summary=summary(value=[scalar])))
        ordered = sorted(values.items(), key=lambda item: item[0] != "loss")  # the loss first
        shown = "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in ordered)
        if kind != "train":
            self.say(f"{kind} at {step}: {shown}")
        elif self._bar is None:
            left, speed = self.clock.left(step), self.clock.speed()
            ahead = timedelta(seconds=round(left)) if math.isfinite(left) else "?"
            rate = f"  {_count(speed)} tokens/s  {ahead} left" if speed else ""  # unknown after one step
            self.say(f"{step}/{self.steps}  {shown}{rate}")

    def _rates(self) -> dict[str, float]:
        seconds = self.clock.step_seconds()
        found = {"tokens_per_second": round(self.clock.speed(), 1)}
        if math.isfinite(seconds):
            found |= {"step_seconds": round(seconds, 6), "goodput": round(self.clock.goodput(), 4)}
            if self._peak_share:
                found["mfu"] = round(self._peak_share / max(seconds, 1e-9), 5)
        return found | memory()

    def sample(self, step: int, text: str) -> None:
        """Writes generated text to `samples.txt` and to the terminal."""
        if self.quiet:
            return
        with (self._out / SAMPLES).open("a", encoding="utf-8") as file:
            file.write(f"=== step {step}\n{text}\n\n")
        self.say(f"sample at {step}:\n{text}")

    def say(self, text: str) -> None:
        """Prints a message to standard error, above the progress bar."""
        if self.quiet:
            return
        if self._bar is not None:
            self._bar[0].console.print(text, markup=False, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def sync(self) -> None:
        """Writes all rows of metrics through to the disk."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the files and the bar."""
        if self._bar is not None:
            self._bar[0].stop()
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board[0].close()
        if self._wandb is not None:
            self._wandb.finish()


def check_wandb(project: str) -> None:
    """Refuses a project of Weights & Biases where its package is missing."""
    if project and importlib.util.find_spec("wandb") is None:
        allowed = "a project, once the package wandb is installed (pip install wandb); or none"
        raise refuse("wandb", project, allowed)


def _wandb_run(project: str, out: Path, name: str, config: Json) -> Any:
    """Opens the run of Weights & Biases. Its id is a hash of the folder, so a resumed run continues it."""
    import wandb  # pyright: ignore[reportMissingImports]

    digest = hashlib.blake2b(str(out.absolute()).encode(), digest_size=6).hexdigest()
    return wandb.init(
        project=project, name=name, id=f"{name}-{digest}", resume="allow", dir=str(out), config=config
    )


def _drop_rows_after(path: Path, start: int) -> None:
    if not path.exists():
        return
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            if line.endswith("\n") and json.loads(line)["step"] <= start:
                rows.append(line)
        except (ValueError, KeyError):
            continue  # a line that was cut off when the process was killed
    manifest.replace(path, "".join(rows).encode())


def _drop_samples_after(path: Path, start: int) -> None:
    if not path.exists():
        return
    # Each sample begins with a line "=== step N"; text before the first such line belongs to no sample.
    parts = re.split(
        r"^=== step (\d+)\n", path.read_text(encoding="utf-8", errors="replace"), flags=re.MULTILINE
    )
    kept = (f"=== step {step}\n{text}" for step, text in zip(parts[1::2], parts[2::2]) if int(step) <= start)
    manifest.replace(path, "".join(kept).encode())


def _progress_bar(name: str, steps: int, start: int) -> Any:
    """Starts a progress bar; returns rich's bar and its task."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[line]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
    task = bar.add_task(name, total=steps, completed=start, line="compiling")
    bar.start()
    return bar, task


def _count(x: float) -> str:
    return f"{x / 1000:.1f}k" if x >= 1000 else f"{x:.0f}"


# --- speed and memory: they depend on the machine and the wall clock


def peak_flops(kind: str) -> float | None:
    """Looks up the peak FLOP/s of a kind of device."""
    names = [name for name in PEAK if kind == name or kind.startswith((f"{name} ", f"{name}-"))]
    return PEAK[max(names, key=len)] if names else None


def flops_per_position(config: ModelConfig, params: Params) -> float:
    """Estimates the FLOPs of a forward and a backward pass per position: 6 per parameter that the position uses.

    This is the convention of PaLM (arXiv 2204.02311, appendix B) without its attention term. Rematerialisation and
    additional passes of an objective do not count, so the MFU is rather too low than too high.
    """
    experts, total = getattr(config, "experts", None), 0.0
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        name = path_name(path)
        if leaf.ndim < 2 or (name == "embed" and not getattr(config, "tied", False)):
            continue  # norms and biases, and an embedding that is only looked up, multiply nothing
        used = (
            experts.active / experts.count if experts and name.endswith(("moe/down", "moe/gate_up")) else 1.0
        )
        total += used * math.prod(leaf.shape)
    return 6.0 * total


def memory() -> dict[str, float]:
    """Measures the memory in use.

    Returns:
        `device_memory_gb` and `device_memory_peak_gb` of the fullest device of this process, in 10^9 bytes. On devices
        without statistics (CPU) `host_memory_gb`, the resident memory of the process. Empty if neither is known.
    """
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    if all("bytes_in_use" in found for found in stats):
        now, peak = (
            max(found.get(key, 0) for found in stats) for key in ("bytes_in_use", "peak_bytes_in_use")
        )
        return {"device_memory_gb": round(now / 1e9, 3), "device_memory_peak_gb": round(peak / 1e9, 3)}
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):  # not Linux
        return {}
    return {"host_memory_gb": round(pages * os.sysconf("SC_PAGE_SIZE") / 1e9, 3)}
