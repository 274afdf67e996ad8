"""What the engine and its callers exchange: a job goes in, snapshots come out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np


class Busy(Exception):
    """The queue is full, or the engine is closing; try again after so many seconds."""

    def __init__(self, message: str, retry_after: float, closing: bool = False):
        super().__init__(message)
        self.retry_after = retry_after
        self.closing = closing


class TooLong(ValueError):
    """Prompt, thinking and answer do not fit into the context."""

    def __init__(self, tokens: int, context: int):
        super().__init__(f"{tokens} tokens of prompt and answer; at most the context of {context}")
        self.tokens, self.context = tokens, context


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How an engine runs.

    slots: rows that decode at the same time. queue: requests that may wait (beyond them: Busy). context: most
    tokens of a row (None: the model's). block: positions of a canvas (None: the model's). passes: denoising
    passes of one dispatch (None: 1 on a CPU, 4 elsewhere). prefix_bytes: memory for the keys of prompts seen
    before (0: none). alternatives: most log-probabilities kept at a token. programs: "all" compiles one for each
    number of rows and positions, so that few short requests run in a small one; "one" makes do with the largest,
    in which a request's text never depends on what runs beside it, bit for bit. rules: names offered beside the
    model's own (None: all of `engine.knobs` that fit its noise); fewer of them compile sooner. kv: "int8" keeps
    keys and values as int8, in a quarter of the memory of fp32 and half of bf16; "4bit" and "3bit" in a half and
    three eighths of that (`models.kv_quant`); None: in the model's dtype. memory: most bytes that slots, prefix cache
    and passes may take on each device (None: nine tenths of what is free there); where they take more, the engine
    is refused (`engine.memory`).
    """

    slots: int = 8
    queue: int = 64
    context: int | None = None
    block: int | None = None
    passes: int | None = None
    prefix_bytes: int = 64 << 20
    alternatives: int = 20
    programs: Literal["all", "one"] = "all"
    rules: tuple[str, ...] | None = None
    kv: Literal["int8", "4bit", "3bit"] | None = None
    memory: int | None = None


@dataclass(frozen=True, kw_only=True)
class Job:
    """One answer to write. Every number is data: none of them compiles anything.

    prompt: ids. max_tokens: most tokens of the answer; they are kept for it whatever the thinking takes.
    thinking: room to think in (0: none; the prompt must open it). rule: a name of the menu (None: the
    model's own); p: its strictness (None: its own); steps: most passes of a block (0: as many as it has
    tokens). temperature: of the draw (None: the rule's own, 0: argmax). top_p 1, top_k 0, min_p 0, penalties
    1, 0, 0: off.
    bias: {id: added logit}. logprobs: alternatives to keep at each token (None: none).
    grammar: a `decode.grammar.Grammar` that the answer obeys (its thinking is free).
    visible: the first token shows text: neither an end nor a mark nor a space (not with `thinking`).
    suffix: ids that stand behind the answer, which then fills the hole between prompt and suffix (None: it goes
    on to its own end). salt: requests of another salt never share cached keys. frames: keep what every pass shows.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    thinking: int = 0
    rule: str | None = None
    p: float | None = None
    steps: int = 0
    temperature: float | None = None
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    logprobs: int | None = None
    grammar: Any = None
    suffix: tuple[int, ...] | None = None
    visible: bool = False
    salt: str = ""
    frames: bool = False


class Snapshot(NamedTuple):
    """An answer as it stands after some pass; arrays have one entry a token, thinking included.

    tokens[:final] can no longer change. `finish`: None while it goes on; "stop" (the end of text, or the
    grammar's end), "length", "cancelled", or "error" with its `message`. Where it is not None, final is all.
    """

    tokens: np.ndarray  # int32 [n]
    settled: np.ndarray  # bool [n]: the chain holds this token
    confidence: np.ndarray  # float32 [n]: probability of the model's best token there
    forced: np.ndarray  # bool [n]: the grammar left no choice
    final: int
    start: int  # first token of the active block
    forwards: int  # denoising passes so far
    cached: int  # tokens of the prompt whose keys were there already
    finish: str | None = None
    message: str = ""
    logprobs: Any = None  # decode.output.LogProbs of the whole answer, in the last snapshot


class Stats(NamedTuple):
    """Counters since the start, and gauges of this moment."""

    waiting: int
    running: int
    slots: int
    capacity: int  # positions of a slot right now
    kv_bytes: int  # of the slots' keys and values
    kv_used: int  # of these, bytes that belong to running rows
    prefix_bytes: int
    submitted: int
    finished: int
    cancelled: int
    rejected: int
    failed: int
    forwards: int  # denoising passes, summed over rows
    tokens: int  # tokens of finished answers
    prompt_tokens: int
    cached_tokens: int
    device_passes: int  # passes of the device program
