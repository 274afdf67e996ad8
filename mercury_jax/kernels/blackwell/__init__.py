"""Attention over key ranges for Blackwell (sm_100a): tcgen05, TMA and a warpgroup that only feeds.

One program has 128 rows (heads of a group times queries) of one key head and walks its share of the key tiles that
any of its rows sees. Scores, weights and the sum of values are in tensor memory; the product for the next tile's
scores runs while a tile's softmax is taken (FlashAttention-3, arXiv 2407.08608), and so does the one before's
product with its values. Keys are split, and their parts merged, as on Hopper.
"""

from mercury_jax.kernels.blackwell.launch import refuses, run

__all__ = ["refuses", "run"]
