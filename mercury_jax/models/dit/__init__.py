"""Diffusion transformers: normalisation modulated by the time of the noise (MDLM, BD3-LM, DUO, GIDD)."""

from mercury_jax.models.dit.config import DiTConfig
from mercury_jax.models.dit.model import build

__all__ = ["DiTConfig", "build"]
