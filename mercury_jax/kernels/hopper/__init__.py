"""Attention over key ranges for Hopper (sm_90a): wgmma, TMA and a warpgroup that only feeds.

One program has 64 or 128 rows (heads of a group times queries) of one key head and walks its share of the key tiles
that any of its rows sees. Softmax is kept running in registers (FlashAttention-2 and -3, arXiv 2307.08691 and
2407.08608); head size 512 divides the work in its own way (`wide`). Where there are fewer programs than processors
the keys are split, and the parts merged by log-sum-exp.
"""

from mercury_jax.kernels.hopper.launch import refuses, run

__all__ = ["refuses", "run"]
