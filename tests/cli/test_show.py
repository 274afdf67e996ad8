"""The live view and the demo show what the model did."""

import io
import re

import numpy as np
from rich.console import Console

from mercury_jax.cli import main, show
from mercury_jax.decode.stream import StreamOutput


def moment(ids, accepted: bool, confidence: float, done: bool) -> StreamOutput:
    """A frame in which every second token is accepted, or all are."""
    flags = np.arange(len(ids)) % 2 * (not accepted) == 0
    return StreamOutput("", np.array(ids), flags, np.full(len(ids), confidence), 0, 1, 1, done)


def test_accepted_tokens_guesses_and_noise_look_different(lm):
    a, b, c = lm.tokenizer.encode("1 2")[:3]
    text = show.paint(
        lm.tokenizer, [a, b, c, lm.tokenizer.mask], [True, False, False, False], [0.9, 0.9, 0.1, 0.9]
    )
    styles = [str(span.style) for span in text.spans]
    assert text.plain.startswith("1") and text.plain.endswith(show.NOISE * 2)
    assert (
        styles[0] == show.ACCEPTED
        and styles[1] == show.style(False, 0.9)
        and styles[2:] == [show.NOISE_STYLE] * 2
    )
    assert show.style(False, 0.3) != show.style(False, 0.9)


def test_the_view_joins_bytes_and_removes_control_codes(lm):
    ids = lm.tokenizer.encode("é\x1b[2J\n")
    text = show.paint(lm.tokenizer, ids, [True] * len(ids), [1.0] * len(ids)).plain
    assert text == "é\N{REPLACEMENT CHARACTER}[2J\n"


def test_a_followed_answer_ends_as_text_on_the_screen(lm):
    ids = lm.tokenizer.encode("\n".join(map(str, range(40))))
    moments = [moment(ids, False, 0.5, False), moment(ids, True, 1.0, True)]
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=60, height=10)
    last = show.follow(console, lm.tokenizer, "> ", 8, moments, pace=0.0)
    assert last.done and show.NOISE * 8 in screen.getvalue()
    shown = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", screen.getvalue().rpartition("\x1b[2K")[2])
    assert "\n".join(map(str, range(40))) in shown


def test_the_demo_reports_wrong_answers_and_exits_with_1(at_hand, monkeypatch, capsys):
    from mercury_jax.cli import demo

    asked = []

    def draw(attempt):
        asked.append(attempt)
        question = [{"role": "user", "content": "1+1="}]
        return demo.Question("a sum", "1+1=", question, 8, lambda text: False, wrong="2")

    monkeypatch.setattr(demo, "questions", lambda seed: [draw])
    assert main(["demo", "--model", at_hand]) == 1
    out = capsys.readouterr().out
    assert out.count("Wrong: it should be 2.") == demo.TRIES and "Right" not in out and "\x1b[" not in out
    assert max(asked) == demo.TRIES - 1 and "tokens/s" in out and "compiled in" in out


def test_the_demos_puzzles_have_checkable_answers():
    from mercury_jax.cli import demo
    from mercury_jax.tasks import TASKS

    for seed in range(3):
        sudoku, total, python = (draw(0) for draw in demo.questions(seed))
        assert TASKS["sudoku4"].split(sudoku.prompt[0]["content"]) == "test"
        assert sudoku.check(sudoku.wrong.replace(" / ", "\n")) and not sudoku.check("1234")
        assert total.check(total.wrong) and not total.check("0")
        assert python.check("") is None
        assert "parse as Python" in python.remark("    pass\n")
