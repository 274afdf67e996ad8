"""Classifier-free guidance: a model beside itself without its prompt, as one `Model`.

    logits = l_c + w (l_c - l_u)

l_c reads the prompt; l_u reads a negative prompt in its place, or, where that is empty, the answer
alone. It is l_u + (w + 1) (l_c - l_u), as masked diffusion is guided without training for it
(arXiv 2410.18514; LLaDA, arXiv 2502.09992), written so that w = 0 is plain decoding bit for bit.
There the other branch reads a mask in place of each token of the prompt: a negative prompt of as
many masks. A pass costs two.

The other sequence is the negative prompt, then what stands behind the prompt, moved by `shift`.
Negative prompts are encoded once, by `start`. Of a later pass the other branch takes the tokens
behind the prompt, and its hidden states are gathered back to where the first branch has its own.
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
    data_fields=["main", "other", "weight", "floor", "shift", "text"],
    meta_fields=["extra"],
)
@dataclasses.dataclass(frozen=True)
class GuidedCache:
    """Both branches' caches and what places the other one; every leaf has the batch axis first."""

    main: Cache
    other: Cache
    weight: Any  # float [B]
    floor: Any  # int [B], length of the prompt
    shift: Any  # int [B], length of the negative prompt minus that of the prompt
    text: Any  # int [B, N], the negative prompts
    extra: int = 0  # by how many tokens the other pass is wider: only where a pass holds the prompt


class GuidedHidden(NamedTuple):
    """Hidden states of both branches, aligned with the canvas; every leaf is [B, T, ...]."""

    main: Any
    other: Any
    weight: Float[Array, "B T 1"]


class Beside(NamedTuple):
    """The other branch's pass: W tokens, and which of them each token of the first one is."""

    tokens: Int[Array, "B W"]
    source: Int[Array, "B W"]  # index in the first pass, -1 for the negative prompt
    start: Int[Array, "B"]
    n: Int[Array, "B"]
    index: Int[Array, "B T"]  # where the first pass's tokens are; meaningless inside of the prompt


@functools.cache
def guided(model: Model) -> Model:
    """The model with guidance; its cache comes from `start`. Equal models give the same one.

    `apply`, the pass without a cache, is the plain model's, and so are its logits. A cache from
    `empty_cache` guides nothing: its weight is 0.
    """
    return model._replace(
        forward=functools.partial(_forward, model),
        head=functools.partial(_head, model),
        head_chunk=None if model.head_chunk is None else functools.partial(_part, model),
        empty_cache=functools.partial(_empty, model),
    )


def start(
    model: Model,
    params: Params,
    batch: int,
    slots: int,
    prompts: Sequence[int],
    negatives: Sequence[Sequence[int] | None],
    weights: Any,
    room: int | None = None,
) -> GuidedCache:
    """The cache of a guided batch, its negative prompts encoded.

    model: the plain one. prompts: the length of each row's prompt; rows up to `batch` are added,
    which guide nothing. negatives: ids, one list a row; empty or None for no prompt at all.
    weights: w, one number or one a row. room: tokens kept for a negative prompt (None: what these
    need); equal rooms give equal shapes, which a row must have to replace another.
    """
    rows = len(prompts)
    texts = _texts(model, prompts, negatives, room)
    shift = np.array([len(t) - p for t, p in zip(texts, prompts, strict=True)])
    block = _block(model)
    size = _power(max(map(len, texts))) if room is None else room + block - 1
    more = _power(max(0, int(shift.max()))) if room is None else room + block - 1
    text = np.zeros((batch, max(size, 1)), np.int32)
    for row, ids in zip(text, texts, strict=False):
        row[: len(ids)] = ids
    whole = model.config.pattern == "bidirectional"  # a pass holds the prompt, and so do its shadow masks
    wide = lambda x, kind: jnp.asarray(np.pad(np.asarray(x, kind), (0, batch - rows)))
    cache = GuidedCache(
        main=model.empty_cache(batch, slots),
        other=model.empty_cache(batch, slots + (2 * more if whole else more)),
        weight=wide(_weights(weights, rows), np.float64),
        floor=wide(prompts, np.int32),
        shift=wide(shift, np.int32),
        text=jnp.asarray(text),
        extra=more if whole else 0,
    )
    # Whole blocks: a block-causal token must find the keys of its own block in the same pass.
    width = -(-min(PREFILL, text.shape[1]) // block) * block
    return _encode(model, width, params, cache) if _encodes(model, texts) else cache


def _texts(
    model: Model, prompts: Sequence[int], negatives: Sequence[Any], room: int | None
) -> list[list[int]]:
    """Checked negative prompts; for block-causal models padded on the left by masks.

    Their blocks stand at multiples of the block, so the answer must keep its place in its block.
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
        texts.append([model.config.mask or 0] * ((int(prompt) - len(ids)) % _block(model)) + ids)
    return texts


def _weights(weights: Any, rows: int) -> np.ndarray:
    w = np.asarray(weights, float)
    if w.shape not in ((), (rows,)) or not np.isfinite(w).all():
        raise refuse("guidance weight", weights, f"a finite number, or one for each of the {rows} rows")
    return np.broadcast_to(w, (rows,))


def _block(model: Model) -> int:
    return model.config.block if model.config.pattern == "block_causal" else 1


def _encodes(model: Model, texts: Sequence[Sequence[int]]) -> bool:
    return bool(np.any(np.asarray(model.encodable(jnp.asarray([len(t) for t in texts])))))


def _power(size: int) -> int:
    """The least power of two >= size, and 0 for 0: few shapes."""
    return 1 << (size - 1).bit_length() if size else 0


def _empty(model: Model, batch: int, slots: int) -> GuidedCache:
    zeros = jnp.zeros((batch,), jnp.int32)
    main, other = model.empty_cache(batch, slots), model.empty_cache(batch, slots)
    return GuidedCache(main, other, jnp.zeros((batch,)), zeros, zeros, jnp.zeros((batch, 1), jnp.int32))


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _encode(model: Model, width: int, params: Params, cache: GuidedCache) -> GuidedCache:
    """Encode the negative prompts, as far as the model's pattern encodes text, `width` tokens a pass."""
    ready = model.encodable(cache.floor + cache.shift)
    everyone = jnp.ones(ready.shape, bool)
    clean = jnp.zeros(ready.shape) if model.config.timed else None

    def body(loop: tuple[Array, Cache]) -> tuple[Array, Cache]:
        done, other = loop
        n = jnp.minimum(ready - done, width)
        at = jnp.minimum(done[:, None] + jnp.arange(width), cache.text.shape[1] - 1)
        tokens = jnp.take_along_axis(cache.text, at, axis=1)
        _, other = model.forward(params, Pass(tokens, other, done, n, done + n, everyone, time=clean))
        return done + n, other

    behind = lambda loop: jnp.any(loop[0] < ready)
    _, other = jax.lax.while_loop(behind, body, (jnp.zeros_like(ready), cache.other))
    return dataclasses.replace(cache, other=other)


def _forward(model: Model, params: Params, given: Pass) -> tuple[GuidedHidden, GuidedCache]:
    cache: GuidedCache = given.cache
    hidden, main = model.forward(params, given._replace(cache=cache.main))
    beside = _beside(model, cache, given.tokens, given.start, given.used)
    moved = jax.tree.map(lambda x: _pick(x, beside.source), given.self_cond)
    theirs = given._replace(
        tokens=beside.tokens, cache=cache.other, start=beside.start, used=beside.n, end=given.end + cache.shift,
        self_cond=moved,
    )  # fmt: skip
    there, other = model.forward(params, theirs)
    index = beside.index
    if given.leave_one_out is not None:  # the shadows follow behind all the tokens
        index = jnp.concatenate([index, index + beside.tokens.shape[1]], axis=1)
    there = jax.tree.map(lambda x: _pick(x, index), there)
    weight = jnp.broadcast_to(cache.weight[:, None, None], (*index.shape, 1))
    return GuidedHidden(hidden, there, weight), dataclasses.replace(cache, main=main, other=other)


def _beside(
    model: Model, cache: GuidedCache, tokens: Int[Array, "B T"], start: Int[Array, "B"], n: Int[Array, "B"]
) -> Beside:
    """Lay out the other branch's pass.

    Its tokens at positions under `length` come from the negative prompt, the rest from the first
    pass. What of them is encoded for good, `first`, was so by `start`: a pass that reaches down to the
    prompt's own share of that begins there (at 0 where nothing is ever encoded).
    """
    reach, width = tokens.shape[1], tokens.shape[1] + cache.extra
    length = cache.floor + cache.shift
    first = model.encodable(length)
    moved = start + cache.shift
    begin = jnp.where(start > model.encodable(cache.floor), jnp.maximum(moved, first), first)
    count = jnp.where(n > 0, jnp.clip(moved + n - begin, 0, width), 0)
    at = begin[:, None] + jnp.arange(width, dtype=jnp.int32)
    theirs = at < length[:, None]
    source = at - moved[:, None]
    fresh = jnp.take_along_axis(tokens, jnp.clip(source, 0, reach - 1), axis=1)
    given = jnp.take_along_axis(cache.text, jnp.minimum(at, cache.text.shape[1] - 1), axis=1)
    index = (moved - begin)[:, None] + jnp.arange(reach, dtype=jnp.int32)
    return Beside(
        tokens=jnp.where(theirs, given, fresh),
        source=jnp.where(theirs | (source >= reach), -1, source),
        start=begin,
        n=count,
        index=jnp.clip(index, 0, width - 1),
    )


def _pick(x: Array, index: Int[Array, "B W"]) -> Array:
    """x [B, T, ...] at an index of axis 1; zeros where it is -1."""
    taken = jax.vmap(lambda row, i: row[jnp.maximum(i, 0)])(x, index)
    return jnp.where(index.reshape(*index.shape, *[1] * (x.ndim - 2)) >= 0, taken, 0).astype(x.dtype)


def _head(model: Model, params: Params, hidden: Any) -> Float[Array, "B T V"]:
    return _steered(functools.partial(model.head, params), hidden)


def _part(model: Model, params: Params, hidden: Any, first: Any, size: int) -> Float[Array, "B T v"]:
    assert model.head_chunk is not None
    return _steered(functools.partial(model.head_chunk, params, first=first, size=size), hidden)


def _steered(head: Callable[[Any], Array], hidden: Any) -> Array:
    if not isinstance(hidden, GuidedHidden):
        return head(hidden)
    ours, theirs = head(hidden.main), head(hidden.other)
    return ours + hidden.weight * (ours - theirs)
