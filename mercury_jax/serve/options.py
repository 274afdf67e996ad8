"""Options of a server, fixed when it starts, and the addresses that need an API key.

`mercury serve` makes them from its arguments; `app.create_app` takes them.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mercury_jax.config import refuse
from mercury_jax.decode.defaults import EFFORTS

# Names of the vendor's models that are built into clients. By default each of them is an alias of the first model.
VENDOR_MODELS = (
    "mercury", "mercury-2", "mercury-2.5", "mercury-3", "mercury-coder", "mercury-coder-small",
    "mercury-coder-small-beta", "mercury-edit", "mercury-edit-2", "mercury-decide", "jev-latest",
)  # fmt: skip
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "[::1]")
ANY_HOST = "*"
MAX_BODY = 4 << 20  # bytes of a request to models that read text only
ORIGIN_PATTERN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]+")


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options of the HTTP server. Options of the engine are in `serve.engine.request.EngineConfig`.

    Args:
        hosts: Allowed values of the `Host` header, or "*" for any. The default, the loopback names, prevents other web
            pages from using a local server by DNS rebinding.
        origins: Web pages that may read responses, as the `Origin` that browsers send (`http://localhost:3000`), or "*"
            for any. None by default: pages of other origins cannot use the server.
        aliases: Further names of the models, as a mapping from alias to model name; None: the vendor's names, which
            mean the first model.
        effort: Default effort of requests that set none. None: the model's own rule, with the thinking budget of
            "medium" if that is at most a quarter of the context.
        max_body: Most bytes of a request; None: 4 MiB, or 21 MiB if a model reads images.
        playground: Whether `/` serves the playground.
    """

    keys: tuple[str, ...] = field(default=(), repr=False)  # never in logs or errors
    hosts: tuple[str, ...] = LOOPBACK_HOSTS
    origins: tuple[str, ...] = ()
    aliases: Mapping[str, str] | None = None
    rate: float | None = None
    effort: str | None = None
    strict_temperature: bool = False
    max_body: int | None = None
    max_depth: int = 100
    read_timeout: float = 30.0
    keep_alive: float = 15.0
    playground: bool = True

    def __post_init__(self) -> None:
        if self.effort is not None and self.effort not in EFFORTS:
            raise refuse("effort", self.effort, ", ".join(EFFORTS))
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise refuse("rate", self.rate, "a number of requests per minute above 0")
        for name in ("max_body", "read_timeout", "keep_alive"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise refuse(name, getattr(self, name), "a number above 0")
        for origin in self.origins:
            if origin != ANY_HOST and not ORIGIN_PATTERN.fullmatch(origin):
                raise refuse("origin", origin, "scheme://host or scheme://host:port, or * for any")
        for key in self.keys:
            if len(key) < 8 or not key.isascii() or not key.isprintable() or " " in key:
                raise refuse("an API key", "*" * len(key), "8 or more printable ASCII characters, no space")


def model_names(models: Sequence[str], options: ServerOptions) -> dict[str, str]:
    """Lists the names that requests may use."""
    for i, model in enumerate(models):
        if model in models[:i]:
            raise refuse("name of a model", model, "another name for each model: --model NAME=MODEL")
    aliases: Mapping[str, str] | None = options.aliases
    if aliases is None:
        aliases = {name: models[0] for name in VENDOR_MODELS if name not in models}
    for alias, target in aliases.items():
        if target not in models:
            raise refuse(f"alias {alias}", target, f"a model that is loaded: {', '.join(models)}")
        if not alias:
            raise refuse("alias", alias, "NAME or NAME=MODEL")
        if alias in models and alias != target:
            raise refuse("alias", alias, f"a name that no model has: {alias} is a model itself")
    return {**dict(zip(models, models, strict=True)), **aliases}


def is_loopback(host: str) -> bool:
    """Says whether only this machine can reach an address."""
    try:
        found = [ipaddress.ip_address(host.strip("[]"))]
    except ValueError:
        try:
            found = [ipaddress.ip_address(info[4][0]) for info in socket.getaddrinfo(host, None)]
        except OSError:
            raise refuse("host", host, "an address or a name of this machine") from None
    return all(address.is_loopback for address in found)


def check_address(host: str, options: ServerOptions) -> None:
    """Refuses an address that other machines can reach while no API key is needed.

    Args:
        host: The address to listen on.
        options: Options with the keys.

    Raises:
        ValueError: If the address is not a loopback address and there is no key.
    """
    if not options.keys and not is_loopback(host):
        raise refuse("host", host, "127.0.0.1, ::1 or localhost; any other needs an API key (--api-key)")
