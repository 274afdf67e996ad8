"""Hard constraints: which ids may stand at which position of the answer.

Position 0 is the first behind the prompt. A constraint belongs into `Sampler(allow=)`, which runs
last. Both forms are data: another table compiles nothing new while its padded shape is the same, so
that a grammar may write new bits between two passes.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from mercury_jax.config import refuse
from mercury_jax.decode.parts import Knob, Part, Whole, shaper
from mercury_jax.decode.ranges import AtLeast
from mercury_jax.decode.read import NEVER
from mercury_jax.decode.shape.scale import Logits
from mercury_jax.decode.shape.tables import listed, packed, tables, targets, whole
from mercury_jax.types import View


def allow(table: Any) -> Part:
    """Only these ids at these positions: {position: ids} for all rows, or a list of these, one a row.

    Positions that are not named are free, and so is a row that is None or {}. A position without
    any id is refused: nothing could stand there.
    """
    rows, alone = tables("allow", table)
    pairs = [[pair for at, ids in row.items() for pair in _pairs(at, ids)] for row in rows]
    positions = packed([[at for at, _ in row] for row in pairs], np.int32, alone)
    ids = packed([[id for _, id in row] for row in pairs], np.int32, alone)
    return dataclasses.replace(_allow(positions=positions, ids=ids), name="allow")


def allow_bits(bits: Any, start: Any = 0) -> Part:
    """Only ids whose bit is set: uint32 [P, words] for all rows, or [rows, P, words], words = ceil(V / 32).

    Row p of the bits rules position start + p of the answer, bit v % 32 of word v // 32 the id v (the
    layout of llguidance and XGrammar, whose int32 words are taken as they are). Positions outside
    of start..start + P are free; one inside is free where all its bits are set. start: a whole
    number, or one a row.
    """
    shape, kind = getattr(bits, "shape", ()), getattr(bits, "dtype", None)
    if len(shape) not in (2, 3) or kind not in (np.uint32, np.int32) or 0 in shape:
        raise refuse("allow_bits bits", (shape, str(kind)), "uint32 [P, words], or [rows, P, words]")
    if not np.issubdtype(getattr(start, "dtype", type(start)), np.integer) or np.ndim(start) > 1:
        raise refuse("allow_bits start", start, "a whole number, or one a row")
    words = jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.uint32)
    part = _allow_bits(bits=Whole(words) if len(shape) == 2 else words, start=start)
    return dataclasses.replace(part, name="allow_bits")


def _pairs(at: Any, ids: Any) -> list[tuple[int, int]]:
    position = whole("allow position", at)
    if not listed(ids) or len(ids) == 0:
        raise refuse(f"allow[{position}]", ids, "a list of at least one id")
    return [(position, whole(f"allow[{position}] id", id)) for id in ids]


@shaper(whole=False)
def _allow(logits: Logits, view: View, *, positions: Knob, ids: Knob) -> Logits:
    length, vocab = logits.shape
    row = jnp.asarray(positions) - view.at
    # A negative index would count from the end: what is not in the window goes past it, and is dropped.
    row = jnp.where((jnp.asarray(ids) >= 0) & (row >= 0), row, length)
    may = jnp.zeros((length, vocab), bool).at[row, targets(ids, view.first, vocab)].set(True, mode="drop")
    ruled = jnp.zeros((length,), bool).at[row].set(True, mode="drop")
    return _only(logits, may | ~ruled[:, None])


@shaper(whole=False)
def _allow_bits(
    logits: Logits, view: View, *, bits: Knob, start: Annotated[Knob, AtLeast(0, whole=True)]
) -> Logits:
    length, vocab = logits.shape
    words = jnp.asarray(bits)
    at = view.at + jnp.arange(length, dtype=jnp.int32) - start
    ruled = (at >= 0) & (at < words.shape[0])
    mine = words[jnp.clip(at, 0, words.shape[0] - 1)]
    # The words that hold these columns, then their bits; a part may begin within a word.
    few = min(words.shape[1], vocab // 32 + 2)
    word = jnp.minimum(view.first // 32, words.shape[1] - few)
    mine = jax.lax.dynamic_slice_in_dim(mine, word, few, axis=1)
    one = (mine[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    may = one.reshape(length, -1).astype(bool)
    may = jax.lax.dynamic_slice_in_dim(may, view.first - 32 * word, vocab, axis=1)
    return _only(logits, may | ~ruled[:, None])


def _only(logits: Logits, may: Bool[Array, "L V"]) -> Logits:
    return jnp.where(may, logits, NEVER)
