"""Encoding long prompts: seconds and memory, and whether they grow in proportion to the length.

Attention grows with the square of the length whatever one does, so it is timed alone and taken off. Of the last
layer nothing but its keys and values is kept, so XLA leaves its attention out of the encoding
passes: a model of one layer encodes without any, and what is measured is everything else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import resource
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mercury_jax import models
from mercury_jax.bench.overhead import endless
from mercury_jax.bench.timing import steady
from mercury_jax.config import ModelConfig, Plan, at_least
from mercury_jax.decode import rules
from mercury_jax.decode.decoder import Session, advance
from mercury_jax.decode.inputs import Prompt, check_seed
from mercury_jax.decode.request import PREFILL, Request, rows_of, start
from mercury_jax.decode.state import Rows
from mercury_jax.evaluate import card
from mercury_jax.kernels import attend
from mercury_jax.types import LM

SAMPLED = 32  # tokens decoded behind the prompt
LENGTHS = (8192, 32768, 131072)


def prompt(
    lm: LM, lengths: Sequence[int] = LENGTHS, *, layers: int = 1, repeats: int = 5, seed: int = 0
) -> Iterator[dict[str, Any]]:
    """A JSON-ready row for each length, in rising order, as it is measured. lm lends its vocabulary and noise.

    seconds: of encoding, a median. attention_seconds: of one layer's attention over the whole
    prompt, from a few passes spread over it. rest_seconds: without the attention of all layers but
    the last. growth: rest_seconds a token over those of the shortest prompt; 1 is linear, less where
    a fixed cost is shared by more tokens. cache_bytes: keys and values alive behind the prompt.
    peak_bytes: the most alive while encoding, beyond what was before (of the process, on a CPU).
    """
    at_least(1, layers=layers, repeats=repeats, length=min(lengths, default=0))
    lengths = sorted(dict.fromkeys(lengths))
    small = built(lm, lengths[-1] + SAMPLED, layers, check_seed(seed))
    first: dict[str, Any] = {}
    for length in lengths:
        row = _row(small, length, repeats, seed)
        first = first or row
        for name, each in (("growth", "rest_seconds"), ("cache_growth", "cache_bytes")):
            row[name] = row[each] / row["length"] / (first[each] / first["length"])
        yield row


def built(lm: LM, context: int, layers: int, seed: int) -> LM:
    """A small causal encoder with random weights and room for `context` positions; its answers never end."""
    config = ModelConfig(
        vocab=lm.model.config.vocab, width=64, layers=layers, heads=2, kv_heads=1, head_dim=32, ffn=176,
        pattern="causal_encoder", block=SAMPLED, context=context, mask=lm.model.config.mask,
        pad=lm.model.config.pad, eos=lm.model.config.eos,
    )  # fmt: skip
    model = models.build(config)
    return endless(
        dataclasses.replace(lm, model=model, params=model.init(jax.random.key(seed)), name="random")
    )


def _row(lm: LM, length: int, repeats: int, seed: int) -> dict[str, Any]:
    asked, config = _request(lm, length, seed), lm.model.config
    jax.block_until_ready(_encoded(lm, asked))  # compiles
    peak = _peak(lambda: _encoded(lm, asked))
    seconds = statistics.median(steady(lambda: _encoded(lm, asked))[1] for _ in range(repeats))
    job = _encoded(lm, asked)
    (said, passes), sampling = steady(lambda: _answered(lm, job))
    attention = _attention(config, job, length)
    rest = seconds - (config.layers - 1) * attention
    cache = sum(x.nbytes for x in jax.tree.leaves(job.state.cache))
    return {
        "length": length,
        "seconds": seconds,
        "tokens_per_second": length / seconds,
        "attention_seconds": attention,
        "layers_attending": config.layers - 1,
        "rest_seconds": rest,
        "microseconds_per_token": 1e6 * rest / length,
        "passes": -(-length // PREFILL),
        "slots": job.state.tokens.shape[1],
        "cache_bytes": cache,
        "cache_bytes_per_token": cache / length,
        "peak_bytes": peak,
        "peak_bytes_per_token": peak / length,
        "sampled": said,
        "sample_passes": passes,
        "sample_seconds": sampling,
        "layers": config.layers,
        "width": config.width,
        "hardware": card.hardware(),
        "seed": seed,
        "compared_with": "the shortest length of the same call",
    }


def _request(lm: LM, length: int, seed: int) -> Rows:
    ids = [i for i in range(lm.model.config.vocab) if i not in lm.corruption.forbidden]
    drawn = np.random.default_rng((seed, length)).choice(ids, length)
    return rows_of([Prompt(drawn.tolist(), False)], SAMPLED, seed)


def _encoded(lm: LM, asked: Rows) -> Session:
    job = start(lm, Request(sampler=rules.threshold(), plan=Plan(), rows=asked))
    jax.block_until_ready(job.state)
    return job


def _answered(lm: LM, job: Session) -> tuple[int, int]:
    """(tokens, passes) of the answer behind an encoded prompt, which stays as it is."""
    done, _, passes = advance(lm, dataclasses.replace(job, state=jax.tree.map(jnp.copy, job.state)), None)
    total, start = jax.device_get((done.state.end, done.state.prompt))
    return int(total[0] - start[0]), int(passes)


def _attention(config: ModelConfig, job: Session, length: int, samples: int = 4) -> float:
    """Seconds of one layer's attention over the whole prompt: a few of its passes, times all of them."""
    passes, wide = -(-length // PREFILL), PREFILL
    keys = jnp.zeros((1, job.state.tokens.shape[1], config.kv_heads, config.head_dim), config.dtype)
    queries = jnp.ones((1, wide, config.heads, config.head_dim), config.dtype)
    at = [int((i + 0.5) * passes / samples) * wide for i in range(samples)]
    run = lambda start: jax.block_until_ready(_attend(queries, keys, keys, jnp.asarray(start)))
    run(0)
    return passes * sum(steady(functools.partial(run, start))[1] for start in at) / samples


@jax.jit
def _attend(queries: jax.Array, keys: jax.Array, values: jax.Array, start: jax.Array) -> jax.Array:
    stop = start + jnp.arange(queries.shape[1]) + 1
    ranges = jnp.stack([jnp.zeros_like(stop), stop], axis=-1)[None, :, None]
    return attend(
        queries, keys, values, jnp.concatenate([ranges, jnp.zeros_like(ranges)], axis=2), cached=True
    )


def _peak(call: Callable[[], Any]) -> int:
    """Bytes by which memory was fuller than before at the worst moment of a call, its result included."""
    with contextlib.suppress(OSError):  # Linux: forget the high-water mark so far
        Path("/proc/self/clear_refs").write_text("5")
    before = _bytes("bytes_in_use")
    result = call()
    worst = _bytes("peak_bytes_in_use")
    del result
    return worst - before


def _bytes(name: str) -> int:
    """That figure of the device; on a CPU, which keeps none, the process's high-water mark."""
    stats = jax.devices()[0].memory_stats()
    if stats:
        return stats[name]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
