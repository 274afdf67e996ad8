"""Pictures of the playground for docs/serving.md, by default in docs/results, and the recording that opens the page.

Run with `python -m qa.browser.screenshots [FOLDER]`.

The embedded model solves a Sudoku and adds two numbers, beside the same weights left to right; the figures
in the pictures are those of that run. Needs playwright, and Debian's Chromium or the one that CHROMIUM names.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path

import mercury_jax as mj
from mercury_jax.serve.engine.engine import Engine
from mercury_jax.serve.engine.request import EngineConfig
from mercury_jax.serve.playground.app import STATIC
from qa.browser.conftest import ARGS
from qa.browser.seeing import open_page, run, seek
from tests.serve.playground.served import Served

SIZE = {"width": 1400, "height": 860}


def main(folder: Path) -> None:
    from playwright.sync_api import sync_playwright

    path = os.environ.get("CHROMIUM") or shutil.which("chromium")
    with (
        Served(Engine(mj.load(), EngineConfig(slots=4))) as served,
        sync_playwright() as playwright,
    ):
        while not served.engine.compiled:  # the smaller programs, which short requests run in
            time.sleep(0.1)
        browser = playwright.chromium.launch(executable_path=path, args=ARGS)
        light, dark = (
            browser.new_page(viewport=SIZE, color_scheme=scheme, reduced_motion="reduce")
            for scheme in ("light", "dark")
        )
        record(light, served)
        for page, name in ((light, "Sudoku"), (dark, "Addition")):
            open_page(page, served)
            page.get_by_role("button", name=name).click()
            run(page)
            run(page)  # the first one may have waited for something
        seek(light, 1)
        choose(light, "main", 15)
        light.screenshot(path=folder / "playground-denoising.png")
        choose(dark, "main", 28)
        dark.screenshot(path=folder / "playground-finished.png")
        browser.close()


def record(page, served) -> None:
    """Write the runs of the first example, as the page exports them, to the file that it shows at first sight."""
    open_page(page, served)
    run(page)
    run(page)
    with page.expect_download() as file:
        page.click("#export")
    runs = json.loads(file.value.path().read_text())
    (STATIC / "demo.json").write_text(json.dumps(runs, separators=(",", ":"), ensure_ascii=False) + "\n")


def choose(page, run: str, index: int) -> None:
    """Click a cell, and wait for its five likeliest tokens."""
    page.locator(f".{run} .cell").nth(index).click()
    page.wait_for_selector(".bars li", timeout=120_000)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/results"))
