"""However a stream is cut, the text in front of the first match comes out."""

import itertools
import random

from mercury_jax.serve.chat.stop_matcher import StopMatcher
from tests.serve.chat.answers import cut


def pushed(matcher: StopMatcher, text: str, size: int) -> tuple[str, str | None, str]:
    """(text that came out, the match, text held back at the end)."""
    out = ""
    for at in range(0, len(text), size):
        before, found, _ = matcher.push(text[at : at + size])
        out += before
        if found is not None:
            return out, found, ""
    return out, None, matcher.flush()


def test_random_texts_over_two_letters_match_a_naive_search():
    rng = random.Random(0)
    words = ["".join(w) for n in range(1, 6) for w in itertools.product("ab", repeat=n)]
    for _ in range(3000):
        sought = rng.sample(words, rng.randrange(1, 4))
        text = "".join(rng.choice("aab") for _ in range(rng.randrange(14)))
        for size in (1, 3, 20):
            out, found, held = pushed(StopMatcher(sought), text, size)
            assert out + held == cut(text, sought) and (found is None) == (out + held == text)
            if found is None:  # exactly what may be the beginning of a match is held back
                ends = [text[at:] for at in range(len(text)) if any(s.startswith(text[at:]) for s in sought)]
                assert held == max(ends, key=len, default="")
            else:
                assert text.startswith(out + found) and found in sought
