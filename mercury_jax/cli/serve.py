"""`mercury serve`: a model behind Mercury's API and OpenAI's, with a playground."""

from __future__ import annotations

import argparse
import importlib.util
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mercury_jax import install
from mercury_jax.cli import options, show
from mercury_jax.cli.parser import Parser, number, whole
from mercury_jax.config import refuse

if TYPE_CHECKING:
    from mercury_jax.serve.engine.request import EngineConfig
    from mercury_jax.serve.options import ServerOptions

KEYS = "MERCURY_API_KEYS"
SLOTS = 8  # where memory allows
MORE = """\
examples:
  mercury serve                                    nano on http://127.0.0.1:8000, the playground at /
  mercury serve --model Efficient-Large-Model/Fast_dLLM_v2_7B --slots 16 --port 9000
  mercury serve --host 0.0.0.0 --api-key "$(openssl rand -hex 24)"
  mercury serve --alias mercury-2 --alias fast=nano

A client of OpenAI or of Inception needs its base URL changed and nothing else:
  openai.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="any")     INCEPTION_BASE_URL=http://127.0.0.1:8000

Any of the vendor's names (mercury-2, mercury-coder, mercury-edit, ...) gets the model that is loaded; --alias says
which names there are instead. Without a key only this machine can connect. Keys may also stand in
MERCURY_API_KEYS, between commas, where no list of processes shows them. SIGTERM or Ctrl-C drains: /ready fails,
running requests have --drain seconds, and a second signal ends at once.
/health, /ready and /metrics are for load balancers and Prometheus; /openapi.json describes every route."""


def parser() -> Parser:
    p = Parser("serve", "Serve a model over HTTP: chat, completions, fill-in-the-middle, edits.", MORE)
    options.loaded(p)
    _door(p.add_argument_group("door", "Where to listen, and whom to let in."))
    _engine(p.add_argument_group("engine", "How many requests run at the same time."))
    _answers(p.add_argument_group("answers", "What requests get that do not say."))
    p.add_argument("--debug", action="store_true", help="show tracebacks")
    return p


def _door(group: Any) -> None:
    group.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="to listen on (default 127.0.0.1)"
    )
    group.add_argument(
        "--port", type=whole, default=8000, metavar="N", help="default 8000; 0 finds a free one"
    )
    group.add_argument(
        "--api-key", action="append", default=[], metavar="KEY", help="ask for this key; repeatable"
    )
    group.add_argument("--allow-host", action="append", default=[], metavar="NAME",
                       help="a name that clients may call the server by; repeatable, * for any (default: the "
                       "loopback's; any, where a key is asked for on another address)")  # fmt: skip
    group.add_argument(
        "--rate", type=number, metavar="N", help="requests a minute and key (default: no limit)"
    )
    group.add_argument(
        "--max-body", type=whole, default=4 << 20, metavar="BYTES", help="of a request (default 4 MiB)"
    )
    group.add_argument("--drain", type=number, default=30.0, metavar="SECONDS", help="for running requests at the "
                       "end (default 30)")  # fmt: skip


def _engine(group: Any) -> None:
    group.add_argument(
        "--slots",
        type=whole,
        metavar="N",
        help="requests that run together (default 8, fewer where memory is short)",
    )
    group.add_argument("--queue", type=whole, default=64, metavar="N", help="requests that may wait; beyond them 429 "
                       "(default 64)")  # fmt: skip
    group.add_argument(
        "--context",
        type=whole,
        metavar="N",
        help="tokens of prompt and answer (default: the model's, or what fits)",
    )
    group.add_argument("--memory", type=number, metavar="GIB", help="most memory of each device for slots, prefix "
                       "cache and passes (default: nine tenths of what is free)")  # fmt: skip
    group.add_argument("--block", type=whole, metavar="N", help="tokens of a block (default: the model's)")
    group.add_argument("--mesh", metavar="AXIS=N,...", help="devices the model lies on: tensor=8, or data=2,expert=4 "
                       "(default: the first one)")  # fmt: skip
    group.add_argument("--prefix-cache", type=whole, default=64, metavar="MIB", help="memory for the keys of prompts "
                       "seen before (default 64, 0: none)")  # fmt: skip


def _answers(group: Any) -> None:
    group.add_argument("--alias", action="append", metavar="NAME", help="a further name of the model, also as "
                       "NAME=MODEL; repeatable (default: the vendor's names)")  # fmt: skip
    group.add_argument("--default-effort", metavar="NAME", help="instant, low, medium or high (default: the model's "
                       "own rule)")  # fmt: skip
    group.add_argument("--strict-temperature", action="store_true", help="as the vendor: outside of 0.5 to 1 it "
                       "becomes 0.75, with a warning")  # fmt: skip
    group.add_argument("--no-playground", action="store_true", help="nothing at /")


def run(argv: Sequence[str]) -> int:
    args = parser().read(argv)
    _check_installed()
    from mercury_jax.serve.options import check_address
    from mercury_jax.serve.server import listen

    settings, told = settings_of(args), options_of(args)
    check_address(args.host, told)
    socket = listen(args.host, args.port)  # a port that is taken is known before a model is loaded
    return _serve(args, socket, settings, told)


def _serve(args: argparse.Namespace, socket: Any, settings: EngineConfig, told: ServerOptions) -> int:
    import dataclasses

    from mercury_jax.serve.app import create_app
    from mercury_jax.serve.engine import memory
    from mercury_jax.serve.engine.engine import Engine
    from mercury_jax.serve.server import Server, freeze_startup_objects

    lm = show.load(args.model, mesh=mesh_of(args.mesh), **options.reading(args))
    told = dataclasses.replace(told, aliases=aliases(args.alias, lm.name))
    settings = memory.fit_config(lm, settings, slots=args.slots is None, context=args.context is None)
    engine = Engine(lm, settings)
    show.say(f"{settings.slots} slots of {engine.context} tokens: {memory.engine_memory(lm, settings)}")
    began = time.perf_counter()

    def ready() -> None:
        freeze_startup_objects()
        show.say(f"ready in {time.perf_counter() - began:.1f} s")

    server = Server(create_app(engine, told), engine, args.drain, ready)
    host, port = socket.getsockname()[:2]
    _greet(lm.name, host, port, told)
    server.run(sockets=[socket])
    if server.failure is not None:
        raise server.failure
    show.say("stopped")
    if server.compiling:  # an interpreter that ends beneath a compiler's thread crashes
        os._exit(0)
    return 0


def settings_of(args: argparse.Namespace) -> EngineConfig:
    """The engine's settings; ValueError for a number that is none."""
    from mercury_jax.config import at_least
    from mercury_jax.models.cache import check_kv_kind
    from mercury_jax.serve.engine.request import EngineConfig

    given = {
        name: value for name in ("slots", "context", "block") if (value := getattr(args, name)) is not None
    }
    at_least(1, **given)
    if args.memory is not None and not args.memory > 0:
        raise refuse("--memory", args.memory, "a number of GiB above 0")
    at_least(0, queue=args.queue, prefix_cache=args.prefix_cache, drain=args.drain)
    check_kv_kind(args.kv)
    return EngineConfig(
        slots=SLOTS if args.slots is None else args.slots,
        queue=args.queue,
        context=args.context,
        block=args.block,
        prefix_bytes=args.prefix_cache << 20,
        memory=None if args.memory is None else int(args.memory * 2**30),
    )


def mesh_of(text: str | None) -> Any:
    """The mesh of `tensor=8` or `data=2,tensor=4`; None for the first device."""
    if text is None:
        return None
    import math

    import jax

    from mercury_jax.sharding import AXES, mesh

    pairs = [pair.partition("=") for pair in text.split(",")]
    for name, _, count in pairs:
        if name not in AXES or not count.isdecimal():
            raise refuse("--mesh", text, f"AXIS=N between commas; axes: {', '.join(AXES)}")
    sizes = {**dict.fromkeys(AXES, 1), **{name: int(count) for name, _, count in pairs}}
    used, here = math.prod(sizes.values()), jax.devices()
    if not 1 <= used <= len(here):
        raise refuse("--mesh", text, f"1 to {len(here)} devices in all")
    return mesh(*(sizes[axis] for axis in AXES), devices=here[:used])


def options_of(args: argparse.Namespace) -> ServerOptions:
    """What the app is told; the aliases need the model's name and come later."""
    from mercury_jax.serve.options import ANY_HOST, LOOPBACK_HOSTS, ServerOptions, is_loopback

    keys = (*args.api_key, *filter(None, (key.strip() for key in os.environ.get(KEYS, "").split(","))))
    open_door = not args.allow_host and not is_loopback(args.host)
    return ServerOptions(
        keys=keys,
        hosts=(ANY_HOST,) if open_door else (*LOOPBACK_HOSTS, *args.allow_host),
        rate=args.rate,
        effort=args.default_effort,
        strict_temperature=args.strict_temperature,
        max_body=args.max_body,
        playground=not args.no_playground,
    )


def aliases(words: Sequence[str] | None, model: str) -> dict[str, str] | None:
    """NAME or NAME=MODEL of each --alias; None where there was none."""
    if words is None:
        return None
    pairs = [word.partition("=") for word in words]
    return {name: meant or model for name, _, meant in pairs}


def _check_installed() -> None:
    needed = ("starlette", "uvicorn", "pydantic", "prometheus_client", "jsonschema", "llguidance")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        allowed = f"an environment with them: {install.command('serve')}"
        raise refuse("this environment", f"without {', '.join(missing)}", allowed)


def _greet(model: str, host: str, port: int, told: ServerOptions) -> None:
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    key = ' -H "Authorization: Bearer $KEY"' if told.keys else ""
    show.say(f"{model} at {url}/v1" + (f"   playground: {url}/" if told.playground else ""))
    show.say(f"""\
try: curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\
       -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "347+585="}}]}}'
compiling; /ready answers 200 when that is done""")
