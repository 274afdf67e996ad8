"""The steps of an answer, and HTML of what a call returns: outputs, streams, frames in a notebook, a page to share.

An `AnswerTrace` is read off the frames of `sample(..., history=True)`; this file and `plots` draw it.

The HTML needs no server, no other file and no network: it holds the style and the script of `static/`. All text in it
is escaped, so that what a model writes is never run.
Colours of text and lines are those of the notebook, so that it suits a light and a dark one.
"""

from __future__ import annotations

import functools
import html
import itertools
import json
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np

from mercury_jax.config import count, refuse
from mercury_jax.decode.stream import AnswerBuffer
from mercury_jax.tokenizer import AnyTokenizer
from mercury_jax.viz import NOISE, UNKNOWN, Label, is_noise, label

if TYPE_CHECKING:
    from mercury_jax.decode.sample import Output
    from mercury_jax.decode.state import Frame
    from mercury_jax.decode.stream import StreamOutput


class AnswerTrace(NamedTuple):
    """One answer after each of its S denoising steps. Positions without a token yet have id -1.

    Attributes:
        tokens: int [S, n], accepted tokens and current guesses.
        since: int [S, n], the step in which the token was accepted, counted from 1; 0: a guess.
        confidence: float [S, n], probability of the argmax; of an accepted token in the step that accepted it.
    """

    tokens: np.ndarray
    since: np.ndarray
    confidence: np.ndarray


def trace_of(out: Output, row: int) -> AnswerTrace:
    """Reads the steps of one answer off the frames of a call."""
    if not out.history:
        raise refuse("history", "empty", "the frames of sample(..., history=True)")
    if not 0 <= row < len(out.texts):
        raise refuse("row", row, f"0..{len(out.texts) - 1}: the answers of this call")
    # No frame shows the token that closes a thinking section whose budget is used up.
    marks = None if out.tokenizer is None else out.tokenizer.thinking
    close = -1 if marks is None else marks.close
    first = int(out.first[row])
    size = max(int(frame.start[row]) + int(frame.used[row]) for frame in out.history) - first
    buffer = AnswerBuffer(first, max(size, 0), close, row)
    steps, since, confidence = [], np.zeros_like(buffer.tokens), buffer.confidence
    for frame in out.history:
        if not buffer.update(jax.tree.map(lambda x: np.asarray(x)[None], frame), 1):
            continue
        known = np.arange(len(buffer.tokens)) < buffer.end
        accepted = buffer.accepted & known
        new = accepted & (since == 0)
        since = np.where(accepted, np.where(new, len(steps) + 1, since), 0)
        confidence = np.where(accepted & ~new, confidence, buffer.confidence)
        steps.append((np.where(known, buffer.tokens, -1), since, np.where(known, confidence, 0.0)))
    if not steps:
        return AnswerTrace(np.zeros((0, 0), int), np.zeros((0, 0), int), np.zeros((0, 0)))
    n = max(out.lengths[row], 1)  # what a model wrote after its end of text is not part of the answer
    return AnswerTrace(*(np.stack(field)[:, :n] for field in zip(*steps, strict=True)))


# --- HTML

# Of an output in a notebook; a note below it says what is left out.
MOST_ROWS, MOST_STEPS, MOST_TOKENS = 4, 256, 1024

STATIC = Path(__file__).parent / "static"


@functools.cache
def _static(name: str) -> str:
    """A file of `static/`, in which ID stands for the name of one output, so that several fit into one page."""
    return (STATIC / name).read_text(encoding="utf-8")


def output_html(out: Output) -> str:
    """An output as HTML: its answers, with a slider over the steps if the call kept its history."""
    parts = [answer_html(out, row) for row in range(min(len(out.texts), MOST_ROWS))]
    if len(out.texts) > MOST_ROWS:
        parts.append(f"<div>and {len(out.texts) - MOST_ROWS} more answers</div>")
    return "\n".join(parts)


def answer_html(out: Output, row: int) -> str:
    """One answer of an output as HTML."""
    n, passes = out.lengths[row], int(out.forwards[row])
    title = f"{n} tokens in {count(passes, 'forward pass')} ({n / max(passes, 1):.1f} per pass)"
    if out.history and out.tokenizer is not None and len((steps := trace_of(out, row)).tokens):
        return trace_html(steps, out.tokenizer, title)
    thought = out.thinking[row]
    thinking = "" if thought is None else f'<span style="opacity:.65">{html.escape(thought)}\n</span>'
    return (
        f'<div style="opacity:.65">{title}; sample(..., history=True) shows its steps</div>'
        f'<pre style="white-space:pre-wrap">{thinking}{html.escape(out.texts[row])}</pre>'
    )


def trace_html(steps: AnswerTrace, tokenizer: AnyTokenizer, title: str = "") -> str:
    """One answer as HTML with a slider over its steps, which shows the last step where scripts do not run."""
    index, (total, size) = {-1: -1}, steps.tokens.shape  # id -> index of its label in the data
    kept = np.unique(np.linspace(0, total - 1, min(total, MOST_STEPS)).astype(int))
    shown = []
    for k in kept:
        tokens, since = steps.tokens[k, :MOST_TOKENS].tolist(), steps.since[k, :MOST_TOKENS].tolist()
        for token in tokens:
            index.setdefault(token, len(index) - 1)
        percent = np.rint(100 * np.nan_to_num(steps.confidence[k, :MOST_TOKENS])).astype(int).tolist()
        shown.append({"n": int(k) + 1, "t": [index[t] for t in tokens], "s": since, "c": percent})
    zeros = [0] * len(shown[0]["t"])
    shown.insert(0, {"n": 0, "t": shown[0]["t"], "s": zeros, "c": zeros})  # the noise before the first step
    data = {
        "steps": shown, "labels": [label(tokenizer, token) for token in index if token >= 0], "of": total,
        "mask": -2 if tokenizer.mask is None else index.get(tokenizer.mask, -2), "noise": NOISE, "unknown": UNKNOWN,
    }  # fmt: skip
    # A "<" inside of a string could end the element that holds the data.
    encoded = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    last = (label(tokenizer, token) for token in steps.tokens[-1, :MOST_TOKENS].tolist() if token >= 0)
    text = html.escape("".join(map(_bracketed, last)))
    left_out = [f"{total - len(kept)} steps"] * (len(kept) < total)
    left_out += [f"{size - MOST_TOKENS} tokens"] * (size > MOST_TOKENS)
    note = f'<div class="m-note">not shown: {", ".join(left_out)}</div>' if left_out else ""
    name = f"mercury-{secrets.token_hex(6)}"
    return (
        f'<div id="{name}"><style>{_static("steps.css").replace("ID", name)}</style>'
        f'<div class="m-note">{html.escape(title)}</div><div class="m-text">{text}</div>'
        f'<div class="m-bar"><button type="button">play</button><input type="range" min="0" max="{len(kept)}" '
        f'value="{len(kept)}" aria-label="step"><span class="m-step">step {total} of {total}</span></div>{note}'
        f'<script type="application/json">{encoded}</script>'
        f"<script>{_static('steps.js').replace('ID', name)}</script></div>"
    )


def stream_html(out: StreamOutput) -> str:
    """An answer of a stream as HTML: accepted tokens with a border below, guesses bluer the more confident."""
    if out.tokenizer is None:
        return prompt_html(out.text)
    spans, cells = [], zip(out.tokens.tolist(), out.accepted.tolist(), out.confidence.tolist(), strict=True)
    for token, accepted, p in itertools.islice(cells, MOST_TOKENS):
        noise = is_noise(out.tokenizer, token, accepted, p)
        text = html.escape(NOISE if noise else _bracketed(label(out.tokenizer, token)))
        look = "border-bottom:2px solid" if accepted else f"background:rgba(0,150,215,{0.05 + 0.3 * p:.2f})"
        spans.append(f'<span title="{_title(accepted, p)}" style="{look}">{text}</span>')
    passes, known = count(int(out.forwards), "forward pass"), int(out.accepted.sum())
    caption = f"{passes}, {known} of {len(out.tokens)} tokens accepted"
    return f'<div style="opacity:.65">{caption}</div><pre style="white-space:pre-wrap">{"".join(spans)}</pre>'


def frame_html(frame: Frame) -> str:
    """A frame as HTML: a cell for each position, bluer the more confident; accepted ones have a border."""
    rows, box = [], "display:inline-block;width:.8em;height:1.2em;margin:1px;border:1px solid "
    for row in range(min(len(frame.used), MOST_ROWS)):
        cells = []
        for i in range(min(int(frame.used[row]), MOST_TOKENS)):
            p, accepted = float(np.nan_to_num(frame.confidence[row, i])), bool(frame.accepted[row, i])
            title = f"id {int(frame.answer[row, i])}, {_title(accepted, p)}"
            colours = f"{'currentColor' if accepted else 'transparent'};background:rgba(0,150,215,{p:.2f})"
            cells.append(f'<span title="{title}" style="{box}{colours}"></span>')
        start, used = int(frame.start[row]), int(frame.used[row])
        where = f"positions {start} to {start + used - 1}" if used else "not denoised in this pass"
        rows.append(f"<div>row {row}: {where}</div>{''.join(cells)}")
    return "\n".join(rows)


def _bracketed(shown: Label) -> str:
    """A label as text, in brackets where the token has no text of its own."""
    text, flag = shown
    return f"⟨{text}⟩" if flag else text


def _title(accepted: bool, p: float) -> str:
    return f"{'accepted' if accepted else 'a guess'}, probability {p:.2f}"


def prompt_html(text: str) -> str:
    """A plain text, such as a prompt above its answer, escaped."""
    return f'<pre style="white-space:pre-wrap">{html.escape(text)}</pre>'


def page(body: str, title: str) -> str:
    """A whole page around HTML of this module, light or dark as the reader's system."""
    style = "max-width:60em;margin:2em auto;padding:0 1em;font-family:system-ui,sans-serif"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="color-scheme" content="light dark">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{html.escape(title)}</title></head><body style="{style}">{body}</body></html>'
    )
