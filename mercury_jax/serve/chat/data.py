"""Plain data of a request, looked at field by field; whatever does not fit is Refused by its name."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from mercury_jax.serve.chat.refused import Refused

SHOWN = 80  # characters of a refused value that are repeated
MOST_DEPTH = 40  # lists within lists: less than a chat template takes
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def refuse(param: str, value: Any, allowed: str) -> Refused:
    """The house's form of an error, with the value cut short."""
    shown = repr(value)
    shown = shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}..."
    return Refused(param, f"{param} is {shown}; allowed: {allowed}")


def mapping(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise refuse(name, value, "an object")
    return value


def listed(value: Any, name: str, least: int, most: int) -> list[Any]:
    if not isinstance(value, list):
        raise refuse(name, value, "a list")
    if not least <= len(value) <= most:
        raise Refused(name, f"{name} has {len(value)} entries; allowed: {least}..{most}")
    return value


def text(value: Any, name: str, least: int = 0, most: int | None = None) -> str:
    """A text that UTF-8 can write: a lone surrogate, which JSON may spell, is refused."""
    if not isinstance(value, str):
        raise refuse(name, value, "a string")
    if len(value) < least or (most is not None and len(value) > most):
        raise Refused(name, f"{name} has {len(value)} characters; allowed: {least}..{most or 'any number'}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        found = f"U+{ord(value[error.start]):04X} at {error.start}"
        raise Refused(name, f"{name} has a lone surrogate, {found}; allowed: Unicode text") from None
    return value


def function_name(value: Any, name: str) -> str:
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise refuse(name, value, "1 to 64 of a-z, A-Z, 0-9, underscore, dot and dash")
    return value


def json_object(value: Any, name: str) -> dict[str, Any]:
    """The object that a JSON text spells, or that is given as it is; nothing and "" are the empty one."""
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        try:
            value = json.loads(value, parse_constant=_no_number)
        except (ValueError, RecursionError):
            raise refuse(name, value, "the JSON text of an object") from None
    if not isinstance(value, dict):
        raise refuse(name, value, "the JSON text of an object")
    return plain(value, name)


def plain(value: Any, name: str) -> Any:
    """`value`, whose texts are Unicode and whose lists are not too deep."""
    stack = [(value, 0)]
    while stack:
        found, depth = stack.pop()
        if depth > MOST_DEPTH:
            raise Refused(name, f"{name} has lists within lists; allowed: at most {MOST_DEPTH} levels")
        if isinstance(found, str):
            text(found, name)
        elif isinstance(found, dict):
            stack += [(inside, depth + 1) for pair in found.items() for inside in pair]
        elif isinstance(found, list):
            stack += [(inside, depth + 1) for inside in found]
    return value


def _no_number(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
