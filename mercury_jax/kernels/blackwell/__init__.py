"""Attention over key ranges for Blackwell (sm_100a) in Mosaic GPU: tcgen05, TMA and a producer warpgroup.

One program has 128 rows (heads of a group times queries) of one key head and walks over its share of the key tiles
that any of its rows attends to. Scores, weights and the sum of values are in tensor memory. The product for the next
tile's scores runs while the softmax of a tile is computed (FlashAttention-3, arXiv 2407.08608), and so does the
previous tile's product with its values. Keys are split, and their parts merged, as on Hopper.
"""

from mercury_jax.kernels.blackwell.attention import refuses, run

__all__ = ["refuses", "run"]
