"""Decoding: one state machine under sample(), stream(), infill() and score()."""
