"""The live view: a canvas in a terminal, repainted after every pass.

Settled tokens are bold; tentative ones take on colour as the model grows sure of them; where it has no
idea yet there is noise.
"""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from mercury_jax.cli.show import readable

if TYPE_CHECKING:
    from mercury_jax.decode.stream import StreamOutput
    from mercury_jax.tokenizer import AnyTokenizer

NOISE, NOISE_STYLE = "░", "grey50"
SETTLED, MARK = "bold", "italic magenta"
UNKNOWN = 0.25  # a best guess less probable than this is not worth reading
PALE, VIVID = (128, 128, 128), (0, 175, 215)  # tentative tokens at UNKNOWN and at certainty
PACE = 0.06  # least seconds a frame: a small model is done before the eye has seen anything


def style(settled: bool, confidence: float) -> str:
    """Of one token."""
    if settled:
        return SETTLED
    share = min(max((confidence - UNKNOWN) / (1 - UNKNOWN), 0.0), 1.0)
    return "rgb({},{},{})".format(*(round(a + share * (b - a)) for a, b in zip(PALE, VIVID, strict=True)))


def paint(
    tok: AnyTokenizer, tokens: Sequence[int], settled: Sequence[bool], confidence: Sequence[float]
) -> Text:
    """Tokens as styled text. Bytes of one character may come from several tokens: the last one styles it."""
    text, bytes_ = Text(), codecs.getincrementaldecoder("utf-8")("replace")
    marks = tok.thinking
    names = {} if marks is None else {marks.opening[0]: "[thinking] ", marks.close: "\n[answer] "}
    for token, sure, p in zip(map(int, tokens), settled, confidence, strict=True):
        if token == tok.mask or (not sure and p < UNKNOWN):
            text.append(NOISE, NOISE_STYLE)
        elif token in names:
            text.append(names[token], MARK)
        else:
            piece = (
                tok.pieces[token] if token < len(tok.pieces) else b""
            )  # a vocabulary may end in unused ids
            text.append(readable(bytes_.decode(piece)), style(bool(sure), float(p)))
    return text


def noise(count: int) -> Text:
    """A canvas before its first pass."""
    return Text(NOISE * count, NOISE_STYLE)


def canvas(tok: AnyTokenizer, moment: StreamOutput) -> Text:
    return paint(tok, moment.tokens.tolist(), moment.accepted.tolist(), moment.confidence.tolist())


def tail(text: Text, console: Console, spare: int = 3) -> Text:
    """The last lines that fit the screen: what scrolled away cannot be repainted."""
    lines = text.wrap(console, console.width)
    return Text("\n").join(lines[-max(console.height - spare, 1) :])


def caption(moment: StreamOutput | None, first: str) -> Text:
    """The line under the canvas while it settles."""
    if moment is None:
        return Text(first, "dim")
    count = int(moment.accepted.sum())
    return Text(f"pass {moment.step}: {count} of {len(moment.tokens)} tokens settled", "dim")


def play(
    console: Console,
    moments: Iterable[StreamOutput],
    draw: Callable[[StreamOutput | None], RenderableType],
    pace: float = PACE,
) -> StreamOutput:
    """Show moments as they come, none shorter than `pace` seconds; returns the last one."""
    last: Any = None
    with Live(draw(None), console=console, auto_refresh=False) as view:
        due = time.monotonic() + pace
        for last in moments:
            time.sleep(max(due - time.monotonic(), 0.0))
            due = time.monotonic() + pace
            if last.done:
                view.vertical_overflow = "visible"
            view.update(draw(last), refresh=not last.done)  # leaving the view paints the last one
    return last


def follow(
    console: Console,
    tok: AnyTokenizer,
    before: str,
    room: int,
    moments: Iterable[StreamOutput],
    *,
    pace: float = PACE,
    first: str = "compiling the first pass ...",
) -> StreamOutput:
    """Play an answer behind its prompt; `room`: tokens of noise to begin with, `first`: what is said under them."""

    def draw(moment: StreamOutput | None) -> RenderableType:
        body = Text.assemble(
            (readable(before), "dim"), noise(room) if moment is None else canvas(tok, moment)
        )
        if moment is not None and moment.done:
            return body
        return Group(tail(body, console), caption(moment, first))

    return play(console, moments, draw, pace)
