"""`python -m benchmarks.plan`: model x chip x precision x context, which machine runs which model and how fast.

`grid` makes the requests of a plan, and `plan` compiles them one after the other, each in a process of its own
(`compile.compile_for`). Every cell becomes a record, whatever happens to it: compiled, too large, refused or failed.
Records are appended to a file as they are made, and a plan that was stopped continues from its file: `build_of` says
which records still hold. `cell_text`, `reason` and `markdown` write a record and a table for people.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table as Grid

import mercury_jax
from benchmarks.script import run_script
from mercury_jax.bench import abstract_params, chips, compile as compiling
from mercury_jax.bench.abstract_params import ModelSource
from mercury_jax.bench.compile import CompileRequest
from mercury_jax.cli import arguments, show
from mercury_jax.cli.arguments import Flag, OptionalFloat, OptionalInt, Positional, option
from mercury_jax.config import at_least, refuse
from mercury_jax.models.weight_quant import FORMATS

MODELS = ("diffusiongemma-26b-a4b", "llada-8b", "dream-7b", "sdar-30b-a3b", "llada2-mini", "mercury-1b")
CHIPS = ("t4", "l4", "a100", "rtx5090", "h100", "h200", "b200", "v5e-1", "v6e-1")
QUANTISE, CONTEXT = "int8", 4096
WIDE = 200  # columns of a table that is written to a file
NONE = "none"  # matrices as the model stores them

ROOT = Path(mercury_jax.__file__).parent
# Folders whose files change no compiled program of `sample()`.
UNUSED = {"assets", "cli", "evaluate", "rl", "serve", "tasks", "train"}
COMPILERS = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cuda-nvcc-cu12")
# What a record keeps of that of `compile_program`.
KEPT = (
    "model", "for", "chip", "devices", "mesh", "dtype", "quantise", "context", "batch", "jax", "memory", "fits",
    "weight_bytes", "bytes_per_device", "argument_bytes", "temp_bytes", "flops", "roofline", "bytes_per_pass",
    "bytes_read_per_pass", "kernels_per_pass", "small_kernels_per_pass", "experts_per_pass", "open_loops_per_pass",
    "implied", "compile_seconds",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PlanBenchmark:
    """Compile models for chips, and say which machine runs which model, and how fast.

    examples:
      python -m benchmarks.plan --out plan.jsonl
      python -m benchmarks.plan llada-8b dream-7b --for l4 h200 \\
          --quantise none int8 --context 4k 32k --out plan.jsonl
      python -m benchmarks.plan runs/mine/model --for v5e-1,v6e-1 --json

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


def grid(
    models: Sequence[str] = MODELS, targets: Sequence[str] = CHIPS, quantise: Sequence[str] = (QUANTISE,),
    contexts: Sequence[int] = (CONTEXT,), *, batch: int | None = None, dtype: str | None = None,
) -> list[CompileRequest]:  # fmt: skip
    """Makes the requests of a plan: the product of its lists, table by table and row by row.

    Args:
        models: As `abstract_params.source` takes them.
        targets: As `chips.target` takes them.
        quantise: "int8", "fp8", or "none" for matrices as the model stores them.
        contexts: Positions of a row.
        batch: Rows. Default: one for each part of the mesh axis `data`.
        dtype: Of parameters and arithmetic. Default: each model's.

    Returns:
        A request for each cell, without duplicates.

    Raises:
        ValueError: A model, target, kind or size that no cell can have, or an empty list.
    """
    for name, values in (
        ("MODEL", models),
        ("--for", targets),
        ("--quantise", quantise),
        ("--context", contexts),
    ):
        if not values:
            raise refuse(name, values, "one value or more")
    for kind in quantise:
        if kind not in (NONE, *FORMATS):
            raise refuse("--quantise", kind, ", ".join((NONE, *FORMATS)))
    for context in contexts:
        at_least(1, **{"--context": context})
    if batch is not None:
        at_least(1, **{"--batch": batch})
    for target in targets:
        chips.target(target)
    for model in models:
        abstract_params.source(model, dtype)
    cells = itertools.product(quantise, contexts, models, targets)
    return [
        CompileRequest(
            model, target, context=context, batch=batch, quantise=None if kind == NONE else kind, dtype=dtype,
            weights_first=True,
        )
        for kind, context, model, target in dict.fromkeys(cells)
    ]  # fmt: skip


# --- cells


def plan(
    requests: Sequence[CompileRequest],
    file: str | None = None,
    stage: Callable[[str], None] = lambda text: None,
    limit: float | None = None,
) -> Iterator[dict[str, Any]]:
    """Compiles the cells of a plan, or takes them from its file.

    A cell whose compiling process died or was stopped is compiled again by the next call.

    Args:
        requests: Of `grid`.
        file: JSONL file that is read first, and to which every new record is appended. None: no file.
        stage: Called with what is being done.
        limit: Seconds after which a compiling process is ended; None: never.

    Yields:
        A record for each request, in their order: see `compile_cell`.

    Raises:
        ValueError: None of the chips has its compiler here.
    """
    models = {(request.model, request.dtype) for request in requests}
    builds = {model: build_of(abstract_params.source(*model)) for model in models}
    keys = [_key(request._asdict(), builds[request.model, request.dtype]) for request in requests]
    done = {} if file is None else read_records(file)
    todo = {request.target for request, key in zip(requests, keys, strict=True) if key not in done}
    missing = [error for error in map(_missing_plugin, todo) if error is not None]
    if todo and len(missing) == len(todo):
        raise missing[0]
    for request, key in zip(requests, keys, strict=True):
        record = done.get(key)
        if record is None:
            prefix = f"{request.model} for {request.target}"
            record = compile_cell(request, lambda text, prefix=prefix: stage(f"{prefix}: {text}"), limit)
            record["build"] = builds[request.model, request.dtype]
            if file is not None:
                append_record(file, record)
        yield record


def compile_cell(
    request: CompileRequest, stage: Callable[[str], None] = lambda text: None, limit: float | None = None
) -> dict[str, Any]:
    """Compiles one cell.

    Args:
        request: The cell.
        stage: Called with what is being done.
        limit: Seconds after which the compiling process is ended; None: never.

    Returns:
        The request (`request`); `status`: "compiled", "too large" (for the memory of the chip), "refused" (by a check,
        a kernel or the compiler) or "failed" (the process died or was stopped); `reason`, unless it was compiled;
        `wall_seconds`; and what is known of KEPT.
    """
    began = time.perf_counter()
    asked = request._asdict() | {"ignore_config": list(request.ignore_config)}  # as JSON reads it back
    record: dict[str, Any] = {"request": asked, "model": request.model, "for": request.target}
    record |= {"quantise": request.quantise, "context": request.context}
    try:
        found = compiling.compile_for(request, stage, limit)
        record |= {name: found[name] for name in KEPT if name in found}
        record["status"] = "compiled" if found["fits"] else "too large"
    except ValueError as error:
        record |= {"status": "refused", "reason": str(error)}
    except compiling.CompilerFailed as error:
        record |= {"status": "failed", "reason": str(error)}
    if record["status"] == "too large":
        record["reason"] = _too_large(record)
    return record | {"wall_seconds": round(time.perf_counter() - began, 1)}


def _too_large(record: Mapping[str, Any]) -> str:
    """Why a cell does not fit: its weights alone, what the compiler says, or what the compiled program needs."""
    memory, needed = _gigabytes(record["memory"]), _gigabytes(record["bytes_per_device"])
    if "argument_bytes" in record:
        parts = f"arguments {_gigabytes(record['argument_bytes'])}, temporaries {_gigabytes(record['temp_bytes'])}"
        return f"the program needs {needed} of {memory}: {parts}"
    if "mesh" in record:
        return f"the compiler refuses the program: it needs {needed} of {memory}"
    return f"weights of {needed} do not fit into {memory}"


def _missing_plugin(target: str) -> ValueError | None:
    """What `chips.check_plugin` says where the compiler of a target is not installed."""
    try:
        chips.check_plugin(chips.target(target).chip)
    except ValueError as error:
        return error
    return None


# --- the file


def build_of(found: ModelSource) -> str:
    """Identifies what a record depends on besides its request: sources, compilers and the model's configuration.

    Args:
        found: The model.

    Returns:
        12 hex digits.
    """
    total = hashlib.sha256(repr((found.config, found.noise, str(found.stored), found.decoding)).encode())
    files = [path for suffix in ("*.py", "*.txtpb") for path in ROOT.rglob(suffix)]
    for path in sorted(files):
        name = path.relative_to(ROOT)
        if name.parts[0] not in UNUSED:
            total.update(f"{name.as_posix()}\0".encode() + path.read_bytes() + b"\0")
    for name in COMPILERS:
        try:
            total.update(f"{name} {importlib.metadata.version(name)}\0".encode())
        except importlib.metadata.PackageNotFoundError:
            continue
    return total.hexdigest()[:12]


def read_records(file: str) -> dict[str, dict[str, Any]]:
    """Reads the records of a file that need not be made again.

    Args:
        file: JSONL file; may be missing. A last line that was cut off when a plan was stopped is ignored.

    Returns:
        The records by request and build, without those that failed.

    Raises:
        ValueError: The file holds something else.
    """
    path = Path(file)
    found: dict[str, dict[str, Any]] = {}
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for n, line in enumerate(
        text.split("\n")[:-1], start=1
    ):  # behind the last line break: nothing, or a cut-off line
        try:
            record = json.loads(line)
            key = _key(record["request"], record["build"])
            failed = record["status"] == "failed"
        except (ValueError, KeyError, TypeError, AttributeError):
            allowed = f"a file that this command wrote: line {n} is not a record of a plan"
            raise refuse("--out", file, allowed) from None
        if not failed:
            found[key] = record
    return found


def append_record(file: str, record: Mapping[str, Any]) -> None:
    """Appends a record to a file; a line that was cut off before it is removed.

    Args:
        file: JSONL file.
        record: The record.
    """
    with open(file, "ab+") as out:
        out.seek(0)
        whole = out.read().rfind(b"\n") + 1
        out.truncate(whole)
        out.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")


def _key(request: Mapping[str, Any], build: str) -> str:
    return json.dumps([sorted(request.items()), build])


# --- tables


class Table(NamedTuple):
    """The cells of one precision and context.

    Attributes:
        title: Precision, context and rows.
        models: The rows.
        targets: The columns.
        cells: Record by (model, target).
    """

    title: str
    models: list[str]
    targets: list[str]
    cells: dict[tuple[str, str], Mapping[str, Any]]


def tables(records: Iterable[Mapping[str, Any]]) -> list[Table]:
    """Sorts records into tables.

    Args:
        records: Of `plan`.

    Returns:
        A table for each precision and context, in the order of the records.
    """
    found: dict[str, Table] = {}
    for record in records:
        request = record["request"]
        title = f"weights in {request['quantise']}" if request["quantise"] else "weights as stored"
        title += f", arithmetic in {request['dtype']}" if request["dtype"] else ""
        title += f", {request['batch'] or 1} x {request['context']:,} positions"
        table = found.setdefault(title, Table(title, [], [], {}))
        for name, names in ((request["model"], table.models), (request["target"], table.targets)):
            if name not in names:
                names.append(name)
        table.cells[request["model"], request["target"]] = record
    return list(found.values())


def cell_text(record: Mapping[str, Any] | None) -> tuple[str, str]:
    """Says what a cell holds in two short parts.

    Args:
        record: Of `plan`; None for a cell that was not made.

    Returns:
        Memory of a device and tokens per second, such as ("27.7 GB", "1,405 tok/s"); or what became of the cell, with
        the memory that it needs where that is known.
    """
    if record is None:
        return "", ""
    if record["status"] == "compiled":
        rate = ""
        if "implied" in record:
            tokens = record["implied"]["tokens_per_second"]
            most = "≤ " if record.get("open_loops_per_pass") else ""
            rate = f"{most}{tokens:,.0f} tok/s" if tokens >= 10 else f"{most}{tokens:.2g} tok/s"
        return _gigabytes(record["bytes_per_device"]), rate
    needed = _gigabytes(record["bytes_per_device"]) if "bytes_per_device" in record else ""
    return record["status"], needed


def notes(table: Table) -> list[str]:
    """Lists the reasons of the cells that do not run, and what else a reader has to know of a column.

    Args:
        table: Of `tables`.

    Returns:
        One line each.
    """
    found = []
    for (model, target), record in table.cells.items():
        if record["status"] != "compiled":
            found.append(f"{model}, {target}: {' '.join(record['reason'].split())}")
    for target in table.targets:
        chip = chips.target(target).chip
        inside = [r for (_, at), r in table.cells.items() if at == target and r["status"] == "compiled"]
        if not chip.bf16 and any(r["dtype"] == "bfloat16" for r in inside):
            found.append(
                f"{target} has no bf16: XLA multiplies in fp32; --dtype float16 uses its tensor cores"
            )
        if chip.platform == "tpu" and inside:
            found.append(
                f"{target}: tokens per second at the roofline; a GPU's are of the counted bytes and kernels"
            )
    return found


def markdown(table: Table) -> str:
    """Writes a table for documentation.

    Args:
        table: Of `tables`.

    Returns:
        Markdown: the title, the table, and its notes as a list.
    """
    head = [f"{t} ({_gigabytes(chips.target(t).chip.memory)})" for t in table.targets]
    lines = [f"{table.title[0].upper()}{table.title[1:]}:", "", f"| model | {' | '.join(head)} |"]
    lines.append("|---" * (len(head) + 1) + "|")
    for model in table.models:
        texts = [cell_text(table.cells.get((model, target))) for target in table.targets]
        lines.append(f"| {model} | {' | '.join(', '.join(filter(None, text)) for text in texts)} |")
    return "\n".join([*lines, "", *(f"- {note}" for note in notes(table)), ""])


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e9:.2f} GB"


# --- the command


def run(argv: Sequence[str]) -> int:
    """Compiles the cells of a plan and prints them as tables, or one by one as JSON; returns the exit code.

    Raises:
        ValueError: A bad option, before a process is started.
    """
    args = arguments.read(PlanBenchmark, argv, "python -m benchmarks.plan")
    if args.json and args.markdown:
        raise refuse("--markdown", True, "without --json, which prints records")
    if args.limit is not None and not args.limit > 0:
        raise refuse("--limit", args.limit, "above 0 minutes")
    show.check_writable("--out", args.out)
    split = lambda words: [word for given in words for word in given.split(",") if word]
    requests = grid(
        split(args.models or MODELS), split(args.targets or CHIPS), split(args.quantise),
        [_positions(word) for word in split(args.context)], batch=args.batch, dtype=args.dtype,
    )  # fmt: skip
    limit = None if args.limit is None else 60 * args.limit
    quiet = args.json or show.terminal(sys.stderr)
    records = []
    with show.progress("count", total=len(requests), quiet=args.json) as update:
        stage = lambda text: update(description=text)
        for record in plan(requests, args.out, stage, limit):
            records.append(record)
            update(advance=1)
            if args.json:
                show.emit(record)
            if not quiet:
                cell = ", ".join(filter(None, cell_text(record)))
                name = record["request"]["model"]
                show.say(f"{len(records)} of {len(requests)}: {name} for {record['for']}: {cell}")
    for table in () if args.json else tables(records):
        print(markdown(table)) if args.markdown else _print_table(table)
    return 0


def _positions(word: str) -> int:
    """A number of positions, such as "4k" or "4096"."""
    number = word.lower().removesuffix("k")
    if not number.isdecimal():
        raise refuse("--context", word, "a whole number, or one of 1024 such as 4k")
    return int(number) * (1024 if number != word.lower() else 1)


def _print_table(table: Table) -> None:
    """A table of the plan with the reasons below it; as wide as it needs where no terminal limits it."""
    grid = Grid()
    grid.add_column("model", overflow="fold")
    for target in table.targets:
        grid.add_column(f"{target}\n{chips.target(target).chip.memory / 1e9:.0f} GB", justify="right")
    for model in table.models:
        cells = [cell_text(table.cells.get((model, target))) for target in table.targets]
        grid.add_row(escape(model), *("\n".join(filter(None, cell)) for cell in cells))
    console = Console(width=None if show.terminal() else WIDE, highlight=False)
    console.print(table.title, markup=False, soft_wrap=True)
    console.print(grid)
    for note in notes(table):
        console.print(note, markup=False, soft_wrap=True)
    console.print()


if __name__ == "__main__":
    sys.exit(run_script(run))
