"""How an answer came about, to look at: HTML for notebooks and pages, a plot, an animated picture.

An `AnswerTrace` is the answer after every denoising step, read off the frames of `sample(..., history=True)`. `Output`,
`StreamOutput` and `Frame` show themselves in notebooks by functions of this module; `Output.plot`, `Output.save` and
`mercury sample --html` and `--gif` use the others. The HTML needs no server, no other file and no network. All text in
it is escaped: what a model writes is never run.
"""

from __future__ import annotations

import html
import importlib.util
import io
import itertools
import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np

from mercury_jax import install
from mercury_jax.config import count, refuse
from mercury_jax.decode.stream import AnswerBuffer
from mercury_jax.tokenizer import AnyTokenizer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from mercury_jax.decode.sample import Output
    from mercury_jax.decode.state import Frame
    from mercury_jax.decode.stream import StreamOutput

# Of an output in a notebook; a note below it says what is left out.
MOST_ROWS, MOST_STEPS, MOST_TOKENS = 4, 256, 1024
NOISE = "░"
UNKNOWN = 0.25  # a guess less probable than this is shown as noise
SPECIAL, BYTES = 4, 8  # flags of a label

Label = tuple[str, int]  # text and flag


class TokenLabels:
    """Labels of tokens: the text of a token, or a name for a token without text.

    Args:
        tokenizer: Of the model.
    """

    def __init__(self, tokenizer: AnyTokenizer):
        self._tokenizer = tokenizer
        self._known: dict[int, Label] = {}

    def label(self, token: int) -> Label:
        """Returns (text, flag) of a token id.

        The flag is SPECIAL for a control token, BYTES for a part of a character, whose text is in hex, else 0.
        """
        if token not in self._known:
            pieces = self._tokenizer.pieces
            piece = pieces[token] if token < len(pieces) else b""
            try:
                if piece:
                    known = piece.decode(), 0
                else:
                    name = self._tokenizer.decode([token], skip_special=False).strip("<|>")
                    known = name or f"id {token}", SPECIAL
            except UnicodeDecodeError:
                known = piece.hex(" ").upper(), BYTES
            except (ValueError, IndexError, KeyError):  # a vocabulary may end in unused ids
                known = f"id {token}", SPECIAL
            self._known[token] = known
        return self._known[token]


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


def trace(frames: Sequence[Frame], row: int, first: int, close: int = -1) -> AnswerTrace:
    """Reads the steps of one answer off the frames of a call.

    Args:
        frames: One of each pass, leaves [B, ...].
        row: Index of the answer.
        first: Absolute position of its first token.
        close: Id that closes a thinking section whose budget is used up, which no frame shows.

    Returns:
        The answer after every pass that denoised it.
    """
    size = max((int(f.start[row]) + int(f.used[row]) for f in frames), default=first)
    buffer = AnswerBuffer(first, max(size - first, 0), close, row)
    steps: list[AnswerTrace] = []
    since, sure = np.zeros(len(buffer.tokens), int), np.zeros(len(buffer.tokens))
    for frame in frames:
        if not buffer.update(jax.tree.map(lambda x: np.asarray(x)[None], frame), 1):
            continue
        known = np.arange(len(buffer.tokens)) < buffer.end
        accepted = buffer.accepted & known
        new = accepted & (since == 0)
        since = np.where(accepted, np.where(new, len(steps) + 1, since), 0)
        sure = np.where(accepted & ~new, sure, buffer.confidence)
        steps.append(AnswerTrace(np.where(known, buffer.tokens, -1), since, np.where(known, sure, 0.0)))
    if not steps:
        return AnswerTrace(np.zeros((0, 0), int), np.zeros((0, 0), int), np.zeros((0, 0)))
    return AnswerTrace(*map(np.stack, zip(*steps, strict=True)))


def traces(out: Output) -> list[AnswerTrace]:
    """The traces of all answers of a call.

    Args:
        out: Of `sample(..., history=True)`.

    Returns:
        One for each answer.

    Raises:
        ValueError: The call kept no history.
    """
    if not out.history:
        raise refuse("history", "empty", "the frames of sample(..., history=True)")
    marks = None if out.tokenizer is None else out.tokenizer.thinking
    close = -1 if marks is None else marks.close
    found = [trace(out.history, row, int(out.first[row]), close) for row in range(len(out.texts))]
    # What a model wrote behind its end of text is not part of the answer.
    return [AnswerTrace(*(x[:, : max(n, 1)] for x in one)) for one, n in zip(found, out.lengths, strict=True)]


# --- HTML; ID is replaced by a name of its own for each output, so that several fit into one page

_STYLE = """
#ID { font: 14px/1.6 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; color: inherit; max-width: 100%; }
#ID .m-text { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid rgba(128, 128, 128, .4);
  border-radius: 6px; padding: .6em .8em; margin: .3em 0; }
#ID .m-text span { border-radius: 3px; }
:is([data-jp-theme-light=false], .vscode-dark, html[theme=dark], html[data-theme=dark]) #ID { color-scheme: dark; }
#ID .m-noise, #ID .m-special, #ID .m-note { opacity: .65; }
#ID .m-special { font-style: italic; font-size: .85em; }
#ID .m-bar { display: flex; gap: .6em; align-items: center; flex-wrap: wrap; }
#ID .m-bar input { flex: 1; min-width: 8em; }
#ID .m-bar button { font: inherit; color: inherit; background: transparent; cursor: pointer; min-width: 4.5em;
  border: 1px solid rgba(128, 128, 128, .6); border-radius: 4px; }
"""

# Draws one step: accepted tokens in the colour of the step that accepted them, guesses in blue by their confidence.
_SCRIPT = """
(function () {
  const root = document.getElementById("ID");
  const data = JSON.parse(root.querySelector("script[type='application/json']").textContent);
  const text = root.querySelector(".m-text"), caption = root.querySelector(".m-step");
  const slider = root.querySelector("input"), play = root.querySelector("button");
  const last = data.steps.length - 1, pace = Math.max(120, Math.min(700, 4000 / last));
  let timer = null;

  function cell(label, since, p, masked) {
    const span = document.createElement("span"), held = since > 0;
    span.title = (held ? "accepted in step " + since : "a guess") + ", probability " + p.toFixed(2);
    if (!held && (masked || p < data.unknown)) {
      span.textContent = data.noise;
      span.className = "m-noise";
      return span;
    }
    span.textContent = label[1] ? "\u27e8" + label[0] + "\u27e9" : label[0];
    span.className = label[1] ? "m-special" : "";
    const hue = 280 - 240 * (data.of > 1 ? (since - 1) / (data.of - 1) : 1);
    span.style.background = held ? "hsla(" + hue + ", 70%, 50%, .35)" : "rgba(0, 150, 215, " + (0.05 + 0.3 * p) + ")";
    span.style.fontStyle = held || label[1] ? "" : "italic";
    return span;
  }
  function draw(k) {
    const step = data.steps[k];
    text.textContent = "";
    step.t.forEach((t, i) => t >= 0 && text.appendChild(
      cell(data.labels[t], step.s[i], step.c[i] / 100, t === data.mask)));
    const held = step.s.filter((since) => since > 0).length;
    caption.textContent = "step " + step.n + " of " + data.of + ": " +
      held + " of " + step.t.length + " tokens accepted";
    slider.value = k;
  }
  function stop() { clearInterval(timer); timer = null; play.textContent = "play"; }
  play.onclick = function () {
    if (timer) return stop();
    let k = +slider.value >= last ? 0 : +slider.value;
    draw(k);
    play.textContent = "pause";
    timer = setInterval(() => k < last && root.isConnected ? draw(++k) : stop(), pace);
  };
  slider.oninput = function () { stop(); draw(+slider.value); };
  draw(last);
})();
"""


def trace_html(found: AnswerTrace, tokenizer: AnyTokenizer, title: str = "") -> str:
    """One answer as HTML with a slider over its steps, which shows the last step where scripts do not run.

    Args:
        found: The trace.
        tokenizer: Of the model.
        title: A line above.

    Returns:
        A `<div>` with its own style, data and script.
    """
    labels, index = TokenLabels(tokenizer), {-1: -1}
    total, size = found.tokens.shape
    kept = np.unique(np.linspace(0, total - 1, min(total, MOST_STEPS)).astype(int))
    steps = []
    for k in kept:
        tokens, since = found.tokens[k, :MOST_TOKENS].tolist(), found.since[k, :MOST_TOKENS].tolist()
        for token in tokens:
            index.setdefault(token, len(index) - 1)
        percent = np.rint(100 * np.nan_to_num(found.confidence[k, :MOST_TOKENS])).astype(int).tolist()
        steps.append({"n": int(k) + 1, "t": [index[t] for t in tokens], "s": since, "c": percent})
    nothing = [0] * len(steps[0]["t"])
    # The noise before the first step.
    steps.insert(0, {"n": 0, "t": steps[0]["t"], "s": nothing, "c": nothing})
    data = {
        "steps": steps, "labels": [labels.label(token) for token in index if token >= 0], "of": total,
        "mask": -2 if tokenizer.mask is None else index.get(tokenizer.mask, -2), "noise": NOISE, "unknown": UNKNOWN,
    }  # fmt: skip
    # A "<" inside of a string could end the element that holds the data.
    told = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    shown = (labels.label(token) for token in found.tokens[-1, :MOST_TOKENS].tolist() if token >= 0)
    last = "".join(f"⟨{name}⟩" if flag else name for name, flag in shown)
    left_out = [f"{total - len(kept)} steps"] * (len(kept) < total)
    left_out += [f"{size - MOST_TOKENS} tokens"] * (size > MOST_TOKENS)
    note = f'<div class="m-note">not shown: {", ".join(left_out)}</div>' if left_out else ""
    name = f"mercury-{secrets.token_hex(6)}"
    return (
        f'<div id="{name}"><style>{_STYLE.replace("ID", name)}</style>'
        f'<div class="m-note">{html.escape(title)}</div><div class="m-text">{html.escape(last)}</div>'
        f'<div class="m-bar"><button type="button">play</button><input type="range" min="0" max="{len(steps) - 1}" '
        f'value="{len(steps) - 1}" aria-label="step"><span class="m-step">step {total} of {total}</span></div>{note}'
        f'<script type="application/json">{told}</script><script>{_SCRIPT.replace("ID", name)}</script></div>'
    )


def output_html(out: Output) -> str:
    """An output as HTML: its answers, with a slider over the steps if the call kept its history.

    Args:
        out: Of `sample`.

    Returns:
        HTML for a notebook; of more than MOST_ROWS answers the first.
    """
    found = traces(out) if out.history and out.tokenizer is not None else None
    parts = [answer_html(out, row, found) for row in range(min(len(out.texts), MOST_ROWS))]
    if len(out.texts) > MOST_ROWS:
        parts.append(f"<div>and {len(out.texts) - MOST_ROWS} more answers</div>")
    return "\n".join(parts)


def answer_html(out: Output, row: int, found: Sequence[AnswerTrace] | None) -> str:
    """One answer of an output as HTML.

    Args:
        out: Of `sample`.
        row: Index of the answer.
        found: The traces of all answers, or None.

    Returns:
        The answer with a slider over its steps; without a trace, or if no pass denoised it, its text alone.
    """
    n, passes = out.lengths[row], int(out.forwards[row])
    title = f"{n} tokens in {count(passes, 'forward pass')} ({n / max(passes, 1):.1f} per pass)"
    if found is not None and out.tokenizer is not None and len(found[row].tokens):
        return trace_html(found[row], out.tokenizer, title)
    thought = out.thinking[row]
    thinking = "" if thought is None else f'<span style="opacity:.65">{html.escape(thought)}\n</span>'
    return (
        f'<div style="opacity:.65">{title}; sample(..., history=True) shows its steps</div>'
        f'<pre style="white-space:pre-wrap">{thinking}{html.escape(out.texts[row])}</pre>'
    )


def stream_html(out: StreamOutput) -> str:
    """An answer of a stream as HTML: accepted tokens with a border below, guesses bluer the more confident.

    Args:
        out: Of `stream`.

    Returns:
        HTML for a notebook, with the first MOST_TOKENS tokens.
    """
    if out.tokenizer is None:
        return prompt_html(out.text)
    labels, spans = TokenLabels(out.tokenizer), []
    cells = zip(out.tokens.tolist(), out.accepted.tolist(), out.confidence.tolist(), strict=True)
    for token, held, p in itertools.islice(cells, MOST_TOKENS):
        name, flag = labels.label(token)
        text = f"⟨{name}⟩" if flag else name
        text = NOISE if not held and (token == out.tokenizer.mask or p < UNKNOWN) else text
        title = f"{'accepted' if held else 'a guess'}, probability {p:.2f}"
        look = "border-bottom:2px solid" if held else f"background:rgba(0,150,215,{0.05 + 0.3 * p:.2f})"
        spans.append(f'<span title="{title}" style="{look}">{html.escape(text)}</span>')
    passes, accepted = count(int(out.forwards), "forward pass"), int(out.accepted.sum())
    caption = f"{passes}, {accepted} of {len(out.tokens)} tokens accepted"
    return f'<div style="opacity:.65">{caption}</div><pre style="white-space:pre-wrap">{"".join(spans)}</pre>'


def frame_html(frame: Frame) -> str:
    """A frame as HTML: one cell a position, bluer the more confident; accepted ones have a border. Ids in the titles.

    Args:
        frame: Of one pass, leaves [B, ...].

    Returns:
        HTML for a notebook, with the first MOST_ROWS rows.
    """
    rows = []
    for row in range(min(len(frame.used), MOST_ROWS)):
        cells = []
        for i in range(min(int(frame.used[row]), MOST_TOKENS)):
            p, held = float(np.nan_to_num(frame.confidence[row, i])), bool(frame.accepted[row, i])
            state = "accepted" if held else "a guess"
            title = f"id {int(frame.answer[row, i])}, {state}, probability {p:.2f}"
            box = "display:inline-block;width:.8em;height:1.2em;margin:1px;border:1px solid "
            colours = f"{'currentColor' if held else 'transparent'};background:rgba(0,150,215,{p:.2f})"
            cells.append(f'<span title="{title}" style="{box}{colours}"></span>')
        start, used = int(frame.start[row]), int(frame.used[row])
        where = f"positions {start} to {start + used - 1}" if used else "not denoised in this pass"
        rows.append(f"<div>row {row}: {where}</div>{''.join(cells)}")
    return "\n".join(rows)


def prompt_html(text: str) -> str:
    """A plain text, such as a prompt above its answer, escaped."""
    return f'<pre style="white-space:pre-wrap">{html.escape(text)}</pre>'


def page(body: str, title: str) -> str:
    """A whole page around HTML of this module, light or dark as the reader's system.

    Args:
        body: HTML.
        title: Of the page, escaped here.

    Returns:
        The page.
    """
    style = "max-width:60em;margin:2em auto;padding:0 1em;font-family:system-ui,sans-serif"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="color-scheme" content="light dark">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{html.escape(title)}</title></head><body style="{style}">{body}</body></html>'
    )


# --- pictures; colours of an animation: ground, caption, noise, guesses, accepted tokens

LIGHT = ((250, 250, 250), (110, 110, 110), (190, 190, 190), (0, 120, 190), (20, 20, 20))
DARK = ((17, 21, 28), (150, 158, 170), (90, 98, 110), (90, 180, 240), (235, 238, 243))


def check_matplotlib(argument: str) -> None:
    """Refuses an argument that needs matplotlib where it is missing.

    Args:
        argument: Its name, for the error.

    Raises:
        ValueError: Naming the argument and the command that installs matplotlib.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"{argument} needs matplotlib: {install.command('plot')}")


def plot(found: AnswerTrace) -> Figure:
    """Draws the confidence of each position in each step, with a dot where the token was accepted.

    The colours follow log(1 - p), so that 0.9 and 0.99 differ as much as 0 and 0.9. All above 0.99999 is one colour.
    A notebook gets an SVG without a ground, whose lines and letters have the colour of the notebook's text, so that
    it suits a dark notebook too.

    Args:
        found: The trace of one answer.

    Returns:
        A figure of matplotlib.

    Raises:
        ValueError: matplotlib is missing.
    """
    check_matplotlib("plot")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import FuncNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    class Shown(Figure):
        """A figure that a notebook shows without pyplot."""

        def _repr_png_(self) -> bytes:
            file = io.BytesIO()
            self.savefig(file, format="png")
            return file.getvalue()

        def _repr_html_(self) -> str:
            file = io.StringIO()
            self.savefig(file, format="svg", transparent=True)
            svg = file.getvalue()
            fitting = '<svg role="img" fill="currentColor" style="max-width:100%;height:auto" '
            return svg[svg.index("<svg ") :].replace("<svg ", fitting, 1).replace("#000000", "currentColor")

    steps, n = found.tokens.shape
    figure = Shown(figsize=(min(3 + 0.12 * n, 12), min(2 + 0.2 * steps, 8)), layout="constrained")
    FigureCanvasAgg(figure)  # not pyplot, which would look for a window system and show the figure twice
    axes = figure.add_subplot()
    grid = np.where(found.tokens >= 0, found.confidence, np.nan)
    norm = FuncNorm(
        (lambda p: -np.log1p(-np.minimum(p, 1 - 1e-9)), lambda x: -np.expm1(-x)),
        vmin=0,
        vmax=1 - 1e-5,
        clip=True,
    )
    image = axes.imshow(
        grid, aspect="auto", norm=norm, cmap="viridis", extent=(-0.5, n - 0.5, steps + 0.5, 0.5)
    )
    when, where = np.nonzero(found.since == np.arange(1, steps + 1)[:, None])
    axes.plot(where, when + 1, "o", markersize=3, color="white", markeredgecolor="#111111", label="accepted")
    axes.set(xlabel="position", ylabel="step")
    axes.set_title("probability of the most probable token", wrap=True)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    figure.legend(loc="outside lower right", fontsize="small", frameon=False)
    figure.colorbar(image, ticks=[0, 0.9, 0.99, 0.999, 0.9999, 0.99999], format="%g")
    return figure


def save_gif(
    answers: Mapping[str, AnswerTrace],
    tokenizer: AnyTokenizer,
    path: str | Path,
    columns: int = 64,
    dark: bool = False,
) -> None:
    """Writes an animation of one answer, or of several beside each other, pass by pass.

    Args:
        answers: The traces by their titles, from left to right. An answer that is done stays as it is.
        tokenizer: Of the model.
        path: The file.
        columns: Most characters of a line of an answer.
        dark: Whether the ground is dark.

    Raises:
        ValueError: matplotlib, which brings Pillow and the font, is missing.
    """
    check_matplotlib("--gif")
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSansMono.ttf"), 18)
    width, height = 11, 24
    ground, faint, *_, held = DARK if dark else LIGHT
    caption, left, panels, lines = "step {} of {}: {} of {} tokens accepted", 0, [], 0
    for title, found in answers.items():
        noise = AnswerTrace(found.tokens[:1], 0 * found.since[:1], 0 * found.confidence[:1])
        found = AnswerTrace(*(np.concatenate(pair) for pair in zip(noise, found, strict=True)))
        drawn = [_cells(found, tokenizer, k, columns, dark) for k in range(len(found.tokens))]
        panels.append((title, found, drawn, left))
        own = len(caption.format(*found.tokens.shape, *found.tokens.shape)), len(title)
        left += 3 + max(*own, *(1 + x for cells in drawn for x, *_ in cells))
        lines = max(lines, 3 + bool(title) + max(y for cells in drawn for _, y, *_ in cells))
    pictures = []
    for k in range(max(len(drawn) for _, _, drawn, _ in panels)):
        picture = Image.new("RGB", (width * (left - 3) + 32, height * lines + 32), ground)
        pen = ImageDraw.Draw(picture)
        for title, found, drawn, column in panels:
            step, at, top = min(k, len(drawn) - 1), 16 + width * column, 12 + height * bool(title)
            told = caption.format(step, len(drawn) - 1, (found.since[step] > 0).sum(), found.tokens.shape[1])
            pen.text((at, 12), title, held, font)
            pen.text((at, top), told, faint, font)
            for x, y, character, colour in drawn[step]:
                pen.text((at + width * x, top + height * (y + 2)), character, colour, font)
        pictures.append(picture.quantize(32))
    pace = [max(120, min(700, 4000 // len(pictures)))] * len(pictures)
    pace[0], pace[-1] = 700, 2500
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=pace, loop=0, optimize=True)


def save(out: Output, path: str | Path, row: int = 0, prompt: str = "", dark: bool = False) -> Path:
    """Implements `Output.save`.

    Args:
        out: Of `sample(..., history=True)`.
        path: The file; its suffix decides between a page and an animation.
        row: Index of the answer.
        prompt: A text above the answer in a page.
        dark: Whether the ground of an animation is dark.

    Returns:
        `path`.

    Raises:
        ValueError: Another suffix, no history, no such answer, matplotlib is missing, or a file that cannot be written.
    """
    path = Path(path)
    if path.suffix not in (".html", ".gif"):
        raise refuse("path", str(path), "a file that ends in .html (a page) or .gif (an animation)")
    found = traces(out)
    if not 0 <= row < len(found):
        raise refuse("row", row, f"0..{len(found) - 1}: the answers of this call")
    try:
        if path.suffix == ".html":
            body = (prompt_html(prompt) if prompt else "") + answer_html(out, row, found)
            path.write_text(page(body, "mercury_jax"), encoding="utf-8")
        elif out.tokenizer is None or not len(found[row].tokens):
            raise refuse("row", row, "an answer that a pass has denoised, for an animation")
        else:
            check_matplotlib("an animation (.gif)")
            save_gif({"": found[row]}, out.tokenizer, path, dark=dark)
    except OSError as error:
        raise refuse("path", str(path), f"a file that can be written ({error.strerror})") from None
    return path


def _cells(
    found: AnswerTrace, tokenizer: AnyTokenizer, step: int, columns: int, dark: bool
) -> list[tuple[int, int, str, tuple[int, int, int]]]:
    """The characters of one step: column, line, character, colour."""
    labels, cells, x, y = TokenLabels(tokenizer), [], 0, 0
    *_, noise, guess, held = DARK if dark else LIGHT
    rows = zip(
        found.tokens[step].tolist(), found.since[step].tolist(), found.confidence[step].tolist(), strict=True
    )
    for token, since, p in itertools.takewhile(lambda cell: cell[0] >= 0, rows):
        text, flag = labels.label(token)
        if not since and (token == tokenizer.mask or p < UNKNOWN):
            text, colour = NOISE, noise
        else:
            text = f"<{text}>" if flag else text.replace("\t", "    ")
            colour = held if since else guess
        for character in text:
            if character == "\n" or x == columns:
                x, y = 0, y + 1
            if character != "\n":
                cells.append(
                    (x, y, character if character.isprintable() else "\N{REPLACEMENT CHARACTER}", colour)
                )
                x += 1
    return cells or [(0, 0, " ", (0, 0, 0))]
