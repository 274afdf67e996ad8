"""Search for the end of an answer: a shortest completion of what is written, by a beam search over bytes.

In bytes a grammar has a few hundred continuations instead of a hundred thousand, whatever the vocabulary. Among the
states after the same number of bytes, those that allow the same bytes next count as one; of each such group the
states that are furthest in the structure are kept. The tokens of the answer are the fewest that spell the bytes
found. A search may miss a completion, so what it finds is an upper bound; that it is valid is verified by the caller
on the real tokens.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mercury_jax.decode.grammar.vocabulary import NOTHING, GrammarVocabulary, Spelling, Unit

_MOST_LEARNED = 3  # completions that are remembered per state
MOST_DEPTH = 96  # nested brackets that a completion opens
RUN = 64  # bytes of filler that are taken at once

# Lexical state of JSON: (open brackets; 1 inside of a string, 2 after a backslash; finished strings, separators and
# closed brackets).
Lex: TypeAlias = tuple[int, int, int]
START: Lex = (0, 0, 0)


def advance_lex(lex: Lex, units: Iterable[Unit]) -> Lex:
    """Returns the lexical state of JSON after some units."""
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


class SearchLimits(NamedTuple):
    """How far to search.

    Attributes:
        width: States that are kept per number of bytes.
        nodes: Most states.
        first: Take the first completion that fits, not the shortest.
        leaps: Count forced bytes as a single step: a quarter fewer nodes, for a completion of a few bytes more.
    """

    width: int
    nodes: int
    first: bool = False
    leaps: bool = False


QUICK = SearchLimits(4, 400, first=True, leaps=True)
ANY = SearchLimits(3, 12_000, first=True)  # at the start of a grammar
BEST = SearchLimits(24, 4_000)


class _Node(NamedTuple):
    matcher: Any
    lex: Lex
    mask: bytes
    chain: tuple[bytes, ...]  # macros taken inside of the open string
    path: Any  # (path before, units), or None
    spelling: Spelling | None  # where few tokens matter more than a quick answer

    @property
    def rank(self) -> tuple[int, int]:
        """Progress, and number of tokens: the smallest is best."""
        return -self.lex[2], 0 if self.spelling is None else self.spelling.costs[-1]

    def allows(self, unit: Unit) -> bool:
        return bool(self.mask[unit >> 3] >> (unit & 7) & 1)

    def units(self) -> list[Unit]:
        parts, path = [], self.path
        while path is not None:
            path, units = path
            parts.append(units)
        return [unit for part in reversed(parts) for unit in part]


class EndSearch:
    """Searches for completions and remembers those found; a `branch` learns for itself, so that answers stay
    independent.
    """

    def __init__(
        self, vocabulary: GrammarVocabulary, macros: Sequence[list[Unit]], known: Mapping[bytes, list[Unit]]
    ):
        self.vocabulary, self.macros, self._known = vocabulary, macros, known
        self.run = vocabulary.fill[:1] * RUN
        # Whether a state was left out: then finding nothing does not prove that there is nothing.
        self.missed = False
        self._new: dict[bytes, list[Unit]] = {}
        self._led: dict[bytes, deque[list[Unit]]] = {}

    def branch(self) -> EndSearch:
        """Returns a search that begins with what this one has learned."""
        return EndSearch(self.vocabulary, self.macros, self._new)

    def learned(self, mask: bytes) -> Iterable[list[Unit]]:
        """Returns units that led from a state with this mask to a bridge or to the end; the latest first."""
        return self._led.get(mask, ())

    def learn(self, mask: bytes, plan: list[Unit], bridges: Sequence[list[Unit]]) -> None:
        """Remembers how a plan was found from a state with this mask."""
        bridge = next((b for b in bridges if b and plan[-len(b) :] == b), [])
        way = plan[: len(plan) - len(bridge)]
        known = self._led.setdefault(mask, deque(maxlen=_MOST_LEARNED))
        if way not in known:
            known.appendleft(way)

    def find(
        self,
        start: Any,
        lex: Lex,
        room: int,
        limits: SearchLimits,
        bridges: Sequence[list[Unit]] = (),
        late: Callable[[], bool] = lambda: False,
    ) -> list[Unit] | None:
        """Searches for a completion of a byte matcher.

        Args:
            late: Whether to give up. Called before every state, because one state of a large grammar takes
                milliseconds.
        """
        spelling = None if limits.first else NOTHING
        levels = {0: [_Node(start.deep_copy(), lex, start.compute_bitmask(), (), None, spelling)]}
        heap = [0]
        best, cost, last, left = None, room + 1, math.inf, limits.nodes
        seen: Counter[bytes] = Counter()
        # Levels by number of bytes, the shortest first. `last` bounds the levels once a completion is known.
        while heap and left > 0 and heap[0] <= min(last, 16 * max(room, 1)):
            at = heapq.heappop(heap)
            level = levels.pop(at)
            self.missed |= len({(node.mask, node.chain) for node in level}) > limits.width
            for node in _kept(level, limits, seen):
                if late():
                    raise TimeoutError
                left -= 1
                seen[node.mask] += 1
                for units in self._completions(node, bridges):
                    # A few bytes more may be fewer tokens; with `first` the first completion is taken.
                    last = min(last, at if limits.first else at + 4)
                    size = self.vocabulary.cost(units, None if not limits.first else room)
                    if size is not None and size < cost:
                        best, cost = units, size
                if best is not None and limits.first:
                    return best
                for child, size in self._children(node, late):
                    size = 1 if limits.leaps else size
                    if child.lex[0] - lex[0] > MOST_DEPTH:
                        self.missed = True
                    else:
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
        # Texts of the patterns are tried as a whole, and inside of strings runs of filler.
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
        if matcher.is_error():  # llguidance's own limits
            self.missed = True
        if not mask or matcher.is_error():
            return None
        lex = advance_lex(node.lex, units)
        chain = (*node.chain, bytes(units)) if macro else node.chain
        chain = () if lex[2] != node.lex[2] else chain
        spelling = None if node.spelling is None else self.vocabulary.extended(node.spelling, units)
        return _Node(matcher, lex, mask, chain, (node.path, units), spelling)

    def _kinds_of(self, node: _Node, late: Callable[[], bool]) -> list[Unit]:
        """One unit for each kind of state that a next unit leads to."""
        bits = np.unpackbits(np.frombuffer(node.mask, np.uint8), bitorder="little")
        ends = {256 + n for n, id in enumerate(self.vocabulary.specials) if id in self.vocabulary.ends}
        kinds: dict[bytes, Unit] = {}
        for unit in (*self.vocabulary.fill, *range(256, len(bits))):
            if bits[unit] and unit not in ends:
                child = self._child(node, [unit], late)
                if child is not None:
                    kinds.setdefault(child.mask, unit)
        return list(kinds.values())


def _kept(nodes: list[_Node], limits: SearchLimits, seen: Counter[bytes]) -> list[_Node]:
    """The best of each group; of the groups the least deep and the furthest, new kinds of state first."""
    groups: dict[Any, list[_Node]] = {}
    width, most = limits.width, 1 if limits.first else 2
    for node in sorted(nodes, key=lambda node: node.rank):
        group = groups.setdefault((node.mask, node.chain), [])
        if len(group) < most:
            group.append(node)
    if len(groups) <= width:
        return [node for group in groups.values() for node in group]
    # Half of the beam for states near an end (few open brackets), half for those furthest in the structure.
    heads = [group[0] for group in groups.values()]
    near = sorted(heads, key=lambda node: (node.lex[0] + (node.lex[1] > 0), seen[node.mask], -node.lex[2]))
    far = sorted(heads, key=lambda node: (-node.lex[2], seen[node.mask]))
    return list({id(node): node for node in (*near[: (width + 1) // 2], *far[: width // 2])}.values())
