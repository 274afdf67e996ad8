"""Token statistics over a large vocabulary, computed in chunks.

Rules need a few numbers per position (argmax, a sample, its probability, entropy, margin), not all V logits. For
DiffusionGemma, 256 positions x 262,144 ids in fp32 are 268 MB per row; one chunk of 32,768 ids is 34 MB. This module
iterates over the vocabulary in chunks of `ChunkedVocab.size` ids, reduces each chunk to partial statistics, and merges
them exactly (an online softmax, Milakov and Gimelshein, arXiv 1805.02867). With self-conditioning the expected
embedding is accumulated in the same loop, like the output of an attention whose keys are the ids.

XLA copies the slice of the table of each chunk before it multiplies. If all logits fit into
`ChunkedVocab.logit_bytes`, one product computes them, and the chunks are only parts of the result: a pass over one
canvas of DiffusionGemma then moves 3 GB less. Two passes over these logits follow, one for the maxima and one for all
sums; the second also writes the weights of the expected embedding. Samples are drawn from sums over blocks of ids, and
read one block each.

If the embedding and the head are sharded over the mesh axis `tensor`, each device iterates over its own ids. One
all-gather of the partial statistics and one sum of the embeddings merge the results; gathering the tables instead would
transfer gigabytes per pass. A `DecodeConfig` whose `predict` is a `ChunkedVocab` computes its statistics here instead
of in `denoise.predict_tokens`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P
from jaxtyping import Array, Float, Int

from mercury_jax.decode.denoise import predict_tokens
from mercury_jax.decode.sampler import Param, Sampler
from mercury_jax.decode.state import DecodeConfig, Predictions, State
from mercury_jax.decode.token_stats import NEVER, block_of, in_blocks, most_probable, search_blocks
from mercury_jax.decode.view import Observation, draw_uniforms, process_logits
from mercury_jax.sharding import dividing_axes
from mercury_jax.types import Params, TokenStats

AXIS = "tensor"  # the mesh axis that shards the vocabulary
# As the path rules of all our models shard the tables; and the scales of quantised tables, one per id.
TABLES, SCALES = {"embed": P(AXIS), "head": P(None, AXIS)}, P(AXIS)


class ChunkStats(NamedTuple):
    """Statistics of one chunk of ids at each position of a row; sums of weights are relative to exp(max)."""

    max: Float[Array, "L"]  # the largest logit
    argmax: Int[Array, "L"]  # id with the largest logit
    second: Float[Array, "L"]  # the largest logit of the other ids
    total: Float[Array, "L"]  # sum of exp(logit - max)
    moment: Float[Array, "L"]  # sum of exp(logit - max) * (logit - max), for the entropy
    canvas: Float[Array, "L"]  # logit of the token on the canvas; NEVER if its id is in another chunk
    eos: Float[Array, "L"]  # the same for the end-of-text id
    draw_total: Float[Array, "L"]  # sum of exp((logit - max) / temperature)
    drawn: Int[Array, "L"]  # an id of this chunk, sampled at the sampler's temperature
    drawn_logit: Float[Array, "L"]  # logit of `drawn`


class SoftEmbedding(NamedTuple):
    """The expected embedding over the ids seen so far, which is `sum / total`."""

    max: Float[Array, "B L 1"]  # the largest logit
    total: Float[Array, "B L 1"]  # sum of exp(logit - max)
    sum: Float[Array, "B L D"]  # sum of exp(logit - max) * embedding


class ChunkedVocab(NamedTuple):
    """Computes the statistics in chunks where the vocabulary is large and no part of the sampler needs all logits.

    Elsewhere it does what `denoise.predict_tokens` does. The value of `DecodeConfig.predict`.
    """

    size: int = 32768  # ids per chunk
    logit_bytes: int = 2**29  # up to this size in fp32, one product computes the logits of all chunks

    def __call__(
        self, config: DecodeConfig, params: Params, state: State, hidden: Any, seen: Observation
    ) -> Predictions:
        """Computes the statistics of every row, and the self-conditioning for the next pass.

        A token is sampled in two stages, each by inverting a cumulative distribution at its own uniform: the chunk, and
        the id within the chunk.
        """
        if not self.applies(config, state.sampling.sampler):
            return predict_tokens(config, params, state, hidden, seen)
        vocab, mesh = config.model.config.vocab, config.model.mesh
        uniforms = jax.vmap(functools.partial(draw_uniforms, config))(state, seen.window)
        rows = (state, hidden, seen, uniforms[1])
        if mesh is not None and dividing_axes((AXIS,), vocab, mesh):
            soft, chunks = _walk_sharded(self, config, mesh, params, rows)
        else:
            soft, chunks = _walk(self, config, params, 0, vocab, *rows)
        temperature = jnp.asarray(state.sampling.sampler.temperature, jnp.float32)
        stats = jax.vmap(merge_chunks, in_axes=(1, 0, 0))(chunks, uniforms[0], temperature)
        stats = stats._replace(p_eos=jnp.where(seen.view.eos[:, None] >= 0, stats.p_eos, 0.0))
        return Predictions(seen, stats, None, () if soft is None else soft.sum / soft.total)

    def applies(self, config: DecodeConfig, sampler: Sampler) -> bool:
        """Returns whether the vocabulary is processed in chunks."""
        # These need all logits: for draws by position, for example, because a chunk uses uniforms of its own.
        if config.method.position_draws or config.leave_one_out or config.variable_length:
            return False
        if config.logprobs is not None or config.trajectory:
            return False
        whole = any(part.needs_logits for part in sampler.parts)
        whole |= any(part.draws_only for part in sampler.processors)
        return config.model.head_chunk is not None and not whole and config.model.config.vocab > self.size


def _walk(
    sizes: ChunkedVocab,
    config: DecodeConfig,
    params: Params,
    base: int | Int[Array, ""],
    count: int,
    state: State,
    hidden: Any,
    seen: Observation,
    uniforms: Float[Array, "B L"],
) -> tuple[SoftEmbedding | None, ChunkStats]:
    """Iterates over the `count` ids from `base` on, which are the ids of the tables in `params`.

    Returns:
        The expected embedding (None without self-conditioning), and the statistics of all P chunks [P, B, L].
    """
    model, size, part = config.model, min(sizes.size, count), config.model.head_chunk
    assert part is not None

    def processed(at: Any, size: int) -> Float[Array, "B L v"]:
        process = functools.partial(process_logits, config, first_id=base + at)
        return jax.vmap(process)(state, seen.view, seen.window.at, part(params, hidden, at, size))[0]

    if 4 * state.canvas.shape[0] * config.window * count <= sizes.logit_bytes:
        return _parts(config, params, base, size, processed(0, count), state, seen, uniforms)

    def chunk(soft: SoftEmbedding | None, at: Any, size: int) -> tuple[SoftEmbedding | None, ChunkStats]:
        first = base + at  # id of the chunk's first column, which is column `at` of the tables
        logits = processed(at, size)  # [B, L, size]
        stats = jax.vmap(functools.partial(chunk_stats, first))(logits, seen.view.canvas, seen.view.eos)
        if soft is not None:
            assert model.embed_mixture is not None
            # Online softmax: if this chunk raises the maximum, the sums so far are rescaled to the new maximum.
            top = jnp.maximum(soft.max, stats.max[..., None])
            weights, scale = jnp.exp(logits - top), jnp.exp(soft.max - top)
            total = soft.total * scale + weights.sum(-1, keepdims=True)
            soft = SoftEmbedding(top, total, soft.sum * scale + model.embed_mixture(params, weights, at))
        temperature = state.sampling.sampler.temperature
        assert temperature is not None
        return soft, draw_in_chunk(stats, logits, uniforms, temperature, first)

    # The accumulator starts empty: its maximum is NEVER, so the first chunk replaces it.
    soft = None
    if model.embed_mixture is not None:
        zero = jnp.zeros((state.canvas.shape[0], config.window, 1), jnp.float32)
        embedding = jnp.zeros((*zero.shape[:2], model.config.width), jnp.float32)
        soft = SoftEmbedding(zero + NEVER, zero, embedding)
    soft, chunks = jax.lax.scan(lambda soft, i: chunk(soft, i * size, size), soft, jnp.arange(count // size))
    if count % size:
        # The remaining ids form a smaller last chunk.
        soft, last = chunk(soft, count - count % size, count % size)
        chunks = jax.tree.map(lambda all, x: jnp.concatenate([all, x[None]]), chunks, last)
    return soft, chunks


def _parts(
    config: DecodeConfig,
    params: Params,
    base: int | Int[Array, ""],
    size: int,
    logits: Float[Array, "B L v"],
    state: State,
    seen: Observation,
    uniforms: Float[Array, "B L"],
) -> tuple[SoftEmbedding | None, ChunkStats]:
    """Computes what `_walk` returns from all logits.

    Samples are drawn in parts of `size` ids here too, so that they do not depend on the number of rows.
    """
    b, window, count = logits.shape
    temperature, mixture = state.sampling.sampler.temperature, config.model.embed_mixture
    assert temperature is not None
    # A last part with fewer ids is filled up with logits of weight 0. The parts of a position become positions of
    # their own, [B, L, P size] -> [B, L P, size]: that needs no copy.
    padded = jnp.pad(logits, ((0, 0), (0, 0), (0, -count % size)), constant_values=NEVER)
    parts = padded.shape[-1] // size
    first = base + jnp.tile(jnp.arange(parts) * size, window)  # id of the first column [L P]
    spread = lambda x: jnp.repeat(x, parts, axis=-1)
    pieces = padded.reshape(b, window * parts, size)
    stats = jax.vmap(functools.partial(chunk_stats, first))(pieces, spread(seen.view.canvas), seen.view.eos)
    stats = draw_in_chunk(stats, pieces, spread(uniforms), temperature, first)
    stats = jax.tree.map(lambda x: x.reshape(b, window, parts), stats)
    soft = None
    if mixture is not None:
        top = stats.max.max(axis=-1, keepdims=True)  # [B, L, 1]
        total = (stats.total * jnp.exp(stats.max - top)).sum(axis=-1, keepdims=True)
        soft = SoftEmbedding(top, total, mixture(params, jnp.exp(logits - top), 0))
    return soft, jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), stats)


def chunk_stats(
    first_id: int | Int[Array, "*L"],
    logits: Float[Array, "L v"],
    canvas: Int[Array, "L"],
    eos: Int[Array, ""],
) -> ChunkStats:
    """Computes the statistics of one row and chunk, except for the sample."""
    # Blocks of ids [L, n, b]: the first pass over the logits computes the maximum of each, the second the sums of each.
    # The argmax and the second largest logit follow from the maxima and from the one block that holds the argmax.
    blocks = in_blocks(logits, NEVER)
    tops = _per_block(blocks.max(axis=-1))  # [L, n]
    best, winner = tops.max(axis=-1), most_probable(tops)
    inside = block_of(blocks, winner)  # [L, b]
    column = most_probable(inside)
    without = lambda x, index: jnp.where(jnp.arange(x.shape[-1]) == index[:, None], -jnp.inf, x).max(axis=-1)
    # All weights are relative to the largest logit of the chunk, so that exp cannot overflow.
    centred = blocks - best[:, None, None]
    e = jnp.exp(centred)

    def logit_of(id: Int[Array, "L"]) -> Float[Array, "L"]:
        inside = (id >= first_id) & (id < first_id + logits.shape[-1])
        return jnp.where(inside, _pick(logits, jnp.clip(id - first_id, 0, logits.shape[-1] - 1)), NEVER)

    argmax = (winner * blocks.shape[-1] + column + first_id).astype(jnp.int32)
    return ChunkStats(
        max=best,
        argmax=argmax,
        second=jnp.maximum(without(tops, winner), without(inside, column)),
        total=_per_block(e.sum(axis=-1)).sum(axis=-1),
        moment=_per_block((e * centred).sum(axis=-1)).sum(axis=-1),
        canvas=logit_of(canvas),
        eos=logit_of(jnp.full_like(canvas, eos)),
        draw_total=jnp.ones_like(best),
        drawn=argmax,
        drawn_logit=best,
    )


def draw_in_chunk(
    stats: ChunkStats,
    logits: Float[Array, "B L v"],
    uniforms: Float[Array, "B L"],
    temperature: Param,
    first_id: int | Int[Array, "*L"],
) -> ChunkStats:
    """Samples an id of the chunk for every position.

    The sums over blocks have the shape of those of `chunk_stats`, so that XLA computes all of them in one pass over the
    logits; a `cond` for the case that no row has a temperature above 0 would make it two.
    """
    blocks, temperature = in_blocks(logits, NEVER), jnp.asarray(temperature, jnp.float32)  # [B, L, n, b]
    coldness = (1.0 / jnp.maximum(temperature, 1e-6))[:, None, None, None]
    weights = jnp.exp((blocks - stats.max[..., None, None]) * coldness)
    sums = _per_block(weights.sum(axis=-1))  # [B, L, n]
    block, column = search_blocks(
        sums, functools.partial(block_of, weights), jnp.minimum(uniforms, 1.0 - 1e-6)
    )
    drawn = block * blocks.shape[-1] + column
    return stats._replace(
        draw_total=sums.sum(axis=-1),
        drawn=(drawn + first_id).astype(jnp.int32),
        drawn_logit=_pick(logits, drawn),
    )


def _per_block(sums: Float[Array, "*s n"]) -> Float[Array, "*s n"]:
    """Returns reductions over blocks unchanged, but keeps XLA from reducing over all blocks at once.

    XLA would merge a reduction of these reductions with them, and then need one more pass over the logits for each of
    the two shapes.
    """
    return jax.lax.optimization_barrier(sums)


def _pick(logits: Float[Array, "*s v"], column: Int[Array, "*s"]) -> Float[Array, "*s"]:
    return jnp.take_along_axis(logits, column[..., None], axis=-1)[..., 0]


def merge_chunks(c: ChunkStats, uniforms: Float[Array, "L"], temperature: Float[Array, ""]) -> TokenStats:
    """Merges the statistics of all chunks of one row."""
    best, winner = c.max.max(axis=0), c.max.argmax(axis=0)  # [L]
    # Rescale every chunk to the common maximum `best`, with gap = max - best: sum e^(x - best) = e^gap sum e^(x - max),
    # and sum e^(x - best) (x - best) = e^gap (moment + gap total).
    gap = c.max - best  # [P, L], at most 0
    total = (c.total * jnp.exp(gap)).sum(axis=0)
    moment = (jnp.exp(gap) * (c.moment + gap * c.total)).sum(axis=0)
    of_chunk = lambda x, index: jnp.take_along_axis(x, index[None], axis=0)[0]
    # The second largest logit is the second of the chunk with the argmax, or the maximum of another chunk.
    second = jnp.where(jnp.arange(len(gap))[:, None] == winner, c.second, c.max).max(axis=0)
    argmax = of_chunk(c.argmax, winner)
    # The chunk of the sample, by inverting the cumulative distribution over the chunks. ends [P, L]
    ends = jnp.cumsum(c.draw_total * jnp.exp(gap / jnp.maximum(temperature, 1e-6)), axis=0)
    target = jnp.minimum(uniforms, 1.0 - 1e-6) * ends[-1]
    which = jnp.where(temperature > 0, jnp.minimum((ends <= target).sum(axis=0), len(gap) - 1), winner)
    p = lambda logit: jnp.exp(logit - best) / total
    return TokenStats(
        argmax=argmax,
        sample=jnp.where(temperature > 0, of_chunk(c.drawn, which), argmax),
        p_argmax=1.0 / total,
        p_sample=p(jnp.where(temperature > 0, of_chunk(c.drawn_logit, which), best)),
        p_canvas=p(c.canvas.max(axis=0)),
        entropy=jnp.log(total) - moment / total,
        margin=(1.0 - jnp.exp(second - best)) / total,
        p_eos=p(c.eos.max(axis=0)),
    )


def _walk_sharded(
    sizes: ChunkedVocab, config: DecodeConfig, mesh: Mesh, params: Params, rows: tuple[Any, ...]
) -> tuple[SoftEmbedding | None, ChunkStats]:
    """Runs `_walk` on every device of the mesh over the ids of its shard, and merges the results.

    Args:
        rows: Further arguments of `_walk`; every leaf has the batch axis first.

    Returns:
        What `_walk` returns for the whole vocabulary.
    """
    # Each device holds the rows of the tables for `count` consecutive ids.
    tables = {name: params[name] for name in TABLES if name in params}
    count = config.model.config.vocab // mesh.shape[AXIS]
    row = dividing_axes(("data",), jax.tree.leaves(rows)[0].shape[0], mesh) or None

    def own(tables: Params, *rows: Any) -> tuple[SoftEmbedding | None, ChunkStats]:
        soft, chunks = _walk(sizes, config, tables, jax.lax.axis_index(AXIS) * count, count, *rows)
        chunks = gather_chunks(chunks)
        return (None if soft is None else sum_embeddings(soft, chunks.max.max(axis=0)[..., None])), chunks

    # The leaves of a quantised table are its values, with two axes, and its scales, with one.
    leaf_spec = lambda path, x: TABLES[path[0].key] if x.ndim == 2 else SCALES
    spec = jax.tree_util.tree_map_with_path(leaf_spec, tables)
    specs = (spec, *[P(row)] * len(rows))
    spread = jax.shard_map(own, mesh=mesh, in_specs=specs, out_specs=(P(row), P(None, row)), check_vma=False)
    return spread(tables, *rows)


def gather_chunks(chunks: ChunkStats) -> ChunkStats:
    """Gathers the chunks [P, B, L] of all devices along P."""
    # Integers and floats are packed into one integer array by their bits, so that a single all-gather moves them all.
    wide = chunks.max.dtype
    bits = jnp.int32 if wide.itemsize == 4 else jnp.int64

    def pack(x: Array) -> Array:
        if jnp.issubdtype(x.dtype, jnp.integer):
            return x.astype(bits)
        return jax.lax.bitcast_convert_type(x.astype(wide), bits)

    def unpack(x: Array, like: Array) -> Array:
        if jnp.issubdtype(like.dtype, jnp.integer):
            return x.astype(like.dtype)
        return jax.lax.bitcast_convert_type(x, wide).astype(like.dtype)

    leaves, tree = jax.tree.flatten(chunks)
    packed = jax.lax.all_gather(jnp.stack([pack(x) for x in leaves]), AXIS, axis=1, tiled=True)
    return tree.unflatten([unpack(x, like) for x, like in zip(packed, leaves)])


def sum_embeddings(soft: SoftEmbedding, best: Float[Array, "B L 1"]) -> SoftEmbedding:
    """Sums the expected embeddings of all devices."""
    shares = jnp.concatenate([soft.total, soft.sum], axis=-1) * jnp.exp(soft.max - best)
    every = jax.lax.psum(shares, AXIS)
    return soft._replace(max=best, total=every[..., :1], sum=every[..., 1:])
