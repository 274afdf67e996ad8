"""A snippet with "... existing code ..." in it, merged into its file by lines that both have.

The snippet's runs of lines between such marks are placed one behind the other. A run stands where its first and its
last line that the file has stand too (its anchors); between them the file reads as the run does. What the run has
before the first anchor or behind the last one is new, but for two cases: a line that gives the thing of the line next
to it another value (`x = 2` beside `x = 1`, `return b` beside `return a`) takes its place; and where the run shows a
whole block, a definition and all that is indented under it, it takes the place of that block. Nothing else of the
file is ever dropped: a mark is understood at both ends of the snippet.

There is no merge where a run has no anchor, where two places fit it equally well, and where a new line looks so much
like one of the file that it may stand for it.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from typing import NamedTuple

_DOTS = r"(?:\.{3}|…)"
_WORDS = r"(?:the\s+)?(?:rest|existing|unchanged|remaining|previous|other|same|keep|omitted)\b"
_COMMENT = r"(?:#|//|--|/\*|\{/\*|<!--|;|%|\(\*)"
_END = r"(?:\*/\}?|-->|\*\))?"
_MARK = re.compile(
    rf"\s*(?:{_COMMENT}?\s*{_DOTS}\s*\(?{_WORDS}[^\n]*|{_COMMENT}\s*{_WORDS}[^\n]*{_DOTS}[^\n]*|"
    rf"{_COMMENT}\s*{_DOTS}\s*{_END})\s*",
    re.IGNORECASE,
)
_VALUE = re.compile(r"\s*([^\s=(:][^=(:]*?)\s*(?:=(?!=)|:(?![:/]))")  # what is given a value
_DEFINED = re.compile(
    r"\s*(?:\w+\s+)*?(?:def|class|function|func|fn|struct|interface|enum|trait|impl)\s+(\w+)"
)
_IMPORTED = re.compile(r"\s*(?:import|from|use|using|require|#include)\b(.*)")
_RETURNED = re.compile(r"\s*(return)\b")
_WEAK = ("", "else", "try", "do", "end", "finally", "pass", "return", "break", "continue", "begin", "then")
_ALIKE = 0.7  # share of characters that two lines have in common
_FAR = 100  # lines that are searched for one that a new line may stand for
_MOST_NEW = 2000  # lines of a run outside of its anchors
_LONG = 500  # characters; a longer line is no mark, and another version of none
MOST_WORK = 4_000_000  # lines compared to place one run


class Run(NamedTuple):
    """Lines of the snippet between two marks, without blank lines at either end: those are head and tail. indent: of
    the mark behind (None: the snippet ends)."""

    head: list[str]
    lines: list[str]
    tail: list[str]
    first: bool
    last: bool
    indent: int | None


class Place(NamedTuple):
    """Lines first..last of a run stand at lines start..end of the file."""

    first: int
    last: int
    start: int
    end: int


class Unclear(Exception):
    """The snippet does not say where its lines belong."""


def merged(original: str, update: str, guess: bool = False) -> str | None:
    """The merged file; None where the snippet does not say unambiguously where its lines belong.

    guess: a new line that looks like one of the file is new all the same.
    """
    file, made, at = original.split("\n"), list[str](), 0
    try:
        for run in _runs(update.split("\n"), {line.rstrip() for line in file}):
            start, end, lines = _placed(run, file, at, guess)
            made += [*file[at:start], *lines]
            at = end
    except Unclear:
        return None
    return "\n".join([*made, *file[at:]])


def _runs(lines: list[str], known: set[str]) -> list[Run]:
    """The snippet's runs. A line that the file has is no mark."""
    marks = [i for i, line in enumerate(lines) if _is_mark(line) and line.rstrip() not in known]
    found = []
    for a, b in pairwise([-1, *marks, len(lines)]):
        run = lines[a + 1 : b]
        full = [i for i, line in enumerate(run) if line.strip()]
        if full:
            core = slice(full[0], full[-1] + 1)
            indent = None if b == len(lines) else _indent(lines[b])
            found.append(Run(run[: full[0]], run[core], run[full[-1] + 1 :], a < 0, b == len(lines), indent))
    return found


def _is_mark(line: str) -> bool:
    return len(line) <= _LONG and _MARK.fullmatch(line) is not None


def _placed(run: Run, file: list[str], at: int, guess: bool) -> tuple[int, int, list[str]]:
    """(start, end, lines): which lines of the file, from `at` on, become which."""
    place = _place(run.lines, file, at)
    if place is None:
        return _at_an_edge(run, file, at)
    start, end, lines = place.start, place.end + 1, run.lines
    if len(lines) - (place.last - place.first) > _MOST_NEW:
        raise Unclear
    for line in reversed(lines[: place.first]):
        start -= start > at and _replaces(line, file[max(at, start - _FAR) : start][::-1], guess)
    block = _block_end(run, place, file)
    for line in lines[place.last + 1 :] if block is None else ():
        end += end < len(file) and _replaces(line, file[end : end + _FAR], guess)
    end = end if block is None else block
    # New lines keep their distance to what stands there already.
    if place.first and start == place.start and start > at and file[start - 1].strip():
        lines = run.head + lines
    new = place.last + 1 < len(run.lines) and end == place.end + 1
    if new and end < len(file) and file[end].strip():
        lines = lines + run.tail
    return start, end, lines


def _at_an_edge(run: Run, file: list[str], at: int) -> tuple[int, int, list[str]]:
    """Lines of which the file has none begin it or end it, where the snippet has them there."""
    if run.first and not run.last and at == 0:
        return 0, 0, [*run.lines, *run.tail]
    if run.last and not run.first:
        end = len(file) - (len(file) > 1 and not file[-1])  # the last line end stays behind them
        return max(at, end), max(at, end), [*run.head, *run.lines]
    raise Unclear


def _place(lines: list[str], file: list[str], at: int) -> Place | None:
    """The best place of a run; None where it has no anchor."""
    where: dict[str, list[int]] = {}
    for i in range(at, len(file)):
        where.setdefault(file[i].rstrip(), []).append(i)
    known = [i for i, line in enumerate(lines) if _telling(line) and line.rstrip() in where]
    if not known:
        return None
    first, last = known[0], known[-1]
    starts, ends = where[lines[first].rstrip()], where[lines[last].rstrip()]
    if len(starts) * len(ends) * (len(lines) + len(file)) > MOST_WORK:
        raise Unclear
    places = [Place(first, last, a, b) for a in starts for b in ends if (a == b if first == last else a < b)]
    costs = sorted((_cost(lines, file, place), place) for place in places)
    if not costs or (len(costs) > 1 and costs[0][0] == costs[1][0]):
        raise Unclear
    return _widened(lines, file, costs[0][1], at)


def _cost(lines: list[str], file: list[str], place: Place) -> tuple[int, int]:
    """(lines between the anchors that only one side has, lines next to the anchors that both have, negated)."""
    first, last, start, end = place
    ours, theirs = Counter(lines[first : last + 1]), Counter(file[start : end + 1])
    before = zip(reversed(lines[:first]), reversed(file[max(0, start - first) : start]), strict=False)
    near = [*before, *zip(lines[last + 1 :], file[end + 1 : end + len(lines)], strict=False)]
    return ((ours - theirs) + (theirs - ours)).total(), -sum(a.rstrip() == b.rstrip() for a, b in near)


def _widened(lines: list[str], file: list[str], place: Place, at: int) -> Place:
    """The place with the lines at its edges that are the same, though they would not say where they stand."""
    first, last, start, end = place
    while first and start > at and lines[first - 1].rstrip() == file[start - 1].rstrip():
        first, start = first - 1, start - 1
    while (
        last + 1 < len(lines) and end + 1 < len(file) and lines[last + 1].rstrip() == file[end + 1].rstrip()
    ):
        last, end = last + 1, end + 1
    return Place(first, last, start, end)


def _block_end(run: Run, place: Place, file: list[str]) -> int | None:
    """Where the file's block ends, if the run shows all of it behind its last anchor; None if it does not."""
    tail, depth = run.lines[place.last + 1 :], _indent(run.lines[place.last])
    if not tail or not tail[0].strip() or _indent(tail[0]) <= depth:
        return None
    closing = next((line for line in tail if line.strip() and _indent(line) <= depth), None)
    if closing is None and run.indent is not None and run.indent > depth:  # the rest of it is left out
        return None
    end = place.end + 1
    while end < len(file) and (not file[end].strip() or _indent(file[end]) > depth):
        end += 1
    if (
        closing is not None
        and end < len(file)
        and not _telling(closing)
        and file[end].rstrip() == closing.rstrip()
    ):
        return end + 1
    while end > place.end + 1 and not file[end - 1].strip():
        end -= 1
    return end


def _replaces(line: str, near: list[str], guess: bool) -> bool:
    """Whether a new line takes the place of the first of the lines near to it. Unclear where it may be of another."""
    if line.rstrip() == near[0].rstrip() or _same_thing(line, near[0]):
        return True
    depth = _indent(line)
    for other in near if line.strip() else ():
        if other.strip() and _indent(other) < depth:
            break
        same = _same_thing(line, other)
        if same or (same is None and not guess and _alike(line, other)):
            raise Unclear
    return False


def _same_thing(a: str, b: str) -> bool | None:
    """Whether two lines at the same depth define the same, give a value to the same, or both return; None where that
    cannot be said."""
    if _indent(a) != _indent(b) or max(len(a), len(b)) > _LONG:
        return False
    for pattern in (_RETURNED, _IMPORTED, _DEFINED, _VALUE):
        ours, theirs = pattern.match(a), pattern.match(b)
        if ours and theirs:  # the last word: `const x = 1` and `let x = 2` are about x
            return ours.group(1).split()[-1:] == theirs.group(1).split()[-1:]
        if ours or theirs:
            return False
    return None


def _alike(a: str, b: str) -> bool:
    """Whether a line may be another version of one."""
    a, b = a.strip(), b.strip()
    return bool(a and b) and 2 * (Counter(a) & Counter(b)).total() >= _ALIKE * (len(a) + len(b))


def _telling(line: str) -> bool:
    """Whether a line says where it stands: more than a bracket, an `else:` or an `end`."""
    return " ".join(re.findall(r"\w+", line)) not in _WEAK


def _indent(line: str) -> int:
    expanded = line.expandtabs(4)
    return len(expanded) - len(expanded.lstrip())
