"""The steps of a run on the page: each as it was, in whatever order it is looked at, and from a file as well."""

import json
import re

import pytest
from playwright.sync_api import expect

from qa.browser.seeing import cells, expected, facts, finished, open_page, run, seek, start
from tests.serve.playground.scripted import shot, unveiled


def ids(lm, text):
    return lm.tokenizer.encode(text)


SAYS = "def area(r):\n    return 3 * r\n"


@pytest.fixture
def ran(page, scripted):
    """A page on which a run of a known script has ended, and the script."""
    served = scripted(lambda job: unveiled(ids(served.engine.lm, SAYS), seed=job.steps == 0))
    served.script = unveiled(ids(served.engine.lm, SAYS), seed=False)
    open_page(page, served, "decoding")
    page.fill("#steps", "9")
    run(page)
    return served


def test_the_slider_restores_every_step_exactly(page, ran):
    wanted = expected(ran.engine.lm, ran.script[:-1])  # the last snapshot only says that it was the last
    last, longest = len(wanted), int(page.get_attribute("#slider", "max"))  # the opponent takes more steps
    assert longest >= last
    for k in [3, 1, last, 2, 5, 4, 1, last, 3]:
        seek(page, k)
        assert facts(page) == wanted[k - 1]
        expect(page.locator("#where")).to_have_text(f"step {k} of {longest}")
    seek(page, 0)
    assert facts(page) == [("▒", "noise", False)] * len(wanted[0])


def test_figures_are_those_of_the_step(page, ran):
    for k in (1, 3, 6):
        seek(page, k)
        shown = dict(
            zip(["perSecond", "perStep", "forwards"], page.locator(".main dd").all_text_contents(),
                strict=True)
        )  # fmt: skip
        settled = int(ran.script[k - 1].accepted.sum())
        assert int(shown["forwards"]) == k
        assert float(shown["perStep"]) == pytest.approx(settled / k, abs=0.006)
        assert (float(shown["perSecond"].replace(",", "")) > 0) == (settled > 0)


def test_revised_and_forced_tokens_are_marked(page, ran):
    """A settled token that changed is marked from then on; what the grammar forced says so to a screen reader."""
    ids = lambda i: {int(s.tokens[i]) for s in ran.script if i < len(s.tokens) and s.accepted[i]}
    turned = [i for i in range(len(ran.script[0].tokens)) if len(ids(i)) > 1]
    assert turned
    seek(page, 1)
    assert not any("revised" in c["classes"] for c in cells(page))
    seek(page, len(ran.script))
    assert [i for i, c in enumerate(cells(page)) if "revised" in c["classes"]] == turned
    assert all("revised" in cells(page)[i]["label"] for i in turned)
    forced = [i for i, c in enumerate(cells(page)) if "forced" in c["classes"]]
    assert forced and all("forced by the grammar" in cells(page)[i]["label"] for i in forced)


def test_a_line_end_breaks_the_line(page, ran):
    box = lambda i: page.locator(".main .cell").nth(i).bounding_box()
    shown = [c["text"] for c in cells(page)]
    at = shown.index("↵")
    assert box(at + 1)["y"] > box(at)["y"] + 10 and box(at + 1)["x"] < box(at)["x"]
    assert page.locator(".main .tokens br").count() == SAYS.count("\n")


def test_play_goes_on_from_where_it_stands_and_stops_at_the_end(page, ran):
    last = int(page.get_attribute("#slider", "max"))
    seek(page, last - 2)
    page.select_option("#pace", "5")
    play = page.locator("#play")
    expect(play).to_have_attribute("aria-label", "Play")
    play.click()
    expect(play).to_have_attribute("aria-label", "Pause")
    expect(page.locator("#where")).to_have_text(f"step {last} of {last}")
    expect(play).to_have_attribute("aria-label", "Play")
    play.click()  # from the end it begins anew
    expect(page.locator("#where")).to_have_text(re.compile("step [1-4] of"))
    play.click()
    expect(play).to_have_attribute("aria-label", "Play")


def test_steps_come_while_the_run_goes_on(page, scripted):
    """Two of the passes are there, the others not yet: the page shows the second, and says that it waits."""
    script = unveiled(range(70, 90))
    served = scripted(lambda job: script)
    open_page(page, served)
    page.uncheck("#compare")
    served.engine.hold = True
    start(page)
    expect(page.locator(".main .cell.noise").first).to_be_visible()
    served.engine.gate.release(2)
    expect(page.locator("#where")).to_have_text("step 2 of 2 …")
    assert facts(page) == expected(served.engine.lm, script)[1]
    expect(page.locator("#said")).to_be_empty()  # a screen reader hears the answer, not every pass
    served.engine.gate.release(20)
    finished(page)
    expect(page.locator("#said")).to_contain_text(
        f"Answer, {len(script[0].tokens)} tokens in 6 forward passes"
    )


def exported(page) -> dict:
    with page.expect_download() as found:
        page.click("#export")
    return json.loads(found.value.path().read_text())


def load(page, data) -> None:
    text = data if isinstance(data, str) else json.dumps(data)
    page.set_input_files("#file", {"name": "t.json", "mimeType": "application/json", "buffer": text.encode()})


def test_a_trace_comes_back_from_its_file(page, ran):
    data, last = exported(page), int(page.get_attribute("#slider", "max"))
    assert [r["end"]["finish"] for r in data["runs"]] == ["stop", "stop"]
    before = []
    for k in range(last + 1):
        seek(page, k)
        before.append((cells(page), cells(page, "beside")))
    page.reload()
    page.wait_for_selector("#examples .chip")
    load(page, data)
    expect(page.locator(".main .badge")).to_have_text("done")
    for k in reversed(range(last + 1)):
        seek(page, k)
        assert (cells(page), cells(page, "beside")) == before[k]
    assert exported(page)["runs"] == data["runs"]


@pytest.mark.parametrize(
    "path, value, told",
    [
        (["format"], "other", "not a mercury-jax-trace"), (["runs"], [], "one or two runs"),
        (["runs", 0, "frames", 1, "cells", 0, 4], 2, "Step 2"),
        (["runs", 0, "frames", 1, "cells", 0, 0], 9999, "Step 2"),
        (["runs", 0, "frames", 0, "cells"], [], "Step 1"), (["runs", 0, "frames", 2, "n"], 1e9, "Step 3"),
        (["runs", 0, "frames", 0, "cells", 0, 2], {"x": 1}, "Step 1"),
        (["runs", 0, "start", "block"], "x", "start of a run"),
        (["runs", 0, "frames"], "x", "invalid"),
    ],
)  # fmt: skip
def test_a_broken_file_is_refused_in_words(page, ran, path, value, told):
    data = exported(page)
    kept, inner = facts(page), data
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    load(page, data)
    expect(page.locator("#error")).to_contain_text(told)
    assert facts(page) == kept  # what was shown stays


def test_a_file_that_is_no_json_is_refused(page, ran):
    load(page, "{")
    expect(page.locator("#error")).to_have_text("This file is not JSON.")


def test_an_empty_answer_is_an_answer(page, scripted):
    served = scripted(lambda job: [shot([], [], [], 1, finish="stop")])
    open_page(page, served)
    run(page)
    assert cells(page) == []
    expect(page.locator("#said")).to_contain_text("0 tokens in 1 forward pass:")
