"""A server to attack: a real process on the loopback, with a small random model.

MERCURY_FUZZ says how many cases there are of an operation; the default, 40, is a short form.
"""

import dataclasses
import os

import pytest

from benchmarks import serving_process

MODEL = "tiny"
SETTINGS = {
    "slots": 4, "queue": 256, "context": 256, "programs": "one", "rules": ["threshold"], "prefix_bytes": 4 << 20,
}  # fmt: skip


@pytest.fixture(scope="session")
def cases():
    """Cases of an operation: 1,000 in full, some dozens for a short form."""
    return int(os.environ.get("MERCURY_FUZZ", "40"))


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    from mercury_jax import hub
    from mercury_jax.config import NoiseConfig
    from tests.tiny import tiny

    folder = tmp_path_factory.mktemp("models") / MODEL
    hub.save(folder, dataclasses.replace(tiny(), name=MODEL), NoiseConfig(kind="absorbing"))
    options = {"read_timeout": 8.0, "effort": "instant"}  # fewer passes: what is asked for matters here
    with serving_process.server(str(folder), SETTINGS, options) as own:
        yield own
