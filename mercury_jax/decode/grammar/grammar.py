"""Grammars compiled for a tokenizer, and one constrained answer as it grows.

`compile` turns a spec into a `Grammar`, within bounds of size and time, and caches it. `Grammar.walk` starts a
`Walker`: what may come next, what is committed, and at any moment a completion that fits into the budget. Parsing is
done by llguidance.
"""

from __future__ import annotations

import importlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from typing import Any, NamedTuple

import numpy as np

from mercury_jax import install
from mercury_jax.decode.grammar.lark import CheckedValue, LarkGrammar, lark_grammar, llguidance
from mercury_jax.decode.grammar.refusals import (
    COMPILE_SECONDS,
    EMPTY,
    NOT_FOUND,
    TOO_LARGE,
    check_compiles,
    is_checkable,
    needs_fewer_parts,
    plain_reason,
    widened,
)
from mercury_jax.decode.grammar.search import ANY, BEST, QUICK, START, EndSearch, Lex, advance_lex
from mercury_jax.decode.grammar.spec import GrammarError, Spec
from mercury_jax.decode.grammar.vocabulary import GrammarVocabulary, Unit, vocabulary_of
from mercury_jax.tokenizer import AnyTokenizer

MOST_CACHED = 128  # grammars
MOST_CACHED_BYTES = 8 << 20  # of their texts
MOST_TOKENS = 16_384  # of the shortest answer

_LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "max_grammar_size": 500_000,
    "max_lexer_states": 50_000,
    "max_items_in_row": 10_000,  # the default of 2,000 fails at about 400 optional properties
    "step_max_items": 200_000,
    "verbose_errors": False,
}


class Grammar:
    """What an answer obeys, compiled for one tokenizer; immutable, and safe to share between threads.

    Attributes:
        name: What errors call it.
        shortest: The fewest tokens of an answer, as far as the search finds them.
        words: uint32 words of a grammar mask, ceil(V / 32).
        opening: Text that ends free text; empty: a special token does. None: the answer has no free text.
        free: Bit mask of the tokens that can neither be part of `opening` nor end free text; None without free text.
        fault: Checks the text of a finished answer: None if it is valid, otherwise the number of characters that may
            stay. The attribute is None where the grammar enforces the whole schema.
    """

    def __init__(self, vocabulary: GrammarVocabulary, source: LarkGrammar, deadline: float):
        self.vocabulary, self.name, self.words = vocabulary, source.name, vocabulary.words
        self.opening = source.opening
        self.fault = answer_check(source.checked) if source.checked else None
        self.free = None if source.opening is None else vocabulary.without(source.opening[:1])
        text = llguidance().LLMatcher.grammar_from_lark(source.lark)
        self.tokens = _matcher(vocabulary.tokens, text, source, deadline)
        self.units = _matcher(vocabulary.units, text, source, deadline)
        self.search = EndSearch(vocabulary, [list(macro) for macro in source.macros], {})
        late = lambda: time.monotonic() > deadline
        early = lambda: time.monotonic() > deadline - COMPILE_SECONDS / 2
        found = self._verified(None if source.answer is None else vocabulary.units_of_marks(source.answer))
        try:
            # Any answer first, by a narrow search; then one as short as can be found.
            if not found:
                plan = self.search.find(self.units, START, MOST_TOKENS, ANY, late=late)
                if plan is None and not self.search.missed:
                    raise GrammarError(f"{source.name}: {EMPTY}")
                found = self._verified(plan)
            found += self._verified(self.search.find(self.units, START, MOST_TOKENS, BEST, late=early))
        except TimeoutError:
            if not found:
                raise
        if not found:
            raise GrammarError(f"{source.name}: {NOT_FOUND}")
        self.plan = tuple(min(found, key=len))
        self.shortest = len(self.plan)

    def _verified(self, plan: list[Unit] | None) -> list[list[int]]:
        """The tokens of a plan, where they are a complete answer."""
        ids = None if plan is None else self.vocabulary.spell(plan)
        return [ids] if ids is not None and len(ids) <= MOST_TOKENS and self.completes(ids) else []

    def completes(self, ids: list[int]) -> bool:
        """Returns whether these tokens are a complete answer."""
        matcher = self.tokens.deep_copy()
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    def matches(self, text: str) -> bool:
        """Returns whether a text is a complete answer, in whatever tokens."""
        matcher, units = self.units.deep_copy(), list(text.encode(errors="replace"))
        return matcher.try_consume_tokens(units) == len(units) and matcher.is_accepting()

    def sound(self, ids: Sequence[int]) -> tuple[int, bool] | None:
        """Checks a finished answer.

        Returns:
            None if it is valid. Otherwise the number of tokens before the first value at fault, and whether that is a
            single value: no object or list.
        """
        if self.fault is None:
            return None
        pieces = [self.vocabulary.pieces[i] for i in ids]
        text = b"".join(pieces).decode(errors="replace")
        if (characters := self.fault(text)) is None:
            return None
        ends, most = np.cumsum([len(piece) for piece in pieces]), len(text[:characters].encode())
        return int(np.searchsorted(ends, most, side="right")), text[characters : characters + 1] not in (
            "{",
            "[",
        )

    def walk(self, budget: int) -> Walker:
        """Starts an answer of at most `budget` tokens.

        Raises:
            GrammarError: No answer is that short.
        """
        if budget < self.shortest:
            raise GrammarError(
                f"{self.name} needs an answer of {self.shortest} tokens or more; max_tokens leaves {budget}"
            )
        return Walker(self, budget)


def compile(tokenizer: AnyTokenizer, spec: Spec) -> Grammar:
    """Compiles a spec for a tokenizer; the same content is compiled once.

    Takes at most COMPILE_SECONDS, also for hostile input.

    Args:
        tokenizer: Of the model.
        spec: What an answer must obey.

    Returns:
        The grammar.

    Raises:
        GrammarError: A ValueError that says what is wrong: out of bounds, not supported, not satisfiable, or not
            compiled in time.
    """
    deadline = time.monotonic() + COMPILE_SECONDS
    source = lark_grammar(spec)
    vocabulary = vocabulary_of(tokenizer)
    key = (tokenizer.fingerprint, source.lark, source.checked)
    with _lock:
        if key in _cache:
            _cache.move_to_end(key)
            return _cache[key]
    if not _workers.acquire(blocking=False):
        raise GrammarError(f"{source.name}: other grammars that take too long are still being compiled")

    def work() -> Grammar:
        try:
            return _compiled(vocabulary, spec, source, deadline)
        finally:  # only now the worker is free again, also where nobody waits for it any longer
            _workers.release()

    try:
        grammar = _pool.submit(work).result(COMPILE_SECONDS)
    except TimeoutError:
        raise GrammarError(f"{source.name}: takes longer than {COMPILE_SECONDS:g} s to compile") from None
    with _lock:
        _cache[key] = grammar
        while len(_cache) > MOST_CACHED or sum(len(text) for _, text, _ in _cache) > MOST_CACHED_BYTES:
            _cache.popitem(last=False)
    return grammar


def _compiled(vocabulary: GrammarVocabulary, spec: Spec, source: LarkGrammar, deadline: float) -> Grammar:
    """Compiles a grammar; where llguidance refuses it, without what a check of the finished answer finds."""
    try:
        return Grammar(vocabulary, source, deadline)
    except GrammarError as error:
        if not error.checkable and not str(error).endswith(NOT_FOUND):
            raise
        exact = error.checkable and not needs_fewer_parts(str(error))
        wider = lark_grammar(spec, lambda schema, name: widened(schema, name, deadline, exact))
        if wider.lark == source.lark:
            raise
    return Grammar(vocabulary, wider, deadline)


def answer_check(checked: Sequence[CheckedValue]) -> Callable[[str], int | None]:
    """Imports `validation` at first use: it needs the package jsonschema."""
    try:
        module = importlib.import_module("mercury_jax.decode.grammar.validation")
    except ImportError:
        raise GrammarError(f"schema needs the package jsonschema: {install.command('serve')}") from None
    return module.answer_check(checked)


_cache: OrderedDict[tuple[str, str, tuple[CheckedValue, ...]], Grammar] = OrderedDict()
_lock = threading.Lock()
_workers = threading.BoundedSemaphore(4)
_pool = ThreadPoolExecutor(4, thread_name_prefix="grammar")


def _matcher(view: Any, text: str, source: LarkGrammar, deadline: float) -> Any:
    package = llguidance()
    matcher = package.LLMatcher(view, text, log_level=0, limits=package.LLParserLimits(**_LIMITS))
    if matcher.is_error():
        reason = plain_reason(matcher.get_error())
        if is_checkable(reason):
            raise GrammarError(f"{source.name}: {reason}", checkable=True)
        for name, schema, given in source.schemas:
            check_compiles(schema, name, deadline, json.loads(given))
        raise GrammarError(f"{source.name}: {reason}")
    matcher.compute_bitmask()
    if matcher.is_error():
        raise GrammarError(f"{source.name}: {TOO_LARGE}", checkable=True)
    return matcher


_MOST_BRIDGES = 6  # ends of the plan that a search may join
_MOST_SKIPPED = 12  # units of the plan that the model may have written in another way
# CPU seconds of search. Other rows of the batch wait for it; a search of a usual schema takes 1 to 10 ms. It is the
# time of the calling thread, not the clock's, so that a busy machine does not change the text.
STEP_SECONDS = 0.05  # of one `advance`
ANSWER_SECONDS = 0.5  # of one answer


class WalkerStep(NamedTuple):
    """What the grammar makes of one proposal of the model."""

    commit: list[int]  # tokens that are committed, from the frontier on
    forced: list[bool]  # of each: the grammar or the budget left no choice
    ended: bool  # the answer is complete
    clear: bool  # what the model proposed after them does not fit them


class _Legal(NamedTuple):
    """What the grammar alone makes of a proposal. plan: an end after it; None where one must be searched."""

    taken: list[int]
    forced: list[bool]
    ended: bool
    clear: bool
    plan: list[Unit] | None


class Walker:
    """One answer under a grammar; made by `Grammar.walk`.

    At any moment it knows a plan: a legal end of at most `room` tokens. Where a proposal leaves the plan, another end
    is searched, within STEP_SECONDS and ANSWER_SECONDS. Beyond them the answer follows the plan: it still obeys the
    grammar, but the model chooses less of it.

    Attributes:
        written: The committed tokens.
        ended: Whether the answer is complete.
        cut: Whether it ended because the budget did, and might have continued.
        overruled: Tokens that the budget chose.
    """

    def __init__(self, grammar: Grammar, budget: int):
        self.grammar, self.budget = grammar, budget
        self.written: list[int] = []
        self.ended = False
        self.cut = False
        self.overruled = 0
        self._plan = grammar.vocabulary.units_of(grammar.plan)
        self._tight = False  # whether the plan is as short as a search makes it
        self._search = grammar.search.branch()
        self._seconds = ANSWER_SECONDS  # of search that are left
        # Of the text that `free` has read: its end, its tokens, whether calls have begun, and the result.
        self._tail, self._read, self._called = b"", 0, False
        self._free: np.ndarray | None = None
        self._tokens = grammar.tokens.deep_copy()
        self._units, self._lex, self._synced_tokens = grammar.units.deep_copy(), START, 0

    @property
    def room(self) -> int:
        """Tokens of the budget that are left."""
        return self.budget - len(self.written)

    @property
    def plan(self) -> list[int]:
        """Tokens that would end the answer now."""
        return self.grammar.vocabulary.spell(self._plan) or []

    def bits(self) -> np.ndarray:
        """Returns uint32 [words]: bit v % 32 of word v // 32 says whether the id v may stand at the frontier."""
        words = np.zeros(self.grammar.words, np.uint32)
        mask = np.frombuffer(self._tokens.compute_bitmask(), np.uint32)
        if self._tokens.is_error():
            self._restore()
            for id in self.plan[:1] or [self.grammar.vocabulary.end]:  # no plan: the answer is complete
                words[id // 32] = np.uint32(1) << np.uint32(id % 32)
            return words
        words[: len(mask)] = mask[: len(words)]
        return words

    def free(self) -> np.ndarray | None:
        """Returns a bit mask of the ids that continue free text; None where the answer is not in free text.

        After any number of these tokens the grammar allows what it allows now, forces nothing, and may end. In the
        midst of a character, or of what may become the opening of a call, the answer is not in free text.
        """
        opening, free = self.grammar.opening or b"", self.grammar.free
        if self.ended or free is None:
            return None
        if self._read < len(self.written):
            pieces = [self.grammar.vocabulary.pieces[i] for i in self.written[self._read :]]
            text, self._read = self._tail + b"".join(pieces), len(self.written)
            self._called |= not all(pieces) or (opening != b"" and opening in text)
            self._tail = text[max(len(text) - len(opening), 0) :]
            partly = any(text.endswith(opening[:n]) for n in range(1, len(opening)))
            inside = not self._called and not partly and self._tokens.is_accepting()
            self._free = free & self.bits() if inside else None
        return self._free

    def follow(self, tokens: Sequence[int]) -> None:
        """Commits tokens of `free`, in a number that leaves at least one token of the budget."""
        for unit in (self.grammar.vocabulary.units_of([id]) for id in tokens):
            if self._plan[: len(unit)] == unit:
                self._plan = self._plan[len(unit) :]
        if self._tokens.try_consume_tokens(list(tokens)) < len(tokens):
            self._restore(tokens)
        self.written += tokens

    def advance(self, tokens: Sequence[int] = (), accepted: Sequence[bool] = ()) -> WalkerStep:
        """Commits as many of the proposed tokens as the grammar and the budget allow, and what the grammar forces.

        Args:
            tokens: The model's, from the frontier on; tokens[0] was drawn under `bits()`. None: only what is forced is
                committed. Otherwise at least one token is, the plan's own if need be.
            accepted: Of each, whether the rule has accepted it; tokens[0] is taken anyway, the others up to the first
                that is not accepted.

        Returns:
            What was committed.
        """
        if self.ended:
            return WalkerStep([], [], True, False)
        taken, forced, ended, clear, plan = self._legal(tokens, accepted)
        began = time.thread_time()
        until = began + min(STEP_SECONDS, self._seconds)
        count = self._affordable(taken, plan, lambda: time.thread_time() > until)
        self._seconds -= time.thread_time() - began
        if count < len(taken):
            taken, forced, ended, clear = taken[:count], forced[:count], False, True
        if not taken and len(tokens) and not ended:
            # The plan's next token; the plan is empty once the answer is complete.
            taken = self.plan[:1]
            self._plan = self._plan[len(self.grammar.vocabulary.units_of(taken)) :]
            self._tokens.try_consume_tokens(taken)
            self.overruled += len(taken)
            forced, clear, ended = [True] * len(taken), True, not taken
        self.written += taken
        over = ended or (self._tokens.is_stopped() and not self._tokens.is_error())
        self.ended = over or self.room == 0  # a plan of no tokens fits: the answer is complete
        self.cut = self.ended and not over
        return WalkerStep(taken, forced, self.ended, clear)

    def _legal(self, tokens: Sequence[int], accepted: Sequence[bool]) -> _Legal:
        """What the grammar takes of the model's tokens, and what it forces before and between them."""
        matcher, ends = self._tokens, self.grammar.vocabulary.ends
        taken: list[int] = []
        forced: list[bool] = []
        plan: list[Unit] | None = self._plan
        while len(taken) < self.room:
            at = len(taken)
            must = matcher.compute_ff_tokens()
            offered = at < len(tokens) and (at == 0 or accepted[at])
            if offered and tokens[at] in ends and matcher.is_accepting():
                return _Legal(taken, forced, True, False, plan)
            # The model may write what is forced in its own tokens.
            fits = offered and not matcher.is_stopped() and matcher.validate_tokens([tokens[at]]) == 1
            new = [tokens[at]] if fits else must[: self.room - at]
            if not new or matcher.try_consume_tokens(new) < len(new):
                return _Legal(taken, forced, False, offered, plan)
            if plan is not None:  # the rest of the plan, where that needs no search
                units = self.grammar.vocabulary.units_of(new)
                if plan[: len(units)] == units:
                    plan = plan[len(units) :]
                elif not self._completes(plan):
                    plan = None
            taken += new
            forced += [bool(must)] * len(new)
            if not fits and at < len(tokens) and list(tokens[at : at + len(new)]) != new:
                return _Legal(taken, forced, False, True, plan)
        return _Legal(taken, forced, False, True, plan)

    def _affordable(self, taken: list[int], plan: list[Unit] | None, late: Callable[[], bool]) -> int:
        """How many of the tokens leave room for a plan; the matcher is left after that many, with a plan that fits."""
        broken = self._tokens.is_error()
        if plan is not None and not broken and self._fits(plan, self.room - len(taken)):
            self._plan = plan
            return len(taken)
        if self._tight and plan == self._plan and not broken:
            return self._affordable_before_plan(taken)
        # Halve the number of tokens until what remains leaves room for an end that a search finds.
        consumed = count = len(taken)
        while True:
            self._roll_back(taken, consumed, count)
            consumed = count
            found = self._plan_behind(taken[:count], late) if count else self._plan
            if found is not None:
                # Where no token leaves an end that a search finds, there is no other end to find.
                self._tight = count == 0
                self._plan = found
                return count
            count //= 2

    def _affordable_before_plan(self, taken: list[int]) -> int:
        """How many of the tokens fit before the plan as it is."""
        size = self.grammar.vocabulary.cost(self._plan)
        count = 0 if size is None else min(len(taken), self.room - size)
        self._roll_back(taken, len(taken), count)
        if count and not self._completes(self._plan):
            self._roll_back(taken, count, 0)
            return 0
        return count

    def _roll_back(self, taken: list[int], consumed: int, count: int) -> None:
        """Rolls the matcher back from `consumed` of the tokens to `count` of them."""
        if consumed > count:
            self._tokens.rollback(consumed - count)
        if self._tokens.is_error():
            self._restore(taken[:count])

    def _restore(self, more: Sequence[int] = ()) -> None:
        """Makes a new matcher: one that has exceeded its limits never recovers."""
        self._tokens = self.grammar.tokens.deep_copy()
        self._tokens.try_consume_tokens([*self.written, *more])

    def _plan_behind(self, taken: list[int], late: Callable[[], bool]) -> list[Unit] | None:
        """A plan for what follows these tokens, of at most what the budget leaves; None where none is found in time."""
        if late():
            return None
        search, vocabulary, room = self._search, self.grammar.vocabulary, self.room - len(taken)
        # Ends of the plan that another one may join: at its start, and after some of its closing bytes.
        closing = [i + 1 for i, unit in enumerate(self._plan[:-1]) if unit in b'"}],' or unit > 255]
        bridges = [self._plan[i:] for i in list(dict.fromkeys([0, *closing]))[:_MOST_BRIDGES]]
        mask = self._tokens.compute_bitmask()
        # Cheap guesses before a search: the plan without its first units, and ways that led to an end before.
        guesses = [self._plan[i:] for i in range(min(_MOST_SKIPPED, len(self._plan)))]
        guesses += [way + bridge for way in search.learned(mask) for bridge in (*bridges, [])]
        for guess in guesses:
            if late():
                return None
            if vocabulary.begins(guess, mask) and self._fits(guess, room) and self._completes(guess):
                return guess
        # No room beside the plan, and the last search found nothing: nor would 98 of 100 others.
        if self._tight and not self._fits(self._plan, self.room - 1):
            return None
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
        """Returns whether the token matcher takes the plan and accepts after it."""
        ids = self.grammar.vocabulary.bytewise(plan)
        if ids is None:
            return False
        ids = [*ids, self.grammar.vocabulary.end]
        return self._tokens.validate_tokens(ids) == len(ids)

    def _synced(self, new: list[Unit]) -> tuple[Any, Lex]:
        """The byte matcher after what is written and these units, and its lexical state."""
        late = self.grammar.vocabulary.units_of(self.written[self._synced_tokens :])
        self._units.try_consume_tokens(late)
        self._lex = advance_lex(self._lex, late)
        self._synced_tokens = len(self.written)
        units = self._units.deep_copy()
        units.try_consume_tokens(new)
        return units, advance_lex(self._lex, new)
