"""POST /v1/chat/completions: renders the prompt of a conversation, and compiles the constraints on its answer.

A constraint is a JSON Schema, or the tools that the answer may or must call. It is enforced twice: by a grammar during
sampling, and by a check of the finished answer with an independent implementation of JSON Schema (`jsonschema`). Where
the grammar enforces a part only, an answer that fails the check is decoded again.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from mercury_jax.decode import grammar as grammars
from mercury_jax.decode.grammar import validation
from mercury_jax.decode.grammar.validation import is_valid
from mercury_jax.decode.image_prompts import NO_TOWER
from mercury_jax.images import Image
from mercury_jax.serve import engine_requests, errors, protocol, responses
from mercury_jax.serve.chat import messages as conversation
from mercury_jax.serve.chat.image_urls import content_length, read_images
from mercury_jax.serve.chat.messages import ToolFormat, tool_format
from mercury_jax.serve.chat.output_parser import OutputParser, ParsedMessage
from mercury_jax.serve.engine.request import EngineRequest
from mercury_jax.serve.engine_requests import DecodingParams, TokenBudget
from mercury_jax.serve.errors import ApiError
from mercury_jax.serve.http import dump_json
from mercury_jax.serve.protocol import ChatCompletionsRequest
from mercury_jax.serve.response_plan import AnswerWriter, ResponsePlan
from mercury_jax.serve.service import ServedModels, Service
from mercury_jax.serve.streaming import respond
from mercury_jax.serve.structured_outputs import OutputSpec, output_spec
from mercury_jax.types import LM

Tools = Sequence[Mapping[str, Any]]


class OutputConstraint(NamedTuple):
    """The constraint on an answer.

    Attributes:
        grammar: Grammar that the engine enforces; None for no constraint.
        check: Says whether a finished answer satisfies the constraint; None for no check.
        valid: Says whether a finished answer satisfies the parts of schemas that the grammar does not enforce. None: it
            enforces all of them.
        strict: Whether an answer that fails `valid` is an error in the end, and not only decoded again.
        json: Whether the whole content is JSON. Stop sequences are then ignored, because they could cut it.
    """

    grammar: grammars.Grammar | None = None
    check: Callable[[ParsedMessage], bool] | None = None
    json: bool = False
    valid: Callable[[ParsedMessage], bool] | None = None
    strict: bool = False


class ToolPolicy(NamedTuple):
    """The tools that an answer may call, and the number of calls (`max_calls` None: no limit)."""

    tools: Tools = ()
    min_calls: int = 0
    max_calls: int | None = 0


class RenderedChat(NamedTuple):
    """The prompt of a conversation, and what was decided on the way to it.

    Attributes:
        prompt: Token ids.
        images: The images of the prompt.
        budget: Tokens of thinking and answer.
        decoding: Decoding parameters of the effort.
        policy: The tools that the answer may call.
        begun: The text that the answer continues, if it continues one.
    """

    prompt: tuple[int, ...]
    images: Sequence[Image]
    budget: TokenBudget
    decoding: DecodingParams
    policy: ToolPolicy
    begun: str | None


async def chat_completions(models: ServedModels, request: Request) -> Response:
    """Answers a conversation."""
    service, body = await models.read(request, ChatCompletionsRequest)
    return await answer_chat(service, request, body)


async def answer_chat(
    service: Service,
    request: Request,
    body: ChatCompletionsRequest,
    writer: Callable[[ResponsePlan], AnswerWriter] | None = None,
) -> Response:
    """Answers a conversation in the form of a writer (`ResponsePlan.writer`)."""

    def prepare() -> tuple[ResponsePlan, list[EngineRequest]]:
        plan, jobs = _prepare_chat(service, body)
        return plan._replace(writer=writer), jobs

    fields = {"tools", "response_format", "bad_words", *protocol.GUIDED_FIELDS}
    plain = body.model_dump(include=fields, exclude_unset=True, by_alias=True)
    size = len(dump_json(plain)) if any(getattr(body, name) for name in fields) else None
    return await respond(service, request, prepare, body.n, size)


def render_chat(service: Service, body: ChatCompletionsRequest) -> RenderedChat:
    """Renders the prompt of a conversation, and divides the rest of the context. Must not run in the event loop."""
    lm = service.engine.lm
    tools = conversation.plain_tools(body.tools)
    messages = conversation.plain_messages(body.messages, None if lm.model.vision else NO_TOWER)
    # Lower bound of the prompt's size, before rendering: every template writes the content of messages and the
    # arguments of their calls.
    calls = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    texts = []
    written = lambda value: json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    texts += [c["arguments"] if isinstance(c["arguments"], str) else written(c["arguments"]) for c in calls]
    service.check_size(sum(map(len, texts)) + sum(content_length(message["content"]) for message in messages))
    messages, pictures = read_images(lm, messages)
    policy = tool_policy(body, tools) if tools or body.tool_choice else ToolPolicy()
    effort = body.reasoning_effort or ("instant" if body.realtime else None)
    decoding = engine_requests.decoding_params(service, effort)
    begun = continued_text(body, messages)
    if begun is not None:
        decoding = decoding._replace(thinking=0)
    context, max_tokens = service.engine.context, body.max_completion_tokens or body.max_tokens
    called = policy.tools or None
    render = functools.partial(conversation.render_prompt, lm, messages, called)
    prompt, images = conversation.place_images(lm, render(decoding.thinking > 0, begun is not None), pictures)
    budget = engine_requests.token_budget(context, len(prompt), max_tokens, decoding.thinking)
    # If there is no room for thinking, render again: the prompt must not start a thinking section.
    if decoding.thinking and not budget.thinking:
        prompt, images = conversation.place_images(lm, render(), pictures)
        budget = engine_requests.token_budget(context, len(prompt), max_tokens, 0)
    return RenderedChat(prompt, images, budget, decoding, policy, begun)


def _prepare_chat(service: Service, body: ChatCompletionsRequest) -> tuple[ResponsePlan, list[EngineRequest]]:
    """Makes the response plan and one engine request per answer.

    Must not run in the event loop's thread: it renders a template, tokenizes, and may compile a grammar for seconds.
    """
    lm, options, top = service.engine.lm, service.options, body.top_logprobs
    if top and not body.logprobs:
        raise errors.invalid_request("top_logprobs", "top_logprobs needs logprobs to be true")
    prompt, images, budget, decoding, policy, begun = render_chat(service, body)
    context = service.engine.context
    # Compile last, because it may take seconds: a prompt that is too long has been refused by now.
    constrained = bool(policy.tools or body.response_format)
    if constrained and body.bad_words:
        raise errors.invalid_request(
            "bad_words", "bad_words cannot be combined with tools or response_format"
        )
    guided = output_spec(body)
    constraint = output_constraint(lm, body, policy) if constrained else OutputConstraint()
    if guided is not None:
        constraint = spec_constraint(lm, guided)
    if words := tuple(filter(None, body.bad_words or ())):
        constraint = OutputConstraint(compile_grammar(lm, grammars.Without(words, begun or ""), "bad_words"))
    predicted = body.prediction.text if body.prediction is not None else ""
    service.check_size(len(predicted), "prediction")
    prediction = tuple(lm.tokenizer.encode(predicted)) if predicted else ()
    if prediction and (body.rule is not None or body.rule_params):
        raise errors.invalid_request(
            "rule", "rule cannot be combined with prediction, which is verified left to right"
        )
    temperature, warning = body.temperature, None
    if options.strict_temperature:
        temperature, warning = engine_requests.vendor_temperature(body.temperature)
    first = engine_requests.make_request(
        service,
        body,
        decoding,
        prompt=prompt,
        images=images,
        max_tokens=budget.answer,
        thinking=budget.thinking,
        temperature=temperature,
        logprobs=(top or 0) if body.logprobs else None,
        grammar=constraint.grammar,
        prediction=prediction,
        frames=body.diffusing and body.stream,
    )
    thinks = conversation.opens_thinking(lm, prompt)
    stops = () if constraint.json else body.stop_sequences
    plan = ResponsePlan(
        kind=responses.CHAT,
        request=body,
        prompt_tokens=len(prompt),
        parser=lambda: OutputParser(
            lm, chat=True, tools=bool(policy.tools), stop=stops, thinking=thinks, begun=begun is not None
        ),
        answers_per_prompt=body.n,
        prediction_tokens=len(prediction),
        diffusing=body.diffusing and body.stream,
        reasoning_summary=body.reasoning_summary,
        thinks=thinks,
        warning=warning,
        check=constraint.check,
        valid=constraint.valid,
        strict=constraint.strict,
        logprobs=lambda snapshot, message: {
            "content": responses.content_logprobs(lm, snapshot, message, top or 0) or None,
            "refusal": None,
        },
        # A message that is complete may be continued by nothing.
        continuation=None
        if begun is not None
        else functools.partial(engine_requests.continuation_of, lm, context, thinks),
    )
    return plan, engine_requests.with_seeds(first, body.n)


def continued_text(request: ChatCompletionsRequest, messages: Sequence[Mapping[str, Any]]) -> str | None:
    """Returns the text that the answer continues: that of the last message, if a field of the request asks for it."""
    fields: dict[str, object] = {}
    if request.continue_final_message:
        fields["continue_final_message"] = True
        if request.add_generation_prompt and "add_generation_prompt" in request.model_fields_set:
            raise errors.invalid_value("add_generation_prompt", True, "false with continue_final_message")
    if not request.add_generation_prompt:
        fields["add_generation_prompt"] = False
    for i, message in enumerate(request.messages):
        if isinstance(message, protocol.AssistantMessage) and message.prefix:
            fields[f"messages[{i}].prefix"] = True
            if i < len(messages) - 1:
                raise errors.invalid_value(
                    f"messages[{i}].prefix", True, "false in all messages but the last"
                )
    if not fields:
        return None
    (name, value), last = next(iter(fields.items())), messages[-1]
    if last["role"] != "assistant" or last.get("tool_calls"):
        allowed = f"{str(not value).lower()} where the last message is not a text of the assistant"
        raise errors.invalid_value(name, value, allowed)
    if len(messages) < 2:
        allowed = f"{str(not value).lower()} where no message precedes the one that is continued"
        raise errors.invalid_value(name, value, allowed)
    if request.response_format is not None and request.response_format.type != "text":
        raise errors.invalid_value("response_format.type", request.response_format.type, f"text with {name}")
    return last["content"]


def tool_policy(request: ChatCompletionsRequest, tools: Tools) -> ToolPolicy:
    """Applies `tool_choice` to the tools."""
    choice, named = request.tool_choice or "auto", None
    if choice == "none":
        return ToolPolicy()
    if isinstance(choice, protocol.AllowedTools):
        named = {tool.function.name for tool in choice.allowed_tools.tools}
        mode = choice.allowed_tools.mode
    elif isinstance(choice, protocol.NamedTool):
        named, mode = {choice.function.name}, "required"
    else:
        mode = choice
    known = [tool["function"]["name"] for tool in tools]
    missing = next((name for name in sorted(named or ()) if name not in known), None)
    if missing is not None or (not tools and mode != "auto"):
        allowed = "auto or none, since the request has no tools"
        if known:
            allowed = f"auto, none, required, or a call of one of the tools {', '.join(known)}"
        raise errors.invalid_value("tool_choice", missing or choice, allowed)
    chosen = [tool for tool in tools if named is None or tool["function"]["name"] in named]
    single = isinstance(choice, protocol.NamedTool) or not request.parallel_tool_calls
    return ToolPolicy(chosen, int(mode != "auto"), 1 if single else None)


def output_constraint(lm: LM, request: ChatCompletionsRequest, policy: ToolPolicy) -> OutputConstraint:
    """Compiles the constraint of a request, which may take seconds.

    The answer is one of: calls only (`tool_choice` requires one), free text or calls (tools, but no format), content in
    the wanted format (no tools), or calls or formatted content (both). The last case is needed because agent frameworks
    send tools and a format in every turn.
    """
    wanted, form = request.response_format, tool_format(lm.tokenizer)
    content: grammars.JSONSchema | grammars.JSONObject | None = None
    schema: Any = None
    param = "response_format"
    if isinstance(wanted, protocol.JsonSchemaFormat) and wanted.json_schema.schema_ is not None:
        schema, param = wanted.json_schema.schema_, "response_format.json_schema.schema"
        content = grammars.JSONSchema(schema, param)
    elif isinstance(wanted, protocol.JsonObjectFormat) and wanted.schema_ is not None:
        schema, param = {"type": "object", **wanted.schema_}, "response_format.schema"
        content = grammars.JSONSchema(schema, param)
    elif isinstance(wanted, protocol.JsonSchemaFormat | protocol.JsonObjectFormat):
        schema, content = {"type": "object"}, grammars.JSONObject()
    elif not policy.tools:
        return OutputConstraint()
    if content is None or policy.min_calls:  # calls only, or free text or calls
        if form.quote is not None and policy.min_calls:  # this model's tool calls are not JSON
            message = f"{lm.name} cannot be required to call a tool; allowed: auto, none"
            raise errors.invalid_request("tool_choice", message)
        if form.quote is not None:  # calls stay unconstrained; `OutputParser` shows malformed ones as content
            return OutputConstraint()
        tools, loose = _enforced(request, policy)
        calls = _call_grammar(form, policy, tools)
        spec = calls if policy.min_calls else grammars.FreeOr(calls)
        return _checked(compile_grammar(lm, spec, "tools"), _answer_check(tools, policy, loose), loose)
    if not policy.tools:
        check = _answer_check((), policy, {}, schema, param)
        return _checked(compile_grammar(lm, content, param), check, {}, json=True)
    if form.quote is not None:
        message = f"{lm.name} cannot combine a format with tools; allowed with tools: tool_choice none"
        raise errors.invalid_request("response_format", message)
    tools, loose = _enforced(request, policy)
    check = _answer_check(tools, policy, loose, schema, param)
    grammar = compile_grammar(lm, grammars.CallsOr(_call_grammar(form, policy, tools), content), param)
    return _checked(grammar, check, loose, json=True)


def _checked(
    grammar: grammars.Grammar,
    check: Callable[[ParsedMessage], bool],
    loose: Mapping[str, Any],
    json: bool = False,
) -> OutputConstraint:
    """The constraint of a grammar, with the check of what it does not enforce."""
    schemas, strict = (
        {name: _validator(schema, name) for name, schema in loose.items()},
        grammar.fault is not None,
    )

    def valid(message: ParsedMessage) -> bool:
        calls = [call for call in message.tool_calls if call.name in schemas]
        return all(is_valid(c.arguments, schemas[c.name]) for c in calls) and (not strict or check(message))

    return OutputConstraint(grammar, check, json, valid if loose or strict else None, strict)


def spec_constraint(lm: LM, guided: OutputSpec) -> OutputConstraint:
    """Compiles the constraint of `guided_json`, `guided_regex` and their like."""
    spec, param = guided
    grammar = compile_grammar(lm, spec, param)
    if isinstance(spec, grammars.JSONSchema | grammars.JSONObject):
        schema = spec.schema if isinstance(spec, grammars.JSONSchema) else {"type": "object"}
        return _checked(grammar, _answer_check((), ToolPolicy(), {}, schema, param), {}, json=True)
    return OutputConstraint(grammar, lambda message: grammar.matches(message.content), json=True)


def compile_grammar(lm: LM, spec: grammars.Spec, param: str) -> grammars.Grammar:
    """Compiles a grammar."""
    try:
        return grammars.compile(lm.tokenizer, spec)
    except grammars.GrammarError as error:
        if isinstance(spec, grammars.Regex | grammars.Choice | grammars.Lark):
            raise errors.invalid_request(param, f"{param}: {str(error)[:1000]}") from None
        raise _refused_schema(error, param) from None


def _refused_schema(error: grammars.GrammarError, param: str) -> ApiError:
    param = param if error.place is None else error.place.root
    return ApiError(400, str(error)[:1000], param=param, code="invalid_json_schema")


def _enforced(
    request: ChatCompletionsRequest, policy: ToolPolicy
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The tools as a grammar can enforce them, and the schemas, by tool, of which it enforces a part only.

    A tool with `strict: true` keeps its whole schema, and is refused where that can neither be enforced nor checked.
    Tools whose turn comes after the deadline of the request take any object.
    """
    tools: list[dict[str, Any]] = []
    loose: dict[str, Any] = {}
    allowed = {tool["function"]["name"] for tool in policy.tools}
    deadline = time.monotonic() + grammars.COMPILE_SECONDS  # of all tools together
    for i, tool in enumerate(request.tools or ()):
        name, parameters, place = (
            tool.function.name,
            tool.function.parameters,
            f"tools[{i}].function.parameters",
        )
        if name not in allowed:
            continue
        if parameters is not None:
            _validator(parameters, place)
        if parameters is not None and not tool.function.strict:
            try:
                enforced, partly = grammars.enforceable(parameters, place, deadline)
            except grammars.GrammarError as error:
                raise _refused_schema(error, place) from None
            if partly:
                loose[name], parameters = parameters, dict(enforced)
        tools.append({"name": name, "parameters": parameters, "place": place})
    return tools, loose


def _call_grammar(form: ToolFormat, policy: ToolPolicy, tools: Tools) -> grammars.ToolCalls:
    return grammars.ToolCalls(
        tools,
        open=(form.open, form.lead),
        close=(form.lead, form.close),
        at_least=policy.min_calls or 1,
        at_most=policy.max_calls,
        separator=form.lead,
    )


def _answer_check(
    tools: Tools,
    policy: ToolPolicy,
    loose: Mapping[str, Any],
    schema: Any = None,
    param: str = "response_format",
) -> Callable[[ParsedMessage], bool]:
    """Makes the check of a finished answer: its calls are allowed and valid, and their number is allowed.

    With a schema, an answer without calls is valid if its content matches the schema. Of the `loose` tools, any object
    is valid in the end.
    """
    open_object = {"type": "object"}
    schemas = {
        t["name"]: open_object if t["name"] in loose else t["parameters"] or open_object for t in tools
    }
    valid = {tool["name"]: _validator(schemas[tool["name"]], tool["place"]) for tool in tools}
    valid_content = None if schema is None else _validator(schema, param)

    def check(message: ParsedMessage) -> bool:
        count = len(message.tool_calls)
        if valid_content is not None and not count:
            return is_valid(message.content, valid_content)
        obeyed = all(c.name in valid and is_valid(c.arguments, valid[c.name]) for c in message.tool_calls)
        return obeyed and policy.min_calls <= count <= (policy.max_calls or count)

    return check


def _validator(schema: Any, name: str) -> Callable[[Any], bool]:
    """Makes a validator that fetches no references; errors call the schema by its name."""
    try:
        return validation.validator(schema, name)
    except grammars.GrammarError as error:
        raise _refused_schema(error, name) from None
