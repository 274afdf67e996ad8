"""The live view of a terminal: a canvas that is repainted after every denoising step.

Accepted tokens are bold. Guesses are coloured by the model's confidence, from grey to blue, and positions without a
usable guess show noise. Imports neither JAX nor rich at the top, as the package says.
"""

from __future__ import annotations

import codecs
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from mercury_jax.viz import NOISE, UNKNOWN, is_noise, readable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

    from mercury_jax.decode.stream import StreamOutput
    from mercury_jax.tokenizer import AnyTokenizer

NOISE_STYLE, ACCEPTED, MARKER = "grey50", "bold", "italic magenta"
PALE, VIVID = (128, 128, 128), (0, 175, 215)  # RGB of guesses at UNKNOWN and at certainty
PACE = 0.06  # least seconds of a frame: a small model is done before the eye has seen anything
SPARE = 3  # lines of the screen to leave free


def style(accepted: bool, confidence: float) -> str:
    """The style of one token in rich's words: bold, or a colour between PALE and VIVID by its confidence."""
    if accepted:
        return ACCEPTED
    share = min(max((confidence - UNKNOWN) / (1 - UNKNOWN), 0.0), 1.0)
    return "rgb({},{},{})".format(*(round(a + share * (b - a)) for a, b in zip(PALE, VIVID, strict=True)))


def paint(
    tokenizer: AnyTokenizer, tokens: Sequence[int], accepted: Sequence[bool], confidence: Sequence[float]
) -> Text:
    """Tokens as styled text."""
    from rich.text import Text

    text, decoder = Text(), codecs.getincrementaldecoder("utf-8")("replace")
    marks = tokenizer.thinking
    names = {} if marks is None else {marks.opening[0]: "[thinking] ", marks.close: "\n[answer] "}
    for token, sure, p in zip(tokens, accepted, confidence, strict=True):
        if is_noise(tokenizer, token, sure, p):
            text.append(NOISE, NOISE_STYLE)
        elif token in names:
            text.append(names[token], MARKER)
        else:
            pieces = tokenizer.pieces
            piece = pieces[token] if token < len(pieces) else b""  # the last ids may be unused
            text.append(readable(decoder.decode(piece)), style(sure, p))
    return text


def tail(text: Text, console: Console) -> Text:
    """The last lines that fit the screen, with SPARE left free: what has scrolled away cannot be repainted."""
    from rich.text import Text

    lines = text.wrap(console, console.width)
    return Text("\n").join(lines[-max(console.height - SPARE, 1) :])


def follow(
    console: Console,
    tokenizer: AnyTokenizer,
    before: str,
    size: int,
    frames: Iterable[StreamOutput],
    *,
    pace: float = PACE,
    first: str = "compiling the first step ...",
) -> StreamOutput:
    """Shows an answer after its prompt while it is denoised."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    def draw(frame: StreamOutput | None) -> RenderableType:
        if frame is None:
            canvas, caption = Text(NOISE * size, NOISE_STYLE), first
        else:
            fields = frame.tokens, frame.accepted, frame.confidence
            canvas = paint(tokenizer, *(field.tolist() for field in fields))
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
