"""The law of finding: wherever the text is cut, what comes out is what stands before the first of the sought."""

import itertools
import random

from mercury_jax.serve.chat.finder import Finder
from tests.serve.chat.answers import cut


def pushed(finder: Finder, text: str, size: int) -> tuple[str, str | None, str]:
    """(what came out, what was found, what was held at the end)."""
    out = ""
    for at in range(0, len(text), size):
        before, found, _ = finder.push(text[at : at + size])
        out += before
        if found is not None:
            return out, found, ""
    return out, None, finder.flush()


def test_every_text_over_two_letters_is_searched_like_by_hand():
    rng = random.Random(0)
    words = ["".join(w) for n in range(1, 6) for w in itertools.product("ab", repeat=n)]
    for _ in range(3000):
        sought = rng.sample(words, rng.randrange(1, 4))
        text = "".join(rng.choice("aab") for _ in range(rng.randrange(14)))
        for size in (1, 3, 20):
            out, found, held = pushed(Finder(sought), text, size)
            assert out + held == cut(text, sought) and (found is None) == (out + held == text)
            if found is None:  # held back is just what may be a beginning of one
                ends = [text[at:] for at in range(len(text)) if any(s.startswith(text[at:]) for s in sought)]
                assert held == max(ends, key=len, default="")
            else:
                assert text.startswith(out + found) and found in sought
