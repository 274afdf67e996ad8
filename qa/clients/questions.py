"""What nano can answer, and what it is asked for."""

from __future__ import annotations

from typing import Any

# Trained on, and solved at temperature 0 by every rule and effort.
SUDOKU, SOLVED = "0200\n4302\n3401\n0004", "1243\n4312\n3421\n2134"
SUM, TOTAL = "347+585=", "932"
MODEL = "mercury-2"  # the vendor's name: the server is told of no other


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


# Numbers have bounds: a tiny model may write a hundred digits, which is JSON, and no integer of JavaScript.
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two digits",
        "parameters": {"type": "object", "properties": {"a": DIGIT, "b": DIGIT}, "required": ["a", "b"],
                       "additionalProperties": False},
    },
}  # fmt: skip
PAINT: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "paint",
        "parameters": {"type": "object", "properties": {"colour": {"enum": ["red", "green"]}},
                       "required": ["colour"], "additionalProperties": False},
    },
}  # fmt: skip
# Text of any length: the end of text is banned by its id, so that exactly max_tokens are written.
ENDLESS: dict[str, Any] = {"logit_bias": {"3": -100}}
