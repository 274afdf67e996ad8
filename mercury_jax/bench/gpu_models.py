"""Whole models on an accelerator, with random weights: what a pass of the machine under sample() takes."""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mercury_jax import sharding
from mercury_jax.bench import weightless
from mercury_jax.bench.ceilings import Ceilings
from mercury_jax.bench.overhead import endless
from mercury_jax.bench.timing import timed
from mercury_jax.config import Plan
from mercury_jax.decode import defaults, launch, rules
from mercury_jax.decode.ask import request
from mercury_jax.decode.prompts import Prompt
from mercury_jax.models.quantise import Scaled
from mercury_jax.types import LM

SHORT, LONG = 4, 20  # passes of the two runs whose difference is timed
DENOISING = 16  # passes of a canvas of 256 tokens, before the one that commits it
PER_FORWARD = (15, 20)  # tokens, at which throughput is told


class Running(NamedTuple):
    """What decodes: a model by name, `prefix` known tokens, `batch` rows of one canvas each."""

    name: str
    quantise: str | None = None
    prefix: int = 1024
    batch: int = 1


def decoding(most: Ceilings, asked: Running, turns: int = 5) -> dict[str, Any]:
    """A JSON-ready row: milliseconds of a pass of the machine that `sample()` runs, its rule and reading included."""
    found = weightless.source(asked.name)
    lm = weightless.lm(found, sharding.mesh(devices=jax.devices()[:1]), asked.quantise)
    lm = endless(dataclasses.replace(lm, params=filled(lm.params)))
    job = _job(lm, asked)
    for passes in (SHORT, LONG):
        _passes(lm, job, passes)
    pairs = [(_passes(lm, job, SHORT), _passes(lm, job, LONG)) for _ in range(turns)]
    each = [(b[0] - a[0]) / max(b[1] - a[1], 1) for a, b in pairs]
    seconds, bytes, flops = statistics.median(each), *load(lm, asked)
    canvas = lm.model.config.block * asked.batch
    row = {
        "experiment": "decoding", "model": asked.name, "quantise": asked.quantise, "prefix": asked.prefix,
        "batch": asked.batch, "canvas": lm.model.config.block, "passes": [a[1] for a in pairs[0]],
        "seconds_per_forward": seconds, "least_seconds": most.bound(bytes, flops),
        "share_of_bound": most.bound(bytes, flops) / seconds, "parameter_bytes": size(lm.params),
        "tokens_per_second": canvas / (seconds * (DENOISING + 1)),
    }  # fmt: skip
    row |= {f"tokens_per_second_at_{n}": n * asked.batch / seconds for n in PER_FORWARD}
    return row | {"peak_bytes": peak()}


def _job(lm: LM, asked: Running) -> launch.Job:
    """Rows in the middle of an answer; one token a step, so that no pass is saved."""
    c = lm.model.config
    ids = np.random.default_rng(0).integers(c.vocab // 4, c.vocab // 2, (asked.batch, asked.prefix)).tolist()
    wanted = request([Prompt(row, False) for row in ids], c.block, 0)
    rule = rules.confidence() if lm.corruption.mask is not None else defaults.sampler(lm)
    job = launch.prepare(lm, wanted, rule, Plan(block=c.block, steps=c.block))
    return launch.advance(lm, job, 1 + -(-asked.prefix // c.block))[0]


def _passes(lm: LM, job: launch.Job, passes: int) -> tuple[float, int]:
    """(seconds, passes made) of one run from the job's state."""
    own = jax.block_until_ready(launch.copied(job))
    (_, _, used), seconds = timed(lambda: jax.block_until_ready(launch.advance(lm, own, passes)))
    return seconds, int(used)


def load(lm: LM, asked: Running) -> tuple[float, float]:
    """(bytes that a pass must read, FLOP that it must do): every expert is touched, a token multiplies with few."""
    c = lm.model.config
    positions = asked.batch * c.block
    total = sum(math.prod(x.shape) for x in jax.tree.leaves(lm.params) if x.ndim > 1)
    e = c.experts
    idle = 0.0 if e is None else 3.0 * c.width * e.width * (e.count - e.active) * c.layers
    cache = size(jax.eval_shape(lambda: lm.model.empty_cache(asked.batch, asked.prefix + c.block)))
    seen = 4.0 * positions * (asked.prefix + c.block) * c.heads * c.head_dim * c.layers
    return float(size(lm.params) + cache), 2.0 * (total - idle) * positions + seen


def size(tree: Any) -> int:
    """Bytes of arrays or shapes."""
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))


def peak() -> int | None:
    """Bytes that the first device held at most so far, where it tells."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def filled(like: Any, seed: int = 0) -> Any:
    """Random numbers in the shapes of parameters, of a size at which activations stay numbers."""
    leaves, tree = jax.tree.flatten(like, is_leaf=lambda x: isinstance(x, Scaled))
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return jax.tree.unflatten(tree, [_leaf(x, key) for x, key in zip(leaves, keys, strict=True)])


def _leaf(x: Any, key: Any) -> Any:
    if isinstance(x, Scaled):
        few = jax.random.randint(key, x.values.shape, -127, 128, jnp.int8)
        return x._replace(
            values=few.astype(x.values.dtype), scale=jnp.full(x.scale.shape, 1e-4, x.scale.dtype)
        )
    if len(x.shape) < 2:
        return jnp.ones(x.shape, x.dtype)
    return jax.jit(lambda key: 0.02 * jax.random.normal(key, x.shape, x.dtype))(key)
