"""`mercury info`: what a model is, where it would run, and what there is to choose from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mercury_jax.cli import options, show
from mercury_jax.cli.parser import Parser

if TYPE_CHECKING:
    from mercury_jax.types import LM

MORE = """\
examples:
  mercury info
  mercury info --model runs/nano/model --json"""


def parser() -> Parser:
    p = Parser("info", "Describe a model, this machine, and the decoding rules and tasks there are.", MORE)
    options.model(p)
    options.machine(p)
    return p


def run(argv: Sequence[str]) -> int:
    args = parser().read(argv)
    lm = show.load(args.model)
    record = {**about_model(lm, args.model), **about_machine(), **choices()}
    if args.json:
        show.emit(record)
    else:
        _print(record)
    return 0


def about_model(lm: LM, folder: str | None) -> dict[str, Any]:
    from mercury_jax import api
    from mercury_jax.checkpoint import manifest
    from mercury_jax.checkpoint.export import CONFIG

    where = Path(api.NANO if folder is None else folder)
    config = lm.model.config
    return {
        "name": lm.name,
        "folder": str(where),
        "parameters": lm.parameters,
        "pattern": config.pattern,
        "block": config.block,
        "context": config.context,
        "vocab": config.vocab,
        "layers": config.layers,
        "width": config.width,
        "dtype": config.dtype,
        "noise": manifest.read_json(where / CONFIG)["config"]["noise"],
        "tokenizer": lm.tokenizer.fingerprint,
        "card": dict(lm.card),
    }


def about_machine() -> dict[str, Any]:
    import jax

    from mercury_jax import __version__

    devices = jax.devices()
    return {
        "mercury_jax": __version__,
        "jax": jax.__version__,
        "platform": devices[0].platform,
        "devices": [d.device_kind for d in devices],
    }


def choices() -> dict[str, Any]:
    """Rules with the defaults of their knobs, and tasks, each with its line."""
    from mercury_jax.decode import rules
    from mercury_jax.evaluate import TASKS

    first = lambda value: (value.__doc__ or "").strip().split("\n")[0]
    return {
        "rules": {name: {"about": first(r), "knobs": dict(r.knobs)} for name, r in rules.ALL.items()},
        "tasks": {name: task.about for name, task in TASKS.items()},
    }


def _print(record: Mapping[str, Any]) -> None:
    lists = ("rules", "tasks", "card", "noise", "devices")
    for name, value in record.items():
        if name not in lists:
            print(f"{name:12} {value:,}" if name == "parameters" else f"{name:12} {value}")
    print(f"{'devices':12} {_counted(record['devices'])}")
    print(f"{'noise':12} {_pairs(record['noise'])}")
    for name, value in record["card"].items():
        print(f"{'card':12} {name}: {value}")
    print("\nrules (--rule NAME, knobs as --NAME VALUE)")
    for name, rule in record["rules"].items():
        print(f"  {name + '(' + _pairs(rule['knobs']) + ')':28} {rule['about']}")
    print("\ntasks (mercury eval NAME)")
    for name, about in record["tasks"].items():
        print(f"  {name:28} {about}")


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{k}={v}" for k, v in values.items())


def _counted(kinds: Sequence[str]) -> str:
    return ", ".join(f"{kinds.count(k)} x {k}" for k in dict.fromkeys(kinds))
