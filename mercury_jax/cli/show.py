"""What commands print: JSON for programs, one line of figures for people, a spinner while they wait."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mercury_jax.types import LM


def emit(record: Mapping[str, Any]) -> None:
    """One JSON object on one line."""
    print(as_json(record), flush=True)


def as_json(record: Mapping[str, Any]) -> str:
    """Without line ends; NaN, which JSON lacks, becomes null."""
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
    """A remark for people; standard output is for the answer alone."""
    print(text, file=sys.stderr, flush=True)


def readable(text: str) -> str:
    """Without what would move the cursor or change the terminal's state."""
    shown = text.replace("\t", "    ")
    return "".join(c if c == "\n" or c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in shown)


def figures(tokens: int, forwards: int, seconds: float | None = None, note: str = "") -> str:
    """`32 tokens in 11 forwards (2.9 a forward), 0.12 s, 267 tokens/s`."""
    passes = "1 forward" if forwards == 1 else f"{forwards} forwards"
    line = f"{tokens} tokens in {passes} ({tokens / max(forwards, 1):.1f} a forward)"
    if seconds is not None:
        line += f", {seconds:.2f} s, {tokens / max(seconds, 1e-9):,.0f} tokens/s"
    return line + note


def terminal(stream: Any = None) -> bool:
    """Whether a person looks at this stream, on a screen that can be repainted."""
    stream = sys.stdout if stream is None else stream
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def lively(args: argparse.Namespace) -> bool:
    """Whether to show the canvas while it settles."""
    return terminal() and not (args.no_live or args.json)


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """A spinner on standard error while something takes its time; nothing where no one looks."""
    if not terminal(sys.stderr):
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield


def load(folder: str | None, **how: Any) -> LM:
    """The model to talk to; `how`: further arguments of `mercury_jax.load`."""
    with waiting("loading the model"):
        from mercury_jax.hub import load

        return load(folder, **how)


def device() -> str:
    """What the figures were measured on: `2 CPU cores`, `1 x NVIDIA H200`."""
    import jax

    devices = jax.devices()
    if devices[0].platform == "cpu":
        return f"{os.cpu_count()} CPU cores"
    return f"{len(devices)} x {devices[0].device_kind}"
