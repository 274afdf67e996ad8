"""Denoisers: `build(config)` gives the record of pure functions that the rest of the house knows."""

from mercury_jax.models.transformer import build

__all__ = ["build"]
