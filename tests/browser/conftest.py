"""A Chromium, and servers for it to visit. What needs the browser is collected only when it is asked for by path."""

from __future__ import annotations

import os
import shutil
import socket
import threading
from collections.abc import Iterator

import pytest

ARGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


def pytest_ignore_collect(collection_path, config):
    """`make test` leaves the page's tests to `make browser`, which names this folder."""
    asked = any("browser" in str(arg) for arg in config.args)
    return True if collection_path.name.startswith("test_page") and not asked else None


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


class Served:
    """The app of one or several engines behind a real socket, in a thread of this process; `engine` is the first."""

    def __init__(self, engines, options=None):
        import uvicorn

        from mercury_jax.serve.app import create_app
        from mercury_jax.serve.options import ServerOptions
        from mercury_jax.serve.service import as_tuple

        self.engines, self.socket = as_tuple(engines), socket.create_server(("127.0.0.1", 0))
        self.engine = self.engines[0]
        app = create_app(self.engines, options or ServerOptions())
        config = uvicorn.Config(
            app, log_level="warning", lifespan="off", ws="none", timeout_graceful_shutdown=1
        )
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, args=([self.socket],), daemon=True)
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}/"

    def __enter__(self) -> Served:
        for engine in self.engines:
            engine.start()
        self.thread.start()
        return self

    def __exit__(self, *error) -> None:
        for engine in self.engines:
            engine.stop()
        self.server.should_exit = True
        self.thread.join(10)
        self.socket.close()


@pytest.fixture(scope="session")
def lm():
    """The embedded model, one for all tests: they share its compiled programs."""
    import mercury_jax as mj

    return mj.load()


@pytest.fixture
def scripted(lm, request):
    """Makes servers of scripted engines: `scripted(script)`."""
    from tests.browser.scripted import Scripted

    open_ones = []

    def make(script, options=None) -> Served:
        served = Served(Scripted(lm, script), options).__enter__()
        open_ones.append(served)
        return served

    yield make
    if "page" in request.fixturenames:  # it would tell of a server that is gone
        request.getfixturevalue("page").close()
    for served in open_ones:
        served.__exit__()


@pytest.fixture(scope="session")
def nano(lm) -> Iterator[Served]:
    """The embedded model behind the real engine."""
    from mercury_jax.serve.engine.engine import Engine
    from mercury_jax.serve.engine.request import EngineConfig

    with Served(Engine(lm, EngineConfig(slots=4, programs="one"))) as served:
        yield served
