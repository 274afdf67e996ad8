"""Reuse of keys in a bidirectional model: each policy against computing everything in every pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mercury_jax.bench import decode, rows
from mercury_jax.bench.decode import Entry
from mercury_jax.bench.questions import Asked
from mercury_jax.config import Plan, Refresh, refuse
from mercury_jax.decode import rules
from mercury_jax.types import LM

NONE = "no cache"

POLICIES: dict[str, Refresh | None] = {
    NONE: None,
    "prefix": Refresh.prefix(),
    "dual": Refresh.dual(),
    "dual, every 4 steps": Refresh.dual(every=4),
    "vicinity of 8": Refresh.vicinity(8),
    "vicinity of 8, every 4 steps": Refresh.vicinity(8, every=4),
}


def entries(lm: LM, block: int, steps: int | None = None) -> list[Entry]:
    """One entry a policy, decoding in blocks by LLaDA's schedule; the first computes everything."""
    if lm.model.config.pattern != "bidirectional":
        raise refuse(
            "model.pattern", lm.model.config.pattern, "bidirectional: the cache of the others is exact"
        )
    plan = lambda refresh: Plan(block=block, steps=steps, refresh=refresh)
    return [Entry(name, name, lm, rules.confidence, plan(refresh)) for name, refresh in POLICIES.items()]


def run(
    lm: LM,
    asked: Sequence[Asked],
    *,
    block: int = 16,
    steps: int | None = None,
    tick: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """A row for each task and policy: accuracy, agreement with no cache, speed over no cache."""
    found = entries(lm, block, steps)
    made = []
    for one in asked:
        for row in rows.rows(decode.run(found, one, tick), one):
            made.append({"cache": row.pop("rule"), "block": block, **row, "compared_with": NONE})
    return made
