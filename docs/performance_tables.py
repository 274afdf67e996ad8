"""Writes the tables of docs/performance.md: `python docs/performance_tables.py`.

The figures come from docs/results/*.jsonl. A table stands in the page between `<!-- table: NAME -->` and
`<!-- end -->`; `TABLES` has a function for each NAME. With `--check` nothing is written: the command names
the tables that differ from their rows, and exits with 1 if there are any.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
PAGE = DOCS / "performance.md"
PART = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.S)
BIG = "diffusiongemma-26b-a4b"
Row = dict[str, Any]


def read(name: str, **values: Any) -> list[Row]:
    """The rows of docs/results/NAME.jsonl in which the given fields have the given values."""
    lines = (DOCS / "results" / f"{name}.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [row for row in rows if all(row.get(key) == value for key, value in values.items())]


def one(name: str, **values: Any) -> Row:
    """The only such row."""
    [row] = read(name, **values)
    return row


def markdown(head: str, rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; `head` is its first line, such as "rule | passes"."""
    body = ("| " + " | ".join(map(str, cells)) + " |" for cells in rows)
    return "\n".join([f"| {head} |", "|---" * (head.count(" | ") + 1) + "|", *body])


def percent(value: float) -> str:
    """Such as "98.0"; "0" and "100" where it is exact."""
    return f"{100 * value:.1f}" if 0 < round(value, 6) < 1 else f"{100 * value:.0f}"


def accuracy(row: Row) -> str:
    """A share with its 95% interval, such as "98.0% (95.5 to 99.2)"."""
    return f"{percent(row['accuracy'])}% ({percent(row['low'])} to {percent(row['high'])})"


def difference(row: Row, key: str, digits: int) -> str:
    """A difference with its 95% interval, such as "+1.6 (-3.1 to +6.2)"."""
    centre, low, high = (f"{row[name]:+.{digits}f}" for name in (key, f"{key}_low", f"{key}_high"))
    return f"{centre} ({low} to {high})"


def nats(row: Row) -> str:
    return difference(row, "more", 4 if abs(row["more"]) < 0.01 else 3)


def quartiles(row: Row, key: str = "ratio", digits: int = 2) -> str:
    low, high = row[f"{key}_quartiles"]
    return f"({low:.{digits}f} to {high:.{digits}f})"


def size(count: float) -> str:
    """Bytes to three figures, such as "27.0 GB" or "79 MB"."""
    if count >= 2e8:
        return f"{count / 1e9:#.3g} GB"
    return f"{count / 1e6:.0f} MB" if count >= 1e7 else f"{count / 1e6:.1f} MB"


def gigabytes(count: float) -> str:
    return f"{count / 1e9:.1f} GB"


def milliseconds(seconds: float, digits: int = 1) -> str:
    return f"{1e3 * seconds:.{digits}f} ms"


def effort() -> str:
    rows = {(row["effort"], row["task"]): row for row in read("effort-nano-2026-11-27")}
    lines = []
    for name in (None, "instant", "low", "medium", "high"):
        cells = ["none: the default rule" if name is None else f"`{name}`"]
        for task in ("sudoku4", "add3"):
            cells += [accuracy(rows[name, task]), f"{rows[name, task]['forwards']:.1f}"]
        lines.append(cells)
    return markdown("effort | Sudoku | passes | sums | passes", lines)


def pretrained() -> str:
    names = {"gsm8k": "GSM8K", "short": "short questions", "json": "JSON with given keys"}
    lines = []
    for row in read("real-smollm2-2026-11-28"):
        interval = f" ({row['speedup_low']:.2f} to {row['speedup_high']:.2f})" if row["speedup"] != 1 else ""
        lines.append([
            names[row["task"]], row["batch"], row["way"], f"{row['tokens_per_second']:.1f}",
            f"{row['call_seconds']:.2f}", f"{row['speedup']:.2f}{interval}", f"{row['tokens_per_forward']:.2f}",
            f"{row['correct']} of {row['n']} ({percent(row['low'])} to {percent(row['high'])}%)",
            f"{percent(row['agreement'])}%",
        ])  # fmt: skip
    head = "questions | rows | way | tokens/s | seconds | times | tokens a pass | right | same answers"
    return markdown(head, lines)


def decisions() -> str:
    head = "model | reads | calibration | right | Brier | calibration error | answers that change"
    rows = []
    for row in read("decisions-2026-11-28", questions="all"):
        (low, high), flips = row["accuracy_interval"], row["flips_interval"]
        spread = lambda name, row=row: "{:.3f} ({:.3f} to {:.3f})".format(row[name], *row[f"{name}_interval"])
        rows.append((
            row["model"], asked(row), row["calibration"],
            f"{percent(row['accuracy'])}% ({percent(low)} to {percent(high)})", spread("brier"), spread("ece"),
            f"{percent(row['flips'])}% ({percent(flips[0])} to {percent(flips[1])})",
        ))  # fmt: skip
    return markdown(head, rows)


def asked(row: Row) -> str:
    """How a question was asked."""
    return f"{row['reads']}, less a blank state" if row["less_blank"] else str(row["reads"])


def decisions_by_kind() -> str:
    rows = read("decisions-2026-11-28", calibration="after")
    cells = {(x["model"], asked(x), x["questions"]): percent(x["accuracy"]) for x in rows}
    ways = dict.fromkeys((x["model"], asked(x)) for x in rows)
    kinds = ("things", "sums", "tones")
    head = "model | reads | " + " | ".join(kinds)
    return markdown(head, [[*way, *(cells[*way, kind] for kind in kinds)] for way in ways])


def decisions_served() -> str:
    rows = [row for row in read("decisions-2026-11-28") if "clients" in row]
    head = "model | clients | decisions a second | milliseconds (median)"
    rate = lambda row: f"{row['decisions_per_second']:.1f}"
    return markdown(head, [[x["model"], x["clients"], rate(x), f"{x['p50_ms']:.0f}"] for x in rows])


def predicted() -> str:
    head = "prediction | passes | seconds | the same text"
    rows = read("predicted-2026-11-28")
    cells = [
        (x["prediction"], x["passes"], f"{x['seconds']:.1f}", "yes" if x["equal"] else "no") for x in rows
    ]
    return markdown(head, cells)


def overhead() -> str:
    lines = []
    for batch in (1, 8):
        rows = read("overhead-nano-2026-11-23", batch=batch)
        of = lambda rule, rows=rows: (f"{r['ratio']:.2f} {quartiles(r)}" for r in rows if r["rule"] == rule)
        lines.append([batch, *(" and ".join(of(rule)) for rule in ("confidence()", "threshold(p=0.9)"))])
    return markdown("batch | `confidence`, two runs | `threshold(0.9)`, two runs", lines)


def cache() -> str:
    rows: dict[tuple[str, str], dict[int, Row]] = {}
    for row in read("cache-nano-2026-11-23", model="nano_bidirectional", max_tokens=128):
        if row["cache"] != "no cache":
            rows.setdefault((row["rule"], row["cache"]), {})[row["batch"]] = row
    lines = []
    for rule in ("factor(1.0)", "threshold(0.9)", "factor(0.1)"):
        for name, by_batch in ((name, batches) for (of, name), batches in rows.items() if of == rule):
            largest = by_batch[max(by_batch)]
            speeds = [f"{by_batch[b]['speedup']:.1f}" if b in by_batch else "" for b in (1, 8, 32, 64)]
            points = difference(largest, "points", 1)
            lines.append([f"`{rule}`", f"{largest['forwards']:.1f}", name, *speeds, points])
    return markdown("rule | passes | cache | batch 1 | 8 | 32 | 64 | points", lines)


def cache_blocks() -> str:
    lines = []
    for rule in ("confidence", "threshold(0.99)", "threshold(0.9)"):
        found = read("cache-nano-2026-11-23", model="nano", task="add3", rule=rule, cache="dkv_decode, once")
        by_batch = {row["batch"]: row for row in found}
        speeds = [f"{by_batch[batch]['speedup']:.1f}" for batch in (1, 8, 32)]
        lines.append([f"`{rule}`", f"{by_batch[32]['forwards']:.1f}", *speeds])
    return markdown("rule, three-digit sums | passes | batch 1 | 8 | 32", lines)


def peer() -> str:
    lines = [
        [f"{row['parameters'] / 1e6:.0f}M", f"{row['ms_per_step']:.1f} ms",
         f"{row['peer_ms_per_step']:.1f} ms", f"{row['speedup']:.2f} {quartiles(row, 'speedup')}"]
        for row in read("peer-2026-11-23")
    ]  # fmt: skip
    return markdown("parameters | mercury_jax, a step | transformers | times as fast (quartiles)", lines)


def training() -> str:
    lines = []
    for row in read("train-nano-2026-11-23"):
        source, malloc = row["note"].split(", ")
        lines.append([
            "generated while training" if source == "generated" else source,
            "kept" if malloc == "malloc keeps memory" else "default", f"{row['steps_per_second']:.2f}",
            f"{row['ratio']:.3f} {quartiles(row, digits=3)}", f"{row['cpu_ratio']:.3f}", f"{row['mfu']:.0%}",
        ])  # fmt: skip
    head = "data | malloc | steps/s | times the loop by hand (quartiles) | by CPU time | MFU"
    return markdown(head, lines)


def serving() -> str:
    lines = [
        [row["concurrency"], f"{row['tokens_per_second']:,.0f}",
         f"{row['throughput_ratio']:.2f} {quartiles(row)}",
         milliseconds(row["whole"]["p50"], 0), milliseconds(row["whole"]["p99"], 0)]
        for row in read("serve-2026-11-22", load="closed")
    ]  # fmt: skip
    head = "clients | tokens/s | times one client (quartiles) | a request, median | 99th percentile"
    return markdown(head, lines)


def quantisation() -> str:
    name, plain, lines = "quantise-2026-11-27", {"model": "nano", "weights": "float32", "kv": "float32"}, []
    full = one(name, **plain, task="add3")
    cases = [("weights", "quantise", option) for option in ("int8", "fp8", "int8_dynamic", "fp8_dynamic")]
    for part, argument, option in cases + [("kv", "kv", option) for option in ("int8", "4bit", "3bit")]:
        chosen = plain | {part: option}
        code, *tasks = (one(name, **chosen, task=task) for task in ("held-out code", "sudoku4", "add3"))
        key = "parameter_bytes" if part == "weights" else "cache_bytes_per_token"
        cells = [f"{code[key] / full[key]:.0%}", nats(code), *(difference(row, "points", 1) for row in tasks)]
        lines.append([f'`{argument}="{option}"`', *cells])
    return markdown("option | memory | nats a token | points, Sudokus | points, sums", lines)


def quantisation_pretrained() -> str:
    rows = [row for row in read("quantise-2026-11-27", model="smollm2") if row["weights"] != "float32"]
    lines = [[f"`{row['weights']}`", nats(row)] for row in sorted(rows, key=lambda row: row["more"])]
    return markdown("weights | nats a token more", lines)


def program_line(row: Row) -> list[str]:
    """A compiled program: what it does, on what, and what a device holds."""
    model = "26B" if row["model"] == BIG else row["model"].removeprefix("mercury-").upper()
    work = f"{row['what']}, {model}"
    if row["what"] == "sample":
        work += f" in {row['quantise'] or 'bf16'}, {row['context'] // 1024}k of context"
    else:
        work += f", {row['batch']:,} x {row['context']:,} positions"
    mesh = ", ".join(f"{axis} {count}" for axis, count in row["mesh"].items())
    count, moved = (sum(kind[key] for kind in row["collectives"].values()) for key in ("count", "bytes"))
    return [
        work, row["for"] + (f" ({mesh})" if mesh else ""),
        f"{size(row['bytes_per_device'])} of {row['memory'] / 1e9:.0f} GB", size(row["temp_bytes"]),
        f"{count} {'an update' if row['per'] == 'update' else 'a pass'}, {size(moved)}" if count else "none",
    ]  # fmt: skip


def programs() -> str:
    big = [row for row in read("deviceless-2026-11-24") if row["context"] != 2048]
    others = [row for row in read("deviceless-2026-11-23") if row["what"] != "prefill"]
    others = [row for row in others if row["what"] == "train" or row["chip"].startswith("TPU")]
    head = "program | devices (mesh) | a device holds | of it temporaries | collectives"
    return markdown(head, map(program_line, big + others))


def plan_cell(row: Row) -> str:
    memory = gigabytes(row["bytes_per_device"])
    if row["status"] != "compiled":
        return f"{row['status']}, {'weights' if row['reason'].startswith('weights') else 'program'} {memory}"
    tokens = row["implied"]["tokens_per_second"]
    return f"{memory}, " + (f"{tokens:,.0f} tok/s" if tokens >= 10 else f"{tokens:.2g} tok/s")


def plan() -> str:
    rows = read("plan-2026-11-24")
    targets = {row["for"]: f"{row['for']} ({gigabytes(row['memory'])})" for row in rows}
    cells = {(row["model"], row["for"]): plan_cell(row) for row in rows}
    models = dict.fromkeys(row["model"] for row in rows)
    lines = ([model, *(cells[model, target] for target in targets)] for model in models)
    return markdown(" | ".join(["model", *targets.values()]), lines)


def models_row(file: str, case: str) -> Row:
    """The run of a model that was timed; a run with a note is of the first call only."""
    [row] = [row for row in read(file, case=f"decoding {case}") if "note" not in row]
    return row


def first_call(row: Row) -> str:
    """Seconds of the first call; nothing where many other processes ran beside it."""
    same = [other for other in read("h200-2026-11-26", case=row["case"]) if "seconds_per_forward" in other]
    noted = [other for other in same if other.get("note", "").startswith("first call")]
    return "" if "beside" in row else f"{(noted or [row])[0]['first_call_seconds']:.0f} s"


def h200_models() -> str:
    cases = [
        ("26", f"{BIG}, bfloat16", "DiffusionGemma 26B, 26 November", "bf16"),
        ("26", f"{BIG}, int8", "DiffusionGemma 26B, 26 November", "int8"),
        ("27", f"{BIG}, int8", "DiffusionGemma 26B", "int8"),
        ("27", f"{BIG}, fp8_dynamic", "DiffusionGemma 26B", "fp8_dynamic"),
        ("27", f"{BIG}, fp8_dynamic, fused commits", "DiffusionGemma 26B, fused commits", "fp8_dynamic"),
        ("26", "mercury-100m, kernels on, loops as XLA chooses", "mercury-100m, 26 November", "bf16"),
    ]  # fmt: skip
    lines = []
    for day, case, model, weights in cases:
        row = models_row(f"h200-2026-11-{day}", case)
        took = milliseconds(row["seconds_per_forward"], 1 if row["seconds_per_forward"] > 0.01 else 2)
        tokens, memory = f"{row['tokens_per_second']:,.0f}", gigabytes(row["peak_bytes"])
        lines.append([model, weights, took, tokens, memory, first_call(row)])
    return markdown("model | weights | a pass | tokens/s | memory | first call", lines)


def h200_grouped() -> str:
    lines = []
    for row in (row for row in read("h200-2026-11-27", command="tune") if "default_seconds" in row):
        shape = dict(re.findall(r"(\w+)=(\S+)", row["case"]))
        experts, inputs, outputs, rows = (int(shape[k]) for k in ("experts", "inputs", "outputs", "rows"))
        kind = (
            "gate and up" if shape.get("gated") == "True" else "down" if experts > 1 else "attention's output"
        )
        layer, stack = ("experts", f"{experts} x ") if experts > 1 else ("dense", "")
        weights = "fp8" if shape["dtype"].startswith("float8") else shape["dtype"]
        times = [1e6 * row[key] for key in ("seconds", "default_seconds")]
        lines.append([
            f"{layer}, {kind} ({stack}{inputs:,} x {outputs:,}), {rows:,} rows",
            f"{weights}, {weights if shape['rounded'] == 'True' else 'bf16'}",
            *(f"{time:.0f} us" if time >= 100 else f"{time:.1f} us" for time in times),
            f"{row['gigabytes_per_second'] / 1e3:.2f} TB/s",
        ])  # fmt: skip
    return markdown("product | weights, rows | tuned | heuristic | read at", lines)


def h200_attention() -> str:
    models = {256: "DiffusionGemma, local", 512: "DiffusionGemma, global", 128: "LLaDA"}
    rows: dict[str, dict[str, str]] = {}
    for row in read("h200-2026-11-26", command="speed"):
        shape = row.get("shape", {})
        if "way" not in row or "gradient" in shape or shape.get("s") != 8192:
            continue
        name = ", ".join(str(shape[key]) for key in ("t", "h", "g", "width")) + f" ({models[shape['width']]})"
        time = f"{1e3 * row['seconds']:.3f}" if "seconds" in row else "no heads above 256"
        rows.setdefault(name, {})[row["way"] + (" int8" if shape.get("int8") else "")] = time
    lines = [
        [name, *(times.get(way, "") for way in ("ours", "cudnn", "xla", "ours int8"))]
        for name, times in rows.items()
    ]
    return markdown("queries, heads, key heads, head size | ours | cuDNN | XLA | ours with int8 keys", lines)


TABLES: dict[str, Callable[[], str]] = {
    table.__name__: table
    for table in (
        effort, pretrained, overhead, cache, cache_blocks, peer, training, serving, quantisation,
        quantisation_pretrained, programs, plan, h200_models, h200_grouped, h200_attention, decisions,
        decisions_by_kind, decisions_served, predicted,
    )
}  # fmt: skip


def updated(page: str) -> str:
    """The page with its tables made again. KeyError for a NAME without a function."""
    return PART.sub(lambda part: f"{part[1]}{TABLES[part[2]]()}\n{part[3]}", page)


def differing(page: str) -> list[str]:
    """The names of the tables that differ from their rows, or that the page does not have."""
    parts = {part[2]: part[0] for part in PART.finditer(page)}
    return [name for name in TABLES if name not in parts or updated(parts[name]) != parts[name]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="name the tables that differ; write nothing")
    page = PAGE.read_text("utf-8")
    if parser.parse_args().check:
        names = differing(page)
        for name in names:
            print(f"docs/performance.md: table {name} differs from its rows")
        return int(bool(names))
    PAGE.write_text(updated(page), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
