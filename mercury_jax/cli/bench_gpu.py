"""Prepare an accelerator: check whether the kernels are correct on it, tune them, and see where a forward pass goes.

WHAT, in this order:
  check   versions, and every kernel form against fp32; forms that pass are used from then on
  tune    settings of the grouped product and of attention at the shapes of the 26B; the fastest are used from then on
  profile the operations of a pass of the 26B: calls, time, bytes and share of each, and the gaps between kernels

examples:
  mercury bench gpu check --out h200.jsonl
  mercury bench gpu tune --out h200.jsonl
  mercury bench gpu profile --out h200.jsonl --png pass.png
  mercury bench gpu check --small               # on any machine: the same code on small shapes, in some minutes
  python -m mercury_jax bench gpu check         # from the source tree, without installing it

Each command ends within --budget seconds. A case that hangs is killed, a crash fails only its own case, and cases for
which no time was left have a row that says so. Needed are jax, flax, optax, orbax-checkpoint, sentencepiece,
safetensors, chex and jaxtyping.

The fastest settings of `tune` are stored beside them, in tuned/<device>.json, whose entries a package may bring too
(mercury_jax/ops/tuned/); `check` checks them.

Forms that pass `check` are stored in ~/.cache/mercury_jax/kernels.json (MERCURY_KERNEL_CHECKS names another file),
for this chip, this JAX and these sources of the kernels, and are used there by default; MERCURY_KERNELS=1 uses every
kernel, MERCURY_KERNELS=0 none. `mercury info` says which are on and why.

--out: one JSON object a line, appended as soon as it is measured, so one file may hold all of them. Records of
a chip belong under docs/results/, one file a day: h200-2026-11-30.jsonl. The fields "command", "case", "hardware",
"jax" and "date" identify a row; then
  "passed", "relative_error", "moved"   a case of check: the largest error of a row, and how far two runs differ
  "form", "verdict", "why"              a kernel form: "on" or "off" from then on
  "seconds", "share_of_bound"           a call, and the time that the measured roofline allows as a share of it
  "seconds_per_forward", "mfu"          a pass of a model; of training, the share of the matmul roofline
  "operations", "gap_seconds"           of profile: each operation of a pass, and the time in which no kernel ran
  "times_as_fast"                       beside the fastest of the others in the same run
  "settings", "best"                    of tune: a variant, and whether it is the fastest so far; of the last row of a
                                        case "default_seconds" is the time with the heuristic's settings
  "peak_bytes"                          most memory that the device held
  "failed", "refused", "left_out", "not_run"    why there is no number
Read it by `jq -c 'select(.verdict)' FILE`, or in Python by `[json.loads(line) for line in open(FILE)]`.

Exit codes: 0 measured, 1 a kernel is wrong or a case failed, 2 bad input.
"""

from __future__ import annotations

import argparse
import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from mercury_jax.cli import show
from mercury_jax.config import nearest, refuse

COMMANDS = ("check", "tune", "profile")


class _Parser(argparse.ArgumentParser):
    """argparse instead of tyro, since this command must run from the source tree without tyro, rich and grain."""

    def error(self, message: str) -> NoReturn:
        lacking = message.removeprefix("the following arguments are required: ")
        told = message.removeprefix("argument ") if lacking == message else f"{lacking} is missing"
        raise ValueError(f"{told} (`{self.prog} --help` explains)")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Reads the command and its options.

    Args:
        argv: The words behind "mercury bench gpu".

    Returns:
        `what`, one of COMMANDS, and the options.

    Raises:
        ValueError: A bad command or option; the message names it, and the nearest one.
    """
    about, _, more = (__doc__ or "").partition("\n\n")
    form = argparse.RawDescriptionHelpFormatter
    p = _Parser("mercury bench gpu", None, about, more, formatter_class=form, allow_abbrev=False)
    option = p.add_argument
    option("what", metavar="WHAT", help=", ".join(COMMANDS))
    option("--small", action="store_true", help="small shapes and models, for a machine without a GPU")
    option("--budget", type=float, default=520.0, metavar="S", help="seconds that it may take (default 520)")
    option(
        "--only", nargs="+", default=[], metavar="PART", help="only cases whose names contain one of these"
    )
    option("--out", metavar="FILE.jsonl", help="append each row as soon as it is measured")
    option("--seed", type=int, metavar="N", help="of check: draws the inputs (default 0)")
    option(
        "--png", metavar="FILE", help="of profile: draw the time of each part of a pass (needs matplotlib)"
    )
    option("--json", action="store_true", help="print one JSON object for each row")
    args, rest = p.parse_known_args(list(argv))
    if args.what not in COMMANDS:
        raise refuse("bench gpu", args.what, nearest(args.what, COMMANDS))
    for word in rest:
        options = re.findall(r"--[a-z]+", p.format_usage())
        raise refuse("option" if word.startswith("-") else "argument", word, nearest(word, options))
    if args.seed is not None and args.what != "check":
        raise refuse("--seed", args.seed, f"with check only, not with {args.what}")
    if args.png is not None and args.what != "profile":
        raise refuse("--png", args.png, f"with profile only, not with {args.what}")
    if not args.budget > 0:
        raise refuse("--budget", args.budget, "a number of seconds above 0")
    return args


def run(argv: Sequence[str]) -> int:
    """Runs the command; returns 1 where a kernel is wrong or a case failed, else 0.

    Raises:
        ValueError: A bad command or option, before a process is started.
    """
    args = parse(argv)
    show.check_writable("--out", args.out)
    if args.png is not None:
        from mercury_jax.bench.decode import check_plot  # imports JAX

        check_plot(args.png)
    from mercury_jax.bench.gpu import commands, runner

    how: dict[str, Any] = {"small": args.small, "only": args.only}
    how |= {"seed": args.seed or 0} if args.what == "check" else {}
    with contextlib.closing(runner.Runner(args.budget)) as cases:
        return report(getattr(commands, args.what)(cases, **how), args.out, args.json, args.png)


def report(rows: Iterable[Mapping[str, Any]], out: str | None, json: bool, png: str | None = None) -> int:
    """Prints rows, and appends them to a file, as they are measured.

    Args:
        rows: The rows of a command.
        out: A JSONL file, or None.
        json: Whether to print one JSON object for each row.
        png: File for the picture of a profile, or None.

    Returns:
        1 where a kernel is wrong or a case failed, else 0.
    """
    from mercury_jax.bench.gpu import runner

    bad = False
    for row in rows:
        runner.append(out, row)
        show.emit(row) if json else print(line(row), flush=True)
        bad |= runner.troubled([row])
        if png is not None and "operations" in row:
            _draw(row, png)
    return 1 if bad else 0


def table(row: Mapping[str, Any]) -> str:
    """The operations of a pass that take at least a thousandth of its time, the longest first."""
    head = f"{'part':40} {'operation':32} {'calls':>7} {'us a call':>9} {'GB':>7} {'TB/s':>6} {'share':>6}"
    rows = [
        f"{one['part'][-40:]:40} {one['operation'][:32]:32} {one['calls']:7.1f} "
        f"{1e6 * one['seconds'] / one['calls']:9.1f} {1e-9 * one['bytes']:7.3f} "
        f"{1e-12 * one['bytes'] / max(one['seconds'], 1e-12):6.2f} {one['share']:6.1%}"
        for one in row["operations"]
        if one["share"] >= 1e-3
    ]
    times = ", ".join(
        f"{1e3 * row[key]:.3f} ms {text}"
        for key, text in (
            ("seconds_per_forward", "a pass"), ("traced_seconds", "traced"), ("busy_seconds", "busy"),
            ("gap_seconds", "in gaps between kernels"),
        )
    )  # fmt: skip
    return "\n".join([head, *rows, f"{times}; {row['kernels']:.0f} kernels a pass"])


def _draw(row: Mapping[str, Any], path: str) -> None:
    """Draws the time of each part of a pass."""
    from matplotlib.figure import Figure

    parts: dict[str, float] = {}
    for one in row["operations"]:
        parts[one["part"]] = parts.get(one["part"], 0.0) + 1e3 * one["seconds"]
    parts["gaps between kernels"] = 1e3 * row["gap_seconds"]
    named = sorted(parts.items(), key=lambda item: item[1])[-16:]
    figure = Figure(figsize=(9, 0.4 * len(named) + 1.2), layout="constrained")
    axes = figure.subplots()
    axes.barh([name for name, _ in named], [ms for _, ms in named])
    axes.set(xlabel="ms a pass", title=f"{row['case']}, {row['hardware']}")
    figure.savefig(path, dpi=120)


def line(row: Mapping[str, Any]) -> str:
    """A row for people: why there is no number, or the numbers that a person looks at first."""
    name = row.get("case") or row["form"]
    if "settings" in row:  # of tune
        name = f"{name}, {' '.join(f'{knob} {value}' for knob, value in row['settings'].items())}"
    for reason in ("failed", "not_run", "left_out", "refused"):
        if row.get(reason):
            return f"{name}: {reason.replace('_', ' ')}: {row[reason]}"
    if "verdict" in row:
        return f"{row['form']}: {row['verdict'].upper()}" + (f" ({row['why']})" if "why" in row else "")
    if name == "about":
        device = f"{row['devices']} x {row['hardware']} ({row['platform']})"
        return f"{device}, jax {row['jax']}, Python {row['python']}; kernels: {row['kernels']['rule']}"
    if "bytes_per_second" in row:
        return f"{row['bytes_per_second'] / 1e9:.0f} GB/s copied, {row['flops_per_second'] / 1e12:.2f} TFLOP/s in bf16"
    if "operations" in row:
        return f"{name}\n{table(row)}"
    parts = []
    if "passed" in row:
        parts.append("right" if row["passed"] else f"WRONG: {row.get('why')}")
    if "relative_error" in row and row.get("passed"):
        parts.append(f"error {row['relative_error']:.1e}, difference of two runs {row['moved']:.1e}")
    if "relative_error_on" in row:
        errors = f"error {row['relative_error_on']:.1e} with kernels, {row['relative_error_off']:.1e} without"
        parts.append(errors)
    for key, scale, text in (
        ("seconds_per_forward", 1e3, "{:.3f} ms per pass"), ("seconds", 1e3, "{:.3f} ms"),
        ("gigabytes_per_second", 1, "{:.0f} GB/s"), ("share_of_bound", 100, "{:.0f}% of the roofline"),
        ("mfu", 100, "MFU {:.1f}%"), ("times_as_fast", 1, "{:.2f} times as fast"),
        ("tokens_per_second", 1, "{:.0f} tokens/s"), ("peak_bytes", 1e-9, "{:.1f} GB at most"),
    ):  # fmt: skip
        if row.get(key) is not None:
            parts.append(text.format(row[key] * scale))
    parts += [f"computed by {row['computed_by']}"] if "computed_by" in row else []
    parts += [row["note"]] if "note" in row else []
    if row.get("default_seconds"):
        parts.append(
            f"the heuristic's {1e3 * row['default_seconds']:.3f} ms; the fastest of {row['variants']}"
        )
    return f"{name}: {', '.join(parts)}"
