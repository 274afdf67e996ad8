"""Pictures of an answer, step by step: HTML, a plot, an animation, the live view of a terminal.

html       the steps of an answer; outputs, streams and frames in a notebook; a page to share
plots      the confidence of each position in each step; an animated picture
terminal   the live view of `mercury sample`, `chat` and `demo`

What these share is here: labels of tokens, and which positions show noise. Decoding imports nothing of this package:
`mercury_jax/__init__.py` gives it the functions of `html` and `plots` as a `decode.Pictures`. This file and `terminal`
import neither JAX nor rich at the top, because the command line imports them before it prints its help.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mercury_jax.tokenizer import AnyTokenizer

NOISE = "░"
UNKNOWN = 0.25  # a guess less probable than this is shown as noise
SPECIAL, BYTES = 4, 8  # flags of a label

Label = tuple[str, int]  # text and flag


def is_noise(tokenizer: AnyTokenizer, token: int, accepted: bool, confidence: float) -> bool:
    """Whether a position shows noise: a mask, or a guess too improbable to read."""
    return token == tokenizer.mask or (not accepted and confidence < UNKNOWN)


def readable(text: str) -> str:
    """The text without characters that would move the cursor or change the terminal's state."""
    shown = text.replace("\t", "    ")
    return "".join(c if c == "\n" or c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in shown)


def label(tokenizer: AnyTokenizer, token: int) -> Label:
    """Labels a token: with its text, or with a name if it has no text.

    Returns:
        Text and flag. The flag is SPECIAL for a control token, BYTES for a part of a character, whose text is in hex,
        else 0.
    """
    pieces = tokenizer.pieces
    piece = pieces[token] if token < len(pieces) else b""
    try:
        if piece:
            return piece.decode(), 0
        name = tokenizer.decode([token], skip_special=False).strip("<|>")
    except UnicodeDecodeError:
        return piece.hex(" ").upper(), BYTES
    except (ValueError, IndexError, KeyError):  # a vocabulary may end in unused ids
        name = ""
    return name or f"id {token}", SPECIAL
