"""How a model writes what is not content: the marks of its thinking and of its tool calls.

Known forms of a call:

    ours      <|tool_call|>{"name": "f", "arguments": {...}}<|end_tool_call|>          special ids
    Hermes    <tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>             Qwen, SDAR, Dream: mostly text
    Gemma     <|tool_call>call:f{key:<|"|>text<|"|>,n:3}<tool_call|>                   Gemma 4, DiffusionGemma: ids

A checkpoint whose chat template knows none of them is told of the tools in words (`words.py`), and asked to write
Hermes' form as text.
"""

from __future__ import annotations

from typing import NamedTuple

from mercury_jax.hub.tokenizer import HFTokenizer
from mercury_jax.tokenizer import SPECIAL, AnyTokenizer

HERMES = ("<tool_call>", "</tool_call>")
GEMMA = ("<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>")


class ToolFormat(NamedTuple):
    """What stands around the JSON `{"name", "arguments"}` of a call.

    open, close: an id, or a text that may be spread over tokens. lead: the text between open and JSON, and between
    JSON and close. native: the chat template lists the tools, and writes calls and results itself. quote: Gemma's
    mark around a text (None: JSON it is). ends: ids behind which the tools have their turn.
    """

    open: int | str
    close: int | str
    lead: str = "\n"
    native: bool = True
    quote: int | None = None
    ends: tuple[int, ...] = ()

    @property
    def before(self) -> tuple[int | str, ...]:
        """All that stands before the JSON, as a mark of `decode.grammar.ToolCalls`."""
        return (self.open, self.lead) if self.lead else (self.open,)

    @property
    def behind(self) -> tuple[int | str, ...]:
        """All that stands behind the JSON."""
        return (self.lead, self.close) if self.lead else (self.close,)


class Marks(NamedTuple):
    """The ids that open and close thinking. lead: a text behind the first that is no part of it; trims: line ends
    around the thinking and in front of the answer belong to neither."""

    open: int
    close: int
    lead: str
    trims: bool


def tool_format(tok: AnyTokenizer) -> ToolFormat:
    """The form in which the model of this tokenizer writes tool calls."""
    if not isinstance(tok, HFTokenizer):
        return ToolFormat(SPECIAL.tool_call, SPECIAL.end_tool_call, lead="")
    templates, ids = tok.data.templates, tok.tokens.control
    source = templates.get("tool_use", templates.get("default", ""))
    if "tools" in source and "call:" in source and set(GEMMA[:3]) <= set(ids):
        first, last, quote = (ids[text] for text in GEMMA[:3])
        ends = (ids[GEMMA[3]],) if GEMMA[3] in ids else ()
        return ToolFormat(first, last, lead="", quote=quote, ends=ends)
    # Qwen3-Coder has the same marks around XML.
    if "tools" in source and HERMES[0] in source and "<function=" not in source:
        # A mark that a text shows is found there, whether it is a token or spelt by several.
        marks = [ids[text] if text in ids and not tok.pieces[ids[text]] else text for text in HERMES]
        return ToolFormat(marks[0], marks[1])
    return ToolFormat(*HERMES, native=False)


def thinking_marks(tok: AnyTokenizer) -> Marks | None:
    """The marks of thinking; None where the vocabulary has none."""
    if tok.thinking is None:
        return None
    first, *lead = tok.thinking.opening
    return Marks(first, tok.thinking.close, tok.decode(lead), isinstance(tok, HFTokenizer))
