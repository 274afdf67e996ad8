"""Servers to put under load: real processes on the loopback, with the embedded model.

MERCURY_LOAD says how many clients there are; where it is not set, none of this is run.
"""

import os

import pytest

from mercury_jax.bench import serve_process

ENOUGH = os.environ.get("MERCURY_LOAD", "")
collect_ignore_glob = [] if ENOUGH else ["test_*.py"]

# One program for all requests: their texts do not depend on what runs beside them, bit for bit.
SETTINGS = {"slots": 8, "programs": "one", "rules": ["threshold"], "context": 192}
# The test session compiles quickly what then runs slowly; a server under load is compiled for its work.
FLAGS = {"XLA_FLAGS": "--xla_backend_optimization_level=1 --xla_llvm_disable_expensive_passes=true"}


@pytest.fixture(scope="session")
def clients():
    """How many clients there are: 1,000 in full, some dozens for a short form."""
    return int(ENOUGH)


@pytest.fixture(scope="module")
def wide(clients):
    """A server whose queue has room for everyone."""
    with serve_process.server(settings=SETTINGS | {"queue": 2 * clients}, env=FLAGS) as own:
        yield own


@pytest.fixture(scope="module")
def narrow():
    """A server of four slots and a short queue."""
    with serve_process.server(settings=SETTINGS | {"slots": 4, "queue": 12}, env=FLAGS) as own:
        yield own
