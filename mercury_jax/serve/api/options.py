"""What a server is told once, at its start."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from mercury_jax.config import refuse
from mercury_jax.decode.defaults import EFFORTS

# The vendor's names, which clients have built in: any of them gets the model that is loaded.
VENDOR = (
    "mercury", "mercury-2", "mercury-2.5", "mercury-3", "mercury-coder", "mercury-coder-small",
    "mercury-coder-small-beta", "mercury-edit", "mercury-edit-2",
)  # fmt: skip
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
ANY = "*"


@dataclass(frozen=True, kw_only=True)
class Options:
    """How an app answers; nothing of it is the model's or the engine's.

    keys: API keys, any of which opens every route (none: no key is asked for). hosts: names that a request's
    `Host` may have ("*": any); the loopback's alone keep foreign web pages from using a local server.
    aliases: further names of the model, each with the name it stands for. rate: requests a minute and key
    (None: no limit). effort: of requests that name none (None: the model's own rule; it thinks first where
    medium's thinking takes at most a quarter of the context). strict_temperature: as the vendor, temperatures
    outside of 0.5 to 1 become 0.75, with a warning. max_body: bytes. max_depth: of a body's JSON.
    read_timeout: seconds that a body may take to arrive. keep_alive: seconds of silence after which a stream of
    events gets a comment. playground: whether `/` shows it.
    """

    keys: tuple[str, ...] = field(default=(), repr=False)  # no log and no error shows them
    hosts: tuple[str, ...] = LOOPBACK
    aliases: Mapping[str, str] | None = None
    rate: float | None = None
    effort: str | None = None
    strict_temperature: bool = False
    max_body: int = 4 << 20
    max_depth: int = 100
    read_timeout: float = 30.0
    keep_alive: float = 15.0
    playground: bool = True

    def __post_init__(self) -> None:
        if self.effort is not None and self.effort not in EFFORTS:
            raise refuse("effort", self.effort, ", ".join(EFFORTS))
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise refuse("rate", self.rate, "a number of requests a minute above 0")
        above = {"max_body": self.max_body, "read_timeout": self.read_timeout, "keep_alive": self.keep_alive}
        for name, value in above.items():
            if not value > 0:
                raise refuse(name, value, "a number above 0")
        for key in self.keys:
            if len(key) < 8 or not key.isascii() or not key.isprintable() or " " in key:
                raise refuse("an API key", "*" * len(key), "8 or more printable ASCII characters, no space")


def names(model: str, options: Options) -> dict[str, str]:
    """Every name that a request may use, and the model it stands for; the model's own name comes first."""
    aliases: dict[str, str] = (
        dict.fromkeys(VENDOR, model) if options.aliases is None else dict(options.aliases)
    )
    for alias, meant in aliases.items():
        if meant != model:
            raise refuse(f"alias {alias}", meant, f"{model}, the model that is loaded")
        if not alias:
            raise refuse("alias", alias, "NAME or NAME=MODEL")
    return {model: model, **aliases}


def loopback(host: str) -> bool:
    """Whether only this machine can reach an address to listen on."""
    try:
        found = [ipaddress.ip_address(host.strip("[]"))]
    except ValueError:
        try:
            found = [ipaddress.ip_address(info[4][0]) for info in socket.getaddrinfo(host, None)]
        except OSError:
            raise refuse("host", host, "an address or a name of this machine") from None
    return all(address.is_loopback for address in found)
