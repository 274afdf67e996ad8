"""One engine for all tests of the server, since its compilation takes most of their time."""

import pytest


@pytest.fixture(scope="session")
def nano():
    """The embedded model."""
    import mercury_jax as mj

    return mj.load()


@pytest.fixture(scope="session")
def engine(nano):
    """The embedded model with three slots, compiled."""
    from mercury_jax.serve.engine.engine import Engine
    from mercury_jax.serve.engine.request import EngineConfig

    engine = Engine(nano, EngineConfig(slots=3, queue=12, context=256, programs="one", rules=("confidence",)))
    engine.start()
    yield engine
    engine.stop()
