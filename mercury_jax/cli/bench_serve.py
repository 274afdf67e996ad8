"""`mercury bench serve`: a server under load."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mercury_jax.cli import bench, options, show
from mercury_jax.cli.parser import Parser, number, whole

MORE = """\
examples:
  mercury bench serve
  mercury bench serve --concurrency 1 4 16 64 --requests 64 --agent 2
  mercury bench serve --url http://127.0.0.1:8000 --rate 20 --json

Without --url a server of its own is started with the model, in another process, and measured once all of its
programs are compiled. --concurrency: so many clients, each asking as soon as it has its answer; the settings take
turns, so that throughputs compare. --rate: an open loop, in which requests arrive at random moments whatever the
server does, and their times count from when they were due. The last row compares the throughput of the most
clients with that of the fewest (at least 4 times is wanted of 16 against 1), and names what bound it: the
engine's device program is timed alone, with one row and with as many as there are clients.
--agent N: agents that call tools N times and then answer, against the same conversations in free text.
first_frame is the first text that a client sees: with --frames the canvas after the first pass."""


def parser() -> Parser:
    p = Parser("bench serve", "Put a server under load: latencies, throughput, agents.", MORE)
    bench.model(p)
    p.add_argument(
        "--url", metavar="URL", help="http://HOST:PORT of a server that runs already (default: our own)"
    )
    p.add_argument("--api-key", metavar="KEY", help="of that server")
    p.add_argument(
        "--concurrency", type=whole, nargs="+", default=[1, 16], metavar="N", help="clients (default 1 16)"
    )
    bench.count(p, "--requests", 32, "questions of each setting and turn")
    bench.count(p, "--turns", 3, "how often the settings take turns")
    p.add_argument("--rate", type=number, metavar="R", help="an open loop, too: requests a second")
    p.add_argument(
        "--tasks",
        nargs="+",
        default=["add3", "sudoku4"],
        metavar="NAME",
        help="of the questions (default: add3 sudoku4)",
    )
    bench.count(p, "--max-tokens", 96, "of an answer")
    p.add_argument("--effort", metavar="NAME", help="instant, low, medium or high (default: the server's)")
    p.add_argument("--frames", action="store_true", help="stream the text as it stands after every pass")
    bench.count(p, "--agent", 0, "turns with tools of an agent; 0: none is run")
    p.add_argument(
        "--context",
        type=whole,
        metavar="N",
        help="of our own server (default: the model's); less compiles less",
    )
    bench.ending(p, "the questions")
    return p


def run(argv: Sequence[str]) -> int:
    args = parser().read(argv)
    options.writable("--out", args.out)
    rows = []
    for row in _rows(args):
        rows.append(row)
        bench.write(args.out, rows)
        if args.json:
            show.emit(row)
        else:
            print(line(row), flush=True)
    return 0


def _rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    from mercury_jax.bench import serve

    load = serve.Load(
        concurrency=args.concurrency, requests=args.requests, turns=args.turns, rate=args.rate, tasks=args.tasks,
        max_tokens=args.max_tokens, frames=args.frames, effort=args.effort, agent=args.agent, seed=args.seed,
    )  # fmt: skip
    if args.url is not None:
        yield from serve.against(args.url, load, args.api_key)
        return
    settings = {} if args.context is None else {"context": args.context}
    yield from serve.measure(show.load(args.model), args.model, load, settings)


def line(row: Mapping[str, Any]) -> str:
    """A row for people."""
    if row["load"] == "agent":
        return _agent(row)
    low, high = row.get("ratio_quartiles", (0, 0))
    if row["load"] == "batching":
        few, many = row["concurrency"]
        return (
            f"{many} clients get {row['throughput_ratio']:.2f} times the tokens a second of {few} (quartiles "
            f"{low:.2f} to {high:.2f}, at least {row['at_least']:g} wanted); what bounds it: {row['bound']}"
        )
    name = f"open, {row['rate']:g}/s" if row["load"] == "open" else f"closed, {row['concurrency']} at a time"
    times = "; ".join(
        f"{told} " + " / ".join(_time(row[key][p]) for p in ("p50", "p90", "p99"))
        for told, key in (("first frame", "first_frame"), ("last token", "last_token"), ("whole", "whole"))
    )
    ratio = f", {row['throughput_ratio']:.2f} times the least" if row["load"] == "closed" else ""
    passes = row["tokens_per_forward"]
    a_pass = "" if passes is None else f", {passes:.1f} tokens a forward"
    lost = row["refused"] + row["failed"]
    return f"{name}: {row['tokens_per_second']:,.0f} tokens/s{ratio}{a_pass}; p50 / p90 / p99 of {times}" + (
        f"; {row['refused']} refused, {row['failed']} failed" if lost else ""
    )


def _agent(row: Mapping[str, Any]) -> str:
    wall, free = row["wall"], row["wall_of_free_text"]
    told = (
        f"agent, {row['turns']} turns: wall p50 {_time(wall['p50'])}, p99 {_time(wall['p99'])}; "
        f"{row['valid_calls']} of {row['calls']} calls valid; as free text p50 {_time(free['p50'])}"
    )
    return told + (f"; {row['failed']} loops failed: {row['refused'][:300]}" if row["failed"] else "")


def _time(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"
