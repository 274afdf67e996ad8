"""A server under load: `python -m benchmarks.serving`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from benchmarks.script import Ints, run_script
from mercury_jax.cli import arguments, show
from mercury_jax.cli.arguments import Flag, Int, OptionalFloat, OptionalInt, Positional, option
from mercury_jax.config import refuse


@dataclass(frozen=True, kw_only=True)
class ServingBenchmark:
    """Put a server under load: latencies, throughput, agents.

    examples:
      python -m benchmarks.serving
      python -m benchmarks.serving --concurrency 1 4 16 64 --requests 64 --agent 2
      python -m benchmarks.serving --url http://127.0.0.1:8000 --rate 20 --json

    Without --url a server of its own is started with the model, in another
    process, and measured once all of its programs are compiled. --concurrency:
    numbers of clients, each of which sends its next request when it has its
    answer; the numbers alternate, so that throughputs compare. --rate: an open
    loop, in which requests arrive at random whatever the server does, and their
    times count from when they were due. The last record compares the throughput
    of the most clients with that of the fewest (16 against 1 should reach 4
    times), and names what limits it: the engine's device program is timed
    alone, with one row and with as many as there are clients. --agent N: agents
    that call tools N times and then answer, against the same conversations in
    free text. first_frame is the first text that a client sees: with --frames
    the canvas after the first step.
    """

    model: Annotated[Positional[str | None], option("MODEL")] = None
    """Folder or Hugging Face id of a model. Default: the embedded one."""
    url: Annotated[str | None, option("URL")] = None
    """http://HOST:PORT of a running server. Default: a server of our own."""
    api_key: Annotated[str | None, option("KEY")] = None
    """API key of that server."""
    concurrency: Ints = (1, 16)
    """Numbers of clients."""
    requests: Int = 32
    """Questions of each number of clients and turn."""
    turns: Int = 3
    """How often the numbers of clients alternate."""
    rate: OptionalFloat = None
    """Run an open loop, too: requests per second."""
    tasks: Annotated[tuple[str, ...], option("NAME [NAME ...]")] = ("add3", "sudoku4")
    """Tasks of the questions."""
    max_tokens: Int = 96
    """Most tokens of an answer."""
    effort: Annotated[str | None, option("NAME")] = None
    """instant, low, medium or high. Default: the server's."""
    frames: Flag = False
    """Stream the whole text after every step."""
    agent: Int = 0
    """Turns with tools of an agent; 0 runs none."""
    context: OptionalInt = None
    """Context of our own server; a smaller one compiles less. Default: the model's."""
    seed: Int = 0
    """Draws the questions."""
    out: Annotated[str | None, option("FILE.jsonl")] = None
    """Write the records, too."""
    json: Flag = False
    """Print one JSON object for each record."""
    checkpoint: Annotated[arguments.CheckpointOptions, arguments.Group] = arguments.CheckpointOptions()


def run(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    args = arguments.read(ServingBenchmark, argv, "python -m benchmarks.serving")
    show.check_writable("--out", args.out)
    show.report(_records(args), args.out, None if args.json else line)
    return 0


def _records(args: ServingBenchmark) -> Iterator[dict[str, Any]]:
    from benchmarks import serving_runs

    load = serving_runs.Load(**{name: getattr(args, name) for name in serving_runs.Load.__dataclass_fields__})
    if args.url is not None:
        if args.model is not None or args.checkpoint != arguments.CheckpointOptions():
            raise refuse(
                "--url", args.url, "no MODEL and none of its options beside it, which start a server"
            )
        yield from serving_runs.against(args.url, load, args.api_key)
        return
    settings = {} if args.context is None else {"context": args.context}
    lm, how = args.checkpoint.load(args.model), args.checkpoint.given()
    yield from serving_runs.measure(lm, args.model, load, settings, how)


def line(row: Mapping[str, Any]) -> str:
    """A record for people."""
    if row["load"] == "agent":
        return _agent_line(row)
    low, high = row.get("ratio_quartiles", (0, 0))
    if row["load"] == "batching":
        few, many = row["concurrency"]
        return (
            f"{many} clients get {row['throughput_ratio']:.2f} times the tokens per second of {few} (quartiles "
            f"{low:.2f} to {high:.2f}; the goal is {row['at_least']:g}); limited by: {row['bound']}"
        )
    name = f"open, {row['rate']:g}/s" if row["load"] == "open" else f"closed, {row['concurrency']} at a time"
    times = "; ".join(
        f"{label} " + " / ".join(_time(row[key][p]) for p in ("p50", "p90", "p99"))
        for label, key in (("first frame", "first_frame"), ("last token", "last_token"), ("whole", "whole"))
    )
    ratio = f", {row['throughput_ratio']:.2f} times the fewest" if row["load"] == "closed" else ""
    passes = row["tokens_per_forward"]
    per_pass = "" if passes is None else f", {passes:.1f} tokens per forward pass"
    lost = row["refused"] + row["failed"]
    return (
        f"{name}: {row['tokens_per_second']:,.0f} tokens/s{ratio}{per_pass}; p50 / p90 / p99 of {times}"
        + (f"; {row['refused']} refused, {row['failed']} failed" if lost else "")
    )


def _agent_line(row: Mapping[str, Any]) -> str:
    wall, free = row["wall"], row["wall_of_free_text"]
    text = (
        f"agent, {row['turns']} turns: wall p50 {_time(wall['p50'])}, p99 {_time(wall['p99'])}; "
        f"{row['valid_calls']} of {row['calls']} calls valid; as free text p50 {_time(free['p50'])}"
    )
    return text + (f"; {row['failed']} conversations failed: {row['refused'][:300]}" if row["failed"] else "")


def _time(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"


if __name__ == "__main__":
    sys.exit(run_script(run))
