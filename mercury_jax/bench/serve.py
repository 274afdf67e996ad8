"""A server under load: latencies, throughput by batching against one at a time, and agents that call tools."""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from mercury_jax.bench import serve_agent, serve_bound, serve_load, serve_process
from mercury_jax.bench.serve_client import Client
from mercury_jax.bench.serve_load import Ask, Seen
from mercury_jax.config import at_least, refuse
from mercury_jax.evaluate import card, tasks
from mercury_jax.train.generators import Generator
from mercury_jax.types import LM

LEAST = 4.0  # times the throughput of one client that sixteen together must have
Row = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is asked of the server.

    concurrency: clients that ask one after the other, each setting by turns with the others. requests: of each
    setting and turn. rate: requests a second of an open loop (None: none is run). frames: ask for the text as it
    stands after every pass. agent: run agents, too, of so many turns with tools each.
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
            raise refuse("rate", self.rate, "a number of requests a second above 0")
        for name in self.tasks:
            _generator(name)


class Part(NamedTuple):
    """One turn of a setting: what its requests saw, its seconds, and what the server counted meanwhile."""

    seen: list[Seen]
    seconds: float
    counted: dict[str, float]

    @property
    def tokens_per_second(self) -> float:
        return sum(one.tokens for one in self.seen) / self.seconds


def measure(lm: LM, folder: str | None, load: Load, settings: dict[str, Any]) -> Iterator[Row]:
    """A JSON-ready row for each setting of a server of our own, in a process of its own.

    lm: the model, which `folder` holds (None: the embedded one). The last row says what batching gives, against the
    engine's device program alone, which is timed once the server has ended.
    """
    widest = max(load.concurrency)
    settings = {"slots": widest, "queue": 4 * widest + load.requests} | settings
    parts: dict[int, list[Part]] = {}
    with serve_process.server(folder, settings) as own:
        yield from against(own.url, load, keep=parts, more={"server": "our own, of this run", **settings})
    if len(parts) > 1:
        yield _batching(lm, load, parts, settings)


def against(
    url: str,
    load: Load,
    key: str | None = None,
    keep: dict[int, list[Part]] | None = None,
    more: Row | None = None,
) -> Iterator[Row]:
    """The same rows for a server that runs already, whatever it is. keep: gets the turns of each concurrency."""
    model = _run(url, key, _model)
    about = {"url": url, "model": model, "hardware": card.hardware(), **(more or {})}
    asks = questions(model, load)
    parts = {} if keep is None else keep
    parts.update(_run(url, key, lambda client: by_turns(client, asks, load)))
    for n, found in parts.items():
        base = parts[min(parts)]
        yield {"load": "closed", "concurrency": n} | figures(found, load) | _against(found, base) | about
    if load.rate is not None:
        rate = load.rate
        part = _run(
            url, key, lambda client: _counted(client, serve_load.opened(client, asks, rate, load.seed))
        )
        row = figures([part], load) | {"compared_with": "the closed loops of this run"}
        yield {"load": "open", "rate": rate} | row | about
    if load.agent:
        yield _run(url, key, lambda client: agents(client, model, load)) | about


def questions(model: str, load: Load) -> list[Ask]:
    """Held-out questions of the tasks, in turn."""
    each = -(-load.requests // len(load.tasks))
    drawn = [[p.input for p in tasks.draw(_generator(name), each, load.seed)] for name in load.tasks]
    texts = itertools.chain.from_iterable(zip(*drawn))
    more = {} if load.effort is None else {"reasoning_effort": load.effort}
    return [
        serve_load.chat(model, text, load.max_tokens, load.frames, temperature=0, seed=load.seed, **more)
        for text in itertools.islice(texts, load.requests)
    ]


async def by_turns(client: Client, asks: Sequence[Ask], load: Load) -> dict[int, list[Part]]:
    """Every concurrency once a turn, in changing order, behind a turn that warms up and is not kept."""
    parts: dict[int, list[Part]] = {n: [] for n in sorted(set(load.concurrency))}
    for turn in range(load.turns + 1):
        for n in parts if turn % 2 else reversed(parts):
            part = await _counted(client, serve_load.closed(client, asks, n))
            if turn:
                parts[n].append(part)
    return parts


async def _counted(client: Client, load: Awaitable[tuple[list[Seen], float]]) -> Part:
    before = await serve_load.counters(client)
    seen, seconds = await load
    after = await serve_load.counters(client)
    return Part(seen, seconds, {name: x - before[name] for name, x in after.items() if name in before})


def figures(parts: Sequence[Part], load: Load) -> Row:
    """Latencies of all turns together, rates as the median turn; seconds. Only whole answers count."""
    seen = [one for part in parts for one in part.seen]
    good = [one for one in seen if one.good]
    forwards = sum(part.counted.get("mercury_forwards_total", 0) for part in parts)
    made = sum(part.counted.get("mercury_tokens_total", 0) for part in parts)
    return {
        "requests": len(seen),
        "good": len(good),
        "refused": sum(one.status == 429 for one in seen),
        "failed": sum(not one.good and one.status != 429 for one in seen),
        "first_frame": serve_load.spread(one.first for one in good),
        "last_token": serve_load.spread(one.last for one in good),
        "whole": serve_load.spread(one.whole for one in good),
        "tokens_per_second": statistics.median(part.tokens_per_second for part in parts),
        "requests_per_second": statistics.median(len(part.seen) / part.seconds for part in parts),
        "tokens": sum(one.tokens for one in good) / max(len(good), 1),
        "tokens_per_forward": made / forwards if forwards else None,
        "tasks": list(load.tasks),
        "max_tokens": load.max_tokens,
        "frames": load.frames,
        "turns": len(parts),
        "seed": load.seed,
    }


def _against(found: Sequence[Part], base: Sequence[Part]) -> Row:
    ratios = [a.tokens_per_second / b.tokens_per_second for a, b in zip(found, base, strict=True)]
    return {
        "throughput_ratio": statistics.median(ratios),
        "ratio_quartiles": serve_bound.quartiles(ratios),
        "compared_with": "the least concurrency, by turns in this run",
    }


def _batching(lm: LM, load: Load, parts: dict[int, list[Part]], settings: Row) -> Row:
    """What the most clients together get through, against the fewest, and what bound it."""
    few, many = min(parts), max(parts)
    told = _against(parts[many], parts[few])
    room = min(settings.get("context") or lm.model.config.context, 2 * load.max_tokens)
    found = serve_bound.bound(lm, many, room)
    return {
        "load": "batching",
        "concurrency": [few, many],
        **told,
        "at_least": LEAST,
        "within": told["throughput_ratio"] >= LEAST,
        "bound": serve_bound.words(told["throughput_ratio"], found, LEAST),
        "pass_seconds": {str(n): s for n, s in found.seconds.items()},
        "device_gain": found.gain,
        "gflops": {str(n): r for n, r in found.rates.items()},
        "matmul_gflops": found.matmul,
        "model": lm.name,
        "hardware": card.hardware(),
    }


async def agents(client: Client, model: str, load: Load) -> Row:
    """Agents one after the other, and the same conversations in free text, by turns."""
    texts = [ask.body["messages"][0]["content"] for ask in questions(model, load)]
    pairs = []
    for text in [texts[0], *texts[: load.turns * 3]]:  # the first one warms up
        both = [
            await serve_agent.trip(client, model, text, load.agent, load.max_tokens // 2, tools)
            for tools in (True, False)
        ]
        pairs.append(both)
    kept = [pair for pair in pairs[1:] if not any(trip.refused for trip in pair)]
    told, free = [pair[0] for pair in kept], [pair[1] for pair in kept]
    refused = next((trip.refused for pair in pairs for trip in pair if trip.refused), None)
    return {
        "load": "agent",
        "loops": len(told),
        "failed": len(pairs) - 1 - len(kept),
        "refused": refused,
        "turns": load.agent + 1,
        "wall": serve_load.spread(trip.whole for trip in told),
        "turn": serve_load.spread(second for trip in told for second in trip.turns),
        "wall_of_free_text": serve_load.spread(trip.whole for trip in free),
        "ratio": statistics.median(a.whole / b.whole for a, b in zip(told, free)) if kept else None,
        "tokens": sum(trip.tokens for trip in told),
        "tokens_of_free_text": sum(trip.tokens for trip in free),
        "calls": sum(trip.calls for trip in told),
        "valid_calls": sum(trip.valid for trip in told),
        "seed": load.seed,
        "compared_with": "the same conversations with as many turns in free text, by turns",
    }


def _run(url: str, key: str | None, work: Callable[[Client], Awaitable[T]]) -> T:
    async def run() -> T:
        client = Client(url, key)
        try:
            return await work(client)
        finally:
            await client.close()

    return asyncio.run(run())


async def _model(client: Client) -> str:
    answer = await client.ask("GET", "/v1/models")
    if answer.status != 200:
        raise refuse("url", client.url, f"a server whose /v1/models answers 200, not {answer.status}")
    return answer.json()["data"][0]["id"]


def _generator(name: str) -> Generator:
    """Of a task's questions."""
    found = tasks.find(name).generator
    if found is None:
        raise refuse("task", name, "one with questions to answer")
    return found
