"""A Chromium, and servers for it to visit."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # it imports jax, for which the session first chooses a platform
    from tests.serve.playground.served import Served

ARGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.fixture(scope="session")
def chromium():
    """Debian's browser, or the one that CHROMIUM names."""
    from playwright.sync_api import sync_playwright

    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    assert path, "no Chromium found: apt-get install chromium, or set CHROMIUM to one"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGS)
        yield browser
        browser.close()


@pytest.fixture
def page(chromium):
    """A page that fails its test for any error in the console, a broken security policy included."""
    context = chromium.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    context.set_default_timeout(20_000)
    page = context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda m: wrong.append(m.text) if m.type == "error" else None)
    page.wrong = wrong
    yield page
    context.close()
    assert wrong == []


@pytest.fixture(scope="session")
def lm():
    """The embedded model, one for all tests: they share its compiled programs."""
    import mercury_jax as mj

    return mj.load()


@pytest.fixture
def scripted(lm, request):
    """Makes servers of scripted engines: `scripted(script)`."""
    from tests.serve.playground.served import scripted_servers

    with scripted_servers(lm) as make:
        yield make
        if "page" in request.fixturenames:  # it would report the end of its server as an error
            request.getfixturevalue("page").close()


@pytest.fixture(scope="session")
def nano(lm) -> Iterator[Served]:
    """The embedded model behind the real engine."""
    from mercury_jax.serve.engine.engine import Engine
    from mercury_jax.serve.engine.request import EngineConfig
    from tests.serve.playground.served import Served

    with Served(Engine(lm, EngineConfig(slots=4, programs="one"))) as served:
        yield served
