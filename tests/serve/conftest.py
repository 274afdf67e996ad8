"""One engine for all of the server's tests: compiling it is what costs."""

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
    from mercury_jax.serve.engine.types import Settings

    engine = Engine(nano, Settings(slots=3, queue=12, context=256, programs="one", rules=("confidence",)))
    engine.start()
    yield engine
    engine.stop()
