"""Continuous batching of one model: requests in, snapshots of their answers out."""
