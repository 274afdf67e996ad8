"""Load on a server: requests as their clients saw them, in closed loops and in an open one."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mercury_jax.bench.serve_client import Broken, Client, Reply

Json = dict[str, Any]
PERCENTS = (50, 90, 99)
CHAT = "/v1/chat/completions"


class Ask(NamedTuple):
    """A request to make: where to, and its body, which asks for a stream."""

    path: str
    body: Json


class Seen(NamedTuple):
    """One request as its client saw it. Times are seconds since it was due; None for what never came.

    status: of HTTP, 0 where the connection broke. first: the first event with text. last: the last one with text.
    whole: the end of the answer. text: what was said, thinking left out. finishes: reasons to end, of every choice;
    dones: how often `[DONE]` came; after: events behind the first of them. refused: the message of an error.
    """

    status: int
    whole: float
    first: float | None = None
    last: float | None = None
    text: str = ""
    finishes: tuple[str, ...] = ()
    dones: int = 0
    after: int = 0
    tokens: int = 0
    refused: str = ""
    retry_after: str | None = None

    @property
    def good(self) -> bool:
        """A whole answer with exactly one end."""
        return self.status == 200 and (len(self.finishes), self.dones, self.after, self.refused) == (
            1,
            1,
            0,
            "",
        )


def chat(model: str, text: str, max_tokens: int, frames: bool = False, **more: Any) -> Ask:
    """A streamed question. frames: every event holds the whole text as it stands."""
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": max_tokens}
    body |= {"stream": True, "stream_options": {"include_usage": True}, "diffusing": frames, **more}
    return Ask(CHAT, body)


async def fetch(client: Client, ask: Ask, due: float | None = None) -> Seen:
    """Make a request and follow it to its end. due: when it should have begun, on `time.perf_counter`."""
    due = time.perf_counter() if due is None else due
    try:
        async with client.open("POST", ask.path, ask.body) as reply:
            if reply.status != 200:
                return await _refused(reply, due)
            return await _followed(reply, due, bool(ask.body.get("diffusing")))
    except (Broken, OSError) as error:
        return Seen(0, time.perf_counter() - due, refused=f"{type(error).__name__}: {error}")


async def _refused(reply: Reply, due: float) -> Seen:
    answer = await reply.read()
    told = answer.body.decode("utf-8", "replace")
    return Seen(
        reply.status,
        time.perf_counter() - due,
        refused=told,
        retry_after=reply.headers.get("retry-after"),
    )


async def _followed(reply: Reply, due: float, frames: bool) -> Seen:
    """frames: a text replaces the one before, instead of following it."""
    parts, finishes, seen = [], [], Seen(200, 0.0)
    async for data in reply.events():
        now = time.perf_counter() - due
        if seen.dones:
            seen = seen._replace(after=seen.after + (data != "[DONE]"), dones=seen.dones + (data == "[DONE]"))
            continue
        if data == "[DONE]":
            seen = seen._replace(dones=1)
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            seen = seen._replace(refused=data)
        if chunk.get("usage"):
            seen = seen._replace(tokens=chunk["usage"]["completion_tokens"])
        for choice in chunk.get("choices", ()):
            text = said(choice)
            if text:
                parts = [text] if frames else [*parts, text]
                seen = seen._replace(first=now if seen.first is None else seen.first, last=now)
            finishes += [choice["finish_reason"]] if choice.get("finish_reason") else []
    return seen._replace(whole=time.perf_counter() - due, text="".join(parts), finishes=tuple(finishes))


def said(choice: Mapping[str, Any]) -> str:
    """The text of a choice, whole or in a chunk; that of a call is its arguments."""
    part = choice.get("delta") or choice.get("message") or {}
    calls = part.get("tool_calls") or ()
    return (
        choice.get("text") or part.get("content") or "".join(call["function"]["arguments"] for call in calls)
    )


async def closed(client: Client, asks: Sequence[Ask], concurrency: int) -> tuple[list[Seen], float]:
    """(what each request saw, in their order; seconds in all): so many clients, each asking when it has its answer."""
    seen: dict[int, Seen] = {}
    todo = iter(enumerate(asks))

    async def one() -> None:
        for i, ask in todo:
            seen[i] = await fetch(client, ask)

    with undisturbed():
        began = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(concurrency)))
        return [seen[i] for i in range(len(asks))], time.perf_counter() - began


async def opened(client: Client, asks: Sequence[Ask], rate: float, seed: int = 0) -> tuple[list[Seen], float]:
    """The same in an open loop: requests arrive as a Poisson process of `rate` a second, whatever the server does.

    A request's times count from when it was due, so a client that falls behind does not hide a delay.
    """

    async def one(ask: Ask, due: float) -> Seen:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        return await fetch(client, ask, due)

    with undisturbed():
        began = time.perf_counter()
        dues = (began + at for at in arrivals(rate, seed))
        seen = await asyncio.gather(*(one(ask, due) for ask, due in zip(asks, dues)))
        return list(seen), time.perf_counter() - began


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Without the garbage collector, which in a process that has loaded JAX takes a quarter of a second at a time."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def arrivals(rate: float, seed: int) -> Iterator[float]:
    """Seconds at which requests arrive, without end."""
    draw, at = random.Random(seed), 0.0
    while True:
        at += draw.expovariate(rate)
        yield at


def percentile(values: Iterable[float | None], percent: float) -> float:
    """The smallest value that so many percent do not exceed, of those that there are; NaN of nothing."""
    ordered = sorted(x for x in values if x is not None)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)] if ordered else math.nan


def spread(values: Iterable[float | None]) -> dict[str, float]:
    """{"p50", "p90", "p99"} of times."""
    found = list(values)
    return {f"p{percent}": percentile(found, percent) for percent in PERCENTS}


async def counters(client: Client) -> dict[str, float]:
    """The numbers without labels of `/metrics`, by name; nothing from a server that has none."""
    answer = await client.ask("GET", "/metrics")
    if answer.status != 200:
        return {}
    lines = (line.split() for line in answer.body.decode("utf-8").splitlines() if not line.startswith("#"))
    return {words[0]: float(words[1]) for words in lines if len(words) >= 2 and "{" not in words[0]}


async def polled(
    client: Client, until: Callable[[dict[str, float]], bool], seconds: float = 60.0
) -> dict[str, float]:
    """The counters, once they are as wanted; TimeoutError after so many seconds."""
    end = time.perf_counter() + seconds
    while not until(found := await counters(client)):
        if time.perf_counter() > end:
            raise TimeoutError(f"not so after {seconds:g} s: {found}")
        await asyncio.sleep(0.01)
    return found
