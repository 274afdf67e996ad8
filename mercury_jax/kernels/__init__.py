"""Attention over key ranges (`attend`) and grouped products (`grouped_matmul`): kernels, plain XLA, and the choice.

Kernels are written in Pallas: `hopper` and `blackwell` with Mosaic GPU, `tpu` with Mosaic TPU. `reference` and
`chunked` run everywhere. `device` decides which kernels a program uses: those that passed their check on the device.
"""

from mercury_jax.kernels.attention import attend, attend_paged, backends
from mercury_jax.kernels.attention_inputs import Int8Vectors

__all__ = ["Int8Vectors", "attend", "attend_paged", "backends"]
