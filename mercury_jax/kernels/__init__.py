"""Attention over key ranges (`attend`) and grouped products (`grouped_matmul`): kernels, plain XLA, and the choice.

Kernels are written in Pallas: `hopper` and `blackwell` by Mosaic GPU, `tpu` by Mosaic TPU. `reference` and `chunked`
run everywhere. `device` decides which kernels a program uses, `checks` remembers which of them passed on a device.
"""

from mercury_jax.kernels.attention import attend, attend_paged, backends
from mercury_jax.kernels.kv_quant import Int8Vectors

__all__ = ["Int8Vectors", "attend", "attend_paged", "backends"]
