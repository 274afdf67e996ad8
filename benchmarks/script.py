"""What the scripts share as commands: an option of several numbers, and errors and exit codes as those of `mercury`."""

from __future__ import annotations

import sys
from typing import Annotated

from tyro.constructors import PrimitiveConstructorSpec

from mercury_jax.cli import app


def _whole_numbers(words: list[str]) -> tuple[int, ...]:
    try:
        return tuple(map(int, words))
    except ValueError:
        raise ValueError(f"is {' '.join(words)!r}; allowed: whole numbers") from None


Ints = Annotated[
    tuple[int, ...],
    PrimitiveConstructorSpec(
        nargs="*", metavar="N [N ...]", instance_from_str=_whole_numbers, is_instance=lambda value: True,
        str_from_instance=lambda value: [str(x) for x in value],
    ),
]  # fmt: skip


def run_script(command: app.Command) -> int:
    """Runs a command that is a script of its own, such as `python -m benchmarks.repair`, as `mercury` runs one."""
    app.cache_compiled_programs()
    return app.execute(command, sys.argv[1:])
