"""Checks that every GPU kernel that a test here interprets makes only TMA copies that a GPU can make."""

import pytest


@pytest.fixture(autouse=True)
def copies():
    """The TMA copies of the kernels that this test has interpreted so far."""
    from tests.ops import tma  # imports JAX, which is first configured by tests/conftest.py

    with tma.checked() as found:
        yield found
