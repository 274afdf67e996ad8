"""The page by keyboard alone, for a screen reader, for weak eyes and on a narrow screen."""

import re

import pytest
from playwright.sync_api import expect

from qa.browser.seeing import cells, finished, open_page, run, seek
from tests.serve.playground.scripted import shot, unveiled

TEXT = "def area(r):\n    return 3 * r\n"


@pytest.fixture
def served(scripted):
    served = scripted(lambda job: unveiled(served.engine.lm.tokenizer.encode(TEXT)))
    return served


def focused(page) -> str:
    return page.evaluate("document.activeElement.id || document.activeElement.className")


def tab_to(page, name: str, most: int = 60) -> None:
    """Press Tab until something of this id or class has the focus."""
    for _ in range(most):
        page.keyboard.press("Tab")
        if re.search(rf"(^|\s){name}($|\s)", focused(page)):
            return
    raise AssertionError(f"{name} was not reached by Tab; the focus is at {focused(page)}")


def test_a_run_from_the_first_key_to_the_last(page, served):
    """Ask, play, step, choose a token, see its five, select two tokens and rewrite them: no mouse."""
    open_page(page, served)
    tab_to(page, "compare")
    page.keyboard.press("Space")
    tab_to(page, "prompt")
    page.keyboard.press("Control+a")
    page.keyboard.type("a question")
    tab_to(page, "pace")
    page.keyboard.press("End")  # as it comes
    page.keyboard.press("Control+Enter")
    finished(page)
    assert served.engine.tickets[0].request.prompt == tuple(
        served.engine.lm.tokenizer.render([{"role": "user", "content": "a question"}])
    )
    page.locator("#stage").focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#where")).to_have_text("step 4 of 6")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#where")).to_have_text("step 5 of 6")
    tab_to(page, "cell")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    expect(page.locator(".main .cell").nth(3)).to_be_focused()
    expect(page.locator("#where")).to_have_text(
        "step 5 of 6"
    )  # within the cells the arrows go from token to token
    page.keyboard.press("Enter")
    expect(page.locator("#inspector h2")).to_have_text("Token 4")
    expect(page.locator(".bars li")).to_have_count(5, timeout=60_000)
    page.keyboard.press("Shift+ArrowRight")
    assert [i for i, s in enumerate(selected(page)) if s] == [3, 4]
    tab_to(page, "rewrite")
    page.keyboard.press("Enter")
    finished(page)
    job, tok = served.engine.tickets[-1].request, served.engine.lm.tokenizer
    ids = tok.encode(TEXT)
    assert job.max_tokens == 2 and tok.decode(job.suffix) == tok.decode(ids[5:])
    assert tok.decode(job.prompt).endswith(tok.decode(ids[:3]))


def selected(page) -> list[bool]:
    return page.evaluate("[...document.querySelectorAll('.main .cell')].map(c => c.ariaSelected === 'true')")


def test_arrows_home_end_and_lines(page, served):
    open_page(page, served)
    run(page)
    first = page.locator(".main .cell").first
    first.focus()
    texts = [c["text"] for c in cells(page)]
    at = lambda: page.evaluate("Number(document.activeElement.dataset.i)")
    page.keyboard.press("End")
    assert at() == len(texts) - 1
    page.keyboard.press("Home")
    assert at() == 0
    page.keyboard.press("ArrowLeft")
    assert at() == 0
    page.keyboard.press("ArrowDown")
    assert at() == texts.index("↵") + 1
    page.keyboard.press("ArrowUp")
    assert at() == 0
    assert page.evaluate("document.querySelectorAll('.main .cell[tabindex=\"0\"]').length") == 1


def test_escape_and_space(page, served):
    open_page(page, served)
    served.engine.hold = True
    page.keyboard.press("Control+Enter")
    expect(page.locator("#run")).to_contain_text("Stop")
    page.keyboard.press("Escape")
    expect(page.locator("#run")).to_contain_text("Run")
    served.engine.hold = False
    served.engine.gate.release(40)
    run(page)
    page.locator("#stage").focus()
    page.select_option("#pace", "2")
    page.locator("#stage").focus()
    page.keyboard.press("Space")
    expect(page.locator("#play")).to_have_attribute("aria-label", "Pause")
    page.keyboard.press("Space")
    expect(page.locator("#play")).to_have_attribute("aria-label", "Play")


def test_every_control_has_a_name_and_every_cell_says_what_it_is(page, served):
    open_page(page, served)
    run(page)
    seek(page, 2)
    unnamed = page.evaluate("""() => [
            ...document.querySelectorAll('button, input:not([type=file]), select, textarea, [role]')]
        .filter(e => e.offsetParent !== null)
        .filter(e => !(e.ariaLabel || e.getAttribute('aria-labelledby') || e.labels?.length || e.textContent.trim()))
        .map(e => e.outerHTML)""")
    assert unnamed == []
    for i, cell in enumerate(cells(page)):
        kind = (
            "noise"
            if "noise" in cell["classes"]
            else "accepted"
            if "settled" in cell["classes"]
            else "a guess"
        )
        assert cell["label"].startswith(f"Token {i + 1}: ") and kind in cell["label"]
        assert kind == "noise" or re.search(r"\d %", cell["label"])
    tree = page.locator("#stage").aria_snapshot()
    assert 'slider "Step"' in tree and "listbox" in tree and 'group "Steps"' in tree


def test_only_the_finished_answer_is_read_out(page, served):
    open_page(page, served)
    live = page.evaluate("[...document.querySelectorAll('[aria-live]')].map(e => [e.id, e.ariaLive])")
    assert live == [["said", "polite"]]
    expect(page.locator("#said")).to_be_empty()
    run(page)
    expect(page.locator("#said")).to_have_text(
        f"Answer, {len(cells(page))} tokens in 6 forward passes: {TEXT}"
    )


RATIO = """() => {
    const draw = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
    const rgb = css => { draw.clearRect(0, 0, 1, 1); draw.fillStyle = css; draw.fillRect(0, 0, 1, 1);
        return [...draw.getImageData(0, 0, 1, 1).data].slice(0, 3); };
    const light = c => c.map(x => x / 255).map(x => x <= .04045 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4)
        .reduce((sum, x, i) => sum + x * [.2126, .7152, .0722][i], 0);
    const ground = e => { for (; e; e = e.parentElement) {
        const css = getComputedStyle(e).backgroundColor; if (!/, 0\\)$|transparent/.test(css)) return css; } };
    return [...document.querySelectorAll(
        '.cell:not(.noise), .hint, h1 span, dt, dd, .badge, .verdict, #where, label span, .model')]
        .filter(e => e.offsetParent !== null && e.textContent.trim())
        .map(e => { const [a, b] = [getComputedStyle(e).color, ground(e)].map(rgb).map(light);
            return [(Math.max(a, b) + .05) / (Math.min(a, b) + .05), e.className, e.textContent]; })
        .filter(([ratio]) => ratio < 4.5); }"""


STYLE = r"""name => [...document.querySelectorAll('.main .cell')]
    .map(c => getComputedStyle(c)[name].replace(/(rgba?|color)\([^)]*\)/g, ''))"""  # without its colours


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground(page, served, scheme):
    """4.5 to 1 or more, as WCAG AA asks, for all text of cells and panels, light and dark."""
    page.emulate_media(color_scheme=scheme)
    n = 12
    served.engine.script = lambda job: [
        shot(range(70, 70 + n), [i % 2 for i in range(n)], [(i + 4) / 16 for i in range(n)], 1, forced=[3]),
        shot(range(70, 70 + n), [1] * n, [(i + 1) / n for i in range(n)], 2, finish="stop"),
    ]
    open_page(page, served)
    run(page)
    for step in (1, 2):
        seek(page, step)
        assert page.evaluate(RATIO) == []


def test_confidence_is_told_by_pattern_as_well_as_colour(page, served):
    """Without any colour the bands below 0.9 differ in their pattern, and settled from guess in the border."""
    n = 6
    levels = [0.3, 0.6, 0.8, 0.95, 0.995, 0.1]
    served.engine.script = lambda job: [
        shot(range(70, 70 + n), [0] * n, levels, 1), shot(range(70, 70 + n), [1] * n, levels, 2, finish="stop")
    ]  # fmt: skip
    open_page(page, served)
    run(page)
    style = lambda name: page.evaluate(STYLE, name)
    seek(page, 1)
    images = style("backgroundImage")
    assert len({images[0], images[1], images[2], images[3], images[5]}) == 5
    assert style("borderTopStyle") == ["dashed"] * 5 + ["dotted"]
    seek(page, 2)
    assert style("borderTopStyle") == ["solid"] * 6


@pytest.mark.parametrize("width", [360, 768, 1280])
def test_no_width_scrolls_sideways(page, served, width):
    page.set_viewport_size({"width": width, "height": 800})
    open_page(page, served)
    run(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.locator(".main .cell").first.click()
    expect(page.locator("#inspector h2")).to_have_text("Token 1")


def test_motion_is_left_out_where_it_is_not_wanted(page, served):
    open_page(page, served)
    run(page)
    seek(page, 1)
    fresh = page.locator(".main .cell.fresh").first
    assert fresh.evaluate("c => getComputedStyle(c).animationName") == "none"
    page.emulate_media(reduced_motion="no-preference")
    assert fresh.evaluate("c => getComputedStyle(c).animationName") == "settle"
