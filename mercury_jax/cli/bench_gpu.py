"""`mercury bench gpu check | speed | model`: are the kernels right on this GPU, how fast are they and a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mercury_jax.cli import options, show
from mercury_jax.cli.bench import count
from mercury_jax.cli.parser import Parser, number
from mercury_jax.config import nearest, refuse

COMMANDS = {
    "check": "versions, ceilings, and every kernel form against fp32; what passes is used from then on",
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

Each command ends within --budget seconds. What hangs is killed, what crashes costs its own case, and what the time did
not suffice for has a row that says so. They need jax, flax, optax, orbax-checkpoint, sentencepiece, chex and jaxtyping.

What passed `check` is kept in ~/.cache/mercury_jax/kernels.json (MERCURY_KERNEL_CHECKS names another file), for this
chip, this JAX and these sources of the kernels, and is used there by default; MERCURY_KERNELS=1 uses every kernel,
MERCURY_KERNELS=0 none. `mercury info` tells what is on and why.

--out: one JSON object a line, appended as soon as it is measured, so one file may hold all three commands. Records of
a chip belong under docs/results/, one file a day: h200-2026-11-30.jsonl. In each row "command", "case", "hardware",
"jax" and "date" say what it is of; then
  "passed", "relative_error", "moved"   a case of check: the largest error of a row, and how far two runs differ
  "form", "verdict", "why"              a kernel form: "on" or "off" from then on
  "seconds", "share_of_bound"           a call, and the time that the measured ceilings allow as a share of it
  "seconds_per_forward", "mfu"          a pass of a model; of training, the share of the matmul ceiling
  "times_as_fast"                       beside the fastest of the others in the same run
  "peak_bytes"                          what the device held at most
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


def parser(command: str) -> Parser:
    p = Parser(f"bench gpu {command}", COMMANDS[command][0].upper() + COMMANDS[command][1:] + ".", MORE)
    p.add_argument(
        "--small", action="store_true", help="small shapes and models, for a machine without a GPU"
    )
    p.add_argument(
        "--budget", type=number, default=520.0, metavar="S", help="seconds that it may take (default 520)"
    )
    p.add_argument(
        "--only", nargs="+", default=[], metavar="PART", help="only cases whose names hold one of these"
    )
    p.add_argument("--out", metavar="FILE.jsonl", help="append each row as soon as it is measured")
    if command == "check":
        count(p, "--seed", 0, "of the inputs")
    options.machine(p)
    return p


def run(argv: Sequence[str]) -> int:
    words_given = list(argv)
    if not words_given or words_given[0] in ("-h", "--help", "help"):
        print(HELP.format(commands="\n".join(f"  {name:7}{about}" for name, about in COMMANDS.items())))
        return 0 if words_given else 2
    command = words_given[0]
    if command not in COMMANDS:
        raise refuse("bench gpu", command, nearest(command, list(COMMANDS)))
    args = parser(command).read(words_given[1:])
    if not args.budget > 0:
        raise refuse("--budget", args.budget, "a number of seconds above 0")
    options.writable("--out", args.out)
    from mercury_jax.bench.gpu import commands, runner

    how: dict[str, Any] = {"small": args.small, "only": args.only}
    if command == "check":
        how["seed"] = args.seed
    bad = False
    with runner.Runner(runner.Clock(args.budget)) as running:
        for row in getattr(commands, command)(running, **how):
            runner.append(args.out, row)
            show.emit(row) if args.json else print(words(row), flush=True)
            bad |= runner.troubled([row])
    return 1 if bad else 0


def words(row: Mapping[str, Any]) -> str:
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
    if "relative_error" in row:
        found.append(f"error {row['relative_error']:.1e}, moved {row['moved']:.1e}" if row["passed"] else "")
    if "relative_error_on" in row:
        found.append(
            f"error {row['relative_error_on']:.1e} with kernels, {row['relative_error_off']:.1e} without"
        )
    for key, scale, text in (
        ("seconds_per_forward", 1e3, "{:.3f} ms a pass"), ("seconds", 1e3, "{:.3f} ms"),
        ("gigabytes_per_second", 1, "{:.0f} GB/s"), ("share_of_bound", 100, "{:.0f}% of the bound"),
        ("mfu", 100, "MFU {:.1f}%"),
        ("times_as_fast", 1, "{:.2f} times as fast"), ("tokens_per_second", 1, "{:.0f} tokens/s"),
        ("peak_bytes", 1e-9, "{:.1f} GB at most"),
    ):  # fmt: skip
        if row.get(key) is not None:
            found.append(text.format(row[key] * scale))
    found += [f"computed by {row['computed_by']}"] if "computed_by" in row else []
    found += [row["note"]] if "note" in row else []
    return [text for text in found if text]
