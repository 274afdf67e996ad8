"""Kernels for Hopper (sm_90a) in Mosaic GPU: attention over key ranges, and the grouped product.

Attention uses wgmma, TMA and a producer warpgroup. One program has 64 or 128 rows (heads of a group times queries) of
one key head and walks over its share of the key tiles that any of its rows attends to. Softmax is computed online in
registers (FlashAttention-2 and -3, arXiv 2307.08691 and 2407.08608). Head size 512 divides the work differently
(`head_dim_512`). If there are fewer programs than processors, the keys are split and the parts are merged by
log-sum-exp. For training (`training`) the forward pass lists its key tiles, and two kernels compute gradients
(`gradient`).
"""

from mercury_jax.kernels.hopper.attention import refuses, run

__all__ = ["refuses", "run"]
