"""Serving: slots of one device program behind Mercury's API."""
