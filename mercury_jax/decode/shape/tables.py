"""Tables of ids as knobs: padded, so that few shapes compile, and checked in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from mercury_jax.config import refuse
from mercury_jax.decode.parts import Part, Whole

NAMES = {
    "bias": "logit_bias",
    "ban": "ban",
    "allow": "allow",
    "allow_bits": "allow_bits",
}  # as users know them


def packed(rows: Sequence[Sequence[Any]], dtype: Any, alone: bool) -> Any:
    """Lists as one array [rows, K], padded with -1 to a power of two; alone: the same for every row."""
    size = 1 << max(max(len(r) for r in rows) - 1, 0).bit_length()
    full = np.full((len(rows), size), -1, dtype)
    for row, values in zip(full, rows, strict=True):
        row[: len(values)] = values
    return Whole(jnp.asarray(full[0])) if alone else jnp.asarray(full)


def tables(name: str, table: Any) -> tuple[list[Mapping[Any, Any]], bool]:
    """(one mapping a row, whether one was given for all rows)."""
    if isinstance(table, Mapping):
        return [table], True
    if not isinstance(table, Sequence) or isinstance(table, str | bytes) or not table:
        raise refuse(name, table, "a mapping, or a non-empty list with a mapping or None for each row")
    for i, one in enumerate(table):
        if one is not None and not isinstance(one, Mapping):
            raise refuse(f"{name}[{i}]", one, "a mapping, or None")
    return [one or {} for one in table], False


def listed(x: Any) -> bool:
    """Whether `x` is a list of something: no text, and no number."""
    some = isinstance(x, Sequence | Set) and not isinstance(x, str | bytes)
    return some or (isinstance(x, np.ndarray) and x.ndim > 0)


def whole(name: str, value: Any) -> int:
    """A whole number from 0 on that fits an id."""
    if (
        isinstance(value, bool | np.bool_)
        or not isinstance(value, int | np.integer)
        or not 0 <= value < 2**31
    ):
        raise refuse(name, value, "whole numbers in 0..2**31 - 1")
    return int(value)


def targets(ids: Any, first: Any, size: int) -> Any:
    """Columns of ids among `size` columns from the id `first` on; padding and others go past the end, to be dropped."""
    column = ids - first
    return jnp.where((ids < 0) | (column < 0), size, column)


def check_ids(part: Part, vocab: int) -> None:
    """Refuse a `bias`, `ban` or `allow` that names an id which the vocabulary does not have."""
    if part.name not in NAMES:
        return
    held = {k: v.value if isinstance(v, Whole) else v for k, v in part.knobs.items()}
    name = NAMES[part.name]
    if "bits" in held:
        words = -(-vocab // 32)
        if held["bits"].shape[-1] != words:
            raise refuse(f"{name} words", held["bits"].shape[-1], f"{words}, one bit for each of {vocab} ids")
    elif not isinstance(held["ids"], Tracer):
        ids = np.asarray(held["ids"])
        if ids.max() >= vocab:
            raise refuse(name, int(ids[ids >= vocab][0]), f"ids in 0..{vocab - 1}")
