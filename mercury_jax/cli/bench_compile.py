"""`mercury bench compile`: whether a model fits a machine that is not here, and what its programs cost there."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from mercury_jax.cli import arguments, show
from mercury_jax.cli.arguments import Flag, OptionalInt, Positional, option
from mercury_jax.config import refuse


@dataclass(frozen=True, kw_only=True)
class BenchCompile:
    """Compile a program for a chip that is not here, and say what it needs.

    examples:
      mercury bench compile diffusiongemma-26b-a4b --for h200 --quantise int8
      mercury bench compile diffusiongemma-26b-a4b --for h200x8 \\
          --mesh tensor=2,expert=4
      mercury bench compile mercury-1b --for v5p:8x8x8 --what train
      mercury bench compile llada-8b --for h200x8 --what train --remat full
      mercury bench compile runs/mine/model --for v5e:4x4 --what prefill --json
      mercury bench compile kernels --for h200
      mercury bench compile kernels --for h200 --what tune

    MODEL is a folder of a saved model, a recipe, a config.json, or a name:
    diffusiongemma-26b-a4b, llada-8b, dream-7b, sdar-30b-a3b, llada2-mini,
    mercury-100m, mercury-350m, mercury-1b, nano. No weights are read. The program is the one that sample(), its prefill
    of long prompts, or a training step runs; XLA's compiler for the chip
    compiles it in a process of its own. That needs the chip's plugin, which the
    extra `deviceless` installs, and no chip. `kernels` instead of a MODEL
    compiles every form of our Pallas kernels for one GPU, and prints what ptxas
    reports of each, or what runs instead of it; with --what tune the settings
    that `mercury bench gpu tune` starts with.

    --json prints
      bytes_per_device  arguments + temporaries + outputs - what outputs share
                        with arguments
      temp_bytes, fits  the temporaries; whether all fits into the chip's memory
      flops             of a pass (sample, prefill) or an update (train), on one
                        device; on a GPU of the products that XLA sees, without
                        those of Pallas kernels
      collectives       kind -> count, bytes, and how many are in each pass of
                        the loop (each counted once)
      kernels           Pallas kernels: registers, spilled bytes, shared memory
                        (static and dynamic); on a TPU count and bytes of VMEM
      roofline          seconds at the datasheet's bandwidth and FLOP/s, with the
                        arguments read once, and for an update written once
      bytes_per_pass, bytes_read_per_pass, kernels_per_pass,
      small_kernels_per_pass
                        sample on a GPU: what a denoising pass moves and launches
                        (small: under 4 MB)
      implied           sample: from it (on a TPU from the roofline) the seconds
                        of a pass, and tokens per second at 17 passes a block,
                        the 16 steps that DiffusionGemma takes and one that
                        encodes the block
      experts_per_pass  experts of a layer that uniform routing chooses; where no
                        kernel multiplies them, their loop counts that often
      open_loops_per_pass
                        other loops of unknown length in a pass, counted as one
                        iteration each: if not 0, the figures before are bounds
      largest, calls    the largest arrays it makes; library calls
    and of `kernels` its target (for) and a record for each form (kernels).
    """

    model: Annotated[Positional[str], option("MODEL")]
    """A folder, a recipe, a config.json, a name, or `kernels`."""
    target: Annotated[str, option("CHIP", name="for")]
    """A GPU: t4, l4, a100, rtx5090, h100, h200, b200, or several, such as h200x8. A TPU: v5e-1, v6e-1, or v4, v5e, v5p
    or v6e with a topology, such as v5e:4x4."""
    what: Annotated[str, option("PROGRAM")] = "sample"
    """sample, train or prefill; of `kernels` also tune."""
    context: OptionalInt = None
    """Positions of a row. Default: 32768, in training 2048; at most the model's."""
    batch: OptionalInt = None
    """Rows. Default: one for each part of the mesh axis `data`; in training 8 for each device."""
    dtype: Annotated[str | None, option("NAME")] = None
    """Type of parameters and arithmetic. Default: the model's."""
    quantise: Annotated[str | None, option("KIND")] = None
    """int8 or fp8: weight matrices in 8 bits."""
    mesh: Annotated[str | None, option("AXIS=N,...")] = None
    """data, fsdp, tensor, expert. Default: experts or heads over the devices of a host."""
    remat: Annotated[str | None, option("POLICY")] = None
    """With --what train: none, dots or full, what a layer keeps for its backward pass. Default: the recipe's."""
    config: Annotated[arguments.ConfigOptions, arguments.Group] = arguments.ConfigOptions()
    out: Annotated[str | None, option("FILE.jsonl")] = None
    """Write the record, too."""
    json: Flag = False
    """Print the record as one JSON object."""


def run(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code.

    Raises:
        ValueError: A bad option, before a process is started.
    """
    args = arguments.read(BenchCompile, argv, "mercury bench compile")
    show.check_writable("--out", args.out)
    from mercury_jax.bench import compile as bench_compile

    kernels = args.model == "kernels"
    settings = {
        name: getattr(args, name) for name in ("context", "batch", "dtype", "quantise", "mesh", "remat")
    }
    settings |= args.config.given()
    for name, value in settings.items() if kernels else ():
        if value not in (None, ()):
            allowed = "nothing with `kernels`, which are compiled in every form"
            raise refuse(f"--{name.replace('_', '-')}", value, allowed)
    with _stages(args) as stage:
        if kernels:
            records = bench_compile.compile_all_kernels(args.target, stage, tuning=args.what == "tune")
        else:
            request = bench_compile.CompileRequest(args.model, args.target, args.what, **settings)
            records = [bench_compile.compile_for(request, stage)]
    show.write_records(args.out, records)
    if args.json:
        show.emit({"for": args.target, "kernels": records} if kernels else records[0])
    elif kernels:
        print(LINE.format("kernel", "shape", "registers", "spilled", "shared memory"))
        print("\n".join(map(kernel_line, records)))
    else:
        print(table(records[0]))
    return 0


LINE = "{:10} {:72} {:>9} {:>8} {:>13}"


def kernel_line(r: Mapping[str, Any]) -> str:
    """A row of the table of kernels; where there is no such form, the reason and what runs instead."""
    if "refused" in r:
        return f"{r['kernel']:10} {r['shape']:72} none: {r['refused']}; instead: {r['fallback']}"
    spilled, shared = f"{r['spill_bytes']} B", f"{r['shared_bytes']} B"
    return LINE.format(r["kernel"], r["shape"], r["registers"], spilled, shared)


@contextlib.contextmanager
def _stages(args: BenchCompile) -> Iterator[Callable[[str], None]]:
    """Yields a function that shows what is being done: beside a spinner and the time so far, or without a terminal as a
    line; with --json nothing."""
    if args.json or not show.terminal(sys.stderr):
        yield lambda text: None if args.json else show.say(f"{text} ...")
        return
    with show.progress("time", f"starting a process for {args.target}") as update:
        yield lambda text: update(description=text)


def table(r: Mapping[str, Any]) -> str:
    """The record for people."""
    mesh = ", ".join(f"{name}={size}" for name, size in r["mesh"].items()) or "one device"
    lines = [
        f"{r['what']} of {r['model']} for {r['devices']} x {r['chip']} ({mesh}): {r['batch']} x {r['context']} "
        f"positions, {r['dtype']}{', weights ' + r['quantise'] if r['quantise'] else ''}",
        f"  {'memory':14} {format_bytes(r['bytes_per_device'])} of {format_bytes(r['memory'])} on each device: "
        f"{'fits' if r['fits'] else 'DOES NOT FIT'}",
    ]
    if r["temp_bytes"] is None:
        return "\n".join([*lines, "  the compiler refuses it, so nothing more is known"])
    ms, roofline = (lambda seconds: f"{1e3 * seconds:.3g} ms"), r["roofline"]
    lines += [
        f"  {'':14} arguments {format_bytes(r['argument_bytes'])}, temporaries {format_bytes(r['temp_bytes'])}",
        f"  {'FLOP':14} {r['flops']:.3g} {'an' if r['per'][0] == 'u' else 'a'} {r['per']} on each device",
        f"  {'roofline':14} {ms(roofline['seconds'])} ({roofline['bound']} bound: memory "
        f"{ms(roofline['memory_seconds'])}, compute {ms(roofline['compute_seconds'])})",
    ]  # fmt: skip
    if "bytes_per_pass" in r:
        pays, open_loops = r["implied"], r["open_loops_per_pass"]
        least, most = ("at least ", "at most ") if open_loops else ("", "")
        lines += [
            f"  {'a pass':14} moves {least}{format_bytes(r['bytes_per_pass'])} in {r['kernels_per_pass']} kernels, "
            f"{r['small_kernels_per_pass']} of them under 4 MB",
            f"  {'':14} implied: {least}{ms(pays['seconds'])} ({ms(pays['memory_seconds'])} of memory, "
            f"{ms(pays['compute_seconds'])} of compute beside it, {ms(pays['launch_seconds'])} of launches), "
            f"{most}{pays['tokens_per_second']:,.0f} tokens/s at 17 passes a block",
        ]
        if open_loops:
            lines.append(f"  {'':14} {open_loops} loops of unknown length are counted as one iteration each")
    elif "implied" in r:
        rate = r["implied"]["tokens_per_second"]
        lines.append(f"  {'a pass':14} at the roofline: {rate:,.0f} tokens/s at 17 passes a block")
    for kind, row in r["collectives"].items():
        looped = f", {row['per_pass']} of them in each pass of the loop" if row["per_pass"] else ""
        lines.append(f"  {'collectives':14} {row['count']} {kind}, {format_bytes(row['bytes'])}{looped}")
    if r["collectives"]:
        total = sum(row["per_pass"] or row["count"] for row in r["collectives"].values())
        lines.append(f"  {'':14} {total / r['layers']:.1f} a layer")
    else:
        lines.append(f"  {'collectives':14} none")
    for k in r["kernels"]:
        if k.get("registers") is None:
            text = f"{k['name']} x {k['count']}: {format_bytes(k['vmem_bytes'])} of VMEM, where the compiler says so"
        else:
            text = f"{k['name']}: {k['registers']} registers, {k['spill_bytes']} bytes spilled"
            text += f", {k['shared_bytes']} bytes of shared memory"
        lines.append(f"  {'kernel':14} {text}")
    for row in r["largest"][:5]:
        text = f"{row['shape']} x {row['count']}  {row['of'][-60:] or 'by XLA itself'}"
        lines.append(f"  {'makes':14} {format_bytes(row['bytes']):>9}  {text}")
    return "\n".join(lines)


def format_bytes(count: int) -> str:
    """Bytes with a unit, such as "1.50 kB"."""
    for unit, least in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= least:
            return f"{count / least:.2f} {unit}"
    return f"{count} B"
