"""What sample() costs beyond its forwards: the same passes as bare forwards and heads, by turns.

The claim: at batch 1 and 8, sample() takes at most 1.15 times its forwards run back to back, and compiles
nothing once it is warm.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mercury_jax.bench.settings import Setting
from mercury_jax.bench.timing import by_turns, compiled, ratio, timed
from mercury_jax.config import at_least
from mercury_jax.decode.decoder import Session
from mercury_jax.decode.inputs import check_seed
from mercury_jax.decode.request import Request, encode_request, start
from mercury_jax.decode.sample import Output, sample
from mercury_jax.decode.state import DecodeConfig, State
from mercury_jax.evaluate import card
from mercury_jax.types import LM, Params, Pass

MOST = 1.15
TEXT = "def area(r):\n    return 3.14159 * r * r\n\n\ndef total(values):\n    return sum(values)\n\n\n"
STANDARD = (Setting("confidence"), Setting("threshold", {"p": 0.9}))
COMPARED = "as many forwards and heads of the same shapes, back to back in one compiled loop"


def overhead(
    lm: LM,
    chosen: Sequence[Setting] = STANDARD,
    *,
    batches: Sequence[int] = (1, 8),
    tokens: int = 64,
    pairs: int = 9,
    seed: int = 0,
) -> Iterator[dict[str, Any]]:
    """A JSON-ready row for each setting and batch size, as it is measured.

    The answers have a fixed length: the end of text is never emitted. ratio: median over `pairs` of
    sample() over its forwards, with quartiles; ratio_of_fastest: of the least times, which a busy
    machine spoils less. prepare_seconds: of a call, before the device loop. recompilations: programs
    compiled after the first calls, in all others, some with prompts of other lengths, seeds and knobs.
    """
    at_least(1, tokens=tokens, pairs=pairs, batch=min(batches, default=0))
    lm = endless(lm)
    for setting in chosen:
        for batch in batches:
            yield _row(lm, setting, batch, tokens, pairs, check_seed(seed))


def endless(lm: LM) -> LM:
    """The same model, which never emits the end of text."""
    c = lm.corruption
    return dataclasses.replace(lm, corruption=c._replace(forbidden=(*c.forbidden, lm.model.config.eos)))


def _row(lm: LM, setting: Setting, batch: int, tokens: int, pairs: int, seed: int) -> dict[str, Any]:
    call = functools.partial(_sample, lm, setting, batch, tokens)
    bare = Bare(lm, setting, batch, tokens, passes=call(seed).passes)
    call(seed)
    bare()
    before = compiled()
    times = by_turns(lambda: call(seed), bare, pairs)
    prepares = [timed(lambda: _prepared(lm, setting, batch, tokens))[1] for _ in range(pairs)]
    for i in range(1, 4):
        call(seed + i, shorter=i, nudge=1 - 0.01 * i)
    again, found = compiled() - before, ratio(times)
    return {
        "rule": setting.text,
        "batch": batch,
        "tokens": tokens,
        "passes": bare.passes,
        "seconds": statistics.median(a for a, _ in times),
        "forwards_seconds": statistics.median(b for _, b in times),
        "prepare_seconds": statistics.median(prepares),
        "ratio": found,
        "ratio_quartiles": _quartiles([a / b for a, b in times]),
        "ratio_of_fastest": min(a for a, _ in times) / min(b for _, b in times),
        "pairs": pairs,
        "recompilations": again,
        "at_most": MOST,
        "within": found <= MOST and again == 0,
        "model": lm.name,
        "hardware": card.hardware(),
        "seed": seed,
        "compared_with": COMPARED,
    }


def _quartiles(values: Sequence[float]) -> list[float]:
    if len(values) < 2:
        return [*values, *values]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [low, high]


def prompts(lm: LM, batch: int, shorter: int = 0) -> list[list[int]]:
    """Ids of one canvas, so that one pass encodes them."""
    ids = lm.tokenizer.encode(TEXT * 8)
    size = max(min(lm.model.config.block, len(ids)) - shorter, 1)
    return [ids[:size] for _ in range(batch)]


def _sample(
    lm: LM, setting: Setting, batch: int, tokens: int, seed: int, shorter: int = 0, nudge: float = 1.0
) -> Output:
    other = {k: v * nudge if isinstance(v, float) else v for k, v in setting.chosen.items()}
    sampler = dataclasses.replace(setting, chosen=other).sampler()
    asked = prompts(lm, batch, shorter)
    return sample(lm, asked, max_tokens=tokens, seed=seed, sampler=sampler, plan=setting.plan)


def _prepared(lm: LM, setting: Setting, batch: int, tokens: int) -> Session:
    """What sample() does before its first pass."""
    asked = Request(prompts(lm, batch), max_tokens=tokens, sampler=setting.sampler(), plan=setting.plan)
    job = start(lm, encode_request(lm, asked.checked()))
    jax.block_until_ready(job.state)
    return job


class Shapes(NamedTuple):
    """What a bare loop closes over: the program whose passes it makes, and where its canvas goes."""

    program: DecodeConfig
    known: int
    tokens: int


class Bare:
    """The forwards of a call and nothing else: the same cache, canvas and number of passes."""

    def __init__(self, lm: LM, setting: Setting, batch: int, tokens: int, passes: int) -> None:
        job = _prepared(lm, setting, batch, tokens)
        known = len(prompts(lm, batch)[0])
        loop = functools.partial(_loop, Shapes(job.config, known, tokens))
        self.run: Callable[..., Any] = jax.jit(loop, donate_argnums=1)
        self.params, self.passes = lm.params, passes
        self.cache, self.like = job.state.cache, job.state._replace(cache=())

    def __call__(self) -> None:
        self.cache, logits = self.run(self.params, self.cache, self.like, jnp.asarray(self.passes))
        jax.block_until_ready(logits)


def _loop(
    shapes: Shapes, params: Params, cache: Any, like: State, passes: jax.Array
) -> tuple[Any, jax.Array]:
    """Forwards whose tokens and positions change from pass to pass, so that XLA cannot lift any of it out."""
    program, model = shapes.program, shapes.program.model
    rows = like.done.shape[0]
    everyone, ones = jnp.zeros((rows,), bool), jnp.ones((rows,), jnp.int32)
    first = jnp.broadcast_to(jnp.arange(program.width), (rows, program.width))

    def forward(i: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        start = (shapes.known + i * shapes.tokens // passes // program.width * program.width) * ones
        if model.config.pattern == "bidirectional":
            start = 0 * ones
        n = program.width * ones
        tokens = (first + i) % model.config.vocab
        given = Pass(tokens, cache, start, n, start + n, everyone, like.self_cond)
        hidden, cache = model.forward(params, given)
        return model.head(params, jax.tree.map(lambda x: x[:, : program.window], hidden)), cache

    shape = jax.eval_shape(lambda c: forward(jnp.asarray(0), c)[0], cache)

    def body(i: jax.Array, loop: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        logits, cache = forward(i, loop[0])
        return cache, logits

    # The logits are carried whole: a loop that kept a part of them would compute a part of them.
    return jax.lax.fori_loop(0, passes, body, (cache, jnp.zeros(shape.shape, shape.dtype)))
