"""Fixtures of the server's tests: one engine for all of them, since it compiles slowly; and apps without network."""

import socket

import pytest


@pytest.fixture(scope="session")
def nano():
    """The embedded model."""
    import mercury_jax as mj

    return mj.load()


@pytest.fixture(scope="session")
def engine(nano):
    """nano behind three slots, warm."""
    from mercury_jax.serve.engine.engine import Engine
    from mercury_jax.serve.engine.request import EngineConfig

    engine = Engine(nano, EngineConfig(slots=3, queue=12, context=256, programs="one", rules=("confidence",)))
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture
def scripted_app(nano):
    from tests.serve.api_client import ScriptedApp  # after the session's settings: it imports jax

    return ScriptedApp(nano)


@pytest.fixture
def no_network(monkeypatch):
    """Fails the test if anything opens a connection."""
    tried = []

    def refuse(*args, **kwargs):
        tried.append(args)
        raise OSError("no network in this test")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    yield tried
    assert tried == []
