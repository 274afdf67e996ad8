"""An answer to look at shows the passes of the call and its final tokens, runs nothing and needs no other file."""

import itertools
import json
import re
import sys

import numpy as np
import pytest

import mercury_jax as mj
from mercury_jax.cli.app import main
from mercury_jax.viz import html as notebook, plots
from mercury_jax.viz.html import AnswerTrace, trace_of
from tests.tiny import tiny

PUZZLE = [{"role": "user", "content": "0200\n4302\n3401\n0004"}]
NETWORK = re.compile(r"https?:|src=|href=|@import|url\(|fetch\(|XMLHttpRequest")


@pytest.fixture(scope="module")
def solved():
    """A sudoku and a sum with its thinking, in one batch."""
    prompts = [PUZZLE, [{"role": "user", "content": "389+784="}]]
    plan = mj.Plan(steps=8)
    return mj.sample(
        mj.load(), prompts, max_tokens=32, sampler=mj.rules.confidence(), plan=plan, history=True
    )


def data(html: str) -> list[dict]:
    found = re.findall(r'<script type="application/json">(.*?)</script>', html, re.DOTALL)
    return [json.loads(text) for text in found]


@pytest.mark.long
def test_the_last_step_of_a_trace_is_the_answer_and_each_token_keeps_its_step(solved):
    for row, found in enumerate(trace_of(solved, row) for row in range(2)):
        assert len(found.tokens) == solved.forwards[row]
        np.testing.assert_array_equal(found.tokens[-1], solved.tokens[row])
        assert (found.since[-1] > 0).all() and found.since[-1].max() <= len(found.tokens)
        for before, after in zip(found.since[:-1], found.since[1:], strict=True):
            np.testing.assert_array_equal(after[before > 0], before[before > 0])  # confidence() never remasks
        assert ((found.confidence >= 0) & (found.confidence <= 1.001)).all()


@pytest.mark.long
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("rule", [mj.rules.wino(), mj.rules.remdm_confidence(), mj.rules.threshold(0.9)])
def test_a_rule_that_takes_tokens_back_is_traced_to_its_answer(rule):
    out = mj.sample(tiny("bidirectional"), ["def x", "import"], max_tokens=20, sampler=rule, history=True)
    for row, found in enumerate(trace_of(out, row) for row in range(2)):
        np.testing.assert_array_equal(found.tokens[-1], out.tokens[row])


def test_a_notebook_shows_a_slider_over_all_steps_of_each_answer(solved):
    html = solved._repr_html_()
    for row, shown in enumerate(data(html)):
        assert [step["n"] for step in shown["steps"]] == list(range(solved.forwards[row] + 1))
        last = [shown["labels"][t] for t in shown["steps"][-1]["t"]]
        text = b"".join(solved.tokenizer.pieces[t] for t in solved.tokens[row]).decode()
        assert "".join(name for name, flag in last if not flag) == text
    names = re.findall(r'<div id="([^"]+)"', html + solved._repr_html_())
    assert len(names) == len(set(names)) == 4  # several outputs fit into one page
    assert not NETWORK.search(html)


@pytest.mark.long
def test_text_of_a_model_never_becomes_markup():
    lm = mj.load()
    out = mj.sample(lm, "x", max_tokens=32, history=True)
    hostile = "</script><img onerror=x>&<b>"
    ids = lm.tokenizer.encode(hostile)
    found = AnswerTrace(np.array([ids]), np.ones((1, len(ids)), int), np.ones((1, len(ids))))
    out.texts[0], out.history[:] = hostile, []
    frames = [*mj.stream(lm, "x", max_tokens=4)]
    evil = frames[-1].__class__(**{**vars(frames[-1]), "tokens": np.array(ids), "accepted": np.ones(len(ids), bool),
                                   "confidence": np.ones(len(ids))})  # fmt: skip
    traced = notebook.trace_html(found, lm.tokenizer, hostile)
    for html in (traced, out._repr_html_(), notebook.page("", hostile), evil._repr_html_()):
        assert "<img" not in html and "<b>" not in html
    assert traced.count("</script>") == 2  # the two that we wrote
    (shown,) = data(traced)
    assert "".join(shown["labels"][t][0] for t in shown["steps"][-1]["t"]) == hostile


def test_a_long_answer_is_cut_and_says_so():
    lm, steps, size = mj.load(), notebook.MOST_STEPS + 10, notebook.MOST_TOKENS + 5
    ones = np.ones((steps, size), int)
    html = notebook.trace_html(AnswerTrace(ones * 300, ones, ones.astype(float)), lm.tokenizer)
    (shown,) = data(html)
    assert (
        len(shown["steps"]) == notebook.MOST_STEPS + 1 and len(shown["steps"][0]["t"]) == notebook.MOST_TOKENS
    )
    assert "not shown: 10 steps, 5 tokens" in html


def test_a_frame_shows_its_rows_and_their_positions(solved):
    html = solved.history[0]._repr_html_()
    for row in range(2):
        start, used = int(solved.history[0].start[row]), int(solved.history[0].used[row])
        where = f"positions {start} to {start + used - 1}" if used else "not denoised in this pass"
        assert f"row {row}: {where}" in html
    assert html.count("<span") == int(solved.history[0].used.sum())


@pytest.mark.long
def test_a_plot_has_a_dot_for_each_accepted_token(solved):
    figure = solved.plot(1)
    axes = figure.axes[0]
    assert axes.images[0].get_array().shape == (solved.forwards[1], solved.lengths[1])
    assert len(axes.lines[0].get_xdata()) == solved.lengths[1]
    assert figure._repr_png_().startswith(b"\x89PNG")  # a notebook asks for this
    assert all(float(tick).is_integer() for tick in axes.get_xticks())  # positions, not 2.5
    with pytest.raises(ValueError, match=r"row is 2; allowed: 0\.\.1"):
        solved.plot(2)
    with pytest.raises(ValueError, match="history"):
        mj.sample(mj.load(), "x", max_tokens=4).plot()


def test_a_plot_tells_high_probabilities_apart_and_has_whole_numbers_for_few_positions(solved):
    figure = solved.plot(1)
    image = figure.axes[0].images[0]
    levels = [0, 0.5, 0.9, 0.99, 0.999]
    colours = image.to_rgba(np.array([levels]))[0, :, :3]
    assert all(np.abs(a - b).sum() > 0.1 for a, b in itertools.pairwise(colours))
    figure.draw_without_rendering()
    assert [t.get_text() for t in figure.axes[1].get_yticklabels()][:4] == ["0", "0.9", "0.99", "0.999"]
    for n in (1, 2, 3):
        few = AnswerTrace(np.ones((n, n), int), np.ones((n, n), int), np.ones((n, n)))
        for axis in (plots.draw(few).axes[0].xaxis, plots.draw(few).axes[0].yaxis):
            assert all(float(tick).is_integer() for tick in axis.get_majorticklocs())


def test_a_plot_in_a_notebook_has_no_ground_and_the_colour_of_the_text(solved):
    """So it suits a light and a dark notebook, whatever tells the notebook to be dark."""
    svg = solved.plot(1)._repr_html_()
    assert svg.startswith("<svg ") and svg.rstrip().endswith("</svg>") and "<script" not in svg
    assert 'fill="currentColor"' in svg and "stroke: currentColor" in svg
    assert "#000000" not in svg and "#ffffff" not in re.sub(r"<use[^>]*>", "", svg)  # but for the dots


@pytest.mark.parametrize("dark", [False, True])
def test_an_animation_has_the_ground_that_was_asked_for(tmp_path, solved, dark):
    from PIL import Image

    with Image.open(solved.save(tmp_path / "steps.gif", dark=dark)) as gif:
        red = np.asarray(gif.convert("RGB"))[0, 0, 0]
    assert red < 40 if dark else red > 240


def test_html_takes_its_colours_from_the_notebook(solved):
    for html in (solved._repr_html_(), solved.history[0]._repr_html_()):
        assert not re.search(r"(?<![-\w])(color|background(-color)?):\s*(#|white|black|rgb\()", html)


def test_what_is_missing_for_a_plot_is_named(monkeypatch, solved):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match="plot.*matplotlib.*pip install"):
        solved.plot()


@pytest.mark.long
def test_the_command_writes_a_page_and_an_animation(tmp_path, capsys):
    page, picture = tmp_path / "steps.html", tmp_path / "steps.gif"
    sudoku = PUZZLE[0]["content"]
    code = main(["sample", sudoku, "--chat", "--max-tokens", "32", "--rule", "confidence", "--steps", "8",
                 "--html", str(page), "--gif", str(picture)])  # fmt: skip
    assert code == 0 and "2134" in capsys.readouterr().out
    html = page.read_text(encoding="utf-8")
    (shown,) = data(html)
    assert html.startswith("<!doctype html>") and sudoku in html and not NETWORK.search(html)
    from PIL import Image, ImageSequence

    with Image.open(picture) as gif:
        assert len([*ImageSequence.Iterator(gif)]) == len(shown["steps"])
    assert picture.stat().st_size < 200_000


def test_an_output_is_saved_as_what_its_suffix_says(tmp_path, solved):
    for row in range(2):
        page = solved.save(tmp_path / "steps.html", row, prompt="<asked>")
        html = page.read_text(encoding="utf-8")
        (shown,) = data(html)
        assert len(shown["steps"]) == solved.forwards[row] + 1 and not NETWORK.search(html)
        assert html.startswith("<!doctype html>") and "&lt;asked&gt;" in html
    from PIL import Image, ImageSequence

    with Image.open(solved.save(str(tmp_path / "steps.gif"), 1)) as gif:
        assert len([*ImageSequence.Iterator(gif)]) == solved.forwards[1] + 1


def test_what_cannot_be_saved_is_refused_by_name(tmp_path, monkeypatch, solved):
    plain = mj.sample(mj.load(), "x", max_tokens=4)
    for name in ("x.html", "x.gif"):
        with pytest.raises(ValueError, match=r"history.*history=True"):
            plain.save(tmp_path / name)
    with pytest.raises(ValueError, match=r"path is .*x\.png'; allowed: a file that ends in \.html.*\.gif"):
        solved.save(tmp_path / "x.png")
    with pytest.raises(ValueError, match=r"row is 2; allowed: 0\.\.1"):
        solved.save(tmp_path / "x.html", 2)
    with pytest.raises(ValueError, match="path is .*can be written"):
        solved.save(tmp_path / "no" / "x.html")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"\.gif.*matplotlib.*pip install"):
        solved.save(tmp_path / "x.gif")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "options, told",
    [
        (["--n", "2", "--html", "x.html"], "--html.*one prompt and --n 1"),
        (["--n", "2", "--gif", "x.gif"], "--gif.*one prompt and --n 1"),
        (["--gif", "x.png"], "--gif is 'x.png'; allowed: a file that ends in .gif"),
        (["--html", "x.gif"], "--html is 'x.gif'; allowed: a file that ends in .html or .htm"),
        (["--html", "no/such/folder/x.html"], "--html.*can be written"),
    ],
)
def test_a_file_that_cannot_be_made_is_refused_before_the_model_loads(
    options, told, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(["sample", "a", "--model", "no-such-model", *options]) == 2
    assert re.search(told, capsys.readouterr().err)
    assert not [*tmp_path.iterdir()]
