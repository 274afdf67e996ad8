"""What commands print: JSON for programs, one line of figures for people, progress while they wait, the live view.

Used by every command. Imports neither JAX nor rich at the top: help answers at once, and `mercury bench gpu` needs
neither rich nor tyro.
"""

from __future__ import annotations

import codecs
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from mercury_jax.config import count, refuse

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

    from mercury_jax.decode.stream import StreamOutput
    from mercury_jax.tokenizer import AnyTokenizer
    from mercury_jax.types import LM

NOISE, NOISE_STYLE = "░", "grey50"
ACCEPTED, MARKER = "bold", "italic magenta"
UNKNOWN = 0.25  # a guess less probable than this is shown as noise
PALE, VIVID = (128, 128, 128), (0, 175, 215)  # RGB of guesses at UNKNOWN and at certainty
PACE = 0.06  # least seconds of a frame: a small model is done before the eye has seen anything


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


def readable(text: str) -> str:
    """The text without characters that would move the cursor or change the terminal's state."""
    shown = text.replace("\t", "    ")
    return "".join(c if c == "\n" or c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in shown)


def no_answer(thinking: str | None, finish: str) -> str:
    """What to tell a person about an empty answer to a message.

    Args:
        thinking: The thinking before it, or None.
        finish: Why it ended, as in `Output.finish`. Only for "length" more tokens help.

    Returns:
        One line.
    """
    if not thinking:
        return "the model gave no answer"
    if finish == "length":
        return f"the answer ended while thinking: {thinking!r}; raise --max-tokens"
    return f"the model gave no answer: it stopped while thinking {thinking!r}"


def figures(tokens: int, nfe: int, seconds: float | None = None, note: str = "") -> str:
    """Tokens and speed of an answer as one line.

    Args:
        tokens: Emitted tokens.
        nfe: Forward passes.
        seconds: Of the whole call; None leaves the speed out.
        note: Appended as it is.

    Returns:
        Such as "32 tokens in 11 forward passes (2.9 per pass), 0.12 s, 267 tokens/s".
    """
    line = f"{count(tokens, 'token')} in {count(nfe, 'forward pass')} ({tokens / max(nfe, 1):.1f} per pass)"
    if seconds is not None:
        line += f", {seconds:.2f} s, {tokens / max(seconds, 1e-9):,.0f} tokens/s"
    return line + note


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Lines of aligned columns, the first one to the left and the others to the right.

    Args:
        head: Names of the columns.
        rows: Their texts.

    Returns:
        The head and a line for each row.
    """
    cells = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))])
        for row in cells
    ]


# --- files


def check_writable(option: str, path: str | None) -> None:
    """Refuses a file that could not be written, before any work is done; its content stays as it is.

    Args:
        option: Name of the option, for the error.
        path: The file, or None.

    Raises:
        ValueError: Naming the option, the path and the reason.
    """
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
    """Writes one JSON object a line; does nothing where no path was given.

    Args:
        path: The file, or None.
        records: JSON-ready.
    """
    if path is not None:
        Path(path).write_text("".join(as_json(r) + "\n" for r in records), encoding="utf-8")


def report(records: Iterable[Mapping[str, Any]], out: str | None, line: Callable[[Any], str] | None) -> None:
    """Prints and writes records as they are measured, so that what fails takes no earlier record along.

    Args:
        records: May be a generator.
        out: JSONL file; None writes none.
        line: A record as text for people; None prints JSON.
    """
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

    Args:
        kind: A bar over a known count, a spinner with the bytes so far, or a spinner with the time so far.
        text: What is shown beside it first.
        total: The whole count, where it is known.
        quiet: Show nothing.

    Yields:
        A function with the keywords of rich's `Progress.update`: `completed`, `total`, `advance`, `description`.
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


# --- the live view: a canvas in a terminal, repainted after every denoising step
#
# Accepted tokens are bold. Guesses are coloured by the model's confidence, from grey to blue, and positions without a
# usable guess show noise.


def style(accepted: bool, confidence: float) -> str:
    """The style of one token in rich's words: bold, or a colour between PALE and VIVID by its confidence.

    Args:
        accepted: Whether the token is accepted.
        confidence: Its probability.

    Returns:
        A style in rich's words.
    """
    if accepted:
        return ACCEPTED
    share = min(max((confidence - UNKNOWN) / (1 - UNKNOWN), 0.0), 1.0)
    return "rgb({},{},{})".format(*(round(a + share * (b - a)) for a, b in zip(PALE, VIVID, strict=True)))


def paint(
    tok: AnyTokenizer, tokens: Sequence[int], accepted: Sequence[bool], confidence: Sequence[float]
) -> Text:
    """Tokens as styled text.

    Args:
        tok: Tokenizer of the model.
        tokens: Ids [L].
        accepted: Whether each is accepted [L].
        confidence: Probability of each [L].

    Returns:
        The text. Where the bytes of one character come from several tokens, the last of them styles it.
    """
    from rich.text import Text

    text, decoder = Text(), codecs.getincrementaldecoder("utf-8")("replace")
    marks = tok.thinking
    names = {} if marks is None else {marks.opening[0]: "[thinking] ", marks.close: "\n[answer] "}
    for token, sure, p in zip(map(int, tokens), accepted, confidence, strict=True):
        if token == tok.mask or (not sure and p < UNKNOWN):
            text.append(NOISE, NOISE_STYLE)
        elif token in names:
            text.append(names[token], MARKER)
        else:
            piece = tok.pieces[token] if token < len(tok.pieces) else b""  # the last ids may be unused
            text.append(readable(decoder.decode(piece)), style(bool(sure), float(p)))
    return text


def tail(text: Text, console: Console, spare: int = 3) -> Text:
    """The last lines that fit the screen, `spare` left free: what has scrolled away cannot be repainted.

    Args:
        text: The whole text.
        console: Its width and height count.
        spare: Lines to leave free.

    Returns:
        The wrapped last lines.
    """
    from rich.text import Text

    lines = text.wrap(console, console.width)
    return Text("\n").join(lines[-max(console.height - spare, 1) :])


def follow(
    console: Console,
    tok: AnyTokenizer,
    before: str,
    size: int,
    frames: Iterable[StreamOutput],
    *,
    pace: float = PACE,
    first: str = "compiling the first step ...",
) -> StreamOutput:
    """Shows an answer behind its prompt while it is denoised.

    Args:
        console: Where to draw.
        tok: Tokenizer of the model.
        before: The prompt.
        size: Tokens of noise to begin with.
        frames: Of `decode.stream`, shown as they come.
        pace: Least seconds of a frame.
        first: The line under the noise before the first frame.

    Returns:
        The last frame.
    """
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    def draw(frame: StreamOutput | None) -> RenderableType:
        if frame is None:
            canvas, caption = Text(NOISE * size, NOISE_STYLE), first
        else:
            canvas = paint(tok, frame.tokens.tolist(), frame.accepted.tolist(), frame.confidence.tolist())
            caption = f"step {frame.step}: {int(frame.accepted.sum())} of {len(frame.tokens)} tokens accepted"
        body = Text.assemble((readable(before), "dim"), canvas)
        if frame is not None and frame.done:
            return body
        return Group(tail(body, console), Text(caption, "dim"))

    last: Any = None
    with Live(draw(None), console=console, auto_refresh=False) as view:
        due = time.monotonic() + pace
        for last in frames:
            time.sleep(max(due - time.monotonic(), 0.0))
            due = time.monotonic() + pace
            if last.done:
                view.vertical_overflow = "visible"
            view.update(draw(last), refresh=not last.done)  # leaving the view paints the last frame
    return last


# --- model and machine


def load(source: str | None, **how: Any) -> LM:
    """The model of a command.

    Args:
        source: Folder or Hugging Face id; None for the embedded model.
        how: Further arguments of `mercury_jax.load`.
    """
    with progress(text="loading the model"):
        from mercury_jax.hub import load

        return load(source, **how)


def device() -> str:
    """What figures were measured on, such as "2 CPU cores of Intel Xeon Processor (AVX-512)" or "1 x NVIDIA H200"."""
    import jax

    from mercury_jax.compilation import processor_name

    devices = jax.devices()
    if devices[0].platform == "cpu":
        return f"{os.cpu_count()} CPU cores of {processor_name()}"
    return f"{len(devices)} x {devices[0].device_kind}"
