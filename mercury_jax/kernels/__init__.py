"""Attention over key ranges (`attend`) and grouped matrix products (`grouped_matmul`), as kernels and in plain XLA.

Kernels are written in Pallas: `hopper` and `blackwell` with Mosaic GPU, `tpu` with Mosaic TPU. `reference` and
`chunked` are plain XLA and run on every platform. `device` decides which kernels a program uses: by default those that
passed their check on this device.
"""

from mercury_jax.kernels.attention import attend, attention_kernel, backends
from mercury_jax.kernels.attention_inputs import Fp8Vectors, Int8Vectors

__all__ = ["Fp8Vectors", "Int8Vectors", "attend", "attention_kernel", "backends"]
