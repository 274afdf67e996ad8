"""Servers under load: real processes on the loopback, with the embedded model.

MERCURY_LOAD is the number of clients; the default, 60, is a short form.
"""

import os

import pytest

from benchmarks import serving_process

# One bucket for all requests, so that their texts do not depend on their neighbours, bit for bit.
SETTINGS = {"slots": 8, "programs": "one", "rules": ["threshold"], "context": 192}
# The test session compiles fast and slow-running programs; a server under load needs optimised ones.
FLAGS = {"XLA_FLAGS": "--xla_backend_optimization_level=1 --xla_llvm_disable_expensive_passes=true"}


@pytest.fixture(scope="session")
def clients():
    """Number of clients: 1,000 for the full test, some dozens for a short one."""
    return int(os.environ.get("MERCURY_LOAD", "60"))


@pytest.fixture(scope="module")
def large_server(clients):
    """A server whose queue accepts all clients."""
    with serving_process.server(settings=SETTINGS | {"queue": 2 * clients}, env=FLAGS) as own:
        yield own


@pytest.fixture(scope="module")
def small_server():
    """A server of four slots and a short queue."""
    with serving_process.server(settings=SETTINGS | {"slots": 4, "queue": 12}, env=FLAGS) as own:
        yield own
