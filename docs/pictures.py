"""Draws the pictures of docs/concepts.md as SVG files: `python docs/pictures.py`.

Text and lines are grey and the background is transparent, so that they can be read on light and dark pages.
`python docs/pictures.py sudoku` finds the Sudoku of README and guides, prints it, and makes results/denoising.gif.
"""

from __future__ import annotations

import html
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

FOLDER = Path(__file__).parent / "pictures"
GREY, BLUE, ORANGE, GREEN = "#808890", "#2f7fb8", "#c8742c", "#3f8f6b"
WORDS = ["the", "cat", "sat", "on", "the", "mat", "and", "slept"]
OTHERS = ["blue", "runs", "sky", "under", "seven", "tree", "or", "song"]


def text(
    x: float,
    y: float,
    words: str,
    anchor: str = "middle",
    size: int = 14,
    colour: str = GREY,
    bold: bool = False,
) -> str:
    """An SVG text."""
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}" fill="{colour}"{weight} '
        f'font-family="system-ui, sans-serif">{html.escape(words)}</text>'
    )


def box(x: float, y: float, width: float, height: float, fill: str = "none", opacity: float = 0.25) -> str:
    """An SVG rectangle with a grey border."""
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="{fill}" '
        f'fill-opacity="{opacity}" stroke="{GREY}" stroke-opacity="0.7"/>'
    )


def save(name: str, width: int, height: int, parts: list[str], about: str) -> None:
    """Writes a picture."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">'
    )
    body = "\n".join([head, f"<title>{html.escape(about)}</title>", *parts, "</svg>"])
    (FOLDER / f"{name}.svg").write_text(body + "\n", encoding="utf-8")


def noise() -> None:
    """The same text under masks and under uniform noise, at four times."""
    rng = random.Random(4)
    when = [rng.random() for _ in WORDS]  # the time from which a token is noise
    parts, wide = [], 58
    for column, title in enumerate(("masked (absorbing) noise", "uniform noise")):
        left = 80 + column * (len(WORDS) * wide + 40)
        parts.append(text(left + len(WORDS) * wide / 2, 24, title, bold=True))
        for row, t in enumerate((0.0, 0.35, 0.7, 1.0)):
            y = 42 + 44 * row
            if not column:
                parts.append(text(66, y + 22, f"t = {t:g}", "end"))
            for i, word in enumerate(WORDS):
                noisy = when[i] < t or t == 1.0
                shown = word if not noisy else "▒▒" if not column else OTHERS[i]
                parts.append(box(left + i * wide, y, wide - 6, 32, ORANGE if noisy else BLUE))
                parts.append(text(left + i * wide + wide / 2 - 3, y + 21, shown))
    save("noise", 80 + 2 * len(WORDS) * wide + 60, 230, parts, "A text becomes noise as t goes from 0 to 1")


def patterns() -> None:
    """Who attends to whom: rows are queries, columns are keys; a prompt of 4 tokens, then two blocks of 4."""
    size, n, prompt = 17, 12, 4
    block = lambda i: 0 if i < prompt else 1 + (i - prompt) // 4
    seen: dict[str, Callable[[int, int], bool]] = {
        "bidirectional": lambda q, k: True,
        "block_causal": lambda q, k: block(k) <= block(q),
        "causal_encoder": lambda q, k: k < 8 or q >= 8 if q >= 8 else k <= q,
    }
    parts = []
    for column, (title, rule) in enumerate(seen.items()):
        left, top = 90 + column * 270, 48
        parts.append(text(left + n * size / 2, 24, title, bold=True))
        for q in range(n):
            for k in range(n):
                kind = BLUE if k < prompt else GREEN if k < 8 else ORANGE
                parts.append(
                    box(
                        left + k * size,
                        top + q * size,
                        size - 2,
                        size - 2,
                        kind if rule(q, k) else "none",
                        0.55,
                    )
                )
        for at, name in ((2, "prompt"), (6, "block 1"), (10, "block 2")):
            parts.append(text(left + at * size, top + n * size + 20, name, size=12))
            if not column:
                parts.append(text(left - 8, top + at * size + 4, name, "end", 12))
    save(
        "patterns", 90 + 3 * 270, 290, parts, "The attention patterns of three families, second block active"
    )


def passes() -> None:
    """What the forward passes of two blocks feed, and what the KV cache holds."""
    parts, y = [], 30
    rows = [
        ("prefill", [("prompt", 180, BLUE, True)]),
        ("step 1", [("keys of the prompt", 180, BLUE, False), ("block 1: noise", 150, ORANGE, True)]),
        ("step 2", [("keys of the prompt", 180, BLUE, False), ("block 1: some accepted", 150, ORANGE, True)]),
        ("commit", [("keys of the prompt", 180, BLUE, False), ("block 1: all accepted", 150, GREEN, True)]),
        (
            "step 1",
            [
                ("keys of the prompt", 180, BLUE, False),
                ("keys of block 1", 150, GREEN, False),
                ("block 2: noise", 150, ORANGE, True),
            ],
        ),
    ]
    for name, bars in rows:
        parts.append(text(84, y + 21, name, "end"))
        x = 96
        for label, width, colour, fed in bars:
            parts.append(box(x, y, width - 4, 32, colour, 0.4 if fed else 0.12))
            parts.append(text(x + width / 2 - 2, y + 21, label, size=12))
            x += width
        y += 44
    parts += [box(96, y + 4, 22, 14, GREY, 0.4), text(124, y + 16, "computed in this pass", "start", 12)]
    parts += [box(296, y + 4, 22, 14, GREY, 0.12), text(324, y + 16, "read from the KV cache", "start", 12)]
    save("passes", 600, y + 34, parts, "The forward passes of a prompt and two blocks")


def sudoku() -> None:
    """Animates the hardest of 48 held-out Sudokus, beside the same weights left to right; prints the puzzle.

    The hardest takes most passes of the default decoding; of several the one whose guesses change at most places.
    """
    import numpy as np

    import mercury_jax as mj
    from mercury_jax.tasks import TASKS, draw_distinct
    from mercury_jax.viz.html import trace_of
    from mercury_jax.viz.plots import save_gif

    lm = mj.load()
    ask = lambda text, rule=None: mj.sample(
        lm, [{"role": "user", "content": text}], max_tokens=32, sampler=rule, history=True
    )

    def hardness(text: str) -> tuple[int, int]:
        tokens = trace_of(ask(text), 0).tokens
        return len(tokens), int(np.sum(tokens[1:] != tokens[:-1]))

    puzzle = max((p.input for p in draw_distinct(TASKS["sudoku4"], 48, seed=0)), key=hardness)
    rules = {"any order": None, "left to right, KV cache": mj.rules.autoregressive()}
    times: dict[str, list[float]] = {name: [] for name in rules}
    for _ in range(25):  # in alternation
        for name, rule in rules.items():
            out = mj.sample(lm, [{"role": "user", "content": puzzle}], max_tokens=32, sampler=rule)
            times[name].append(1000 * out.seconds)
    outs = {name: ask(puzzle, rule) for name, rule in rules.items()}
    found = {
        f"{name}: {out.forwards[0]} passes, {statistics.median(times[name]):.1f} ms": trace_of(out, 0)
        for name, out in outs.items()
    }
    save_gif(found, lm.tokenizer, FOLDER.parent / "results" / "denoising.gif")
    print(repr(puzzle), *found, *(repr(out.text) for out in outs.values()), sep="\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["sudoku"]:
        sudoku()
        sys.exit()
    FOLDER.mkdir(exist_ok=True)
    for draw in (noise, patterns, passes):
        draw()
