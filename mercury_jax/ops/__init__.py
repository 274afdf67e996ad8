"""Operations with kernels: attention over key ranges, grouped products and routing of experts, and fused norms.

Each folder has an `op` (signature and record of the operation), device code by chip (Pallas: Mosaic GPU on `hopper` and
`blackwell`, Mosaic TPU on `tpu`), and `cases`, the shapes at which its kernels are checked, compiled and tuned.
`operation` decides which implementation a program gets: by default the kernels that passed their check on this device
(`device`), with the settings that were measured for it (`tuned`).
"""

from mercury_jax.ops.attention.inputs import Fp8Vectors, Int8Vectors
from mercury_jax.ops.attention.op import attend, attention_kernel, backends

__all__ = ["Fp8Vectors", "Int8Vectors", "attend", "attention_kernel", "backends"]
