"""The page with the embedded model behind the real engine."""

import json
import re

import pytest
from playwright.sync_api import expect

from qa.browser.seeing import cells, facts, finished, open_page, run, seek, start


@pytest.fixture
def opened(page, nano):
    open_page(page, nano, "decoding")
    yield nano
    page.close()


def test_side_by_side_writes_the_same_in_fewer_forwards(page, opened):
    """A sum, right on both sides; left to right takes a pass for each token and one for the end of text."""
    page.get_by_role("button", name="Addition").click()
    run(page)
    forwards = [int(page.locator(f".{side} dd").nth(2).text_content()) for side in ("main", "beside")]
    assert forwards[0] < 10 and forwards[1] == page.locator(".beside .cell").count() + 1
    expect(page.locator(".beside h2")).to_have_text("Left to right, KV cache")
    expect(page.locator(".verdict")).to_contain_text(f"{forwards[0]} forward passes instead of {forwards[1]}")
    expect(page.locator(".verdict")).to_contain_text("Both wrote the same text.")
    expect(page.locator("#said")).to_contain_text(": 1542")
    seek(page, 3)
    settled = [sum(kind == "settled" for _, kind, _ in facts(page, side)) for side in ("main", "beside")]
    assert settled[1] <= 3 < settled[0]
    expect(page.locator(".verdict")).to_contain_text(
        f"After 3 steps: {settled[0]} tokens here, {settled[1]} token{'s' * (settled[1] != 1)} left to right"
    )


def test_the_five_are_those_of_the_pass_that_showed_the_cell(page, opened):
    """The likeliest token of an unsettled cell is the one that stands in it, at the confidence that it shows."""
    page.get_by_role("button", name="Addition").click()
    page.select_option("#rule", "confidence")
    run(page)
    page.locator(".beside .cell").first.click()
    expect(page.locator("#inspector")).to_contain_text("looks at the next token alone")
    seek(page, 2)
    open_cells = [i for i, (_, kind, _) in enumerate(facts(page)) if kind == "guess"]
    for i in (open_cells[0], open_cells[len(open_cells) // 2], open_cells[-1]):
        cell = page.locator(".main .cell").nth(i)
        cell.click()
        first = page.locator(".bars li").first
        expect(page.locator(".bars li")).to_have_count(5, timeout=60_000)
        expect(first).to_have_class("own")
        assert first.locator("code").text_content() == cells(page)[i]["text"]
        said, own = (float(re.findall(r"([\d.]+) %", text)[0]) for text in (
            cells(page)[i]["label"], first.locator(".value").text_content()))  # fmt: skip
        assert abs(own - said) <= 0.6
        values = [
            float(v.lstrip("< ").rstrip(" %")) for v in page.locator(".bars .value").all_text_contents()
        ]
        assert values == sorted(values, reverse=True) and sum(values) <= 100.5


def test_text_selected_in_the_form_is_written_anew(page, opened):
    """The selection becomes a hole between what stands before and behind it, and both stay."""
    page.uncheck("#compare")
    page.get_by_label("Fill in").check()
    page.fill("#prompt", "def area(r):\n    return r\n")
    page.locator("#prompt").evaluate("box => { box.focus(); box.setSelectionRange(13, 25); }")
    expect(page.locator("#hole")).to_contain_text("To be rewritten")
    page.fill("#max_tokens", "6")
    with page.expect_request("**/playground/stream") as sent:
        run(page)
    asked = json.loads(sent.value.post_data)
    assert (asked["kind"], asked["before"], asked["selected"]) == ("edit", "def area(r):\n", "    return r")
    assert asked["after"] == "\n" and asked["max_tokens"] == 6
    assert len(cells(page)) == 6
    assert page.locator(".main .given").all_text_contents() == ["def area(r):\n", "\n"]


def test_tokens_selected_in_an_answer_are_written_anew(page, opened):
    page.uncheck("#compare")
    page.get_by_role("button", name="Sudoku").click()
    run(page)
    answer = "".join(text for text, _, _ in facts(page)).replace("↵", "\n")
    box = [page.locator(".main .cell").nth(i).bounding_box() for i in (1, 3)]
    page.mouse.move(box[0]["x"] + 5, box[0]["y"] + 5)
    page.mouse.down()
    page.mouse.move(box[1]["x"] + 5, box[1]["y"] + 5, steps=4)
    page.mouse.up()
    page.get_by_role("button", name="Rewrite 3 tokens").click()
    finished(page)
    given = page.locator(".main .given").all_text_contents()
    assert given == [answer[:1], answer[4:]] and len(cells(page)) == 3


def test_every_rule_and_effort_runs(page, opened):
    page.uncheck("#compare")
    page.fill("#max_tokens", "12")
    for rule in page.locator("#rule option").all_text_contents():
        page.select_option("#rule", rule)
        run(page, "1+1=")
        expect(page.locator(".main h2")).to_contain_text(rule)
    page.get_by_label("instant").check()
    expect(page.locator("#rule")).to_have_value("threshold")
    expect(page.locator("#p")).to_have_value("0.7")
    run(page, "1+1=")


def test_temperature_and_seed_are_sent(page, opened):
    page.uncheck("#compare")
    page.fill("#temperature", "1.5")
    page.fill("#seed", "7")
    with page.expect_request("**/playground/stream") as sent:
        start(page, "2+2=")
    asked = json.loads(sent.value.post_data)
    assert (asked["temperature"], asked["seed"]) == (1.5, 7)
    finished(page)


def test_a_schema_is_obeyed_and_what_it_forced_is_marked(page, opened):
    """The answer is the JSON that was asked for; its fixed parts are marked as forced, and were never looked at."""
    page.uncheck("#compare")
    page.locator("#grammar summary").click()
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    page.fill("#schema", json.dumps(schema | {"additionalProperties": False}))
    page.fill("#max_tokens", "16")
    run(page, "1+2=")
    said = page.locator("#said").text_content() or ""
    assert isinstance(json.loads(said.partition(": ")[2])["sum"], int)
    forced = [i for i, (_, _, forced) in enumerate(facts(page)) if forced]
    assert forced[:2] == [0, 1] and len(forced) < len(cells(page))
    page.locator(".main .cell").first.click()
    expect(page.locator("#inspector")).to_contain_text("the grammar wrote it")
    expect(page.locator("#inspector")).to_contain_text("forced by the grammar")
    page.locator(".main .cell").nth(forced[-1] - 1).click()
    expect(page.locator(".bars li")).to_have_count(5, timeout=60_000)
    expect(page.locator("#inspector")).to_contain_text("nearly what the pass read")
