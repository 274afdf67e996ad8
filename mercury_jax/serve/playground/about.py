"""What the page is told of the model: its rules, limits, and a few things to ask it."""

from __future__ import annotations

import inspect
from typing import Any

from mercury_jax.decode import rules
from mercury_jax.decode.effort import EFFORTS
from mercury_jax.decode.parts import Part
from mercury_jax.serve.engine import sampling_params
from mercury_jax.serve.playground.frames import Labels
from mercury_jax.serve.playground.request import MOST_CHARACTERS, MOST_STEPS, MOST_TOKENS
from mercury_jax.types import LM

BASELINE = "confidence"  # one token a pass, the surest first

_CODE = {"kind": "text", "title": "Python", "prompt": "def fibonacci(n):", "max_tokens": 64}
_AREA = {
    "kind": "infill", "title": "Fill in", "before": "def area(r):\n", "after": "\n    return a", "max_tokens": 16,
}  # fmt: skip
EXAMPLES: dict[str, list[dict[str, Any]]] = {
    "nano": [
        {"kind": "chat", "title": "Sudoku", "prompt": "0000\n0301\n1020\n0000", "max_tokens": 32, "p": 0.99},
        {"kind": "chat", "title": "Addition", "prompt": "968+574=", "max_tokens": 64, "p": 0.99},
        _CODE,
        _AREA,
    ],
}
GENERAL: list[dict[str, Any]] = [
    {"kind": "chat", "title": "Explain", "prompt": "Why does ice float? Two sentences.", "max_tokens": 128},
    {"kind": "chat", "title": "JSON", "prompt": "Three rivers with their lengths in km.", "max_tokens": 128,
     "schema": {"type": "array", "items": {
         "type": "object", "properties": {"name": {"type": "string"}, "km": {"type": "integer"}},
         "required": ["name", "km"], "additionalProperties": False}}},
    _CODE,
    _AREA,
]  # fmt: skip


def info(lm: LM, context: int, block: int, locked: bool) -> dict[str, Any]:
    """What `GET /playground/info` answers."""
    menu = sampling_params.rule_set(lm)
    offered = [_rule(part) for part in menu.rules]
    return {
        "model": lm.name,
        "parameters": lm.parameters,
        "context": context,
        "block": block,
        "locked": locked,
        "thinking": lm.tokenizer.thinking is not None,
        "holes": lm.model.config.pattern != "block_causal" or lm.tokenizer.fim is not None,
        "rules": offered,
        "baseline": BASELINE if BASELINE in menu.names else None,
        "temperature": float(_number(menu.own.temperature)),
        "efforts": {name: e._asdict() for name, e in EFFORTS.items()},
        "mask": None if lm.corruption.mask is None else Labels(lm).of(lm.corruption.mask)[0],
        "limits": {
            "max_tokens": most_tokens(context), "steps": MOST_STEPS, "temperature": 2, "characters": MOST_CHARACTERS,
        },
        "examples": EXAMPLES.get(lm.name, GENERAL),
    }  # fmt: skip


def most_tokens(context: int) -> int:
    """The longest answer that the page may ask for."""
    return max(1, min(MOST_TOKENS, context - 1))


def _number(value: Any) -> float:
    """A temperature as a number; None is the argmax."""
    return 0.0 if value is None else float(value)


def _rule(part: Part) -> dict[str, Any]:
    """A rule's name, the first sentence of its docstring, and its first knob, which `p` sets."""
    about = (inspect.getdoc(rules.ALL[part.name]) or "").split("\n\n")[0].replace("\n", " ")
    knob = next(iter(part.knobs), None)
    return {
        "name": part.name,
        "about": about,
        "knob": knob,
        "value": None if knob is None else _number(part.knobs[knob]),
        "temperature": _number(part.temperature),
    }
