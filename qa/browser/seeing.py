"""What a page shows, as plain values, and what it ought to show."""

from __future__ import annotations

from typing import Any

from mercury_jax.serve.playground.frames import PRECISION
from mercury_jax.viz import label

MASK, UNSURE = "▒", 0.25
CELLS = """run => [...document.querySelectorAll(`.run-card.${run} .cell`)].map(c => ({
    text: c.textContent, classes: [...c.classList], label: c.getAttribute("aria-label")}))"""


def cells(page, run: str = "main") -> list[dict[str, Any]]:
    """The cells of a canvas, in order."""
    return page.evaluate(CELLS, run)


def facts(page, run: str = "main") -> list[tuple[str, str, bool]]:
    """(text, kind, forced) of each cell."""
    kinds = ("noise", "guess", "settled")
    return [
        (c["text"], next(k for k in kinds if k in c["classes"]), "forced" in c["classes"])
        for c in cells(page, run)
    ]


def expected(lm, snapshots) -> list[list[tuple[str, str, bool]]]:
    """The same for each step of a run, from its snapshots alone."""
    out = []
    for snapshot in snapshots:
        step = []
        for token, settled, p, forced in zip(*snapshot[:4], strict=True):
            noise = not settled and round(float(p) * PRECISION) / PRECISION < UNSURE
            text = MASK if noise else visible(label(lm.tokenizer, int(token))[0])
            step.append(
                (text, "settled" if settled else "noise" if noise else "guess", bool(forced) and not noise)
            )
        out.append(step)
    return out


def visible(text: str) -> str:
    marked = text.replace("\n", "↵").replace("\t", "⇥")
    return marked if marked.strip() else marked.replace(" ", "·")


def seek(page, step: int) -> None:
    """Drag the slider to a step."""
    page.locator("#slider").evaluate("(s, k) => { s.value = k; s.dispatchEvent(new Event('input')); }", step)


def run(page, prompt: str | None = None, *, pace: str = "0") -> None:
    """Ask, and wait for the end."""
    start(page, prompt, pace=pace)
    finished(page)


def start(page, prompt: str | None = None, *, pace: str = "0") -> None:
    page.select_option("#pace", pace)
    if prompt is not None:
        page.fill("#prompt", prompt)
    page.click("#run")


def finished(page) -> None:
    from playwright.sync_api import expect

    expect(page.locator(".run-card.main .badge")).to_contain_text("done", timeout=240_000)
    expect(page.locator("#run")).to_contain_text("Run", timeout=240_000)


def open_page(page, served, *unfold: str) -> None:
    """Go there, wait until the form is filled, and unfold parts of it by their ids."""
    page.goto(served.url)
    page.wait_for_selector("#examples .chip")
    for part in unfold:
        page.locator(f"#{part} > summary").click()
