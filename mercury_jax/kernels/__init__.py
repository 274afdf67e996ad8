"""The one attention op, its reference, and the choice of backend."""

from mercury_jax.kernels.attention import attend, backends

__all__ = ["attend", "backends"]
