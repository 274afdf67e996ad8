"""The way to the end: a shortest completion of what is written, by a beam search over bytes.

In bytes a grammar has a few hundred ways to go on instead of a hundred thousand, whatever the
vocabulary. Of the states with as many bytes behind them, those that allow the same bytes next count as
one; of each such group those that are furthest on in the structure are kept. The answer's tokens are
the fewest that spell the bytes found. A search may miss a way, so that what it finds is an upper bound;
that it *is* a way is verified by the caller on the real tokens.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mercury_jax.decode.grammar.vocabulary import NOTHING, Spelling, Unit, Vocabulary

_WAYS = 3  # of one state
MOST_DEPTH = 96  # brackets that a completion opens inside of each other
RUN = 64  # bytes of filler taken at once

# Where JSON stands: (open brackets, inside of a text 1, behind a backslash 2; what is done: closed texts,
# separators, brackets).
Lex = tuple[int, int, int]
START: Lex = (0, 0, 0)


def lexed(lex: Lex, units: Iterable[Unit]) -> Lex:
    """Where JSON stands behind these units."""
    depth, inside, marks = lex
    for unit in units:
        if inside:
            if inside == 2:
                inside = 1
            elif unit == 0x22:
                inside, marks = 0, marks + 1
            elif unit == 0x5C:
                inside = 2
        elif unit == 0x22:
            inside = 1
        elif unit in (0x7B, 0x5B):
            depth += 1
        elif unit in (0x7D, 0x5D):
            depth, marks = depth - 1, marks + 1
        elif unit in (0x2C, 0x3A) or unit > 255:
            marks += 1
    return depth, inside, marks


class Effort(NamedTuple):
    """How far to search. first: take the first completion that fits, not the shortest. leaps: what is forced is a
    single step, however long; a quarter fewer nodes for a completion of a few bytes more."""

    width: int
    nodes: int
    first: bool = False
    leaps: bool = False


QUICK = Effort(4, 400, first=True, leaps=True)
ANY = Effort(3, 12_000, first=True)  # at the start of a grammar
BEST = Effort(24, 4_000)


def _never() -> bool:
    return False


class _Node(NamedTuple):
    matcher: Any
    lex: Lex
    mask: bytes
    chain: tuple[bytes, ...]  # macros taken inside of the text that is open
    path: Any  # (path before, units), or None
    spelling: Spelling | None  # where few tokens matter more than a quick answer

    @property
    def rank(self) -> tuple[int, int]:
        """How far on it is, and in how many tokens: least is best."""
        return -self.lex[2], 0 if self.spelling is None else self.spelling.costs[-1]

    def allows(self, unit: Unit) -> bool:
        return bool(self.mask[unit >> 3] >> (unit & 7) & 1)

    def units(self) -> list[Unit]:
        parts, path = [], self.path
        while path is not None:
            path, units = path
            parts.append(units)
        return [unit for part in reversed(parts) for unit in part]


class Search:
    """Searches for ends, and what they learn; a `branch` learns for itself, so that no answer depends on others.

    macros: texts to try as a whole, where the next byte alone does not show that it leads on.
    """

    def __init__(
        self, vocabulary: Vocabulary, macros: Sequence[list[Unit]], known: Mapping[bytes, list[Unit]]
    ):
        self.vocabulary, self.macros, self._known = vocabulary, macros, known
        self.run = vocabulary.fill[:1] * RUN
        self.missed = (
            False  # something was left out: that nothing was found does not say that there is nothing
        )
        self.trouble = ""  # what llguidance said where a state was too much for it
        self._new: dict[bytes, list[Unit]] = {}
        self._led: dict[bytes, deque[list[Unit]]] = {}

    def branch(self) -> Search:
        """A search that begins with what this one knows."""
        return Search(self.vocabulary, self.macros, self._new)

    def ways(self, mask: bytes) -> Iterable[list[Unit]]:
        """Units that led from a state of this mask to a bridge before, or to the end; the last ones first."""
        return self._led.get(mask, ())

    def learn(self, mask: bytes, plan: list[Unit], bridges: Sequence[list[Unit]]) -> None:
        """Remember how a plan was found from a state of this mask."""
        bridge = next((b for b in bridges if b and plan[-len(b) :] == b), [])
        way = plan[: len(plan) - len(bridge)]
        known = self._led.setdefault(mask, deque(maxlen=_WAYS))
        if way not in known:
            known.appendleft(way)

    def find(
        self,
        start: Any,
        lex: Lex,
        room: int,
        effort: Effort,
        bridges: Sequence[list[Unit]] = (),
        late: Callable[[], bool] = _never,
    ) -> list[Unit] | None:
        """Searches for a completion of a byte matcher.

        Args:
            start: The matcher; left as it is.
            lex: Where JSON stands there.
            room: Most tokens of the completion.
            effort: How far to search.
            bridges: Ends that completed the text before; a path that reaches one of them is complete.
            late: Whether to give up. Asked before every state that is looked at, since one state of a large
                grammar takes milliseconds.

        Returns:
            The units of the completion, or None where none was found.

        Raises:
            TimeoutError: `late` said so.
        """
        spelling = None if effort.first else NOTHING
        levels = {0: [_Node(start.deep_copy(), lex, start.compute_bitmask(), (), None, spelling)]}
        heap = [0]
        best, cost, last, left = None, room + 1, math.inf, effort.nodes
        seen: Counter[bytes] = Counter()
        while heap and left > 0 and heap[0] <= min(last, 16 * max(room, 1)):
            at = heapq.heappop(heap)
            level = levels.pop(at)
            self.missed |= len({(node.mask, node.chain) for node in level}) > effort.width
            for node in _kept(level, effort, seen):
                if late():
                    raise TimeoutError
                left -= 1
                seen[node.mask] += 1
                for units in self._completions(node, bridges):
                    # A few bytes more may be fewer tokens; where room is short, there is no time to see.
                    last = min(last, at if effort.first else at + 4)
                    size = self.vocabulary.cost(units, None if not effort.first else room)
                    if size is not None and size < cost:
                        best, cost = units, size
                if best is not None and effort.first:
                    return best
                for child, size in self._children(node, late):
                    size = 1 if effort.leaps else size
                    if child.lex[0] - lex[0] <= MOST_DEPTH:
                        if at + size not in levels:
                            heapq.heappush(heap, at + size)
                        levels.setdefault(at + size, []).append(child)
        self.missed |= left <= 0
        return best

    def _completions(self, node: _Node, bridges: Sequence[list[Unit]]) -> Iterable[list[Unit]]:
        if node.matcher.is_accepting():
            yield node.units()
        for bridge in bridges:
            if bridge and node.allows(bridge[0]):
                whole = [*bridge, self.vocabulary.end_unit]
                if node.matcher.validate_tokens(whole) == len(whole):
                    yield node.units() + bridge

    def _children(self, node: _Node, late: Callable[[], bool]) -> list[tuple[_Node, int]]:
        forced = node.matcher.compute_ff_tokens()
        if forced:
            child = self._child(node, forced, late)
            return [] if child is None else [(child, len(forced))]
        macros = [macro for macro in self.macros if node.allows(macro[0])]
        if not node.allows(0x22) and node.allows(self.run[0]):
            macros.append(self.run)
        found = [(self._child(node, macro, late, macro=True), len(macro)) for macro in macros]
        ways = self._known.get(node.mask) or self._new.get(node.mask)
        if ways is None:
            ways = self._new[node.mask] = self._kinds_of(node, late)
        found += [(self._child(node, [unit], late), 1) for unit in ways]
        return [(child, size) for child, size in found if child is not None]

    def _child(
        self, node: _Node, units: list[Unit], late: Callable[[], bool], macro: bool = False
    ) -> _Node | None:
        if late():
            raise TimeoutError
        if len(units) > 1 and node.matcher.validate_tokens(units) < len(units):
            return None
        matcher = node.matcher.deep_copy()
        taken = matcher.try_consume_tokens(units)
        mask = matcher.compute_bitmask() if taken == len(units) else b""
        if matcher.is_error():
            self.trouble = matcher.get_error()
        if not mask or matcher.is_error():
            return None
        lex = lexed(node.lex, units)
        chain = (*node.chain, bytes(units)) if macro else node.chain
        chain = () if lex[2] != node.lex[2] else chain
        spelling = None if node.spelling is None else self.vocabulary.extended(node.spelling, units)
        return _Node(matcher, lex, mask, chain, (node.path, units), spelling)

    def _kinds_of(self, node: _Node, late: Callable[[], bool]) -> list[Unit]:
        """One unit for each kind of state that the next one leads to."""
        bits = np.unpackbits(np.frombuffer(node.mask, np.uint8), bitorder="little")
        ends = {256 + n for n, id in enumerate(self.vocabulary.specials) if id in self.vocabulary.ends}
        kinds: dict[bytes, Unit] = {}
        for unit in (*self.vocabulary.fill, *range(256, len(bits))):
            if bits[unit] and unit not in ends:
                child = self._child(node, [unit], late)
                if child is not None:
                    kinds.setdefault(child.mask, unit)
        return list(kinds.values())


def _kept(nodes: list[_Node], effort: Effort, seen: Counter[bytes]) -> list[_Node]:
    """The best of each group; of the groups those least deep and those furthest on, new kinds of state first."""
    groups: dict[Any, list[_Node]] = {}
    width, most = effort.width, 1 if effort.first else 2
    for node in sorted(nodes, key=lambda node: node.rank):
        group = groups.setdefault((node.mask, node.chain), [])
        if len(group) < most:
            group.append(node)
    if len(groups) <= width:
        return [node for group in groups.values() for node in group]
    heads = [group[0] for group in groups.values()]
    near = sorted(heads, key=lambda node: (node.lex[0] + (node.lex[1] > 0), seen[node.mask], -node.lex[2]))
    far = sorted(heads, key=lambda node: (-node.lex[2], seen[node.mask]))
    return list({id(node): node for node in (*near[: (width + 1) // 2], *far[: width // 2])}.values())
