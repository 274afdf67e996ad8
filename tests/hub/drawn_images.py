"""Images of drawn sizes and modes, for the comparison with the image processor of transformers."""

from typing import NamedTuple

import numpy as np
from PIL import Image


class Case(NamedTuple):
    height: int
    width: int
    mode: str
    tokens: int  # the budget of soft tokens
    seed: int


def _drawn():
    rng = np.random.default_rng(5)
    shapes = [
        (20, 20),
        (7, 900),
        (1100, 9),
        (480, 480),
    ]  # small, very long twice, and one that is not resized
    shapes += [tuple(int(x) for x in rng.integers(30, 1200, 2)) for _ in range(8)]
    modes, budgets = ("RGB", "L", "RGBA", "P"), (70, 280, 1120)
    return [Case(h, w, modes[i % 4], budgets[i % 3] if i != 3 else 140, i) for i, (h, w) in enumerate(shapes)]


CASES = _drawn()


def draw_image(case: Case) -> Image.Image:
    """Noise over a gradient, in the mode of the case; "P" has a transparent colour."""
    rng = np.random.default_rng(case.seed)
    channels = {"RGB": 3, "L": 1, "RGBA": 4, "P": 3}[case.mode]
    noise = rng.integers(0, 128, (case.height, case.width, channels))
    slope = np.linspace(0, 127, case.width)[None, :, None]
    pixels = (noise + slope).astype(np.uint8)
    if case.mode == "P":
        image = Image.fromarray(pixels).quantize(16)
        image.info["transparency"] = 3
        return image
    return Image.fromarray(pixels[..., 0] if case.mode == "L" else pixels)
