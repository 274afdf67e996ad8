"""How an answer is cut into blocks, and what passes may reuse."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real

from mercury_jax.config.checks import at_least, refuse


@dataclass(frozen=True, kw_only=True)
class Refresh:
    """When a bidirectional model may reuse keys and values that are no longer exact.

    The whole canvas runs at the start of each block and, where `every` is a number, each `every`
    steps; the passes between run over the active block with `before` positions before it and
    `after` behind it (None: all), and read the rest from the cache.
    """

    before: int = 0
    after: int | None = 0
    every: int | None = None

    def __post_init__(self) -> None:
        at_least(0, before=self.before, after=0 if self.after is None else self.after)
        at_least(1, every=1 if self.every is None else self.every)

    @classmethod
    def prefix(cls, every: int | None = None) -> Refresh:
        """Fast-dLLM's prefix cache (arXiv 2505.22618): what stands before the block is reused."""
        return cls(after=None, every=every)

    @classmethod
    def dual(cls, every: int | None = None) -> Refresh:
        """Fast-dLLM's dual cache: what stands behind the block is reused too."""
        return cls(every=every)

    @classmethod
    def vicinity(cls, look: int = 16, every: int | None = None) -> Refresh:
        """dInfer's vicinity refresh: `look` positions on either side of the block are recomputed."""
        return cls(before=look, after=look, every=every)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How an answer is cut into blocks, how many passes each may take, and what is reused between them.

    block: tokens of an active block (None: the model's own). steps: passes a block may take
    (None: as many as it has tokens; 1 where drafts are verified). refresh: reuse of keys in a
    bidirectional model (None: every pass computes the whole sequence; the other patterns need none,
    their cache is exact). revise: settled blocks before the active one that stay editable
    (bidirectional models; LLaDA2.1's multi-block editing).
    """

    block: int | None = None
    steps: int | None = None
    refresh: Refresh | None = None
    revise: int = 0

    def __new__(cls, *args: object, **fields: object) -> Plan:
        if args:
            raise refuse("Plan() argument", args[0], "named ones: Plan(block=, steps=, refresh=, revise=)")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name in ("block", "steps"):
            value = getattr(self, name)
            if value is not None and (not _whole(value) or value < 1):
                raise refuse(name, value, "a whole number from 1 on, or None")
        if self.refresh is not None and not isinstance(self.refresh, Refresh):
            raise refuse("refresh", self.refresh, "a Refresh, such as Refresh.dual(), or None")
        if not _whole(self.revise) or self.revise < 0:
            raise refuse("revise", self.revise, "a whole number from 0 on")


def _whole(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and value == value // 1
