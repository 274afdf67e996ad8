"""Plain HTTP to a server under test, with the standard library alone."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any


def ask(url: str, data: Any = None, kind: str = "application/json") -> tuple[int, dict[str, str], bytes]:
    """(status, headers, body) of a GET, or of a POST where there is data."""
    body = None if data is None else data if isinstance(data, bytes) else json.dumps(data).encode()
    request = urllib.request.Request(url, body, {"content-type": kind})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, {k.lower(): v for k, v in answer.headers.items()}, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, {k.lower(): v for k, v in error.headers.items()}, error.read()


def events(url: str, data: Any) -> list[dict[str, Any]]:
    """The events of a stream, from the first to the last."""
    status, headers, body = ask(url, data)
    assert status == 200 and headers["content-type"].startswith("text/event-stream"), body
    parts = body.decode().split("\n\n")
    return [json.loads(part.removeprefix("data: ")) for part in parts if part.startswith("data: ")]
