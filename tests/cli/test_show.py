"""The demo shows what the model did."""

import re

from mercury_jax.cli import main, show


def test_the_demo_asks_once_says_what_is_wrong_and_exits_with_1(at_hand, monkeypatch, capsys):
    """A model that decodes left to right is timed both ways, in passes and milliseconds; no question is asked again."""
    from mercury_jax.cli import demo

    asked = []

    def call(rule):
        asked.append(rule)
        return demo._sample(at_hand_lm, [{"role": "user", "content": "1+1="}], rule)

    at_hand_lm = show.load(at_hand)
    scene = demo.Scene("a sum", "1+1=", call, lambda text: False, "", wrong="it should be 2")
    monkeypatch.setattr(demo, "scenes", lambda lm, seed: [scene])
    monkeypatch.setattr(demo, "medians", lambda lm, seed: [])
    assert main(["demo", "--model", at_hand]) == 1
    out = capsys.readouterr().out
    assert out.count("Wrong: it should be 2.") == 1 and "Right" not in out and "\x1b[" not in out
    assert (
        asked == [None] * (1 + demo.TIMED)
        and re.search(r"forward pass(es)?, [\d.]+ ms", out)
        and "compiled in" in out
    )


def test_the_demos_questions_are_drawn_by_the_seed_and_can_be_checked(lm):
    from mercury_jax.cli import demo
    from mercury_jax.tasks import TASKS

    titles = set()
    for seed in range(3):
        sudoku, total, hole, digit, schema = demo.scenes(lm, seed)
        assert sudoku.prompt is not None and TASKS["sudoku4"].split(sudoku.prompt[0]["content"]) == "test"
        for scene in (sudoku, digit):
            right = scene.wrong.removeprefix("it should be ").replace(" / ", "\n")
            assert scene.check(right) and not scene.check("1234")
        assert not digit.check(digit.before.strip())  # one digit of it is wrong
        assert total.check(total.wrong.removeprefix("it should be ")) and not total.check("0")
        assert hole.check("def f(a):\n    a = 1\n") and not hole.check("def f(a):\n    a a = 1\n")
        (key,) = re.findall(r'"required": \["(\w+)"\]', schema.title)
        assert (
            schema.check(f'{{"{key}": 2}}') and not schema.check(f'{{"{key}": 4}}') and not schema.check("{}")
        )
        titles |= {scene.title for scene in (hole, digit)}
    assert len(titles) == 6  # other seeds, other questions


def test_the_demo_says_where_it_is_not_faster():
    from mercury_jax.cli import demo

    assert demo._times(3.0, 2.0) == "1.5 times as long"
    assert demo._times(1.0, 2.0) == "ours is not faster: it takes 2.0 times as long"
