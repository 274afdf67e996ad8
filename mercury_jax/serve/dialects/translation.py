"""Makes a chat request of the body of another API, and names the fields of that body in the errors of the chat.

The chat request is validated like any other, so that a body is refused by the same checks wherever it comes from.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping

from mercury_jax.serve.errors import ApiError
from mercury_jax.serve.protocol import ChatCompletionsRequest, JsonObject, SampledRequest, parse_request


class ChatTurns:
    """The messages of a chat request, each with the field of the body that it comes from."""

    def __init__(self) -> None:
        self.messages: list[JsonObject] = []
        self.places: list[str] = []

    def add(self, place: str, role: str, **fields: object) -> None:
        """Adds a message."""
        self.messages.append({"role": role, **fields})
        self.places.append(place)

    def add_call(self, place: str, id: str, name: str, arguments: str | JsonObject) -> None:
        """Adds a tool call to the assistant's last message, or to a new one where the last is not the assistant's."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.add(place, "assistant", content=None)
        call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self.messages[-1].setdefault("tool_calls", []).append(call)
        self.places[-1] = place


def chat_request(body: SampledRequest, turns: ChatTurns, fields: JsonObject) -> ChatCompletionsRequest:
    """Makes the chat request.

    Args:
        body: The body; its model and sampling fields are passed on as they are.
        fields: The fields of the chat request that the body has in another form.
    """
    shared = set(SampledRequest.model_fields) - {"extra_body", "stream_options", "n"}
    passed = body.model_dump(include=shared, exclude_unset=True)
    return parse_request(ChatCompletionsRequest, {**passed, "messages": turns.messages, **fields})


@contextlib.contextmanager
def naming(names: Mapping[str, str], turns: ChatTurns) -> Iterator[None]:
    """Replaces the names of chat fields in an `ApiError` by those of the body.

    Args:
        names: Regular expressions of fields of a chat, with their names in the body.
    """

    def renamed(text: str) -> str:
        text = re.sub(r"^messages\[(\d+)\]", lambda found: turns.places[int(found[1])], text)
        for pattern, name in names.items():
            text = re.sub(pattern, name, text)
        return text

    try:
        yield
    except ApiError as error:
        error.message = renamed(error.message)
        error.param = None if error.param is None else renamed(error.param)
        raise
