"""Measurements: each prints one row and says what it was compared with, on what, in the same run."""
