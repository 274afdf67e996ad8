"""Bodies that are right, and what chance makes of them."""

import copy
import json
from typing import Any

FULL = 500  # cases from which on a run is more than a short form
MODEL = "tiny"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": SCHEMA}}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
SAY: list[Any] = [{"role": "user", "content": "1+1="}]
EDIT = "<|code_to_edit|>\nx = 1\n<|/code_to_edit|>"
FILE, NEW = "a = 1\nx = 1\nb = 2", "a = 1\nx = 2\nb = 2"
APPLY = f"<|original_code|>\n{FILE}\n<|/original_code|>\n\n<|update_snippet|>\n{NEW}\n<|/update_snippet|>"

RIGHT: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": SAY, "temperature": 0.5, "stop": ["x"], "seed": 3, "top_p": 0.9}),
    ("/v1/chat/completions", {"messages": SAY, "stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", {"messages": SAY, "stream": True, "diffusing": True, "n": 2}),
    ("/v1/chat/completions", {"messages": SAY, "logprobs": True, "top_logprobs": 2, "logit_bias": {"40": 3}}),
    ("/v1/chat/completions", {"messages": SAY, "tools": [TOOL], "tool_choice": "auto"}),
    ("/v1/chat/completions", {"messages": SAY, "response_format": {"type": "json_schema", "json_schema": {
        "name": "n", "schema": SCHEMA, "strict": True}}, "max_tokens": 16}),
    ("/v1/chat/completions", {"messages": SAY, "response_format": {"type": "json_object"}}),
    ("/v1/chat/completions", {"messages": SAY, "reasoning_effort": "low", "response_format": {"type": "json_object"}}),
    ("/v1/chat/completions", {"messages": SAY, "tools": [TOOL], "tool_choice": "required", "max_tokens": 40}),
    ("/v1/chat/completions", {"messages": [*SAY, {"role": "assistant", "content": None, "tool_calls": [CALL]},
                                           {"role": "tool", "tool_call_id": "1", "content": "2"}]}),
    ("/v1/chat/completions", {"messages": [{"role": "system", "content": [{"type": "text", "text": "be"}]}, *SAY],
                              "reasoning_effort": "low", "reasoning_summary": True, "presence_penalty": 1}),
    ("/v1/completions", {"prompt": ["def f(", "x = "], "logprobs": 2, "n": 1, "frequency_penalty": 0.5}),
    ("/v1/completions", {"prompt": "def f(", "suffix": "\n    return x", "repetition_penalty": 1.1}),
    ("/v1/fim/completions", {"prompt": "def f(", "suffix": "return", "top_k": 5, "stream": True}),
    ("/v1/edit/completions", {"messages": [{"role": "user", "content": EDIT}], "temperature": 0.2}),
    ("/v1/apply/completions", {"messages": [{"role": "user", "content": APPLY}], "stream": True}),
    ("/playground/stream", {"kind": "chat", "messages": SAY}),
]  # fmt: skip

ODD = [
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**40, 1e308, -0.0, 1e-320, "", "\x00",
    "\ud800", "a" * 70_000, "\u202e\ufeff\u2028", "<|mask|><|endoftext|>", "{{7*7}}", "../../etc/passwd", [],
    {}, [[]], [{}], [None], {"": ""}, {"type": "text"}, {"$ref": "http://127.0.0.1:9/x"}, {"$ref": "#"},
    {"type": "image_url", "image_url": {"url": "x"}}, {"pattern": "(a{1,1000}){1,1000}"},
    {"minItems": 10**9, "type": "array"}, {"enum": []}, {"allOf": [{"$ref": "#"}]},
]  # fmt: skip
PIECES = [
    b"NaN", b"-Infinity", b"1e999", b"\xff\xfe", b"\x00", b"[" * 300, b'{"a":' * 300, b"\\ud83d", b'"', b"}",
    b"]", b",", b"1" * 5000, b"/**/", b"'", b"\xc0\x80", b"\xed\xa0\x80", b"true", b"null", b"\r\n\r\n",
    b"\xe2\x80\xa8",
]  # fmt: skip


def mutated(draw, right=RIGHT):
    """(path, bytes) of a right request, with one to three things changed, in the JSON or in its bytes."""
    path, data = _body(draw, right)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        data = draw.choice((_replaced, _replaced, _renamed, _flipped, _cut, _put, _twice, _spliced))(
            draw, data
        )
    return path, data


def _body(draw, right):
    return whole(*draw.choice(right))


def whole(path, more):
    """(path, bytes) of a right request, with what all of its kind have."""
    if path.startswith("/v1"):
        more = {"model": MODEL, "max_tokens": 4, **more}
    return path, json.dumps(more).encode()


def _replaced(draw, data):
    """A value becomes an odd one."""
    value, places = _read(data)
    if not places:
        return _put(draw, data)
    table, at = draw.choice(places)
    table[at] = copy.deepcopy(draw.choice(ODD))
    return _written(draw, value)


def _renamed(draw, data):
    """A value stands under another name, too."""
    names = (
        "n", "stop", "tools", "seed", "messages", "max_tokens", "response_format", "extra_body", "x" * 300,
        "",
    )  # fmt: skip
    value, places = _read(data)
    places = [place for place in places if isinstance(place[0], dict)]
    if not places:
        return _put(draw, data)
    table, at = draw.choice(places)
    table[draw.choice(names)] = copy.deepcopy(table[at])
    return _written(draw, value)


def _read(data):
    """(value, its places); no places where the bytes are no JSON any more."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None, []
    return value, list(_places(value))


def _written(draw, value):
    return json.dumps(value, ensure_ascii=draw.random() < 0.8).encode("utf-8", "surrogatepass")


def _places(value):
    """Every (container, place) of a JSON value."""
    todo = [value]
    while todo:
        now = todo.pop()
        if isinstance(now, (dict, list)):
            for at in now if isinstance(now, dict) else range(len(now)):
                yield now, at
                todo.append(now[at])


def _flipped(draw, data):
    out = bytearray(data)
    for _ in range(draw.choice((1, 1, 4, 16))):
        out[draw.randrange(len(out))] = draw.randrange(256)
    return bytes(out)


def _cut(draw, data):
    a, b = sorted(draw.choices(range(len(data) + 1), k=2))
    return data[:a] + data[b:] or b" "


def _put(draw, data):
    at = draw.randrange(len(data) + 1)
    return data[:at] + draw.choice(PIECES) + data[at:]


def _twice(draw, data):
    a, b = sorted(draw.choices(range(len(data) + 1), k=2))
    return data[:b] + data[a:b] * draw.choice((1, 2, 50)) + data[b:]


def _spliced(draw, data):
    other = _body(draw, RIGHT[:11])[1]
    return data[: draw.randrange(len(data) + 1)] + other[draw.randrange(len(other)) :] or b" "
