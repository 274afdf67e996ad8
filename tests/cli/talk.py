"""What a command says: words on standard error, JSON objects on standard output."""

import json

import pytest

from mercury_jax.cli import main


def refused(capsys, *argv: str) -> str:
    """What stands on standard error, after exit code 2 and no traceback."""
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    return err


def objects(capsys, *argv: str) -> list[dict]:
    """The lines of standard output, each of which must be a JSON object."""
    assert main(argv) == 0
    out = capsys.readouterr().out
    rows = [json.loads(line, parse_constant=pytest.fail) for line in out.splitlines()]
    assert rows and all(isinstance(row, dict) for row in rows)
    return rows
