"""`mercury bench gpu check | speed | model`: are the kernels correct on this GPU, and how fast are they and a model.

Reads its options with argparse: it must run from the source tree on a GPU machine without tyro, rich and grain.
"""

from __future__ import annotations

import argparse
import contextlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from mercury_jax.cli import show
from mercury_jax.config import nearest, refuse

COMMANDS = {
    "check": "versions, roofline, and every kernel form against fp32; forms that pass are used from then on",
    "speed": "what passed, beside cuDNN and XLA; then a 100M model with kernels and graphs on and off",
    "model": "the 26B: a slice with kernels against without, int8, bf16, beside transformers; then training",
}

MORE = """\
examples:
  mercury bench gpu check --out h200.jsonl
  mercury bench gpu speed --out h200.jsonl
  mercury bench gpu model --out h200.jsonl
  mercury bench gpu check --small               # on any machine: the same code on small shapes, in some minutes
  python -m mercury_jax bench gpu check         # from the source tree, without installing it

Each command ends within --budget seconds. A case that hangs is killed, a crash fails only its own case, and cases for
which no time was left have a row that says so. Needed are jax, flax, optax, orbax-checkpoint, sentencepiece, chex and
jaxtyping.

Forms that pass `check` are stored in ~/.cache/mercury_jax/kernels.json (MERCURY_KERNEL_CHECKS names another file),
for this chip, this JAX and these sources of the kernels, and are used there by default; MERCURY_KERNELS=1 uses every
kernel, MERCURY_KERNELS=0 none. `mercury info` says which are on and why.

--out: one JSON object a line, appended as soon as it is measured, so one file may hold all three commands. Records of
a chip belong under docs/results/, one file a day: h200-2026-11-30.jsonl. In each row "command", "case", "hardware",
"jax" and "date" say what it is of; then
  "passed", "relative_error", "moved"   a case of check: the largest error of a row, and how far two runs differ
  "form", "verdict", "why"              a kernel form: "on" or "off" from then on
  "seconds", "share_of_bound"           a call, and the time that the measured roofline allows as a share of it
  "seconds_per_forward", "mfu"          a pass of a model; of training, the share of the matmul roofline
  "times_as_fast"                       beside the fastest of the others in the same run
  "peak_bytes"                          most memory that the device held
  "failed", "refused", "left_out", "not_run"    why there is no number
Read it by `jq -c 'select(.verdict)' FILE`, or in Python by `[json.loads(line) for line in open(FILE)]`.

Exit codes: 0 measured, 1 a kernel is wrong or a case failed, 2 bad input."""

HELP = """\
usage: mercury bench gpu WHAT [OPTIONS]

Measure an accelerator, in this order:

{commands}

examples:
  mercury bench gpu check --out h200.jsonl
  mercury bench gpu speed --out h200.jsonl
  mercury bench gpu model --out h200.jsonl

`mercury bench gpu check --help` lists the options, and says how to read the records."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message.removeprefix('argument ')} (`{self.prog} --help` explains)")


def parse(command: str, argv: Sequence[str]) -> argparse.Namespace:
    """Reads the options of a command. ValueError names the option and the value, or the nearest option.

    Args:
        command: check, speed or model.
        argv: The words behind it.

    Returns:
        The options.

    Raises:
        ValueError: A bad option.
    """
    about = COMMANDS[command][0].upper() + COMMANDS[command][1:] + "."
    form = argparse.RawDescriptionHelpFormatter
    p = _Parser(f"mercury bench gpu {command}", None, about, MORE, formatter_class=form, allow_abbrev=False)
    p.add_argument(
        "--small", action="store_true", help="small shapes and models, for a machine without a GPU"
    )
    p.add_argument(
        "--budget", type=float, default=520.0, metavar="S", help="seconds that it may take (default 520)"
    )
    p.add_argument(
        "--only", nargs="+", default=[], metavar="PART", help="only cases whose names contain one of these"
    )
    p.add_argument("--out", metavar="FILE.jsonl", help="append each row as soon as it is measured")
    if command == "check":
        p.add_argument("--seed", type=int, default=0, metavar="N", help="draws the inputs (default 0)")
    p.add_argument("--json", action="store_true", help="print one JSON object for each row")
    args, rest = p.parse_known_args(list(argv))
    for word in rest:
        options = re.findall(r"--[a-z]+", p.format_usage())
        raise refuse("option" if word.startswith("-") else "argument", word, nearest(word, options))
    if not args.budget > 0:
        raise refuse("--budget", args.budget, "a number of seconds above 0")
    return args


def run(argv: Sequence[str]) -> int:
    """Runs the command; returns 1 where a kernel is wrong or a case failed, else 0.

    Raises:
        ValueError: A bad command or option, before a process is started.
    """
    given = list(argv)
    if not given or given[0] in ("-h", "--help", "help"):
        print(HELP.format(commands="\n".join(f"  {name:7}{about}" for name, about in COMMANDS.items())))
        return 0 if given else 2
    command = given[0]
    if command not in COMMANDS:
        raise refuse("bench gpu", command, nearest(command, list(COMMANDS)))
    args = parse(command, given[1:])
    show.check_writable("--out", args.out)
    from mercury_jax.bench.gpu import commands, runner

    bad = False
    with contextlib.closing(runner.Runner(args.budget)) as cases:
        how: dict[str, Any] = {"small": args.small, "only": args.only}
        rows = (
            commands.check(cases, seed=args.seed, **how)
            if command == "check"
            else commands.measure(cases, command, **how)
        )
        for row in rows:
            runner.append(args.out, row)
            show.emit(row) if args.json else print(line(row), flush=True)
            bad |= runner.troubled([row])
    return 1 if bad else 0


def line(row: Mapping[str, Any]) -> str:
    """A row for people."""
    name = row.get("case") or row["form"]
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
    return f"{name}: {', '.join(_figures(row))}"


def _figures(row: Mapping[str, Any]) -> list[str]:
    """The numbers of a row that a person looks at first."""
    found = []
    if "passed" in row:
        found.append("right" if row["passed"] else f"WRONG: {row.get('why')}")
    if "relative_error" in row and row["passed"]:
        found.append(f"error {row['relative_error']:.1e}, difference of two runs {row['moved']:.1e}")
    if "relative_error_on" in row:
        found.append(
            f"error {row['relative_error_on']:.1e} with kernels, {row['relative_error_off']:.1e} without"
        )
    for key, scale, text in (
        ("seconds_per_forward", 1e3, "{:.3f} ms per pass"), ("seconds", 1e3, "{:.3f} ms"),
        ("gigabytes_per_second", 1, "{:.0f} GB/s"), ("share_of_bound", 100, "{:.0f}% of the roofline"),
        ("mfu", 100, "MFU {:.1f}%"), ("times_as_fast", 1, "{:.2f} times as fast"),
        ("tokens_per_second", 1, "{:.0f} tokens/s"), ("peak_bytes", 1e-9, "{:.1f} GB at most"),
    ):  # fmt: skip
        if row.get(key) is not None:
            found.append(text.format(row[key] * scale))
    found += [f"computed by {row['computed_by']}"] if "computed_by" in row else []
    return found + ([row["note"]] if "note" in row else [])
