"""Prefill of long prompts: seconds and memory, and whether they grow in proportion to the length.

Attention grows with the square of the length in any case, so it is timed alone and subtracted. Of the last layer only
the keys and values are kept, so XLA leaves its attention out of prefill: a model of one layer prefills without any,
and everything else is measured. Run with `python -m benchmarks.prompt`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import resource
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.script import Ints, run_script
from mercury_jax import models
from mercury_jax.bench.timing import endless, steady
from mercury_jax.cli import arguments, show
from mercury_jax.cli.arguments import Flag, Int, option
from mercury_jax.compilation import hardware
from mercury_jax.config import ModelConfig, Plan, at_least
from mercury_jax.decode import rules
from mercury_jax.decode.inputs import Prompt, check_seed
from mercury_jax.decode.request import Request, rows_of, start
from mercury_jax.decode.session import Session, advance
from mercury_jax.decode.state import PREFILL, Rows
from mercury_jax.ops import attend
from mercury_jax.ops.attention.inputs import AttentionResult
from mercury_jax.types import LM

SAMPLED = 32  # tokens decoded after the prompt
LENGTHS = (8192, 32768, 131072)


@dataclass(frozen=True, kw_only=True)
class PromptBenchmark:
    """Measure the time and memory that long prompts take.

    examples:
      python -m benchmarks.prompt
      python -m benchmarks.prompt --lengths 8192 32768 --json

    Prefills random prompts with a small model of random weights, then decodes 32
    tokens after each. Attention grows with the square of the length, so it is
    timed alone (`attention_seconds`, one layer, from a few of its passes) and
    left out of `rest_seconds`. Of the last layer only keys and values are kept
    and its attention is never computed: with one layer, the default, there is
    none to subtract. `growth` compares the time per token with that of the
    shortest prompt: 1 is linear, more is worse. `cache_growth` does so for
    memory.
    """

    lengths: Ints = (8192, 32768, 131072)
    """Tokens of the prompts."""
    layers: Int = 1
    """Layers of the model."""
    repeats: Int = 5
    """Timed prefills."""
    seed: Int = 0
    """Draws weights and prompts."""
    out: Annotated[str | None, option("FILE.jsonl")] = None
    """Write the records, too."""
    json: Flag = False
    """Print one JSON object for each record."""


def run(argv: Sequence[str]) -> int:
    """Runs the benchmark; returns its exit code."""
    args = arguments.read(PromptBenchmark, argv, "python -m benchmarks.prompt")
    show.check_writable("--out", args.out)
    found = measure(show.load(None), args.lengths, layers=args.layers, repeats=args.repeats, seed=args.seed)
    show.report(found, args.out, None if args.json else line)
    return 0


def line(row: Mapping[str, Any]) -> str:
    """A record for people."""
    return (
        f"{row['length']:,} tokens: {row['seconds']:.3f} s, {row['microseconds_per_token']:.2f} us per token without "
        f"attention ({row['growth']:.2f} of linear), {row['attention_seconds']:.1f} s for a layer's attention; "
        f"cache {row['cache_bytes'] / 2**20:.1f} MiB ({row['cache_bytes_per_token']:.0f} bytes per token), "
        f"{row['sampled']} tokens after it in {row['sample_passes']} passes and {row['sample_seconds']:.2f} s"
    )


def measure(
    lm: LM, lengths: Sequence[int] = LENGTHS, *, layers: int = 1, repeats: int = 5, seed: int = 0
) -> Iterator[dict[str, Any]]:
    """Measures prompts of several lengths with a small model of random weights.

    Args:
        lm: Its vocabulary and noise are used.
        lengths: Tokens of the prompts.
        layers: Layers of the model.
        repeats: Timed prefills.
        seed: Draws weights and prompts.

    Yields:
        A record for each length in rising order: `seconds` of prefill, a median; `attention_seconds` of one layer's
        attention over the whole prompt, from a few passes spread over it; `rest_seconds` without the attention of all
        layers but the last; `growth`, rest_seconds per token over those of the shortest prompt (1 is linear, less
        where a fixed cost is shared by more tokens); `cache_bytes` of the KV cache; `peak_bytes`, the most memory
        during prefill beyond what was used before (of the process, on a CPU).
    """
    at_least(1, layers=layers, repeats=repeats, length=min(lengths, default=0))
    lengths = sorted(dict.fromkeys(lengths))
    small = small_model(lm, lengths[-1] + SAMPLED, layers, check_seed(seed))
    first: dict[str, Any] = {}
    for length in lengths:
        row = _measure(small, length, repeats, seed)
        first = first or row
        for name, each in (("growth", "rest_seconds"), ("cache_growth", "cache_bytes")):
            row[name] = row[each] / row["length"] / (first[each] / first["length"])
        yield row


def small_model(lm: LM, context: int, layers: int, seed: int) -> LM:
    """A small causal encoder with random weights and a context of `context` positions; its answers never end.

    Args:
        lm: Its vocabulary and noise are used.
        context: Positions of a row.
        layers: Layers.
        seed: Draws the weights.

    Returns:
        The model.
    """
    config = ModelConfig(
        vocab=lm.model.config.vocab, width=64, layers=layers, heads=2, kv_heads=1, head_dim=32, ffn=176,
        pattern="causal_encoder", block=SAMPLED, context=context, mask=lm.model.config.mask,
        pad=lm.model.config.pad, eos=lm.model.config.eos,
    )  # fmt: skip
    model = models.build(config)
    return endless(
        dataclasses.replace(lm, model=model, params=model.init(jax.random.key(seed)), name="random")
    )


def _measure(lm: LM, length: int, repeats: int, seed: int) -> dict[str, Any]:
    asked, config = _request(lm, length, seed), lm.model.config
    jax.block_until_ready(_prefill(lm, asked))  # compiles
    peak = _peak(lambda: _prefill(lm, asked))
    seconds = statistics.median(steady(lambda: _prefill(lm, asked))[1] for _ in range(repeats))
    session = _prefill(lm, asked)
    (sampled, passes), sampling = steady(lambda: _decode(lm, session))
    attention = _attention(config, session, length)
    rest = seconds - (config.layers - 1) * attention
    cache = sum(x.nbytes for x in jax.tree.leaves(session.state.cache))
    return {
        "length": length,
        "seconds": seconds,
        "tokens_per_second": length / seconds,
        "attention_seconds": attention,
        "layers_attending": config.layers - 1,
        "rest_seconds": rest,
        "microseconds_per_token": 1e6 * rest / length,
        "passes": -(-length // PREFILL),
        "slots": session.state.tokens.shape[1],
        "cache_bytes": cache,
        "cache_bytes_per_token": cache / length,
        "peak_bytes": peak,
        "peak_bytes_per_token": peak / length,
        "sampled": sampled,
        "sample_passes": passes,
        "sample_seconds": sampling,
        "layers": config.layers,
        "width": config.width,
        "hardware": hardware(),
        "seed": seed,
        "compared_with": "the shortest length of the same call",
    }


def _request(lm: LM, length: int, seed: int) -> Rows:
    ids = [i for i in range(lm.model.config.vocab) if i not in lm.corruption.forbidden]
    drawn = np.random.default_rng((seed, length)).choice(ids, length)
    return rows_of([Prompt(drawn.tolist(), False)], SAMPLED, seed)


def _prefill(lm: LM, asked: Rows) -> Session:
    session = start(lm, Request(sampler=rules.threshold(), plan=Plan(), rows=asked))
    jax.block_until_ready(session.state)
    return session


def _decode(lm: LM, session: Session) -> tuple[int, int]:
    """(tokens, passes) of an answer after a prompt whose KV cache exists; the session is copied, not changed."""
    copied = dataclasses.replace(session, state=jax.tree.map(jnp.copy, session.state))
    done, _, passes = advance(lm, copied, None)
    end, first = jax.device_get((done.state.limits.end, done.state.prompt))
    return int(end[0] - first[0]), int(passes)


def _attention(config: ModelConfig, session: Session, length: int, samples: int = 4) -> float:
    """Seconds of one layer's attention over the whole prompt: the mean of a few passes, times all passes."""
    passes, wide = -(-length // PREFILL), PREFILL
    keys = jnp.zeros((1, session.state.tokens.shape[1], config.kv_heads, config.head_dim), config.dtype)
    queries = jnp.ones((1, wide, config.heads, config.head_dim), config.dtype)
    at = [int((i + 0.5) * passes / samples) * wide for i in range(samples)]
    run = lambda start: jax.block_until_ready(_attend(queries, keys, keys, jnp.asarray(start)))
    run(0)
    return passes * sum(steady(functools.partial(run, start))[1] for start in at) / samples


@jax.jit
def _attend(queries: jax.Array, keys: jax.Array, values: jax.Array, start: jax.Array) -> AttentionResult:
    stop = start + jnp.arange(queries.shape[1]) + 1
    ranges = jnp.stack([jnp.zeros_like(stop), stop], axis=-1)[None, :, None]
    ranges = jnp.concatenate([ranges, jnp.zeros_like(ranges)], axis=2)
    out = attend(queries, keys, values, ranges, cached=True)
    assert isinstance(out, jax.Array)
    return out


def _peak(call: Callable[[], Any]) -> int:
    """The most bytes that a call uses, its result included, beyond what was used before."""
    with contextlib.suppress(OSError):  # Linux: reset the high-water mark of the process
        Path("/proc/self/clear_refs").write_text("5")
    before = _bytes("bytes_in_use")
    result = call()
    worst = _bytes("peak_bytes_in_use")
    del result
    return worst - before


def _bytes(name: str) -> int:
    """A memory statistic of the device; on a CPU, which has none, the high-water mark of the process."""
    stats = jax.devices()[0].memory_stats()
    if stats:
        return stats[name]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    sys.exit(run_script(run))
