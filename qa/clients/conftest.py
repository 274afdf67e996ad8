"""The address of the server. Without one there is nothing to test: `make clients` starts it, `make test` does not."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Callable

import pytest

collect_ignore_glob = [] if "MERCURY_URL" in os.environ else ["test_*.py"]


@pytest.fixture(scope="session")
def url() -> str:
    """Without a path; `/v1` stands behind it for OpenAI's clients."""
    return os.environ["MERCURY_URL"]


@pytest.fixture(scope="session")
def base(url: str) -> str:
    return f"{url}/v1"


@pytest.fixture(scope="session")
def metric(url: str) -> Callable[[str], float]:
    """A number of `/metrics`, as it is now."""

    def read(name: str) -> float:
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))

    return read
