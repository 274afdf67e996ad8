"""Classifier-free guidance: the conditional and the unconditional branch of a model, as one `Model`.

    logits = l_c + w (l_c - l_u)

l_c are the logits with the prompt; l_u those with a negative prompt instead or, if that is empty, with the answer only.
The formula equals l_u + (w + 1) (l_c - l_u), unsupervised guidance of masked diffusion (arXiv 2410.18514; LLaDA,
arXiv 2502.09992), and is written so that w = 0 is plain decoding bit for bit. In LLaDA's unconditional branch a mask
replaces each prompt token: `negative="masked"` of `mj.sample`. A guided pass costs two passes.

The sequence of the unconditional branch is the negative prompt followed by the tokens after the prompt, which are
moved by `shift` positions. `start` encodes the negative prompts once. In later passes this branch feeds the tokens
after the prompt, and its hidden states are gathered back to the positions of the conditional branch.
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
from mercury_jax.decode.sampler import HiddenHead, Sampler
from mercury_jax.types import Cache, Model, Params, Pass

PREFILL = 256  # tokens per prefill pass over the negative prompts


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["conditional", "unconditional", "weight", "prompt_length", "shift", "negative"],
    meta_fields=["extra"],
)
@dataclasses.dataclass(frozen=True)
class GuidedCache:
    """The KV caches of both branches, and the layout of the unconditional one; every leaf has the batch axis first."""

    conditional: Cache
    unconditional: Cache
    weight: Any  # float [B], w
    prompt_length: Any  # int [B], tokens of the prompt
    shift: Any  # int [B], length of the negative prompt minus length of the prompt
    negative: Any  # int [B, N], ids of the negative prompts
    # additional tokens of an unconditional pass in bidirectional models, whose passes hold the prompt
    extra: int = 0


class GuidedHidden(NamedTuple):
    """Hidden states of both branches, aligned with the canvas; every leaf is [B, T, ...]."""

    conditional: Any
    unconditional: Any
    weight: Float[Array, "B T 1"]  # w; with axis 1, because `slice_rows` slices it in every leaf


class ConditionalHead(NamedTuple):
    """`Rule.needs_hidden` of a rule under guidance: what it reads of the conditional branch."""

    head: bool | HiddenHead

    def __call__(self, params: Params, hidden: GuidedHidden) -> Any:
        own = hidden.conditional
        return self.head(params, own) if callable(self.head) else own


def reads_conditional(sampler: Sampler) -> Sampler:
    """Lets a rule that reads hidden states read those of the conditional branch."""
    rule = sampler.rule
    if not rule.needs_hidden:
        return sampler
    return sampler._replace(rule=dataclasses.replace(rule, needs_hidden=ConditionalHead(rule.needs_hidden)))


class UnconditionalPass(NamedTuple):
    """The tokens that the unconditional branch feeds, and their correspondence to those of the conditional branch."""

    tokens: Int[Array, "B W"]
    # index of each token in the conditional pass; -1 for tokens of the negative prompt
    source: Int[Array, "B W"]
    start: Int[Array, "B"]  # position of the first token in the unconditional sequence
    used: Int[Array, "B"]  # number of tokens that count
    # index of each conditional token in this pass; undefined for tokens of the prompt
    index: Int[Array, "B T"]


@functools.cache
def guided(model: Model) -> Model:
    """Adds guidance to a model.

    `apply`, the pass without a cache, stays that of the plain model. A cache from `empty_cache` has weight 0, which is
    no guidance.
    """
    return model._replace(
        forward=functools.partial(_forward, model),
        head=functools.partial(_guided_logits, model.head),
        head_chunk=None if model.head_chunk is None else functools.partial(_guided_logits, model.head_chunk),
        empty_cache=functools.partial(_empty, model),
        rings=None,  # `start` makes caches with a slot for every position
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
    longest: Int[Array, "B"] | None = None,
) -> GuidedCache:
    """Makes the cache of a guided batch and encodes its negative prompts.

    Args:
        room: Maximum length of a negative prompt, which fixes the shapes; a server needs equal shapes to replace a row
            by another. None: chosen for these negative prompts.
    """
    rows, block = len(prompts), model.config.block if model.config.pattern == "block_causal" else 1
    w = np.asarray(weights, float)
    if w.shape not in ((), (rows,)) or not np.isfinite(w).all():
        raise refuse("guidance weight", weights, f"a finite number, or one for each of the {rows} rows")
    texts = _negative_ids(model, prompts, negatives, room, block)
    shift = np.array([len(ids) - prompt for ids, prompt in zip(texts, prompts, strict=True)])
    if room is None:  # powers of two or 0, so that there are few shapes
        power = lambda n: 1 << (n - 1).bit_length() if n else 0
        size, more = power(max(map(len, texts))), power(max(0, int(shift.max())))
    else:
        size = more = room + block - 1
    negative = np.zeros((batch, max(size, 1)), np.int32)
    for row, ids in zip(negative, texts, strict=False):
        row[: len(ids)] = ids
    # nothing is encoded: every pass feeds the whole row
    holds_prompt = model.config.pattern == "bidirectional"
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
    # Whole blocks: in a block-causal model the tokens of a block attend to each other in the same pass.
    width = -(-min(PREFILL, negative.shape[1]) // block) * block
    return _encode_negatives(model, width, params, cache, longest)


def resized(
    model: Model,
    before: GuidedCache,
    batch: int,
    slots: int,
    take: Callable[[Array], Array],
    fit: Callable[[Cache, Cache], Cache],
) -> GuidedCache:
    """Copies a guided cache into one with another number of rows and slots, to continue an earlier call.

    Both branches keep what they have read: the prompt or the negative prompt, and the answer.
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
    """Checks the negative prompts, and pads them on the left by masks for block-causal models.

    Blocks of these models start at multiples of the block length. The padding makes `shift` such a multiple, so that a
    token has the same place in its block in both branches.
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
def _encode_negatives(
    model: Model, width: int, params: Params, cache: GuidedCache, longest: Int[Array, "B"] | None
) -> GuidedCache:
    """Encodes the negative prompts, as far as the model's pattern encodes text, in passes of `width` tokens."""
    # Negative prompts differ in length: a row that is finished uses 0 tokens of the remaining passes.
    ready = model.encodable(cache.prompt_length + cache.shift)
    everyone = jnp.ones(ready.shape, bool)
    clean = jnp.zeros(ready.shape) if model.config.timed else None
    length = None if longest is None else longest + cache.shift

    def body(carry: tuple[Array, Cache]) -> tuple[Array, Cache]:
        done, other = carry
        used = jnp.minimum(ready - done, width)
        at = jnp.minimum(done[:, None] + jnp.arange(width), cache.negative.shape[1] - 1)
        tokens = jnp.take_along_axis(cache.negative, at, axis=1)
        given = Pass(tokens, other, done, used, done + used, everyone, time=clean, length=length)
        _, other = model.forward(params, given)
        return done + used, other

    pending = lambda carry: jnp.any(carry[0] < ready)
    _, other = jax.lax.while_loop(pending, body, (jnp.zeros_like(ready), cache.unconditional))
    return dataclasses.replace(cache, unconditional=other)


def _forward(model: Model, params: Params, given: Pass) -> tuple[GuidedHidden, GuidedCache]:
    """Runs the passes of both branches."""
    cache: GuidedCache = given.cache
    hidden, conditional = model.forward(params, given._replace(cache=cache.conditional))
    other = _unconditional_pass(model, cache, given)
    index, masks = other.index, given.leave_one_out
    if masks is not None:
        # Leave-one-out masks belong to the same tokens in both branches; their hidden states follow the tokens'.
        columns = jnp.take_along_axis(other.index, jnp.maximum(masks.columns, 0), axis=1)
        masks = masks._replace(columns=jnp.where(masks.columns < 0, -1, columns))
        behind = other.tokens.shape[1] + jnp.arange(columns.shape[1], dtype=index.dtype)
        index = jnp.concatenate([index, jnp.broadcast_to(behind, columns.shape)], axis=1)
    gather = lambda x: _gather(x, other.source)
    # Tokens of the negative prompt precede those of the conditional pass, and are committed if the first of those is.
    source = jnp.maximum(other.source, 0)
    of_tokens = lambda x: x if x is None or x.ndim == 1 else jnp.take_along_axis(x, source, axis=1)
    other_hidden, unconditional = model.forward(params, given._replace(
        tokens=other.tokens, cache=cache.unconditional, start=other.start, used=other.used,
        end=given.end + cache.shift, encoding=of_tokens(given.encoding), time=of_tokens(given.time),
        self_cond=jax.tree.map(gather, given.self_cond), leave_one_out=masks,
        length=None if given.length is None else given.length + cache.shift,
    ))  # fmt: skip
    other_hidden = jax.tree.map(lambda x: _gather(x, index), other_hidden)
    weight = jnp.broadcast_to(cache.weight[:, None, None], (*index.shape, 1))
    cache = dataclasses.replace(cache, conditional=conditional, unconditional=unconditional)
    return GuidedHidden(hidden, other_hidden, weight), cache


def _unconditional_pass(model: Model, cache: GuidedCache, given: Pass) -> UnconditionalPass:
    """Chooses the tokens of the unconditional pass.

    Tokens at positions below `length` come from the negative prompt, the others from the conditional pass. `start`
    already wrote the first `encoded` tokens to the cache. A pass that includes tokens of the prompt therefore begins
    after them, or at 0 in bidirectional models, where nothing is encoded.
    """
    tokens, reach = given.tokens, given.tokens.shape[1]
    # The conditional pass feeds positions start..start + T - 1. Moved by `shift`, these are the positions of the same
    # tokens in the unconditional sequence; the positions before them belong to the negative prompt.
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
    """Gathers x [B, T, ...] along axis 1; zeros where the index is -1."""
    taken = jax.vmap(lambda row, i: row[jnp.maximum(i, 0)])(x, index)
    return jnp.where(index.reshape(*index.shape, *[1] * (x.ndim - 2)) >= 0, taken, 0).astype(x.dtype)


def _guided_logits(head: Callable[..., Array], params: Params, hidden: Any, *chunk: Any) -> Array:
    """Computes the guided logits; `chunk` is the first id and the size of a part of the vocabulary, or nothing."""
    if not isinstance(hidden, GuidedHidden):
        return head(params, hidden, *chunk)
    conditional = head(params, hidden.conditional, *chunk)
    return conditional + hidden.weight * (conditional - head(params, hidden.unconditional, *chunk))
