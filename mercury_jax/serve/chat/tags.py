"""Texts between tags, `<|name|>` and `<|/name|>`, and code in Markdown's fences."""

from __future__ import annotations

import re

CURSOR = "<|cursor|>"
_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[^\n`]*(?:\n|\Z)", re.MULTILINE)


def open_tag(name: str) -> str:
    return f"<|{name}|>"


def close_tag(name: str) -> str:
    return f"<|/{name}|>"


def span(text: str, name: str, start: int = 0, outer: bool = True) -> tuple[int, int] | None:
    """(start, end) of what stands between the first opening tag and the last closing one (not outer: the next one);
    None where one is missing. A text that itself speaks of the tags is so taken whole."""
    first = text.find(open_tag(name), start)
    begin = first + len(open_tag(name))
    end = text.rfind(close_tag(name), begin) if outer else text.find(close_tag(name), begin)
    return None if first < 0 or end < 0 else (begin, end)


def inside(text: str, name: str) -> str | None:
    """What stands between the tags, without the line ends that belong to them."""
    at = span(text, name)
    return None if at is None else trimmed(text[slice(*at)])


def trimmed(text: str) -> str:
    """Without one line end at either side: tags stand on lines of their own."""
    return text.removeprefix("\n").removesuffix("\n")


def unfenced(text: str, held: str = "") -> tuple[str, bool]:
    """(the code of a reply, whether it stood in a fence): from the first fence to the last, or all there is.

    What is said around a fence is dropped, and so are line ends around code without one. held: what the code is a
    version of; where that holds fences itself, only a reply that begins with one stands in a fence.
    """
    first = _FENCE.search(text)
    if first is None or (_FENCE.search(held) and text[: first.start()].strip()):
        return text.strip("\n"), False
    marks = [m for m in _FENCE.finditer(text, first.end()) if m.group().strip() == first.group(1)]
    body = text[first.end() : marks[-1].start() if marks else len(text)]
    return body.removesuffix("\n"), True


def bare(text: str, name: str) -> str:
    """Without the tags of the request, where a reply repeats them around its code."""
    for edge in (open_tag(name) + "\n", open_tag(name)):
        text = text.removeprefix(edge)
    for edge in ("\n" + close_tag(name), close_tag(name)):
        text = text.removesuffix(edge)
    return text
