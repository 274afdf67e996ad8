"""Prompts of conversations with tools, and how models write tool calls and thinking.

Known forms of a call:

    ours      <|tool_call|>{"name": "f", "arguments": {...}}<|end_tool_call|>          special ids
    Hermes    <tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>             Qwen, SDAR, Dream: mostly text
    Gemma     <|tool_call>call:f{key:<|"|>text<|"|>,n:3}<tool_call|>                   Gemma 4, DiffusionGemma: ids

If the chat template of a checkpoint knows none of them, the tools are described in the prompt (`described_tools`), and
the model is asked to write Hermes' form as text. `output_parser` reads what the model writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mercury_jax import chat
from mercury_jax.hub.tokenizer import HFTokenizer
from mercury_jax.serve.chat.messages import InvalidField
from mercury_jax.tokenizer import SPECIAL, AnyTokenizer
from mercury_jax.types import LM

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


class ToolFormat(NamedTuple):
    """The form in which a model writes a tool call around its JSON.

    Attributes:
        open: Mark in front of the JSON: an id, or a text that may be spread over tokens.
        close: Mark behind it.
        lead: Text between `open` and the JSON, and between the JSON and `close`.
        native: The chat template lists tools and writes calls and results.
        quote: Id on both sides of a string in Gemma's form. None: the call is JSON.
        ends: Ids behind which the results of the calls follow.
    """

    open: int | str
    close: int | str
    lead: str = "\n"
    native: bool = True
    quote: int | None = None
    ends: tuple[int, ...] = ()


class ThinkingMarks(NamedTuple):
    """How a model writes thinking.

    Attributes:
        open: Id that opens it.
        close: Id that closes it.
        lead: Text behind `open` that is not part of the thinking.
        trims: Line ends around the thinking and in front of the answer belong to neither.
    """

    open: int
    close: int
    lead: str
    trims: bool


def tool_format(tok: AnyTokenizer) -> ToolFormat:
    """The form in which the model of a tokenizer writes tool calls, by its vocabulary and chat template."""
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
        # A mark that decodes to text is found in the text, whether it is one token or several.
        marks = [ids[text] if text in ids and not tok.pieces[ids[text]] else text for text in HERMES]
        return ToolFormat(marks[0], marks[1])
    return ToolFormat(*HERMES, native=False)


def thinking_marks(tok: AnyTokenizer) -> ThinkingMarks | None:
    """The marks of thinking of a tokenizer; None if its model does not think."""
    if tok.thinking is None:
        return None
    first, *lead = tok.thinking.opening
    return ThinkingMarks(first, tok.thinking.close, tok.decode(lead), isinstance(tok, HFTokenizer))


def render_prompt(
    lm: LM,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking: bool = False,
) -> tuple[int, ...]:
    """The prompt of a conversation, by the model's chat template. User text never becomes a control token.

    Args:
        lm: The model.
        messages: As `messages.check_messages` returns them.
        tools: As `messages.check_tools` returns them.
        thinking: The prompt opens the thinking, so the model must have thinking marks. Otherwise a template that can
            skip thinking is asked to (`enable_thinking`), since the answer has no budget for it.

    Returns:
        Token ids, ready for the answer.

    Raises:
        InvalidField: If the template refuses the messages, in its words.
    """
    if not tool_format(lm.tokenizer).native:
        messages, tools = described_tools(messages, tools), None
    try:
        return tuple(lm.tokenizer.render(messages, thinking, tools=tools or None, at_once=not thinking))
    except ValueError as error:
        raise InvalidField("messages", str(error)) from error


def opens_thinking(lm: LM, ids: Sequence[int]) -> bool:
    """Whether a prompt ends inside thinking. Some templates open it by themselves.

    Args:
        lm: The model.
        ids: The prompt.

    Returns:
        True if the last tokens open thinking and do not close it.
    """
    marks = lm.tokenizer.thinking
    if marks is None:
        return False
    end = list(ids[-len(marks.opening) :])
    return marks.opening[0] in end and marks.close not in end[end.index(marks.opening[0]) :]


def described_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> list[dict[str, str]]:
    """A conversation with tools as plain texts of system, user and assistant, for templates that know no tools.

    The tools stand in the system message, or in front of the first user message where there is none, since some
    templates refuse the role system. Calls become text of the assistant. Results become text of the user; consecutive
    ones become one message, since some templates want the roles to alternate.

    Args:
        messages: As `messages.check_messages` returns them.
        tools: As `messages.check_tools` returns them; None or empty for none.

    Returns:
        Messages with a role and a text.
    """
    plain: list[dict[str, str]] = []
    after_result = False
    for message in messages:
        content, is_result = message.get("content") or "", message["role"] == "tool"
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
