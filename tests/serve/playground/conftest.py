"""Servers of scripted engines for the playground's tests."""

import pytest


@pytest.fixture(scope="session")
def lm(nano):
    return nano


@pytest.fixture
def scripted(lm):
    """Makes servers of scripted engines: `scripted(script)`."""
    from tests.serve.playground.served import scripted_servers  # after the session's settings: it imports jax

    with scripted_servers(lm) as make:
        yield make
