"""Frozen, keyword-only configurations; each checks itself when it is built."""

from mercury_jax.config.checks import at_least, check_types, from_dict, nearest, one_of, refuse, to_dict
from mercury_jax.config.decoding import Plan, Refresh
from mercury_jax.config.model import ComputeType, Experts, ModelConfig, Pattern, RopeScaling
from mercury_jax.config.noise import NoiseConfig, NoiseKind, ScheduleName

__all__ = [
    "ComputeType",
    "Experts",
    "ModelConfig",
    "NoiseConfig",
    "NoiseKind",
    "Pattern",
    "Plan",
    "Refresh",
    "RopeScaling",
    "ScheduleName",
    "at_least",
    "check_types",
    "from_dict",
    "nearest",
    "one_of",
    "refuse",
    "to_dict",
]
