"""What `mercury bench decode` measures: each rule at a few values of the parameter that trades accuracy for speed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mercury_jax.config import Plan, at_least, nearest, refuse
from mercury_jax.decode import rules

Point = tuple[dict[str, float], Plan]  # parameters of the rule, and the plan


def _along(**parameters: tuple[float, ...]) -> tuple[Point, ...]:
    """One point for each place in the values of the parameters, which change together."""
    values = zip(*parameters.values(), strict=True)
    return tuple((dict(zip(parameters, point)), Plan()) for point in values)


def _steps(*counts: int) -> tuple[Point, ...]:
    """One point for each number of denoising steps of a block."""
    return tuple(({}, Plan(steps=n)) for n in counts)


DEFAULTS: tuple[Point, ...] = (({}, Plan()),)

# Fewest steps first. A rule that is not listed is measured once, with its defaults. Rules that use every step they are
# given get fewer steps than tokens: they would take most of the time of a run, and one token per step is the baseline.
GRID: dict[str, tuple[Point, ...]] = {
    "confidence": _steps(4, 8, 16),
    "random": _steps(4, 8),
    "ancestral": _steps(4, 8),
    "dream_origin": _steps(4, 8),
    "maskgit_plus": _steps(4, 8),
    "topk_margin": _steps(4, 8),
    "dream_entropy": _steps(4, 8),
    "remdm_cap": _steps(12),
    "remdm_rescale": _steps(12),
    "remdm_confidence": _steps(12),
    "remdm_loop": _steps(12),
    "predictor_corrector": _steps(16),
    "threshold": _along(p=(0.7, 0.9, 0.95, 0.99)),
    "entropy_bound": _along(gamma=(1.0, 0.1, 0.01)),
    "factor": _along(f=(1.0, 0.3)),
    "scheduled": _along(p=(0.95, 0.99)),
    "local_leap": _along(p=(0.9, 0.99), relaxed=(0.75, 0.95)),
    "hierarchical": _along(p=(0.9, 0.99), low=(0.4, 0.8)),
    "credit": _along(p=(0.9, 0.99)),
    "klass": _along(p=(0.9, 0.99)),
    "slow_fast": _along(p=(0.9, 0.99)),
    "wino": _along(p=(0.6, 0.9)),
    "editing": _along(p=(0.95, 0.99)),
    "blind_editing": _along(p=(0.95, 0.99)),
    "self_correct": _along(p=(0.9, 0.99)),
    "levenshtein": _along(p=(0.9, 0.99)),
    "self_speculation": _along(draft=(31, 7)),
}


@dataclass(frozen=True)
class SweepPoint:
    """A rule by name, with some of its parameters and the plan it runs with."""

    rule: str
    chosen: Mapping[str, float] = field(default_factory=dict)
    plan: Plan = Plan()

    def sampler(self) -> Any:
        """The rule, or the `Sampler` it makes. ValueError where a parameter has no default."""
        return rules.ALL[self.rule](**self.chosen)

    @property
    def parameters(self) -> dict[str, float]:
        """Every parameter that is a number, defaults included."""
        every = {**getattr(rules.ALL[self.rule], "params", {}), **self.chosen}
        return {k: v for k, v in every.items() if isinstance(v, int | float) and not isinstance(v, bool)}

    @property
    def text(self) -> str:
        """Such as "threshold(p=0.9)", followed by the steps where the plan sets them."""
        steps = "" if self.plan.steps is None else f" in {self.plan.steps} steps"
        return f"{self.rule}({_pairs(self.parameters)}){steps}"

    @property
    def code(self) -> str:
        """Python to paste into a call of `mj.sample`: the sampler, and the plan where one was set."""
        made = f"mj.rules.{self.rule}({_pairs(self.parameters)})"
        plan = {k: v for k, v in (("block", self.plan.block), ("steps", self.plan.steps)) if v is not None}
        return f"sampler={made}, plan=mj.Plan({_pairs(plan)})" if plan else made


def sweep(names: Iterable[str] | None = None, points: int | None = None) -> list[SweepPoint]:
    """The points of the named rules.

    Args:
        names: Rules in the order of the result; None for all registered ones.
        points: At most this many of each rule, the most careful ones; None for all.

    Returns:
        Points of each rule, those with the fewest steps first.

    Raises:
        ValueError: An unknown rule, with the nearest one.
    """
    if points is not None:
        at_least(1, points=points)
    chosen = list(rules.ALL) if names is None else list(dict.fromkeys(names))
    for name in chosen:
        if name not in rules.ALL:
            raise refuse("rules", name, nearest(name, list(rules.ALL)))
    return [
        SweepPoint(name, *point) for name in chosen for point in GRID.get(name, DEFAULTS)[-(points or 0) :]
    ]


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{k}={v}" for k, v in values.items())
