"""`mercury info`: what a model is, where it would run, and what there is to choose from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mercury_jax.cli import options, show
from mercury_jax.cli.parser import Parser
from mercury_jax.config import refuse

MORE = """\
examples:
  mercury info                                      this machine, the embedded model, all rules and tasks
  mercury info runs/nano/model --json
  mercury info google/diffusiongemma-26B-A4B-it     what it is, and what memory it needs on how many devices"""


def parser() -> Parser:
    p = Parser("info", "Describe a model without loading it; or this machine, the rules and the tasks.", MORE)
    p.add_argument("path", nargs="?", metavar="MODEL", help="folder or Hugging Face id of a model")
    options.model(p)
    options.mask(p)
    options.machine(p)
    return p


def run(argv: Sequence[str]) -> int:
    args = parser().read(argv)
    if args.path is not None and args.model is not None:
        raise refuse("MODEL", args.path, "one model: leave --model out")
    asked = args.path or args.model
    record = about_model(asked, args.mask)
    if args.path is None:
        record |= {**about_machine(), **choices()}
    if args.json:
        show.emit(record)
    else:
        _print(record)
    return 0


def about_model(folder: str | None, mask: int | None = None) -> dict[str, Any]:
    from mercury_jax import hub

    return hub.info(hub.NANO if folder is None else folder, mask=mask)


def about_machine() -> dict[str, Any]:
    import jax

    from mercury_jax import __version__
    from mercury_jax.kernels import device as kernel_device

    devices = jax.devices()
    return {
        "mercury_jax": __version__,
        "jax": jax.__version__,
        "platform": devices[0].platform,
        "devices": [d.device_kind for d in devices],
        "kernels": kernel_device.status(),
    }


def choices() -> dict[str, Any]:
    """Rules, shapers and stops with the defaults and ranges of their knobs, and tasks, each with its line."""
    from mercury_jax.decode import processors, rules, stopping
    from mercury_jax.evaluate import TASKS

    first = lambda value: (value.__doc__ or "").strip().split("\n")[0]

    def kind(makers: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: {
                "about": first(make), "knobs": dict(make.params),
                "ranges": {knob: str(allowed) for knob, allowed in make.ranges.items()},
            }
            for name, make in makers.items()
        }  # fmt: skip

    return {
        "rules": kind(rules.ALL), "shapers": kind(processors.ALL), "stops": kind(stopping.ALL),
        "tasks": {name: task.about for name, task in TASKS.items()},
    }  # fmt: skip


def _print(record: Mapping[str, Any]) -> None:
    lists = (
        "rules",
        "shapers",
        "stops",
        "tasks",
        "card",
        "devices",
        "kernels",
        "noise",
        "bytes_per_device",
        "room",
        "notes",
    )
    print(f"{'noise':12} {_pairs(record['noise']) if record['noise'] else 'none: autoregressive'}")
    for name, value in record.items():
        if name not in lists and value is not None:
            print(f"{name:12} {value:,}" if name in ("parameters", "active") else f"{name:12} {value}")
    if "devices" in record:
        print(f"{'devices':12} {_counted(record['devices'])}")
    if "kernels" in record:
        _print_kernels(record["kernels"])
    for name, value in record.get("card", {}).items():
        print(f"{'card':12} {name}: {value}")
    for note in record["notes"]:
        print(f"{'note':12} {note}")
    _print_memory(record)
    if "rules" in record:
        _print_choices(record)


def _print_kernels(found: Mapping[str, Any]) -> None:
    """Which kernels of ours run here, and why the others do not."""
    print(f"{'kernels':12} {found['rule']}")
    for form in found["on"]:
        print(f"{'':12} on: {form}")
    for why in found["off"].values():
        print(f"{'':12} off: {why}")


def _print_memory(record: Mapping[str, Any]) -> None:
    """Each number of devices: parameters as stored and as int8 or fp8, and one row's keys over the whole context."""
    print(f"\nmemory of each device   {'parameters':>12} {'as 8 bits':>12} {'one full row':>14}")
    for count, need in record["bytes_per_device"].items():
        sizes = [_size(need[k]) for k in ("params", "params_int8", "cache")]
        mesh = f"on {count} ({need['axis']}={count})" if int(count) > 1 else "on 1"
        print(f"  {mesh:21} {sizes[0]:>12} {sizes[1]:>12} {sizes[2]:>14}")
    here = record["room"]
    if here["bytes"] is not None:
        print(f"  here: {here['devices']} x {here['kind']}, {_size(here['bytes'])} free on each")


def _size(count: int) -> str:
    return f"{count / 1e9:,.2f} GB" if count >= 1e8 else f"{count / 1e6:,.2f} MB"


def _print_choices(record: Mapping[str, Any]) -> None:
    titles = {
        "rules": "rules (--rule NAME, knobs as --NAME VALUE)",
        "shapers": "shapers (mj.processors; those with one knob as --NAME VALUE)",
        "stops": "stops (mj.stopping)",
    }
    for kind, title in titles.items():
        print(f"\n{title}")
        for name, part in record[kind].items():
            print(f"  {name + '(' + _pairs(part['knobs']) + ')':28} {part['about']}")
            if part["ranges"]:
                print("      " + "; ".join(f"{knob}: {allowed}" for knob, allowed in part["ranges"].items()))
    print("\ntasks (mercury eval NAME)")
    for name, about in record["tasks"].items():
        print(f"  {name:28} {about}")


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{k}={v}" for k, v in values.items())


def _counted(kinds: Sequence[str]) -> str:
    return ", ".join(f"{kinds.count(k)} x {k}" for k in dict.fromkeys(kinds))
