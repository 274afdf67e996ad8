"""The live view of a terminal shows what the model did."""

import io
import re

import numpy as np
import pytest
from rich.console import Console

import mercury_jax as mj
from mercury_jax.decode.stream import StreamOutput
from mercury_jax.viz import NOISE, terminal


@pytest.fixture(scope="module")
def lm():
    return mj.load()


def moment(ids, accepted: bool, confidence: float, done: bool) -> StreamOutput:
    """A frame in which every second token is accepted, or all are."""
    flags = np.arange(len(ids)) % 2 * (not accepted) == 0
    return StreamOutput("", np.array(ids), flags, np.full(len(ids), confidence), 0, 1, 1, done)


def test_accepted_tokens_guesses_and_noise_look_different(lm):
    a, b, c = lm.tokenizer.encode("1 2")[:3]
    text = terminal.paint(
        lm.tokenizer, [a, b, c, lm.tokenizer.mask], [True, False, False, False], [0.9, 0.9, 0.1, 0.9]
    )
    styles = [str(span.style) for span in text.spans]
    assert text.plain.startswith("1") and text.plain.endswith(NOISE * 2)
    assert (
        styles[0] == terminal.ACCEPTED
        and styles[1] == terminal.style(False, 0.9)
        and styles[2:] == [terminal.NOISE_STYLE] * 2
    )
    assert terminal.style(False, 0.3) != terminal.style(False, 0.9)


def test_the_view_joins_bytes_and_removes_control_codes(lm):
    ids = lm.tokenizer.encode("é\x1b[2J\n")
    text = terminal.paint(lm.tokenizer, ids, [True] * len(ids), [1.0] * len(ids)).plain
    assert text == "é\N{REPLACEMENT CHARACTER}[2J\n"


def test_a_followed_answer_ends_as_text_on_the_screen(lm):
    ids = lm.tokenizer.encode("\n".join(map(str, range(40))))
    moments = [moment(ids, False, 0.5, False), moment(ids, True, 1.0, True)]
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=60, height=10)
    last = terminal.follow(console, lm.tokenizer, "> ", 8, moments, pace=0.0)
    assert last.done and NOISE * 8 in screen.getvalue()
    shown = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", screen.getvalue().rpartition("\x1b[2K")[2])
    assert "\n".join(map(str, range(40))) in shown
