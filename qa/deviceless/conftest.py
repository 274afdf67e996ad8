"""Programs compiled for chips that are not here, by `make deviceless`: it needs their compilers, and minutes.

MERCURY_DEVICELESS may name a file (`MERCURY_DEVICELESS=records.jsonl make deviceless`): the records of all programs are
added to it.
"""

import functools
import json
import os

import pytest


@pytest.fixture(scope="session")
def compiled():
    """CompileRequest(**how) -> its record; each program is compiled once, in a process of its own."""
    from mercury_jax.bench import compile as compiling

    def one(*names, **how):
        return kept(compiling.compile_for(compiling.CompileRequest(*names, **how)))

    return functools.cache(one)


def kept(record):
    """The record, written down where somebody asked for it."""
    if path := os.environ.get("MERCURY_DEVICELESS"):
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    return record
