"""The routes of the playground: the page, a stream of frames, the most probable tokens of a cell, and the form's data.

The routes are part of the server's app (`create_app`), whose access control checks the API key. `PlaygroundRequest` and
`CellRequest` are the bodies of the two POST routes, `build_request` makes the `EngineRequest`, and `page_info` lists
the rules of a model's engine, limits and examples for the form. `frames` makes the contents of the events.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import logging
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from anyio import CapacityLimiter, to_thread
from pydantic import Field
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from mercury_jax.decode import rules as all_rules
from mercury_jax.decode.answer_text import decode_answer
from mercury_jax.decode.defaults import EFFORTS
from mercury_jax.decode.grammar import Grammar, JSONSchema
from mercury_jax.decode.inputs import encode_prompts
from mercury_jax.serve import errors
from mercury_jax.serve.auth import KEY_DIGEST
from mercury_jax.serve.chat import messages as conversation
from mercury_jax.serve.chat.output_parser import OutputParser
from mercury_jax.serve.chat_completions import compile_grammar, output_constraint, tool_policy
from mercury_jax.serve.engine.request import EngineRequest, RequestHandle, Snapshot
from mercury_jax.serve.engine.snapshots import early_end
from mercury_jax.serve.engine_requests import token_budget
from mercury_jax.serve.errors import invalid_request, invalid_value
from mercury_jax.serve.http import JsonResponse, read_json, sse_event
from mercury_jax.serve.playground import frames
from mercury_jax.serve.protocol import (
    ChatCompletionsRequest,
    ChatMessage,
    FunctionTool,
    RequestModel,
    parse_request,
)
from mercury_jax.serve.service import AnswerHandle, ServedModels, Service, check_ready, to_api_error
from mercury_jax.serve.streaming import EventStreamResponse
from mercury_jax.types import LM
from mercury_jax.viz import label

if TYPE_CHECKING:
    from mercury_jax.serve.engine.engine import Engine

log = logging.getLogger(__name__)

STATIC = Path(__file__).parent / "static"
MAX_WAITING = 8  # maximum number of waiting requests for the tokens of a cell, and of requests left to right
DEFAULT_ANSWER, DEFAULT_HOLE = 64, 16  # tokens
MAX_TOKENS = 1024  # maximum tokens of an answer, limited by the page's layout
MAX_CHARACTERS = 65_536
MAX_STEPS = 1024
MAX_STRICTNESS = 1000.0  # an upper limit for all rules, whose scales differ
LEFT_TO_RIGHT = "autoregressive"  # the same weights, one token per pass from left to right, with a KV cache
ONE_PER_PASS = "confidence"  # the rule that accepts one token per pass, the most confident one

_CODE = {"kind": "text", "title": "Python", "prompt": "def fibonacci(n):", "max_tokens": 64}
_AREA = {
    "kind": "infill", "title": "Fill in", "before": "def area(r):\n", "after": "\n    return a", "max_tokens": 16,
}  # fmt: skip
EXAMPLES: dict[str, list[dict[str, Any]]] = {  # by the recipe of the model
    "nano": [
        {
            "kind": "chat",
            "title": "Sudoku",
            "prompt": "0300\n0001\n0040\n2000",  # that of `mercury demo`
            "max_tokens": 32,
            "about": "A 4 × 4 Sudoku: 1 to 4 once in each row, column and 2 × 2 box. 0 is an empty cell.",
        },
        {"kind": "chat", "title": "Addition", "prompt": "968+574=", "max_tokens": 64},
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
    {"kind": "chat", "title": "Tool", "prompt": "What is the weather in Oslo?", "max_tokens": 128, "tools": [
        {"name": "weather", "description": "The weather of a city now.", "parameters": {
            "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}]},
    _CODE,
    _AREA,
]  # fmt: skip


PageText = Annotated[str, Field(max_length=MAX_CHARACTERS)]
Count = Annotated[int, Field(ge=0, le=1 << 20)]


class PlaygroundRequest(RequestModel):
    """The body of `POST /playground/stream`.

    Attributes:
        kind: "chat" (a conversation), "text" (a text to continue), "infill" (a hole to fill) or "edit" (a hole whose
            text is rewritten).
        model: The model, by any of its names. None: the first one.
        messages: The conversation of "chat". With a hole: the conversation before the text, if any.
        tools: Functions that the answer of "chat" may call, as in `POST /v1/chat/completions`.
        tool_choice: "required": it calls one.
        prompt: The text to continue, for "text".
        before: The text before the hole.
        after: The text after the hole.
        selected: The text to rewrite, for "edit"; it sets the length of the hole.
        rule: Decoding rule. None: the model's own rule. "autoregressive" answers "chat" and "text" alone, without a
            schema or tools.
        p: First parameter of the rule.
        steps: Maximum denoising steps per block; 0: one per token.
        temperature: Sampling temperature.
        effort: Sets `p`, `steps` and thinking, unless they are given.
        max_tokens: Maximum tokens of the answer, or of the hole.
        seed: Seed of the random draws.
        answer_schema: JSON Schema of the answer; the field is called `schema` in JSON.
    """

    kind: Literal["chat", "text", "infill", "edit"]
    model: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1, max_length=64)
    tools: list[FunctionTool] | None = Field(None, max_length=16)
    tool_choice: Literal["auto", "required"] = "auto"
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
        tokens: Token ids that were shown before the pass.
        settled: For each of the tokens, 1 if it was accepted, else 0.
        start: First cell of the active block of the pass.
        index: Index of the cell.
    """

    request: PlaygroundRequest
    tokens: list[Count] = Field(max_length=3 * MAX_TOKENS)
    settled: list[Literal[0, 1]] = Field(max_length=3 * MAX_TOKENS)
    start: Count
    index: Count


# The page loads resources from this server only, cannot be framed, and cannot turn text into markup or script.
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


class PageFiles(StaticFiles):
    """Static files with the headers of the page."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        """Returns the response of a file, with HEADERS."""
        response = super().file_response(*args, **kwargs)
        response.headers.update(HEADERS)
        return response


class Playground:
    """The playground of an app.

    Args:
        models: The served models; their engines may still be warming up. If the options of the app contain API keys,
            the page asks for one.
    """

    def __init__(self, models: ServedModels):
        self.models, self.options = models, models.options
        names = [service.engine.lm.name for service in models.services]
        locked = bool(models.options.keys)
        self.infos = {s: page_info(s.engine, locked) | {"models": names} for s in models.services}
        self.waiting, self.one_at_a_time = 0, CapacityLimiter(1)
        self.decoding, self.decoder = 0, ThreadPoolExecutor(1, "mercury-left-to-right")

    def routes(self) -> list[BaseRoute]:
        """Returns the routes: `/`, `/playground/static` and `/playground/{info,stream,top}`."""
        return [
            Route("/", self.page, methods=["GET"]),
            Mount("/playground/static", PageFiles(directory=STATIC)),
            Route("/playground/info", self.info, methods=["GET"]),
            Route("/playground/stream", self.stream, methods=["POST"]),
            Route("/playground/top", self.top, methods=["POST"]),
        ]

    async def page(self, request: Request) -> Response:
        """GET /: the page."""
        return FileResponse(STATIC / "index.html", media_type="text/html; charset=utf-8", headers=HEADERS)

    async def info(self, request: Request) -> Response:
        """GET /playground/info?model=NAME: what the form offers for a model, by default the first one."""
        found = self.infos[self._model(request.query_params.get("model"))]
        return JsonResponse(found, headers={"cache-control": "no-store"})

    async def stream(self, request: Request) -> Response:
        """POST /playground/stream: streams a start event, one frame per denoising pass, and an end event."""
        body = await read_json(request, self.options, partial(parse_request, PlaygroundRequest))
        service = self._model(body.model)
        engine = service.engine
        check_ready(engine)
        stats = engine.stats()
        ahead = stats.waiting + 1 if stats.running >= stats.slots else 0
        prepared = dataclasses.replace(
            build_request(engine, body), cache_salt=request.scope.get(KEY_DIGEST, "")
        )
        # Compiling a grammar may take seconds, so it runs outside of the event loop's thread.
        grammar = await to_thread.run_sync(answer_grammar, engine.lm, body)
        prepared = dataclasses.replace(prepared, grammar=grammar)
        if body.rule == LEFT_TO_RIGHT:
            await self._decode(partial(next, frames.left_to_right(engine.lm, prepared)))  # compiles
        started = time.perf_counter()
        try:
            handle = (
                engine.submit(prepared) if body.rule != LEFT_TO_RIGHT else self._race(engine.lm, prepared)
            )
        except Exception as error:
            raise to_api_error(error, engine.context) from None
        return EventStreamResponse(
            self._events(service, handle, prepared, body, started, ahead),
            handle.cancel,
            self.options.keep_alive,
        )

    async def top(self, request: Request) -> Response:
        """POST /playground/top: the most probable tokens of a cell in a given pass of the stream."""
        body = await read_json(request, self.options, partial(parse_request, CellRequest))
        service = self._model(body.request.model)
        check_ready(service.engine)
        if body.request.rule == LEFT_TO_RIGHT:
            raise invalid_value("rule", LEFT_TO_RIGHT, "a rule whose passes look at the whole canvas")
        prepared = build_request(service.engine, body.request)
        _check_cell(service.engine, prepared, body)
        if self.waiting >= MAX_WAITING:
            raise errors.rate_limited(1.0, "Too many questions about tokens are waiting. Please try again.")
        self.waiting += 1
        try:
            found = await to_thread.run_sync(
                self._top_tokens, service, prepared, body, limiter=self.one_at_a_time
            )
        finally:
            self.waiting -= 1
        return JsonResponse(found, headers={"cache-control": "no-store"})

    def _decode(self, work: Callable[[], Any]) -> asyncio.Future[Any]:
        """Runs some decoding in the thread for requests left to right; ApiError 429 if too many wait for it."""
        if self.decoding >= MAX_WAITING:
            raise errors.rate_limited(1.0, "Too many requests left to right are waiting. Please try again.")
        self.decoding += 1
        future = asyncio.get_running_loop().run_in_executor(self.decoder, work)
        future.add_done_callback(lambda _: setattr(self, "decoding", self.decoding - 1))
        return future

    def _race(self, lm: LM, request: EngineRequest) -> RequestHandle:
        """Starts decoding a request left to right, outside of the engine."""
        handle = RequestHandle(request, lambda: None)

        def decode() -> None:
            try:
                for snapshot in frames.left_to_right(lm, request):
                    handle.publish(early_end(handle, "cancelled") if handle.cancelled else snapshot)
                    if handle.finished:
                        return
            except Exception:
                log.exception("a request could not be decoded left to right")
                handle.publish(early_end(handle, "error", "the server failed"))

        self._decode(decode)
        return handle

    def _model(self, name: str | None) -> Service:
        """The model of a name; None is the first one. ApiError 404 for an unknown name."""
        return self.models.services[0] if name is None else self.models.find(name)

    async def _events(
        self,
        service: Service,
        handle: AnswerHandle,
        request: EngineRequest,
        body: PlaygroundRequest,
        started: float,
        ahead: int,
    ) -> AsyncGenerator[bytes, None]:
        lm, shown, step = service.engine.lm, frames.NO_CELLS, 0
        hole = body.kind in ("infill", "edit")
        chat = body.kind == "chat" or (hole and body.messages is not None)
        yield sse_event({
            "type": "start", "model": lm.name, "prompt_tokens": len(request.prompt),
            "max_tokens": request.max_tokens, "thinking": request.thinking, "block": service.engine.block,
            "rule": request.rule, "p": request.p, "steps": request.steps, "seed": request.seed, "ahead": ahead,
            "before": body.before if hole else "", "after": body.after if hole else "",
        })  # fmt: skip
        async with contextlib.aclosing(aiter(handle)) as snapshots:  # type: ignore[type-var]
            async for snapshot in snapshots:
                seconds = time.perf_counter() - started
                shown, changed = frames.changed_cells(shown, snapshot)
                if snapshot.finish is None or len(changed):
                    step += 1
                    event = frames.frame_event(lm.tokenizer, shown, changed, snapshot)
                    yield sse_event(event | {"step": step, "ms": round(1000 * seconds, 3)})
                if snapshot.finish is not None:
                    # The whole text as `sample` would return it, its calls of tools, and the cost.
                    thinking, text = decode_answer(lm, snapshot.tokens, chat)
                    calls: list[dict[str, Any]] = []
                    if body.tools and body.kind == "chat":
                        text, calls = _called(lm, request, snapshot)
                    yield sse_event({
                        "type": "end", "text": text, "calls": calls, "thinking": thinking, "finish": snapshot.finish,
                        "message": snapshot.message, "tokens": len(snapshot.tokens), "forwards": snapshot.forwards,
                        "cached": snapshot.cached, "seconds": round(seconds, 6),
                    })  # fmt: skip

    def _top_tokens(self, service: Service, request: EngineRequest, body: CellRequest) -> dict[str, Any]:
        lm, accepted, block = service.engine.lm, [bool(x) for x in body.settled], service.engine.block
        read = frames.pass_input(lm, request, body.tokens, accepted, body.start, body.index, block)
        top = frames.top_tokens(lm, read)
        cells = []
        for token, p in zip(top.ids, top.p, strict=True):
            text, kind = label(lm.tokenizer, token)
            cells.append({"id": token, "text": text, "kind": kind, "p": p})
        # With a grammar the result is never exact: frames do not show tokens that the grammar rejected after a pass.
        return {
            "top": cells,
            "exact": top.exact and body.request.answer_schema is None and not body.request.tools,
        }


def _called(lm: LM, request: EngineRequest, snapshot: Snapshot) -> tuple[str, list[dict[str, Any]]]:
    """The text of a finished answer without its calls of tools, and these."""
    parser = OutputParser(lm, chat=True, tools=True, thinking=conversation.opens_thinking(lm, request.prompt))
    parser.feed(snapshot)
    message = parser.message()
    functions = [(call.id, {"name": call.name, "arguments": call.arguments}) for call in message.tool_calls]
    return message.content, [{"id": id, "type": "function", "function": f} for id, f in functions]


def _check_cell(engine: Engine, request: EngineRequest, body: CellRequest) -> None:
    """Checks that a pass of the request can have denoised the cell; raises ApiError 400 otherwise."""
    config, most, count = engine.lm.model.config, request.max_output, len(body.tokens)
    tokens = request.max_length + len(request.suffix or ())
    if tokens > engine.context:
        detail = f"Prompt and answer need {tokens} tokens; allowed: up to {engine.context}."
        raise errors.context_length_exceeded(engine.context, detail)
    unknown = next((i for i, token in enumerate(body.tokens) if token >= config.vocab), None)
    if unknown is not None:
        raise invalid_value(
            f"tokens[{unknown}]", body.tokens[unknown], f"a token id, 0 to {config.vocab - 1}"
        )
    if len(body.settled) != count:
        raise invalid_request("settled", f"settled has {len(body.settled)} entries; allowed: {count}")
    if body.start > count:
        raise invalid_value("start", body.start, f"at most {count}, the number of cells that were shown")
    whole = config.pattern == "bidirectional" or request.suffix is not None
    end = most if whole else min(most, body.start + engine.block)
    if not body.start <= body.index < end:
        raise invalid_value("index", body.index, f"a cell from {body.start} to {end - 1}")


def build_request(engine: Engine, body: PlaygroundRequest) -> EngineRequest:
    """Makes the engine request of a playground request, without its grammar."""
    most = max(1, min(MAX_TOKENS, engine.context - 1))
    if body.max_tokens is not None and not 1 <= body.max_tokens <= most:
        raise invalid_value("max_tokens", body.max_tokens, f"a whole number from 1 to {most}")
    left = (LEFT_TO_RIGHT,) if decodes_left_to_right(engine.lm) else ()
    if body.rule is not None and body.rule not in (*engine.rules.names, *left):
        raise invalid_value("rule", body.rule, ", ".join((*engine.rules.names, *left)))
    if body.rule in left and (
        body.kind not in ("chat", "text") or body.answer_schema is not None or body.tools
    ):
        raise invalid_value("rule", body.rule, "another rule for a hole, a schema or tools")
    param = {"chat": "messages", "text": "prompt"}.get(body.kind, "before")
    try:
        return _hole(engine, body) if param == "before" else _answer(engine, body, param)
    except ValueError as error:  # from the tokenizer or its chat template
        raise invalid_request(param, str(error)) from None


def _answer(engine: Engine, body: PlaygroundRequest, param: str) -> EngineRequest:
    """Makes the request of a chat or a text.

    Thinking gets the part of the context that the answer leaves; if that is too little, thinking is disabled.
    """
    lm, chat, max_tokens = engine.lm, body.kind == "chat", body.max_tokens or DEFAULT_ANSWER
    if (body.messages if chat else body.prompt) is None:
        raise invalid_value(param, None, "a value: this kind needs it")
    if body.tools and not chat:
        raise invalid_value("tools", f"{len(body.tools)} tools", "none: only a conversation has tools")
    ids = lambda think: (
        _conversation(lm, body, think) if chat else tuple(encode_prompts(lm, body.prompt or "")[0][0].ids)
    )
    thinks = body.effort is not None and chat and lm.tokenizer.thinking is not None
    thinking = EFFORTS[body.effort].thinking if thinks and body.effort else 0
    prompt = ids(thinking > 0)
    budget = token_budget(engine.context, len(prompt), max_tokens, min(thinking, MAX_TOKENS), param)
    if thinking and not budget.thinking:
        prompt = ids(False)
    decoding = _decoding(engine, body)
    return EngineRequest(prompt=prompt, max_tokens=max_tokens, thinking=budget.thinking, **decoding)


def _hole(engine: Engine, body: PlaygroundRequest) -> EngineRequest:
    """Makes the request of a hole: the text before the hole is the prompt, the text after it is the suffix."""
    lm = engine.lm
    if body.answer_schema is not None:
        raise invalid_value("schema", "a schema", "none with a hole: it describes whole answers")
    if body.kind == "edit" and not body.selected:
        raise invalid_value("selected", "", "the text that is rewritten")
    if not (body.messages is not None or body.before or body.after):
        raise invalid_value("before", "", "text in front of the hole or behind it")
    suffix = tuple(lm.tokenizer.encode(body.after))
    if body.tools and body.messages is None:
        raise invalid_value("tools", f"{len(body.tools)} tools", "none without messages")
    if body.messages is not None:
        prompt = (*_conversation(lm, body), *lm.tokenizer.encode(body.before))
        suffix += (lm.model.config.eos,)
    else:
        prompt = (
            tuple(encode_prompts(lm, body.before)[0][0].ids) if body.before else tuple(lm.tokenizer.begin)
        )
    rewritten = len(lm.tokenizer.encode(body.selected)) if body.kind == "edit" else DEFAULT_HOLE
    size = body.max_tokens or rewritten
    if size > MAX_TOKENS:
        raise invalid_value("selected", f"{size} tokens", f"at most {MAX_TOKENS}")
    return EngineRequest(prompt=prompt, suffix=suffix, max_tokens=size, **_decoding(engine, body))


def _conversation(lm: LM, body: PlaygroundRequest, thinking: bool = False) -> tuple[int, ...]:
    """Renders the messages of a request, and its tools."""
    messages = conversation.plain_messages(body.messages or ())
    size = sum(len(message["content"] or "") for message in messages)
    if size > MAX_CHARACTERS:
        raise invalid_value("messages", f"{size} characters", f"at most {MAX_CHARACTERS}")
    if body.tools:
        return conversation.render_prompt(lm, messages, conversation.plain_tools(body.tools), thinking)
    return tuple(lm.tokenizer.render(messages, thinking=thinking))


def answer_grammar(lm: LM, body: PlaygroundRequest) -> Grammar | None:
    """Compiles the grammar of the answer's schema and tools, which may take seconds."""
    schema = body.answer_schema
    if not body.tools or body.kind != "chat":
        return None if schema is None else compile_grammar(lm, JSONSchema(schema), "schema")
    wanted = (
        None if schema is None else {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    )
    asked = ChatCompletionsRequest.model_validate({
        "model": lm.name, "messages": body.messages, "tools": body.tools, "tool_choice": body.tool_choice,
        "response_format": wanted,
    })  # fmt: skip
    return output_constraint(lm, asked, tool_policy(asked, conversation.plain_tools(body.tools))).grammar


def _decoding(engine: Engine, body: PlaygroundRequest) -> dict[str, Any]:
    """Returns the fields of `EngineRequest` for the rule and its parameters, temperature and seed.

    The `p` of an effort is a confidence threshold, so it applies to the rule `threshold` only.
    """
    rule, p, steps = body.rule or engine.rules.names[0], body.p, body.steps
    effort = EFFORTS.get(body.effort or "")
    if effort is not None and p is None and rule == "threshold":
        p = effort.p
    made = all_rules.ALL[rule]
    allowed = made.ranges.get(next(iter(made.params), ""))  # of the first parameter, which p sets
    if p is not None and allowed is not None and not allowed.contains(p):
        raise invalid_value("p", p, f"of the rule {rule}: {allowed}")
    if steps is None:
        steps = engine.lm.decoding.get("steps") or 0
        steps = max(1, round(effort.steps * (steps or engine.block))) if effort is not None else steps
    sampling = {"temperature": body.temperature, "seed": body.seed}
    return {"rule": rule, "p": p, "steps": steps, "frames": True, **sampling}


def decodes_left_to_right(lm: LM) -> bool:
    """Says whether `rules.autoregressive` is a second way to decode a model."""
    model = lm.model
    return model.config.predicts_next and (not model.config.autoregressive or model.drafter is not None)


def page_info(engine: Engine, locked: bool) -> dict[str, Any]:
    """Makes the response of `GET /playground/info`."""
    number = lambda value: 0.0 if value is None else float(value)  # a temperature of None is the argmax
    lm, rules, offered = engine.lm, engine.rules, []
    # A recipe and not a name: any model may be served as "nano", and the embedded one under any name.
    examples = EXAMPLES.get(lm.card.get("recipe", ""))
    for rule in rules.rules:
        parameter = next(iter(rule.params), None)
        about = (inspect.getdoc(all_rules.ALL[rule.name]) or "").split("\n\n")[0].replace("\n", " ")
        offered.append({
            "name": rule.name, "about": about, "parameter": parameter,
            "value": None if parameter is None else number(rule.params[parameter]),
            "temperature": number(rule.temperature),
        })  # fmt: skip
    mask = lm.corruption.mask
    return {
        "model": lm.name,
        "parameters": lm.parameters,
        "context": engine.context,
        "block": engine.block,
        "locked": locked,
        "thinking": lm.tokenizer.thinking is not None,
        "turns": examples is None,  # the embedded model was trained on single questions
        "holes": lm.model.config.pattern != "block_causal" or lm.tokenizer.fim is not None,
        "rules": offered,
        # The opponents of a comparison, the strongest first; the first one writes no hole, schema or tool call.
        "baselines": [LEFT_TO_RIGHT] * decodes_left_to_right(lm) + [ONE_PER_PASS] * (ONE_PER_PASS in rules.names),
        "temperature": number(rules.own.temperature),
        "efforts": {name: effort._asdict() for name, effort in EFFORTS.items()},
        "mask": None if mask is None else label(lm.tokenizer, mask)[0],
        "limits": {
            "max_tokens": max(1, min(MAX_TOKENS, engine.context - 1)), "steps": MAX_STEPS, "temperature": 2,
            "characters": MAX_CHARACTERS,
        },
        "examples": examples or GENERAL_EXAMPLES,
    }  # fmt: skip
