"""`mercury info`: what a model is, where it would run, and what there is to choose from."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from mercury_jax.cli import arguments, show
from mercury_jax.cli.arguments import ConfigOptions, Flag, Group, Positional, Repeated, option
from mercury_jax.config import refuse

if TYPE_CHECKING:
    from mercury_jax.decode.registration import Factory


@dataclass(frozen=True, kw_only=True)
class Info:
    """Describe a model without loading it; or this machine, the rules and the tasks.

    examples:
      mercury info                                 this machine, the embedded
                                                   model, all rules and tasks
      mercury info runs/nano/model --json
      mercury info google/diffusiongemma-26B-A4B-it     and the memory it needs
      mercury info --rule threshold                one rule: what it is for, its
                                                   parameters, its paper
      mercury info --load my_rules                 and the rules of my_rules.py
    """

    path: Annotated[Positional[str | None], option("[MODEL]")] = None
    """Folder, GGUF file or Hugging Face id of a model."""
    model: Annotated[str | None, option("MODEL")] = None
    """The same, with this machine and the lists."""
    config: Annotated[ConfigOptions, Group] = field(default_factory=ConfigOptions)
    rule: Annotated[str | None, option("NAME")] = None
    """Describe this decoding rule alone; MODULE:NAME for one of your own."""
    load: Annotated[Repeated[tuple[str, ...]], option("MODULE")] = ()
    """Import this Python module first, so that the rules, processors and stopping criteria that it registers are
    listed; repeatable."""
    json: Flag = False
    """Print one JSON object."""


def run(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    args = arguments.read(Info, argv, "mercury info")
    if args.path is not None and args.model is not None:
        raise refuse("MODEL", args.path, "one model: leave --model out")
    for module in args.load:
        try:
            arguments.import_user_module(module)
        except ImportError as error:
            raise refuse("--load", module, f"a module that can be imported ({error})") from error
    if args.rule is not None:
        if args.path is not None or args.model is not None:
            raise refuse("--rule", args.rule, "without a model: it describes the rule alone")
        make = arguments.find_rule(args.rule)
        about = {"name": make.__name__, **_about_rule(make), "arguments": _arguments_of(make)}
        if args.json:
            show.emit(about)
        else:
            _print_rule(args.rule, about)
        return 0
    from mercury_jax import hub

    record = hub.info(args.path or args.model or hub.NANO, **args.config.given())
    if args.path is None:
        import jax

        from mercury_jax import __version__
        from mercury_jax.ops import device as kernel_device

        record |= {
            "mercury_jax": __version__, "jax": jax.__version__, "platform": jax.devices()[0].platform,
            "devices": [d.device_kind for d in jax.devices()], "kernels": kernel_device.status(),
        }  # fmt: skip
        record |= _choices()
    if args.json:
        show.emit(record)
    else:
        _print(record)
    return 0


def _choices() -> dict[str, Any]:
    """Registered rules, processors, stopping criteria and cache policies with their parameters, and tasks."""
    from mercury_jax.decode import processors, rules, stopping
    from mercury_jax.decode.methods import cache_refresh
    from mercury_jax.evaluate import TASKS

    found: dict[str, Any] = {}
    registries = {
        "rules": rules.ALL, "processors": processors.ALL, "stopping": stopping.ALL, "cache_refresh": cache_refresh.ALL
    }  # fmt: skip
    for kind, registry in registries.items():
        describe = _about_rule if kind == "rules" else _about
        found[kind] = {name: describe(make) for name, make in registry.items()}
    return found | {"tasks": {name: task.about for name, task in TASKS.items()}}


def _about(make: Factory[..., Any]) -> dict[str, Any]:
    """A registered rule, processor, stopping criterion or cache policy."""
    return {
        "about": (make.__doc__ or "").strip().split("\n")[0],
        "parameters": make.params,
        "ranges": {parameter: str(allowed) for parameter, allowed in make.ranges.items()},
    }


def _about_rule(make: Factory[..., Any]) -> dict[str, Any]:
    """The same of a rule, with the kinds of noise that it is made for, and its paper."""
    from mercury_jax.decode.sampler import check_sampler

    required = {name: 0.5 for name, default in make.params.items() if default is inspect.Parameter.empty}
    try:
        noise = list(check_sampler(make(**required)).rule.noise)
    except ValueError:  # of a rule of the user's own whose required parameter must be another number
        noise = []
    return _about(make) | {"noise": noise, "source": make.source}


def _arguments_of(make: Factory[..., Any]) -> dict[str, str]:
    """What the docstring of a rule says about each of its parameters."""
    section = re.search(r"^Args:\n((?: .*\n|\n)*)", inspect.cleandoc(make.__doc__ or "") + "\n", re.MULTILINE)
    entries = re.split(r"^ {4}(\w+): ", section[1] if section else "", flags=re.MULTILINE)
    texts = {name: " ".join(text.split()) for name, text in zip(entries[1::2], entries[2::2])}
    return {name: texts[name] for name in make.params if name in texts}


def _print_rule(typed: str, about: Mapping[str, Any]) -> None:
    """One rule as text. `typed`: its name as the user wrote it, for the example."""
    from mercury_jax.cli.sample import Sample

    print(f"{'rule':12} {about['name']}\n{'about':12} {about['about']}")
    print(f"{'noise':12} {' or '.join(about['noise'])}")
    if about["source"]:
        print(f"{'source':12} {about['source']}")
    taken, given = arguments.option_names(Sample), ""
    for name, default in about["parameters"].items():
        required, option = default is inspect.Parameter.empty, "--" + name.replace("_", "-")
        typed_so = f"{option} {'X' if required else default}"
        if option in taken:  # another option of the commands has this name
            option, typed_so = f"--param {name}=X", f"--param {name}={'X' if required else default}"
        said = "required" if required else f"default {default}"
        print(f"{option:12} {about['ranges'].get(name, 'a number')}; {said}")
        if name in about["arguments"]:
            print(f"{'':12} {about['arguments'][name]}")
        given += f" {typed_so}"
    model = "" if "absorbing" in about["noise"] else " --model MODEL"  # not for the embedded model
    print(f'\ntry: mercury sample "def f(x):" --rule {typed}{given}{model}')


LISTS = (  # printed below the plain fields, each in its own way
    "rules", "processors", "stopping", "cache_refresh", "tasks", "card", "devices", "kernels", "noise",
    "bytes_per_device", "room", "notes", "decoding", "quantised",
)  # fmt: skip


def _print(record: Mapping[str, Any]) -> None:
    """The record as text: plain fields, machine, memory, and what there is to choose from."""
    print(f"{'noise':12} {_pairs(record['noise']) if record['noise'] else 'none: autoregressive'}")
    for name, value in record.items():
        if name not in LISTS and value is not None:
            print(f"{name:12} {value:,}" if name in ("parameters", "active") else f"{name:12} {value}")
    if "quantised" in record:
        about = record["quantised"]
        each = ", ".join(f"{count} in {kind}" for kind, count in about["matrices"].items())
        print(f"{'quantised':12} {about['method']}: {each}; {about['bytes_per_number']} bytes a number")
    if "devices" in record:
        kinds = record["devices"]
        print(f"{'devices':12} {', '.join(f'{kinds.count(k)} x {k}' for k in dict.fromkeys(kinds))}")
    if "kernels" in record:
        print(f"{'kernels':12} {record['kernels']['rule']}")
        for form in record["kernels"]["on"]:
            print(f"{'':12} on: {form}")
        for why in record["kernels"]["off"].values():
            print(f"{'':12} off: {why}")
    if record["decoding"]:
        from mercury_jax.hub.generation import describe

        print(f"{'decoding':12} {describe(record['decoding'])}")
        if source := record["decoding"].get("source"):
            print(f"{'':12} source: {source}")
    for name, value in record.get("card", {}).items():
        print(f"{'card':12} {name}: {value}")
    for note in record["notes"]:
        print(f"{'note':12} {note}")
    # For each number of devices: parameters as stored and in 8 bits, and the KV cache of one row at full context.
    # A quantised checkpoint stays as it is stored.
    kinds = {"params": "parameters", "params_int8": "in 8 bits", "cache": "one full row"}
    kinds = {key: name for key, name in kinds.items() if key in record["bytes_per_device"][1]}
    print("\nmemory of each device   " + " ".join(f"{name:>12}" for name in kinds.values()))
    for count, need in record["bytes_per_device"].items():
        sizes = " ".join(f"{_size(need[k]):>12}" for k in kinds)
        mesh = f"on {count} ({need['axis']}={count})" if int(count) > 1 else "on 1"
        print(f"  {mesh:21} {sizes}")
    here = record["room"]
    if here["bytes"] is not None:
        print(f"  here: {here['devices']} x {here['kind']}, {_size(here['bytes'])} free on each")
    if "rules" in record:
        _print_choices(record)


def _size(count: int) -> str:
    return f"{count / 1e9:,.2f} GB" if count >= 1e8 else f"{count / 1e6:,.2f} MB"


def _print_choices(record: Mapping[str, Any]) -> None:
    """The registries with their parameters and what these may be, then the tasks."""
    titles = {
        "rules": "rules (--rule NAME, parameters as --NAME X; mercury info --rule NAME for more)",
        "processors": "logits processors (those with one parameter as --NAME X)",
        "stopping": "stopping criteria",
        "cache_refresh": "cache policies (Plan(refresh=mj.cache_refresh.NAME()))",
    }
    for kind, title in titles.items():
        print(f"\n{title}")
        for name, part in record[kind].items():
            print(f"  {name + '(' + _pairs(part['parameters']) + ')':28} {part['about']}")
            noise = [f"{' or '.join(part['noise'])} noise"] if part.get("noise") else []
            if found := [*noise, *(f"{p}: {allowed}" for p, allowed in part["ranges"].items())]:
                print("      " + "; ".join(found))
    print("\ntasks (mercury eval NAME)")
    for name, about in record["tasks"].items():
        print(f"  {name:28} {about}")


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{k}={v}" for k, v in values.items())
