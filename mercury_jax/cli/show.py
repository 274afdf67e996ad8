"""What commands print: JSON for programs, one line of figures for people, progress while they wait.

Used by every command. Imports neither JAX nor rich at the top: help answers at once, and `mercury bench gpu` needs
neither rich nor tyro.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from mercury_jax.config import count, refuse

if TYPE_CHECKING:
    from mercury_jax.types import LM

# --- output


def emit(record: Mapping[str, Any]) -> None:
    """Prints one JSON object on one line."""
    print(as_json(record), flush=True)


def as_json(record: Mapping[str, Any]) -> str:
    """A record as JSON on one line; NaN and infinity, which JSON lacks, become null, and unknown types text."""
    return json.dumps(_plain(record), ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if hasattr(value, "tolist"):  # a numpy or JAX array or scalar
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int | bool) else str(value)


def say(text: str) -> None:
    """A remark for people, on standard error: standard output is for the answer alone."""
    print(text, file=sys.stderr, flush=True)


def no_answer(thinking: str | None, finish: str) -> str:
    """What to tell a person about an empty answer: only where it ended by its length, more tokens help."""
    if not thinking:
        return "the model gave no answer"
    if finish == "length":
        return f"the answer ended while thinking: {thinking!r}; raise --max-tokens"
    return f"the model gave no answer: it stopped while thinking {thinking!r}"


def figures(tokens: int, nfe: int, seconds: float | None = None, note: str = "") -> str:
    """An answer's figures: "32 tokens in 11 forward passes (2.9 per pass), 0.12 s, 267 tokens/s", and a note."""
    line = f"{count(tokens, 'token')} in {count(nfe, 'forward pass')} ({tokens / max(nfe, 1):.1f} per pass)"
    if seconds is not None:
        line += f", {seconds:.2f} s, {tokens / max(seconds, 1e-9):,.0f} tokens/s"
    return line + note


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Lines of aligned columns, the first one to the left and the others to the right."""
    cells = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))])
        for row in cells
    ]


# --- files


def check_writable(option: str, path: str | None) -> None:
    """Refuses a file that could not be written, before any work is done; its content stays as it is."""
    if path is None:
        return
    new = not os.path.exists(path)
    try:
        open(path, "a", encoding="utf-8").close()
    except OSError as error:
        raise refuse(option, path, f"a file that can be written ({error.strerror})") from None
    if new:
        os.remove(path)


def write_records(path: str | None, records: Iterable[Mapping[str, Any]]) -> None:
    """Writes one JSON object a line; does nothing where no path was given."""
    if path is not None:
        Path(path).write_text("".join(as_json(r) + "\n" for r in records), encoding="utf-8")


def report(records: Iterable[Mapping[str, Any]], out: str | None, line: Callable[[Any], str] | None) -> None:
    """Prints and writes records as they are measured, so that what fails takes no earlier record along."""
    done: list[Mapping[str, Any]] = []
    for record in records:
        done.append(record)
        write_records(out, done)
        if line is None:
            emit(record)
        else:
            print(line(record), flush=True)


# --- waiting


def terminal(stream: TextIO | None = None) -> bool:
    """Whether a person looks at this stream (default: standard output), on a screen that can be repainted."""
    return (stream or sys.stdout).isatty() and os.environ.get("TERM") != "dumb"


@contextmanager
def progress(
    kind: Literal["count", "bytes", "time"] = "time",
    text: str = "",
    *,
    total: int | None = None,
    quiet: bool = False,
) -> Iterator[Callable[..., None]]:
    """A progress bar on standard error; nothing where that is no terminal.

    It is a bar over a known count, or a spinner with the bytes or the time so far. Yields a function with the keywords
    of rich's `Progress.update`: `completed`, `total`, `advance`, `description`.
    """
    if quiet or not terminal(sys.stderr):
        yield lambda **changes: None
        return
    from rich import progress as rich
    from rich.console import Console

    about = rich.TextColumn("{task.description}")
    columns = {
        "count": (rich.BarColumn(), rich.MofNCompleteColumn(), rich.TimeRemainingColumn(), about),
        "bytes": (rich.SpinnerColumn(), about, rich.DownloadColumn()),
        "time": (rich.SpinnerColumn(), about, rich.TimeElapsedColumn()),
    }[kind]
    with rich.Progress(*columns, console=Console(stderr=True), transient=kind != "bytes") as bar:
        item = bar.add_task(text, total=total)
        yield lambda **changes: bar.update(item, **changes)


# --- model


def load(source: str | None, **how: Any) -> LM:
    """The model of a command."""
    with progress(text="loading the model"):
        from mercury_jax.hub import load

        return load(source, **how)
