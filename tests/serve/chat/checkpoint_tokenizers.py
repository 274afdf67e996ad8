"""Small tokenizers in the form of other checkpoints: Qwen's tool calls, with marks as ids and as text, and Gemma's."""

import functools
import json

from mercury_jax.hub.tokenizer import HFTokenizer
from tests.hub.tiny_tokenizers import byte_level, sentencepiece

HERMES = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n' }}{%- endif %}
    {{- '<tools>' }}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}{%- if message.content %}{{- message.content + '\\n' }}{%- endif %}
        {%- for call in message.tool_calls %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message.role != 'system' %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
GEMMA = """\
{{- bos_token }}
{%- for tool in tools %}{{- '<|tool>' + tool.function.name + '<tool|>' }}{%- endfor %}
{%- for message in messages %}
    {{- '<start_of_turn>' + message.role + '\\n' }}
    {%- for call in message.tool_calls %}{{- '<|tool_call>call:' + call.function.name + '<tool_call|>' }}{%- endfor %}
    {{- message.content or '' }}{{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}
"""


def with_tokens(
    files: dict[str, bytes], template: str, *texts: str, special: bool = True
) -> dict[str, bytes]:
    """The files with another template and further tokens, which decode to text unless they are special."""
    data = json.loads(files["tokenizer.json"])
    known = {t["content"]: t for t in data["added_tokens"]}
    first = 1 + max([t["id"] for t in data["added_tokens"]] + list(data["model"]["vocab"].values()))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    for text in texts:
        known.setdefault(text, {"id": first, "content": text, **flags})["special"] = special
        first += known[text]["id"] == first
    data["added_tokens"] = sorted(known.values(), key=lambda token: token["id"])
    return {**files, "tokenizer.json": json.dumps(data).encode(), "chat_template.jinja": template.encode()}


@functools.cache
def hermes(marks: str) -> HFTokenizer:
    """marks: "special", "shown" (tokens that decode to text, as in Qwen), or "text" (not tokens)."""
    texts = () if marks == "text" else ("<tool_call>", "</tool_call>")
    return HFTokenizer.of(with_tokens(byte_level(normal=False), HERMES, *texts, special=marks == "special"))


@functools.cache
def gemma() -> HFTokenizer:
    texts = ("<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>")
    return HFTokenizer.of(with_tokens(sentencepiece(), GEMMA, *texts))


@functools.cache
def without_tools(form: str = "byte_level") -> HFTokenizer:
    """A template without tools. form: "byte_level", or a form of `sentencepiece`."""
    return HFTokenizer.of(
        byte_level("thinking", normal=False) if form == "byte_level" else sentencepiece(form=form)
    )


def encode_with_control(tok: HFTokenizer, text: str) -> list[int]:
    """Ids of a text in which the names of control tokens are those tokens."""
    ids: list[int] = []
    pattern = tok.tokens.pattern
    at = 0
    for found in pattern.finditer(text) if pattern else ():
        ids += [*tok.encode(text[at : found.start()]), tok.tokens.control[found.group()]]
        at = found.end()
    return ids + tok.encode(text[at:])
