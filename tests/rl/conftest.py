"""What the runs of these tests start from. JAX is imported inside: tests/conftest.py chooses its platform first."""

import dataclasses

import pytest


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A tiny model as a folder that runs start from."""
    import mercury_jax as mj
    from tests.tiny import tiny

    folder = tmp_path_factory.mktemp("start") / "model"
    mj.hub.save(folder, dataclasses.replace(tiny(), name="tiny"), mj.NoiseConfig())
    return str(folder)
