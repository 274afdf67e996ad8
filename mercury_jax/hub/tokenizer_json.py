"""Our own tokenizer as the files that transformers, vLLM and SGLang read: tokenizer.json and a chat template.

Sentencepiece merges the neighbours that make its best-scored piece; a list of merges says the same: every
way to put a piece together, in the order of the pieces' scores. Spaces are written as they are, so that no
text has to be normalised, and a literal U+2581 stays one.
"""

from __future__ import annotations

import json
from typing import Any

from mercury_jax.tokenizer import SPECIAL, Tokenizer

# `chat.render` in jinja2; messages are checked there.
TEMPLATE = """{%- set listed = '' -%}
{%- if tools -%}
    {%- set listed = '<|tool|>' + (tools | map(attribute='function') | list | tojson) -%}
    {%- if messages[0]['role'] != 'system' -%}{{- '<|system|>' + listed + '<|end_turn|>' -}}{%- endif -%}
{%- endif -%}
{%- for message in messages -%}
    {{- '<|' + message['role'] + '|>' -}}
    {%- if message['role'] == 'tool' and message['tool_call_id'] -%}
        {{- '<|tool_result|>' + message['content'] + '<|end_tool_result|>' -}}
    {%- else -%}
        {{- message['content'] or '' -}}
    {%- endif -%}
    {%- for call in message['tool_calls'] or [] -%}
        {%- set made = {'name': call['function']['name'], 'arguments': call['function']['arguments']} -%}
        {{- '<|tool_call|>' + (made | tojson) + '<|end_tool_call|>' -}}
    {%- endfor -%}
    {%- if loop.first and message['role'] == 'system' -%}{{- listed -}}{%- endif -%}
    {{- '<|end_turn|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|assistant|>' -}}
    {%- if enable_thinking is defined and enable_thinking -%}{{- '<|think|>' -}}{%- endif -%}
{%- endif -%}
"""


def files_of(tok: Tokenizer) -> dict[str, bytes]:
    """The files by name, our own tokenizer.model among them. Ids of any text are those of `tok`."""
    names = {f"{name}_token": f"<|{name}|>" for name in ("pad", "eos", "mask", "unk")}
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **names}
    made = {"tokenizer.json": _json(_data(tok)), "tokenizer_config.json": _json(about)}
    return {**made, "chat_template.jinja": TEMPLATE.encode(), **tok.files}


def _json(data: Any) -> bytes:
    return (json.dumps(data, ensure_ascii=False, indent=1) + "\n").encode()


def _data(tok: Tokenizer) -> dict[str, Any]:
    model = tok._model
    score = {_spelt(tok, i): model.get_score(i) for i in range(tok.vocab_size)}
    vocab = {piece: i for i, piece in enumerate(score)}
    whole = [i for i in range(tok.vocab_size) if _symbol(tok, i)]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    merged = {i for i in range(len(SPECIAL), tok.vocab_size) if not model.is_byte(i) and i not in whole}
    pieces = {piece: i for piece, i in vocab.items() if i in merged}
    decoders = [{"type": "ByteFallback"}, {"type": "Fuse"}]
    return {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "pre_tokenizer": None,
        "post_processor": None, "decoder": {"type": "Sequence", "decoders": decoders},
        "added_tokens": [{"id": i, "content": _spelt(tok, i), "special": i < len(SPECIAL), **flags} for i in whole],
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": True, "ignore_merges": False,
            "vocab": vocab, "merges": _merges(pieces, score),
        },
    }  # fmt: skip


def _spelt(tok: Tokenizer, i: int) -> str:
    """A token in tokenizer.json: its text, or its name where it stands for a byte or is special."""
    if i < len(SPECIAL):
        return f"<|{SPECIAL._fields[i]}|>"
    return tok._model.id_to_piece(i) if tok._model.is_byte(i) else tok.pieces[i].decode()


def _symbol(tok: Tokenizer, i: int) -> bool:
    """Whether a token is matched as a whole before anything merges: special ones, and runs of whitespace."""
    text = "" if i < len(SPECIAL) or tok._model.is_byte(i) else tok.pieces[i].decode()
    return i < len(SPECIAL) or (text != " " and text.isspace())


def _merges(pieces: dict[str, int], score: dict[str, float]) -> list[list[str]]:
    ways = [
        (-score[piece], len(piece[:cut]), [piece[:cut], piece[cut:]])
        for piece in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    return [pair for _, _, pair in sorted(ways)]
