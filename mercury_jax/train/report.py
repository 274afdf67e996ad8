"""What a run tells while it works: a bar or plain lines, metrics as JSONL, TensorBoard if installed."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

METRICS, SAMPLES = "metrics.jsonl", "samples.txt"


class Clock:
    """Tokens a second while training, and the time left at the pace of the whole run so far."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._marks: list[tuple[float, int, int]] = []  # (training seconds, step, tokens)
        self._begin: tuple[float, int] | None = None  # after the first step: compilation does not count
        self._paused = 0.0
        self._tokens = 0

    def tick(self, step: int, tokens: int) -> None:
        now = time.monotonic()
        self._begin = self._begin or (now, step)
        self._tokens += tokens
        self._marks.append((now - self._paused, step, self._tokens))
        del self._marks[:-50]

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Evaluation and sampling: no part of tokens a second."""
        begin = time.monotonic()
        yield
        self._paused += time.monotonic() - begin

    def speed(self) -> float:
        """Tokens a second over the last 50 steps."""
        if len(self._marks) < 2:
            return 0.0
        (t0, _, n0), (t1, _, n1) = self._marks[0], self._marks[-1]
        return (n1 - n0) / max(t1 - t0, 1e-9)

    def left(self, step: int) -> float:
        """Seconds until the last step, evaluation and sampling included; NaN while unknown."""
        if self._begin is None or step <= self._begin[1]:
            return math.nan
        return (self.steps - step) * (time.monotonic() - self._begin[0]) / (step - self._begin[1])


class Reporter:
    """Writes metrics of a run; only process 0 gets one that is not `quiet`.

    tokens are editable positions, those a batch scores; padding and clean copies do not count.
    """

    def __init__(self, out: Path, name: str, steps: int, start: int, quiet: bool = False) -> None:
        self.clock = Clock(steps)
        self.name, self.steps, self.quiet = name, steps, quiet
        self._out = None if quiet else out
        self._bar = self._file = self._board = None
        if quiet:
            return
        _forget(out / METRICS, start)
        self._file = (out / METRICS).open("a", encoding="utf-8", buffering=1)
        self._board = _tensorboard(out)
        if sys.stderr.isatty():
            self._bar = _bar(name, steps, start)

    def step(self, step: int, tokens: int, loss: float) -> None:
        """Every step: moves the bar."""
        self.clock.tick(step, tokens)
        if self._bar is not None:
            bar, task = self._bar
            bar.update(task, completed=step, line=f"loss {loss:.4f}  {_count(self.clock.speed())} tokens/s")

    def metrics(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        """One row: {"step", "kind", ...}. Rates are of the wall clock, the rest is deterministic."""
        if self.quiet:
            return
        row: dict[str, Any] = {"step": step, "kind": kind, **values}
        if kind == "train":
            row["tokens_per_second"] = round(self.clock.speed(), 1)
        assert self._file is not None
        self._file.write(json.dumps(row) + "\n")
        for name, value in values.items():
            if self._board is not None and isinstance(value, (int, float)):
                self._board(f"{kind}/{name}", value, step)
        if kind != "train" or self._bar is None:
            self.say(self._line(step, kind, values))

    def _line(self, step: int, kind: str, values: Mapping[str, Any]) -> str:
        shown = "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items())
        if kind != "train":
            return f"{kind} at {step}: {shown}"
        rate, left = _count(self.clock.speed()), _span(self.clock.left(step))
        return f"{step}/{self.steps}  {shown}  {rate} tokens/s  {left} left"

    def sample(self, step: int, text: str) -> None:
        """Text that the model wrote, for people."""
        if self._out is not None:
            with (self._out / SAMPLES).open("a", encoding="utf-8") as file:
                file.write(f"=== step {step}\n{text}\n\n")
        self.say(f"sample at {step}:\n{text}")

    def say(self, text: str) -> None:
        """A line for people, above the bar."""
        if self.quiet:
            return
        if self._bar is not None:
            self._bar[0].console.print(text, markup=False, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar[0].stop()
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()


def _forget(path: Path, start: int) -> None:
    """Drop rows of steps after `start`: a run that was killed there takes them again."""
    if not path.exists():
        return
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            if json.loads(line)["step"] <= start:
                rows.append(line)
        except (ValueError, KeyError):
            continue  # half a line, from the moment of the kill
    work = path.with_suffix(".tmp")
    work.write_text("".join(rows), encoding="utf-8")
    work.replace(path)


def _bar(name: str, steps: int, start: int) -> Any:
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


class _Board:
    """Scalars for TensorBoard through the writer of the `tensorboard` package itself."""

    def __init__(self, out: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2  # pyright: ignore[reportMissingImports]
        from tensorboard.summary.writer.event_file_writer import (  # pyright: ignore[reportMissingImports]
            EventFileWriter,
        )

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._writer = EventFileWriter(str(out / "tensorboard"))

    def __call__(self, name: str, value: float, step: int) -> None:
        summary = self._summary(value=[self._summary.Value(tag=name, simple_value=value)])
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        self._writer.close()


def _tensorboard(out: Path) -> _Board | None:
    try:
        return _Board(out)
    except ImportError:
        return None


def _count(x: float) -> str:
    return f"{x / 1000:.1f}k" if x >= 1000 else f"{x:.0f}"


def _span(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "?"
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"
