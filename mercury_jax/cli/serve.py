"""`mercury serve`: one or several models behind Mercury's API and OpenAI's, with a playground."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, NamedTuple

from mercury_jax import install
from mercury_jax.cli import arguments, show
from mercury_jax.cli.arguments import (
    CheckpointOptions,
    Flag,
    Float,
    Group,
    Int,
    OptionalFloat,
    OptionalInt,
    Repeated,
    option,
)
from mercury_jax.config import count, refuse

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from mercury_jax.hub.family import Opened
    from mercury_jax.serve.engine.engine import Engine
    from mercury_jax.serve.engine.request import EngineConfig
    from mercury_jax.serve.options import ServerOptions
    from mercury_jax.types import LM

KEYS = "MERCURY_API_KEYS"  # environment variable: API keys, separated by commas
SLOTS = 8  # where memory allows
LONGEST_NAME = 256  # characters of a model's name, as in requests
NEEDED = ("starlette", "uvicorn", "prometheus_client", "jsonschema", "llguidance")


@dataclass(frozen=True, kw_only=True)
class Serve:
    """Serve models over HTTP: chat, completions, fill-in-the-middle, edits.

    examples:
      mercury serve              the embedded model on http://127.0.0.1:8000,
                                 with a playground at /
      mercury serve --model Efficient-Large-Model/Fast_dLLM_v2_7B --slots 16
      mercury serve --model nano --model mine=runs/sft/model
      mercury serve --host 0.0.0.0 --api-key "$(openssl rand -hex 24)"
      mercury serve --alias mercury-2 --alias fast=nano
      mercury serve --rule my_rules:leftmost --count 4

    A client of OpenAI or of Inception only needs another base URL:
      openai.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="any")
      INCEPTION_BASE_URL=http://127.0.0.1:8000

    With several --model the field `model` of a request chooses. Each has slots,
    a queue and a prefix cache of its own, and an equal share of the memory that
    is free once all weights are loaded. All other options hold for every model;
    --adapter, --draft, --mask, --ignore-config and --mesh need a single one.

    The vendor's model names (mercury-2, mercury-coder, mercury-edit, ...) all
    mean the first model; --alias gives other names instead. Without a key only
    this machine can connect. MERCURY_API_KEYS may hold keys, separated by
    commas, where no list of processes shows them. SIGTERM or Ctrl-C drains:
    /ready fails, running requests have --drain seconds, and a second signal
    ends at once. /health, /ready and /metrics are for load balancers and
    Prometheus; /openapi.json describes every route.
    """

    model: Annotated[Repeated[tuple[str, ...]], option("MODEL")] = ()
    """Folder, GGUF file or Hugging Face id of a model, also as NAME=MODEL to give it a name; repeatable. Default: the
    embedded one."""
    host: Annotated[str, option("ADDRESS")] = "127.0.0.1"
    """Address to listen on."""
    port: Int = 8000
    """Port to listen on; 0 finds a free one."""
    api_key: Annotated[Repeated[tuple[str, ...]], option("KEY")] = ()
    """Require this key; repeatable."""
    allow_host: Annotated[Repeated[tuple[str, ...]], option("NAME")] = ()
    """A host name that requests may carry; repeatable, * for any. Default: the loopback's; any, where keys are required
    on another address."""
    allow_origin: Annotated[Repeated[tuple[str, ...]], option("ORIGIN")] = ()
    """A web page that may use the server, such as http://localhost:3000; repeatable, * for any. Default: none."""
    rate: OptionalFloat = None
    """Requests per minute and key. Default: no limit."""
    max_body: OptionalInt = None
    """Most bytes of a request. Default: 4 MiB, or 21 MiB for a model that reads images."""
    drain: Float = 30.0
    """Seconds that running requests have when the server ends."""
    slots: OptionalInt = None
    """Requests that are decoded together, of each model. Default: 8, fewer where memory is short."""
    queue: Int = 64
    """Requests that may wait, for each model; beyond them the answer is 429."""
    context: OptionalInt = None
    """Tokens of prompt and answer. Default: the model's, or what fits into memory."""
    memory: OptionalFloat = None
    """Most GiB of each device for slots, prefix cache and forward passes, in equal shares for several models. Default:
    nine tenths of what is free."""
    block: OptionalInt = None
    """Tokens of a block. Default: the model's."""
    mesh: Annotated[str | None, option("AXIS=N,...")] = None
    """Devices that hold the model, such as tensor=8 or data=2,expert=4. Default: the first one."""
    prefix_cache: Int = 64
    """MiB for the KV caches of prompts seen before, of each model; 0 for none."""
    rule: Annotated[str | None, option("NAME")] = None
    """Decoding rule of all requests, or MODULE:NAME of your own; its parameters are options. Default: the model's
    own."""
    alias: Annotated[Repeated[tuple[str, ...]], option("NAME")] = ()
    """A name of the first model, or of another one as NAME=MODEL; repeatable. It stands instead of the vendor's names,
    which are the default."""
    default_effort: Annotated[str | None, option("NAME")] = None
    """instant, low, medium or high, for requests that name none. Default: the model's own rule."""
    strict_temperature: Flag = False
    """Replace temperatures outside 0.5 to 1 by 0.75, with a warning, as the vendor does."""
    no_playground: Flag = False
    """Serve nothing at /."""
    checkpoint: Annotated[CheckpointOptions, Group] = field(default_factory=CheckpointOptions)


class NamedSource(NamedTuple):
    """A value of --model: the name that it gives, and what `mercury_jax.load` takes; each may be None."""

    name: str | None
    source: str | None


def run(argv: Sequence[str]) -> int:
    """Runs the command until a signal ends it; returns its exit code."""
    args, parameters = arguments.read_with_rule(Serve, argv, "mercury serve")
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"mercury serve needs {', '.join(missing)}: {install.command('serve')}")
    from mercury_jax.serve.options import check_address
    from mercury_jax.serve.server import listen

    models, settings, options = models_of(args), settings_of(args), options_of(args)
    check_address(args.host, options)
    # A bad parameter and a port that is in use are reported before a model is loaded.
    if args.rule is not None:
        arguments.find_rule(args.rule)(**parameters)
    socket = listen(args.host, args.port)
    if len(models) > 1 or args.alias:
        check_names(args, models, options)

    from mercury_jax.serve.app import create_app
    from mercury_jax.serve.server import Server, freeze_startup_objects

    engines = load_engines(args, models, parameters, settings)
    names = [engine.lm.name for engine in engines]
    options = dataclasses.replace(options, aliases=aliases_of(args.alias, names[0]))
    began = time.perf_counter()

    host, port = socket.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    key = ' -H "Authorization: Bearer $KEY"' if options.keys else ""

    def ready() -> None:
        freeze_startup_objects()
        show.say(f"""\
ready in {time.perf_counter() - began:.1f} s
try: curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\
       -d '{{"model": "{names[0]}", "messages": [{{"role": "user", "content": "347+585="}}]}}'""")

    server = Server(create_app(engines, options), engines, args.drain, ready)
    show.say(f"""\
{", ".join(names)} at {url}/v1{f"   playground: {url}/" if options.playground else ""}
compiling; /ready answers 200 when that is done""")
    server.run(sockets=[socket])
    if server.failure is not None:
        raise server.failure
    show.say("stopped")
    if server.compiling:  # an interpreter that ends while a thread compiles crashes
        os._exit(0)
    return 0


def models_of(args: Serve) -> list[NamedSource]:
    """The models of --model, in their order; the embedded one without the option."""
    found = []
    for word in args.model:
        name, equals, source = word.partition("=")
        # A folder may have "=" in its path, such as runs/lr=0.1/model, and a name has no "/".
        if not equals or "/" in name or os.path.exists(word):
            found.append(NamedSource(None, word))
            continue
        if not source or not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
            raise refuse("--model", word, f"MODEL or NAME=MODEL, a name of 1 to {LONGEST_NAME} characters")
        found.append(NamedSource(name, source))
    how, single = args.checkpoint, "no value with several models"
    if len(found) > 1:
        merged = "the folder that `mercury convert --adapter` writes is a model of its own"
        keys, why = (
            "it names keys of one config.json",
            "programs of two models on one mesh can block each other",
        )
        arguments.require(
            (how.adapter is None, "--adapter", how.adapter, f"{single}: {merged}"),
            (how.draft is None, "--draft", how.draft, f"{single}: it was trained for one model"),
            (how.mask is None, "--mask", how.mask, f"{single}: it is an id of one vocabulary"),
            (not how.ignore_config, "--ignore-config", how.ignore_config, f"{single}: {keys}"),
            (args.mesh is None, "--mesh", args.mesh, f"{single}: {why}"),
        )
    return found or [NamedSource(None, None)]


def check_names(args: Serve, models: Sequence[NamedSource], options: ServerOptions) -> None:
    """Refuses names that are not possible together, before the parameters of a model are read."""
    from mercury_jax.hub.load import model_name
    from mercury_jax.serve.options import model_names

    names = []
    for name, source in models:
        if name is None:
            name = model_name(source, _opened(args, source))
        names.append(name)
    model_names(names, dataclasses.replace(options, aliases=aliases_of(args.alias, names[0])))


def _opened(args: Serve, source: str | None) -> Opened:
    """Opens the checkpoint of a model, before its parameters are read."""
    from mercury_jax.hub.load import NANO, open_checkpoint

    how = args.checkpoint
    return open_checkpoint(NANO if source is None else source, mask=how.mask, ignore_config=how.ignore_config)


def load_engines(
    args: Serve, models: Sequence[NamedSource], parameters: dict[str, float], settings: EngineConfig
) -> list[Engine]:
    """Loads the models, and makes an engine for each.

    All weights are loaded before the memory for the slots is divided, so that the shares do not depend on the order.
    """
    from mercury_jax.serve.engine import memory
    from mercury_jax.serve.engine.engine import Engine

    lms = []
    for name, source in models:
        lm = args.checkpoint.load(source, mesh=mesh_of(args.mesh))
        lm = with_rule(lm, args.rule, parameters)
        lms.append(lm if name is None else dataclasses.replace(lm, name=name))
    available = memory.free_memory(lms[0], settings)  # all models are on the same devices
    if available is not None:
        settings = dataclasses.replace(settings, memory=available // len(lms))
    engines = []
    for lm in lms:
        fitted = memory.fit_config(lm, settings, slots=args.slots is None, context=args.context is None)
        engines.append(engine := Engine(lm, fitted))
        sizes = memory.engine_memory(lm, fitted)
        show.say(f"{lm.name}: {fitted.slots} slots of {engine.context} tokens: {sizes}")
    return engines


def settings_of(args: Serve) -> EngineConfig:
    """The settings of the engine. ValueError names the option that is out of range."""
    from mercury_jax.config import at_least
    from mercury_jax.models.cache import check_kv_kind
    from mercury_jax.serve.engine.request import EngineConfig

    given = {"slots": args.slots, "context": args.context, "block": args.block}
    at_least(1, **{name: value for name, value in given.items() if value is not None})
    if args.memory is not None and not args.memory > 0:
        raise refuse("--memory", args.memory, "a number of GiB above 0")
    at_least(0, queue=args.queue, prefix_cache=args.prefix_cache, drain=args.drain)
    check_kv_kind(args.checkpoint.kv)
    return EngineConfig(
        slots=SLOTS if args.slots is None else args.slots,
        queue=args.queue,
        context=args.context,
        block=args.block,
        prefix_bytes=args.prefix_cache << 20,
        memory=None if args.memory is None else int(args.memory * 2**30),
    )


def options_of(args: Serve) -> ServerOptions:
    """The options of the HTTP app; the aliases need the model's name and are added later."""
    from mercury_jax.serve.options import ANY_HOST, LOOPBACK_HOSTS, ServerOptions, is_loopback

    keys = (*args.api_key, *filter(None, (key.strip() for key in os.environ.get(KEYS, "").split(","))))
    any_host = not args.allow_host and not is_loopback(args.host)
    return ServerOptions(
        keys=keys,
        hosts=(ANY_HOST,) if any_host else (*LOOPBACK_HOSTS, *args.allow_host),
        origins=args.allow_origin,
        rate=args.rate,
        effort=args.default_effort,
        strict_temperature=args.strict_temperature,
        max_body=args.max_body,
        playground=not args.no_playground,
    )


def mesh_of(text: str | None) -> Mesh | None:
    """The mesh of a text such as "data=2,tensor=4", over the first devices; None for the first device alone."""
    if text is None:
        return None
    import math

    import jax

    from mercury_jax.bench.chips import mesh_sizes
    from mercury_jax.sharding import AXES, mesh

    sizes = {**dict.fromkeys(AXES, 1), **mesh_sizes(text)}
    devices = jax.devices()
    if min(sizes.values()) < 1:
        raise refuse("--mesh", text, "sizes of 1 or more")
    if (product := math.prod(sizes.values())) > len(devices):
        machine = f"this machine has {count(len(devices), 'device')}"
        raise ValueError(f"--mesh {text} needs {count(product, 'device')}; {machine}")
    return mesh(**sizes, devices=devices[: math.prod(sizes.values())])


def aliases_of(words: Sequence[str], model: str) -> dict[str, str] | None:
    """Name -> model of each --alias, NAME or NAME=MODEL; None where there was none."""
    found: dict[str, str] = {}
    for word in words:
        name, _, meant = word.partition("=")
        if found.setdefault(name, meant or model) != (meant or model):
            raise refuse("--alias", word, f"one meaning of {name}, which is {found[name]} already")
    return found or None


def with_rule(lm: LM, rule: str | None, parameters: dict[str, float]) -> LM:
    """The model with another default rule, which requests that name none are decoded with; None changes nothing."""
    if rule is None:
        return lm
    name = arguments.find_rule(rule).__name__
    plan = {key: lm.decoding[key] for key in ("block", "steps") if key in lm.decoding}
    return dataclasses.replace(lm, decoding={**plan, "rule": name, "params": parameters})
