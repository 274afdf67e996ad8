"""Rules for masked diffusion that settle as many masks in a step as are sure enough."""

from __future__ import annotations

from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from mercury_jax.decode.parts import Knob, Memory, rule, settle
from mercury_jax.decode.ranges import Above, AtLeast, Between
from mercury_jax.decode.rules.masked import best, quota, rank
from mercury_jax.types import Key, Proposal, View


@rule(fits=("masked",), whole=False)
def factor(
    key: Key, view: View, memory: Memory, *, f: Annotated[Knob, Above(0)] = 1.0
) -> tuple[Proposal, Memory]:
    """The n most confident masks for the largest n with (n + 1) (1 - c_(n)) <= f, and at least one.

    Fast-dLLM's factor-based parallel decoding (arXiv 2505.22618, section 3.3): the more are settled at
    once, the surer the last of them must be. The reference (`get_transfer_index_dynamic`) also takes
    the least sure of all where it alone fails the test; here it waits.
    """
    del key
    c = view.reading.p_sample
    place = rank(c, view.masked)
    # c falls and the bar rises with the place, so the places that pass are the first n.
    passes = c >= 1.0 - f / (place + 2)
    return settle(view, view.masked & (passes | (place == 0))), memory


@rule(fits=("masked",), whole=False)
def scheduled(
    key: Key, view: View, memory: Memory, *, p: Annotated[Knob, Between(0, 1)] = 0.95
) -> tuple[Proposal, Memory]:
    """Every mask above `p`; where these are fewer than the fixed schedule asks for, its number of the best.

    LLaDA2.0's decoding (`LLaDA2Sampler` in dllm): never slower than its schedule.
    """
    del key
    c, due = view.reading.p_sample, quota(view)
    sure = view.masked & (c > p)
    return settle(view, jnp.where(sure.sum() >= due, sure, best(c, view.masked, due))), memory


@rule(fits=("masked",), whole=False)
def local_leap(
    key: Key,
    view: View,
    memory: Memory,
    *,
    p: Annotated[Knob, Between(0, 1)] = 0.9,
    relaxed: Annotated[Knob, Between(0, 1)] = 0.75,
    radius: Annotated[Knob, AtLeast(0, whole=True)] = 4,
) -> tuple[Proposal, Memory]:
    """Every mask of confidence `p` is an anchor; within `radius` of one, `relaxed` is enough.

    LocalLeap (arXiv 2510.07081; its `get_transfer_index`). At least the best mask is settled.
    """
    del key
    c = view.reading.p_sample
    anchor = view.masked & (c >= p)
    near = view.masked & (c >= relaxed) & (_distance(anchor) <= radius)
    return settle(view, anchor | near | best(c, view.masked, jnp.asarray(1))), memory


@rule(fits=("masked",), whole=False)
def hierarchical(
    key: Key,
    view: View,
    memory: Memory,
    *,
    p: Annotated[Knob, Between(0, 1)] = 0.9,
    low: Annotated[Knob, Between(0, 1)] = 0.4,
) -> tuple[Proposal, Memory]:
    """The best of each run of adjacent masks if above `low`, every mask above `p`, and the best of all.

    dInfer's `HierarchyDecoder` (arXiv 2510.08666): what is settled in the middle of a run splits it,
    so that tokens decoded in the same step stand apart and depend less on each other.
    """
    del key
    c = view.reading.p_sample
    run = _runs(view.masked)
    top = jax.ops.segment_max(jnp.where(view.masked, c, -1.0), run, num_segments=c.shape[0])[run]
    leads = view.masked & (c == top) & (c > low)
    sure = view.masked & (c > p)
    return settle(view, leads | sure | best(c, view.masked, jnp.asarray(1))), memory


def _distance(anchor: Bool[Array, "L"]) -> Int[Array, "L"]:
    """How far the nearest anchor is; more than any radius where there is none."""
    length = anchor.shape[0]
    at, far = jnp.arange(length), 2 * length
    before = jax.lax.cummax(jnp.where(anchor, at, -far))
    behind = jax.lax.cummin(jnp.where(anchor, at, 2 * far), reverse=True)
    return jnp.minimum(at - before, behind - at)


def _runs(masked: Bool[Array, "L"]) -> Int[Array, "L"]:
    """The index of each mask's run of adjacent masks; between runs, that of the run before (0 before all)."""
    starts = masked & ~jnp.concatenate([jnp.zeros(1, bool), masked[:-1]])
    return jnp.maximum(jnp.cumsum(starts) - 1, 0)
