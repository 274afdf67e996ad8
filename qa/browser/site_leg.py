"""The built site in a browser: what a search finds first, widths, links, pictures. `make site` builds it and runs this.

A newcomer's question is answered well if the page with the answer is the first result. SEARCHED in docs/conf.py says
by which phrases a page is found beside its own words.
"""

from __future__ import annotations

import functools
import http.server
import threading
from pathlib import Path
from urllib.parse import quote

import pytest

SITE = Path(__file__).parents[2] / "docs/_build/html"
NOT_OURS = ("_static", "_modules", "_sources")  # of the theme, and listings of source code
PAGES = sorted(
    name for page in SITE.rglob("*.html") if not (name := str(page.relative_to(SITE))).startswith(NOT_OURS)
)
QUESTIONS = {
    "install": "getting-started", "streaming": "sampling", "LoRA": "fine-tuning", "load LLaDA": "models",
    "int8 quantisation": "models", "API key": "serving", "JSON schema": "sampling", "infilling": "sampling",
    "edit text": "sampling", "resume training": "training", "own dataset": "training", "effort": "sampling",
    "KV cache": "concepts", "guidance": "concepts", "shard_map": "decoder", "lm-evaluation-harness": "evaluation",
    "tools agent": "serving", "exit code": "command-line", "write a decoding rule": "your-rule",
    "several hosts": "scaling", "reward": "search-and-rl", "memory of a GPU": "hardware",
    "compare with vLLM": "comparison", "load Dream": "models", "load DiffusionGemma": "models",
    "fine-tune DiffusionGemma": "fine-tuning", "custom model": "your-model", "train from scratch": "training",
    "which GPU": "hardware", "remake published tables": "published-figures", "cite": "citation",
    "how fast": "performance", "laptop": "getting-started", "chat template": "sampling", "colab": "getting-started",
    "docker": "serving", "temperature": "sampling", "windows": "getting-started",
}  # fmt: skip


@pytest.fixture(scope="module")
def site():
    """The address of the site, on a free port of the loopback."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format, *args):
            pass

    handler = functools.partial(Quiet, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def tab(chromium):
    """A tab that requests from this machine alone."""
    context = chromium.new_context(viewport={"width": 390, "height": 844})
    context.route(
        "**/*", lambda route: route.continue_() if "127.0.0.1" in route.request.url else route.abort()
    )
    page, wrong = context.new_page(), []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    yield page
    context.close()
    assert wrong == []


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_first_result_of_a_question_is_the_page_that_answers_it(tab, site, question):
    tab.goto(f"{site}/search.html?q={quote(question)}")
    tab.wait_for_function(
        "document.querySelector('.search-summary')?.textContent.match(/found|matching|did not/)"
    )
    found = tab.eval_on_selector_all("ul.search > li > a", "links => links.map(a => a.getAttribute('href'))")
    pages = list(dict.fromkeys(link.split("?")[0].split("#")[0] for link in found))
    assert pages[:1] == [f"{QUESTIONS[question]}.html"], pages[:5]
    tab.wait_for_selector("ul.search > li p.context")  # a summary, of the article
    told = tab.locator("ul.search > li p.context").first.inner_text()
    assert len(told) > 40 and "Open issue" not in told and "Light" not in told


def test_every_page_is_as_wide_as_a_phone_and_shows_its_pictures_and_tables(tab, site):
    wrong = []
    for page in PAGES:
        tab.goto(f"{site}/{page}", wait_until="load")
        for scheme in ("light", "dark"):
            tab.emulate_media(color_scheme=scheme)
            width, broken, squeezed = tab.evaluate(
                """() => [document.scrollingElement.scrollWidth, [...document.images]
                  .filter(i => i.src.startsWith(location.origin) && i.complete && !i.naturalWidth).map(i => i.src),
                  [...document.querySelectorAll('.bd-article td')]
                  .filter(x => x.innerText.length > 20 && x.offsetHeight > 12 * x.offsetWidth).length]"""
            )
            wrong += [(page, scheme, width, broken, squeezed)] if width > 390 or broken or squeezed else []
    assert len(PAGES) > 60 and wrong == []


def test_every_link_within_the_site_leads_to_a_page_and_a_place(tab, site):
    wrong, places = set(), {}
    for page in PAGES:
        tab.goto(f"{site}/{page}", wait_until="domcontentloaded")
        places[page] = set(tab.eval_on_selector_all("[id]", "all => all.map(x => x.id)"))
        links = tab.eval_on_selector_all("a[href]", "all => all.map(a => a.href)")
        wrong |= {(page, link.removeprefix(f"{site}/")) for link in links if link.startswith(site)}
    missing = []
    for page, link in sorted(wrong):
        path, _, place = link.partition("#")
        path = path.split("?")[0] or "index.html"
        file = SITE / path
        lost = place and path in places and place not in places[path]
        missing += [(page, link)] if not file.is_file() or lost else []
    assert missing == []


def test_the_slider_of_a_notebook_moves_without_a_server_of_python(tab, site):
    tab.goto(f"{site}/notebooks/quickstart.html")
    slider = tab.locator("input[type=range]").first
    picture = slider.locator("xpath=ancestor::*[.//pre or .//table or .//span][1]")
    seen = set()
    for value in ("1", "2"):
        slider.evaluate(
            "(x, value) => { x.value = value; x.dispatchEvent(new Event('input', {bubbles: true})) }", value
        )
        seen.add(picture.inner_text())
    assert len(seen) == 2
