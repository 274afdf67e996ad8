"""Typed questions on the page: the bars are the answers of /v1/decisions."""

import json

import pytest
from playwright.sync_api import expect

from qa.browser.seeing import open_page


@pytest.fixture
def opened(page, nano):
    open_page(page, nano)
    page.get_by_role("radio", name="Decide").check()
    yield nano
    page.close()


def decide(page):
    """Runs the form; returns the body that it sent and the answer."""
    with page.expect_response("**/v1/decisions", timeout=120_000) as caught:
        page.locator("#run").click()
    return json.loads(caught.value.request.post_data), caught.value.json()


def test_the_bars_show_probabilities_and_intervals(page, opened):
    page.locator("#prompt").fill("347+585=932")
    page.locator("#questions").fill(
        "Is it right?\nWhich one? sum | code\nHow large? small < middle < large\nIt is a sum"
    )
    body, answer = decide(page)
    assert body["reads"] == 4 and [q["type"] for q in body["questions"].values()] == [
        "noul", "choice", "score", "noul",
    ]  # fmt: skip
    assert body["questions"]["Which one? sum | code"]["criteria"] == {"sum": None, "code": None}
    expect(page.locator("#decided")).to_be_visible()
    expect(page.locator("#runs")).to_be_hidden()
    groups = page.locator(".decision")
    expect(groups).to_have_count(4)
    for i, (name, one) in enumerate(answer["answers"].items()):
        expect(groups.nth(i).locator("h3")).to_have_text(name)
        p = {"yes": one["noul"], "no": 1 - one["noul"]} if one["type"] == "noul" else one["probabilities"]
        values = groups.nth(i).locator(".value").all_text_contents()
        shown = [float(text.split()[0]) for text in values]
        assert shown == pytest.approx([100 * x for x in p.values()], abs=0.06)
        spread = [float(text.split()[2]) for text in values]
        assert spread == pytest.approx([196 * x for x in one["standard_errors"].values()], abs=0.06)
        best = max(p, key=p.get)
        expect(groups.nth(i).locator(".own code")).to_contain_text(best)
    expect(page.locator("#said")).to_contain_text("Is it right?")


def test_the_other_kinds_come_back_and_wrong_questions_are_said(page, opened):
    page.locator("#questions").fill(" \n")
    page.locator("#prompt").fill("x")
    page.locator("#run").click()
    expect(page.locator("#error")).to_have_text("There is no question: write one a line")
    page.locator("#questions").fill("Which one? a | a | b")
    _, answer = decide(page)
    assert list(answer["answers"]["Which one? a | a | b"]["probabilities"]) == ["a", "b"]
    page.get_by_role("button", name="Addition").click()
    expect(page.locator("#asked")).to_be_hidden()
    page.locator("#run").click()
    expect(page.locator("#runs")).to_be_visible()
    expect(page.locator("#decided")).to_be_hidden()
