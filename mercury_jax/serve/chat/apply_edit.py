"""Apply: merges an update snippet, which shows how parts of a file should read, into the file.

The snippet replaces unchanged code by marks such as "# ... existing code ...". If the position of its lines is
unambiguous, `merge_update` computes the merged file exactly; otherwise a model writes the file (`apply_prompt`).

The runs of lines between marks (`UpdateSegment`) are placed in order. A segment is placed by its anchors: its first and
its last line that also occur in the file. The lines of the file between the anchors are replaced by the lines of the
segment. Lines before the first anchor and after the last one are insertions, with two exceptions:

    - A line that redefines what the neighbouring line of the file defines (`x = 2` beside `x = 1`, `return b` beside
      `return a`) replaces that line.
    - A segment that shows a whole block, that is, a definition and all lines indented under it, replaces the block.

No other line of the file is dropped: a mark is assumed at both ends of the snippet.

The merge fails if a segment has no anchor, if two places fit equally well, or if a new line is so similar to a line of
the file that it may be meant to replace it.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from typing import NamedTuple

from mercury_jax.serve.chat.code_prompts import (
    CodePrompt,
    instruction_prompt,
    tagged_text,
    unfenced,
    without_tags,
)
from mercury_jax.serve.errors import invalid_request
from mercury_jax.types import LM

ORIGINAL, UPDATE = "original_code", "update_snippet"
APPLY_INSTRUCTIONS = """\
You merge a change into a file. The message holds the file (original_code) and a snippet of how parts of it should \
read (update_snippet), in which comments such as "... existing code ..." stand for what stays as it is. Write the \
whole merged file, and nothing else, between two lines of three backticks."""

# Marks of omitted code, in the comment syntax of common languages: dots with a word, or dots in a comment.
_DOTS = r"(?:\.{3}|…)"
_WORDS = r"(?:the\s+)?(?:rest|existing|unchanged|remaining|previous|other|same|keep|omitted)\b"
_COMMENT = r"(?:#|//|--|/\*|\{/\*|<!--|;|%|\(\*)"
_COMMENT_END = r"(?:\*/\}?|-->|\*\))?"
_MARK = re.compile(
    rf"\s*(?:{_COMMENT}?\s*{_DOTS}\s*\(?{_WORDS}[^\n]*|{_COMMENT}\s*{_WORDS}[^\n]*{_DOTS}[^\n]*|"
    rf"{_COMMENT}\s*{_DOTS}\s*{_COMMENT_END})\s*",
    re.IGNORECASE,
)
# The subject of a line: a return, an import, a definition, or the name that is assigned.
_RETURNED = re.compile(r"\s*(return)\b")
_IMPORTED = re.compile(r"\s*(?:import|from|use|using|require|#include)\b(.*)")
_DEFINED = re.compile(
    r"\s*(?:\w+\s+)*?(?:def|class|function|func|fn|struct|interface|enum|trait|impl)\s+(\w+)"
)
_ASSIGNED = re.compile(r"\s*([^\s=(:][^=(:]*?)\s*(?:=(?!=)|:(?![:/]))")
_COMMON = ("", "else", "try", "do", "end", "finally", "pass", "return", "break", "continue", "begin", "then")
_SIMILAR = 0.7  # fraction of common characters from which on two lines count as similar
_NEARBY = 100  # lines of the file that are compared with a new line
_MAX_NEW = 2000  # maximum lines of a segment outside of its anchors
_MAX_LINE = 500  # characters; a longer line is neither a mark nor a version of another line
MAX_WORK = 4_000_000  # maximum line comparisons to place one segment


class ApplyInput(NamedTuple):
    """The message of an apply request: the original file, the update snippet, and the whole text of the message."""

    original: str
    update: str
    text: str


class AmbiguousUpdate(Exception):
    """The position of the snippet's lines in the file is ambiguous."""


class UpdateSegment(NamedTuple):
    """Lines of the snippet between two marks.

    Attributes:
        head: Blank lines at the start.
        lines: The lines between `head` and `tail`; the first and the last of them are not blank.
        tail: Blank lines at the end.
        first: Whether no mark precedes the segment.
        last: Whether no mark follows the segment.
        indent: Indentation of the mark that follows; None for the last segment.
    """

    head: list[str]
    lines: list[str]
    tail: list[str]
    first: bool
    last: bool
    indent: int | None


class Placement(NamedTuple):
    """The lines first..last of a segment correspond to the lines start..end of the file, all inclusive."""

    first: int
    last: int
    start: int
    end: int


def parse_apply(content: str) -> ApplyInput:
    """Splits the message of an apply request into file and update snippet."""
    parts = []
    for name in (ORIGINAL, UPDATE):
        part = tagged_text(content, name)
        if part is None:
            missing = f"<|{name}|> ... <|/{name}|>"
            message = f"messages[0].content has no {missing}; allowed: a text with both parts"
            raise invalid_request("messages", message)
        parts.append(part)
    return ApplyInput(parts[0], parts[1], content)


def apply_update(request: ApplyInput, guess: bool = False) -> str | None:
    """Merges the update of an apply request without a model, if possible."""
    return merge_update(request.original, unfenced(request.update, request.original)[0], guess)


def apply_prompt(lm: LM, request: ApplyInput, instruct: bool = True) -> CodePrompt:
    """Makes the prompt that asks a model to merge the update."""
    if not instruct:
        fault = f"messages[0].content does not say where its {UPDATE} belongs, and {lm.name} does not merge"
        allowed = "lines of the file on both sides of each change"
        raise invalid_request("messages", f"{fault}; allowed: {allowed}")
    return instruction_prompt(lm, APPLY_INSTRUCTIONS, request.text)


def apply_reply(request: ApplyInput, text: str) -> str:
    """Extracts the merged file from a model's reply."""
    code = without_tags(unfenced(without_tags(text.strip("\n"), ORIGINAL), request.original)[0], ORIGINAL)
    missing = request.original.endswith("\n") and code and not code.endswith("\n")
    return code + "\n" if missing else code


def merge_update(original: str, update: str, guess: bool = False) -> str | None:
    """Merges an update snippet into a file."""
    file, merged, position = original.split("\n"), list[str](), 0
    known = {line.rstrip() for line in file}
    lines = update.split("\n")
    # A line that also occurs in the file is not a mark, even if it looks like one.
    is_mark = lambda line: len(line) <= _MAX_LINE and _MARK.fullmatch(line) and line.rstrip() not in known
    marks = [i for i, line in enumerate(lines) if is_mark(line)]
    try:
        for a, b in pairwise([-1, *marks, len(lines)]):
            part = lines[a + 1 : b]
            full = [i for i, line in enumerate(part) if line.strip()]
            if not full:
                continue
            start, end = full[0], full[-1] + 1
            indent = None if b == len(lines) else _indent(lines[b])
            segment = UpdateSegment(part[:start], part[start:end], part[end:], a < 0, b == len(lines), indent)
            start, end, new = _merge_segment(segment, file, position, guess)
            merged += [*file[position:start], *new]
            position = end
    except AmbiguousUpdate:
        return None
    return "\n".join([*merged, *file[position:]])


def _merge_segment(
    segment: UpdateSegment, file: list[str], position: int, guess: bool
) -> tuple[int, int, list[str]]:
    """Merges one segment.

    Returns:
        (start, end, lines): the lines [start, end) of the file are replaced by `lines`.
    """
    place = _place(segment.lines, file, position)
    # Without an anchor, the first segment of a snippet is put at the start of the file, and the last one at its end.
    if place is None:
        if segment.first and not segment.last and position == 0:
            return 0, 0, [*segment.lines, *segment.tail]
        if segment.last and not segment.first:
            # keep the line end at the end of the file
            end = max(position, len(file) - (len(file) > 1 and not file[-1]))
            return end, end, [*segment.head, *segment.lines]
        raise AmbiguousUpdate
    start, end, lines = place.start, place.end + 1, segment.lines
    if len(lines) - (place.last - place.first) > _MAX_NEW:
        raise AmbiguousUpdate
    # Grow the replaced range over lines of the file that the segment's outer lines replace: upwards from the first
    # anchor, then downwards from the last one, unless the segment shows a whole block, whose end is known.
    for line in reversed(lines[: place.first]):
        start -= start > position and _replaces(
            line, file[max(position, start - _NEARBY) : start][::-1], guess
        )
    block = _block_end(segment, place, file)
    if block is None:
        for line in lines[place.last + 1 :]:
            end += end < len(file) and _replaces(line, file[end : end + _NEARBY], guess)
    else:
        end = block
    # Keep the blank lines between inserted lines and existing lines of the file.
    if place.first and start == place.start and start > position and file[start - 1].strip():
        lines = segment.head + lines
    appended = place.last + 1 < len(segment.lines) and end == place.end + 1
    if appended and end < len(file) and file[end].strip():
        lines = lines + segment.tail
    return start, end, lines


def _place(lines: list[str], file: list[str], position: int) -> Placement | None:
    """Finds the best place of a segment's lines.

    The anchors may occur several times in the file. Among all pairs of occurrences, the best pair has the fewest lines
    between the anchors that differ; ties are decided by the number of equal lines next to the anchors.
    """
    where: dict[str, list[int]] = {}
    for i in range(position, len(file)):
        where.setdefault(file[i].rstrip(), []).append(i)
    known = [i for i, line in enumerate(lines) if _distinctive(line) and line.rstrip() in where]
    if not known:
        return None
    first, last = known[0], known[-1]
    starts, ends = where[lines[first].rstrip()], where[lines[last].rstrip()]
    if len(starts) * len(ends) * (len(lines) + len(file)) > MAX_WORK:
        raise AmbiguousUpdate
    costs = []
    for start in starts:
        for end in ends:
            if (start == end) if first == last else (start < end):
                ours, theirs = Counter(lines[first : last + 1]), Counter(file[start : end + 1])
                before = zip(reversed(lines[:first]), reversed(file[max(0, start - first) : start]))
                near = [*before, *zip(lines[last + 1 :], file[end + 1 : end + len(lines)])]
                differing = ((ours - theirs) + (theirs - ours)).total()
                equal = sum(a.rstrip() == b.rstrip() for a, b in near)
                costs.append(((differing, -equal), Placement(first, last, start, end)))
    costs.sort()
    if not costs or (len(costs) > 1 and costs[0][0] == costs[1][0]):
        raise AmbiguousUpdate
    # Extend the place over equal lines next to the anchors, such as brackets, which are too common to be anchors.
    first, last, start, end = costs[0][1]
    same = lambda i, j: lines[i].rstrip() == file[j].rstrip()
    while first and start > position and same(first - 1, start - 1):
        first, start = first - 1, start - 1
    while last + 1 < len(lines) and end + 1 < len(file) and same(last + 1, end + 1):
        last, end = last + 1, end + 1
    return Placement(first, last, start, end)


def _block_end(segment: UpdateSegment, place: Placement, file: list[str]) -> int | None:
    """Finds the end of the block of the file that the segment replaces."""
    new, depth = segment.lines[place.last + 1 :], _indent(segment.lines[place.last])
    if not new or not new[0].strip() or _indent(new[0]) <= depth:
        return None
    closing = next((line for line in new if line.strip() and _indent(line) <= depth), None)
    # a mark inside the block: the snippet omits the rest of the block
    if closing is None and segment.indent is not None and segment.indent > depth:
        return None
    end = place.end + 1
    while end < len(file) and (not file[end].strip() or _indent(file[end]) > depth):
        end += 1
    bracket = "" if closing is None or _distinctive(closing) else closing.rstrip()
    if bracket and end < len(file) and file[end].rstrip() == bracket:
        return end + 1
    while end > place.end + 1 and not file[end - 1].strip():
        end -= 1
    return end


def _replaces(line: str, near: list[str], guess: bool) -> bool:
    """Says whether a new line replaces the nearest line of the file."""
    if line.rstrip() == near[0].rstrip() or _same_subject(line, near[0]):
        return True
    depth = _indent(line)
    for other in near if line.strip() else ():
        if other.strip() and _indent(other) < depth:
            break
        same, a, b = _same_subject(line, other), line.strip(), other.strip()
        if same is None and not guess and b:  # similar lines share most characters
            same = 2 * (Counter(a) & Counter(b)).total() >= _SIMILAR * (len(a) + len(b))
        if same:
            raise AmbiguousUpdate
    return False


def _same_subject(a: str, b: str) -> bool | None:
    """Says whether two lines of the same indentation define, assign, import or return the same; None if unknown."""
    if _indent(a) != _indent(b) or max(len(a), len(b)) > _MAX_LINE:
        return False
    for pattern in (_RETURNED, _IMPORTED, _DEFINED, _ASSIGNED):
        ours, theirs = pattern.match(a), pattern.match(b)
        if ours and theirs:  # the last word: `const x = 1` and `let x = 2` both assign x
            return ours.group(1).split()[-1:] == theirs.group(1).split()[-1:]
        if ours or theirs:
            return False
    return None


def _distinctive(line: str) -> bool:
    """Says whether a line is specific enough for an anchor: more than a bracket, an `else:` or an `end`."""
    return " ".join(re.findall(r"\w+", line)) not in _COMMON


def _indent(line: str) -> int:
    """Returns the width of a line's indentation; a tab advances to the next multiple of 4."""
    expanded = line.expandtabs(4)
    return len(expanded) - len(expanded.lstrip())
