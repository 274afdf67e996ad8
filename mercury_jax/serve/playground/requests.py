"""What the page may ask for, and what it is told about the model.

`request_fields` checks the JSON of a request field by field, `build_request` makes the `EngineRequest`, and `page_info`
lists rules, limits and examples for the form.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

from mercury_jax.decode import rules as all_rules
from mercury_jax.decode.effort import EFFORTS
from mercury_jax.decode.grammar import JSONSchema
from mercury_jax.decode.prompts import normalise
from mercury_jax.serve.api.constraint import compiled
from mercury_jax.serve.api.errors import invalid, refused
from mercury_jax.serve.api.kinds import (
    REQUIRED,
    Anything,
    Choice,
    Field,
    Integer,
    Items,
    Number,
    Record,
    Text,
)
from mercury_jax.serve.api.numbers import room
from mercury_jax.serve.engine.request import EngineRequest
from mercury_jax.serve.engine.sampling_params import rule_set
from mercury_jax.serve.playground.frames import TokenLabels
from mercury_jax.types import LM

KINDS = ("chat", "text", "infill", "edit")
DEFAULT_ANSWER, DEFAULT_HOLE = 64, 16  # tokens
MAX_TOKENS = 1024  # of an answer: the page does not show more cells well
MAX_CHARACTERS = 65_536
MAX_STEPS = 1024
MAX_STRICTNESS = 1000.0  # each rule has a scale of its own
BASELINE = "confidence"  # the rule that accepts one token per pass, the most confident one

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
    ]
}
GENERAL_EXAMPLES: list[dict[str, Any]] = [
    {"kind": "chat", "title": "Explain", "prompt": "Why does ice float? Two sentences.", "max_tokens": 128},
    {"kind": "chat", "title": "JSON", "prompt": "Three rivers with their lengths in km.", "max_tokens": 128,
     "schema": {"type": "array", "items": {
         "type": "object", "properties": {"name": {"type": "string"}, "km": {"type": "integer"}},
         "required": ["name", "km"], "additionalProperties": False}}},
    _CODE,
    _AREA,
]  # fmt: skip


class PageRequest(NamedTuple):
    """A request of the page.

    Attributes:
        request: For the engine, without its grammar.
        chat: The answer is a turn of a conversation and may think.
        before: Text in front of the hole.
        after: Text behind it.
    """

    request: EngineRequest
    chat: bool
    before: str
    after: str


class SizeLimits(NamedTuple):
    """Most tokens of a request, and tokens of a block."""

    context: int
    block: int

    @property
    def max_tokens(self) -> int:
        """Most tokens of an answer that the page may ask for."""
        return max(1, min(MAX_TOKENS, self.context - 1))


def request_fields(rules: tuple[str, ...], limits: SizeLimits) -> Record:
    """The fields of a request, for a model that offers these rules.

    Args:
        rules: Names of the rules, the default first.
        limits: Most tokens.

    Returns:
        The fields, which read JSON data.
    """
    text = Text(most=MAX_CHARACTERS)
    roles = Choice(("system", "user", "assistant"))
    message = Record(
        (Field("role", roles, REQUIRED, "The speaker."), Field("content", text, REQUIRED, "The text."))
    )
    return Record((
        Field("kind", Choice(KINDS), REQUIRED, "A conversation, a text to continue, or a hole in a text."),
        Field("messages", Items(message, 1, 64), None, "Of chat; of a hole: the conversation that it answers."),
        Field("prompt", text, None, "Of text."),
        Field("before", text, "", "Of a hole: the text in front of it."),
        Field("after", text, "", "Of a hole: the text behind it."),
        Field("selected", text, "", "Of edit: the text that stood there, whose length the hole has."),
        Field("rule", Choice(rules), rules[0], "Decoding rule."),
        Field("p", Number(0, MAX_STRICTNESS), None, "First parameter of the rule."),
        Field("steps", Integer(0, MAX_STEPS), None, "Most denoising steps per block; 0: one per token."),
        Field("temperature", Number(0, 2), None, "Sampling temperature."),
        Field("effort", Choice(tuple(EFFORTS)), None, "Sets p, steps and thinking where they are not given."),
        Field("max_tokens", Integer(1, limits.max_tokens), None, "Most tokens of the answer, or of the hole."),
        Field("seed", Integer(0, 2**31 - 1), 0, "Seed of the random draws."),
        Field("schema", Anything(), None, "JSON Schema that the answer obeys."),
    ))  # fmt: skip


def cell_fields(request: Record, vocab: int, limits: SizeLimits) -> Record:
    """The fields of a question about one cell.

    Args:
        request: Of `request_fields`.
        vocab: Ids of the model.
        limits: Most tokens.

    Returns:
        The fields, which read JSON data.
    """
    most = 2 * limits.max_tokens + MAX_TOKENS
    return Record((
        Field("request", request, REQUIRED, "The request of the stream."),
        Field("tokens", Items(Integer(0, vocab - 1), 0, most), REQUIRED, "What was shown before the pass."),
        Field("settled", Items(Integer(0, 1), 0, most), REQUIRED, "Which of the tokens were accepted."),
        Field("start", Integer(0, most), REQUIRED, "First cell of the block of that pass."),
        Field("index", Integer(0, most), REQUIRED, "The cell."),
    ))  # fmt: skip


def build_request(lm: LM, fields: Mapping[str, Any], limits: SizeLimits) -> PageRequest:
    """The request of the engine, without its grammar.

    Args:
        lm: The model.
        fields: As `request_fields` has read them.
        limits: What must fit.

    Returns:
        The request and what the page shows around its answer.

    Raises:
        ApiError: 400 for what does not fit.
    """
    kind = fields["kind"]
    param = {"chat": "messages", "text": "prompt"}.get(kind, "before")
    try:
        return _hole(lm, fields, limits) if kind in ("infill", "edit") else _answer(lm, fields, limits, param)
    except ValueError as error:  # of the tokenizer and its template
        raise invalid(param, str(error)) from None


def _answer(lm: LM, fields: Mapping[str, Any], limits: SizeLimits, param: str) -> PageRequest:
    """Thinking takes what the answer leaves of the context; if that is too little, there is none."""
    chat, given = fields["kind"] == "chat", fields[param]
    if given is None:
        raise refused(param, None, "a value: this kind needs it")
    ids = lambda think: tuple(lm.tokenizer.render(given, thinking=think)) if chat else _text_ids(lm, given)
    effort, max_tokens = EFFORTS.get(fields["effort"] or ""), fields["max_tokens"] or DEFAULT_ANSWER
    thinks = effort is not None and chat and lm.tokenizer.thinking is not None
    thinking = effort.thinking if thinks and effort is not None else 0
    prompt = ids(thinking > 0)
    left = room(limits.context, len(prompt), max_tokens, min(thinking, MAX_TOKENS), param)
    if thinking and not left.thinking:
        prompt = ids(False)
    request = EngineRequest(
        prompt=prompt, max_tokens=max_tokens, thinking=left.thinking, **_decoding(lm, fields, limits.block)
    )
    return PageRequest(request, chat, "", "")


def _hole(lm: LM, fields: Mapping[str, Any], limits: SizeLimits) -> PageRequest:
    """The text in front of the hole is the prompt, the text behind it the suffix."""
    chat, before, after = fields["messages"] is not None, fields["before"], fields["after"]
    edit, selected = fields["kind"] == "edit", fields["selected"]
    if fields["schema"] is not None:
        raise refused("schema", "a schema", "none with a hole: it describes whole answers")
    if edit and not selected:
        raise refused("selected", "", "the text that is rewritten")
    if not (chat or before or after):
        raise refused("before", "", "text in front of the hole or behind it")
    suffix = tuple(lm.tokenizer.encode(after))
    if chat:
        prompt = (*lm.tokenizer.render(fields["messages"]), *lm.tokenizer.encode(before))
        suffix += (lm.model.config.eos,)
    else:
        prompt = _text_ids(lm, before) if before else tuple(lm.tokenizer.begin)
    size = fields["max_tokens"] or (len(lm.tokenizer.encode(selected)) if edit else DEFAULT_HOLE)
    if size > MAX_TOKENS:
        raise refused("selected", f"{size} tokens", f"at most {MAX_TOKENS}")
    decoding = _decoding(lm, fields, limits.block)
    request = EngineRequest(prompt=prompt, suffix=suffix, max_tokens=size, **decoding)
    return PageRequest(request, chat, before, after)


def _text_ids(lm: LM, text: str) -> tuple[int, ...]:
    return tuple(normalise(lm, text)[0][0].ids)


def _decoding(lm: LM, fields: Mapping[str, Any], block: int) -> dict[str, Any]:
    """Rule and steps. The p of an effort is a probability, so it applies to the rule `threshold` only."""
    rule, p, steps = fields["rule"], fields["p"], fields["steps"]
    effort = EFFORTS.get(fields["effort"] or "")
    if effort is not None and p is None and rule == "threshold":
        p = effort.p
    allowed = next(iter(all_rules.ALL[rule].ranges.values()), None)  # of the first parameter, which p sets
    if p is not None and allowed is not None and not allowed.holds(p):
        raise refused("p", p, f"of the rule {rule}: {allowed}")
    if steps is None:
        steps = lm.decoding.get("steps") or 0
        steps = max(1, round(effort.steps * (steps or block))) if effort is not None else steps
    sampling = {"temperature": fields["temperature"], "seed": fields["seed"]}
    return {"rule": rule, "p": p, "steps": steps, "frames": True, **sampling}


def with_grammar(lm: LM, request: EngineRequest, schema: Mapping[str, Any] | None) -> EngineRequest:
    """The request bound to a JSON Schema. Compiles the grammar, so it must not run in the event loop's thread.

    Args:
        lm: The model.
        request: The request.
        schema: The schema. None: the request stays as it is.

    Returns:
        The request with its grammar.

    Raises:
        ApiError: 400 for a schema that is not supported.
    """
    if schema is None:
        return request
    return dataclasses.replace(request, grammar=compiled(lm, JSONSchema(schema), "schema"))


def page_info(lm: LM, limits: SizeLimits, locked: bool) -> dict[str, Any]:
    """The answer of `GET /playground/info`.

    Args:
        lm: The model.
        limits: Most tokens.
        locked: The server asks for an API key.

    Returns:
        A JSON object.
    """
    number = lambda value: 0.0 if value is None else float(value)  # a temperature of None is the argmax
    rules, offered = rule_set(lm), []
    for rule in rules.rules:
        parameter = next(iter(rule.knobs), None)
        about = (inspect.getdoc(all_rules.ALL[rule.name]) or "").split("\n\n")[0].replace("\n", " ")
        offered.append({
            "name": rule.name, "about": about, "knob": parameter,
            "value": None if parameter is None else number(rule.knobs[parameter]),
            "temperature": number(rule.temperature),
        })  # fmt: skip
    mask = lm.corruption.mask
    return {
        "model": lm.name,
        "parameters": lm.parameters,
        "context": limits.context,
        "block": limits.block,
        "locked": locked,
        "thinking": lm.tokenizer.thinking is not None,
        "holes": lm.model.config.pattern != "block_causal" or lm.tokenizer.fim is not None,
        "rules": offered,
        "baseline": BASELINE if BASELINE in rules.names else None,
        "temperature": number(rules.own.temperature),
        "efforts": {name: effort._asdict() for name, effort in EFFORTS.items()},
        "mask": None if mask is None else TokenLabels(lm).label(mask)[0],
        "limits": {
            "max_tokens": limits.max_tokens, "steps": MAX_STEPS, "temperature": 2, "characters": MAX_CHARACTERS,
        },
        "examples": EXAMPLES.get(lm.name, GENERAL_EXAMPLES),
    }  # fmt: skip
