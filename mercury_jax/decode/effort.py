"""Effort: how hard to think about an answer, as numbers that a user can read."""

from __future__ import annotations

from typing import NamedTuple

from mercury_jax.config import Plan, refuse
from mercury_jax.decode import rules
from mercury_jax.decode.parts import Part
from mercury_jax.decode.ranges import Above, AtLeast, checked


class Effort(NamedTuple):
    """What an effort stands for.

    thinking: most tokens of thinking before the answer, of a conversation (0: none). p: the probability
    from which a token is accepted. steps: most passes a block may take, as a share of its tokens.
    The room for the answer is never part of this: `max_tokens` is always kept for it.
    """

    thinking: int
    p: float
    steps: float

    def rule(self) -> Part:
        """The rule that accepts at `p`."""
        return rules.threshold(self.p)

    def plan(self, plan: Plan, block: int) -> Plan:
        """The plan with this effort's step budget, where it names none."""
        if plan.steps is not None:
            return plan
        tokens = plan.block or block
        return Plan(
            block=plan.block,
            steps=max(1, round(self.steps * tokens)),
            refresh=plan.refresh,
            revise=plan.revise,
        )


EFFORTS = {
    "instant": Effort(thinking=0, p=0.7, steps=0.25),
    "low": Effort(thinking=128, p=0.8, steps=0.5),
    "medium": Effort(thinking=512, p=0.9, steps=1.0),
    "high": Effort(thinking=2048, p=0.99, steps=1.0),
}


def find(effort: str | Effort | None) -> Effort | None:
    """An effort by its name; an Effort of one's own is taken as it is."""
    if effort is None:
        return None
    if isinstance(effort, Effort):
        checked("Effort.thinking", effort.thinking, AtLeast(0, whole=True))
        checked("Effort.p", effort.p, rules.threshold.ranges["p"])
        checked("Effort.steps", effort.steps, Above(0))
        return effort
    if not isinstance(effort, str) or effort not in EFFORTS:
        raise refuse("effort", effort, ", ".join(EFFORTS) + ", or an Effort")
    return EFFORTS[effort]
