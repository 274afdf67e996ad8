"""Checkpoint families: where parameters come from. `native` is our own exported folder."""

from mercury_jax.hub.native import load, save

__all__ = ["load", "save"]
