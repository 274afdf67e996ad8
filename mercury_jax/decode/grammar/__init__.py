"""Grammars: answers that obey a JSON Schema, a regular expression, a choice, or the form of tool calls.

    grammar = compile(lm.tokenizer, JSONSchema({"type": "object", ...}))
    walker = grammar.walk(budget=200)

A grammar rules what is committed, from left to right; what a diffusion model drafts further on is tentative
until the frontier reaches it. Needs the package llguidance (the extra `serve`), which is imported at first use.
"""

from mercury_jax.decode.grammar.compile import Grammar, compile
from mercury_jax.decode.grammar.spec import (
    CallsOr,
    Choice,
    FreeOr,
    GrammarError,
    JSONObject,
    JSONSchema,
    Regex,
    Spec,
    ToolCalls,
)
from mercury_jax.decode.grammar.walk import Step, Walker

__all__ = [
    "CallsOr", "Choice", "FreeOr", "Grammar", "GrammarError", "JSONObject", "JSONSchema", "Regex", "Spec", "Step",
    "ToolCalls", "Walker", "compile",
]  # fmt: skip
