"""What an answer may be asked to obey, as values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Mark = int | str | Sequence[int | str]  # a special token by its id, a text, or several of these in a row


class GrammarError(ValueError):
    """A grammar that is refused, with the reason in words; nothing was decoded."""


def wrong(where: str, value: object, allowed: str) -> GrammarError:
    """The house's form of an error, the value cut short."""
    shown = repr(value)
    return GrammarError(f"{where} is {shown if len(shown) <= 80 else shown[:77] + '...'}; allowed: {allowed}")


@dataclass(frozen=True)
class JSONSchema:
    """A JSON value that validates against a schema (draft 2020-12, or the one that `$schema` names).

    Properties come in the schema's order, with at most one space behind a comma and a colon. Keywords that
    cannot be guaranteed (`not`, `if`, `uniqueItems`, remote references, ...) are refused.
    """

    schema: Mapping[str, Any] | bool


@dataclass(frozen=True)
class JSONObject:
    """Any JSON object."""


@dataclass(frozen=True)
class Regex:
    """A text that the pattern matches as a whole. Syntax of Rust's regex crate: no look-around, no references."""

    pattern: str


@dataclass(frozen=True)
class Choice:
    """One of these texts."""

    options: Sequence[str]


@dataclass(frozen=True)
class ToolCalls:
    """Calls of tools: open {"name": ..., "arguments": {...}} close, between `at_least` and `at_most` of them.

    tools: {"name", "parameters"} of each, parameters a JSON Schema of an object (None: no arguments).
    open, close: what stands around a call: ids of special tokens, texts, or several of these in a row.
    separator: what stands between two calls. name, arguments: how a call's two keys are spelt.
    """

    tools: Sequence[Mapping[str, Any]]
    open: Mark
    close: Mark
    at_least: int = 1
    at_most: int | None = None
    separator: Mark = ""
    name: str = "name"
    arguments: str = "arguments"


@dataclass(frozen=True)
class FreeOr:
    """Any text that shows something, calls, or both in this order; `at_least` counts only where there are calls."""

    calls: ToolCalls


@dataclass(frozen=True)
class CallsOr:
    """Either calls, or a JSON value and nothing else; `at_least` counts only where there are calls."""

    calls: ToolCalls
    answer: JSONSchema | JSONObject


Spec = JSONSchema | JSONObject | Regex | Choice | ToolCalls | FreeOr | CallsOr
