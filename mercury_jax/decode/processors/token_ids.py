"""Logits processors that take tables of ids: bias, ban, and hard constraints by position.

Tables become arrays that are padded to a power of two, so that another table of a similar size recompiles nothing; a
grammar writes new bits between two passes. A hard constraint belongs into `Sampler(allow=)`, whose processors run last.
Position 0 is the first one behind the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Int, UInt

from mercury_jax.config import refuse
from mercury_jax.decode.processors.logits import columns_of, keep_forbidden
from mercury_jax.decode.ranges import AtLeast, check_number
from mercury_jax.decode.sampler import Logits, LogitsProcessor, Static
from mercury_jax.decode.token_stats import NEVER
from mercury_jax.types import View

Ids: TypeAlias = Sequence[int] | np.ndarray
Biases: TypeAlias = Mapping[int, float]


def bias(table: Biases | Sequence[Biases | None]) -> LogitsProcessor:
    """Adds a number to the logits of some ids (OpenAI's `logit_bias`, without its limits of -100 and 100).

    Args:
        table: {id: value} for all rows, or a list with one such table (or None) per row.

    Returns:
        The processor.

    Raises:
        ValueError: Names the entry that is not an id with a finite number.
    """
    rows, shared = _tables("logit_bias", table)
    for row in rows:
        for id, value in row.items():
            _check_id("logit_bias id", id)
            number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
            if not number or not abs(value) <= np.finfo(np.float32).max:
                raise refuse(f"logit_bias[{id}]", value, "a finite number")
    ids = _packed([list(row) for row in rows], np.int32, shared)
    values = _packed([list(row.values()) for row in rows], np.float32, shared)
    return LogitsProcessor(_add_bias, {"ids": ids, "values": values}, "bias", needs_logits=False)


def ban(ids: Ids | Sequence[Ids | None]) -> LogitsProcessor:
    """Forbids ids at every position.

    Args:
        ids: A list of ids for all rows, or a list with one such list (or None) per row.

    Returns:
        The processor.

    Raises:
        ValueError: Names the entry that is not an id.
    """
    allowed = "a list of ids, or a list with such a list or None for each row"
    if not _is_list(ids):
        raise refuse("ban", ids, allowed)
    shared = not any(x is None or _is_list(x) for x in ids)
    rows: list[Any] = [ids] if shared else [() if x is None else x for x in ids]
    for row in rows:
        if not _is_list(row):
            raise refuse("ban", row, allowed)
    checked = [[_check_id("ban id", x) for x in row] for row in rows]
    packed = _packed(checked, np.int32, shared)
    return LogitsProcessor(_forbid, {"ids": packed}, "ban", needs_logits=False)


def allow(table: Mapping[int, Ids] | Sequence[Mapping[int, Ids] | None]) -> LogitsProcessor:
    """Allows only the given ids at the given positions.

    Args:
        table: {position: ids} for all rows, or a list with one such table (or None) per row. Positions that are not
            named are free.

    Returns:
        The processor, for `Sampler(allow=)`.

    Raises:
        ValueError: Names the entry that is not a position with at least one id.
    """
    tables, shared = _tables("allow", table)
    rows: list[list[tuple[int, int]]] = []
    for one in tables:
        pairs = []
        for at, ids in one.items():
            position = _check_id("allow position", at)
            if not _is_list(ids) or len(ids) == 0:
                raise refuse(f"allow[{position}]", ids, "a list of at least one id")
            pairs += [(position, _check_id(f"allow[{position}] id", id)) for id in ids]
        rows.append(pairs)
    positions = _packed([[at for at, _ in row] for row in rows], np.int32, shared)
    ids = _packed([[id for _, id in row] for row in rows], np.int32, shared)
    return LogitsProcessor(_allow, {"positions": positions, "ids": ids}, "allow", needs_logits=False)


def allow_bits(bits: np.ndarray | jax.Array, start: Any = 0) -> LogitsProcessor:
    """Allows only the ids whose bits are set, at a range of positions: the form of a grammar mask.

    Args:
        bits: uint32 [P, words] for all rows or [rows, P, words]: bit v % 32 of word v // 32 says whether the id v is
            allowed at position `start` + p. Other positions are free.
        start: Position of the first mask; one number, or one per row.

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
    start = check_number("allow_bits(start=)", start, AtLeast(0, integer=True))
    words = jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.uint32)
    params = {"bits": Static(words) if len(shape) == 2 else words, "start": start}
    return LogitsProcessor(_allow_bits, params, "allow_bits", needs_logits=False)


def check_ids(processor: LogitsProcessor, vocab: int) -> None:
    """Checks that a processor made by this module names only ids of the vocabulary.

    Args:
        processor: Any processor; those of other modules pass.
        vocab: V.

    Raises:
        ValueError: Names the id, or the number of words, that does not fit.
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


def _forbid(logits: Logits, view: View, *, ids: Int[Array, "n"]) -> Logits:
    return logits.at[:, columns_of(ids, view.first_id, logits.shape[-1])].set(NEVER, mode="drop")


def _allow(logits: Logits, view: View, *, positions: Int[Array, "n"], ids: Int[Array, "n"]) -> Logits:
    length, size = logits.shape
    row = jnp.asarray(positions) - view.position
    # A negative index would count from the end: pairs outside of the window go past its end and are dropped.
    row = jnp.where((jnp.asarray(ids) >= 0) & (row >= 0), row, length)
    column = columns_of(jnp.asarray(ids), view.first_id, size)
    allowed = jnp.zeros((length, size), bool).at[row, column].set(True, mode="drop")
    constrained = jnp.zeros((length,), bool).at[row].set(True, mode="drop")
    return _keep_only(logits, allowed, constrained)


def _allow_bits(
    logits: Logits, view: View, *, bits: UInt[Array, "P words"], start: Int[Array, ""] | int
) -> Logits:
    length, size = logits.shape
    words = jnp.asarray(bits)
    at = view.position + jnp.arange(length, dtype=jnp.int32) - start
    constrained = (at >= 0) & (at < words.shape[0])
    mask = words[jnp.clip(at, 0, words.shape[0] - 1)]  # [L, words]
    # The words that hold this chunk's columns, then their bits; a chunk may begin within a word.
    count = min(words.shape[1], size // 32 + 2)
    word = jnp.minimum(view.first_id // 32, words.shape[1] - count)
    mask = jax.lax.dynamic_slice_in_dim(mask, word, count, axis=1)
    each = (mask[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1  # [L, count, 32]
    allowed = each.reshape(length, -1).astype(bool)
    allowed = jax.lax.dynamic_slice_in_dim(allowed, view.first_id - 32 * word, size, axis=1)
    return _keep_only(logits, allowed, constrained)


def _keep_only(logits: Logits, allowed: Bool[Array, "L v"], constrained: Bool[Array, "L"]) -> Logits:
    return jnp.where(allowed | ~constrained[:, None], logits, NEVER)


def _packed(rows: Sequence[Sequence[Any]], dtype: Any, shared: bool) -> Any:
    """Packs lists into one array [rows, n], padded with -1 to a power of two; one Static [n] where shared."""
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


def _check_id(name: str, value: Any) -> int:
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool | np.bool_)
    if not whole or not 0 <= value < 2**31:
        raise refuse(name, value, "whole numbers in 0..2**31 - 1")
    return int(value)
