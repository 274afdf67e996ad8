"""The corruption process of a model, as a config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mercury_jax.config.checks import one_of, refuse

NoiseKind = Literal["absorbing", "uniform", "hybrid"]
ScheduleName = Literal["linear", "cosine", "polynomial"]


@dataclass(frozen=True, kw_only=True)
class NoiseConfig:
    """The corruption process that a model is trained with; `mercury_jax.noise.build` makes it."""

    kind: NoiseKind = "absorbing"
    schedule: ScheduleName = "linear"
    power: float = 2.0  # of the polynomial schedule
    uniform: float = 0.2  # hybrid: share of uniform noise at t = 1/2 (GIDD's p_u)

    def __post_init__(self) -> None:
        one_of(NoiseKind, kind=self.kind)
        one_of(ScheduleName, schedule=self.schedule)
        if not self.power > 0:
            raise refuse("power", self.power, "more than 0")
        if not 0 <= self.uniform < 1:
            raise refuse("uniform", self.uniform, "0 <= uniform < 1")
