"""Attention over key ranges: `op` has the operation, `xla` its plain forms, the other modules are kernels.

`hopper`: one program has 64 or 128 rows (heads of a group times queries) of one key head and walks over its share of
the key tiles that any of its rows attends to, with wgmma, TMA and a producer warpgroup. Softmax is computed online in
registers (FlashAttention-2 and -3, arXiv 2307.08691 and 2407.08608). Head size 512 divides the work differently
(`hopper_head_dim_512`). If there are fewer programs than processors, the keys are split and the parts are merged by
log-sum-exp. For training (`hopper_training`) the forward pass lists its key tiles, and two kernels compute gradients.
"""
