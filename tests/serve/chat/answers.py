"""Random answers as ids with their meaning, and snapshots of them."""

import json
import random
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from mercury_jax.serve.chat.output_parser import OutputDelta, OutputParser
from mercury_jax.serve.engine.request import Snapshot
from mercury_jax.tokenizer import SPECIAL

LETTERS = [*'ab<>|{}"\\:,[] \n\t', "é", "日", "🙂", "\0", "\u2581", "e\u0301", "</tool_call>", "<tool"]


class RandomAnswer(NamedTuple):
    """An answer and what it means, without regard to stop sequences."""

    ids: list[int]
    thinking: str
    content: str
    calls: list[tuple[str, Any]]


def lm_of(tokenizer: Any) -> Any:
    """The part of an LM that the chat package uses."""
    return SimpleNamespace(tokenizer=tokenizer)


def text(rng: random.Random, most: int = 12) -> str:
    return "".join(rng.choice(LETTERS) for _ in range(rng.randrange(most)))


def value(rng: random.Random, depth: int = 0) -> Any:
    """Any JSON value."""
    kind = rng.randrange(5 if depth > 2 else 7)
    if kind < 2:
        return text(rng)
    if kind < 5:
        return rng.choice([0, -1, 2.5, 1e-9, 10**20, True, False, None])
    if kind == 5:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {text(rng): value(rng, depth + 1) for _ in range(rng.randrange(4))}


def payload(rng: random.Random, name: str, arguments: Any) -> str:
    """A call as JSON, with random order and spacing."""
    spaced = {"indent": rng.choice([None, None, 1]), "ensure_ascii": rng.random() < 0.3}
    pairs = [("name", name), ("arguments", arguments)]
    pairs = pairs if rng.random() < 0.7 else [*pairs[::-1], ("id", "x")]
    return rng.choice(["", "\n"]) + json.dumps(dict(pairs), **spaced) + rng.choice(["", "\n", " \n"])


def random_answer(tok: Any, rng: random.Random, thinking: bool) -> RandomAnswer:
    """A well-formed answer in our own form. thinking: the prompt opened it."""
    thought, content, calls, ids = text(rng) if thinking else "", "", [], []
    if thinking:
        ids += [*tok.encode(thought), SPECIAL.end_think]
    elif rng.random() < 0.3:
        thought = text(rng)
        ids += [SPECIAL.think, *tok.encode(thought), SPECIAL.end_think]
    content = text(rng, 30)
    ids += tok.encode(content)
    for _ in range(rng.choice([0, 0, 1, 3])):
        calls.append((f"f-{rng.randrange(9)}", {text(rng): value(rng) for _ in range(rng.randrange(4))}))
        written = tok.encode(payload(rng, *calls[-1]))
        ids += [SPECIAL.tool_call, *written, SPECIAL.end_tool_call]
    return RandomAnswer(ids, thought, content, calls)


def cut(content: str, stop: list[str]) -> str:
    """Content up to the first stop sequence, by looking at every prefix."""
    for end in range(len(content) + 1):
        met = [s for s in stop if content[:end].endswith(s)]
        if met:
            return content[: end - max(map(len, met))]
    return content


def snapshot(
    ids: list[int], final: int | None = None, finish: str | None = None, accepted: Any = None
) -> Snapshot:
    final = len(ids) if final is None else final
    sure = np.arange(len(ids)) < final if accepted is None else np.asarray(accepted, bool)
    nothing = np.zeros(len(ids))
    return Snapshot(
        np.asarray(ids, np.int32), sure, nothing.astype(np.float32), nothing.astype(bool), final, final, 1, 0,
        finish,
    )  # fmt: skip


def snapshots(ids: list[int], rng: random.Random, vocab: int) -> list[Snapshot]:
    """Snapshots of some passes: any number of tokens becomes final in each, followed by tokens that still change."""
    at, found = 0, []
    while at < len(ids):
        noise = [rng.randrange(vocab) for _ in range(rng.randrange(4))]
        found.append(snapshot([*ids[:at], *noise], at))
        at += rng.choice([0, 1, 1, 2, 7, 40])
    return [*found, snapshot(ids, finish="stop")]


def deltas(parser: OutputParser, seen: list[Snapshot]) -> list[OutputDelta]:
    return [parser.feed(s) for s in seen]


def joined(found: list[OutputDelta]) -> tuple[str, str, dict[int, tuple[str, str]]]:
    """(reasoning, content, calls by index as (name, arguments)) of deltas, checked as OpenAI's clients read them."""
    calls: dict[int, tuple[str, str]] = {}
    ids: dict[int, str] = {}
    for delta in found:
        for call in delta.tool_calls:
            if call.index not in calls:
                assert call.index == len(calls) and call.id and call.name
                ids[call.index], calls[call.index] = call.id, (call.name, call.arguments)
            else:
                assert call.id is None and call.name is None and call.arguments
                calls[call.index] = (calls[call.index][0], calls[call.index][1] + call.arguments)
    assert len(set(ids.values())) == len(ids)
    return "".join(d.reasoning for d in found), "".join(d.content for d in found), calls
