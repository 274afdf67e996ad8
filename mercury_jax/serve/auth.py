"""Access control: the Host header, the API key and the request rate.

`AuthMiddleware` wraps all routes that are not public. Protection does not depend on a list of paths or on a comparison
of paths, so a new route is protected by default. The middleware reads headers only.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import time
from collections.abc import Callable, Iterable, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from mercury_jax.serve import errors
from mercury_jax.serve.errors import ApiError
from mercury_jax.serve.options import ANY_HOST, ServerOptions

Headers = Sequence[tuple[bytes, bytes]]

HOST_PATTERN = re.compile(r"([A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_.])?|\[[0-9A-Fa-f:.]+\])(?::\d{1,5})?")
NO_KEY = "No API key found; send it in one header `Authorization: Bearer KEY` or `x-api-key: KEY`"
# Key of the ASGI scope under which the digest of the API key is stored, never the key itself; "" if the server has no
# keys. The digest separates the prefix caches of different keys (`EngineRequest.cache_salt`).
KEY_DIGEST = "mercury.key"


class AuthMiddleware:
    """ASGI middleware that checks host, API key and request rate, in this order.

    A refused request never reaches the wrapped app.
    """

    def __init__(self, app: ASGIApp, options: ServerOptions, clock: Callable[[], float] = time.monotonic):
        self.app, self.options = app, options
        self._digests = tuple(digest(key) for key in options.keys)
        self._limiter = None if options.rate is None else RateLimiter(options.rate, clock)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = scope["headers"]
        check_host(_values(headers, b"host"), self.options.hosts)
        scope[KEY_DIGEST] = key_digest = self.authenticate(headers)
        if self._limiter is not None and scope["method"] == "POST":
            self._limiter.take(key_digest)
        await self.app(scope, receive, send)

    def authenticate(self, headers: Headers) -> str:
        """Checks the API key of a request."""
        if not self._digests:
            return ""
        key = _given_key(headers)
        given = digest(key)
        # Compare with all keys, without an early exit: the time depends neither on the given key nor on the match.
        matches = [hmac.compare_digest(given, known) for known in self._digests]
        if not any(matches):
            # A browser that opens the playground shows a password dialog for Basic; programs should send a bearer key.
            page = any(b"text/html" in value for value in _values(headers, b"accept"))
            challenge = 'Basic realm="mercury", charset="UTF-8"' if page else 'Bearer realm="mercury"'
            raise ApiError(
                401,
                "Incorrect API key provided" if key else NO_KEY,
                "authentication_error",
                code="invalid_api_key",
                headers={"www-authenticate": challenge},
            )
        return given.hex()


def digest(key: str) -> bytes:
    """Returns the SHA-256 digest of an API key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def check_host(values: Sequence[bytes], allowed: Iterable[str]) -> None:
    """Checks the Host header."""
    found = HOST_PATTERN.fullmatch(values[0].decode("latin-1")) if len(values) == 1 else None
    if not found:
        raise ApiError(400, "Host must be one name or address, with a port or without")
    name = found[1].lower().removesuffix(".")
    if ANY_HOST not in allowed and name not in {host.lower() for host in allowed}:
        message = f"Host {name[:80]} is not served here; the server's --allow-host names more"
        raise ApiError(403, message, "permission_error", code="host_not_allowed")


class RateLimiter:
    """A token bucket per API key, refilled at `rate` per minute; its capacity is one minute of requests."""

    def __init__(self, rate: float, clock: Callable[[], float]):
        self.rate, self.capacity, self._clock = rate / 60.0, max(1.0, rate), clock
        self._buckets: dict[str, tuple[float, float]] = {}  # (tokens left, time) by known key

    def take(self, key: str) -> None:
        """Takes one token from the bucket of a key."""
        now = self._clock()
        left, last = self._buckets.get(key, (self.capacity, now))
        left = min(self.capacity, left + (now - last) * self.rate)
        if left < 1:
            self._buckets[key] = (left, now)
            raise errors.rate_limited((1 - left) / self.rate)
        self._buckets[key] = (left - 1, now)


def _given_key(headers: Headers) -> str:
    """Extracts the key from `Authorization: Bearer KEY`, the password of Basic, which browsers send, or `x-api-key`."""
    values = _values(headers, b"authorization")
    if not values and len(keys := _values(headers, b"x-api-key")) == 1:
        return keys[0].decode("latin-1").strip()
    if len(values) != 1:
        return ""
    scheme, _, rest = values[0].decode("latin-1").partition(" ")
    if scheme.lower() == "bearer":
        return rest.strip()
    if scheme.lower() != "basic":
        return ""
    try:
        return base64.b64decode(rest.strip(), validate=True).decode("utf-8").partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""


def _values(headers: Headers, name: bytes) -> list[bytes]:
    return [value for key, value in headers if key.lower() == name]
