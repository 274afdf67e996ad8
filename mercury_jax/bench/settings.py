"""What is measured: each rule at a few values of the knob that trades accuracy for speed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mercury_jax.config import Plan, at_least, refuse
from mercury_jax.decode import rules

Point = tuple[dict[str, float], Plan]  # arguments of the maker, and the plan


def _along(**knobs: tuple[float, ...]) -> tuple[Point, ...]:
    """One point for each place of the knobs' values, which move together."""
    return tuple((dict(zip(knobs, values)), Plan()) for values in zip(*knobs.values(), strict=True))


def _steps(*counts: int) -> tuple[Point, ...]:
    return tuple(({}, Plan(steps=n)) for n in counts)


AS_IT_IS: tuple[Point, ...] = (({}, Plan()),)

# Fewest passes first. A rule that is not here runs once, as it is. Rules that use every step they are given get
# fewer than tokens: they would take most of the time of a run, and one token a step is the baseline.
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
class Setting:
    """A rule by name, the knobs that were chosen, and the plan it runs with."""

    rule: str
    chosen: Mapping[str, float] = field(default_factory=dict)
    plan: Plan = Plan()

    def sampler(self) -> Any:
        """The rule or the Sampler; ValueError where a knob has no value that serves every model."""
        return rules.ALL[self.rule](**self.chosen)

    @property
    def knobs(self) -> dict[str, float]:
        """Every knob that is a number, defaults included."""
        known = getattr(rules.ALL[self.rule], "params", {})
        every = {**known, **self.chosen}
        return {k: v for k, v in every.items() if isinstance(v, int | float) and not isinstance(v, bool)}

    @property
    def text(self) -> str:
        """`threshold(p=0.9)`, and the plan behind it where it is not the model's own."""
        steps = "" if self.plan.steps is None else f" in {self.plan.steps} steps"
        return f"{self.rule}({_pairs(self.knobs)}){steps}"

    @property
    def code(self) -> str:
        """Python to paste into a call of `mj.sample`: its sampler, and its plan where one was set."""
        made = f"mj.rules.{self.rule}({_pairs(self.knobs)})"
        plan = {k: v for k, v in (("block", self.plan.block), ("steps", self.plan.steps)) if v is not None}
        return f"sampler={made}, plan=mj.Plan({_pairs(plan)})" if plan else made


def settings(names: Iterable[str] | None = None, points: int | None = None) -> list[Setting]:
    """The settings of the named rules (None: of all that there are), in the order of the names.

    points: at most so many of each rule, the strictest (None: all).
    """
    if points is not None:
        at_least(1, points=points)
    chosen = list(rules.ALL) if names is None else list(dict.fromkeys(names))
    for name in chosen:
        if name not in rules.ALL:
            near = difflib.get_close_matches(name, rules.ALL, n=1, cutoff=0.3)
            hint = f"{near[0]} is the nearest; all: " if near else ""
            raise refuse("rules", name, hint + ", ".join(rules.ALL))
    return [Setting(name, *point) for name in chosen for point in GRID.get(name, AS_IT_IS)[-(points or 0) :]]


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{k}={v}" for k, v in values.items())
