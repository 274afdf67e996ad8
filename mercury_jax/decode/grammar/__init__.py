"""Grammars: answers that obey a JSON Schema, a regular expression, a choice, a grammar, or the form of tool calls.

    grammar = compile(lm.tokenizer, JSONSchema({"type": "object", ...}))
    walker = grammar.walk(budget=200)

A grammar constrains what is committed, from left to right; what a diffusion model drafts further on is tentative until
the frontier reaches it. Needs the package llguidance (the extra `serve`), which is imported at first use.

spec         what an answer may be asked to obey
complement   the complement of a schema
rewrite      keywords that llguidance lacks, by those that it has
lark         specs as Lark grammars
refusals     why a schema is refused; the part of a schema that a grammar can enforce
validation   the check of a finished answer
shortest     the shortest value of a JSON Schema
vocabulary   a tokenizer in tokens and in bytes
search       the shortest completion of an answer
grammar      compiled grammars, and one answer as it grows
"""

from mercury_jax.decode.grammar.grammar import Grammar, Walker, WalkerStep, compile
from mercury_jax.decode.grammar.refusals import COMPILE_SECONDS, enforceable
from mercury_jax.decode.grammar.spec import (
    CallsOr,
    Choice,
    FreeOr,
    GrammarError,
    JSONObject,
    JSONSchema,
    Lark,
    Place,
    Regex,
    Spec,
    ToolCalls,
    Without,
    check_bounds,
)

__all__ = [
    "COMPILE_SECONDS", "CallsOr", "Choice", "FreeOr", "Grammar", "GrammarError", "JSONObject",
    "JSONSchema", "Lark", "Place", "Regex", "Spec", "ToolCalls", "Walker", "WalkerStep", "Without", "check_bounds",
    "compile", "enforceable",
]  # fmt: skip
