"""Programs compiled for chips that are not here, by `make deviceless`: it needs their compilers, and minutes.

MERCURY_DEVICELESS says that they are there; where it is not set, none of this is run.
"""

import functools
import os

import pytest

collect_ignore_glob = [] if os.environ.get("MERCURY_DEVICELESS") else ["test_*.py"]


@pytest.fixture(scope="session")
def compiled():
    """Ask(**how) -> its record; each program is compiled once, in a process of its own."""
    from mercury_jax.bench import compile as compiling
    from mercury_jax.bench.ahead import Ask

    return functools.cache(lambda *names, **how: compiling.compiled(Ask(*names, **how)))
