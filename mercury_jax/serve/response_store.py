"""The responses that `GET /v1/responses/{id}` and `previous_response_id` find: in memory, with a bound."""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict
from typing import NamedTuple

from mercury_jax.serve.errors import ApiError
from mercury_jax.serve.http import dump_json
from mercury_jax.serve.responses import JsonDict

MAX_RESPONSES = 1024  # of one API key
MAX_BYTES = 64 << 20  # of all API keys together, as JSON


class StoredResponse(NamedTuple):
    """A response, and the items that the model had read for it: those of earlier responses, then those of the input."""

    response: JsonDict
    items: list[JsonDict]


class ResponseStore:
    """Keeps the newest responses of each API key. A key finds its own responses only.

    They are kept as JSON text, so that `max_bytes` is what they take.

    Args:
        keys: Number of API keys, among which the bytes are divided evenly.
    """

    def __init__(self, keys: int, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES):
        self._limits = max_responses, max_bytes // max(1, keys)
        self._kept: defaultdict[str, OrderedDict[str, str]] = defaultdict(OrderedDict)

    def put(self, owner: str, stored: StoredResponse) -> None:
        """Keeps a response, and drops the oldest ones of the same owner beyond the bound."""
        kept = self._kept[owner]
        kept[stored.response["id"]] = dump_json(stored)
        most, most_bytes = self._limits
        while len(kept) > most or sum(map(len, kept.values())) > most_bytes:
            kept.popitem(last=False)

    def get(self, owner: str, id: str, param: str = "response_id", status: int = 404) -> StoredResponse:
        """Returns a response.

        Args:
            param, status: Of the ApiError where it is not kept.
        """
        if id in self._kept[owner]:
            return StoredResponse(*json.loads(self._kept[owner][id]))
        most, most_bytes = self._limits
        message = (
            f"{param} {id[:80]!r} is not stored. This server keeps responses in memory until it ends, of each API "
            f"key the newest {most} and at most {most_bytes} bytes, and none of a request with store false"
        )
        raise ApiError(status, message, param=param, code=param.replace("_id", "_not_found"))

    def delete(self, owner: str, id: str) -> None:
        """Drops a response; ApiError 404 where it is not kept."""
        self.get(owner, id)
        del self._kept[owner][id]
