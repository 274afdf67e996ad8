"""Mixture of experts: their choice, the copies of tokens for them, and grouped matrix products."""
