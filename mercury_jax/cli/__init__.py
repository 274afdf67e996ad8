"""The command line: `mercury demo | sample | infill | train | eval | info`.

`app` dispatches and turns errors into words; each command is one module with `run(argv) -> exit code`.
JAX is imported inside of `run`, after the words are read, so that `--help` answers at once.
"""

from mercury_jax.cli.app import main

__all__ = ["main"]
