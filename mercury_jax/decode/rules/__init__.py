"""Decoding rules: each one pure function of one row's `View` and its own memory."""

from mercury_jax.decode.rules.masked import ancestral, confidence, random, threshold
from mercury_jax.decode.rules.uniform import entropy_bound

ALL = {r.__name__: r for r in (confidence, threshold, random, ancestral, entropy_bound)}

__all__ = ["ALL", "ancestral", "confidence", "entropy_bound", "random", "threshold"]
