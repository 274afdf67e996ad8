"""Checkpoints of a run (`Saver`, `restore`) and folders of a saved model (`export`, `load_exported`).

Both contain the configuration and a manifest of SHA-256 checksums, which is verified before anything else is read. A
damaged file raises `CheckpointError`, whose message names it.
"""

from mercury_jax.checkpoint.export import Exported, export, load_exported
from mercury_jax.checkpoint.manifest import CheckpointError, SaveFailed, unfit, verify
from mercury_jax.checkpoint.saver import Saver, clean, inspect, latest, path_of, restore, steps

__all__ = [
    "CheckpointError", "Exported", "SaveFailed", "Saver", "clean", "export", "inspect", "latest",
    "load_exported", "path_of", "restore", "steps", "unfit", "verify",
]  # fmt: skip
