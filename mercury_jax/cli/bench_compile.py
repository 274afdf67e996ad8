"""`mercury bench compile`: whether a model fits a machine that is not here, and what its programs cost there."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from mercury_jax.cli import bench, options, show
from mercury_jax.cli.parser import Parser, whole
from mercury_jax.config import refuse

MORE = """\
examples:
  mercury bench compile diffusiongemma-26b-a4b --for h200 --quantise int8
  mercury bench compile diffusiongemma-26b-a4b --for h200x8 --mesh tensor=2,expert=4
  mercury bench compile mercury-1b --for v5p:8x8x8 --what train
  mercury bench compile runs/mine/model --for v5e:4x4 --what prefill --json
  mercury bench compile kernels --for h200

MODEL is a folder of a saved model, a recipe, a config.json, or a name: diffusiongemma-26b-a4b, llada-8b,
mercury-100m, mercury-350m, mercury-1b, nano. No weights are read. The program is the one that sample(), its
encoding of long prompts, or a training step runs; XLA's own compiler for the chip makes it, in a process of its
own. That needs the chip's plugin, which the extra `deviceless` installs, and no chip. Instead of a MODEL, `kernels`
compiles every form of our Pallas kernels for one GPU, and says of each what ptxas says, or what runs instead of it.

--json prints
  bytes_per_device  arguments + temporaries + outputs - what outputs share with arguments
  temp_bytes, fits  the temporaries; whether it all fits into the chip's memory
  flops             of a pass (sample, prefill) or an update (train), on one device, as compiled; on a GPU those of
                    the products that XLA sees, without what Pallas kernels do
  collectives       kind -> count, bytes, and how many are made in each pass of the loop (each is counted once)
  kernels           Pallas kernels with registers, spilled bytes and shared memory (static and dynamic); on a TPU
                    with their number and bytes of VMEM
  roofline          seconds at the datasheet's bandwidth and FLOPs: arguments read once, and for an update written
  largest, calls    the largest arrays it makes; library calls
and of `kernels` its target (for) and a record for each form (kernels)."""


def parser() -> Parser:
    p = Parser(
        "bench compile", "Compile a program for a chip that is not here, and tell what it needs.", MORE
    )
    p.add_argument(
        "model", metavar="MODEL", help="a folder, a recipe, a config.json, a known name, or `kernels`"
    )
    p.add_argument("--for", dest="target", required=True, metavar="CHIP",
                   help="h200, b200, xN of them; v4, v5e, v5p, v6e with a topology, such as v5e:4x4")  # fmt: skip
    p.add_argument("--what", default="sample", metavar="PROGRAM", help="sample (default), train, prefill")
    p.add_argument("--context", type=whole, metavar="N",
                   help="positions of a row (default: 32768, in training 2048; at most the model's)")  # fmt: skip
    p.add_argument("--batch", type=whole, metavar="N", help="rows (default: one on each part of `data`)")
    p.add_argument("--dtype", metavar="NAME", help="of parameters and arithmetic (default: the model's)")
    p.add_argument("--quantise", metavar="KIND", help="int8 or fp8: matrices as 8 bits")
    p.add_argument("--mesh", metavar="AXIS=N,...", help="data, fsdp, tensor, expert (default: by the model)")
    bench.ending(p)
    return p


def run(argv: Sequence[str]) -> int:
    args = parser().read(argv)
    options.writable("--out", args.out)
    from mercury_jax.bench import compile as ahead
    from mercury_jax.bench.ahead import Ask

    if args.model == "kernels":
        return _all_kernels(args)
    ask = Ask(**{name: getattr(args, name) for name in Ask._fields})
    with progress(args) as stage:
        record = ahead.compiled(ask, stage)
    bench.write(args.out, [record])
    if args.json:
        show.emit(record)
    else:
        print(table(record))
    return 0


def _all_kernels(args: argparse.Namespace) -> int:
    """`kernels` in the place of a MODEL: a record for each form of each kernel."""
    from mercury_jax.bench import compile as ahead

    given = {f"--{name}": getattr(args, name) for name in ("context", "batch", "dtype", "quantise", "mesh")}
    for name, value in given.items():
        if value is not None:
            raise refuse(name, value, "nothing with `kernels`, which are compiled in every form")
    with progress(args) as stage:
        records = ahead.kernels(args.target, stage)
    bench.write(args.out, records)
    if args.json:
        show.emit({"for": args.target, "kernels": records})
    else:
        print("\n".join([HEAD.format(*COLUMNS), *map(_line, records)]))
    return 0


COLUMNS = ("kernel", "shape", "registers", "spilled", "shared memory")
HEAD = "{:10} {:72} {:>9} {:>8} {:>13}"


def _line(r: Mapping[str, Any]) -> str:
    """A row of the table of kernels; where there is no such form, the reason and what runs instead."""
    if "refused" in r:
        return f"{r['kernel']:10} {r['shape']:72} none: {r['refused']}; instead: {r['fallback']}"
    return HEAD.format(
        r["kernel"], r["shape"], r["registers"], f"{r['spill_bytes']} B", f"{r['shared_bytes']} B"
    )


@contextmanager
def progress(args: argparse.Namespace) -> Iterator[Callable[[str], None]]:
    """A line on standard error that says what is being done, and for how long already."""
    if not show.terminal(sys.stderr):
        yield (lambda text: None) if args.json else (lambda text: show.say(f"{text} ..."))
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        item = bar.add_task(f"starting a process for {args.target}", total=None)
        yield lambda text: bar.update(item, description=text)


def table(r: Mapping[str, Any]) -> str:
    """The record for people."""
    mesh = ", ".join(f"{name}={size}" for name, size in r["mesh"].items()) or "one device"
    lines = [
        f"{r['what']} of {r['model']} for {r['devices']} x {r['chip']} ({mesh}): {r['batch']} x {r['context']} "
        f"positions, {r['dtype']}{', weights ' + r['quantise'] if r['quantise'] else ''}",
        f"  {'memory':14} {size(r['bytes_per_device'])} of {size(r['memory'])} on each device: "
        f"{'fits' if r['fits'] else 'DOES NOT FIT'}",
    ]
    if r["temp_bytes"] is None:
        return "\n".join([*lines, "  the compiler refuses it, so there is nothing more to tell"])
    lines += [
        f"  {'':14} arguments {size(r['argument_bytes'])}, temporaries {size(r['temp_bytes'])}",
        f"  {'FLOPs':14} {r['flops']:.3g} {'an' if r['per'][0] == 'u' else 'a'} {r['per']} on each device",
        f"  {'roofline':14} {ms(r['roofline']['seconds'])} ({r['roofline']['bound']} bound: memory "
        f"{ms(r['roofline']['memory_seconds'])}, compute {ms(r['roofline']['compute_seconds'])})",
        *_collectives(r), *_kernels(r),
    ]  # fmt: skip
    for row in r["largest"][:5]:
        made = f"{row['shape']} x {row['count']}  {row['of'][-60:] or 'by XLA itself'}"
        lines.append(f"  {'makes':14} {size(row['bytes']):>9}  {made}")
    return "\n".join(lines)


def _collectives(r: Mapping[str, Any]) -> list[str]:
    if not r["collectives"]:
        return [f"  {'collectives':14} none"]
    lines = []
    for kind, row in r["collectives"].items():
        looped = f", {row['per_pass']} of them in each pass of the loop" if row["per_pass"] else ""
        lines.append(f"  {'collectives':14} {row['count']} {kind}, {size(row['bytes'])}{looped}")
    total = sum(row["per_pass"] or row["count"] for row in r["collectives"].values())
    return [*lines, f"  {'':14} {total / r['layers']:.1f} a layer"]


def _kernels(r: Mapping[str, Any]) -> list[str]:
    found = []
    for k in r["kernels"]:
        if k.get("registers") is None:
            found.append(
                f"  {'kernel':14} {k['name']} x {k['count']}: {size(k['vmem_bytes'])} of VMEM, where told"
            )
        else:
            found.append(
                f"  {'kernel':14} {k['name']}: {k['registers']} registers, {k['spill_bytes']} bytes spilled, "
                f"{k['shared_bytes']} bytes of shared memory"
            )
    return found


def size(count: int) -> str:
    """Bytes with the unit that fits."""
    for unit, least in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= least:
            return f"{count / least:.2f} {unit}"
    return f"{count} B"


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
