"""What the tests of attacks share: the door that they knock at, and a network that nobody may use."""

import socket

import pytest


@pytest.fixture
def door(nano):
    from tests.serve.api.door import Door  # after the session's settings: it imports jax

    return Door(nano)


@pytest.fixture
def no_network(monkeypatch):
    """Whoever opens a connection is caught."""
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
