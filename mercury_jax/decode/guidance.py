"""Classifier-free guidance: a model and the same model without its prompt, as one `Model`.

    logits = l_c + w (l_c - l_u)

l_c reads the prompt; l_u reads a negative prompt in its place or, where that is empty, the answer alone. This is
l_u + (w + 1) (l_c - l_u), as masked diffusion is guided without training for it (arXiv 2410.18514; LLaDA,
arXiv 2502.09992), written so that w = 0 is plain decoding bit for bit. LLaDA's other branch reads a mask in place of
each token of the prompt: `negative="masked"` of `mj.sample`. A pass costs twice as much.

The unconditional branch's sequence is the negative prompt, then what follows the prompt, moved by `shift` positions.
Negative prompts are encoded once, by `start`. In later passes this branch feeds the tokens after the prompt, and its
hidden states are gathered back to the positions of the conditional branch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from mercury_jax.config import refuse
from mercury_jax.types import Cache, Model, Params, Pass

PREFILL = 256  # tokens of one pass over the negative prompts


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["conditional", "unconditional", "weight", "prompt_length", "shift", "negative"],
    meta_fields=["extra"],
)
@dataclasses.dataclass(frozen=True)
class GuidedCache:
    """The caches of both branches, and what places the unconditional one; every leaf has the batch axis first."""

    conditional: Cache
    unconditional: Cache
    weight: Any  # float [B]
    prompt_length: Any  # int [B]
    shift: Any  # int [B], length of the negative prompt minus that of the prompt
    negative: Any  # int [B, N], ids of the negative prompts
    extra: int = 0  # by how many tokens the unconditional pass is wider, where a pass holds the prompt itself


class GuidedHidden(NamedTuple):
    """Hidden states of both branches, aligned with the canvas; every leaf is [B, T, ...]."""

    conditional: Any
    unconditional: Any
    weight: Float[Array, "B T 1"]


class UnconditionalPass(NamedTuple):
    """The tokens of the unconditional branch's pass, and how they correspond to those of the conditional one."""

    tokens: Int[Array, "B W"]
    source: Int[Array, "B W"]  # index in the conditional pass, -1 for the negative prompt
    start: Int[Array, "B"]
    used: Int[Array, "B"]
    index: Int[Array, "B T"]  # where the conditional pass's tokens are; meaningless inside of the prompt


@functools.cache
def guided(model: Model) -> Model:
    """Returns the model with guidance; equal models give the same one.

    `apply`, the pass without a cache, is the plain model's. A cache from `empty_cache` guides nothing: its weight is 0.

    Args:
        model: The plain model.
    """
    return model._replace(
        forward=functools.partial(_forward, model),
        head=functools.partial(_guided_logits, model.head),
        head_chunk=None if model.head_chunk is None else functools.partial(_guided_logits, model.head_chunk),
        empty_cache=functools.partial(_empty, model),
    )


def start(
    model: Model,
    params: Params,
    batch: int,
    slots: int,
    prompts: Sequence[int],
    negatives: Sequence[Sequence[int] | None],
    weights: float | Sequence[float] | np.ndarray,
    room: int | None = None,
) -> GuidedCache:
    """Makes the cache of a guided batch, with its negative prompts encoded.

    Args:
        model: The plain model.
        params: Of the model.
        batch: B; rows are added up to it, which guide nothing.
        slots: S of the conditional cache.
        prompts: The length of each row's prompt.
        negatives: Ids, one list per row; empty or None for no prompt at all.
        weights: w, one number or one per row.
        room: Tokens kept for a negative prompt (None: what these need). Equal rooms give equal shapes, which a row
            must have to replace another.

    Returns:
        A cache for `guided(model)`.

    Raises:
        ValueError: Names the negative prompt or weight that does not fit.
    """
    rows, block = len(prompts), model.config.block if model.config.pattern == "block_causal" else 1
    w = np.asarray(weights, float)
    if w.shape not in ((), (rows,)) or not np.isfinite(w).all():
        raise refuse("guidance weight", weights, f"a finite number, or one for each of the {rows} rows")
    texts = _negative_ids(model, prompts, negatives, room, block)
    shift = np.array([len(ids) - prompt for ids, prompt in zip(texts, prompts, strict=True)])
    if room is None:  # powers of two, and 0: few shapes
        power = lambda n: 1 << (n - 1).bit_length() if n else 0
        size, more = power(max(map(len, texts))), power(max(0, int(shift.max())))
    else:
        size = more = room + block - 1
    negative = np.zeros((batch, max(size, 1)), np.int32)
    for row, ids in zip(negative, texts, strict=False):
        row[: len(ids)] = ids
    holds_prompt = model.config.pattern == "bidirectional"  # a pass does
    wide = lambda x, kind: jnp.asarray(np.pad(np.asarray(x, kind), (0, batch - rows)))
    cache = GuidedCache(
        conditional=model.empty_cache(batch, slots),
        unconditional=model.empty_cache(batch, slots + more),
        weight=wide(np.broadcast_to(w, (rows,)), np.float64),
        prompt_length=wide(prompts, np.int32),
        shift=wide(shift, np.int32),
        negative=jnp.asarray(negative),
        extra=more if holds_prompt else 0,
    )
    if not np.any(np.asarray(model.encodable(jnp.asarray([len(ids) for ids in texts])))):
        return cache
    # Whole blocks: a block-causal token must find the keys of its own block in the same pass.
    width = -(-min(PREFILL, negative.shape[1]) // block) * block
    return _encode_negatives(model, width, params, cache)


def resized(
    model: Model,
    before: GuidedCache,
    batch: int,
    slots: int,
    take: Callable[[Array], Array],
    fit: Callable[[Cache, Cache], Cache],
) -> GuidedCache:
    """Makes the cache that continues an earlier one in another number of slots, with the keys of both branches.

    The other branch goes on after what it has read: its negative prompt, the answer, and then what both branches read.

    Args:
        model: The plain model.
        before: The earlier cache.
        batch: B of the new cache.
        slots: S of the new conditional cache.
        take: Selects the rows that are continued from an array with the batch axis first.
        fit: Writes these rows of an earlier cache into a new one.

    Returns:
        A cache for `guided(model)`.
    """
    size = lambda cache: jax.tree.leaves(cache)[0].shape[1]
    more = size(before.unconditional) - size(before.conditional)
    return GuidedCache(
        conditional=fit(model.empty_cache(batch, slots), before.conditional),
        unconditional=fit(model.empty_cache(batch, slots + more), before.unconditional),
        weight=take(before.weight),
        prompt_length=take(before.prompt_length),
        shift=take(before.shift),
        negative=take(before.negative),
        extra=before.extra,
    )


def _negative_ids(
    model: Model, prompts: Sequence[int], negatives: Sequence[Any], room: int | None, block: int
) -> list[list[int]]:
    """Checked negative prompts; for block-causal models padded on the left by masks.

    Their blocks are at multiples of the block, so the answer must keep its place in its block.
    """
    if len(negatives) != len(prompts):
        raise refuse("negative", f"a list of {len(negatives)}", f"one for each of the {len(prompts)} prompts")
    texts = []
    for i, (prompt, given) in enumerate(zip(prompts, negatives, strict=True)):
        ids = [int(x) for x in ([] if given is None else given)]
        for x in ids:
            if not 0 <= x < model.config.vocab:
                raise refuse(f"negative[{i}] id", x, f"0..{model.config.vocab - 1}")
        if room is not None and len(ids) > room:
            raise refuse(f"negative[{i}]", f"{len(ids)} tokens", f"at most {room}")
        texts.append([model.config.mask or 0] * ((int(prompt) - len(ids)) % block) + ids)
    return texts


def _empty(model: Model, batch: int, slots: int) -> GuidedCache:
    zeros = jnp.zeros((batch,), jnp.int32)
    caches = model.empty_cache(batch, slots), model.empty_cache(batch, slots)
    return GuidedCache(*caches, jnp.zeros((batch,)), zeros, zeros, jnp.zeros((batch, 1), jnp.int32))


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _encode_negatives(model: Model, width: int, params: Params, cache: GuidedCache) -> GuidedCache:
    """Encodes the negative prompts, as far as the model's pattern encodes text, `width` tokens per pass."""
    # Rows have negative prompts of several lengths: a row that is done uses 0 tokens of the remaining passes.
    ready = model.encodable(cache.prompt_length + cache.shift)
    everyone = jnp.ones(ready.shape, bool)
    clean = jnp.zeros(ready.shape) if model.config.timed else None

    def body(carry: tuple[Array, Cache]) -> tuple[Array, Cache]:
        done, other = carry
        used = jnp.minimum(ready - done, width)
        at = jnp.minimum(done[:, None] + jnp.arange(width), cache.negative.shape[1] - 1)
        tokens = jnp.take_along_axis(cache.negative, at, axis=1)
        _, other = model.forward(params, Pass(tokens, other, done, used, done + used, everyone, time=clean))
        return done + used, other

    pending = lambda carry: jnp.any(carry[0] < ready)
    _, other = jax.lax.while_loop(pending, body, (jnp.zeros_like(ready), cache.unconditional))
    return dataclasses.replace(cache, unconditional=other)


def _forward(model: Model, params: Params, given: Pass) -> tuple[GuidedHidden, GuidedCache]:
    """Both branches' passes; the unconditional hidden states are gathered to the conditional positions."""
    cache: GuidedCache = given.cache
    hidden, conditional = model.forward(params, given._replace(cache=cache.conditional))
    other = _unconditional_pass(model, cache, given)
    index, masks = other.index, given.leave_one_out
    if masks is not None:  # they stand at the same tokens, and their hidden states follow those of all tokens
        columns = jnp.take_along_axis(other.index, jnp.maximum(masks.columns, 0), axis=1)
        masks = masks._replace(columns=jnp.where(masks.columns < 0, -1, columns))
        behind = other.tokens.shape[1] + jnp.arange(columns.shape[1], dtype=index.dtype)
        index = jnp.concatenate([index, jnp.broadcast_to(behind, columns.shape)], axis=1)
    other_hidden, unconditional = model.forward(params, given._replace(
        tokens=other.tokens, cache=cache.unconditional, start=other.start, used=other.used,
        end=given.end + cache.shift, self_cond=jax.tree.map(lambda x: _gather(x, other.source), given.self_cond),
        leave_one_out=masks,
    ))  # fmt: skip
    other_hidden = jax.tree.map(lambda x: _gather(x, index), other_hidden)
    weight = jnp.broadcast_to(cache.weight[:, None, None], (*index.shape, 1))
    cache = dataclasses.replace(cache, conditional=conditional, unconditional=unconditional)
    return GuidedHidden(hidden, other_hidden, weight), cache


def _unconditional_pass(model: Model, cache: GuidedCache, given: Pass) -> UnconditionalPass:
    """Lays out the unconditional branch's pass.

    Its tokens at positions below `length` come from the negative prompt, the rest from the conditional pass. `start`
    already wrote the first `encoded` tokens to the cache: a pass that reaches down to the prompt begins after them
    (at 0 where nothing is ever encoded).
    """
    tokens, reach = given.tokens, given.tokens.shape[1]
    # The conditional pass feeds positions start .. start + T. Moved by `shift`, these are the positions of the same
    # tokens in the unconditional sequence; what precedes them is the negative prompt.
    width = reach + cache.extra
    length = cache.prompt_length + cache.shift
    encoded = model.encodable(length)
    moved = given.start + cache.shift
    behind_prompt = given.start > model.encodable(cache.prompt_length)
    begin = jnp.where(behind_prompt, jnp.maximum(moved, encoded), encoded)
    used = jnp.where(given.used > 0, jnp.clip(moved + given.used - begin, 0, width), 0)
    at = begin[:, None] + jnp.arange(width, dtype=jnp.int32)  # [B, W] positions in the unconditional sequence
    # Where each position's token comes from: the negative prompt, or column `source` of the conditional pass.
    from_negative = at < length[:, None]
    source = at - moved[:, None]
    own = jnp.take_along_axis(tokens, jnp.clip(source, 0, reach - 1), axis=1)
    negative = jnp.take_along_axis(cache.negative, jnp.minimum(at, cache.negative.shape[1] - 1), axis=1)
    # And back: the column of this pass that holds each token of the conditional one.
    index = (moved - begin)[:, None] + jnp.arange(reach, dtype=jnp.int32)
    return UnconditionalPass(
        tokens=jnp.where(from_negative, negative, own),
        source=jnp.where(from_negative | (source >= reach), -1, source),
        start=begin,
        used=used,
        index=jnp.clip(index, 0, width - 1),
    )


def _gather(x: Array, index: Int[Array, "B W"]) -> Array:
    """x [B, T, ...] at an index of axis 1; zeros where it is -1."""
    taken = jax.vmap(lambda row, i: row[jnp.maximum(i, 0)])(x, index)
    return jnp.where(index.reshape(*index.shape, *[1] * (x.ndim - 2)) >= 0, taken, 0).astype(x.dtype)


def _guided_logits(head: Callable[..., Array], params: Params, hidden: Any, *chunk: Any) -> Array:
    """Logits of both branches combined; chunk: first id and size, for a part of the vocabulary."""
    if not isinstance(hidden, GuidedHidden):
        return head(params, hidden, *chunk)
    conditional = head(params, hidden.conditional, *chunk)
    return conditional + hidden.weight * (conditional - head(params, hidden.unconditional, *chunk))
