"""Attention on Hopper with a gradient: the backend of `attend` for training.

The forward pass is the kernel of `attention`, with a list of the key tiles that each program visits, because a
training row holds several documents, each twice (BD3-LM, arXiv 2503.09573): between the two ranges of a canvas token
lie many keys that it does not attend to. The backward pass is `gradient`; for head size 256, whose sums of dk and dv
do not fit into registers together, it is blockwise attention's in plain XLA, from the same log-sum-exp.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from mercury_jax.kernels import chunked
from mercury_jax.kernels.attention_inputs import AttentionCall, AttentionResult, Int8Vectors
from mercury_jax.kernels.hopper import attention, gradient
from mercury_jax.types import Device

WIDTHS = (64, 128, 256)  # head sizes


class TrainingConfig(NamedTuple):
    """Static arguments of attention with a gradient."""

    scale: float
    softcap: float | None
    device: Device | None


def refuses(call: AttentionCall) -> str | None:
    """Gives the reason why the kernels do not support a call with a gradient."""
    if isinstance(call.k, Int8Vectors) or isinstance(call.v, Int8Vectors):
        return "rounded keys have no gradient"
    if (width := call.q.shape[-1]) not in WIDTHS:
        return f"head size {width} is not one of {', '.join(map(str, WIDTHS))}, which have a gradient"
    if call.q.dtype == jnp.float16:
        return "gradients in float16 overflow; bfloat16 has a gradient"
    if (ranges := call.ranges.shape[2]) > 3:
        return f"{ranges} ranges a row have no gradient; registers suffice for 3"
    if width == 128 and call.softcap is not None:
        return f"head size {width} with a softcap has no gradient; its derivative would spill registers"
    return attention.refuses(call)


def run(call: AttentionCall) -> AttentionResult:
    """Computes attention by the Hopper kernels.

    Outputs and log-sum-exp are differentiable in q, k and v, in reverse mode, and only once (no second derivative).
    All keys and values must be finite, those that no query attends to as well.
    """
    found: Any = _attend(
        call.q, call.k, call.v, call.ranges, TrainingConfig(call.scale, call.softcap, call.device)
    )
    return found if call.residual else found[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q: Array, k: Array, v: Array, ranges: Array, config: TrainingConfig) -> tuple[Array, Array]:
    """Returns (out [B, T, H, K], log-sum-exp [B, T, H])."""
    return _values(q, k, v, ranges, config)


def _forward(
    q: Array, k: Array, v: Array, ranges: Array, config: TrainingConfig
) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    found = _values(q, k, v, ranges, config)
    return found, (q, k, v, ranges, *found)  # what the backward pass needs: the arguments and the results


def _backward(
    config: TrainingConfig, saved: tuple[Array, ...], cotangents: tuple[Array, Array]
) -> tuple[Any, ...]:
    return *_gradients(*saved, *cotangents, config), None


_attend.defvjp(_forward, _backward)


@functools.partial(jax.jit, static_argnames="config")  # all layers share one trace
def _values(q: Array, k: Array, v: Array, ranges: Array, config: TrainingConfig) -> Any:
    return attention.run(_call(q, k, v, ranges, config), listed=True)


@functools.partial(jax.jit, static_argnames="config")
def _gradients(
    q: Array, k: Array, v: Array, ranges: Array, out: Array, lse: Array, d_out: Array, d_lse: Array,
    config: TrainingConfig,
) -> tuple[Array, Array, Array]:  # fmt: skip
    if q.shape[-1] in gradient.KEYS:
        return gradient.run(_call(q, k, v, ranges, config), out, lse, d_out, d_lse)
    plain = chunked.BlockwiseConfig(config.scale, config.softcap)
    return chunked.gradients(q, k, v, ranges, out, lse, d_out, d_lse, plain)


def _call(q: Array, k: Array, v: Array, ranges: Array, config: TrainingConfig) -> AttentionCall:
    return AttentionCall(q, k, v, ranges, config.scale, config.softcap, residual=True, device=config.device)
