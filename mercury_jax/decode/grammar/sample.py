"""A shortest text of a regular expression: what a search for the end of an answer tries first.

A mask of allowed bytes does not tell `.*abc` after `ab` from `.*abc` after `xy`; the expression does.
"""

from __future__ import annotations

import importlib
from typing import Any

from mercury_jax.decode.grammar.spec import wrong

MOST = 4_096  # characters of a sample


class _TooLong(Exception):
    pass


def sample(pattern: str) -> str | None:
    """A short text that the pattern matches, or None where it cannot be read so. Only a guess: verify it.

    GrammarError where every such text is longer than MOST.
    """
    parser: Any = importlib.import_module("re._parser")
    try:
        return _of(parser.parse(pattern))
    except _TooLong:
        raise wrong("pattern", pattern, f"what a text of at most {MOST} characters matches") from None
    except (ValueError, KeyError, StopIteration, RecursionError, OverflowError, parser.error):
        return None


def _of(parsed: Any) -> str:
    text = ""
    for op, arg in parsed:
        text += _piece(str(op), arg)
        if len(text) > MOST:
            raise _TooLong
    return text


def _piece(op: str, arg: Any) -> str:
    if op == "LITERAL":
        return chr(arg)
    if op == "ANY":
        return "a"
    if op == "NOT_LITERAL":
        return "b" if arg == ord("a") else "a"
    if op == "IN":
        return _member(arg)
    if op == "BRANCH":
        return min((_of(branch) for branch in arg[1]), key=len)
    if op in ("SUBPATTERN", "ATOMIC_GROUP"):
        return _of(arg[-1] if op == "SUBPATTERN" else arg)
    if op in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
        least, _, inner = arg
        one = _of(inner)
        if least * len(one) > MOST:
            raise _TooLong
        return one * least
    return ""  # an anchor


_CATEGORY = {"CATEGORY_DIGIT": "0", "CATEGORY_SPACE": " ", "CATEGORY_WORD": "a"}
_NONE = {"CATEGORY_NOT_DIGIT": "a", "CATEGORY_NOT_SPACE": "a", "CATEGORY_NOT_WORD": "-"}


def _member(items: Any) -> str:
    """One character of a class."""
    named = [(str(op), arg) for op, arg in items]
    if named[0][0] == "NEGATE":
        return next(c for c in "a0 -_.AzZ9" if not any(_holds(op, arg, c) for op, arg in named[1:]))
    op, arg = named[0]
    if op == "CATEGORY":
        return {**_CATEGORY, **_NONE}[str(arg)]
    return chr(arg[0] if op == "RANGE" else arg)


def _holds(op: str, arg: Any, character: str) -> bool:
    if op == "RANGE":
        return arg[0] <= ord(character) <= arg[1]
    if op == "CATEGORY":
        return character in {"CATEGORY_DIGIT": "09", "CATEGORY_SPACE": " ", "CATEGORY_WORD": "a0_AzZ9"}.get(
            str(arg), ""
        )
    return ord(character) == arg
