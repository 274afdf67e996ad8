"""What a newcomer sees, at two widths: a recording, plain answers to copy, conversations, a race, links."""

import json
import re

import pytest
from playwright.sync_api import expect

from mercury_jax.serve.playground.app import STATIC
from qa.browser.seeing import cells, facts, finished, open_page, run, seek, start
from tests.serve.playground.scripted import unveiled

PHONE, DESKTOP = {"width": 390, "height": 844}, {"width": 1280, "height": 900}
SAYS = "Look:\n```python\ndef f(x):  # <b>\n    return 'a'\n```\nDone."


@pytest.fixture
def served(scripted):
    """A server that always gives the same answer, with code in it."""
    made = scripted(lambda job: made.script)
    made.script = unveiled(made.engine.lm.tokenizer.encode(SAYS), seed=False)
    return made


@pytest.fixture(params=[PHONE, DESKTOP], ids=["phone", "desktop"])
def wide(request, page):
    page.set_viewport_size(request.param)
    return page


def test_at_first_sight_a_recording_shows_what_happens(wide, served):
    asked = []
    wide.on("request", lambda request: asked.append(request.url))
    open_page(wide, served)
    expect(wide.locator("#note")).to_contain_text("A recording")
    expect(wide.locator(".main h2")).to_contain_text("recorded")
    recorded = json.loads((STATIC / "demo.json").read_text())["runs"][0]["end"]
    assert [kind for _, kind, _ in facts(wide)].count("settled") == recorded["tokens"]
    assert "".join(cell["text"] for cell in cells(wide)) == recorded["text"].replace("\n", "↵")
    seek(wide, 1)
    assert [kind for _, kind, _ in facts(wide, "beside")].count("settled") <= 1
    assert not [url for url in asked if "playground/stream" in url]  # the server was asked for nothing
    run(wide)
    expect(wide.locator("#note")).to_be_hidden()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_the_page(wide, served, scheme):
    wide.emulate_media(color_scheme=scheme)
    open_page(wide, served)
    run(wide)
    size = wide.viewport_size["width"]
    assert wide.evaluate("document.documentElement.scrollWidth") <= size
    for selector in (".panel", "button:visible:not(.chip)", ".tray", ".code"):
        boxes = [box for box in (node.bounding_box() for node in wide.locator(selector).all()) if box]
        assert boxes and all(box["x"] >= 0 and box["x"] + box["width"] <= size for box in boxes), selector


def test_a_phone_scrolls_to_the_answer_and_a_desktop_stays(wide, served):
    open_page(wide, served)
    wide.evaluate("window.scrollTo(0, 0)")
    run(wide)
    top = wide.locator("#runs").bounding_box()["y"]
    if wide.viewport_size == PHONE:
        assert 0 <= top < 120
    else:
        assert wide.evaluate("window.scrollY") == 0


def test_the_plain_answer_has_code_as_code_and_can_be_copied(wide, served):
    wide.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=served.url)
    open_page(wide, served)
    run(wide, "q")
    answer = wide.locator("#turns .answer")
    expect(answer.locator(".prose")).to_have_text(["Look:", "Done."])
    expect(answer.locator("pre.code")).to_have_text("def f(x):  # <b>\n    return 'a'\n")
    expect(answer.locator(".is-word")).to_have_text(["def", "return"])
    expect(answer.locator(".is-comment")).to_have_text("# <b>")  # as text, not as markup
    wide.locator("#turns .copy").click()
    assert wide.evaluate("navigator.clipboard.readText()") == SAYS


def test_a_conversation_goes_on_with_the_system_prompt_until_a_new_one_begins(wide, served):
    open_page(wide, served)
    wide.uncheck("#compare")
    wide.locator("#instructions summary").click()
    wide.fill("#system", "Be brief.")
    wide.check("#keep")

    def messages(text):
        with wide.expect_request("**/playground/stream") as sent:
            run(wide, text)
        return [(m["role"], m["content"]) for m in json.loads(sent.value.post_data)["messages"]]

    first = [("system", "Be brief."), ("user", "one")]
    assert messages("one") == first
    assert messages("two") == [*first, ("assistant", SAYS), ("user", "two")]
    expect(wide.locator("#turns .asked")).to_have_text(["one", "two"])
    wide.get_by_role("button", name="New conversation").click()
    assert messages("three") == [("system", "Be brief."), ("user", "three")]
    wide.uncheck("#keep")
    assert messages("four") == [("system", "Be brief."), ("user", "four")]


def test_thinking_is_folded(page, nano):
    open_page(page, nano)
    page.uncheck("#compare")
    page.get_by_role("button", name="Addition").click()
    run(page)
    thinking = page.locator("#turns .thinking")
    expect(thinking.locator(".prose")).to_be_hidden()
    expect(page.locator("#turns .answer")).to_have_text("1542")
    thinking.locator("summary").click()
    expect(thinking.locator(".prose")).to_contain_text("8+4=12")
    page.close()


def test_a_tool_is_called_and_its_result_goes_back(wide, nano):
    """The embedded model was not trained on tools. The grammar makes the call valid."""
    open_page(wide, nano)
    wide.uncheck("#compare")
    wide.locator("#tools-box summary").click()
    number = {"type": "integer", "minimum": 0, "maximum": 99}
    add = {"name": "add", "parameters": {"type": "object", "properties": {"a": number}, "required": ["a"]}}
    wide.fill("#tools", json.dumps([add]))
    wide.check("#must-call")
    run(wide, "47+38=")
    expect(wide.locator("#turns .call b")).to_have_text("Calls add")
    assert 0 <= json.loads(wide.locator("#turns .call pre").text_content())["a"] <= 99
    size = wide.viewport_size["width"]
    assert wide.evaluate("document.documentElement.scrollWidth") <= size
    wide.get_by_label("Result of add").fill("85")
    with wide.expect_request("**/playground/stream") as sent:
        wide.get_by_role("button", name="Send results").click()
    asked = json.loads(sent.value.post_data)
    question, call, result = asked["messages"]
    assert (question["content"], asked["tool_choice"]) == ("47+38=", "auto")
    assert call["tool_calls"][0]["function"]["name"] == "add"
    assert result == {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "85"}
    finished(wide)
    expect(wide.locator("#turns .asked")).to_have_text(["47+38=", "85"])
    expect(wide.locator("#error")).to_be_hidden()


@pytest.mark.parametrize(
    ("tools", "says"),
    [("[{", "The list of tools is not JSON"), ("{}", "The tools must be a JSON list."),
     ('[{"name": "a"}, {"name": "a"}]', "tools[1].function.name"), ('[{"parameters": {}}]', "tools")],
)  # fmt: skip
def test_tools_that_cannot_be_used_are_refused_in_words(page, nano, tools, says):
    open_page(page, nano)
    page.uncheck("#compare")
    page.locator("#tools-box summary").click()
    page.fill("#tools", tools)
    page.click("#run")
    expect(page.locator("#error")).to_contain_text(says)
    page.wrong[:] = [text for text in page.wrong if "400" not in text]


def test_a_race_shows_both_at_the_times_of_their_passes(wide, served):
    """Both runs had the server to themselves; the slower one arrives last, with its own time."""
    open_page(wide, served)
    run(wide, "q")
    expect(wide.locator(".verdict")).to_contain_text(re.compile(r"m?s instead of .*m?s"))
    last = [
        frame["ms"]
        for frame in wide.evaluate("""async () => {
            const text = await (await fetch("playground/static/demo.json")).text();
            return JSON.parse(text).runs.map((run) => run.frames.at(-1)); }""")
    ]
    assert last[0] < last[1]
    wide.reload()
    wide.wait_for_selector("#examples .chip")
    wide.click("#race")
    badges = wide.locator(".run-card .badge")
    expect(wide.locator("#where")).to_contain_text("slower")
    expect(badges.nth(0)).to_have_text(f"{last[0]:.0f} ms")  # it has arrived
    assert float(badges.nth(1).text_content().removesuffix(" ms")) <= last[1] + 1
    expect(badges.nth(1)).to_have_text("done", timeout=10_000)
    wide.click("#race")
    expect(wide.locator("#where")).to_contain_text("slower")
    seek(wide, 1)  # a step that is chosen by hand ends the race
    expect(wide.locator("#where")).to_have_text("step 1 of 20")
    wide.wait_for_timeout(300)
    expect(wide.locator("#where")).to_have_text("step 1 of 20")


def test_a_link_replays_the_steps_without_the_server(wide, served):
    wide.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=served.url)
    open_page(wide, served)
    run(wide, "q")
    seek(wide, 2)
    shown = facts(wide)
    wide.click("#share")
    expect(wide.locator("#note")).to_contain_text("in the clipboard")
    link = wide.evaluate("navigator.clipboard.readText()")
    assert link.startswith(served.url + "#trace=")
    wide.goto("about:blank")
    wide.goto(link)
    expect(wide.locator("#note")).to_contain_text("of this link")
    seek(wide, 2)
    assert facts(wide) == shown
    wide.goto("about:blank")
    wide.goto(link[:-20] + "AAAA")
    expect(wide.locator("#error")).to_contain_text("damaged")


def test_a_server_that_compiles_says_so_and_answers_when_it_is_done(wide, served):
    served.engine.ready = False
    wide.goto(served.url)
    expect(wide.locator("#note")).to_contain_text("The server compiles its programs")
    wide.wrong.clear()  # the browser reports each 503 of /ready
    served.engine.ready = True
    expect(wide.locator("#note")).not_to_contain_text("compiles")
    start(wide, "q", pace="0")
    finished(wide)
    wide.wrong.clear()


def test_labels_are_words_of_the_field(page, served):
    open_page(page, served, "decoding")
    text = page.locator("body").inner_text()
    for label in ("default", "Maximum tokens", "tokens per step", "forward passes", "left to right"):
        assert label in text
    for old in ("\nown", "any\n", "Beside", "a step\n"):
        assert old not in text
