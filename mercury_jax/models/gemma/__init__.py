"""Gemma 4's text models and DiffusionGemma: one backbone, encoded causally and denoised in canvases."""

from mercury_jax.models.gemma.config import GemmaConfig
from mercury_jax.models.gemma.model import build

__all__ = ["GemmaConfig", "build"]
