"""The page on a phone and other touch screens, and what it says while it waits."""

import json

import pytest
from playwright.sync_api import expect

from qa.browser.seeing import cells, finished, open_page, run, start
from tests.serve.playground.scripted import shot, unveiled

CODE = "def area_of_a_circle(radius):\n    return 3.14159 * radius * radius  # and a long comment behind it\n"
SIZES = [(320, 568), (390, 844), (768, 1024)]
SMALL = """() => [...document.querySelectorAll("a, button, select, summary, textarea, input, [role=option]")]
    .filter(e => e.checkVisibility({visibilityProperty: true}) && !e.closest(".canvas .tokens:empty"))
    .map(e => [e, ["checkbox", "radio"].includes(e.type) ? e.closest("label") : e])
    .map(([e, area]) => [e.id || e.className || e.outerHTML, area.getBoundingClientRect()])
    .filter(([, box]) => box.width < 40 || box.height < 40).map(([name, box]) => [name, box.width, box.height])"""


@pytest.fixture
def served(scripted):
    served = scripted(lambda job: unveiled(served.engine.lm.tokenizer.encode(CODE)))
    return served


@pytest.fixture
def touch(chromium):
    """Opens a page on a touch screen of a size; what goes wrong in its console fails the test."""
    opened, wrong = [], []

    def make(width, height, scheme="light"):
        screen = {"width": width, "height": height}
        context = chromium.new_context(
            viewport=screen, has_touch=True, is_mobile=True, color_scheme=scheme, reduced_motion="reduce"
        )
        opened.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        return page

    yield make
    for context in opened:
        context.close()
    assert wrong == []


def box(page, selector):
    found = page.locator(selector).bounding_box()
    return found["y"], found["y"] + found["height"]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_result_comes_first_and_run_is_in_reach_wherever_the_reader_is(touch, served, size):
    page = touch(*size)
    open_page(page, served)
    top, _ = box(page, "#runs")
    assert top < size[1] / 2
    assert page.evaluate("document.documentElement.scrollWidth") == size[0]
    for where in (0, 400, 10_000):
        page.evaluate("y => window.scrollTo(0, y)", where)
        upper, lower = box(page, "#run")
        assert 0 <= upper and lower <= size[1]
    order = "['#stage', '#knobs', '#ask'].map(s => document.querySelector(s).getBoundingClientRect().top)"
    assert page.evaluate(order) == sorted(page.evaluate(order))
    follows = (
        "document.querySelector('#stage').compareDocumentPosition(document.querySelector('#prompt')) & 4"
    )
    assert page.evaluate(follows)  # the focus goes in the order of the page


def test_a_wide_page_has_the_form_first(page, served):
    open_page(page, served)
    assert box(page, "#run")[1] < 900 and page.locator("#ask").bounding_box()["x"] < 100
    page.set_viewport_size({"width": 390, "height": 844})
    assert box(page, "#runs")[0] < box(page, "#ask")[0]
    page.set_viewport_size({"width": 1280, "height": 900})
    assert page.evaluate(
        "document.querySelector('#ask').compareDocumentPosition(document.querySelector('#stage')) & 4"
    )


def test_stop_is_in_reach_while_an_answer_is_written(touch, served):
    page = touch(390, 844)
    open_page(page, served)
    served.engine.hold = True
    start(page)
    served.engine.gate.release(2)
    expect(page.locator("#where")).to_contain_text("…")
    for where in (0, 600, 10_000):
        page.evaluate("y => window.scrollTo(0, y)", where)
        upper, lower = box(page, "#run")
        assert 0 <= upper and lower <= 844
    page.locator("#run").tap()
    expect(page.locator(".main .badge")).to_have_text("stopped")
    expect(page.locator("#run")).to_have_text("Run Ctrl ⏎")


def test_settings_are_folded_and_open_where_one_is_wrong(touch, served):
    page = touch(390, 844)
    open_page(page, served)
    for name in ("#rule", "#p", "#temperature", "#steps", "#seed", "#system", "#schema", "#tools"):
        expect(page.locator(name)).to_be_hidden()
    page.locator("#max_tokens").evaluate("field => { field.value = 1e9; }")
    page.locator("#run").tap()
    expect(page.locator("#max_tokens")).to_be_visible()


@pytest.mark.parametrize("size", [*SIZES, (1280, 800)], ids=str)
def test_a_finger_meets_40_pixels_and_no_hint_at_a_keyboard(touch, served, size):
    page = touch(*size)
    open_page(page, served, "decoding", "instructions", "grammar", "tools-box")
    run(page)
    page.locator(".main .cell").nth(3).tap()
    assert page.evaluate(SMALL) == []
    text = page.locator("body").inner_text()
    for hint in ("Ctrl", "Esc", "⏎", "Keyboard", "click"):
        assert hint not in text
    size = "e => parseFloat(getComputedStyle(e).fontSize)"
    assert page.locator("#prompt").evaluate(size) >= 16  # below that a phone zooms in


def test_the_token_that_is_tapped_is_explained_next_to_it_and_two_taps_begin_a_selection(touch, served):
    page = touch(390, 844)
    open_page(page, served)
    page.evaluate("document.querySelector('#compare').checked = false")
    run(page)
    cell = page.locator(".main .cell")
    cell.nth(3).tap()
    expect(page.locator("#inspector h2")).to_have_text("Token 4")
    assert page.evaluate("document.querySelector('.main').nextElementSibling.id") == "inspector"
    expect(page.locator(".rewrite")).to_have_count(0)
    cell.nth(3).tap()
    expect(page.locator(".rewrite")).to_have_text("Rewrite 1 token")
    cell.nth(5).tap()
    expect(page.locator(".rewrite")).to_have_text("Rewrite 3 tokens")
    cell.nth(3).tap()
    expect(page.locator(".rewrite")).to_have_count(0)


@pytest.mark.parametrize("width", [320, 390, 1280])
def test_code_of_an_answer_is_not_cut_off(page, served, width):
    page.set_viewport_size({"width": width, "height": 844})
    open_page(page, served)
    page.get_by_role("button", name="Python").click()
    run(page)
    code = page.locator("#turns .code")
    assert code.evaluate("e => e.scrollWidth <= e.clientWidth")
    expect(code).to_have_text("def fibonacci(n):" + CODE)


def test_a_hole_of_an_example_is_where_the_example_has_it(page, served):
    """Also where the field was in use before, whose cursor the browser then keeps."""
    open_page(page, served)
    page.uncheck("#compare")
    page.fill("#prompt", "")
    page.get_by_role("button", name="Fill in").click()
    expect(page.locator("#hole")).to_contain_text("in line 2")
    with page.expect_request("**/playground/stream") as sent:
        run(page)
    assert json.loads(sent.value.post_data)["before"] == "def area(r):\n"


@pytest.mark.parametrize("kind", ["chat", "text", "edit"])
def test_no_text_is_told_in_words(page, served, kind):
    open_page(page, served)
    page.locator(f"input[value={kind}]").check()
    page.fill("#prompt", "")
    page.click("#run")
    expect(page.locator("#error")).to_have_text("There is no text yet: write one, or choose an example.")
    assert not served.engine.tickets


def test_the_sudoku_is_explained_in_one_line_until_another_text_is_there(page, nano):
    open_page(page, nano)
    line = page.locator("#example")
    expect(line).to_contain_text("1 to 4 once in each row, column and 2 × 2 box")
    page.get_by_role("button", name="Addition").click()
    expect(line).to_be_hidden()
    page.get_by_role("button", name="Sudoku").click()
    expect(line).to_be_visible()
    page.locator("#prompt").press_sequentially("1")
    expect(line).to_be_hidden()
    page.close()


@pytest.mark.parametrize(
    ("ours", "theirs", "says"),
    [
        (1, 1, "1 forward pass on both sides."), (1, 2, "1 forward pass instead of 2: 2 times fewer."),
        (2, 1, "2 forward passes instead of 1: 2 times as many."), (4, 4, "4 forward passes on both sides."),
        (29, 30, "29 forward passes instead of 30."), (30, 29, "30 forward passes instead of 29."),
        (2, 32, "2 forward passes instead of 32: 16 times fewer."),
    ],
)  # fmt: skip
def test_a_comparison_never_says_1_times(page, served, ours, theirs, says):
    def recorded(passes):
        begin = {"model": "m", "block": 1, "max_tokens": 1, "thinking": 0}
        frames = [
            {"forwards": k + 1, "start": 0, "n": 1, "ms": k + 1, "cells": [[0, 7, "a", 1, 1]]}
            for k in range(passes)
        ]
        return {"request": None, "start": begin, "frames": frames, "end": {"text": "a", "finish": "stop"}}

    open_page(page, served)
    data = {"format": "mercury-jax-trace", "version": 1, "runs": [recorded(ours), recorded(theirs)]}
    file = {"name": "t.json", "mimeType": "application/json", "buffer": json.dumps(data).encode()}
    page.set_input_files("#file", file)
    verdict = page.locator(".verdict")
    expect(verdict).to_contain_text(says)
    assert " 1 times" not in verdict.inner_text()


def test_an_answer_that_waits_says_what_for(page, scripted):
    served = scripted(lambda job: unveiled(range(70, 90)))
    open_page(page, served)
    page.uncheck("#compare")
    served.engine.hold, served.engine.busy = True, 3
    start(page, "q")
    expect(page.locator("#note")).to_contain_text("Queued: 3 requests before this one: ")
    page.click("#run")
    expect(page.locator("#run")).to_contain_text("Run")
    expect(page.locator("#note")).to_be_hidden()
    served.engine.busy = 0
    start(page, "q")
    expect(page.locator("#note")).to_contain_text("reads the prompt, or compiles a program")
    served.engine.gate.release(40)
    finished(page)
    expect(page.locator("#note")).to_be_hidden()
    assert cells(page)


def test_a_server_that_is_gone_is_told_and_awaited(page, served):
    page.route("**/playground/info", lambda route: route.abort())
    page.route("**/ready", lambda route: route.abort())
    page.goto(served.url)
    expect(page.locator("#note")).to_contain_text("The server does not answer")
    page.unroute("**/playground/info")
    page.unroute("**/ready")
    page.wait_for_selector("#examples .chip")
    expect(page.locator("#note")).not_to_contain_text("does not answer")
    page.route("**/playground/stream", lambda route: route.abort())
    start(page, "q")
    expect(page.locator("#error")).to_contain_text("The server does not answer")
    page.unroute("**/playground/stream")
    page.route("**/ready", lambda route: route.fulfill(status=503, body=json.dumps({"status": "closing"})))
    start(page)
    expect(page.locator("#note")).to_contain_text("shutting down")
    page.click("#run")  # Stop ends the wait too
    expect(page.locator("#run")).to_contain_text("Run")
    page.wrong.clear()  # the browser reports each of them


def test_text_from_right_to_left_stands_so(page, scripted):
    served = scripted(lambda job: unveiled(served.engine.lm.tokenizer.encode("שלום לכל")))
    open_page(page, served)
    run(page, "سؤال")
    direction = "e => getComputedStyle(e).direction"
    for rtl in ("#prompt", ".main .asked", "#turns .prose"):
        assert page.locator(rtl).evaluate(direction) == "rtl"
    assert page.locator(".main .tokens").evaluate(direction) == "ltr"  # this tokenizer has bytes for them
    begin = {"model": "m", "block": 2, "max_tokens": 2, "thinking": 0}
    frame = {
        "forwards": 1,
        "start": 0,
        "n": 2,
        "ms": 1,
        "cells": [[0, 7, "שלום", 1, 1], [1, 8, " לכל", 1, 1]],
    }
    data = {
        "format": "mercury-jax-trace",
        "version": 1,
        "runs": [{"request": None, "start": begin, "frames": [frame]}],
    }
    page.set_input_files(
        "#file", {"name": "t.json", "mimeType": "application/json", "buffer": json.dumps(data).encode()}
    )
    expect(page.locator(".main .cell").first).to_have_text("שלום")
    first, second = (page.locator(".main .cell").nth(i).bounding_box()["x"] for i in (0, 1))
    assert first > second


def test_a_long_answer_is_followed_to_where_it_is_written(page, scripted):
    n, k = 900, 800
    served = scripted(lambda job: [shot([70] * n, [int(i < k) for i in range(n)], [0.9] * n, 1)])
    served.engine.script = lambda job: [
        shot([70] * n, [int(i < k) for i in range(n)], [0.9] * n, 1), shot([70] * n, [1] * n, [1] * n, 2, finish="stop")
    ]  # fmt: skip
    open_page(page, served)
    page.uncheck("#compare")
    served.engine.hold = True
    start(page, "q")
    served.engine.gate.release(1)
    expect(page.locator("#where")).to_contain_text("step 1")
    inside = """i => { const card = document.querySelector('.main');
        const [c, r] = [card.querySelectorAll('.cell')[i], card.querySelector('.canvas')]
        .map(e => e.getBoundingClientRect()); return c.top >= r.top - 1 && c.bottom <= r.bottom + 1; }"""
    assert page.evaluate(inside, k)
    served.engine.gate.release(5)
    finished(page)
    assert page.evaluate(inside, n - 1)
