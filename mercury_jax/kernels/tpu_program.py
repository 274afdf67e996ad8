"""What a program of the TPU kernel does: scores, softmax and products of its queries, a tile of keys a step."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp

FLOOR = -1e30  # finite, so that rows without keys have no inf - inf


class Plan(NamedTuple):
    """What a program is compiled for."""

    rows: int  # of a tile of queries of one key head
    keys: int  # of a tile
    tiles: int  # of queries
    groups: int
    width: int
    slots: int
    ranges: int
    scale: float
    softcap: float | None
    rounded: bool  # int8 keys and values
    residual: bool
    memory: int  # bytes of VMEM that a program may take


class Running(NamedTuple):
    """Softmax so far: sum of weight * value, the largest score in units of log 2, sum of weights."""

    sum: Any
    most: Any
    total: Any


class Mask(NamedTuple):
    """What to hide of a tile of keys; by default nothing, where every row sees all of it."""

    begin: Any = None  # its first key
    edges: Any = None  # of each row: start, end, start, end, ..
    hulls: Any = ()  # of each range the lowest start and the highest end

    def hide(self, scores: Any) -> Any:
        """Scores of keys that a row does not see become -inf."""
        if self.edges is None:
            return scores
        key = self.begin + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        edge = [self.edges[:, e : e + 1] for e in range(self.edges.shape[1])]
        see = [(key >= start) & (key < end) for start, end in zip(edge[::2], edge[1::2], strict=True)]
        return jnp.where(functools.reduce(jnp.logical_or, see), scores, -jnp.inf)

    def clear(self, x: Any, axis: int) -> Any:
        """Zeros for the values of keys in no range of any row: a weight of 0 does not undo a NaN."""
        if self.edges is None:
            return x
        key = self.begin + jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
        seen = [(key >= low) & (key < high) for low, high in self.hulls]
        return jnp.where(functools.reduce(jnp.logical_or, seen), x, 0)


def program(p: Plan, bounds: Any, q: Any, edges: Any, *refs: Any) -> None:
    """One step of one tile of queries: its softmax goes on over one tile of keys.

    refs: keys, values, of int8 ones both scales; the output, where asked for its log-sum-exp; the scratch.
    """
    inputs = 4 if p.rounded else 2
    sources, outs = refs[:inputs], refs[inputs : inputs + 1 + p.residual]
    *running, k, v = refs[inputs + len(outs) :]
    run, step = Running(*running), pl.program_id(2)
    at = (pl.program_id(0) * p.tiles + pl.program_id(1)) * (4 + 2 * p.ranges)
    first, last, low, high = (bounds[at + i] for i in range(4))
    begin = (first + step) * p.keys
    whole = (begin >= low) & (begin + p.keys <= high)

    @pl.when(step == 0)
    def _() -> None:
        for ref, value in zip(run, (0.0, FLOOR, 0.0), strict=True):
            ref[...] = jnp.full_like(ref, value)

    @pl.when(first + step < last)
    def _() -> None:
        for ref, source in zip((k, v), sources, strict=False):
            ref[...] = jnp.transpose(source[...], (1, 0, 2))
        each = functools.partial(_each, p, run, q, (k, v, *sources[2:]))
        pl.when(whole)(functools.partial(each, Mask()))
        hulls = [(bounds[at + 4 + 2 * r], bounds[at + 5 + 2 * r]) for r in range(p.ranges)]
        pl.when(~whole)(functools.partial(each, Mask(begin, edges, hulls)))

    pl.when(step == pl.num_programs(2) - 1)(functools.partial(_finish, run, *outs))


def _each(p: Plan, run: Running, q: Any, sources: tuple[Any, ...], mask: Mask) -> None:
    """All key heads, one behind the other."""

    def one(group: Any, _: None) -> None:
        _join(p, Running(*(x.at[group] for x in run)), mask, q[group], *(x[group] for x in sources))

    jax.lax.fori_loop(0, p.groups, one, None)


def _join(p: Plan, run: Running, mask: Mask, q: Any, k: Any, v: Any, *scales: Any) -> None:
    """Add a tile of keys to the softmax. int8 ones are whole numbers, scaled behind the products."""
    scores = _product(q, k.astype(q.dtype), 1)
    scores = scores * scales[0] if scales else scores
    unit = p.scale * math.log2(math.e)
    if p.softcap is not None:
        scores, unit = jnp.tanh(scores * (p.scale / p.softcap)), p.softcap * math.log2(math.e)
    scores, before = mask.hide(scores * unit), run.most[...]
    most = jnp.maximum(before, scores.max(axis=1, keepdims=True))
    weights, shrink = jnp.exp2(scores - most), jnp.exp2(before - most)
    run.most[...] = most
    run.total[...] = run.total[...] * shrink + weights.sum(axis=1, keepdims=True)
    weights = weights * mask.clear(scales[1], 1) if scales else weights
    v = v if scales else mask.clear(v, 0)  # int8 has no NaN
    run.sum[...] = run.sum[...] * shrink + _product(weights.astype(q.dtype), v.astype(q.dtype), 0)


def _product(a: Any, b: Any, axis: int) -> Any:
    """In fp32; of the second matrix, `axis` is summed over."""
    return jax.lax.dot_general(a, b, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)


def _finish(run: Running, out: Any, lse: Any = None) -> None:
    some = run.total[...] > 0
    safe = jnp.where(some, run.total[...], 1.0)
    out[...] = (run.sum[...] / safe).astype(out.dtype)
    if lse is not None:
        lse[...] = jnp.where(some, run.most[...] * math.log(2) + jnp.log(safe), -jnp.inf)
