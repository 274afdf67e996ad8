"""What the model, a server or a file says is text and nothing else, and a run ends when its reader wants it to."""

import json
import re
import time

import pytest
from playwright.sync_api import expect

from mercury_jax.serve.options import ServerOptions
from qa.browser.seeing import cells, finished, open_page, run, start
from tests.serve.playground.scripted import shot, unveiled

EVIL = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>&lt;b&gt;{{7*7}}'
PARTS = "img, script:not([src]), b:not(#model b):not(.verdict b), iframe, svg:not(.transport svg)"


def says(lm, text):
    tokens = lm.tokenizer.encode(text)
    n = len(tokens)
    return [shot(tokens, [0] * n, [0.6] * n, 1), shot(tokens, [1] * n, [1] * n, 2, finish="stop")]


def unharmed(page) -> None:
    assert page.evaluate("window.hacked") is None
    assert page.locator(f"main :is({PARTS})").count() == 0


def test_an_answer_of_markup_is_shown_as_text(page, scripted):
    served = scripted(lambda job: says(served.engine.lm, EVIL))
    open_page(page, served)
    run(page, EVIL)
    assert "".join(c["text"] for c in cells(page)).replace("·", " ") == EVIL
    expect(page.locator(".main .asked")).to_have_text(EVIL)
    expect(page.locator("#said")).to_contain_text(EVIL)
    page.locator(".main .cell").first.click()
    expect(page.locator("#inspector h2")).to_have_text("Token 1")
    unharmed(page)


def test_a_trace_of_markup_is_shown_as_text(page, scripted):
    served = scripted(lambda job: says(served.engine.lm, "a b c"))
    open_page(page, served)
    frame = {"forwards": 1, "start": 0, "n": 1, "ms": 1, "step": EVIL, "cells": [[0, 7, EVIL, 5, 1]]}
    begin = {
        "model": EVIL + "\u202e", "block": 1, "max_tokens": 1, "thinking": 0, "before": EVIL, "after": EVIL,
    }  # fmt: skip
    asked = {"kind": EVIL, "messages": [{"role": EVIL, "content": EVIL}], "rule": EVIL}
    end = {"text": EVIL, "finish": EVIL, "tokens": EVIL}
    one = {"request": asked, "start": begin, "frames": [frame], "end": end}
    data = {"format": "mercury-jax-trace", "version": 1, "runs": [one]}
    buffer = json.dumps(data).encode()
    page.set_input_files("#file", {"name": EVIL[:20], "mimeType": "application/json", "buffer": buffer})
    expect(page.locator(".main .cell")).to_have_text(EVIL)
    page.locator(".main .cell").click()
    expect(page.locator("#inspector h2")).to_have_text("Token 1")
    unharmed(page)


def test_an_error_of_markup_is_shown_as_text(page, scripted):
    served = scripted(lambda job: says(served.engine.lm, "a"))
    open_page(page, served)
    body = json.dumps({"error": {"message": EVIL}})
    page.route("**/playground/stream", lambda route: route.fulfill(status=400, body=body))
    start(page)
    expect(page.locator("#error")).to_have_text(EVIL)
    unharmed(page)
    page.wrong.clear()  # the browser itself reports the 400


def test_the_policy_stops_what_the_page_would_not_do(page, scripted):
    """Even a bug that put markup into the page could not run it: the browser refuses by the policy."""
    served = scripted(lambda job: says(served.engine.lm, "a"))
    open_page(page, served)
    refused = page.evaluate("""() => {
        try { document.body.innerHTML += '<b>x</b>'; } catch (error) { return error instanceof TypeError; }
    }""")
    assert refused
    page.evaluate("""() => { const image = document.createElement('img'); image.src = 'https://localhost:1/x.png';
        document.body.append(image); }""")
    with pytest.raises(Exception, match="TrustedScriptURL"):
        page.evaluate("document.createElement('script').src = 'https://localhost:1/x.js'")
    page.wait_for_timeout(200)
    assert page.evaluate("window.hacked") is None
    assert any("localhost:1" in text and "Content Security Policy" in text for text in page.wrong)
    page.wrong.clear()


def until(true) -> None:
    end = time.monotonic() + 10
    while not true() and time.monotonic() < end:
        time.sleep(0.02)
    assert true()


@pytest.fixture
def held(page, scripted):
    """A page on which two runs stand after some of their passes."""
    script = unveiled(range(70, 90))
    served = scripted(lambda job: script)
    served.engine.hold = True
    open_page(page, served)
    start(page)
    served.engine.gate.release(4)
    expect(page.locator("#where")).to_have_text(re.compile("of [2-4] …"))
    return served


def test_stop_ends_the_run_on_the_server_and_starts_no_second_one(page, held):
    page.click("#run")
    expect(page.locator(".main .badge")).to_have_text("stopped")
    until(lambda: all(ticket.cancelled for ticket in held.engine.tickets))
    expect(page.locator("#run")).to_contain_text("Run")
    assert len(held.engine.tickets) == 1
    assert cells(page)  # what had come stays, and can be looked through
    expect(page.locator("#export")).to_be_enabled()


def test_leaving_the_page_ends_the_run(page, held):
    assert len(held.engine.tickets) == 1 and not any(ticket.cancelled for ticket in held.engine.tickets)
    page.goto("about:blank")
    until(lambda: all(ticket.cancelled for ticket in held.engine.tickets))


def test_a_broken_connection_is_told(page, scripted):
    served = scripted(lambda job: unveiled(range(70, 90)))
    open_page(page, served)
    half = (
        'data: {"type":"start","model":"m","block":2,"max_tokens":2,"thinking":0,"before":"","after":""}\n\n'
    )
    page.route(
        "**/playground/stream",
        lambda route: route.fulfill(status=200, body=half, content_type="text/event-stream"),
    )
    start(page)
    expect(page.locator("#error")).to_contain_text("The connection broke")
    expect(page.locator(".main .badge")).to_have_text("failed")
    page.unroute("**/playground/stream")
    run(page)  # and the next run is as any other
    expect(page.locator("#error")).to_be_hidden()


def test_a_failed_job_says_why(page, scripted):
    broken = shot([70], [1], [1], 1)._replace(finish="error", message="the model's logits are NaN")
    served = scripted(lambda job: [broken])
    open_page(page, served)
    start(page)
    expect(page.locator("#error")).to_have_text("the model's logits are NaN")
    expect(page.locator(".main .badge")).to_have_text("failed")


def test_refusals_name_the_field(page, scripted):
    served = scripted(lambda job: says(served.engine.lm, "a"))
    open_page(page, served, "decoding")
    page.fill("#max_tokens", "100000")
    page.locator("#compose").evaluate("form => form.noValidate = true")
    start(page)
    expect(page.locator("#error")).to_contain_text("max_tokens is 100000; allowed: a whole number from 1 to")
    page.wrong.clear()
    page.fill("#max_tokens", "8")
    page.locator("#grammar summary").click()
    page.fill("#schema", "[1]")
    page.click("#run")
    expect(page.locator("#error")).to_have_text("The schema must be a JSON object.")


def test_with_a_key_the_page_works_and_keeps_it_to_itself(chromium, scripted):
    served = scripted(lambda job: says(served.engine.lm, "a b"), ServerOptions(keys=("a-long-key",)))
    context = chromium.new_context(http_credentials={"username": "any", "password": "a-long-key"})
    page = context.new_page()
    open_page(page, served)
    expect(page.locator("#key")).to_be_visible()
    page.fill("#key", "a-wrong-key")
    page.press("#key", "Tab")
    expect(page.locator("#key")).to_be_focused()  # it is asked for again
    page.fill("#key", "a-long-key")
    page.press("#key", "Tab")
    page.click("#run")
    finished(page)
    assert (
        page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])")
        == '[{},{},""]'
    )
    context.close()
