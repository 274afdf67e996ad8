"""The picker of a server with several models, at two widths: its choice goes into requests, turns and links."""

import dataclasses
import json

import pytest
from playwright.sync_api import expect

from qa.browser.seeing import finished, open_page, run
from tests.cli.tiny_model import tiny_lm
from tests.serve.playground.scripted import Scripted, unveiled
from tests.serve.playground.served import Served

PHONE, DESKTOP = {"width": 390, "height": 844}, {"width": 1280, "height": 900}
LONG = "GSAI-ML/LLaDA-8B-Instruct-" + "finetuned" * 6
EVIL = '<img src=x onerror="window.hacked=1">'


@pytest.fixture(params=[PHONE, DESKTOP], ids=["phone", "desktop"])
def wide(request, page):
    page.set_viewport_size(request.param)
    return page


@pytest.fixture(scope="module")
def mine():
    """A model of another vocabulary, context and block than the embedded one."""
    return dataclasses.replace(tiny_lm(), name="mine")


@pytest.fixture
def serve(lm):
    """Makes servers of scripted engines: `serve(lm, lm, ...)`. Each model answers with its own text."""
    made = []

    def start(*models):
        engines = [
            Scripted(one, lambda job, one=one: unveiled(one.tokenizer.encode(says(one)))) for one in models
        ]
        made.append(Served(engines).__enter__())
        return made[-1]

    yield start
    for served in made:
        served.__exit__()


def says(lm):
    return f"def {'a' if lm.name == 'nano' else 'b'}(x): return x"


def asked(page, act) -> dict:
    """The body of the request to which an action leads."""
    with page.expect_request("**/playground/stream") as sent:
        act()
    return json.loads(sent.value.post_data)


def picker(page):
    return page.get_by_label("Model", exact=True)


def test_a_single_model_needs_no_picker(wide, serve, lm):
    open_page(wide, serve(lm))
    expect(picker(wide)).to_be_hidden()
    assert asked(wide, lambda: run(wide, "q"))["model"] == "nano"
    expect(wide.locator(".main h2")).not_to_contain_text("nano")
    expect(wide.locator("#turns .by")).to_have_count(0)


def test_the_choice_goes_into_requests_and_the_form_is_of_the_model(wide, serve, lm, mine):
    served = serve(lm, mine)
    open_page(wide, served)
    expect(picker(wide).locator("option")).to_have_text(["nano", "mine"])
    assert asked(wide, lambda: run(wide, "q"))["model"] == "nano"
    expect(wide.locator(".main h2")).to_contain_text("nano:")
    expect(wide.locator("#turns .by")).to_have_text("nano")
    picker(wide).select_option("mine")
    expect(wide.locator("#model")).to_contain_text("mine")
    assert wide.locator("#max_tokens").get_attribute("max") == "127"  # of a context of 128
    expect(wide.locator("#prompt")).to_have_value("q")  # what was written stays
    rules = [rule.name for rule in served.engines[1].rules.rules]
    expect(wide.locator("#rule option")).to_have_text(rules)
    expect(wide.locator("#efforts label")).to_have_count(5)
    expect(wide.locator("#examples .chip").first).to_have_text("Explain")
    body = asked(wide, lambda: run(wide, "r"))
    assert (body["model"], body["rule"]) == ("mine", rules[0])
    expect(wide.locator(".main h2")).to_contain_text("mine:")
    expect(wide.locator("#turns .answer")).to_have_text(says(mine))
    # nano is compared with itself left to right, outside of its engine.
    assert [len(engine.tickets) for engine in served.engines] == [1, 2]
    expect(wide.locator("#error")).to_be_hidden()


def test_a_conversation_goes_on_with_another_model(wide, serve, lm, mine):
    open_page(wide, serve(lm, mine))
    wide.uncheck("#compare")
    expect(wide.locator("#keep")).not_to_be_checked()  # the embedded model knows single questions only
    picker(wide).select_option("mine")
    expect(wide.locator("#keep")).to_be_checked()
    picker(wide).select_option("nano")
    wide.locator("#instructions summary").click()
    wide.check("#keep")
    run(wide, "one")
    picker(wide).select_option("mine")
    expect(wide.locator("#keep")).to_be_checked()
    body = asked(wide, lambda: run(wide, "two"))
    assert body["model"] == "mine" and [m["content"] for m in body["messages"]] == ["one", says(lm), "two"]
    expect(wide.locator("#turns .by")).to_have_text(["nano", "mine"])
    wide.get_by_role("button", name="New conversation").click()
    expect(picker(wide)).to_have_value("mine")
    body = asked(wide, lambda: run(wide, "three"))
    assert body["model"] == "mine" and len(body["messages"]) == 1


def test_a_rule_that_was_chosen_stays_and_the_models_own_follows_it(wide, serve, lm, mine):
    open_page(wide, serve(lm, mine), "decoding")
    wide.select_option("#rule", "scheduled")
    wide.fill("#p", "0.75")
    picker(wide).select_option("mine")
    expect(wide.locator("#rule")).to_have_value("scheduled")
    expect(wide.locator("#p")).to_have_value("0.75")
    body = asked(wide, lambda: run(wide, "q"))
    assert (body["model"], body["rule"], body["p"]) == ("mine", "scheduled", 0.75)


def test_the_picker_by_keyboard_alone(page, serve, lm, mine):
    open_page(page, serve(lm, mine))
    for _ in range(5):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "chosen":
            break
    expect(picker(page)).to_be_focused()
    page.keyboard.press("ArrowDown")
    expect(page.locator("#model")).to_contain_text("mine")
    found = page.get_by_role("combobox", name="Model", exact=True)
    expect(found).to_have_value("mine")

    def ask():
        page.keyboard.press("Control+Enter")
        finished(page)

    assert asked(page, ask)["model"] == "mine"


def test_a_link_and_a_file_say_the_model_and_a_cell_is_asked_of_it(wide, serve, lm, mine):
    served = serve(lm, mine)
    wide.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=served.url)
    open_page(wide, served)
    picker(wide).select_option("mine")
    run(wide, "q")
    with wide.expect_download() as download:
        wide.click("#export")
    assert download.value.suggested_filename == "trace-mine.json"
    runs = json.loads(download.value.path().read_text())["runs"]
    assert {(one["start"]["model"], one["request"]["model"]) for one in runs} == {("mine", "mine")}
    wide.click("#share")
    expect(wide.locator("#note")).to_contain_text("in the clipboard")
    link = wide.evaluate("navigator.clipboard.readText()")
    wide.goto("about:blank")
    wide.goto(link)
    expect(wide.locator("#note")).to_contain_text("of this link, by mine")
    expect(wide.locator(".main h2")).to_have_text("mine, recorded")
    expect(picker(wide)).to_have_value("nano")  # the link replays; the form is as at first
    with wide.expect_request("**/playground/top") as sent:
        wide.locator(".main .cell").first.click()
    assert json.loads(sent.value.post_data)["request"]["model"] == "mine"
    expect(wide.locator(".bars li")).to_have_count(5, timeout=60_000)


def test_names_are_text_and_nothing_is_wider_than_the_page(wide, serve, lm, mine):
    open_page(wide, serve(lm, dataclasses.replace(mine, name=EVIL), dataclasses.replace(mine, name=LONG)))
    for name in (EVIL, LONG):
        picker(wide).select_option(name)
        run(wide, "q")
        expect(wide.locator("#model b")).to_have_text(name)
        expect(wide.locator("#turns .by").last).to_have_text(name)
        assert wide.evaluate("window.hacked") is None and wide.locator("main img").count() == 0
        size = wide.viewport_size["width"]
        assert wide.evaluate("document.documentElement.scrollWidth") <= size
        for node in (
            *wide.locator(".panel").all(),
            picker(wide),
            wide.locator("#model"),
            wide.locator(".main h2"),
        ):
            if box := node.bounding_box():
                assert box["x"] >= 0 and box["x"] + box["width"] <= size
