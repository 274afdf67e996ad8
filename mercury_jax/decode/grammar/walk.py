"""One constrained answer as it grows: what may come next, what is committed, and a way to the end that fits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mercury_jax.decode.grammar.plan import QUICK, START, Lex, lexed
from mercury_jax.decode.grammar.vocabulary import Unit

if TYPE_CHECKING:
    from mercury_jax.decode.grammar.compile import Grammar

_BRIDGES = 6  # ends of the plan that a search looks out for
_NEAR = 12  # units of the plan that may have been written in another way
# CPU seconds of search. Other rows of the batch wait for it; what a search of a usual schema takes is 1 to 10 ms. The
# time of the calling thread, not the clock's, so that a busy machine does not change what is written.
STEP_SECONDS = 0.05  # of one `advance`
ANSWER_SECONDS = 0.5  # of one answer


class Step(NamedTuple):
    """What one look at the model's proposal comes to."""

    commit: list[int]  # tokens that stand now, from the frontier on
    forced: list[bool]  # of each: the grammar or the budget left no choice
    ended: bool  # nothing follows
    clear: bool  # what the model proposed behind them does not fit to them


class _Legal(NamedTuple):
    """What the grammar alone makes of a proposal; plan: an end behind it, None where one must be searched."""

    taken: list[int]
    forced: list[bool]
    ended: bool
    clear: bool
    plan: list[Unit] | None


class Walker:
    """Made by `Grammar.walk`. At any moment a legal end of at most `room` tokens is known.

    Where a proposal leaves that end, another one is searched, within STEP_SECONDS and ANSWER_SECONDS. Beyond them the
    answer follows the end that is known: it still obeys the grammar, but the model chooses less of it.
    """

    def __init__(self, grammar: Grammar, budget: int):
        self.grammar, self.budget = grammar, budget
        self.written: list[int] = []
        self.ended = False
        self.cut = False  # it ended where the budget did, and might have gone on
        self.overruled = 0  # tokens that the budget chose
        self._plan = grammar.vocabulary.units_of(grammar.plan)
        self._tight = False  # the plan is as short as a search makes it
        self._search = grammar.search.branch()
        self._seconds = ANSWER_SECONDS  # of search that are left
        self._tokens = grammar.tokens.deep_copy()
        self._units, self._lex, self._behind = grammar.units.deep_copy(), START, 0

    @property
    def room(self) -> int:
        """Tokens of the budget that are left."""
        return self.budget - len(self.written)

    @property
    def plan(self) -> list[int]:
        """Tokens that would end the answer now."""
        return self.grammar.vocabulary.spelt(self._plan) or []

    def bits(self) -> np.ndarray:
        """uint32 [words]: bit v % 32 of word v // 32 says whether id v may stand at the frontier."""
        words = np.zeros(self.grammar.words, np.uint32)
        mask = np.frombuffer(self._tokens.compute_bitmask(), np.uint32)
        if self._tokens.is_error():
            self._restore()
            for id in self.plan[:1] or [self.grammar.vocabulary.end]:  # no plan: the answer is complete
                words[id // 32] = np.uint32(1) << np.uint32(id % 32)
            return words
        words[: len(mask)] = mask[: len(words)]
        return words

    def advance(self, tokens: Sequence[int] = (), sure: Sequence[bool] = ()) -> Step:
        """Commit as many of the proposed tokens as the grammar and the budget allow, and what it forces.

        tokens: the model's, from the frontier on; tokens[0] drawn under `bits()`. sure: of each, whether the
        rule settled it; tokens[0] is taken anyway, the others up to the first that is not sure. Where
        tokens is not empty at least one token is committed, the plan's own if need be. No tokens: only
        what is forced.
        """
        if self.ended:
            return Step([], [], True, False)
        taken, forced, ended, clear, plan = self._legal(tokens, sure)
        began = time.thread_time()
        until = began + min(STEP_SECONDS, self._seconds)
        count = self._affordable(taken, plan, lambda: time.thread_time() > until)
        self._seconds -= time.thread_time() - began
        if count < len(taken):
            taken, forced, ended, clear = taken[:count], forced[:count], False, True
        if not taken and len(tokens) and not ended:
            taken = self._own()
            forced, clear, ended = [True] * len(taken), True, not taken
        self.written += taken
        over = ended or (self._tokens.is_stopped() and not self._tokens.is_error())
        self.ended = over or self.room == 0  # a plan of no tokens fits: the answer is complete
        self.cut = self.ended and not over
        return Step(taken, forced, self.ended, clear)

    def _own(self) -> list[int]:
        """The plan's next token; none where the answer is complete."""
        first = self.plan[:1]
        self._plan = self._plan[len(self.grammar.vocabulary.units_of(first)) :]
        self._tokens.try_consume_tokens(first)
        self.overruled += len(first)
        return first

    def _legal(self, tokens: Sequence[int], sure: Sequence[bool]) -> _Legal:
        """What the grammar takes of the model's tokens, and what it forces before and between them."""
        matcher, ends = self._tokens, self.grammar.vocabulary.ends
        taken: list[int] = []
        forced: list[bool] = []
        plan: list[Unit] | None = self._plan
        while len(taken) < self.room:
            at = len(taken)
            must = matcher.compute_ff_tokens()
            offered = at < len(tokens) and (at == 0 or sure[at])
            if offered and tokens[at] in ends and matcher.is_accepting():
                return _Legal(taken, forced, True, False, plan)
            # The model may spell what is forced in its own tokens.
            fits = offered and not matcher.is_stopped() and matcher.validate_tokens([tokens[at]]) == 1
            new = [tokens[at]] if fits else must[: self.room - at]
            if not new or matcher.try_consume_tokens(new) < len(new):
                return _Legal(taken, forced, False, offered, plan)
            plan = self._followed(plan, new)
            taken += new
            forced += [bool(must)] * len(new)
            if not fits and at < len(tokens) and list(tokens[at : at + len(new)]) != new:
                return _Legal(taken, forced, False, True, plan)
        return _Legal(taken, forced, False, True, plan)

    def _followed(self, plan: list[Unit] | None, ids: Sequence[int]) -> list[Unit] | None:
        """The plan behind these tokens, which were just consumed, where it needs no search."""
        if plan is None:
            return None
        units = self.grammar.vocabulary.units_of(ids)
        if plan[: len(units)] == units:
            return plan[len(units) :]
        return plan if self._completes(plan) else None

    def _affordable(self, taken: list[int], plan: list[Unit] | None, late: Callable[[], bool]) -> int:
        """How many of the tokens leave room for a plan; the matcher stands behind so many, the plan fits them."""
        broken = self._tokens.is_error()
        if plan is not None and not broken and self._fits(plan, self.room - len(taken)):
            self._plan = plan
            return len(taken)
        if self._tight and plan == self._plan and not broken:
            return self._spared(taken)
        consumed = count = len(taken)
        while True:
            self._back(taken, consumed, count)
            consumed = count
            found = self._plan_behind(taken[:count], late) if count else self._plan
            if found is not None:
                # Where no token is left that a search finds an end behind, there is no other end to find.
                self._tight = count == 0
                self._plan = found
                return count
            count //= 2

    def _spared(self, taken: list[int]) -> int:
        """How many of the tokens fit before the plan as it is."""
        size = self.grammar.vocabulary.cost(self._plan)
        count = 0 if size is None else min(len(taken), self.room - size)
        self._back(taken, len(taken), count)
        if count and not self._completes(self._plan):
            self._back(taken, count, 0)
            return 0
        return count

    def _back(self, taken: list[int], consumed: int, count: int) -> None:
        """Take the matcher back from behind `consumed` of the tokens to behind `count` of them."""
        if consumed > count:
            self._tokens.rollback(consumed - count)
        if self._tokens.is_error():
            self._restore(taken[:count])

    def _restore(self, more: Sequence[int] = ()) -> None:
        """A matcher that ran into its limits never leaves them: begin anew."""
        self._tokens = self.grammar.tokens.deep_copy()
        self._tokens.try_consume_tokens([*self.written, *more])

    def _plan_behind(self, taken: list[int], late: Callable[[], bool]) -> list[Unit] | None:
        """A plan for what follows these tokens, of at most what the budget leaves; None where none is found in time."""
        if late():
            return None
        search, vocabulary, room = self._search, self.grammar.vocabulary, self.room - len(taken)
        bridges = [self._plan[i:] for i in _cuts(self._plan)]
        mask = self._tokens.compute_bitmask()
        guesses = [self._plan[i:] for i in range(min(_NEAR, len(self._plan)))]
        guesses += [way + bridge for way in search.ways(mask) for bridge in (*bridges, [])]
        for guess in guesses:
            if late():
                return None
            if vocabulary.begins(guess, mask) and self._fits(guess, room) and self._completes(guess):
                return guess
        if self._tight and not self._fits(self._plan, self.room - 1):
            return None  # no room beside the plan, and the last search found nothing: nor do 98 of 100 others
        units, lex = self._synced(vocabulary.units_of(taken))
        try:
            plan = search.find(units, lex, room, QUICK, bridges, late)
        except TimeoutError:
            return None
        if plan is None or not self._completes(plan):
            return None
        search.learn(mask, plan, bridges)
        return plan

    def _fits(self, plan: list[Unit], room: int) -> bool:
        size = self.grammar.vocabulary.cost(plan, enough=room)
        return size is not None and size <= room

    def _completes(self, plan: list[Unit]) -> bool:
        """Whether the real matcher takes the plan and accepts behind it."""
        ids = self.grammar.vocabulary.bytewise(plan)
        if ids is None:
            return False
        ids = [*ids, self.grammar.vocabulary.end]
        return self._tokens.validate_tokens(ids) == len(ids)

    def _synced(self, new: list[Unit]) -> tuple[Any, Lex]:
        """The byte matcher behind what is written and these units, and where JSON stands there."""
        late = self.grammar.vocabulary.units_of(self.written[self._behind :])
        self._units.try_consume_tokens(late)
        self._lex = lexed(self._lex, late)
        self._behind = len(self.written)
        units = self._units.deep_copy()
        units.try_consume_tokens(new)
        return units, lexed(self._lex, new)


def _cuts(units: Sequence[Unit]) -> list[int]:
    """Where the ends of a plan begin: at its start, and behind some of its closing bytes."""
    closing = [i + 1 for i, unit in enumerate(units[:-1]) if unit in b'"}],' or unit > 255]
    return list(dict.fromkeys([0, *closing]))[:_BRIDGES]
