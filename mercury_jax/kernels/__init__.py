"""The one attention op, its reference, and the choice of backend."""

from mercury_jax.kernels.attention import attend, backends
from mercury_jax.kernels.rounded import Rounded

__all__ = ["Rounded", "attend", "backends"]
