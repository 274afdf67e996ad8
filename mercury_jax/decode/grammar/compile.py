"""From a spec to a grammar, within bounds of size and time, and kept for the next time."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from typing import Any

from mercury_jax.decode.grammar.library import library
from mercury_jax.decode.grammar.plan import ANY, BEST, START, Search
from mercury_jax.decode.grammar.source import Source, source_of
from mercury_jax.decode.grammar.spec import GrammarError, Spec
from mercury_jax.decode.grammar.vocabulary import Vocabulary, vocabulary_of
from mercury_jax.decode.grammar.walk import Walker
from mercury_jax.tokenizer import AnyTokenizer

SECONDS = 5.0  # to compile one grammar
KEPT = 128  # grammars
KEPT_BYTES = 8 << 20  # of their texts
MOST_TOKENS = 16_384  # of the shortest answer

_LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "max_grammar_size": 500_000,
    "max_lexer_states": 50_000,
    "max_items_in_row": 10_000,  # the default of 2,000 ends at some 400 optional properties
    "step_max_items": 200_000,
    "verbose_errors": False,
}


class Grammar:
    """What an answer obeys, compiled for one tokenizer; immutable, and safe to share between threads.

    shortest: the fewest tokens that an answer takes, as far as a search finds them. words: of a mask of
    allowed ids, ceil(V / 32).
    """

    def __init__(self, vocabulary: Vocabulary, source: Source, deadline: float):
        self.vocabulary, self.name = vocabulary, source.name
        text = library().LLMatcher.grammar_from_lark(source.lark)
        self.tokens, self.units = (
            _matcher(view, text, source) for view in (vocabulary.tokens, vocabulary.units)
        )
        self.search = Search(vocabulary, [list(macro) for macro in source.macros], {})
        self.plan = tuple(self._shortest(source, deadline))

    def _shortest(self, source: Source, deadline: float) -> list[int]:
        """Something first, which takes a narrow search however long it is; then as short as can be found."""
        late = lambda: time.monotonic() > deadline
        early = lambda: time.monotonic() > deadline - SECONDS / 2
        plans = [self.search.find(self.units, START, MOST_TOKENS, ANY, late=late)]
        try:
            if plans[0] is None and not self.search.missed:
                raise GrammarError(f"{source.name}: nothing satisfies it{self._trouble()}")
            plans.append(self.search.find(self.units, START, MOST_TOKENS, BEST, late=early))
        except TimeoutError:
            if plans[0] is None:
                raise
        spelt = [self.vocabulary.spelt(plan) for plan in plans if plan is not None]
        found = [ids for ids in spelt if ids is not None and self.completes(ids)]
        if not found:
            raise GrammarError(f"{source.name}: nothing was found that satisfies it{self._trouble()}")
        return min(found, key=len)

    def _trouble(self) -> str:
        return f" ({_plain(self.search.trouble)})" if self.search.trouble else ""

    @property
    def shortest(self) -> int:
        return len(self.plan)

    @property
    def words(self) -> int:
        return self.vocabulary.words

    def completes(self, ids: list[int]) -> bool:
        """Whether these tokens are an answer."""
        matcher = self.tokens.deep_copy()
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    def walk(self, budget: int) -> Walker:
        """One answer of at most `budget` tokens. GrammarError where none is as short as that."""
        if budget < self.shortest:
            raise GrammarError(
                f"{self.name} needs an answer of {self.shortest} tokens or more; max_tokens leaves {budget}"
            )
        return Walker(self, budget)


def compile(tokenizer: AnyTokenizer, spec: Spec) -> Grammar:
    """The grammar of a spec for a tokenizer; the same content is compiled once.

    Raises GrammarError (a ValueError) saying what is wrong: out of bounds, not supported, not satisfiable, or
    not done within SECONDS. Takes that long at most, also for hostile input.
    """
    source = source_of(spec)
    vocabulary = vocabulary_of(tokenizer)
    key = (tokenizer.fingerprint, source.lark)
    with _lock:
        if key in _kept:
            _kept.move_to_end(key)
            return _kept[key]
    if not _workers.acquire(blocking=False):
        raise GrammarError(f"{source.name}: other grammars that take too long are still being compiled")
    grammar = _bounded(vocabulary, source)
    with _lock:
        _kept[key] = grammar
        while len(_kept) > KEPT or sum(len(text) for _, text in _kept) > KEPT_BYTES:
            _kept.popitem(last=False)
    return grammar


_kept: OrderedDict[tuple[str, str], Grammar] = OrderedDict()
_lock = threading.Lock()
_workers = threading.BoundedSemaphore(4)
_pool = ThreadPoolExecutor(4, thread_name_prefix="grammar")


def _bounded(vocabulary: Vocabulary, source: Source) -> Grammar:
    """The grammar, or an error when its time is over; its worker is free again when it has really ended."""

    def work() -> Grammar:
        try:
            return Grammar(vocabulary, source, time.monotonic() + SECONDS)
        finally:
            _workers.release()

    try:
        return _pool.submit(work).result(SECONDS)
    except TimeoutError:
        raise GrammarError(f"{source.name}: takes longer than {SECONDS:g} s to compile") from None


def _matcher(view: Any, text: str, source: Source) -> Any:
    package = library()
    matcher = package.LLMatcher(view, text, log_level=0, limits=package.LLParserLimits(**_LIMITS))
    if matcher.is_error():
        raise GrammarError(f"{source.name}: {_plain(matcher.get_error())}")
    matcher.compute_bitmask()
    if matcher.is_error():
        raise GrammarError(f"{source.name}: nothing satisfies it ({_plain(matcher.get_error())})")
    return matcher


def _plain(message: str) -> str:
    """The line of llguidance's message that names the cause."""
    lines = [line.strip() for line in message.split("<non-verbose/>")[0].splitlines() if line.strip()]
    cause = next((line.removeprefix("error:").strip() for line in lines if line.startswith("error:")), None)
    return (cause or (lines or ["no reason given"])[0]).split(";")[0][:300]
