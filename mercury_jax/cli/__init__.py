"""The command line, `mercury COMMAND`: `app` finds the command, and each command is one module.

`arguments` reads the words with tyro; `show` prints, and `viz.terminal` draws a canvas while it is denoised.
"""

from mercury_jax.cli.app import main

__all__ = ["main"]
