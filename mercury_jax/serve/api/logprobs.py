"""Log-probabilities of an answer, in the two forms that OpenAI has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mercury_jax.serve.chat.output_parser import ParsedMessage
from mercury_jax.serve.engine.request import Snapshot
from mercury_jax.types import LM

LEAST = -9999.0  # what stands for a probability of nought, as with OpenAI

Json = dict[str, Any]


def said(snapshot: Snapshot, message: ParsedMessage) -> slice:
    """The tokens of the answer without those of its thinking."""
    return slice(message.reasoning_tokens, message.completion_tokens)


def chat(lm: LM, snapshot: Snapshot, message: ParsedMessage, most: int) -> Json:
    """`{"content": [{"token", "logprob", "bytes", "top_logprobs"}]}`."""
    nats = snapshot.logprobs
    assert nats is not None
    part = said(snapshot, message)
    rows = zip(snapshot.tokens[part], nats.tokens[part], nats.top_ids[part], nats.top[part], strict=True)
    return {
        "content": [
            _entry(lm, id, value)
            | {"top_logprobs": [_entry(lm, i, v) for i, v in zip(ids[:most], top[:most])]}
            for id, value, ids, top in rows
        ]
    }


def text(lm: LM, snapshot: Snapshot, message: ParsedMessage, most: int) -> Json:
    """`{"tokens", "token_logprobs", "top_logprobs", "text_offset"}`; offsets count characters."""
    nats = snapshot.logprobs
    assert nats is not None
    part = said(snapshot, message)
    names = [_text(_bytes(lm, id)) for id in snapshot.tokens[part]]
    top = zip(nats.top_ids[part], nats.top[part], strict=True)
    return {
        "tokens": names,
        "token_logprobs": [_nats(x) for x in nats.tokens[part]],
        "top_logprobs": [
            {_text(_bytes(lm, i)): _nats(v) for i, v in zip(ids[:most], values[:most])} for ids, values in top
        ],
        "text_offset": _offsets(names),
    }


def _entry(lm: LM, id: Any, value: Any) -> Json:
    raw = _bytes(lm, id)
    return {"token": _text(raw), "logprob": _nats(value), "bytes": list(raw)}


def _bytes(lm: LM, id: Any) -> bytes:
    return lm.tokenizer.pieces[int(id)]


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def _nats(value: Any) -> float:
    number = float(value)
    return round(max(number, LEAST), 6) if not math.isnan(number) else LEAST


def _offsets(names: Sequence[str]) -> list[int]:
    out, at = [], 0
    for name in names:
        out.append(at)
        at += len(name)
    return out
