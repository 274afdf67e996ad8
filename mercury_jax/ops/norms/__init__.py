"""Residual sums with the norms that read them, rounding of rows, and head norms with RoPE and the cache write."""
