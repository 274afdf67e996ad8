"""Runs a command and returns what it prints."""

import json

import pytest

from mercury_jax.cli import main


def refused(capsys, *argv: str) -> str:
    """Standard error of a command that must exit with 2 and without a traceback."""
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    return err


def objects(capsys, *argv: str) -> list[dict]:
    """The JSON objects that a command prints, one a line."""
    assert main(argv) == 0
    out = capsys.readouterr().out
    rows = [json.loads(line, parse_constant=pytest.fail) for line in out.splitlines()]
    assert rows and all(isinstance(row, dict) for row in rows)
    return rows
