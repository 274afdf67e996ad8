"""Logits processors: they change the logits of a row before the token statistics are computed.

`ALL` registers the processors whose parameters are numbers (temperature, truncation, penalties), and those that users
define with `mj.logits_processor`. Processors that take tables of ids (bias, ban, constraints by position) are plain
functions. A forbidden id has the logit `token_stats.NEVER`, and stays forbidden and finite through every chain of
processors.

The truncations (top-k, top-p, min-p) change which tokens are drawn, but not the confidence that a rule reads: among the
ids that top-k 1 leaves, each token has probability 1, and a rule would accept all of them at once. The authors' scripts
that take the confidence after the truncation are followed by `before_confidence`.

Penalties count tokens. An autoregressive decoder counts the tokens before a position; on a canvas, where tokens are
decided in any order, a position counts every decided token before and after it, but not its own.

Tables become arrays padded to a power of two: another table of similar size does not recompile, and a grammar can write
new bits between two passes. Hard constraints belong into `Sampler(allow=)`, whose processors run first and last.
Positions count from the first one after the prompt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Annotated, Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, UInt

from mercury_jax.config import Above, AtLeast, Between, Finite, refuse
from mercury_jax.decode.inputs import check_whole
from mercury_jax.decode.registration import (
    PROCESSORS,
    Count,
    NonNegative,
    Probability,
    check_number,
    logits_processor,
    no_such_part,
)
from mercury_jax.decode.sampler import Logits, LogitsProcessor, Param, Static
from mercury_jax.decode.token_stats import NEVER
from mercury_jax.types import View

ALL = PROCESSORS  # by name
Ids: TypeAlias = Sequence[int] | np.ndarray
Biases: TypeAlias = Mapping[int, float]
MOST_ID = 2**31 - 1


def keep_forbidden(old: Logits, new: Logits) -> Logits:
    """Restores the forbidden ids after a processor, and clips the logits to finite numbers.

    Without this, a processor that scales the logits would make a forbidden id possible again, or overflow.

    Args:
        old: Logits before the processor [L, v].
        new: Logits after the processor [L, v].

    Returns:
        `new`, with `NEVER` wherever `old` has it [L, v].
    """
    return jnp.where(old > NEVER, jnp.clip(new, NEVER, -NEVER), NEVER)


def columns_of(ids: Int[Array, "*s"], first_id: int | Int[Array, ""], size: int) -> Int[Array, "*s"]:
    """Converts ids to columns of a chunk of the vocabulary.

    Args:
        ids: Ids; negative ones are padding.
        first_id: The id of the chunk's first column.
        size: Columns of the chunk.

    Returns:
        The column of each id; `size` for padding and for ids outside of the chunk, so that `mode="drop"` drops it.
    """
    column = ids - first_id
    return jnp.where((ids < 0) | (column < 0), size, column)


def before_confidence(processor: LogitsProcessor) -> LogitsProcessor:
    """Makes a processor change the confidence of a rule too, not only which tokens are drawn.

    Args:
        processor: A processor such as `top_p(0.95)`.

    Returns:
        The processor without `draws_only`.

    Example:
        >>> mj.Sampler(mj.rules.dream_entropy(), (mj.processors.before_confidence(mj.processors.top_p(0.95)),))
    """
    return dataclasses.replace(processor, draws_only=False)


@logits_processor(needs_logits=False)
def temperature(logits: Logits, view: View, t: NonNegative = 1.0) -> Logits:
    """Divides the logits by `t`, for everything that is read from them (confidence, entropy).

    The temperature at which tokens are drawn is a separate parameter, `Sampler.temperature`; both apply.

    Args:
        logits: Of one row.
        view: Unused.
        t: Temperature.

    Returns:
        The scaled logits.
    """
    return keep_forbidden(logits, logits * (1.0 / jnp.maximum(t, 1e-6)))


@logits_processor(needs_logits=False, source="DiffusionGemma, transformers' generation config")
def cooling(logits: Logits, view: View, last: NonNegative = 0.4, first: NonNegative = 0.8) -> Logits:
    """Divides by a temperature that falls linearly in time, from `first` at pure noise to `last` at clean text.

    Args:
        logits: Of one row.
        view: Reads `t`.
        last: Temperature at time 0.
        first: Temperature at time 1.

    Returns:
        The scaled logits.
    """
    # XLA repeats a multiplication in each pass over the logits, but stores the result of a division of all of them.
    return keep_forbidden(logits, logits * (1.0 / jnp.maximum(last + (first - last) * view.t, 1e-6)))


def lowest(
    score: Logits, kept: Callable[[Float[Array, "L 1"]], Bool[Array, "L 1"]], every: Bool[Array, ""]
) -> Float[Array, "L 1"]:
    """Finds the lowest score that is kept, by bisection over the bits of a threshold.

    Sorting 256 rows of 1,024 logits takes 68 ms on two CPU cores, the bisection 4 ms.

    Args:
        score: Scores of the ids; not differentiated [L, v].
        kept: Whether an id with this score is kept. True for the highest score, and for each score above a kept one.
        every: Whether every id is kept. Then nothing is searched.

    Returns:
        A threshold: the ids that are kept are those whose score is not below it.
    """

    kind = jnp.promote_types(score.dtype, jnp.float32)  # float64 under jax_enable_x64
    whole = jnp.iinfo(jnp.int64 if kind == jnp.float64 else jnp.int32)

    def flipped(bits: Int[Array, "L 1"]) -> Int[Array, "L 1"]:  # its own inverse
        return bits ^ ((bits >> (whole.bits - 1)) & whole.max)  # these integers have the order of the floats

    def to_bits(x: Float[Array, "L 1"]) -> Int[Array, "L 1"]:
        return flipped(jax.lax.bitcast_convert_type(x, whole.dtype))

    def to_score(bits: Int[Array, "L 1"]) -> Float[Array, "L 1"]:
        return jax.lax.bitcast_convert_type(flipped(bits), kind)

    def halve(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)  # their mean, rounded down, without an overflow
        fits = kept(to_score(middle))
        return jnp.where(fits, low, middle + 1), jnp.where(fits, middle, high)

    score = jax.lax.stop_gradient(score.astype(kind))
    low, high = (to_bits(f(score, axis=-1, keepdims=True)) for f in (jnp.min, jnp.max))
    bounds = low, jnp.where(every, low, high)
    return to_score(jax.lax.while_loop(lambda bounds: jnp.any(bounds[0] < bounds[1]), halve, bounds)[1])


@logits_processor(draws_only=True)
def top_k(logits: Logits, view: View, k: Count = 50) -> Logits:
    """Keeps the `k` most probable ids of each position; ties with the k-th stay.

    Args:
        logits: Of one row.
        view: Unused.
        k: Number of ids to keep.

    Returns:
        Logits that are NEVER at all other ids.
    """
    k = jnp.maximum(k, 1)

    def kept(least: Float[Array, "L 1"]) -> Bool[Array, "L 1"]:
        return jnp.sum(logits > least, axis=-1, keepdims=True) < k

    return jnp.where(logits >= lowest(logits, kept, k >= logits.shape[-1]), logits, NEVER)


@logits_processor(draws_only=True, source="nucleus sampling, arXiv 1904.09751")
def top_p(
    logits: Logits,
    view: View,
    p: Probability = 0.95,
    crossing: Annotated[Param, Between(0, 1, integer=True)] = 1,
) -> Logits:
    """Keeps the smallest set of ids whose total probability reaches `p`.

    Args:
        logits: Of one row.
        view: Unused.
        p: Total probability of the ids to keep; 1 keeps every id.
        crossing: Whether to keep the id whose probability makes the total reach `p`. 1: yes, as in transformers. 0: no,
            unless it is the most probable id, as in `nucleus_p` of MDLM, BD3-LM and ReMDM.

    Returns:
        Logits that are NEVER at all other ids.
    """
    mass = jax.nn.softmax(logits, axis=-1)
    most = mass.max(axis=-1, keepdims=True)

    def above(least: Float[Array, "L 1"]) -> Float[Array, "L 1"]:
        return jnp.sum(jnp.where(mass > least, mass, 0.0), axis=-1, keepdims=True)

    # Keep an id while the total of the more probable ones is below p, and always the first. At p = 1 keep all, since
    # the rounded total may reach 1 before the last id.
    every = jnp.asarray(p) >= 1
    least = lowest(mass, lambda least: (above(least) < p) | (least >= most), every)
    # Without the crossing id, only the least probable of these ids may be one too many.
    fits = every | (jnp.asarray(crossing) > 0) | (above(least) + least <= p)
    return jnp.where((mass > least) | ((mass == least) & fits) | (mass >= most), logits, NEVER)


@logits_processor(draws_only=True, source="arXiv 2407.01082")
def min_p(logits: Logits, view: View, p: Probability = 0.05) -> Logits:
    """Keeps the ids that are at least `p` times as probable as the most probable one.

    Args:
        logits: Of one row.
        view: Unused.
        p: Share of the largest probability.

    Returns:
        Logits that are NEVER at all other ids.
    """
    # p_i >= p * p_max, compared as logits: no softmax is needed.
    least = logits.max(axis=-1, keepdims=True) + jnp.log(jnp.clip(p, 1e-30, 1.0))
    return jnp.where(logits >= least, logits, NEVER)


@logits_processor(needs_logits=False, source="CTRL, arXiv 1909.05858, section 4.1")
def repetition(logits: Logits, view: View, p: Annotated[Param, Above(0)] = 1.0) -> Logits:
    """Divides positive logits by `p`, and multiplies negative ones, of ids in the prompt or the answer.

    Args:
        logits: Of one row.
        view: Reads `prompt_counts`, and the fields that `answer_counts` reads.
        p: Penalty; 1 changes nothing, larger values discourage repetition.

    Returns:
        The penalised logits.

    Departs from the paper, which divides all logits: here negative ones are multiplied, so that they decrease as well.
    The implementations in common use do the same.
    """
    p, size = jnp.maximum(p, 1e-6), logits.shape[-1]
    in_prompt = jax.lax.dynamic_slice_in_dim(view.prompt_counts, view.first_id, size) > 0
    seen = (answer_counts(view, size) > 0) | in_prompt
    return keep_forbidden(logits, jnp.where(seen, jnp.where(logits > 0, logits / p, logits * p), logits))


@logits_processor(needs_logits=False, source="presence_penalty of the OpenAI API")
def presence(logits: Logits, view: View, p: Annotated[Param, Finite()] = 0.0) -> Logits:
    """Subtracts `p` from every id that the answer holds.

    Args:
        logits: Of one row.
        view: Reads the fields that `answer_counts` reads.
        p: Penalty; negative values favour repetition.

    Returns:
        The penalised logits.
    """
    return keep_forbidden(logits, logits - p * (answer_counts(view, logits.shape[-1]) > 0))


@logits_processor(needs_logits=False, source="frequency_penalty of the OpenAI API")
def frequency(logits: Logits, view: View, p: Annotated[Param, Finite()] = 0.0) -> Logits:
    """Subtracts `p` for each time that the answer holds an id.

    Args:
        logits: Of one row.
        view: Reads the fields that `answer_counts` reads.
        p: Penalty per occurrence; negative values favour repetition.

    Returns:
        The penalised logits.
    """
    return keep_forbidden(logits, logits - p * answer_counts(view, logits.shape[-1]))


def answer_counts(view: View, size: int) -> Int[Array, "L v"]:
    """Counts how often each id occurs in the answer, as seen from each position of the window.

    These tokens count:

        before the window     all tokens of the answer, for every position
        masked noise          decided tokens of the window, for every position except their own
        uniform noise         no token is ever decided, so the tokens of the previous step's answer count, for the
                              positions after them; otherwise two equal neighbours would suppress each other in turn
        verifying (time 0)    tokens of the draft, for the positions after them, as in autoregressive decoding

    The end of text never counts: a run of end-of-text tokens would otherwise discourage the position before the run
    from ending the text.

    Args:
        view: View of one row. Reads `canvas`, `answer`, `editable`, `masked`, `noise`, `t`, `step`, `eos`,
            `output_counts` and `first_id`.
        size: Number of ids to count, from `view.first_id` on.

    Returns:
        Counts [L, size].
    """
    at = jnp.arange(view.canvas.shape[0], dtype=jnp.int32)
    i, j = at[:, None], at[None, :]  # position i counts the token at j
    decided = (view.editable & ~view.masked) & jnp.where(view.t > 0, i != j, j < i)
    # `redrawn` detects uniform noise: under masked noise every open position equals `view.noise`, the mask. A uniform
    # canvas of n open positions equals its fresh noise with probability V^-n; then one step misses its counts.
    redrawn = jnp.any(view.masked & (view.canvas != view.noise)) & (view.step > 0)
    # counted [L, L]: whether position i counts the token at j.
    counted = jnp.where(view.masked, redrawn & (j < i), decided)
    token = jnp.where(view.masked, view.answer, view.canvas)
    counted &= token != view.eos
    counts = jax.lax.dynamic_slice_in_dim(view.output_counts, view.first_id, size)
    counts = jnp.broadcast_to(counts, (at.shape[0], size))
    # A scatter of L x L ones is cheaper than one-hot rows [L, V] and their sums.
    column = columns_of(token, view.first_id, size)
    return counts.at[i, column[None, :]].add(counted.astype(counts.dtype), mode="drop")


def bias(table: Biases | Sequence[Biases | None]) -> LogitsProcessor:
    """Makes a processor that adds a number to the logits of some ids.

    This is OpenAI's `logit_bias`, without its limits of -100 and 100.

    Args:
        table: {id: value} for all rows, or a list with one such table (or None) per row.

    Returns:
        The processor.

    Raises:
        ValueError: An entry is not an id with a finite number.
    """
    rows, shared = _tables("logit_bias", table)
    for row in rows:
        for id, value in row.items():
            check_whole("logit_bias id", id, 0, MOST_ID)
            number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
            if not number or not abs(value) <= np.finfo(np.float32).max:
                raise refuse(f"logit_bias[{id}]", value, "a finite number")
    ids = _packed([list(row) for row in rows], np.int32, shared)
    values = _packed([list(row.values()) for row in rows], np.float32, shared)
    return LogitsProcessor(_add_bias, {"ids": ids, "values": values}, "bias", needs_logits=False)


def ban(ids: Ids | Sequence[Ids | None], before: int | None = None) -> LogitsProcessor:
    """Makes a processor that forbids ids.

    Args:
        ids: A list of ids for all rows, or a list with one such list (or None) per row.
        before: Forbid them only at positions below this one; position 0 is the first one after the prompt. Default: at
            every position.

    Returns:
        The processor.

    Raises:
        ValueError: An entry is not an id.
    """
    allowed = "a list of ids, or a list with such a list or None for each row"
    if not _is_list(ids):
        raise refuse("ban", ids, allowed)
    shared = not any(x is None or _is_list(x) for x in ids)
    rows: list[Any] = [ids] if shared else [() if x is None else x for x in ids]
    for row in rows:
        if not _is_list(row):
            raise refuse("ban", row, allowed)
    checked = [[check_whole("ban id", x, 0, MOST_ID) for x in row] for row in rows]
    packed = _packed(checked, np.int32, shared)
    until = {} if before is None else {"before": check_whole("ban(before=)", before, 0, MOST_ID)}
    return LogitsProcessor(_forbid, {"ids": packed, **until}, "ban", needs_logits=False)


def allow(table: Mapping[int, Ids] | Sequence[Mapping[int, Ids] | None]) -> LogitsProcessor:
    """Makes a processor that allows only the given ids at the given positions.

    Args:
        table: {position: ids} for all rows, or a list with one such table (or None) per row. Position 0 is the first
            one after the prompt. Positions that are not in the table are free.

    Returns:
        The processor, for `Sampler(allow=)`.

    Raises:
        ValueError: An entry is not a position with at least one id.
    """
    tables, shared = _tables("allow", table)
    rows: list[list[tuple[int, int]]] = []
    for one in tables:
        pairs = []
        for at, ids in one.items():
            position = check_whole("allow position", at, 0, MOST_ID)
            if not _is_list(ids) or len(ids) == 0:
                raise refuse(f"allow[{position}]", ids, "a list of at least one id")
            pairs += [(position, check_whole(f"allow[{position}] id", id, 0, MOST_ID)) for id in ids]
        rows.append(pairs)
    positions = _packed([[at for at, _ in row] for row in rows], np.int32, shared)
    ids = _packed([[id for _, id in row] for row in rows], np.int32, shared)
    return LogitsProcessor(_allow, {"positions": positions, "ids": ids}, "allow", needs_logits=False)


def allow_bits(bits: np.ndarray | jax.Array, start: Any = 0) -> LogitsProcessor:
    """Makes a processor that allows only the ids whose bits are set, at a range of positions: a grammar mask.

    Args:
        bits: uint32 [P, words] for all rows, or [rows, P, words]. Bit v % 32 of word v // 32 says whether id v is
            allowed at position `start` + p. Positions outside of the range are free.
        start: Position of the first mask; one number, or one per row. -1: the first open position, in every pass.

    Returns:
        The processor, for `Sampler(allow=)`.

    Raises:
        ValueError: `bits` has another shape or dtype, or `start` is not a whole number.
    """
    shape, kind = np.shape(bits), getattr(bits, "dtype", None)
    if len(shape) not in (2, 3) or kind not in (np.uint32, np.int32) or 0 in shape:
        raise refuse("allow_bits bits", (shape, str(kind)), "uint32 [P, words], or [rows, P, words]")
    if not np.issubdtype(getattr(start, "dtype", type(start)), np.integer) or np.ndim(start) > 1:
        raise refuse("allow_bits start", start, "a whole number, or one per row")
    start = check_number("allow_bits(start=)", start, AtLeast(-1, integer=True))
    words = jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.uint32)
    params = {"bits": Static(words) if len(shape) == 2 else words, "start": start}
    return LogitsProcessor(_allow_bits, params, "allow_bits", needs_logits=False)


def check_ids(processor: LogitsProcessor, vocab: int) -> None:
    """Checks that the tables of a processor of this module contain only ids of the vocabulary.

    Args:
        processor: Any processor; processors of other modules pass.
        vocab: V, the size of the vocabulary.

    Raises:
        ValueError: An id is not below V, or a grammar mask has the wrong number of words.
    """
    names = {_add_bias: "logit_bias", _forbid: "ban", _allow: "allow", _allow_bits: "allow_bits"}
    name = names.get(processor.function)
    if name is None:
        return
    params = {k: v.value if isinstance(v, Static) else v for k, v in processor.params.items()}
    if "bits" in params:
        words, found = -(-vocab // 32), params["bits"].shape[-1]
        if found != words:
            raise refuse(f"{name} words", found, f"{words}, one bit for each of {vocab} ids")
    elif not isinstance(params["ids"], Tracer):
        ids = np.asarray(params["ids"])
        if ids.max() >= vocab:
            raise refuse(name, int(ids[ids >= vocab][0]), f"ids in 0..{vocab - 1}")


def _add_bias(logits: Logits, view: View, *, ids: Int[Array, "n"], values: Array) -> Logits:
    column = columns_of(ids, view.first_id, logits.shape[-1])
    return keep_forbidden(logits, logits.at[:, column].add(jnp.asarray(values, logits.dtype), mode="drop"))


def _forbid(
    logits: Logits, view: View, *, ids: Int[Array, "n"], before: int | Int[Array, ""] = MOST_ID
) -> Logits:
    banned = logits.at[:, columns_of(ids, view.first_id, logits.shape[-1])].set(NEVER, mode="drop")
    early = view.position + jnp.arange(len(logits), dtype=jnp.int32) < before
    return jnp.where(early[:, None], banned, logits)


def _allow(logits: Logits, view: View, *, positions: Int[Array, "n"], ids: Int[Array, "n"]) -> Logits:
    length, size = logits.shape
    row = jnp.asarray(positions) - view.position
    # A negative index would count from the end: pairs outside of the window go past its end and are dropped.
    row = jnp.where((jnp.asarray(ids) >= 0) & (row >= 0), row, length)
    column = columns_of(jnp.asarray(ids), view.first_id, size)
    allowed = jnp.zeros((length, size), bool).at[row, column].set(True, mode="drop")
    constrained = jnp.zeros((length,), bool).at[row].set(True, mode="drop")
    return jnp.where(allowed | ~constrained[:, None], logits, NEVER)


def _allow_bits(
    logits: Logits, view: View, *, bits: UInt[Array, "P words"], start: Int[Array, ""] | int
) -> Logits:
    length, size = logits.shape
    words = jnp.asarray(bits)
    opened = view.position + jnp.argmax(view.editable).astype(jnp.int32)
    start = jnp.where(jnp.asarray(start) < 0, opened, start)
    at = view.position + jnp.arange(length, dtype=jnp.int32) - start
    constrained = (at >= 0) & (at < words.shape[0])
    mask = words[jnp.clip(at, 0, words.shape[0] - 1)]  # [L, words]
    # Cut out the words that hold the columns of this chunk, unpack their bits, and cut out the columns: a chunk may
    # begin in the middle of a word.
    count = min(words.shape[1], size // 32 + 2)
    word = jnp.minimum(view.first_id // 32, words.shape[1] - count)
    mask = jax.lax.dynamic_slice_in_dim(mask, word, count, axis=1)
    each = (mask[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1  # [L, count, 32]
    allowed = each.reshape(length, -1).astype(bool)
    allowed = jax.lax.dynamic_slice_in_dim(allowed, view.first_id - 32 * word, size, axis=1)
    return jnp.where(allowed | ~constrained[:, None], logits, NEVER)


def _packed(rows: Sequence[Sequence[Any]], dtype: Any, shared: bool) -> Any:
    """Packs lists into one array [rows, n], padded with -1 to a power of two; if shared, into a `Static` [n]."""
    size = 1 << max(max(len(r) for r in rows) - 1, 0).bit_length()
    full = np.full((len(rows), size), -1, dtype)
    for row, values in zip(full, rows, strict=True):
        row[: len(values)] = values
    return Static(jnp.asarray(full[0])) if shared else jnp.asarray(full)


def _tables(name: str, table: Any) -> tuple[list[Mapping[Any, Any]], bool]:
    """Returns one mapping per row, and whether a single one was given for all rows."""
    if isinstance(table, Mapping):
        return [table], True
    if not isinstance(table, Sequence) or isinstance(table, str | bytes) or not table:
        raise refuse(name, table, "a mapping, or a non-empty list with a mapping or None for each row")
    for i, one in enumerate(table):
        if one is not None and not isinstance(one, Mapping):
            raise refuse(f"{name}[{i}]", one, "a mapping, or None")
    return [one or {} for one in table], False


def _is_list(x: Any) -> bool:
    listed = isinstance(x, Sequence | Set) and not isinstance(x, str | bytes)
    return listed or (isinstance(x, np.ndarray) and x.ndim > 0)


def __getattr__(name: str) -> Any:
    if name in PROCESSORS:
        return PROCESSORS[name]
    raise no_such_part("logits processor", name, __dir__())


def __dir__() -> list[str]:
    return sorted(["ALL", "allow", "allow_bits", "ban", "before_confidence", "bias", *PROCESSORS])
