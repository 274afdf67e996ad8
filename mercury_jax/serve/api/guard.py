"""Who may come in: the name that a request calls us by, its key, and how often it comes.

The guard stands around everything that is not open, whatever its path, so nothing has to be listed to be
protected, and no path is compared to decide it. It reads the scope's headers alone.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from mercury_jax.serve.api import errors
from mercury_jax.serve.api.errors import ApiError
from mercury_jax.serve.api.options import ANY, Options

HOST = re.compile(r"([A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_.])?|\[[0-9A-Fa-f:.]+\])(?::\d{1,5})?")
KEY = "mercury.key"  # the scope's name for who asks: a digest, never the key itself


class Guard:
    """ASGI around ASGI: Host, then key, then rate; what is refused never reaches the app within."""

    def __init__(self, app: ASGIApp, options: Options, clock: Callable[[], float] = time.monotonic):
        self.app, self.options = app, options
        self._digests = tuple(digest(key) for key in options.keys)
        self._rate = None if options.rate is None else Rate(options.rate, clock)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = scope["headers"]
        check_host(_values(headers, b"host"), self.options.hosts)
        scope[KEY] = known = self._known(headers)
        if self._rate is not None and scope["method"] == "POST":
            self._rate.take(known)
        await self.app(scope, receive, send)

    def _known(self, headers: Sequence[tuple[bytes, bytes]]) -> str:
        """The digest of the key that was shown, "" where none is asked for; ApiError 401."""
        if not self._digests:
            return ""
        given = digest(shown_key(_values(headers, b"authorization")))
        # Every key is compared, in time that depends neither on the key given nor on the one that fits.
        fits = [hmac.compare_digest(given, known) for known in self._digests]
        if not any(fits):
            raise errors.unauthorised(_challenge(headers))
        return given.hex()


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def shown_key(values: list[bytes]) -> str:
    """The key of `Authorization: Bearer KEY`, or the password of Basic, with which a browser opens a page."""
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


def check_host(values: list[bytes], allowed: Iterable[str]) -> None:
    """ApiError 400 for what is no host at all, 403 for one by which this server is not known."""
    text = values[0].decode("latin-1") if len(values) == 1 else ""
    found = HOST.fullmatch(text)
    if not found:
        raise ApiError(400, "Host must be one name or address, with a port or without")
    name = found[1].lower().removesuffix(".")
    if ANY not in allowed and name not in {host.lower() for host in allowed}:
        raise ApiError(403, f"Host {name[:80]} is not served here; the server's --allow-host names more",
                       "permission_error", code="host_not_allowed")  # fmt: skip


def _values(headers: Sequence[tuple[bytes, bytes]], name: bytes) -> list[bytes]:
    return [value for key, value in headers if key.lower() == name]


def _challenge(headers: Sequence[tuple[bytes, bytes]]) -> str:
    """A page in a browser is asked for a password; programs are told of the bearer key alone."""
    page = any(b"text/html" in value for value in _values(headers, b"accept"))
    return 'Basic realm="mercury", charset="UTF-8"' if page else 'Bearer realm="mercury"'


class Rate:
    """A bucket of tokens for each key, filled at `rate` a minute and no larger than a minute's worth."""

    def __init__(self, rate: float, clock: Callable[[], float]):
        self.rate, self.most, self._clock = rate / 60.0, max(1.0, rate), clock
        self._buckets: dict[str, tuple[float, float]] = {}  # known keys only, so it cannot grow

    def take(self, key: str) -> None:
        """ApiError 429 with the seconds until the next request would pass."""
        now = self._clock()
        left, last = self._buckets.get(key, (self.most, now))
        left = min(self.most, left + (now - last) * self.rate)
        if left < 1:
            self._buckets[key] = (left, now)
            raise errors.too_many((1 - left) / self.rate)
        self._buckets[key] = (left - 1, now)


def key_of(scope: Any) -> str:
    """Whose request it is, for what must not be shared between keys; "" where keys are not asked for."""
    return scope.get(KEY, "")
