"""Conversion of the messages and tools of a request into the token ids of a prompt.

`plain_messages` and `plain_tools` convert the request models of `protocol.py` to the input of chat templates, and
check what pydantic cannot check: that each tool result refers to an earlier call, and that
tool names are unique. `render_prompt` applies the model's chat template. Models write tool calls in these forms:

    ours      <|tool_call|>{"name": "f", "arguments": {...}}<|end_tool_call|>          special ids
    Hermes    <tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>             Qwen, SDAR, Dream: mostly text
    Gemma     <|tool_call>call:f{key:<|"|>text<|"|>,n:3}<tool_call|>                   Gemma 4, DiffusionGemma: ids

If the chat template of a checkpoint supports none of them, the prompt describes the tools (`described_tools`) and
requests the Hermes form as text. `output_parser` parses the answer.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mercury_jax import chat
from mercury_jax.decode import image_prompts
from mercury_jax.hub.tokenizer import HFTokenizer
from mercury_jax.images import Image
from mercury_jax.serve import protocol
from mercury_jax.serve.errors import ApiError, invalid_request, invalid_value
from mercury_jax.serve.http import check_json, refuse_constant
from mercury_jax.tokenizer import SPECIAL, AnyTokenizer
from mercury_jax.types import LM

log = logging.getLogger("mercury.serve")
MAX_DEPTH = 40  # nesting limit of arguments and schemas, below the limit of chat templates
HERMES = ("<tool_call>", "</tool_call>")
GEMMA = ("<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>")
INSTRUCTIONS = """\
You may call these functions:
{tools}
To call one, answer with its name and its arguments, as JSON between two tags:
{open}
{{"name": "the name", "arguments": {{"an argument": "its value"}}}}
{close}
Several calls stand one behind the other. Their results come back between <tool_response> and </tool_response>."""


def plain_messages(
    messages: Sequence[protocol.ChatMessage | protocol.UserMessage],
    no_images: str | None = "text: only /v1/chat/completions reads images",
) -> list[dict[str, Any]]:
    """Converts a conversation to the form of chat templates.

    Roles may appear in any order. Consecutive tool results are sorted into the order of their calls, because some
    templates render a result without its call id.

    Args:
        no_images: What is allowed instead of images, for the error; None: images are allowed.

    Returns:
        One mapping per message: `role` is system, user, assistant or tool; `content` is a text (None for a message that
        only calls tools), or with images a list of {"type": "text", "text"} and {"type": "image", "url", "detail"};
        `tool_calls` have mappings as arguments, or the text of malformed ones; tool results have `tool_call_id` and
        `name`.
    """
    known: dict[str, tuple[int, str]] = {}  # by call id: the number and the function of its latest call
    older: dict[
        str, str
    ] = {}  # by function, the id of its latest call in OpenAI's older form, which has no ids
    number = itertools.count()
    order = lambda result: known[result["tool_call_id"]][0]
    plain: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []  # consecutive tool results, not yet sorted
    for i, message in enumerate(messages):
        role = {"developer": "system", "function": "tool"}.get(message.role, message.role)
        text = (
            message.content
            or (message.refusal if isinstance(message, protocol.AssistantMessage) else "")
            or ""
        )
        if not isinstance(text, str) and any(isinstance(part, protocol.ImagePart) for part in text):
            text = _with_images(text, f"messages[{i}].content", no_images)
        elif not isinstance(text, str):
            texts = [part for part in text if not isinstance(part, protocol.ImagePart)]
            text = "\n".join(
                part.refusal if isinstance(part, protocol.RefusalPart) else part.text for part in texts
            )
        entry: dict[str, Any] = {"role": role, "content": text}
        if isinstance(message, protocol.ToolMessage):
            if message.tool_call_id not in known:
                allowed = "the id of a call in an earlier message"
                raise invalid_value(f"messages[{i}].tool_call_id", message.tool_call_id, allowed)
            entry |= {"tool_call_id": message.tool_call_id, "name": known[message.tool_call_id][1]}
        elif isinstance(message, protocol.FunctionMessage) and message.name is not None:
            entry["name"] = message.name
            if message.name in older:
                entry["tool_call_id"] = older[message.name]
        elif isinstance(message, protocol.AssistantMessage):
            calls = [(call.id, _plain_call(call.function)) for call in message.tool_calls or ()]
            if repeated := [id for id, count in Counter(id for id, _ in calls).items() if count > 1]:
                allowed = "ids that differ within a message"
                raise invalid_value(f"messages[{i}].tool_calls", repeated[0], allowed)
            if message.function_call is not None:
                name = message.function_call.name
                older[name] = f"function_{len(known)}"
                calls.append((older[name], _plain_call(message.function_call)))
            known |= {id: (next(number), function["name"]) for id, function in calls}
            if calls:
                entry["tool_calls"] = [{"id": id, "type": "function", "function": f} for id, f in calls]
                if message.content is None:  # some templates recognise a message that only calls tools by it
                    entry["content"] = None
        if "tool_call_id" in entry:
            results.append(entry)
            continue
        plain += [*sorted(results, key=order), entry]
        results = []
    return plain + sorted(results, key=order)


def _with_images(parts: Sequence[Any], name: str, no_images: str | None) -> list[dict[str, Any]]:
    """Converts a content with images; `read_images` reads them later, once the size of the texts is checked."""
    converted: list[dict[str, Any]] = []
    for i, part in enumerate(parts):
        if not isinstance(part, protocol.ImagePart):
            converted.append({"type": "text", "text": part.text})
            continue
        if no_images is not None:
            raise invalid_value(f"{name}[{i}].type", "image_url", no_images)
        picture = part.image_url.model_dump()  # its address and its detail
        converted.append({"type": "image", **picture})
    return converted


def plain_tools(tools: Sequence[protocol.FunctionTool] | None) -> list[dict[str, Any]]:
    """Converts the tools of a request to the form of chat templates.

    Returns:
        `[{"type": "function", "function": {"name", "description", "parameters"}}]`, without fields that are not set.
    """
    plain: dict[str, dict[str, Any]] = {}
    for i, tool in enumerate(tools or ()):
        function, at = tool.function, f"tools[{i}].function"
        if function.name in plain:
            raise invalid_value(f"{at}.name", function.name, "a name that no other tool has")
        if function.parameters is not None:
            if function.parameters.get("type", "object") != "object":
                raise invalid_value(f"{at}.parameters.type", function.parameters["type"], "object")
            check_json(function.parameters, f"{at}.parameters", MAX_DEPTH, f"{at}.parameters")
        fields = function.model_dump(include={"name", "description", "parameters"}, exclude_none=True)
        plain[function.name] = {"type": "function", "function": fields}
    return list(plain.values())


def _plain_call(function: protocol.CalledFunction) -> dict[str, Any]:
    """Converts a call: its arguments become an object if they are one, the JSON text of one, or empty.

    Other arguments stay the text that the model wrote: a conversation must be able to go on after a malformed call.
    """
    given = function.arguments or {}
    text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    try:
        arguments = json.loads(text, parse_constant=refuse_constant, parse_float=refuse_constant)
        check_json(arguments if isinstance(arguments, dict) else [], "arguments", MAX_DEPTH)
    except (ValueError, RecursionError, ApiError):
        arguments = None
    return {"name": function.name, "arguments": arguments if isinstance(arguments, dict) else text}


class ToolFormat(NamedTuple):
    """The form in which a model writes tool calls.

    Attributes:
        open: Mark before the JSON: a token id, or a text that may span several tokens.
        close: Mark after the JSON: a token id or a text.
        lead: Text between `open` and the JSON, and between the JSON and `close`.
        native: Whether the chat template itself renders tools, calls and results.
        quote: Token id on both sides of a string in Gemma's form. None: the call is JSON.
        ends: Token ids that end the turn after a call, because the results of the calls follow.
    """

    open: int | str
    close: int | str
    lead: str = "\n"
    native: bool = True
    quote: int | None = None
    ends: tuple[int, ...] = ()


def tool_format(tok: AnyTokenizer) -> ToolFormat:
    """Detects the form of tool calls from the vocabulary and the chat template of a tokenizer."""
    if not isinstance(tok, HFTokenizer):
        return ToolFormat(SPECIAL.tool_call, SPECIAL.end_tool_call, lead="")
    templates, ids = tok.data.templates, tok.tokens.control
    template = templates.get("tool_use", templates.get("default", ""))
    if "tools" in template and "call:" in template and set(GEMMA[:3]) <= set(ids):
        first, last, quote = (ids[text] for text in GEMMA[:3])
        ends = (ids[GEMMA[3]],) if GEMMA[3] in ids else ()
        return ToolFormat(first, last, lead="", quote=quote, ends=ends)
    # The template of Qwen3-Coder has the same marks around XML, which is not supported.
    if "tools" in template and HERMES[0] in template and "<function=" not in template:
        # A mark that decodes to text is searched in the decoded text, whether it is one token or several. A control
        # token decodes to no bytes, so its id is searched.
        marks = [ids[text] if text in ids and not tok.pieces[ids[text]] else text for text in HERMES]
        return ToolFormat(marks[0], marks[1])
    return ToolFormat(*HERMES, native=False)


def render_prompt(
    lm: LM,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking: bool = False,
    continued: bool = False,
) -> tuple[int, ...]:
    """Renders a conversation with the model's chat template. User text never becomes a control token.

    Args:
        thinking: Whether the prompt starts a thinking section; the model must have thinking marks. If False, a template
            that can disable thinking does so (`enable_thinking`), since the answer has no budget for it.
    """
    if not tool_format(lm.tokenizer).native:
        if tools and any(isinstance(message.get("content"), list) for message in messages):
            raise invalid_request("tools", "The chat template of this model takes no tools beside images")
        messages, tools = described_tools(messages, tools), None
    how = {"at_once": not thinking, "continue_final_message": continued}
    render = lambda turns: lm.tokenizer.render(turns, thinking, tools=tools or None, **how)
    try:
        try:
            return tuple(render(messages))
        except ValueError:
            # A template that reads arguments by name fails for the text of malformed ones.
            named = _named_arguments(messages)
            if named == list(messages):
                raise
            return tuple(render(named))
    except ValueError as error:
        if str(error).startswith("chat_template:"):  # a failure of the template, in the words of Python
            log.warning("%s", error)
            message = (
                "messages cannot be rendered by the model's chat template; the server's log has the reason"
            )
            raise invalid_request("messages", message) from error
        raise invalid_request("messages", str(error)) from error


def place_images(
    lm: LM, ids: tuple[int, ...], images: Sequence[Image]
) -> tuple[tuple[int, ...], tuple[Image, ...]]:
    """Expands the placeholders of images in a rendered prompt; returns the ids, and the images with their positions."""
    try:
        placed, found = image_prompts.place(lm, ids, images)
    except ValueError as error:
        raise invalid_request("messages", str(error)) from error
    return tuple(placed), found


def _named_arguments(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Replaces arguments that are a text by an object that holds the text."""
    made: list[Mapping[str, Any]] = []
    for message in messages:
        calls = [dict(call, function=dict(call["function"])) for call in message.get("tool_calls", ())]
        for function in (call["function"] for call in calls):
            if isinstance(function["arguments"], str):
                function["arguments"] = {"arguments": function["arguments"]}
        made.append({**message, "tool_calls": calls} if calls else message)
    return made


def opens_thinking(lm: LM, ids: Sequence[int]) -> bool:
    """Says whether a prompt ends inside a thinking section. Some templates always start one."""
    marks = lm.tokenizer.thinking
    if marks is None:
        return False
    end = list(ids[-len(marks.opening) :])
    return marks.opening[0] in end and marks.close not in end[end.index(marks.opening[0]) :]


def described_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    """Rewrites a conversation with tools as plain text messages, for templates that do not support tools.

    The tools are described in the system message. Without a system message they are described in the first user
    message, since some templates refuse the role system. Calls become text of the assistant. Results become text of the
    user; consecutive results become one message, since some templates require alternating roles.
    """
    plain: list[dict[str, Any]] = []
    after_result = False
    for message in messages:
        content, is_result = message.get("content") or "", message["role"] == "tool"
        if isinstance(content, list):  # of the user, with images
            plain.append(dict(message))
            after_result = False
            continue
        if is_result:
            content = f"<tool_response>\n{content}\n</tool_response>"
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        calls = [f"{HERMES[0]}\n{chat.call_text(f['name'], f['arguments'])}\n{HERMES[1]}" for f in functions]
        text = "\n".join([*([content] if content or not calls else []), *calls])
        if is_result and after_result:
            plain[-1]["content"] += f"\n{text}"
        else:
            plain.append({"role": "user" if is_result else message["role"], "content": text})
        after_result = is_result
    if not tools:
        return plain
    listed = INSTRUCTIONS.format(tools=chat.tools_text(tools), open=HERMES[0], close=HERMES[1])
    if plain[0]["role"] == "system":
        plain[0]["content"] = f"{plain[0]['content']}\n\n{listed}".lstrip()
        return plain
    first = next((m for m in plain if m["role"] == "user"), None)
    if first is None:
        return [{"role": "user", "content": listed}, *plain]
    first["content"] = f"{listed}\n\n{first['content']}"
    return plain
