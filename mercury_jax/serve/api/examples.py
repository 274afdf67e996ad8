"""A request of every endpoint as it may look, for the OpenAPI document; without the model, which is the server's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "The sum of two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
EDIT = """\
<|current_file_content|>
current_file_path: area.py
def area(width, height):
<|code_to_edit|>
    return width
<|/code_to_edit|>
<|/current_file_content|>"""
APPLY = """\
<|original_code|>
def area(width, height):
    side = width
    return side
<|/original_code|>

<|update_snippet|>
def area(width, height):
    side = width * height
    return side
<|/update_snippet|>"""

REQUESTS: Mapping[str, Mapping[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "347+585="}],
        "tools": [TOOL],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
    },
    "/v1/completions": {"prompt": "def area(width, height):", "max_tokens": 32},
    "/v1/fim/completions": {"prompt": "def area(width, height):\n", "suffix": "\n\narea(2, 3)"},
    "/v1/edit/completions": {"messages": [{"role": "user", "content": EDIT}]},
    "/v1/apply/completions": {"messages": [{"role": "user", "content": APPLY}]},
}
