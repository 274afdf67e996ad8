"""`mercury bench compile`: whether a model fits a machine that is not here, and what its programs cost there."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from mercury_jax.cli import arguments, show
from mercury_jax.cli.arguments import Flag, OptionalFloat, OptionalInt, Positional, option
from mercury_jax.config import refuse

if TYPE_CHECKING:
    from mercury_jax.bench.plan import Table


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
      mercury bench compile plan --out plan.jsonl     a table of models and chips

    MODEL is a folder of a saved model, a recipe, a config.json, or a name:
    diffusiongemma-26b-a4b, llada-8b, dream-7b, sdar-30b-a3b, llada2-mini,
    mercury-100m, mercury-350m, mercury-1b, nano. No weights are read. The program is the one that sample(), its prefill
    of long prompts, or a training step runs; XLA's compiler for the chip
    compiles it in a process of its own. That needs the chip's plugin, which the
    extra `deviceless` installs, and no chip. `kernels` instead of a MODEL
    compiles every form of our Pallas kernels for one GPU, and prints what ptxas
    reports of each, or what runs instead of it. `plan` compiles several models
    for several chips; `mercury bench compile plan --help` has its options.

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
    """sample, train or prefill."""
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


@dataclass(frozen=True, kw_only=True)
class BenchCompilePlan:
    """Compile models for chips, and say which machine runs which model, and how fast.

    examples:
      mercury bench compile plan --out plan.jsonl
      mercury bench compile plan llada-8b dream-7b --for l4 h200 \\
          --quantise none int8 --context 4k 32k --out plan.jsonl
      mercury bench compile plan runs/mine/model --for v5e-1,v6e-1 --json

    Every cell of the table is the program that sample() runs, compiled for one
    chip in a process of its own, as by `mercury bench compile MODEL --for CHIP`.
    The cell names the memory that a device needs and the tokens per second that
    the bytes, FLOP and launches of a pass imply at the datasheet's rates, with
    17 passes a block; on a TPU that is the roofline. It was not timed. A cell
    that does not run says why: its weights do not fit (nothing is compiled
    then), the program needs more memory, a check or the compiler refuses it,
    or the compiling process failed. Lists take commas or spaces.

    A plan takes a minute or two a cell. With --out each record is written when
    it is made, and the same command continues a plan that was stopped: a cell in
    the file is compiled again only if it failed, or if the sources, the
    compilers or the model have changed.

    --json prints
      request, status   the cell; compiled, too large, refused or failed
      reason            why it was not compiled or does not fit
      wall_seconds, build
                        seconds; what the record holds for
    and what `mercury bench compile --json` prints, without the lists of arrays,
    calls, kernels and collectives.
    """

    models: Annotated[Positional[tuple[str, ...]], option("[MODEL ...]")] = ()
    """As of `mercury bench compile`. Default: the six models of docs/performance.md."""
    targets: Annotated[tuple[str, ...], option("CHIP [CHIP ...]", name="for")] = ()
    """As of `mercury bench compile`. Default: t4 l4 a100 rtx5090 h100 h200 b200 v5e-1 v6e-1."""
    quantise: Annotated[tuple[str, ...], option("KIND [KIND ...]")] = ("int8",)
    """none, int8 or fp8: how weight matrices are kept."""
    context: Annotated[tuple[str, ...], option("N [N ...]")] = ("4k",)
    """Positions of a row; 4k is 4096."""
    batch: OptionalInt = None
    """Rows. Default: one for each part of the mesh axis `data`."""
    dtype: Annotated[str | None, option("NAME")] = None
    """Type of parameters and arithmetic. Default: the model's."""
    limit: OptionalFloat = None
    """Minutes after which a cell is given up. Default: never."""
    out: Annotated[str | None, option("FILE.jsonl")] = None
    """Append the records, and continue from those that are there."""
    markdown: Flag = False
    """Print the tables as Markdown."""
    json: Flag = False
    """Print one JSON object for each cell."""


def run(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code.

    Raises:
        ValueError: A bad option, before a process is started.
    """
    if argv[:1] == ["plan"]:
        return _plan(arguments.read(BenchCompilePlan, argv[1:], "mercury bench compile plan"))
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
            records = bench_compile.compile_all_kernels(args.target, stage)
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


def _plan(args: BenchCompilePlan) -> int:
    """Compiles the cells of a plan and prints them as tables, or one by one as JSON."""
    if args.json and args.markdown:
        raise refuse("--markdown", True, "without --json, which prints records")
    if args.limit is not None and not args.limit > 0:
        raise refuse("--limit", args.limit, "above 0 minutes")
    show.check_writable("--out", args.out)
    from mercury_jax.bench import plan

    split = lambda words: [word for given in words for word in given.split(",") if word]
    requests = plan.grid(
        split(args.models or plan.MODELS), split(args.targets or plan.CHIPS), split(args.quantise),
        [_positions(word) for word in split(args.context)], batch=args.batch, dtype=args.dtype,
    )  # fmt: skip
    limit = None if args.limit is None else 60 * args.limit
    quiet = args.json or show.terminal(sys.stderr)
    records = []
    with show.progress("count", total=len(requests), quiet=args.json) as update:
        stage = lambda text: update(description=text)
        for record in plan.plan(requests, args.out, stage, limit):
            records.append(record)
            update(advance=1)
            if args.json:
                show.emit(record)
            if not quiet:
                cell = ", ".join(filter(None, plan.cell_text(record)))
                name = record["request"]["model"]
                show.say(f"{len(records)} of {len(requests)}: {name} for {record['for']}: {cell}")
    for table in () if args.json else plan.tables(records):
        print(plan.markdown(table)) if args.markdown else _print_table(table)
    return 0


def _positions(word: str) -> int:
    """A number of positions, such as "4k" or "4096"."""
    number = word.lower().removesuffix("k")
    if not number.isdecimal():
        raise refuse("--context", word, "a whole number, or one of 1024 such as 4k")
    return int(number) * (1024 if number != word.lower() else 1)


def _print_table(table: Table) -> None:
    """A table of the plan with the reasons below it; as wide as it needs where no terminal limits it."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table as Grid

    from mercury_jax.bench import chips, plan

    grid = Grid()
    grid.add_column("model", overflow="fold")
    for target in table.targets:
        grid.add_column(f"{target}\n{chips.target(target).chip.memory / 1e9:.0f} GB", justify="right")
    for model in table.models:
        cells = [plan.cell_text(table.cells.get((model, target))) for target in table.targets]
        grid.add_row(escape(model), *("\n".join(filter(None, cell)) for cell in cells))
    console = Console(width=None if show.terminal() else WIDE, highlight=False)
    console.print(table.title, markup=False, soft_wrap=True)
    console.print(grid)
    for note in plan.notes(table):
        console.print(note, markup=False, soft_wrap=True)
    console.print()


WIDE = 200  # columns of a table that is written to a file
LINE = "{:10} {:72} {:>9} {:>8} {:>13}"


def kernel_line(r: Mapping[str, Any]) -> str:
    """A row of the table of kernels; where there is no such form, the reason and what runs instead."""
    if "refused" in r:
        return f"{r['kernel']:10} {r['shape']:72} none: {r['refused']}; instead: {r['fallback']}"
    spilled = f"{r['spill_bytes']} B"
    shared = "at launch" if r["shared_bytes"] is None else f"{r['shared_bytes']} B"
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
            text += "" if k["shared_bytes"] is None else f", {k['shared_bytes']} bytes of shared memory"
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
