"""The HTTP surface: Mercury's API, and OpenAI's where the two agree, on Starlette."""

from __future__ import annotations

from mercury_jax.serve.api.app import create_app
from mercury_jax.serve.api.options import Options

__all__ = ["Options", "create_app"]
