"""Programs compiled for chips that are not here, by `make deviceless`: it needs their compilers, and minutes.

MERCURY_DEVICELESS says that they are there; where it is not set, none of this is run. It may name a file
(`MERCURY_DEVICELESS=records.jsonl make deviceless`): there the records of all programs are kept.
"""

import functools
import json
import os

import pytest

collect_ignore_glob = [] if os.environ.get("MERCURY_DEVICELESS") else ["test_*.py"]


@pytest.fixture(scope="session")
def compiled():
    """CompileRequest(**how) -> its record; each program is compiled once, in a process of its own."""
    from mercury_jax.bench import compile as compiling

    def one(*names, **how):
        return kept(compiling.compile_for(compiling.CompileRequest(*names, **how)))

    return functools.cache(one)


def kept(record):
    """The record, written down where somebody asked for it."""
    path = os.environ.get("MERCURY_DEVICELESS", "")
    if path.endswith(".jsonl"):
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    return record
