"""Measures a server under load: latencies, the throughput gain of batching, and agents that call tools.

`measure` starts a server in another process (`serving_process`); `against` measures a running one. Both send the
requests of `serving_client`.

`measure_bound` times the engine's device program without a server, with one row and with many, and `explain` reports
what limits the throughput. A forward pass of B rows multiplies B times as many positions by the same matrices. If one
row already saturates the arithmetic units, B rows take B times as long, and batching cannot gain anything.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import operator
import statistics
import time
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import serving_client, serving_process
from benchmarks.serving_client import CHAT, Client, Json, LoadRequest, RequestResult, percentiles
from benchmarks.timing import prompt_ids, quartiles
from mercury_jax.bench.timing import endless, timed
from mercury_jax.compilation import hardware
from mercury_jax.config import at_least, refuse
from mercury_jax.serve.engine import programs, sampling_params as sampling
from mercury_jax.serve.engine.buckets import make_buckets
from mercury_jax.serve.engine.request import EngineConfig, EngineRequest
from mercury_jax.tasks import draw_distinct, find
from mercury_jax.types import LM

PASSES = 12  # forward passes per timed run of the device program
POSITIONS = 4096  # rows of the large matrix products that measure the FLOP/s of the machine
GOAL = 4.0  # goal for the throughput with the most clients relative to the fewest

_NUMBER = {"type": "integer", "minimum": 0, "maximum": 9999}
_ARGUMENTS = {
    "type": "object", "properties": {"a": _NUMBER, "b": _NUMBER}, "required": ["a", "b"], "additionalProperties": False,
}  # fmt: skip
# The tools of the agents: name -> (description, what it computes).
FUNCTIONS = {"add": ("a plus b", operator.add), "multiply": ("a times b", operator.mul)}
TOOLS = tuple(
    {"type": "function", "function": {"name": name, "description": about, "parameters": _ARGUMENTS}}
    for name, (about, _) in FUNCTIONS.items()
)


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is sent to the server.

    Attributes:
        concurrency: Numbers of clients to measure, in alternation. A client waits for each response before it sends the
            next request (closed loop).
        requests: Requests per number of clients and turn.
        turns: Number of turns, each of which measures all numbers of clients.
        rate: Requests/s of an open loop; None: no open loop.
        tasks: The tasks whose questions are sent.
        max_tokens: Largest number of tokens of an answer.
        frames: Whether to stream the whole text after every step.
        effort: Reasoning effort of the requests; None: the server's default.
        agent: Turns with tools of each agent; 0: no agents.
        seed: Seed of the questions and of the arrivals.
    """

    concurrency: Sequence[int] = (1, 16)
    requests: int = 32
    turns: int = 3
    rate: float | None = None
    tasks: Sequence[str] = ("add3", "sudoku4")
    max_tokens: int = 96
    frames: bool = False
    effort: str | None = None
    agent: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        at_least(1, requests=self.requests, turns=self.turns, max_tokens=self.max_tokens)
        at_least(1, concurrency=min(self.concurrency, default=0))
        at_least(0, agent=self.agent)
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise refuse("rate", self.rate, "requests/s, a number above 0")
        for name in self.tasks:
            find(name)


class LoadTurn(NamedTuple):
    """One turn with a number of clients.

    Attributes:
        seen: The results of its requests.
        seconds: Its wall-clock time.
        counted: By how much each metric of the server increased.
    """

    seen: list[RequestResult]
    seconds: float
    counted: dict[str, float]

    @property
    def tokens_per_second(self) -> float:
        """Completion tokens per second over all requests."""
        return sum(one.tokens for one in self.seen) / self.seconds


def measure(
    lm: LM, folder: str | None, load: Load, settings: dict[str, Any], how: Mapping[str, Any] | None = None
) -> Iterator[Json]:
    """Starts a server in another process and measures it.

    Args:
        lm: The model, to time its device program without a server.
        folder: The folder from which the server loads the model. Default: the embedded model.
        load: The requests to send.
        settings: Fields of `EngineConfig`; by default as many slots as clients.
        how: Arguments of `mercury_jax.load` with which `lm` was loaded. Default: none.

    Yields:
        A JSON-ready record for each number of clients, for the open loop and for the agents. The last record compares
        the gain of batching with that of the device program, which is timed after the server has ended.
    """
    widest = max(load.concurrency)
    settings = {"slots": widest, "queue": 4 * widest + load.requests} | settings
    parts: dict[int, list[LoadTurn]] = {}
    with serving_process.server(folder, settings, how=how) as own:
        yield from against(own.url, load, keep=parts, more={"server": "our own, of this run", **settings})
    if len(parts) > 1:
        yield _batching(lm, load, parts, settings)


def against(
    url: str,
    load: Load,
    key: str | None = None,
    keep: dict[int, list[LoadTurn]] | None = None,
    more: Json | None = None,
) -> Iterator[Json]:
    """Measures a running server.

    Args:
        url: http://HOST:PORT.
        load: The requests to send.
        key: API key.
        keep: Receives the turns of each number of clients.
        more: Additional fields of each record.

    Yields:
        A JSON-ready record for each number of clients, for the open loop and for the agents.

    Raises:
        ValueError: The URL has another form, or its /v1/models does not return 200.
    """
    with asyncio.Runner() as loop:
        client = Client(url, key)
        try:
            answer = loop.run(client.ask("GET", "/v1/models"))
            if answer.status != 200:
                allowed = f"a server whose /v1/models answers 200, not {answer.status}"
                raise refuse("url", client.url, allowed)
            model = answer.json()["data"][0]["id"]
            about = {"url": url, "model": model, "hardware": hardware(), **(more or {})}
            asks = questions(model, load)
            parts = {} if keep is None else keep
            parts.update(loop.run(alternate_loads(client, asks, load)))
            base = parts[min(parts)]
            for n, found in parts.items():
                yield {"load": "closed", "concurrency": n} | figures(found, load) | _gain(found, base) | about
            if load.rate is not None:
                part = loop.run(
                    _counted(client, serving_client.open_loop(client, asks, load.rate, load.seed))
                )
                row = figures([part], load) | {"compared_with": "the closed loops of this run"}
                yield {"load": "open", "rate": load.rate} | row | about
            if load.agent:
                yield loop.run(agents(client, model, load)) | about
        finally:
            loop.run(client.close())


def questions(model: str, load: Load) -> list[LoadRequest]:
    """Makes requests with held-out questions, alternating between the tasks.

    Args:
        model: Name of the model on the server.
        load: Tasks, number of requests and settings.

    Returns:
        `load.requests` requests.
    """
    each = -(-load.requests // len(load.tasks))
    drawn = [[p.input for p in draw_distinct(find(name), each, load.seed)] for name in load.tasks]
    texts = itertools.chain.from_iterable(zip(*drawn))
    more = {} if load.effort is None else {"reasoning_effort": load.effort}
    return [
        serving_client.chat(model, text, load.max_tokens, load.frames, temperature=0, seed=load.seed, **more)
        for text in itertools.islice(texts, load.requests)
    ]


async def alternate_loads(
    client: Client, asks: Sequence[LoadRequest], load: Load
) -> dict[int, list[LoadTurn]]:
    """Measures every number of clients once per turn, in alternating order, after one turn to warm up.

    Args:
        client: Connections to the server.
        asks: The requests of a turn.
        load: Numbers of clients and turns.

    Returns:
        Turns by number of clients.
    """
    parts: dict[int, list[LoadTurn]] = {n: [] for n in sorted(set(load.concurrency))}
    for turn in range(load.turns + 1):
        for n in parts if turn % 2 else reversed(parts):
            part = await _counted(client, serving_client.closed_loop(client, asks, n))
            if turn:
                parts[n].append(part)
    return parts


async def _counted(client: Client, load: Awaitable[tuple[list[RequestResult], float]]) -> LoadTurn:
    before = await serving_client.counters(client)
    seen, seconds = await load
    after = await serving_client.counters(client)
    return LoadTurn(seen, seconds, {name: x - before[name] for name, x in after.items() if name in before})


def figures(parts: Sequence[LoadTurn], load: Load) -> Json:
    """Summarises turns: percentiles of latencies in seconds over all complete answers, and medians of rates per turn.

    Args:
        parts: Turns of one number of clients.
        load: The requests that were sent.

    Returns:
        Fields of a record.
    """
    seen = [one for part in parts for one in part.seen]
    good = [one for one in seen if one.good]
    forwards = sum(part.counted.get("mercury_forwards_total", 0) for part in parts)
    made = sum(part.counted.get("mercury_tokens_total", 0) for part in parts)
    return {
        "requests": len(seen), "good": len(good), "refused": sum(one.status == 429 for one in seen),
        "failed": sum(not one.good and one.status != 429 for one in seen),
        "first_frame": percentiles(one.first for one in good), "last_token": percentiles(one.last for one in good),
        "whole": percentiles(one.whole for one in good),
        "tokens_per_second": statistics.median(part.tokens_per_second for part in parts),
        "requests_per_second": statistics.median(len(part.seen) / part.seconds for part in parts),
        "tokens": sum(one.tokens for one in good) / max(len(good), 1),
        "tokens_per_forward": made / forwards if forwards else None, "tasks": list(load.tasks),
        "max_tokens": load.max_tokens, "frames": load.frames, "turns": len(parts), "seed": load.seed,
    }  # fmt: skip


def _gain(found: Sequence[LoadTurn], base: Sequence[LoadTurn]) -> Json:
    """Computes the throughput relative to the fewest clients, turn by turn."""
    ratios = [a.tokens_per_second / b.tokens_per_second for a, b in zip(found, base, strict=True)]
    return {
        "throughput_ratio": statistics.median(ratios),
        "ratio_quartiles": quartiles(ratios),
        "compared_with": "the fewest clients, in alternation in this run",
    }


def _batching(lm: LM, load: Load, parts: dict[int, list[LoadTurn]], settings: Json) -> Json:
    """Makes the record on batching: the throughput of the most clients relative to the fewest, and what limits it."""
    few, many = min(parts), max(parts)
    gain = _gain(parts[many], parts[few])
    tokens = min(settings.get("context") or lm.model.config.context, 2 * load.max_tokens)
    found = measure_bound(lm, many, tokens)
    return {
        "load": "batching", "concurrency": [few, many], **gain, "at_least": GOAL,
        "within": gain["throughput_ratio"] >= GOAL,
        "bound": explain(gain["throughput_ratio"], found, GOAL),
        "pass_seconds": {str(n): s for n, s in found.seconds.items()}, "device_gain": found.gain,
        "gflops": {str(n): r for n, r in found.rates.items()}, "matmul_gflops": found.matmul, "model": lm.name,
        "hardware": hardware(),
    }  # fmt: skip


async def agents(client: Client, model: str, load: Load) -> Json:
    """Runs agents one after another, in alternation with the same conversations in free text.

    Args:
        client: Connections to the server.
        model: Name of the model on the server.
        load: Turns and questions.

    Returns:
        A record.
    """
    texts = [ask.body["messages"][0]["content"] for ask in questions(model, load)]
    pairs = []
    for text in [texts[0], *texts[: load.turns * 3]]:  # the first one warms up
        how = (client, model, text, load.agent, load.max_tokens // 2)
        pairs.append([await run_agent(*how, tools=tools) for tools in (True, False)])
    complete = [pair for pair in pairs[1:] if not any(one.refused for one in pair)]
    with_tools, free = [pair[0] for pair in complete], [pair[1] for pair in complete]
    refused = next((one.refused for pair in pairs for one in pair if one.refused), None)
    return {
        "load": "agent", "loops": len(with_tools), "failed": len(pairs) - 1 - len(complete), "refused": refused,
        "turns": load.agent + 1, "wall": percentiles(one.whole for one in with_tools),
        "turn": percentiles(second for one in with_tools for second in one.turns),
        "wall_of_free_text": percentiles(one.whole for one in free),
        "ratio": statistics.median(a.whole / b.whole for a, b in zip(with_tools, free)) if complete else None,
        "tokens": sum(one.tokens for one in with_tools), "tokens_of_free_text": sum(one.tokens for one in free),
        "calls": sum(one.calls for one in with_tools), "valid_calls": sum(one.valid for one in with_tools),
        "seed": load.seed,
        "compared_with": "the same conversations with as many turns in free text, in alternation",
    }  # fmt: skip


# --- agents


class AgentRun(NamedTuple):
    """One conversation from the question to the answer.

    Attributes:
        whole: Total seconds.
        turns: Seconds of each request.
        tokens: Completion tokens.
        calls: Number of tool calls.
        valid: Number of tool calls with arguments that the tool accepts.
        refused: The body of an error response; "" if the conversation was completed.
    """

    whole: float
    turns: tuple[float, ...]
    tokens: int
    calls: int
    valid: int
    refused: str = ""


async def run_agent(
    client: Client, model: str, question: str, turns: int, max_tokens: int, tools: bool = True
) -> AgentRun:
    """Asks a question, runs the tools that the model calls for `turns` turns, then requests the answer.

    Without `tools`, the conversation has the same number of turns in free text, without a grammar.

    Args:
        client: Connections to the server.
        model: Name of the model on the server.
        question: The first user message.
        turns: Turns with tools before the answer.
        max_tokens: Largest number of tokens of each response.
        tools: Whether to offer tools.

    Returns:
        Times, tokens and calls of the conversation.
    """
    messages: list[Json] = [{"role": "user", "content": question}]
    seconds, tokens, calls, valid = [], 0, 0, 0
    began = time.perf_counter()
    for turn in range(turns + 1):
        body = {"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0}
        if tools:
            body |= {"tools": TOOLS, "tool_choice": "required" if turn < turns else "none"}
        sent = time.perf_counter()
        response = await client.ask("POST", CHAT, body)
        seconds.append(time.perf_counter() - sent)
        if response.status != 200:
            message = response.body.decode("utf-8", "replace")
            return AgentRun(time.perf_counter() - began, tuple(seconds), tokens, calls, valid, message)
        answer = response.json()
        message, tokens = answer["choices"][0]["message"], tokens + answer["usage"]["completion_tokens"]
        made = message.get("tool_calls") or []
        results = [run_tool(call["function"]) for call in made]
        calls, valid = calls + len(made), valid + sum(x is not None for x in results)
        messages.append({"role": "assistant", "content": message.get("content") or ""})
        if made:
            messages[-1] |= {"content": message.get("content"), "tool_calls": made}
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": json.dumps(result)}
                for call, result in zip(made, results)
            ]
        else:
            messages.append({"role": "user", "content": "go on"})
    return AgentRun(time.perf_counter() - began, tuple(seconds), tokens, calls, valid)


def run_tool(function: Mapping[str, str]) -> int | None:
    """Runs a tool call.

    Args:
        function: `function` of the tool call: its name, and its arguments as JSON.

    Returns:
        The result; None if the tool or its arguments are not valid.
    """
    try:
        arguments = json.loads(function["arguments"])
        return FUNCTIONS[function["name"]][1](int(arguments["a"]), int(arguments["b"]))
    except (KeyError, TypeError, ValueError):
        return None


# --- the device program without a server


class DeviceProgram(NamedTuple):
    """The engine's program for a number of rows, with a state in which all rows decode long answers."""

    rows: int
    width: int
    program: Any
    params: Any
    row_params: Any
    start: Any


class BatchingBound(NamedTuple):
    """The largest gain that batching can have, and the share of the arithmetic in it.

    Attributes:
        seconds: Median seconds of a forward pass, by number of rows.
        gain: Median of rows x (seconds of a pass with one row) / (seconds of a pass with all rows).
        rates: GFLOP/s of the matrix products in a pass, by number of rows.
        matmul: GFLOP/s of matrix products of the same widths in one large batch.
    """

    seconds: dict[int, float]
    gain: float
    rates: dict[int, float]
    matmul: float


def measure_bound(lm: LM, rows: int, tokens: int, turns: int = 7) -> BatchingBound:
    """Times forward passes of 1 and of `rows` rows in alternation.

    Args:
        lm: The model.
        rows: Rows of the larger batch.
        tokens: Tokens of a row, prompt and answer together.
        turns: Number of timed pairs.

    Returns:
        Times and rates of both batches.
    """
    few, many = device_program(lm, 1, tokens), device_program(lm, rows, tokens)
    seconds: dict[int, list[float]] = {1: [], rows: []}
    for turn in range(turns + 1):  # the first one compiles
        for part in (few, many) if turn % 2 else (many, few):
            seconds[part.rows].append(seconds_per_pass(part))
    timed_passes = {n: found[1:] for n, found in seconds.items()}
    middle = {n: statistics.median(found) for n, found in timed_passes.items()}
    gain = statistics.median(rows * a / b for a, b in zip(timed_passes[1], timed_passes[rows]))
    # 2 FLOP per matrix parameter and position, without attention.
    work = 2.0 * sum(x.size for x in jax.tree.leaves(lm.params) if x.ndim > 1) * few.width
    rates = {n: n * work / middle[n] / 1e9 for n in middle}
    return BatchingBound(middle, gain, rates, _matmul_rate(lm) / 1e9)


def device_program(lm: LM, rows: int, tokens: int, rules: tuple[str, ...] | None = None) -> DeviceProgram:
    """Makes the engine's program with rows that accept one token per step and never end.

    Args:
        lm: The model.
        rows: Rows of the batch.
        tokens: Tokens of a row, prompt and answer together.
        rules: Rules that the program includes. Default: those of a server.

    Returns:
        The program with a state whose rows have their prompts and no answer yet.
    """
    lm = endless(lm)
    buckets = make_buckets(lm, EngineConfig(slots=rows, context=tokens, rules=rules))
    prompt = tuple(prompt_ids(lm, 1)[0][: max(1, tokens // 4)])
    names = buckets.rules.names
    slow = "confidence" if "confidence" in names else names[0]
    request = EngineRequest(prompt=prompt, max_tokens=tokens - len(prompt), rule=slow)
    size = buckets.capacity(tokens)
    width = buckets.width(size)
    start = programs.move_rows(buckets.row(size, request), np.zeros(rows, np.int32), buckets.sizes(size))
    row = sampling.row_params(buckets.rules, request, sampling.PLAIN, lm, 0)
    program = buckets.program(size, sampling.PLAIN)
    return DeviceProgram(rows, width, program, lm.params, sampling.stack_rows(rows, row), start)


def seconds_per_pass(part: DeviceProgram) -> float:
    """Times denoising passes.

    Args:
        part: The program, from `device_program`.

    Returns:
        Mean seconds per pass, without prefill and compilation.
    """
    cancelled, one = np.zeros(part.rows, bool), np.int32(1)
    held = jax.device_put(part.row_params)
    step = lambda state: (
        programs.run_passes(part.program, part.params, state, held, cancelled, one, None, 1).state
    )
    state = jax.block_until_ready(step(jax.tree.map(jnp.copy, part.start)))
    state = jax.block_until_ready(step(state))

    began = time.perf_counter()
    for _ in range(PASSES):
        state = step(state)
    jax.block_until_ready(state)
    return (time.perf_counter() - began) / PASSES


def _matmul_rate(lm: LM) -> float:
    """Measures FLOP/s of matrix products with the model's widths; each uses the result of the one before."""
    config = lm.model.config
    width, hidden = config.width, getattr(config, "ffn", 4 * config.width)
    up, down = jnp.ones((width, hidden), jnp.float32) / width, jnp.ones((hidden, width), jnp.float32) / hidden
    chain = jax.jit(lambda x: jax.lax.fori_loop(0, 8, lambda i, x: x @ up @ down, x))
    x = jnp.ones((POSITIONS, width), jnp.float32)
    jax.block_until_ready(chain(x))
    best = min(timed(lambda: jax.block_until_ready(chain(x)))[1] for _ in range(5))
    return 8 * 4.0 * POSITIONS * width * hidden / best


def explain(speedup: float, found: BatchingBound, wanted: float) -> str:
    """Explains in words what limits the speedup of batching.

    Args:
        speedup: Measured throughput of the largest concurrency relative to the smallest.
        found: The bound, from `measure_bound`.
        wanted: The speedup that is the goal.

    Returns:
        A sentence with the figures.
    """
    rows = max(found.seconds)
    longer = found.seconds[rows] / found.seconds[1]
    share = found.rates[1] / found.matmul
    why = (
        f"a pass of {rows} rows takes {longer:.1f} times as long as one of 1 on the device alone, so that batching "
        f"can gain {found.gain:.1f} times at most; one row already multiplies at {100 * share:.0f}% of the rate that "
        f"large products reach here ({found.rates[1]:.1f} of {found.matmul:.1f} GFLOP/s, {rows} rows at "
        f"{found.rates[rows]:.1f})"
    )
    if speedup >= wanted:
        return f"nothing; {why}"
    if found.gain < wanted or speedup > 0.85 * found.gain:
        return f"the arithmetic of the forward pass: {why}"
    return f"the server around the device, which reaches {speedup / found.gain:.0%} of that: {why}"
