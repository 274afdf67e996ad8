"""Pictures of the steps of an answer: a plot of confidence, an animation, and `Output.save`.

matplotlib draws the plot. It also brings Pillow and the font of the animation. Both are imported when they are used.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mercury_jax import install
from mercury_jax.config import refuse
from mercury_jax.tokenizer import AnyTokenizer
from mercury_jax.viz import NOISE, is_noise, label, readable
from mercury_jax.viz.html import AnswerTrace, answer_html, page, prompt_html, trace_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from mercury_jax.decode.sample import Output

Colour = tuple[int, int, int]
COLUMNS = 64  # most characters of a line of an animation
CELL = 11, 24  # width and height of a character, in pixels


# --- a plot


def plot(out: Output, row: int = 0) -> Figure:
    """Implements `Output.plot`."""
    return draw(trace_of(out, row))


def draw(steps: AnswerTrace) -> Figure:
    """Draws the confidence of each position in each step, with a dot where the token was accepted.

    The colours follow log(1 - p), so that 0.9 and 0.99 differ as much as 0 and 0.9. All above 0.99999 is one colour.
    A notebook gets an SVG without a background, whose lines and letters have the colour of the notebook's text, so
    that it suits a dark notebook too.
    """
    install.check("plot", "matplotlib", "plot")
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

    total, n = steps.tokens.shape
    figure = Shown(figsize=(min(3 + 0.12 * n, 12), min(2 + 0.2 * total, 8)), layout="constrained")
    FigureCanvasAgg(figure)  # not pyplot, which would look for a window system and show the figure twice
    axes = figure.add_subplot()
    grid = np.where(steps.tokens >= 0, steps.confidence, np.nan)
    scale = (lambda p: -np.log1p(-np.minimum(p, 1 - 1e-9)), lambda x: -np.expm1(-x))
    norm = FuncNorm(scale, vmin=0, vmax=1 - 1e-5, clip=True)
    extent = (-0.5, n - 0.5, total + 0.5, 0.5)
    image = axes.imshow(grid, aspect="auto", norm=norm, cmap="viridis", extent=extent)
    when, where = np.nonzero(steps.since == np.arange(1, total + 1)[:, None])
    axes.plot(where, when + 1, "o", markersize=3, color="white", markeredgecolor="#111111", label="accepted")
    axes.set(xlabel="position", ylabel="step")
    axes.set_title("probability of the most probable token", wrap=True)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    figure.legend(loc="outside lower right", fontsize="small", frameon=False)
    figure.colorbar(image, ticks=[0, 0.9, 0.99, 0.999, 0.9999, 0.99999], format="%g")
    return figure


# --- an animation


class Palette(NamedTuple):
    """The colours of an animation, as RGB."""

    background: Colour
    caption: Colour
    noise: Colour
    guess: Colour
    accepted: Colour


LIGHT = Palette((250, 250, 250), (110, 110, 110), (190, 190, 190), (0, 120, 190), (20, 20, 20))
DARK = Palette((17, 21, 28), (150, 158, 170), (90, 98, 110), (90, 180, 240), (235, 238, 243))


class Piece(NamedTuple):
    """A piece of text in an animation."""

    x: int  # column
    y: int  # line
    text: str
    colour: Colour


def save_gif(
    answers: Mapping[str, AnswerTrace], tokenizer: AnyTokenizer, path: str | Path, dark: bool = False
) -> None:
    """Writes an animation of one answer, or of several beside each other, pass by pass."""
    install.check("an animation (.gif)", "matplotlib", "plot")
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSansMono.ttf"), 18)
    (width, height), palette = CELL, DARK if dark else LIGHT
    panels = [_panel(title, steps, tokenizer, palette) for title, steps in answers.items()]
    columns = [3 + max(x + len(text) for step in panel for x, _, text, _ in step) for panel in panels]
    lines = 1 + max(y for panel in panels for step in panel for _, y, *_ in step)
    pictures = []
    for k in range(max(map(len, panels))):
        picture = Image.new("RGB", (width * (sum(columns) - 3) + 32, height * lines + 32), palette.background)
        pen, left = ImageDraw.Draw(picture), 16
        for panel, size in zip(panels, columns, strict=True):
            for x, y, text, colour in panel[min(k, len(panel) - 1)]:
                pen.text((left + width * x, 12 + height * y), text, colour, font)
            left += width * size
        pictures.append(picture.quantize(32))
    pace = [max(120, min(700, 4000 // len(pictures)))] * len(pictures)
    pace[0], pace[-1] = 700, 2500
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=pace, loop=0, optimize=True)


def _panel(title: str, steps: AnswerTrace, tokenizer: AnyTokenizer, palette: Palette) -> list[list[Piece]]:
    """The pieces of one answer: in the noise before its first step, then after each step."""
    noise = AnswerTrace(steps.tokens[:1], 0 * steps.since[:1], 0 * steps.confidence[:1])
    steps = AnswerTrace(*map(np.concatenate, zip(noise, steps, strict=True)))
    top, (rows, n) = int(bool(title)), steps.tokens.shape

    def pieces(k: int) -> list[Piece]:
        caption = f"step {k} of {rows - 1}: {(steps.since[k] > 0).sum()} of {n} tokens accepted"
        shown = [Piece(0, 0, title, palette.accepted)] * top + [Piece(0, top, caption, palette.caption)]
        x, y = 0, top + 2
        positions = zip(*(field[k].tolist() for field in steps), strict=True)
        for token, since, p in itertools.takewhile(lambda position: position[0] >= 0, positions):
            text, flag = label(tokenizer, token)
            text, colour = f"<{text}>" if flag else text, palette.accepted if since else palette.guess
            if is_noise(tokenizer, token, since > 0, p):
                text, colour = NOISE, palette.noise
            for character in readable(text):
                if character == "\n" or x == COLUMNS:
                    x, y = 0, y + 1
                if character != "\n":
                    shown.append(Piece(x, y, character, colour))
                    x += 1
        return shown

    return [pieces(k) for k in range(rows)]


# --- a file to share


def save(out: Output, path: str | Path, row: int = 0, prompt: str = "", dark: bool = False) -> Path:
    """Implements `Output.save`."""
    path = Path(path)
    kind = path.suffix.lower()
    if kind not in (".html", ".htm", ".gif"):
        raise refuse("path", str(path), "a file that ends in .html (a page) or .gif (an animation)")
    steps = trace_of(out, row)
    try:
        if kind != ".gif":
            body = (prompt_html(prompt) if prompt else "") + answer_html(out, row)
            path.write_text(page(body, "mercury_jax"), encoding="utf-8")
        elif out.tokenizer is None or not len(steps.tokens):
            raise refuse("row", row, "an answer that a pass has denoised, for an animation")
        else:
            save_gif({"": steps}, out.tokenizer, path, dark)
    except OSError as error:
        raise refuse("path", str(path), f"a file that can be written ({error.strerror})") from None
    return path
