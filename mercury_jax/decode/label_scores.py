"""Log-probabilities of labels that may follow a prompt: one forward pass over many prompts and labels.

A label of several tokens is scored token by token, by the chain rule: each token given those before it. The tokens of
all labels of a prompt form a trie, and each of its inner nodes is read once:

    labels "on", "on time", "late"  ->  trie {on: {<end>, time: {<end>}}, late: ...}  ->  log p of every edge

An autoregressive model reads all nodes of a path in one row. A model that denoises reads each node in a row of its
own: prompt and prefix are given, and the next token is predicted at the first position of a canvas of noise. The tokens
with which all rows of a state begin are encoded once, and the rows share their keys and values.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from mercury_jax.config import refuse
from mercury_jax.decode import inputs
from mercury_jax.decode.state import QUANTUM, bucket, slots_for
from mercury_jax.decode.token_stats import forbid
from mercury_jax.noise import Corruption
from mercury_jax.types import LM, Cache, Model, Params, Pass

ROWS_PER_PASS = 64
CACHE_BYTES = 2 << 30  # of the rows of a pass together; fewer rows share a pass where states are long
PREFILL_CHUNK = 1024  # tokens of a state that one pass encodes
WIDTH_QUANTUM = 32  # the width of a reading pass is a multiple of it, or NARROW
NARROW = 8

Label = tuple[int, ...]


class Edge(NamedTuple):
    """An edge of a trie: a token of a label, behind the tokens before it."""

    prefix: Label
    token: int


class Row(NamedTuple):
    """One row of a reading pass, before padding.

    Attributes:
        given: Ids that the row begins with: prompt and prefix.
        canvas: Number of noise tokens after them.
        reads: (absolute position whose hidden state is read, edge).
    """

    given: list[int]
    canvas: int
    reads: list[tuple[int, Edge]]

    @property
    def length(self) -> int:
        """Number of its tokens."""
        return len(self.given) + self.canvas


class LabelledPrompt(NamedTuple):
    """A prompt, and the labels that may follow it.

    Attributes:
        state: Index of the state with which it begins. Prompts of one state share their first tokens.
        ids: Ids of the prompt, at least one.
        labels: Ids of each label; none is the beginning of another.
        rows: The rows that read every edge of the trie of its labels, from `rows_of`.
        seed: Seed of the noise on the canvas.
    """

    state: int
    ids: list[int]
    labels: list[Label]
    rows: list[Row]
    seed: int


class EncodedStates(NamedTuple):
    """The KV cache of the first tokens of each state.

    Attributes:
        prefixes: Number of tokens of each state that are encoded.
        slots: Slots of a row of the cache.
        rows: Rows of a reading pass.
        cache: The cache, a row for each state; None: nothing is encoded.
    """

    prefixes: list[int]
    slots: int
    rows: int
    cache: Cache | None


def rows_that_fit(lm: LM, tokens: int) -> int:
    """Returns the largest number of rows of `tokens` tokens in a pass: a power of two, at most `ROWS_PER_PASS`."""
    cache = jax.eval_shape(lambda: lm.model.empty_cache(1, QUANTUM))
    slot = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache)) / QUANTUM
    most = int(min(ROWS_PER_PASS, max(1, CACHE_BYTES // max(1, slot * tokens))))
    return 1 << (most.bit_length() - 1)


def encode_states(lm: LM, prompts: Sequence[LabelledPrompt]) -> EncodedStates:
    """Encodes the tokens with which all prompts of a state begin, as far as no later token changes their keys.

    Raises ValueError if a prompt with its longest label and its canvas exceeds the context.
    """
    model, count = lm.model, 1 + max(p.state for p in prompts)
    ids = [[p.ids for p in prompts if p.state == i] for i in range(count)]
    # At least one token of each prompt is left to the reading pass.
    common = [min(_common(rows), min(map(len, rows)) - 1) for rows in ids]
    with jax.ensure_compile_time_eval():
        prefixes = np.asarray(model.encodable(jnp.asarray(common, jnp.int32))).tolist()
    longest = max(row.length for p in prompts for row in p.rows)
    if longest > model.config.context:
        raise refuse(
            "state and question", f"{longest} tokens", f"at most {model.config.context}, the context"
        )
    slots = slots_for(longest, 0, model.config.context)
    encoded = EncodedStates(prefixes, slots, rows_that_fit(lm, slots), None)
    if not any(prefixes):
        return encoded
    rows = 1 << (count - 1).bit_length()
    tokens = np.zeros((rows, bucket(max(prefixes), QUANTUM)), np.int32)
    for row, prefix, state in zip(tokens, prefixes, ids, strict=False):
        row[:prefix] = state[0][:prefix]
    lengths = np.array([*prefixes, *[0] * (rows - count)], np.int32)
    cache = model.empty_cache(rows, slots)
    with inputs.explain_wrong_params(lm):
        for start in range(0, tokens.shape[1], PREFILL_CHUNK):
            chunk = tokens[:, start : start + PREFILL_CHUNK]
            cache = _encode(model, lm.params, cache, chunk, np.int32(start), lengths)
    return encoded._replace(cache=cache)


def _common(rows: Sequence[list[int]]) -> int:
    """Returns the number of ids with which all rows begin."""
    first, last = min(rows), max(rows)  # in lexicographic order, so the others begin as these two do
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    return sum(1 for _ in same)


def label_log_p(
    lm: LM, prompts: Sequence[LabelledPrompt], encoded: EncodedStates
) -> tuple[list[np.ndarray], int]:
    """Computes log p(label | prompt) of each label.

    Where a prompt needs several rows, the rest of each prompt is encoded first, so that its rows share it.

    Returns:
        Log-probabilities of the labels of each prompt [L], float64; and the number of reading passes.
    """
    if encoded.cache is None or all(len(p.rows) == 1 for p in prompts):
        return _read_labels(lm, prompts, encoded)
    found, passes = list[np.ndarray](), 0
    for i in range(0, len(prompts), encoded.rows):
        group = prompts[i : i + encoded.rows]
        own = [prompt._replace(state=k) for k, prompt in enumerate(group)]
        log_p, made = _read_labels(lm, own, _encode_prompts(lm, group, encoded))
        found, passes = found + log_p, passes + made
    return found, passes


def _encode_prompts(lm: LM, prompts: Sequence[LabelledPrompt], encoded: EncodedStates) -> EncodedStates:
    """Encodes the rest of each prompt behind its state, but for its last token; each has a row of the cache then."""
    count = 1 << (len(prompts) - 1).bit_length()
    state = np.array([p.state for p in prompts], np.int32)
    start = np.array([encoded.prefixes[p.state] for p in prompts], np.int32)
    with jax.ensure_compile_time_eval():
        most = jnp.asarray([len(p.ids) - 1 for p in prompts], jnp.int32)
        lengths = np.maximum(np.asarray(lm.model.encodable(most)), start)
    tokens = np.zeros((len(prompts), bucket(max(1, int((lengths - start).max())), WIDTH_QUANTUM)), np.int32)
    for row, prompt, begin, end in zip(tokens, prompts, start, lengths, strict=True):
        row[: end - begin] = prompt.ids[begin:end]
    given = (_filled(x, count) for x in (state, tokens, start, lengths))
    with inputs.explain_wrong_params(lm):
        cache = _extend(lm.model, lm.params, encoded.cache, *given)
    return encoded._replace(prefixes=lengths.tolist(), cache=cache)


def _filled(rows: np.ndarray, count: int) -> Array:
    """Fills a pass with copies of the last row, so that few shapes are compiled."""
    return jnp.asarray(np.pad(rows, [(0, count - len(rows))] + [(0, 0)] * (rows.ndim - 1), mode="edge"))


def _read_labels(
    lm: LM, prompts: Sequence[LabelledPrompt], encoded: EncodedStates
) -> tuple[list[np.ndarray], int]:
    """Reads all edges of the tries, and sums them over the path of each label."""
    rows = [(i, row) for i, p in enumerate(prompts) for row in p.rows]
    found, passes = [dict[Edge, float]() for _ in prompts], 0
    # Rows of several lengths share a pass only if the model does not see padding.
    lengths = sorted({row.length for _, row in rows})
    alike = [rows] if lm.model.hides_padding else [[r for r in rows if r[1].length == n] for n in lengths]
    groups = [same[k : k + encoded.rows] for same in alike for k in range(0, len(same), encoded.rows)]
    for group in groups:
        log_p = _read_rows(lm, group, prompts, encoded)
        inputs.refuse_nan(np.isnan(log_p.sum(axis=1)), "the reading pass")
        passes += 1
        for (i, row), values in zip(group, log_p, strict=True):
            found[i] |= {edge: float(value) for (_, edge), value in zip(row.reads, values, strict=False)}
    path = lambda edges, label: sum(edges[Edge(label[:k], label[k])] for k in range(len(label)))
    return [
        np.array([path(e, label) for label in p.labels]) for e, p in zip(found, prompts, strict=True)
    ], passes


def rows_of(lm: LM, ids: list[int], labels: Sequence[Label]) -> list[Row]:
    """Lays out the rows that read every edge of the trie of the labels of a prompt."""
    config, rows = lm.model.config, list[Row]()
    children: dict[Label, dict[int, None]] = {}
    for label in labels:
        for k in range(len(label)):
            children.setdefault(label[:k], {})[label[k]] = None
    if config.autoregressive:
        # One row for each longest prefix; it also reads the shorter prefixes that no earlier row has read.
        ends = [a for a in children if not any(b != a and b[: len(a)] == a for b in children)]
        unread = dict(children)
        for end in ends:
            nodes = [end[:k] for k in range(len(end) + 1) if end[:k] in unread]
            reads = [(len(ids) + len(n) - 1, Edge(n, t)) for n in nodes for t in unread.pop(n)]
            rows.append(Row([*ids, *end], 0, reads))
        return rows
    longest = len(ids) + max(map(len, labels))
    for node, tokens in children.items():
        size = len(ids) + len(node)
        if config.pattern == "bidirectional":
            canvas, at = longest + 1 - size, size
        elif config.predicts_block_start and size % config.block == 0:
            canvas, at = 0, size - 1  # the last token of a block predicts the first one of the next
        else:  # the rest of a block, or the canvas after a prompt of any length
            canvas, at = config.block - (size % config.block if config.pattern == "block_causal" else 0), size
        rows.append(Row([*ids, *node], canvas, [(at, Edge(node, t)) for t in tokens]))
    return rows


class ReadPass(NamedTuple):
    """The arrays of a reading pass."""

    state: Int[Array, "R"]  # row of the cache
    tokens: Int[Array, "R T"]
    start: Int[Array, "R"]  # tokens in the cache
    used: Int[Array, "R"]
    text: Int[Array, "R"]  # how many of the tokens are encoded as committed text; the others are a canvas
    at: Int[Array, "R K"]  # the column whose hidden state is read
    token: Int[Array, "R K"]  # the token whose log-probability is wanted there


def _read_rows(
    lm: LM, placed: Sequence[tuple[int, Row]], prompts: Sequence[LabelledPrompt], encoded: EncodedStates
) -> Float[np.ndarray, "R K"]:
    """Runs one reading pass over rows, each with the index of its prompt."""
    model, rows, own = lm.model, [row for _, row in placed], [prompts[i] for i, _ in placed]
    count = 1 << (len(rows) - 1).bit_length()
    start = np.array([encoded.prefixes[p.state] for p in own], np.int32)
    size = np.array([len(r.given) for r in rows], np.int32)
    used = np.array([r.length for r in rows], np.int32) - start
    width = int(used.max())
    if model.hides_padding:
        width = bucket(width, NARROW if width <= NARROW else WIDTH_QUANTUM)
    with jax.ensure_compile_time_eval():
        text = np.asarray(model.encodable(jnp.asarray(size))) - start
    tokens = np.zeros((len(rows), width), np.int32)
    noise = None
    if any(r.canvas for r in rows):
        seeds = np.array([p.seed for p in own], np.uint32)
        longest = bucket(max(r.canvas for r in rows), WIDTH_QUANTUM)
        noise = np.asarray(_noise(lm.corruption, longest, np.pad(seeds, (0, count - len(rows)))))
    for i, row in enumerate(rows):
        behind = size[i] - start[i]
        tokens[i, :behind] = row.given[start[i] :]
        if noise is not None and row.canvas:
            tokens[i, behind : behind + row.canvas] = noise[i, : row.canvas]
    reads = 1 << (max(len(r.reads) for r in rows) - 1).bit_length()
    at, wanted = np.zeros((2, len(rows), reads), np.int32)
    for i, row in enumerate(rows):
        at[i, : len(row.reads)] = [position - start[i] for position, _ in row.reads]
        wanted[i, : len(row.reads)] = [edge.token for _, edge in row.reads]
    state = np.array([p.state for p in own], np.int32)
    given = ReadPass(*(_filled(x, count) for x in (state, tokens, start, used, text, at, wanted)))
    with inputs.explain_wrong_params(lm):
        log_p = _read(model, lm.corruption, encoded.slots, lm.params, encoded.cache, given)
    return np.asarray(log_p)[: len(rows)].astype(np.float64)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _encode(
    model: Model,
    params: Params,
    cache: Cache,
    tokens: Int[Array, "N T"],
    start: Array,
    lengths: Int[Array, "N"],
) -> Cache:
    """Encodes a chunk of each state, at positions from `start` on."""
    used = jnp.clip(lengths - start, 0, tokens.shape[1])
    begin = jnp.where(used > 0, start, lengths)
    clean = jnp.zeros(lengths.shape) if model.config.timed else None
    everyone = jnp.ones(lengths.shape, bool)
    given = Pass(tokens, cache, begin, used, begin + used, everyone, time=clean, length=lengths)
    return model.forward(params, given)[1]


@functools.partial(jax.jit, static_argnums=0)
def _extend(
    model: Model,
    params: Params,
    cache: Cache,
    state: Int[Array, "N"],
    tokens: Int[Array, "N T"],
    start: Int[Array, "N"],
    lengths: Int[Array, "N"],
) -> Cache:
    """Copies the cache of each prompt's state, and encodes the tokens of the prompt behind it."""
    clean = jnp.zeros(lengths.shape) if model.config.timed else None
    everyone, cache = jnp.ones(lengths.shape, bool), jax.tree.map(lambda x: x[state], cache)
    given = Pass(tokens, cache, start, lengths - start, lengths, everyone, time=clean, length=lengths)
    return model.forward(params, given)[1]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _noise(corruption: Corruption, width: int, seeds: Int[Array, "R"]) -> Int[Array, "R W"]:
    """Draws a canvas of noise for each seed: masks, or random ids, the same at each position whatever the width."""
    token = lambda key, at: corruption.prior(jax.random.fold_in(key, at), jnp.ones(()))
    canvas = lambda seed: jax.vmap(token, (None, 0))(jax.random.key(seed), jnp.arange(width))
    return jax.vmap(canvas)(seeds)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _read(
    model: Model, corruption: Corruption, slots: int, params: Params, cache: Cache | None, given: ReadPass
) -> Float[Array, "R K"]:
    """Computes the log-probability of each wanted token, among the ids that the model may emit."""
    rows, width = given.tokens.shape
    cache = model.empty_cache(rows, slots) if cache is None else jax.tree.map(lambda x: x[given.state], cache)
    # The columns of each row: committed text, which continues the cache, and then the canvas, which sees all of it.
    text = jnp.arange(width) < given.text[:, None]
    encoding = text if model.config.pattern != "bidirectional" else jnp.zeros((rows,), bool)
    time = jnp.where(text, 0.0, 1.0) if model.config.timed else None
    end = given.start + given.used
    hidden, _ = model.forward(
        params, Pass(given.tokens, cache, given.start, given.used, end, encoding, time=time, length=end)
    )
    pick = lambda x: jnp.take_along_axis(x, given.at.reshape(*given.at.shape, *[1] * (x.ndim - 2)), axis=1)
    logits = model.head(params, jax.tree.map(pick, hidden))  # [R, K, V]
    logits = jax.vmap(functools.partial(forbid, ids=corruption.forbidden))(logits)
    chosen = jnp.take_along_axis(logits, given.token[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)
