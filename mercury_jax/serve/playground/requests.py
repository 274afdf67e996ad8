"""What the page may ask for, and what it is told about the model.

`PlaygroundRequest` and `CellRequest` are the bodies of the two POST routes, `build_request` makes the `EngineRequest`,
and `page_info` lists rules, limits and examples for the form.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from mercury_jax.decode import rules as all_rules
from mercury_jax.decode.defaults import EFFORTS
from mercury_jax.decode.grammar import JSONSchema
from mercury_jax.decode.inputs import encode_prompts
from mercury_jax.serve.chat_completions import compile_grammar
from mercury_jax.serve.engine.request import EngineRequest
from mercury_jax.serve.engine.sampling_params import RuleSet
from mercury_jax.serve.engine_requests import token_budget
from mercury_jax.serve.errors import invalid_request, invalid_value
from mercury_jax.serve.playground.frames import TokenLabels
from mercury_jax.serve.protocol import RequestModel
from mercury_jax.types import LM

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


PageText = Annotated[str, Field(max_length=MAX_CHARACTERS)]
Count = Annotated[int, Field(ge=0, le=1 << 20)]


class PlaygroundMessage(RequestModel):
    """A message of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: PageText


class PlaygroundRequest(RequestModel):
    """The body of `POST /playground/stream`.

    Attributes:
        kind: A conversation, a text to continue, or a hole in a text that is filled or rewritten.
        messages: Of chat; of a hole: the conversation that the text answers.
        prompt: Of text.
        before: Of a hole: the text in front of it.
        after: Of a hole: the text behind it.
        selected: Of edit: the text that stood in the hole, whose length it has.
        rule: Decoding rule. None: the model's own.
        p: First parameter of the rule.
        steps: Most denoising steps per block; 0: one per token.
        temperature: Sampling temperature.
        effort: Sets p, steps and thinking where they are not given.
        max_tokens: Most tokens of the answer, or of the hole.
        seed: Seed of the random draws.
        answer_schema: JSON Schema that the answer obeys; `schema` in JSON.
    """

    kind: Literal["chat", "text", "infill", "edit"]
    messages: list[PlaygroundMessage] | None = Field(None, min_length=1, max_length=64)
    prompt: PageText | None = None
    before: PageText = ""
    after: PageText = ""
    selected: PageText = ""
    rule: str | None = None
    p: float | None = Field(None, ge=0, le=MAX_STRICTNESS)
    steps: int | None = Field(None, ge=0, le=MAX_STEPS)
    temperature: float | None = Field(None, ge=0, le=2)
    effort: Literal["instant", "low", "medium", "high"] | None = None
    max_tokens: int | None = None
    seed: int = Field(0, ge=0, le=2**31 - 1)
    answer_schema: dict[str, Any] | None = Field(None, alias="schema")


class CellRequest(RequestModel):
    """The body of `POST /playground/top`.

    Attributes:
        request: The request of the stream.
        tokens: What was shown before the pass.
        settled: 1 for each of the tokens that was accepted, else 0.
        start: First cell of the active block of that pass.
        index: The cell.
    """

    request: PlaygroundRequest
    tokens: list[Count] = Field(max_length=3 * MAX_TOKENS)
    settled: list[Literal[0, 1]] = Field(max_length=3 * MAX_TOKENS)
    start: Count
    index: Count


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


class PageLimits(NamedTuple):
    """Most tokens of a request, tokens of a block, and the rules to choose from."""

    context: int
    block: int
    rules: RuleSet

    @property
    def max_tokens(self) -> int:
        """Most tokens of an answer that the page may ask for."""
        return max(1, min(MAX_TOKENS, self.context - 1))


def build_request(lm: LM, asked: PlaygroundRequest, limits: PageLimits) -> PageRequest:
    """The request of the engine, without its grammar.

    Args:
        lm: The model.
        asked: The body.
        limits: What must fit.

    Returns:
        The request and what the page shows around its answer.

    Raises:
        ApiError: 400 for what does not fit.
    """
    if asked.max_tokens is not None and not 1 <= asked.max_tokens <= limits.max_tokens:
        allowed = f"a whole number from 1 to {limits.max_tokens}"
        raise invalid_value("max_tokens", asked.max_tokens, allowed)
    if asked.rule is not None and asked.rule not in limits.rules.names:
        raise invalid_value("rule", asked.rule, ", ".join(limits.rules.names))
    param = {"chat": "messages", "text": "prompt"}.get(asked.kind, "before")
    try:
        if asked.kind in ("infill", "edit"):
            return _hole(lm, asked, limits)
        return _answer(lm, asked, limits, param)
    except ValueError as error:  # of the tokenizer and its template
        raise invalid_request(param, str(error)) from None


def _answer(lm: LM, asked: PlaygroundRequest, limits: PageLimits, param: str) -> PageRequest:
    """Thinking takes what the answer leaves of the context; if that is too little, there is none."""
    chat, max_tokens = asked.kind == "chat", asked.max_tokens or DEFAULT_ANSWER
    if (asked.messages if chat else asked.prompt) is None:
        raise invalid_value(param, None, "a value: this kind needs it")
    messages = [message.model_dump() for message in asked.messages or ()]
    ids = lambda think: (
        tuple(lm.tokenizer.render(messages, thinking=think)) if chat else _text_ids(lm, asked.prompt or "")
    )
    thinks = asked.effort is not None and chat and lm.tokenizer.thinking is not None
    thinking = EFFORTS[asked.effort].thinking if thinks and asked.effort else 0
    prompt = ids(thinking > 0)
    budget = token_budget(limits.context, len(prompt), max_tokens, min(thinking, MAX_TOKENS), param)
    if thinking and not budget.thinking:
        prompt = ids(False)
    decoding = _decoding(lm, asked, limits)
    request = EngineRequest(prompt=prompt, max_tokens=max_tokens, thinking=budget.thinking, **decoding)
    return PageRequest(request, chat, "", "")


def _hole(lm: LM, asked: PlaygroundRequest, limits: PageLimits) -> PageRequest:
    """The text in front of the hole is the prompt, the text behind it the suffix."""
    edit, chat = asked.kind == "edit", asked.messages is not None
    if asked.answer_schema is not None:
        raise invalid_value("schema", "a schema", "none with a hole: it describes whole answers")
    if edit and not asked.selected:
        raise invalid_value("selected", "", "the text that is rewritten")
    if not (chat or asked.before or asked.after):
        raise invalid_value("before", "", "text in front of the hole or behind it")
    suffix = tuple(lm.tokenizer.encode(asked.after))
    if asked.messages is not None:
        messages = [message.model_dump() for message in asked.messages]
        prompt = (*lm.tokenizer.render(messages), *lm.tokenizer.encode(asked.before))
        suffix += (lm.model.config.eos,)
    else:
        prompt = _text_ids(lm, asked.before) if asked.before else tuple(lm.tokenizer.begin)
    size = asked.max_tokens or (len(lm.tokenizer.encode(asked.selected)) if edit else DEFAULT_HOLE)
    if size > MAX_TOKENS:
        raise invalid_value("selected", f"{size} tokens", f"at most {MAX_TOKENS}")
    decoding = _decoding(lm, asked, limits)
    request = EngineRequest(prompt=prompt, suffix=suffix, max_tokens=size, **decoding)
    return PageRequest(request, chat, asked.before, asked.after)


def _text_ids(lm: LM, text: str) -> tuple[int, ...]:
    return tuple(encode_prompts(lm, text)[0][0].ids)


def _decoding(lm: LM, asked: PlaygroundRequest, limits: PageLimits) -> dict[str, Any]:
    """Rule, steps, temperature and seed. The p of an effort is a probability, so it applies to `threshold` only."""
    rule, p, steps = asked.rule or limits.rules.names[0], asked.p, asked.steps
    effort = EFFORTS.get(asked.effort or "")
    if effort is not None and p is None and rule == "threshold":
        p = effort.p
    allowed = next(iter(all_rules.ALL[rule].ranges.values()), None)  # of the first parameter, which p sets
    if p is not None and allowed is not None and not allowed.contains(p):
        raise invalid_value("p", p, f"of the rule {rule}: {allowed}")
    if steps is None:
        steps = lm.decoding.get("steps") or 0
        steps = max(1, round(effort.steps * (steps or limits.block))) if effort is not None else steps
    sampling = {"temperature": asked.temperature, "seed": asked.seed}
    return {"rule": rule, "p": p, "steps": steps, "frames": True, **sampling}


def with_grammar(lm: LM, request: EngineRequest, schema: dict[str, Any] | None) -> EngineRequest:
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
    return dataclasses.replace(request, grammar=compile_grammar(lm, JSONSchema(schema), "schema"))


def page_info(lm: LM, limits: PageLimits, locked: bool) -> dict[str, Any]:
    """The answer of `GET /playground/info`.

    Args:
        lm: The model.
        limits: Most tokens.
        locked: The server asks for an API key.

    Returns:
        A JSON object.
    """
    number = lambda value: 0.0 if value is None else float(value)  # a temperature of None is the argmax
    rules, offered = limits.rules, []
    for rule in rules.rules:
        parameter = next(iter(rule.params), None)
        about = (inspect.getdoc(all_rules.ALL[rule.name]) or "").split("\n\n")[0].replace("\n", " ")
        offered.append({
            "name": rule.name, "about": about, "knob": parameter,
            "value": None if parameter is None else number(rule.params[parameter]),
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
